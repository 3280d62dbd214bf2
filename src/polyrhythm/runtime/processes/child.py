"""Where a station's process starts: `python -m polyrhythm.runtime.processes.child`, its posting on standard input.

The main thread sends heartbeats and watches the parts; each part works in a thread of its own. SIGINT, SIGTERM and
SIGHUP are main's affair and ignored here. The process dies with its parent, whatever ended that.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from polyrhythm.errors import PolyrhythmError
from polyrhythm.runtime.factories import Resources, StationContext, unpack
from polyrhythm.runtime.memory.allocator import keep_freed_memory
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.messages import Channels, Reply, Report, Spans
from polyrhythm.runtime.processes.station_thread import StationThread
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import Outbox, Sockets, Transport
from polyrhythm.scheduler import records
from polyrhythm.specs import WeightsLayout

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.weights import Weights

log = logging.getLogger(__name__)

_BEAT_S = 0.5
_LINGER_S = 2.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """All that a station's process is told. kind, content: the packed job; main: the endpoint of main's inbox; keys: of
    the run, where its sockets ask for them."""

    station: str
    incarnation: int
    kind: str
    content: bytes
    seat: Resources
    layout: ArenaLayout
    weights: WeightsLayout
    folder: str
    main: str
    transport: Transport
    keys: RunKeys | None
    parent: int


class StationProcess:
    """One station's process: its parts, and its lines to main and to the slots."""

    def __init__(self, posting: ChildSpec) -> None:
        self._posting = posting
        self._drops = DropCounter(posting.station)
        largest = wire.largest_message(posting.layout)
        self._sockets = Sockets(posting.transport, posting.folder, posting.keys, self._drops.stranger, largest)
        self._main = self._sockets.outbox(posting.main)
        self._slots: dict[str, Outbox] = {}
        self._news, self._telling = threading.Event(), threading.Lock()
        self._parts: list[StationThread] = []

    def _open(self) -> list[StationThread]:
        """The parts of the job, in the memory that the run shares."""
        posting = self._posting
        folder = Path(posting.folder)
        arena = Arena(posting.layout, memoryview(open_segment(folder, "arena")))
        links = Channels(self._emit, self._reply, self._report)
        host = StationContext(arena, lambda: self._open_weights(folder), links, posting.seat.device, overlap=True)
        job = unpack(posting.kind, posting.content)
        return [
            StationThread(
                address,
                make,
                self._sockets,
                self._drops,
                posting.layout,
                self._connect,
                self._beat,
                self._news,
            )
            for address, make in job.parts(host, posting.incarnation)
        ]

    def _open_weights(self, folder: Path) -> Weights:
        """This process's end of the weights channel. ValueError: the layout is damaged."""
        from polyrhythm.runtime.memory.weights import SharedWeights  # torch, which simulators do not need

        self._posting.weights.verify()
        return SharedWeights(self._posting.weights, memoryview(open_segment(folder, "weights")), folder)

    def run(self) -> int:
        """Work until told to stop, or until a part fails; the exit status.

        Consumes: nothing itself. Waits for: news of a part. Unblocked by: some, or `_BEAT_S`. Produces: heartbeats, a
        greeting, and last words.
        """
        try:
            self._parts = self._open()
        except Exception as error:  # noqa: BLE001 - main is told
            return self._leave(error)
        for part in self._parts:
            part.start()
        greeted = False
        while not all(part.over.is_set() for part in self._parts):
            if self._failed() is not None or os.getppid() != self._posting.parent:
                break
            if not greeted and all(part.ready.is_set() and part.error is None for part in self._parts):
                self._greet()
                greeted = True
            self._beat()
            self._news.wait(_BEAT_S)
            self._news.clear()
        return self._leave(self._failed())

    def _failed(self) -> BaseException | None:
        """What ended a part, if anything did."""
        return next((part.error for part in self._parts if part.error is not None), None)

    def _leave(self, error: BaseException | None) -> int:
        posting = self._posting
        if error is not None:
            log.error("%s ends", posting.station, exc_info=error)
            fatal = isinstance(error, PolyrhythmError | ImportError)
            said = str(error) if isinstance(error, PolyrhythmError) else f"{type(error).__name__}: {error}"
            self._send(wire.Failed(posting.station, posting.incarnation, said, fatal))
        else:
            self._beat()
        self._main.close(_LINGER_S)
        for outbox in self._slots.values():
            outbox.close()
        if all(part.over.is_set() for part in self._parts):
            self._sockets.close(unsent=True)
        else:
            time.sleep(_LINGER_S / 10)  # a part hangs, so the last words get a moment instead of a confirmation
        return 1 if error is not None else 0

    def _greet(self) -> None:
        posting = self._posting
        inboxes = {part.address: part.endpoint for part in self._parts}
        joined = wire.encode(records.merge_joined([part.joined() for part in self._parts]))
        self._send(wire.Hello(posting.station, posting.incarnation, inboxes, joined))

    def _beat(self) -> None:
        """Say that it lives, and what the part that has been busy longest is doing; before that, what it has done."""
        self._tell_spans()
        posting, now = self._posting, time.monotonic()
        stations = [part.station for part in self._parts if part.station is not None]
        under_way = [work for station in stations if (work := station.doing())[0]]
        doing, since = min(under_way, key=lambda work: work[1], default=("", now))
        counts: dict[str, float] = {}
        for station in stations:
            for name, count in station.statistics().items():
                counts[name] = counts.get(name, 0) + count
        counts["busy_s"] = sum(part.busy_s for part in self._parts) / len(self._parts)
        counts |= self._drops.statistics()
        waiting = tuple(line for station in stations for line in station.outstanding())
        units = sum(part.units for part in self._parts)
        self._send(wire.Heartbeat(posting.station, posting.incarnation, doing, now - since, units, waiting, counts))

    def _tell_spans(self) -> None:
        with self._telling:  # a part beats too when it is asked, and spans are to come in order
            for part in self._parts:
                spans, lost = part.spans.take()
                if spans or lost:
                    self._send(Spans(self._posting.station, self._posting.incarnation, tuple(spans), lost))

    # ------------------------------------------------------------ what the parts say

    def _send(self, message: wire.Message) -> None:
        self._main.send(wire.encode(message))

    def _emit(self, event: records.Event) -> None:
        self._main.send(wire.encode(event))

    def _report(self, report: Report) -> None:
        self._main.send(wire.encode(report))

    def _reply(self, reply: Reply) -> None:
        outbox = self._slots.get(reply.reply_to)
        if outbox is None:
            log.warning("an answer for %s, which is gone, is dropped", reply.slot)
            return
        outbox.send(wire.encode_reply(reply))

    def _connect(self, message: wire.Connect) -> None:
        if message.endpoint and not self._sockets.could_be(message.endpoint):
            raise UnfitMessage("impossible", f"no slot of this run is at {message.endpoint!r}")
        old = self._slots.pop(message.address, None)
        if old is not None:
            old.close()
        if message.endpoint:
            self._slots[message.address] = self._sockets.outbox(message.endpoint)


def _die_with(parent: int) -> None:
    """Be killed when the parent's process ends, however it ends (Linux; elsewhere `run` notices it)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Read the posting and do the job."""
    posting = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ChildSpec)
    _die_with(posting.parent)
    keep_freed_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    status = StationProcess(posting).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that hang in a simulator, and a simulator's own exit handlers, must not keep the process.
    os._exit(status)


if __name__ == "__main__":
    main()
