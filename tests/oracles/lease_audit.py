"""Who is on which leased device, as commands and events show it: one station at a time (or those that
are to be together), and only those on all of their devices are given work. A simulator that was told to leave may
still get the rest of its commands' effects, but no new command."""

from __future__ import annotations

from polyrhythm.plugins.lease.conductor import LeasedConductor
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import (
    ApplyWeights,
    CancelRow,
    Command,
    DeviceTaken,
    DeviceYielded,
    Event,
    GeneratorJoined,
    PrepareEpisodes,
    PublishWeights,
    RefuseRequest,
    SaveTrainer,
    Serve,
    SimulatorJoined,
    StartRows,
    StartStream,
    StartUpdate,
    StationLost,
    TakeDevice,
    TrainerJoined,
    YieldDevice,
)
from polyrhythm.scheduler.settings import LeaseSettings

_JOINED = {SimulatorJoined: "simulator", GeneratorJoined: "generator", TrainerJoined: "trainer"}
_WORK = {
    **dict.fromkeys((StartRows, CancelRow, RefuseRequest, PrepareEpisodes), "simulator"),
    **dict.fromkeys((Serve, StartStream, ApplyWeights), "generator"),
    **dict.fromkeys((StartUpdate, PublishWeights, SaveTrainer), "trainer"),
}


class LeaseAudit:
    """holders: device → stations, from `TakeDevice` to `DeviceYielded` or the station's loss; on: station → devices
    that it is on and was not told to leave. switches: `TakeDevice` so far."""

    def __init__(self, rules: LeaseSettings) -> None:
        self._rules = rules
        self.holders: dict[int, list[str]] = {}
        self._together = False
        self.on: dict[str, set[int]] = {name: set() for name in rules.devices}
        self.switches = 0
        self._held_back: list[Command] = []

    def decided(self, conductor: AnyConductor, sent: list[Command]) -> list[Command]:
        """What the conductor decided at this event: what it sent and had not decided before, and what it now holds
        back."""
        assert isinstance(conductor, LeasedConductor)
        before = {id(command) for command in self._held_back}
        self._together = conductor.delivery.leases.together
        self._held_back = [command for own in conductor.delivery.held_back.values() for command in own]
        return [command for command in (*sent, *self._held_back) if id(command) not in before]

    def present(self, name: str) -> bool:
        """Whether the station is on all of the devices that it leases."""
        return name not in self.on or self.on[name] == set(self._rules.devices[name])

    def hear(self, event: Event) -> None:
        """A station came onto a device or left it, is new, or is lost."""
        joined = _JOINED.get(type(event))
        if joined is not None or isinstance(event, StationLost):
            self._forget(getattr(event, joined or "station"))
        if isinstance(event, DeviceTaken):
            self.on[event.station].add(event.device)
        if isinstance(event, DeviceYielded):
            self.holders[event.device].remove(event.station)

    def note(self, commands: list[Command]) -> str:
        """What is wrong, "" if nothing is."""
        for command in commands:
            if wrong := self._follow(command):
                return wrong
        return ""

    def _follow(self, command: Command) -> str:
        if isinstance(command, TakeDevice):
            there = self.holders.setdefault(command.device, [])
            if there and not (command.beside and self._together):
                return f"{there} hold the device of {command}"
            smaller = [device for device in self._rules.devices[command.station] if device < command.device]
            if any(command.station not in self.holders.get(device, ()) for device in smaller):
                return f"{command} comes before it has {smaller}"
            there.append(command.station)
            self.switches += 1
        elif isinstance(command, YieldDevice):
            if command.device not in self.on[command.station]:
                return f"it is not on the device of {command}"
            self.on[command.station].remove(command.device)
        elif (who := _WORK.get(type(command))) is not None and not self.present(getattr(command, who)):
            return f"it is not on its devices and gets {command}"
        return ""

    def _forget(self, station: str) -> None:
        self.holders = {device: [x for x in own if x != station] for device, own in self.holders.items()}
        if station in self.on:
            self.on[station] = set()
