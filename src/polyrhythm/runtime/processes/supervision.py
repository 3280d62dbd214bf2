"""Limits by which a station is given up, and rules for ending a run after failures: pure functions of facts and time.

The end of a process is seen by its parent at once; the limits find stations that hang. A station that is stopped, or
that hangs without letting other threads run, sends no heartbeat. One that hangs in a call names the call in its
heartbeats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol


class SupervisionLimits(Protocol):
    """Seconds after which a station is given up, by its call under way; and the number of failures a run survives."""

    @property
    def heartbeat_s(self) -> float: ...

    @property
    def start_s(self) -> float: ...

    @property
    def reset_s(self) -> float: ...

    @property
    def step_s(self) -> float: ...

    @property
    def pass_s(self) -> float: ...

    @property
    def update_s(self) -> float: ...

    @property
    def score_s(self) -> float: ...

    @property
    def max_failures(self) -> int: ...

    @property
    def max_start_failures(self) -> int: ...

    @property
    def forgive_s(self) -> float: ...


#: The call under way of a station that nobody has joined yet (`runtime.messages.StationTraits.attend`).
AWAITING = "join"
#: That of one whose simulator is to come back by another connection; `join.reconnect_s` limits it.
RECONNECTING = "reconnect"
#: A station that fails so often in a row with the same error text, while no update is done, ends the run.
MAX_SAME_WORDS = 5


#: Setting that limits a call, by its name; every other call is the trainer's (update_s).
_SETTING = {
    "reset": "reset_s",
    "discard": "reset_s",
    "step": "step_s",
    "observe": "step_s",
    "texts": "step_s",
    "pass": "pass_s",
    "score": "score_s",
}


def limiting_setting(doing: str) -> str:
    """The setting that limits a call."""
    return _SETTING.get(doing, "update_s")


def call_limit(doing: str, limits: SupervisionLimits) -> float:
    """Seconds that a call may take."""
    if doing == RECONNECTING:
        return math.inf
    limit: float = getattr(limits, limiting_setting(doing))
    return limit


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a station. began: when that incarnation was started; was_present: it had announced itself.

    killed: a signal from outside ended it, so its program is not the cause. error: that its program raised,
    "" if it ended otherwise. updates: of the run so far.
    """

    station: str
    began: float
    was_present: bool
    killed: bool = False
    error: str = ""
    updates: int = 0


@dataclass(slots=True)
class FailureTracker:
    """Counts failures; `verdict` decides whether they end the run.

    total: failures of the run. recent: failures since the last quiet period, which is `forgive_s` without a failure and
    with at least one update; a start that fails is not quiet, however long it takes. starts: by station, failures in a
    row before it was ready, by its own fault. repeats: by station, (error, updates of the run, failures in a row with
    both). last, updates: time of the latest failure, and the updates done by then.
    """

    total: int = 0
    recent: int = 0
    starts: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    last: float = math.inf
    updates: int = 0

    def count(self, failure: Failure, now: float, limits: SupervisionLimits) -> None:
        station = failure.station
        quiet_s = (now if failure.was_present else failure.began) - self.last
        if quiet_s >= limits.forgive_s and failure.updates > self.updates:
            self.recent = 0
            self.starts.clear()
        self.last, self.updates = now, failure.updates
        self.total += 1
        self.recent += 1
        if failure.was_present:
            self.starts[station] = 0
        elif not failure.killed:
            self.starts[station] = self.starts.get(station, 0) + 1
        error, updates = failure.error, failure.updates
        before, done, times = self.repeats.get(station, ("", 0, 0))
        again = times if (error, updates) == (before, done) else 0
        self.repeats[station] = (error, updates, again + 1 if error else 0)

    def verdict(self, station: str, limits: SupervisionLimits) -> str:
        """The reason for ending the run; "" if it goes on."""
        starts = self.starts.get(station, 0)
        if starts > limits.max_start_failures:
            return (
                f"{station} failed {_times(starts)} before it was ready, {limits.max_start_failures} are allowed "
                "(supervision.max_start_failures)"
            )
        if self.repeats[station][2] >= MAX_SAME_WORDS:
            return f"{station} failed {MAX_SAME_WORDS} times in a row in the same way, and no update was done meanwhile"
        if self.recent > limits.max_failures:
            return f"{self.recent} failures, {limits.max_failures} are allowed (supervision.max_failures)"
        return ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"
