"""Provides the base class of simulated stations: messages, devices, and failure."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from polyrhythm.clustersim.devices import Device
from polyrhythm.scheduler.records import Command, Event

if TYPE_CHECKING:
    from polyrhythm.clustersim.driver import Driver


class VirtualStation:
    """One incarnation of a simulated station. A restart makes a new object; calls scheduled by an old one do nothing.

    places: its devices, with the share that a pass takes of each; empty if it has its own.
    cut: messages sent after this time were in transit when the station died, and are lost.
    """

    def __init__(self, name: str, incarnation: int, driver: Driver, seed: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.driver = driver
        self.clock = driver.clock
        self.measures = driver.measures
        self.rng = random.Random(f"{seed}/{name}/{incarnation}")
        self.alive = True
        self.places: tuple[tuple[Device, float], ...] = ()
        self.cut = inf
        self.last_sent = 0.0
        self.last_told = 0.0

    def handle(self, command: Command) -> None:
        """Accept a command; one for a dead station is lost."""
        raise NotImplementedError

    def join(self) -> None:
        """Announce this incarnation to the conductor."""
        raise NotImplementedError

    def flush(self) -> None:
        """Add the time in the present state until now to the measures."""
        raise NotImplementedError

    def close(self) -> None:
        """End this incarnation and abandon its work."""
        raise NotImplementedError

    def work(self, seconds: float, done: Callable[[Any], None], argument: object = None) -> None:
        """Run a pass of `seconds` at full speed on the station's device; call `done(argument)` at its end."""
        if not self.places:
            self.clock.after(seconds, done, argument)
            return
        device, occupies = self.places[0]
        device.begin(self, seconds, occupies, done, argument)

    def vacate(self) -> None:
        """Abandon the station's passes on all devices."""
        for device, _ in self.places:
            device.forget(self)

    def emit(self, event: Event) -> None:
        self.driver.emit(self, event)
