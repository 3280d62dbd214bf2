"""Base class of a run's observers, and the table that finds the observers concerned by a decision.

Invariant: a decision that no observer handles costs one dictionary lookup for its event and one for each command.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, get_args

from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records

#: Every type of event and command, for an observer that handles all decisions.
ALL_RECORDS: tuple[type, ...] = (*get_args(records.Event), *get_args(records.Command))


class Observer:
    """Watches a run without changing it; requests go through `RunLoop.submit_later`.

    hears: event and command types for which `on_decision` is called. tick_s: interval of `on_tick` in seconds, inf for
    none; while no event arrives a call may be 0.5 s late.
    """

    hears: ClassVar[tuple[type, ...]] = ()
    tick_s: ClassVar[float] = math.inf

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        """Called after the conductor handled `event` with `commands`, if `hears` has the type of at least one of
        them."""

    def on_report(self, now: float, report: Report) -> None:
        """Called for each report of a station."""

    def on_tick(self, now: float) -> None:
        """Called every `tick_s` seconds."""

    def finish(self, now: float) -> None:
        """Called once it is detached, also if an error has ended the run."""


class ObserverTable:
    """The observers of one run, in the order of their calls.

    Each observer is a bit. A type maps to the bits of the observers that handle it; a decision combines the bits of its
    types.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self.observers: tuple[Observer, ...] = ()
        self._next_tick: dict[Observer, float] = {}
        self._tick_due = math.inf
        self.add(*observers)

    def add(self, *observers: Observer) -> None:
        """Append observers. ValueError: `hears` of one of them has a type that is neither an event nor a command."""
        for observer in observers:
            if unknown := [kind.__name__ for kind in observer.hears if kind not in ALL_RECORDS]:
                raise ValueError(
                    f"{type(observer).__name__}.hears: {', '.join(unknown)} is neither an event nor a command"
                )
            if observer.tick_s < math.inf:
                self._next_tick[observer] = self._tick_due = -math.inf
        self._resolve((*self.observers, *observers))

    def remove(self, *observers: Observer) -> None:
        for observer in observers:
            self._next_tick.pop(observer, None)
        self._resolve(tuple(observer for observer in self.observers if observer not in observers))

    def _resolve(self, observers: tuple[Observer, ...]) -> None:
        self.observers = observers
        self._bits: dict[type, int] = dict.fromkeys(ALL_RECORDS, 0)
        self._called: dict[int, tuple[Observer, ...]] = {}
        for place, observer in enumerate(observers):
            for kind in observer.hears:
                self._bits[kind] |= 1 << place

    def decide(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        """Pass a decision to the observers that handle its event or one of its commands."""
        bits = self._bits[type(event)]
        for command in commands:
            bits |= self._bits[type(command)]
        if not bits:
            return
        called = self._called.get(bits)
        if called is None:
            called = tuple(each for place, each in enumerate(self.observers) if bits >> place & 1)
            self._called[bits] = called
        for observer in called:
            observer.on_decision(now, event, commands)

    def report(self, now: float, report: Report) -> None:
        """Pass a report to all observers."""
        for observer in self.observers:
            observer.on_report(now, report)

    def tick(self, now: float) -> None:
        """Call the observers whose interval has passed."""
        if now < self._tick_due:
            return
        for observer, due in tuple(self._next_tick.items()):
            if now >= due and observer in self._next_tick:
                self._next_tick[observer] = now + observer.tick_s
                observer.on_tick(now)
        self._tick_due = min(self._next_tick.values(), default=math.inf)
