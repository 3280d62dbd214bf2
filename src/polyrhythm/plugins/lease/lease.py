"""Device leases: which station is on a device that only one of its stations fits on at a time.

A station wants its devices while it has work. It gets them one by one in increasing number, moving onto each at once,
and gives all of them back together, because it works only with all. It gives them back between two units of work, when
another station waits for one of them and it has nothing to do, or has held them for `min_hold_s` and done some work.

A free device goes by `data_flow` to the trainer before generators before simulators, so a consumer has it as soon as
its producer has delivered; by `arrival` to the station that has waited longest. It never returns at once to the station
that has just given it back while another waits; and a station that has been passed over as often as the device has
stations goes first.

While stations are to be `together` nobody waits and nobody gives a device back. When they take turns again, all but
the first on each device leave it after the unit of work under way.

Invariants (property tests with faults, `tests/plugins/lease/test_simulated.py`): a device has at most one holder, and
others beside it only from when stations are together until they have left; a station that waits for a device holds only
devices of smaller numbers, so waiting stations form no cycle; a station that keeps wanting gets its devices after
finitely many switches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import DeviceTaken, DeviceYielded, TakeDevice, YieldDevice
from polyrhythm.scheduler.settings import LeaseSettings


@dataclass(slots=True)
class LeaseState:
    """A present station. flow: its stage in the data flow, consumers first.

    interruptible: it can give its devices back with units of work under way, which it continues later (a simulator).
    held: assigned devices, in order; taking: those that it has not reached yet (`TakeDevice` is out); yielding: those
    on their way back; leaving: it gets no new work, as it must give its devices back after the units under way. since:
    time from which it held all; worked: it got the work that waited for this; under_way: units of work under way.
    wants: it has work; waits_since, passed: start of its wait, and how often others got the device meanwhile.
    """

    name: str
    devices: tuple[int, ...]
    flow: int
    interruptible: bool = False
    held: list[int] = field(default_factory=list)
    taking: list[int] = field(default_factory=list)
    yielding: list[int] = field(default_factory=list)
    leaving: bool = False
    since: float = 0.0
    worked: bool = False
    under_way: int = 0
    wants: bool = False
    waits_since: float = 0.0
    passed: int = 0

    @property
    def complete(self) -> bool:
        """It is on all its devices, with none on the way back."""
        return len(self.held) == len(self.devices) and not self.taking and not self.yielding

    @property
    def open(self) -> bool:
        return self.complete and not self.leaving

    @property
    def waiting(self) -> bool:
        """It wants a device that is not assigned to it."""
        return self.wants and not self.yielding and len(self.held) < len(self.devices)

    @property
    def idle(self) -> bool:
        """It holds devices that it does not need now."""
        return bool(self.held) and not self.taking and not self.yielding and not self.under_way and not self.wants


@dataclass(slots=True)
class DeviceLeases:
    """present: leased stations by name; holders: device → holder, from `TakeDevice` to `DeviceYielded`.

    last: device → last holder; waiting: names of stations that wait for a device, in no relevant order; going: stations
    that give their devices back after the units under way. together: stations need not take turns; beside: device → the
    stations on it besides its holder, in their order.
    """

    rules: LeaseSettings = field(metadata=UNSAVED)
    present: dict[str, LeaseState] = field(default_factory=dict)
    holders: dict[int, str] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)
    going: dict[str, None] = field(default_factory=dict)
    together: bool = False
    beside: dict[int, list[str]] = field(default_factory=dict)

    def join(self, name: str, flow: int, *, interruptible: bool = False) -> None:
        """Add a station, off its devices; nothing if it leases none."""
        devices = self.rules.devices.get(name)
        if devices:
            self.present[name] = LeaseState(name, tuple(sorted(devices)), flow, interruptible)

    def leave(self, name: str) -> None:
        state = self.present.pop(name, None)
        self.waiting.pop(name, None)
        self.going.pop(name, None)
        for device in state.held if state is not None else ():
            self._free(device, name)

    def set_wants(self, state: LeaseState, wants: bool, now: float) -> None:
        if wants and not state.wants:
            state.waits_since, state.passed = now, 0
        state.wants = wants
        self._update_waiting(state)

    def _update_waiting(self, state: LeaseState) -> None:
        if state.waiting:
            self.waiting[state.name] = None
        else:
            self.waiting.pop(state.name, None)

    def on_taken(self, event: DeviceTaken, now: float) -> None:
        state = self.present[event.station]
        assert event.device in state.taking, f"{event} was not due"
        state.taking.remove(event.device)
        if state.complete:
            state.since, state.worked = now, False
        self._update_waiting(state)

    def on_yielded(self, event: DeviceYielded, now: float) -> None:
        state = self.present[event.station]
        assert event.device in state.yielding, f"{event} was not due"
        state.yielding.remove(event.device)
        state.held.remove(event.device)
        self._free(event.device, state.name)
        self.last[event.device] = state.name
        if not state.yielding:
            state.leaving, state.waits_since, state.passed = False, now, 0
        self._update_waiting(state)

    def _free(self, device: int, name: str) -> None:
        """This station is not on the device any more."""
        others = self.beside.get(device, [])
        if self.holders[device] != name:
            others.remove(name)
        elif others:
            self.holders[device] = others.pop(0)
        else:
            del self.holders[device]
        if not others:
            self.beside.pop(device, None)

    def preempt(self, now: float) -> list[LeaseState]:
        """Stations that get no new work from now on: their minimum time on devices that others wait for is over, or
        they are beside others that they take turns with again."""
        if self.together or not (self.waiting or self.beside):
            return []
        found = [state for state, at in self._overdue() if at <= now]
        found += [state for state in self._guests() if state.open]
        for state in found:
            state.leaving = True
            self.going[state.name] = None
        return found

    def keep(self) -> list[LeaseState]:
        """Stations that need not leave after all, as nobody waits for their devices: they may get work again."""
        if not self.going:
            return []
        wanted = set() if self.together else {self._next(self.present[name]) for name in self.waiting}
        guests = {state.name for state in self._guests()}
        found = [
            state
            for name in self.going
            if name not in guests and wanted.isdisjoint((state := self.present[name]).held)
        ]
        for state in found:
            state.leaving = False
            del self.going[state.name]
        return found

    def deadline(self) -> float:
        """Time at which `preempt` finds a station if no event comes before; infinite if none. Only an interruptible
        station needs a clock: the others are checked whenever one of their units ends."""
        if self.together or not self.waiting:
            return math.inf
        return min((at for state, at in self._overdue() if state.interruptible), default=math.inf)

    def _overdue(self) -> Iterator[tuple[LeaseState, float]]:
        """Open stations that hold what others wait for and have worked, each with the time at which it must leave."""
        for name in self.waiting:
            holder = self._holder_before(self.present[name])
            if holder is not None and holder.open and not holder.idle and holder.worked:
                yield holder, holder.since + self.rules.min_hold_s

    def switch(self) -> list[TakeDevice | YieldDevice]:
        """Take devices back from stations that must leave or are idle, and assign free ones."""
        commands: list[TakeDevice | YieldDevice] = []
        before = [] if self.together else [self._holder_before(self.present[name]) for name in self.waiting]
        for holder in [*before, *self._guests()]:
            if holder is None or holder.taking or holder.yielding:
                continue
            if holder.idle or (holder.leaving and (holder.interruptible or not holder.under_way)):
                holder.yielding = list(holder.held)
                self.going.pop(holder.name, None)
                commands += [YieldDevice(holder.name, device) for device in holder.held]
                self._update_waiting(holder)
        taken = () if self.together else self.holders.keys()
        while free := {self._next(self.present[name]) for name in self.waiting}.difference(taken):
            commands.append(self._give(min(free)))
        return commands

    def _guests(self) -> list[LeaseState]:
        """The stations beside others that they take turns with again, each once."""
        names = {} if self.together else dict.fromkeys(name for own in self.beside.values() for name in own)
        return [self.present[name] for name in names]

    @staticmethod
    def _next(state: LeaseState) -> int:
        return state.devices[len(state.held)]

    def _holder_before(self, waiter: LeaseState) -> LeaseState | None:
        name = self.holders.get(self._next(waiter))
        return None if name is None else self.present[name]

    def _give(self, device: int) -> TakeDevice:
        """Assign a device, which is free unless stations are together, to the first station in its waiting order."""
        waiters = [state for name in self.waiting if self._next(state := self.present[name]) == device]
        chosen = min(waiters, key=lambda state: self._place(state, device))
        for state in waiters:
            state.passed += state is not chosen
        chosen.held.append(device)
        chosen.taking.append(device)
        if device in self.holders:
            self.beside.setdefault(device, []).append(chosen.name)
        else:
            self.holders[device] = chosen.name
        self._update_waiting(chosen)
        return TakeDevice(chosen.name, device, self.together)

    def _place(self, state: LeaseState, device: int) -> tuple[bool, bool, int, float, str]:
        late = state.passed >= sum(device in own for own in self.rules.devices.values())
        by_flow = self.rules.switch_order == "data_flow" and not late
        return (
            self.last.get(device) == state.name,
            not late,
            state.flow if by_flow else 0,
            state.waits_since,
            state.name,
        )
