"""Devices that several stations may share: passes on one of them slow each other, or take turns.

`shared`: a pass takes a share of the device when it is alone (`occupies`). While the shares of the passes under way are
at most 1 together, all go on at full speed; above it everyone's speed is 1 over their sum (processor sharing).
`exclusive`: a lease. One pass at a time, whatever it occupies; the others wait in the order in which they came.

Worked example, shared: a pass of 3 s that occupies 0.7 begins at 0 s, one of 1 s that occupies 0.8 at 1 s. Together
they occupy 1.5, so that the second lasts until 2.5 s; the first has done 2 s by then and ends at 3.5 s.

Invariant: seconds of work done on a device in any interval, each times what it occupies, are at most the interval's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyrhythm.clustersim.clock import Clock

#: Seconds of work that count as none: what rounding leaves of a pass.
_NOTHING = 1e-12


class Job:
    """A pass. left: seconds of work still to do, at full speed."""

    __slots__ = ("argument", "done", "left", "occupies", "owner")

    def __init__(
        self, owner: object, seconds: float, occupies: float, done: Callable[[Any], None], argument: object
    ) -> None:
        self.owner = owner
        self.left = seconds
        self.occupies = occupies
        self.done = done
        self.argument = argument


class Device:
    """One device on the virtual clock. busy: seconds during which it was occupied, a share of it counted as such."""

    __slots__ = ("_clock", "_exclusive", "_jobs", "_since", "_turn", "busy")

    def __init__(self, clock: Clock, *, exclusive: bool = False) -> None:
        self._clock = clock
        self._exclusive = exclusive
        self._jobs: list[Job] = []
        self._since = 0.0
        self._turn = 0
        self.busy = 0.0

    def begin(
        self, owner: object, seconds: float, occupies: float, done: Callable[[Any], None], argument: object = None
    ) -> None:
        """Start a pass of `seconds` at full speed; `done(argument)` is called at its end."""
        self._advance()
        self._jobs.append(Job(owner, seconds, occupies, done, argument))
        self._plan()

    def forget(self, owner: object) -> None:
        """The owner died: its passes end at once, unfinished."""
        self._advance()
        self._jobs = [job for job in self._jobs if job.owner is not owner]
        self._plan()

    def flush(self) -> None:
        """Enter what was done until now into `busy`."""
        self._advance()

    def _running(self) -> list[Job]:
        return self._jobs[:1] if self._exclusive else self._jobs

    def _load(self) -> float:
        return 1.0 if self._exclusive and self._jobs else sum(job.occupies for job in self._jobs)

    def _advance(self) -> None:
        """Everyone under way has worked since the last change."""
        now = self._clock.now
        seconds, self._since = now - self._since, now
        load = self._load()
        self.busy += seconds * min(1.0, load)
        work = seconds / max(1.0, load)
        for job in self._running():
            job.left -= work

    def _plan(self) -> None:
        """Ring when the next pass ends, unless something changes before."""
        self._turn += 1
        running = self._running()
        if running:
            left = max(0.0, min(job.left for job in running))
            self._clock.after(left * max(1.0, self._load()), self._ring, self._turn)

    def _ring(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        running = self._running()
        end = max(_NOTHING, min(job.left for job in running))
        ended = [job for job in running if job.left <= end]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._plan()
        for job in ended:
            job.done(job.argument)
