"""Base class of simulated stations (messages, states, devices, leases, failure), and the simulated scorer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from polyrhythm.plugins.virtual.clustersim.driver import ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.hardware import Device
from polyrhythm.plugins.virtual.clustersim.settings import ScorerGroup, StationGroup
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import Command, DeviceCommand, Event, ScorerJoined, ScoreSample, TakeDevice


class LeaseError(RuntimeError):
    """Two stations are on a leased device and not to be together, or one works without being on all of its own."""


@dataclass(slots=True)
class VirtualLease:
    """One station's lease of a device. seconds, size (bytes): of a switch; on: it is there; switching: under way."""

    device: Device
    seconds: float
    size: int
    on: bool = False
    switching: bool = False


class VirtualStation:
    """One incarnation of a simulated station. A restart makes a new object.

    capacity: pieces of work that it can do at a time; active: those under way. state, since: its present state and the
    start of that, if it has states: those of `Measures.states[states]`, some of which are `at_work`, and some have bars
    in the timeline. places: its devices, with the share that a pass takes of each; empty if it has its own. leases: its
    leased devices, by number. cut: messages sent after this time were in transit when the station died, and are lost.
    last_sent, last_told: arrival of its last message in each direction.
    """

    states: ClassVar[str] = ""
    at_work: ClassVar[frozenset[str]] = frozenset()
    bars: ClassVar[Mapping[str, str]] = {}
    capacity = 1

    def __init__(
        self, name: str, incarnation: int, driver: VirtualDriver, group: StationGroup, state: str = ""
    ) -> None:
        self.name, self.incarnation, self.driver, self.host = name, incarnation, driver, group.host
        self.clock, self.measures = driver.clock, driver.measures
        self.meter = self.measures.busy[group.kind]
        self.rng = random.Random(f"{driver.seed}/{name}/{incarnation}")
        self.alive = True
        self.state, self.since = state, self.clock.now
        self.places: tuple[tuple[Device, float], ...] = ()
        self.leases: dict[int, VirtualLease] = {}
        self.cut = inf
        self.last_sent = self.last_told = 0.0

    def join(self) -> None:
        self.meter.join(self.clock.now, self.capacity)
        self.emit(self.joined())

    def joined(self) -> Event:
        raise NotImplementedError

    def handle(self, command: Command) -> None:
        """Execute a command; one for a dead station is lost."""
        if not isinstance(command, DeviceCommand):
            self.obey(command)
        elif self.alive:
            if isinstance(command, TakeDevice):
                self.switch(command)
            else:
                self.leave_device(command)

    def obey(self, command: Command) -> None:
        """Execute a command that is not about a device."""
        raise NotImplementedError

    @property
    def active(self) -> int:
        return int(self.state in self.at_work)

    def enter(self, state: str) -> None:
        """Change the state, and account for the time in the one before."""
        now, span, before = self.clock.now, self.measures.span, self.state
        self.count(now - self.since)
        if span is not None and before in self.bars and now > self.since:
            span(self.name, self.bars[before], self.since, now)
        if (state in self.at_work) != (before in self.at_work):
            (self.meter.begin if state in self.at_work else self.meter.end)(now)
        self.state, self.since = state, now

    def count(self, seconds: float) -> None:
        """Add `seconds` to those of the present state."""
        self.measures.states[self.states][self.state] += seconds

    def flush(self) -> None:
        """Account for the time in the present state until now."""
        if self.state:
            self.enter(self.state)

    def close(self) -> None:
        """End this incarnation: abandon its work, and free its leased devices."""
        self.flush()
        self.meter.leave(self.clock.now, self.capacity, self.active)
        self.alive = False
        for device, _ in self.places:
            device.forget(self)
            device.resident.pop(self.name, None)

    def answer_and_fall_silent(self) -> None:
        """Send the present replies, for a failure between replies and report."""

    def lost(self) -> None:
        """The conductor learns of the loss: return unanswered requests to their queues."""

    def after(self, delay: float, call: Callable[[Any], None], argument: object = None) -> None:
        """Call `call(argument)` after `delay` seconds, unless this incarnation has ended by then."""
        self.clock.after(delay, self._call, (call, argument))

    def _call(self, planned: tuple[Callable[[Any], None], object]) -> None:
        if self.alive:
            call, argument = planned
            call(argument)

    def work(self, seconds: float, done: Callable[[Any], None], argument: object = None) -> None:
        """Run a pass of `seconds` at full speed on the station's device; call `done(argument)` at its end."""
        if not self.places:
            self.after(seconds, done, argument)
            return
        device, occupies = self.places[0]
        device.begin(self, seconds, occupies, done, argument)

    def emit(self, event: Event) -> None:
        self.driver.emit(self, event)

    def on_devices(self) -> None:
        """The station has come onto the last of its leased devices."""

    def leave_device(self, command: records.YieldDevice) -> None:
        """Leave the device; no work is under way."""
        self.switch(command)

    @property
    def on_all(self) -> bool:
        """Whether it is on all of its devices and leaves none."""
        return all(lease.on and not lease.switching for lease in self.leases.values())

    def check_lease(self) -> None:
        if not self.on_all:
            raise LeaseError(f"at {self.clock.now:g} s {self.name} works, but is not on all of its devices")

    def switch(self, command: DeviceCommand) -> None:
        lease = self.leases[command.device]
        if lease.switching or lease.on == isinstance(command, TakeDevice):
            raise LeaseError(f"at {self.clock.now:g} s {self.name} cannot obey {command!r}")
        if isinstance(command, TakeDevice):
            alone = [name for name, beside in lease.device.resident.items() if not beside]
            if alone and not command.beside:
                raise LeaseError(f"at {self.clock.now:g} s {' and '.join(alone)} is there: {command!r}")
            lease.device.resident[self.name] = command.beside
        else:  # stations take turns again, so who is there is to be alone
            lease.device.resident = dict.fromkeys(lease.device.resident, False)
        lease.switching = True
        self.after(lease.seconds, self._switched, (command, self.clock.now))

    def _switched(self, switch: tuple[DeviceCommand, float]) -> None:
        command, since = switch
        lease, now, measures = self.leases[command.device], self.clock.now, self.measures
        lease.on, lease.switching = isinstance(command, TakeDevice), False
        measures.switches += 1
        measures.switching += now - since
        measures.switched_bytes += lease.size
        if measures.span is not None:
            measures.span(self.name, f"{'take' if lease.on else 'yield'} device {command.device}", since, now)
        if lease.on:
            self.emit(records.DeviceTaken(self.name, self.incarnation, command.device, now - since))
            if self.on_all:
                self.on_devices()
        else:
            del lease.device.resident[self.name]
            self.emit(records.DeviceYielded(self.name, self.incarnation, command.device, lease.size, now - since))


class VirtualScorer(VirtualStation):
    """One incarnation of a scorer, with several samples at a time. give_up: called when a try reaches its deadline."""

    def __init__(
        self, name: str, incarnation: int, driver: VirtualDriver, group: ScorerGroup, give_up: Callable[[], None]
    ) -> None:
        super().__init__(name, incarnation, driver, group)
        self._group, self._give_up, self.capacity = group, give_up, group.places
        self._under_way: dict[int, ScoreSample] = {}

    def joined(self) -> ScorerJoined:
        return ScorerJoined(self.name, self.incarnation, self.capacity, self.host)

    @property
    def active(self) -> int:
        return len(self._under_way)

    def obey(self, command: Command) -> None:
        if not self.alive:
            return
        if not isinstance(command, ScoreSample) or self.active >= self.capacity:
            raise ProtocolError(f"scorer {self.name} cannot obey {command!r}")
        self._under_way[command.number] = command
        self.meter.begin(self.clock.now)
        if self._group.hangs and self.rng.random() < self._group.hangs:
            self.after(self._group.deadline, lambda _: self._give_up())
        else:
            self.work(self._group.score.draw(self.rng), self._end, command)

    def _end(self, command: ScoreSample) -> None:
        del self._under_way[command.number]
        self.meter.end(self.clock.now)
        payload = self.driver.payloads.get(command.payload_id)
        identity = (self.name, self.incarnation, command.number, command.ticket)
        if payload is None or (self._group.raises and self.rng.random() < self._group.raises):
            self.measures.scoring_failed += 1
            why = "the sample is gone" if payload is None else "the reward function raised"
            self.emit(records.ScoringFailed(*identity, why))
            return
        self.measures.scored += 1
        self.emit(records.SampleScored(*identity, float(payload.success), payload.success))
