"""One part of a station at work in its thread: its messages, the station, and nothing shared with the other parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from polyrhythm.conformance import own_call
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import (
    ORDERS,
    Departed,
    Joined,
    Order,
    Reply,
    Station,
    StationTraits,
    StopWork,
    Unobeyable,
)
from polyrhythm.runtime.processes.part_inbox import PartInbox
from polyrhythm.runtime.spans import SpanLog
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.wire import (
    LARGEST,
    Connect,
    Content,
    Dismissed,
    HostAt,
    MeasureSpans,
    Ping,
    Stop,
    decode,
    encode,
)

#: Longest wait for a message, after which the station is asked again whether there is work.
_WAIT_S = 1.0


def largest_message(layout: ArenaLayout) -> int:
    """Bytes of the largest message or frame of a run: replies to all slots together are the largest frame."""
    return LARGEST + sum(layout.slots.values()) * layout.answer_dtype.itemsize


class PartHost(Protocol):
    """The process, as its parts see it."""

    def connect(self, message: Connect | HostAt) -> None: ...

    def is_meant(self, message: Dismissed) -> bool:
        """Whether it is this incarnation of the station that is to leave."""
        ...

    def beat(self, *, pending_work: bool = False) -> None:
        """Send a heartbeat now, with the pending work if it was asked for."""
        ...

    def begin_frame(self) -> None:
        """What this thread says is sent by `flush`."""
        ...

    def flush(self) -> None: ...

    def refuse(self, command: bytes, why: str) -> None:
        """Tell main that a command cannot be obeyed."""
        ...

    def notify(self) -> None:
        """A part is ready, or has ended."""
        ...


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
        """The station that was made, whose messages come from now on."""
        self.station, self._traits = station, station.traits

    def own_call(self) -> str:
        """Where in user code it is, in words; "" if it is elsewhere."""
        calling_thread = self._traits.calling_thread
        return own_call(calling_thread() if calling_thread is not None else self._thread.ident)

    def joined(self) -> Joined:
        """The announcement of a part that is ready."""
        assert self.station is not None
        return self.station.joined()

    def run(self) -> None:
        """Make the station and work, in the thread that calls this; `start` has it called by one of its own."""
        try:
            self._host.begin_frame()
            self.adopt(self._make())
            assert self.station is not None
            if self._traits.attend is not None:
                self._await_somebody(self._traits.attend)
            if self._traits.listen_by is not None:
                self._traits.listen_by(self._hear)
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

    def _await_somebody(self, attend: Callable[[float], bool]) -> None:
        """Consumes: what who wants to join says. Waits for: that. Unblocked by: it, or `_WAIT_S`. Produces: nothing.
        Ends once somebody has joined; the process is killed if the run ends before."""
        while not attend(_WAIT_S):
            pass

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
                self._host.refuse(encode(unobeyable.command), str(unobeyable))
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

    def _hear(self, seconds: float) -> None:
        """For a station that waits within its work: send what it has said, then obey what comes within `seconds`.
        StopWork: it is told to leave."""
        self._host.flush()
        assert self.station is not None
        content = self._inbox.receive(seconds)
        while content is not None:
            if not self._obey(self.station, content):
                raise StopWork
            content = self._inbox.receive()

    def _obey(self, station: Station, content: Content) -> bool:
        """One message; False if it is the last. What is not for the station, or cannot be, is dropped."""
        try:
            message = decode(content, self._answer_dtype, self._largest)
            match message:
                case Stop():
                    return False
                case Ping(pending_work=pending_work):
                    self._host.beat(pending_work=pending_work)
                case MeasureSpans(on):
                    self.spans.on = on
                case Dismissed() if self._host.is_meant(message):
                    return False
                case Connect() | HostAt():
                    self._host.connect(message)
                case Reply() if self._traits.deliver is not None:
                    self._traits.deliver(message)
                case _ if isinstance(message, ORDERS):
                    self._order(station, message, content)
                case _:
                    raise UnfitMessage("misdirected", f"{type(message).__name__} is not for {station.name}")
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))
        return True

    def _order(self, station: Station, command: Order, content: Content) -> None:
        """Hand a command to the station. Main is told of one that is refused: if it did send it, it waits for it."""
        try:
            station.handle(command)
        except UnfitMessage as unfit:
            self._host.refuse(bytes(content), str(unfit))
            raise
