"""The base of all simulated stations: messages, devices, and the end of a life."""

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
    """One incarnation of a simulated station. A new life is a new object, so what an old one planned comes to nothing.

    places: the devices it works on, and the share that a pass takes of each; none where it has its own.
    cut: messages sent after this time were still under way when the station died, and are lost.
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
        """Enter the time spent in the present state into the measures, up to now."""
        raise NotImplementedError

    def close(self) -> None:
        """Die: what is under way comes to nothing."""
        raise NotImplementedError

    def work(self, seconds: float, done: Callable[[Any], None], argument: object = None) -> None:
        """A pass of `seconds` at full speed on the station's device; `done(argument)` at its end."""
        if not self.places:
            self.clock.after(seconds, done, argument)
            return
        device, occupies = self.places[0]
        device.begin(self, seconds, occupies, done, argument)

    def vacate(self) -> None:
        """Leave the devices: what was under way there is over."""
        for device, _ in self.places:
            device.forget(self)

    def emit(self, event: Event) -> None:
        self.driver.emit(self, event)
