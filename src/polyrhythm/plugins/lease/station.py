"""A station that runs only while it holds its devices.

It announces itself at once and is built when it first holds all of its devices; from then on it leaves them and comes
back on command. A switch happens between two units of work; a simulator first does work that the conductor does not
know of (a reset beside a request that waits).

Invariant: the station does not run while it is off its devices; answers that arrive meanwhile wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from polyrhythm.plugins.lease.offload import open_store
from polyrhythm.runtime.factories import Resources, StationContext, StationFactory
from polyrhythm.runtime.messages import (
    Joined,
    Offloadable,
    OffloadStore,
    Order,
    Reply,
    Station,
    StationTraits,
    sender_of,
)
from polyrhythm.runtime.spans import TAKE, YIELD, Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import DeviceCommand, DeviceTaken, DeviceYielded, Event, TakeDevice

#: Maximum units of work of a part before it leaves: more than it can have pending. Without a limit, generators on other
#: devices could keep it busy forever.
_MOST_AT_HAND = 64


def leased_parts(
    factory: StationFactory, context: StationContext, incarnation: int, resources: Resources
) -> list[tuple[str, Callable[[], Station]]]:
    parts = factory.parts(replace(context, announced=True), incarnation)
    announcements = factory.announcements(incarnation)
    report = SwitchReport(len(parts), context.channels.emit)
    made: list[tuple[str, Callable[[], Station]]] = []
    for (address, make), joined in zip(parts, announcements, strict=True):
        # All that may lease a device can leave it (`seats`).
        station = cast(Callable[[], Offloadable], make)
        store = open_store(context.device, resources.offload)
        made.append((address, partial(LeasedStation, joined, station, resources.leases, report, store)))
    return made


class SwitchReport:
    """Reports a station's switch once all of its parts, each in its own thread, have made it."""

    def __init__(self, parts: int, emit: Callable[[Event], None]) -> None:
        self._parts, self._emit = parts, emit
        self._made: dict[DeviceCommand, list[tuple[int, float]]] = {}
        self._lock = threading.Lock()

    def add(self, command: DeviceCommand, incarnation: int, freed: int, seconds: float) -> None:
        """A part has switched: `freed` bytes, after `seconds`."""
        with self._lock:
            made = self._made.setdefault(command, [])
            made.append((freed, seconds))
            if len(made) < self._parts:
                return
            del self._made[command]
        freed, seconds = sum(each for each, _ in made), max(each for _, each in made)
        if isinstance(command, TakeDevice):
            self._emit(DeviceTaken(command.station, incarnation, command.device, seconds))
        else:
            self._emit(DeviceYielded(command.station, incarnation, command.device, freed, seconds))


class LeasedStation:
    """One part of a station that leases `devices`. joined: its announcement; make: builds it, on its devices. store:
    keeps its tensors while it is off its devices."""

    def __init__(
        self,
        joined: Joined,
        make: Callable[[], Offloadable],
        devices: Sequence[int],
        report: SwitchReport,
        store: OffloadStore,
    ) -> None:
        self.name, self._incarnation = sender_of(joined) or ("", 0)
        self._joined, self._make, self._report, self._store = joined, make, report, store
        self._devices, self._on = frozenset(devices), set[int]()
        self._switches: deque[DeviceCommand] = deque()
        self._station: Offloadable | None = None
        self._at_hand = 0
        self._doing = ("", 0.0)
        self._last: DeviceCommand | None = None  # the last unit of work, if that was a switch
        self._switched, self._switch_s, self._freed = 0, 0.0, 0

    def joined(self) -> Joined:
        return self._joined

    def handle(self, command: Order) -> None:
        if not isinstance(command, DeviceCommand):
            if self._station is None or self._on != self._devices:
                raise UnfitMessage("impossible", f"{self.name} is off its devices and cannot execute {command}")
            self._station.handle(command)
            return
        if command.station != self.name:
            raise UnfitMessage("misdirected", f"{self.name} received {command}, which is not for it")
        waiting = any(command.device == other.device for other in self._switches)
        there = command.device in self._on
        if waiting or command.device not in self._devices or there == isinstance(command, TakeDevice):
            raise UnfitMessage("impossible", f"{self.name} cannot execute {command}")
        self._switches.append(command)
        self._at_hand = _MOST_AT_HAND

    @property
    def traits(self) -> StationTraits:
        return StationTraits(deliver=self.deliver)

    def deliver(self, reply: Reply) -> None:
        """Deliver a generator's answer. UnfitMessage: the station accepts none."""
        deliver = self._station.traits.deliver if self._station is not None else None
        if deliver is None:
            raise UnfitMessage("misdirected", f"{self.name} expects no reply")
        deliver(reply)

    def work(self) -> bool:
        """Do a unit of work of the station, while it is on its devices, or a switch.

        Consumes: orders to switch, and the station's messages. Waits for: nothing; off its devices for an order.
        Unblocked by: `handle`. Produces: the station's events; `DeviceTaken`, `DeviceYielded`.
        """
        self._last = None
        station = self._station if self._on == self._devices else None
        if not self._switches:
            return station is not None and station.work()
        if station is not None and self._at_hand > 0 and station.work():
            self._at_hand -= 1
            return True
        self._switch(self._switches.popleft())
        return True

    def _switch(self, command: DeviceCommand) -> None:
        """Come onto a device or leave it. Memory moves with the first device left, or the last one taken."""
        begin, freed = time.monotonic(), 0
        self._doing = (TAKE if isinstance(command, TakeDevice) else YIELD, begin)
        if isinstance(command, TakeDevice):
            self._on.add(command.device)
            if self._on == self._devices:
                if self._station is None:
                    self._station = self._make()
                else:
                    self._station.resume(self._store)
        else:
            if self._on == self._devices:
                assert self._station is not None, "it was made when it came onto its devices"
                freed = self._freed = self._station.suspend(self._store)
            self._on.remove(command.device)
        seconds = time.monotonic() - begin
        self._switched += 1
        self._switch_s += seconds
        self._doing, self._last = ("", 0.0), command
        self._report.add(command, self._incarnation, freed, seconds)

    def spans(self, begin: float, end: float) -> Iterable[Span]:
        if self._last is not None:
            kind = TAKE if isinstance(self._last, TakeDevice) else YIELD
            return [Span(self.name, kind, begin, end, self._last.device)]
        return self._station.spans(begin, end) if self._station is not None else ()

    def current_call(self) -> tuple[str, float]:
        """The switch under way, else the station's current call."""
        if self._doing[0] or self._station is None:
            return self._doing
        return self._station.current_call()

    def pending_work(self) -> list[str]:
        own = [f"{self.name} has {type(switch).__name__} to do" for switch in list(self._switches)]
        return own + (self._station.pending_work() if self._station is not None else [])

    def statistics(self) -> dict[str, float]:
        """The station's statistics, with the number of switches, seconds in them, and bytes freed by the last one."""
        own = {"switches": float(self._switched), "switch_s": self._switch_s, "offloaded_bytes": float(self._freed)}
        return own | (self._station.statistics() if self._station is not None else {})

    def close(self) -> None:
        try:
            if self._station is not None:
                self._station.close()
        finally:
            self._store.close()
