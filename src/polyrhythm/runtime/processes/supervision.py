"""Rules for giving up a station and for ending a run after failures. They are pure functions of heartbeats and time.

The end of a process is seen by its parent at once; these rules find stations that hang. A station that is stopped, or
that hangs without letting other threads run, sends no heartbeat. One that hangs in a call names the call in its
heartbeats. Time in which main did not listen (it was busy, stopped, or its machine was) is nobody's silence.
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


#: The call under way of a station that nobody has joined yet (`runtime.messages.Attended`).
AWAITING = "join"
#: That of one whose simulator is to come back by another connection; `join.reconnect_s` limits it.
RECONNECTING = "reconnect"
#: A station that fails so often in a row with the same error text, while no update is done, ends the run.
MAX_SAME_WORDS = 5


@dataclass(slots=True)
class LivenessMonitor:
    """Heartbeat state of one incarnation. began: when it was started. present: it has announced itself. last_heartbeat:
    when it came. doing, since: its call under way; place: where in user code that is, in words. paused: seconds in
    which main did not listen; last_heartbeat and since are later by those that came after them."""

    began: float
    present: bool = False
    last_heartbeat: float = field(default=-math.inf)
    doing: str = ""
    since: float = 0.0
    paused: float = 0.0
    place: str = ""

    def note_heartbeat(self, now: float, doing: str, for_s: float, place: str = "") -> None:
        self.last_heartbeat, self.doing, self.since, self.place = now, doing, now - for_s, place

    def note_pause(self, seconds: float) -> None:
        """Main did not listen for so long: that counts for no limit."""
        self.last_heartbeat += seconds
        self.since += seconds
        self.paused += seconds

    def current_call(self, now: float) -> str:
        """The call under way and its duration, in words; "" between two units of work."""
        if self.awaits:
            return f"open to a simulator that joins for {now - self.since:.1f} s"
        if not self.present:
            return f"being started for {now - self.began:.1f} s"
        return f"in one {self.doing} for {now - self.since:.1f} s" if self.doing else ""

    @property
    def awaits(self) -> bool:
        """Whether it waits for somebody to join, for as long as that takes."""
        return not self.present and self.doing == AWAITING

    def deadline(self, limits: SupervisionLimits) -> float:
        """The time at which it is given up, if no heartbeat comes before."""
        if self.awaits:
            return self.last_heartbeat + limits.heartbeat_s
        if not self.present:
            return self.began + self.paused + limits.start_s
        due = self.last_heartbeat + limits.heartbeat_s
        return min(due, self.since + _limit(self.doing, limits)) if self.doing else due

    def is_silent(self, now: float, limits: SupervisionLimits) -> bool:
        """Whether heartbeats are missing; there need be none before it is ready."""
        return (self.present or self.awaits) and now >= self.last_heartbeat + limits.heartbeat_s

    def complaint(self, now: float, limits: SupervisionLimits) -> str:
        """The reason for giving it up now; "" if there is none."""
        if now < self.deadline(limits):
            return ""
        if not self.present and not self.awaits:
            return f"was not ready within {limits.start_s:g} s (supervision.start_s)"
        if self.is_silent(now, limits):
            return f"sent no heartbeat for {limits.heartbeat_s:g} s (supervision.heartbeat_s)"
        call = f"{self.doing} for {now - self.since:.1f} s{self.place}"
        return f"has been in one {call} (supervision.{_setting(self.doing)})"


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


def _setting(doing: str) -> str:
    return _SETTING.get(doing, "update_s")


def _limit(doing: str, limits: SupervisionLimits) -> float:
    if doing == RECONNECTING:
        return math.inf
    limit: float = getattr(limits, _setting(doing))
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
