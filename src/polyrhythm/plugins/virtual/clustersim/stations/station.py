"""Base class of simulated stations: messages, devices, leases, and failure."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Any

from polyrhythm.plugins.virtual.clustersim.devices import Device
from polyrhythm.plugins.virtual.clustersim.driver import VirtualDriver
from polyrhythm.scheduler.records import Command, DeviceTaken, DeviceYielded, Event, TakeDevice, YieldDevice


class LeaseError(RuntimeError):
    """Two stations are on a leased device, or one works without being on all of its own."""


class VirtualLease:
    """One station's lease of a device. seconds: of a switch, one way; size: bytes moved; on: it is on the device.
    switching: a switch is under way."""

    __slots__ = ("device", "on", "seconds", "size", "switching")

    def __init__(self, device: Device, seconds: float, size: int) -> None:
        self.device, self.seconds, self.size = device, seconds, size
        self.on = self.switching = False


class VirtualStation:
    """One incarnation of a simulated station. A restart makes a new object; calls scheduled by an old one do nothing.

    places: its devices, with the share that a pass takes of each; empty if it has its own. leases: its leased devices,
    by number. host: its host. cut: messages sent after this time were in transit when the station died, and are lost.
    """

    def __init__(self, name: str, incarnation: int, driver: VirtualDriver, seed: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.driver = driver
        self.clock = driver.clock
        self.measures = driver.measures
        self.rng = random.Random(f"{seed}/{name}/{incarnation}")
        self.alive = True
        self.host = ""
        self.places: tuple[tuple[Device, float], ...] = ()
        self.leases: dict[int, VirtualLease] = {}
        self.cut = inf
        self.last_sent = 0.0
        self.last_told = 0.0

    def handle(self, command: Command) -> None:
        """Execute a command; one for a dead station is lost."""
        if not isinstance(command, TakeDevice | YieldDevice):
            self.obey(command)
        elif self.alive:
            if isinstance(command, TakeDevice):
                self.switch(command)
            else:
                self.leave_device(command)

    def obey(self, command: Command) -> None:
        """Execute a command that is not about a device."""
        raise NotImplementedError

    def on_devices(self) -> None:
        """The station has come onto the last of its leased devices."""

    def leave_device(self, command: YieldDevice) -> None:
        """Leave the device; no work is under way."""
        self.switch(command)

    def join(self) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Add the time in the present state until now to the measures."""
        raise NotImplementedError

    def close(self) -> None:
        """End this incarnation and abandon its work."""
        raise NotImplementedError

    @property
    def on_all(self) -> bool:
        """Whether it is on all of its devices and leaves none."""
        return all(lease.on and not lease.switching for lease in self.leases.values())

    def check_lease(self) -> None:
        if not self.on_all:
            raise LeaseError(f"at {self.clock.now:g} s {self.name} works, but is not on all of its devices")

    def switch(self, command: TakeDevice | YieldDevice) -> None:
        lease, takes = self.leases[command.device], isinstance(command, TakeDevice)
        if lease.switching or lease.on == takes:
            raise LeaseError(f"at {self.clock.now:g} s {self.name} cannot obey {command!r}")
        if takes:
            if lease.device.resident is not None:
                raise LeaseError(f"at {self.clock.now:g} s {lease.device.resident.name} is there: {command!r}")
            lease.device.resident = self
        lease.switching = True
        self.clock.after(lease.seconds, self._switched, (command, self.clock.now))

    def _switched(self, switch: tuple[TakeDevice | YieldDevice, float]) -> None:
        if not self.alive:
            return
        command, since = switch
        lease, now, measures = self.leases[command.device], self.clock.now, self.measures
        lease.on, lease.switching = isinstance(command, TakeDevice), False
        measures.switches += 1
        measures.switching += now - since
        measures.switched_bytes += lease.size
        if measures.span is not None:
            measures.span(self.name, f"{'take' if lease.on else 'yield'} device {command.device}", since, now)
        if lease.on:
            self.emit(DeviceTaken(self.name, self.incarnation, command.device, now - since))
            if self.on_all:
                self.on_devices()
        else:
            lease.device.resident = None
            self.emit(DeviceYielded(self.name, self.incarnation, command.device, lease.size, now - since))

    def work(self, seconds: float, done: Callable[[Any], None], argument: object = None) -> None:
        """Run a pass of `seconds` at full speed on the station's device; call `done(argument)` at its end."""
        if not self.places:
            self.clock.after(seconds, done, argument)
            return
        device, occupies = self.places[0]
        device.begin(self, seconds, occupies, done, argument)

    def vacate(self) -> None:
        """Abandon the dead station's passes, and free its leased devices."""
        for device, _ in self.places:
            device.forget(self)
            if device.resident is self:
                device.resident = None

    def emit(self, event: Event) -> None:
        self.driver.emit(self, event)
