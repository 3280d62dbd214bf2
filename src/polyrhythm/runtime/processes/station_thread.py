"""One part of a station at work in its thread, and the messages of a station's process.

A process has one inbox. Its only part reads the inbox itself, so that no other thread has to wake up first; where there
are more parts, one thread reads the inbox and hands each part its messages. Messages of a part's thread leave at the
end of its unit of work, in one frame to each process; those of other threads leave at once. Each thread's messages
arrive in its order.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from polyrhythm.conformance import own_call
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import (
    ORDERS,
    Departed,
    FromWorker,
    Reply,
    Report,
    Station,
    StationTraits,
    StopWork,
    Unobeyable,
    split_address,
)
from polyrhythm.runtime.spans import SpanLog
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import Inbox, Outbox, Sockets, SocketsClosed, wait_for
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


#: Longest wait of the reading thread; nothing depends on it.
_READ_S = 60.0


class FrameReader:
    """Takes the frames of an inbox apart. parts: of this process; what is for another one is dropped and counted."""

    def __init__(self, inbox: Inbox, drops: DropCounter, largest: int, parts: int) -> None:
        self.inbox = inbox
        self._drops, self._largest, self._parts = drops, largest, parts

    def messages(self, content: bytes) -> Iterable[tuple[int, wire.Content]]:
        try:
            found = wire.unframe(content, self._largest)
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))
            return
        for part, message in found:
            if 0 <= part < self._parts:
                yield part, message
            else:
                self._drops.drop("misdirected", f"a message for part {part} of {self._parts}")


class OwnInbox:
    """The inbox of a process with one part, which reads it: a `PartInbox`."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self._waiting: deque[wire.Content] = deque()

    def receive(self, seconds: float = 0.0, or_ready: Any = None) -> wire.Content | None:
        while not self._waiting:
            if or_ready is not None and seconds > 0:
                wait_for([self._reader.inbox.socket, or_ready], seconds)
                seconds = 0.0
            content = self._reader.inbox.receive(seconds)
            if content is None:
                return None
            self._waiting.extend(message for _, message in self._reader.messages(content))
        return self._waiting.popleft()

    def close(self) -> None:
        self._reader.inbox.close()


class PartQueue:
    """The messages for one of several parts: a `PartInbox`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[wire.Content] = SimpleQueue()
        self._filled = -1  # event descriptor, once somebody waits for a message or something else
        self._open = threading.Lock()

    def put(self, content: wire.Content) -> None:
        self._queue.put(content)
        with self._open:
            if self._filled >= 0:
                os.eventfd_write(self._filled, 1)

    def receive(self, seconds: float = 0.0, or_ready: Any = None) -> wire.Content | None:
        if seconds > 0 and or_ready is not None:
            self._wait(seconds, or_ready)
            seconds = 0.0
        if seconds <= 0 and self._queue.empty():
            return None
        try:
            return self._queue.get(timeout=seconds) if seconds > 0 else self._queue.get_nowait()
        except Empty:
            return None

    def _wait(self, seconds: float, or_ready: Any) -> None:
        if self._filled < 0:
            self._filled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if self._queue.empty():  # asked after it was opened: who puts a message from now on writes to it
            wait_for([self._filled, or_ready], seconds)
        with suppress(BlockingIOError):
            os.eventfd_read(self._filled)

    def close(self) -> None:
        """The inbox is the reading thread's."""
        with self._open:
            filled, self._filled = self._filled, -1
            if filled >= 0:
                os.close(filled)


#: Where a part gets its messages, encoded. `receive` returns the next message; None if none has come within `seconds`,
#: or before something came to `or_ready`, a socket of ZeroMQ's or a descriptor.
PartInbox = OwnInbox | PartQueue


class InboxThread:
    """Reads the inbox of a process with several parts. error: what ended it, if anything did; `on_end` follows."""

    def __init__(self, reader: FrameReader, queues: list[PartQueue], on_end: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._reader, self._queues, self._on_end = reader, queues, on_end
        threading.Thread(target=self._run, name="inbox", daemon=True).start()

    def _run(self) -> None:
        """Consumes: frames. Waits for: one. Unblocked by: one, or the closing of the sockets, which ends the thread.
        Produces: the messages in them, each in its part's queue."""
        reader = self._reader
        try:
            while True:
                if (content := reader.inbox.receive(_READ_S)) is not None:
                    for part, message in reader.messages(content):
                        self._queues[part].put(message)
        except SocketsClosed:
            pass
        except BaseException as error:  # noqa: BLE001 - the process ends with it
            self.error = error
            self._on_end()
        finally:
            reader.inbox.close()


#: Longest wait for a message, after which the station is asked again whether there is work.
_WAIT_S = 1.0


def largest_message(layout: ArenaLayout) -> int:
    """Bytes of the largest message or frame of a run: replies to all slots together are the largest frame."""
    return wire.LARGEST + sum(layout.slots.values()) * layout.answer_dtype.itemsize


class PartHost(Protocol):
    """The process, as its parts see it. is_meant: whether this incarnation of the station is to leave; beat: sends a
    heartbeat now, with the pending work if it was asked for; begin_frame: what this thread emits is sent by `flush`;
    refuse: reports a command that cannot be obeyed; notify: a part is ready, or has ended."""

    def connect(self, message: wire.Connect | wire.HostAt) -> None: ...
    def is_meant(self, message: wire.Dismissed) -> bool: ...
    def beat(self, *, pending_work: bool = False) -> None: ...
    def begin_frame(self) -> None: ...
    def flush(self) -> None: ...
    def refuse(self, command: bytes, why: str) -> None: ...
    def notify(self) -> None: ...


class StationThread:
    """Makes the station, then obeys what comes in and works while there is work, until told to stop.

    ready: set once the station is made; over: set when it has ended. error: what ended it, if anything did. busy_s,
    units: its work so far; spans: what that was, while it is measured.
    """

    def __init__(
        self,
        address: str,
        make: Callable[[], Station],
        inbox: PartInbox,
        drops: DropCounter,
        layout: ArenaLayout,
        host: PartHost,
    ) -> None:
        self.address = address
        self.error: BaseException | None = None
        self.station: Station | None = None
        self._traits = StationTraits()
        self.busy_s, self.units = 0.0, 0
        self.spans = SpanLog()
        self.ready, self.over = threading.Event(), threading.Event()
        self._make, self._inbox, self._drops, self._host = make, inbox, drops, host
        self._answer_dtype, self._largest = layout.answer_dtype, largest_message(layout)
        self._thread = threading.Thread(target=self.run, name=address, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def adopt(self, station: Station) -> None:
        self.station, self._traits = station, station.traits

    def own_call(self) -> str:
        """Where in user code it is, in words; "" if it is elsewhere."""
        calling_thread = self._traits.calling_thread
        return own_call(calling_thread() if calling_thread is not None else self._thread.ident)

    def run(self) -> None:
        """Make the station and work, in the thread that calls this; `start` has it called by one of its own."""
        try:
            self._host.begin_frame()
            self.adopt(self._make())
            assert self.station is not None
            while self._traits.attend is not None and not self._traits.attend(_WAIT_S):
                pass  # the process is killed if the run ends before somebody has joined
            if self._traits.listen_by is not None:
                self._traits.listen_by(self._listen)
            self.ready.set()
            self._host.notify()
            try:
                self._work(self.station, self._inbox)
            finally:
                self._host.flush()
            self.station.close()
        except Departed as error:
            self.error = error
            if self.station is not None:
                self.station.close()
        except BaseException as error:  # noqa: BLE001 - the process ends with it
            self.error = error
        finally:
            self._inbox.close()
            self.ready.set()
            self.over.set()
            self._host.notify()

    def _work(self, station: Station, inbox: PartInbox) -> None:
        """Consumes: commands and replies. Waits for: a message. Unblocked by: one, or `_WAIT_S`, or the patience of a
        station whose device works meanwhile, or what a station waits for beside messages. Produces: what the station
        says. Ends with `Stop`."""
        patience, traits, socket = 0.0, self._traits, self._traits.socket
        if traits.wait_beside is not None:
            socket = traits.wait_beside()
        end, beside = 0.0, False  # of the last unit of work; whether the device has worked since
        while True:
            content = inbox.receive(patience, socket)
            while content is not None:
                if not self._obey(station, content):
                    return
                content = inbox.receive()
            begin = end if beside else time.monotonic()
            try:
                worked = station.work()
            except StopWork:
                return
            except Unobeyable as unobeyable:
                self._host.refuse(wire.encode(unobeyable.command), str(unobeyable))
                worked = False
            self._host.flush()  # also without work: a station may say something while it hears a message
            patience, beside = _WAIT_S, False
            if worked:
                end = time.monotonic()
                self.units += 1
                self.busy_s += end - begin
                if self.spans.on:
                    self.spans.add(station.spans(begin, end))
                patience = traits.patience() if traits.patience is not None else 0.0
                beside = patience > 0.0

    def _listen(self, seconds: float) -> None:
        """For a station that waits within its work: send what it has said, then obey what comes within `seconds`.
        StopWork: it is told to leave."""
        self._host.flush()
        assert self.station is not None
        content = self._inbox.receive(seconds)
        while content is not None:
            if not self._obey(self.station, content):
                raise StopWork
            content = self._inbox.receive()

    def _obey(self, station: Station, content: wire.Content) -> bool:
        """One message; False if it is the last. What is not for the station, or cannot be, is dropped."""
        try:
            message = wire.decode(content, self._answer_dtype, self._largest)
            match message:
                case wire.Stop():
                    return False
                case wire.Ping(pending_work=pending_work):
                    self._host.beat(pending_work=pending_work)
                case wire.MeasureSpans(on):
                    self.spans.on = on
                case wire.Dismissed() if self._host.is_meant(message):
                    return False
                case wire.Connect() | wire.HostAt():
                    self._host.connect(message)
                case Reply() if self._traits.deliver is not None:
                    self._traits.deliver(message)
                case _ if isinstance(message, ORDERS):
                    try:
                        station.handle(message)
                    except UnfitMessage as unfit:
                        self._host.refuse(bytes(content), str(unfit))  # if main did send it, it waits for it
                        raise
                case _:
                    raise UnfitMessage("misdirected", f"{type(message).__name__} is not for {station.name}")
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))
        return True
