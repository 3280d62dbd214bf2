"""Simulates devices that several stations may share: concurrent passes slow each other down, or take turns.

`shared`: a pass alone takes a share of the device (`occupies`). While the shares of the running passes sum to at most
1, all run at full speed; above 1 each runs at the speed of 1 over the sum (processor sharing).
`exclusive`: one pass at a time, whatever it occupies; the others wait in the order of arrival.
`lease` lets only one station on a device at a time (`stations.station`), so passes of different stations never meet.

Worked example, shared: a pass of 3 s that occupies 0.7 begins at 0 s, one of 1 s that occupies 0.8 at 1 s. Together
they occupy 1.5, so that the second lasts until 2.5 s; the first has done 2 s by then and ends at 3.5 s.

Invariant: seconds of work done on a device in any interval, each times what it occupies, are at most the interval's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from polyrhythm.plugins.virtual.clustersim.clock import VirtualClock

#: Remaining seconds of a pass that count as none, because of rounding.
_ROUNDING_S = 1e-12


class Occupant(Protocol):
    """A station that works on a device."""

    name: str


class Job:
    """A pass. left: remaining seconds of work at full speed."""

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
    """A device on the virtual clock. busy: seconds weighted by the occupied share. resident: the station that is on it,
    if stations lease it."""

    __slots__ = ("_clock", "_exclusive", "_jobs", "_since", "_turn", "busy", "resident")

    def __init__(self, clock: VirtualClock, *, exclusive: bool = False) -> None:
        self._clock = clock
        self._exclusive = exclusive
        self._jobs: list[Job] = []
        self._since = 0.0
        self._turn = 0
        self.busy = 0.0
        self.resident: Occupant | None = None

    def begin(
        self, owner: object, seconds: float, occupies: float, done: Callable[[Any], None], argument: object = None
    ) -> None:
        """Start a pass of `seconds` at full speed; `done(argument)` is called at its end."""
        self._advance()
        self._jobs.append(Job(owner, seconds, occupies, done, argument))
        self._plan()

    def forget(self, owner: object) -> None:
        self._advance()
        self._jobs = [job for job in self._jobs if job.owner is not owner]
        self._plan()

    def flush(self) -> None:
        self._advance()

    def _running(self) -> list[Job]:
        return self._jobs[:1] if self._exclusive else self._jobs

    def _load(self) -> float:
        return 1.0 if self._exclusive and self._jobs else sum(job.occupies for job in self._jobs)

    def _advance(self) -> None:
        """Account for the work of the running passes since the last change."""
        now = self._clock.now
        seconds, self._since = now - self._since, now
        load = self._load()
        self.busy += seconds * min(1.0, load)
        work = seconds / max(1.0, load)
        for job in self._running():
            job.left -= work

    def _plan(self) -> None:
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
        end = max(_ROUNDING_S, min(job.left for job in running))
        ended = [job for job in running if job.left <= end]
        self._jobs = [job for job in self._jobs if job not in ended]
        self._plan()
        for job in ended:
            job.done(job.argument)
