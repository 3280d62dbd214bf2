"""Feeds a recorded trace to a fresh conductor and compares the decisions (guarantee 10).

The trace may come from a live run or from a simulation: a sequence of (now, event, commands), in the order in
which the conductor took the events. The conductor reads no clock, so the same trace gives the same commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polyrhythm.plugins.virtual.clustersim.driver import Decider
from polyrhythm.scheduler.records import Command, Decision, Event


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that differs. index: place in the trace."""

    index: int
    now: float
    event: Event
    recorded: tuple[Command, ...]
    decided: tuple[Command, ...]

    def __str__(self) -> str:
        lines = [f"step {self.index} at {self.now:g} s: {self.event}"]
        lines += [f"  recorded  {command}" for command in self.recorded if command not in self.decided]
        lines += [f"  decided   {command}" for command in self.decided if command not in self.recorded]
        if len(lines) == 1:
            lines.append("  the same commands in another order")
        return "\n".join(lines)


def first_difference(conductor: Decider, trace: Iterable[Decision]) -> Difference | None:
    """Where `conductor`, which must be as fresh as the recorded one was, first decides otherwise; None if nowhere."""
    for index, step in enumerate(trace):
        decided = tuple(conductor.handle(step.event, step.now))
        if decided != step.commands:
            return Difference(index, step.now, step.event, step.commands, decided)
        conductor.deadline()  # a driver asks after every event, and asking may tidy up
    return None
