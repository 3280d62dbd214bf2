"""The conductor of stations that take turns on devices: each command waits until its station is on all of its own.

To the conductor inside, a lease is a delay between a command and its station, and everything that is decided allows
for any delay; so leases change when things happen, but no guarantee. Two refinements keep the delay small. Batches are
made for generators that are on their devices (`GeneratorState.away`), so requests wait in common and not behind
a generator that is away; `lockstep`, which starts all batches at once, is the exception. And a trainer that has to go
publishes before it goes.

Invariants: commands reach a station in the order in which they were given; a station that waits for its devices has
commands here, or a batch is due for it, or its environments have actions to execute.
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
from polyrhythm.scheduler.records import ADDRESSEES, SENDERS, AbortStream, Command, DeviceTaken, DeviceYielded, Event
from polyrhythm.scheduler.samples.ledger import SampleLedger
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
    """A conductor around `inner`: commands for stations that are not on their devices wait in `delivery`."""

    def __init__(self, inner: Conductor) -> None:
        rules = inner.settings.lease
        assert rules is not None, "no station leases a device"
        self.inner, self.settings, self._rules = inner, inner.settings, rules
        self.delivery = CommandDelivery.create(rules)
        self._codec = inner.codec.extended((CommandDelivery, DeviceLeases, LeaseState))
        self._share_parts()

    def _share_parts(self) -> None:
        inner = self.inner
        self.versions, self.rollout, self.updates = inner.versions, inner.rollout, inner.updates
        self.serving, self.stations = inner.serving, inner.stations

    @property
    def ledger(self) -> SampleLedger:
        return self.inner.ledger

    @property
    def refused(self) -> int:
        return self.inner.refused

    def handle(self, event: Event, now: float) -> list[Command]:
        """As `Conductor.handle`; of what is decided, the commands that go out now, and which devices change hands."""
        inner, delivery = self.inner, self.delivery
        if self.stations.is_outdated(event):
            return []
        answered = self._answered_slots(event)
        self._on_station(event)
        commands = inner.apply(event, now)
        self._update_working(answered, now)
        if type(event) not in SERVING_EVENTS:
            inner.advance(event, commands, now)
            for name, live in inner.live_changes:
                if (slot := self.serving.slots.slots.get(name)) is not None:
                    delivery.set_working(slot.simulator, name, working=live and slot.request is None, now=now)
        delivery.preempt(now)
        delivery.on_event(event, now)
        sent = delivery.release(event, now)
        self._update_away()
        sent += delivery.deliver(commands, now)
        released: list[Command] | None = []
        while released is not None:  # those that may stay after all can take batches that others waited for
            sent += [*released, *delivery.deliver(self.serving.due(now), now)]
            delivery.set_due(self.serving.due_away(now), now)
            released = delivery.keep(now)
            self._update_away()
        sent += delivery.switch_devices()
        self._update_away()
        return sent

    def _on_station(self, event: Event) -> None:
        """A station is lost, or joins: then an earlier incarnation of it, or an earlier trainer, is lost."""
        if isinstance(event, records.StationLost):
            self.delivery.leave(event.station)
        elif (stage := _STAGES.get(type(event))) is not None:
            name, trainer = getattr(event, SENDERS[type(event)]), self.updates.trainer
            if name in self.stations.incarnations:
                self.delivery.leave(name)
            self.delivery.join(name, stage)
            if stage == TRAINER and trainer != name:
                self.delivery.leave(trainer)

    def _answered_slots(self, event: Event) -> list[str]:
        """The slots that ask, or are answered, by this event; where a generator is lost, all may wait again."""
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
        """A simulator has work for its device while one of its slots lives and waits for no answer."""
        for name in names:
            if (slot := self.serving.slots.slots.get(name)) is not None:
                self.delivery.set_working(slot.simulator, name, working=slot.live and slot.request is None, now=now)

    def _update_away(self) -> None:
        for name, is_open in self.delivery.take_changes():
            self.serving.generators.set_away(name, away=not is_open)

    def deadline(self) -> float:
        due = min(self.serving.deadline(self.delivery.due), self.rollout.next_expiry())
        return min(due, self.delivery.leases.deadline())

    def summary(self) -> dict[str, Any]:
        return self.inner.summary()

    def pending(self) -> list[str]:
        """Also who holds which device, and who waits for one."""
        leases, held_back = self.delivery.leases, self.delivery.held_back
        held = ", ".join(f"{device} by {name}" for device, name in sorted(leases.holders.items()))
        waiting = [f"{name} ({len(held_back[name])} commands)" for name in sorted(leases.waiting)]
        return [
            *self.inner.pending(),
            f"devices held: {held or 'none'}, waited for by {', '.join(waiting) or 'nobody'}",
        ]

    def save(self) -> dict[str, Any]:
        return {**self.inner.save(), "delivery": self._codec.encode(self.delivery)}

    def load(self, data: dict[str, Any]) -> None:
        """As `Conductor.load`. A run that was saved without leases begins with all stations off their devices."""
        self.inner.load(data)
        self._share_parts()
        if "delivery" in data:
            self.delivery = self._codec.decode(data["delivery"], {"rules": self._rules})

    def detach(self) -> None:
        self.inner.detach()
        self.delivery = CommandDelivery.create(self._rules)


@dataclass(slots=True)
class CommandDelivery:
    """held_back: by station, commands that wait for its devices; working: by leased simulator, its slots that have
    something to do, as far as their requests and answers say; changed: stations that came onto or left their devices,
    for `take_changes`."""

    rules: LeaseSettings = field(metadata=UNSAVED)
    leases: DeviceLeases
    held_back: dict[str, deque[Command]] = field(default_factory=dict)
    working: dict[str, dict[str, None]] = field(default_factory=dict)
    due: list[str] = field(default_factory=list)
    changed: dict[str, None] = field(default_factory=dict)

    @classmethod
    def create(cls, rules: LeaseSettings) -> CommandDelivery:
        return cls(rules, DeviceLeases(rules))

    # ------------------------------------------------------------ stations

    def join(self, name: str, flow: int) -> None:
        """A station is there; one that leases devices is off them."""
        self.leases.join(name, flow, interruptible=flow == SIMULATOR)
        if name in self.leases.present:
            self.held_back[name] = deque()
            self.changed[name] = None
            if flow == SIMULATOR:
                self.working[name] = {}

    def leave(self, name: str) -> None:
        """A station is lost, and with it the commands that waited for it."""
        self.leases.leave(name)
        for table in (self.held_back, self.working, self.changed):
            table.pop(name, None)
        self.due = [other for other in self.due if other != name]

    def take_changes(self) -> list[tuple[str, bool]]:
        """Stations that may be given work, or no longer, since the last call."""
        if not self.changed:
            return []
        changes = [(name, self.leases.present[name].open) for name in self.changed]
        self.changed.clear()
        return changes

    # ------------------------------------------------------------ events

    def on_event(self, event: Event, now: float) -> None:
        """A unit of work has ended, or a station is on a device or off one."""
        if isinstance(event, DeviceTaken):
            self.leases.on_taken(event, now)
            self.changed[event.station] = None
        elif isinstance(event, DeviceYielded):
            self.leases.on_yielded(event, now)
        elif type(event) in _ENDS:
            state = self.leases.present.get(getattr(event, SENDERS[type(event)]))
            if state is not None:
                state.under_way -= 1

    def set_working(self, simulator: str, slot: str, *, working: bool, now: float) -> None:
        """Whether the slot has something to do: not while it waits for a ticket or an answer."""
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

    # ------------------------------------------------------------ commands

    def preempt(self, now: float) -> None:
        """Give no new work to stations that others have waited for long enough."""
        for state in self.leases.preempt(now):
            self.changed[state.name] = None

    def deliver(self, commands: Iterable[Command], now: float) -> list[Command]:
        """The commands that go out now: those for stations that are on their devices, what waited for them, and others
        that are for no leased station, and to abort a stream. The rest waits."""
        present, sent = self.leases.present, list[Command]()
        for command in commands:
            field = "" if type(command) is AbortStream else ADDRESSEES.get(type(command), "")
            state = present.get(getattr(command, field)) if field else None
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
        """What waited for the station that this event brought onto the last of its devices, if it is one."""
        if not isinstance(event, DeviceTaken) or not (state := self.leases.present[event.station]).open:
            return []
        state.worked = state.interruptible
        return self._release(state, now)

    def keep(self, now: float) -> list[Command] | None:
        """What waited for stations that were to leave their devices and may stay, as nobody waits for these any more;
        None if there is no such station."""
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
        """For these generators, which are off their devices, a batch is due."""
        if not due and not self.due:
            return
        before, self.due = self.due, list(due)
        for name in dict.fromkeys((*before, *due)):  # in an order that is the same in every process
            if (state := self.leases.present.get(name)) is not None:
                self._update_wants(state, now)

    def switch_devices(self) -> list[Command]:
        """Devices that change hands now."""
        switches = self.leases.switch()
        for switch in switches:
            self.changed[switch.station] = None
        return list(switches)
