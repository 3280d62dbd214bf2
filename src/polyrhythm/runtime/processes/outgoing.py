"""Outgoing messages of a station's process: events and reports to main, replies to the parts that asked.

Messages of a part's thread leave at the end of its unit of work, in one frame to each process; those of other threads
leave at once. Each thread's messages arrive in its order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from polyrhythm.runtime.messages import FromWorker, Reply, Report, split_address
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Outbox, Sockets
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)


class Outgoing:
    """The outboxes of a process: one to main, one to each process that asks for replies. main: its endpoint."""

    def __init__(self, sockets: Sockets, main: str) -> None:
        self._sockets, self._main = sockets, sockets.outbox(main)
        self._processes: dict[str, Outbox] = {}
        self._collected: dict[int, list[tuple[int, bytes]]] = {}

    def send(self, message: wire.Message) -> None:
        """To main, now."""
        self._main.send(wire.encode(message))

    def begin_frame(self) -> None:
        """Collect from now on what this thread says to main, until it calls `flush`."""
        self._collected[threading.get_ident()] = []

    def send_event(self, message: records.Event | FromWorker | Report) -> None:
        """To main: now, or with all else that this thread says in its unit of work."""
        content = wire.encode(message)
        collected = self._collected.get(threading.get_ident())
        if collected is None:
            self._main.send(content)
        else:
            collected.append((0, content))

    def flush(self) -> None:
        """Send the messages of this thread that wait."""
        collected = self._collected[threading.get_ident()]
        if collected:
            self._main.send(wire.frame(collected))
            collected.clear()

    def reply(self, replies: Sequence[Reply]) -> None:
        """Send replies now, those to one process together."""
        frames: dict[str, list[tuple[int, bytes]]] = {}
        for reply in replies:
            process, part = split_address(reply.reply_to)
            if part < 0 or process not in self._processes:
                log.warning("a reply to %s is dropped: %s has ended", reply.slot, reply.reply_to)
            else:
                frames.setdefault(process, []).append((part, wire.encode_reply(reply)))
        for process, messages in frames.items():
            self._processes[process].send(wire.frame(messages))

    def connect(self, message: wire.Connect) -> None:
        """Replies to a process go elsewhere, or nowhere. UnfitMessage: there can be no process of this run."""
        if message.endpoint and not self._sockets.could_be(message.endpoint):
            raise UnfitMessage("impossible", f"no process of this run is at {message.endpoint!r}")
        old = self._processes.pop(message.address, None)
        if old is not None:
            old.close()
        if message.endpoint:
            self._processes[message.address] = self._sockets.outbox(message.endpoint)

    def close(self, linger_s: float) -> None:
        """Close all; what main has not got within `linger_s` is lost."""
        self._main.close(linger_s)
        for outbox in self._processes.values():
            outbox.close()
