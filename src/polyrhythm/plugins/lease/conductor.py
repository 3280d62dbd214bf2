"""A conductor around another one, for leased devices: a command waits until its station holds all of its devices.

To the inner conductor a lease is only a delay between a command and its station, which every decision allows for; so
leases change timing, but no guarantee. Two refinements keep the delay small. Batches are formed for generators that are
on their devices (`GeneratorState.away`), so no request waits behind a generator that is away; `lockstep`, which starts
all batches at once, is the exception. And a trainer publishes before it leaves its devices.

Invariants: commands reach a station in the order in which they were given; a station that waits for its devices has
held-back commands, or a batch is due for it, or its environments have actions to execute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.plugins.lease.lease import DeviceLeases, LeaseState
from polyrhythm.scheduler import records
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.conductor import SERVING_EVENTS, Conductor
from polyrhythm.scheduler.records import (
    AbortStream,
    Command,
    DeviceTaken,
    DeviceYielded,
    Event,
    address_of,
    sender_name,
)
from polyrhythm.scheduler.settings import LeaseSettings

#: Commands that are a unit of work, and the events that end one.
_UNITS = frozenset(
    {records.Serve, records.StartStream, records.ApplyWeights, records.StartUpdate, records.PublishWeights}
)
_ENDS = frozenset(
    {records.BatchDone, records.StreamDone, records.WeightsApplied, records.UpdateDone, records.Published}
)
#: Stages of the data flow: consumers before their producers.
TRAINER, GENERATOR, SIMULATOR = range(3)
#: Scorers lease nothing.
_STAGES: dict[type, int] = {
    records.TrainerJoined: TRAINER,
    records.GeneratorJoined: GENERATOR,
    records.SimulatorJoined: SIMULATOR,
    records.ScorerJoined: SIMULATOR,
}


class LeasedConductor:
    """A conductor around `inner`; `delivery` holds back commands for stations that are off their devices."""

    def __init__(self, inner: Conductor) -> None:
        rules = inner.settings.lease
        assert rules is not None, "no station leases a device"
        self.inner, self.settings, self._rules = inner, inner.settings, rules
        self.delivery = CommandDelivery(rules, DeviceLeases(rules))
        self._codec = inner.codec.extended((CommandDelivery, DeviceLeases, LeaseState))
        self._share_parts()

    def _share_parts(self) -> None:
        inner = self.inner
        self.versions, self.rollout, self.updates = inner.versions, inner.rollout, inner.updates
        self.serving, self.stations, self.ledger = inner.serving, inner.stations, inner.ledger

    def handle(self, event: Event, now: float) -> list[Command]:
        """As `Conductor.handle`: the decided commands that are sent now, and the device switches."""
        inner, delivery = self.inner, self.delivery
        if self.stations.is_outdated(event):
            self.stations.refused += 1
            return []
        changed = self._answered_slots(event)
        self._on_station(event)
        commands = inner.apply(event, now)
        if type(event) not in SERVING_EVENTS:
            inner.advance(event, commands, now)
            changed += inner.live_changes
        self._update_working(changed, now)
        delivery.preempt(now)
        delivery.on_event(event, now)
        sent = delivery.release(event, now)
        self._update_away()
        sent += delivery.deliver(commands, now)
        released: list[Command] | None = []
        while released is not None:  # stations that stay after all can take batches
            sent += [*released, *delivery.deliver(self.serving.due(now), now)]
            delivery.set_due(self.serving.due_away(now), now)
            released = delivery.keep(now)
            self._update_away()
        sent += delivery.switch_devices()
        self._update_away()
        return sent

    def _on_station(self, event: Event) -> None:
        """Track a station that joins or is lost. Joining replaces an earlier incarnation, or an earlier trainer."""
        if isinstance(event, records.StationLost):
            self.delivery.leave(event.station)
        elif (stage := _STAGES.get(type(event))) is not None:
            name, trainer = sender_name(event), self.updates.trainer
            if name in self.stations.incarnations:
                self.delivery.leave(name)
            self.delivery.join(name, stage)
            if stage == TRAINER and trainer != name:
                self.delivery.leave(trainer)

    def _answered_slots(self, event: Event) -> list[str]:
        """The slots that request or are answered by this event; all slots if a generator is lost."""
        generators = self.serving.generators
        match event:
            case records.RequestArrived():
                return [event.slot]
            case records.BatchDone():
                generator = generators.find(event.generator)
                batch = generator.batch if generator is not None else None
                return [request.slot for request in batch.requests] if batch is not None else []
            case records.StreamDone():
                generator = generators.find(event.generator)
                return [] if generator is None else [generator.streams[event.stream].request.slot]
            case records.StationLost(station=lost) | records.GeneratorJoined(generator=lost):
                return list(self.serving.slots.slots) if generators.find(lost) is not None else []
        return []

    def _update_working(self, names: Iterable[str], now: float) -> None:
        """A simulator needs its device while one of its live slots has no open request."""
        for name in names:
            if (slot := self.serving.slots.slots.get(name)) is not None:
                self.delivery.set_working(slot.simulator, name, working=slot.live and slot.request is None, now=now)

    def _update_away(self) -> None:
        """Tell serving which stations have come onto their devices or left them since the last call."""
        for name, is_open in self.delivery.take_changes():
            self.serving.generators.set_away(name, away=not is_open)

    def deadline(self) -> float:
        due = min(self.serving.deadline(self.delivery.due), self.rollout.next_expiry())
        return min(due, self.delivery.leases.deadline())

    def summary(self) -> dict[str, Any]:
        return self.inner.summary()

    def pending(self) -> list[str]:
        """Pending work of `inner`, and the holders and waiters of each device."""
        leases, held_back = self.delivery.leases, self.delivery.held_back
        on = {device: [name, *leases.beside.get(device, [])] for device, name in sorted(leases.holders.items())}
        held = ", ".join(f"{device} by {' and '.join(names)}" for device, names in on.items())
        waiting = [f"{name} ({len(held_back[name])} commands)" for name in sorted(leases.waiting)]
        return [
            *self.inner.pending(),
            f"devices held: {held or 'none'}, waited for by {', '.join(waiting) or 'nobody'}",
        ]

    def save(self) -> dict[str, Any]:
        return {**self.inner.save(), "delivery": self._codec.encode(self.delivery)}

    def load(self, data: dict[str, Any]) -> None:
        """As `Conductor.load`. All stations of a run saved without leases start off their devices."""
        self.inner.load(data)
        self._share_parts()
        if "delivery" in data:
            self.delivery = self._codec.decode(data["delivery"], {"rules": self._rules})
        if self.settings.moves is None:
            self.share_devices(together=False)  # the run was saved with moves, and goes on without

    def detach(self) -> None:
        self.inner.detach()
        self.delivery = CommandDelivery(self._rules, DeviceLeases(self._rules, together=self.delivery.leases.together))

    def share_devices(self, *, together: bool) -> None:
        """As `Conductor.share_devices`, from the next event on."""
        self.delivery.leases.together = together


@dataclass(slots=True)
class CommandDelivery:
    """Holds back commands of stations that are off their devices.

    held_back: commands by station; working: leased simulator → its slots with actions to execute, by their requests and
    answers; changed: stations that came onto or left their devices, for `take_changes`.
    """

    rules: LeaseSettings = field(metadata=UNSAVED)
    leases: DeviceLeases
    held_back: dict[str, deque[Command]] = field(default_factory=dict)
    working: dict[str, dict[str, None]] = field(default_factory=dict)
    due: list[str] = field(default_factory=list)
    changed: dict[str, None] = field(default_factory=dict)

    def join(self, name: str, flow: int) -> None:
        """Add a station, off the devices that it leases."""
        self.leases.join(name, flow, interruptible=flow == SIMULATOR)
        if name in self.leases.present:
            self.held_back[name] = deque()
            self.changed[name] = None
            if flow == SIMULATOR:
                self.working[name] = {}

    def leave(self, name: str) -> None:
        self.leases.leave(name)
        for table in (self.held_back, self.working, self.changed):
            table.pop(name, None)
        self.due = [other for other in self.due if other != name]

    def take_changes(self) -> list[tuple[str, bool]]:
        """Stations that came onto or left their devices since the last call, and whether they may get work."""
        changes = [(name, self.leases.present[name].open) for name in self.changed]
        self.changed.clear()
        return changes

    def on_event(self, event: Event, now: float) -> None:
        """Track ends of units of work, and stations that came onto or left a device."""
        if isinstance(event, DeviceTaken):
            self.leases.on_taken(event, now)
            self.changed[event.station] = None
        elif isinstance(event, DeviceYielded):
            self.leases.on_yielded(event, now)
        elif type(event) in _ENDS:
            state = self.leases.present.get(sender_name(event))
            if state is not None:
                state.under_way -= 1

    def set_working(self, simulator: str, slot: str, *, working: bool, now: float) -> None:
        """Set whether the slot has actions to execute, rather than waiting for a ticket or an answer."""
        slots = self.working.get(simulator)
        if slots is None:
            return
        if working:
            slots[slot] = None
        else:
            slots.pop(slot, None)
        state = self.leases.present[simulator]
        state.under_way = len(slots)
        self._update_wants(state, now)

    def _update_wants(self, state: LeaseState, now: float) -> None:
        wants = bool(self.held_back[state.name]) or state.name in self.due
        if state.interruptible:
            wants = wants or state.under_way > 0
        if wants != state.wants:
            self.leases.set_wants(state, wants, now)

    def preempt(self, now: float) -> None:
        """Give no new work to stations that must leave their devices for others."""
        for state in self.leases.preempt(now):
            self.changed[state.name] = None

    def deliver(self, commands: Iterable[Command], now: float) -> list[Command]:
        """The commands to send now: those for stations on their devices, with what was held back for them, those for
        stations without leases, and aborts of streams. The others are held back."""
        present, sent = self.leases.present, list[Command]()
        for command in commands:
            state = None if type(command) is AbortStream else present.get(address_of(command))
            if state is None:
                sent.append(command)
                continue
            waiting = self.held_back[state.name]
            publishes = state.complete and type(command) is records.PublishWeights
            if (state.open or publishes) and not waiting:
                self._begin(state, command)
                sent.append(command)
            else:
                waiting.append(command)
                self._update_wants(state, now)
        return sent

    def release(self, event: Event, now: float) -> list[Command]:
        """The held-back commands of the station that this event brought onto the last of its devices."""
        if not isinstance(event, DeviceTaken) or not (state := self.leases.present[event.station]).open:
            return []
        state.worked = state.interruptible
        return self._release(state, now)

    def keep(self, now: float) -> list[Command] | None:
        """Cancel yields that are not needed any more; returns the commands that they held back, None without any."""
        kept = self.leases.keep()
        if not kept:
            return None
        for state in kept:
            self.changed[state.name] = None
        return [command for state in kept for command in self._release(state, now)]

    def _release(self, state: LeaseState, now: float) -> list[Command]:
        waiting = self.held_back[state.name]
        released = list(waiting)
        waiting.clear()
        for command in released:
            self._begin(state, command)
        self._update_wants(state, now)
        return released

    @staticmethod
    def _begin(state: LeaseState, command: Command) -> None:
        state.worked = True
        state.under_way += type(command) in _UNITS

    def set_due(self, due: Collection[str], now: float) -> None:
        """Set the generators off their devices for which a batch is due."""
        if not due and not self.due:
            return
        before, self.due = self.due, list(due)
        for name in dict.fromkeys((*before, *due)):  # deterministic order in every process
            if (state := self.leases.present.get(name)) is not None:
                self._update_wants(state, now)

    def switch_devices(self) -> list[Command]:
        switches = self.leases.switch()
        for switch in switches:
            self.changed[switch.station] = None
        return list(switches)
