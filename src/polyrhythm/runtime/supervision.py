"""When a station is given up, and when a run is: pure rules over what was heard and when.

A process that ends is seen at once by whoever holds it; here is what only time tells. A station that is stopped, or
that hangs without letting other threads run, sends no heartbeat; one that hangs in a call says so in its heartbeats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol


class Limits(Protocol):
    """Seconds after which a station is given up, by what it does; and how many failures a run survives."""

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
    def max_failures(self) -> int: ...


#: Failures in a row before a station has ever stood ready, after which another start is not worth trying.
MAX_FAILED_STARTS = 3
#: The same for a station whose own program raises with the same words, while no update is done.
MAX_SAME_WORDS = 5


@dataclass(slots=True)
class Vigil:
    """What is known of one incarnation. heard: when its last heartbeat came; doing, since: its unit of work under way.

    present: it has stood ready."""

    began: float
    present: bool = False
    heard: float = field(default=-math.inf)
    doing: str = ""
    since: float = 0.0

    def hear(self, now: float, doing: str, for_s: float) -> None:
        self.heard, self.doing, self.since = now, doing, now - for_s

    def deadline(self, limits: Limits) -> float:
        """When it is to be given up, if nothing is heard before."""
        if not self.present:
            return self.began + limits.start_s
        due = self.heard + limits.heartbeat_s
        return min(due, self.since + _limit(self.doing, limits)) if self.doing else due

    def complaint(self, now: float, limits: Limits) -> str:
        """Why it is given up now; "" if it is not."""
        if now < self.deadline(limits):
            return ""
        if not self.present:
            return f"did not stand ready within {limits.start_s:g} s (supervision.start_s)"
        if now >= self.heard + limits.heartbeat_s:
            return f"sent no heartbeat for {limits.heartbeat_s:g} s (supervision.heartbeat_s)"
        return f"has been in one {self.doing} for {now - self.since:.1f} s (supervision.{_setting(self.doing)})"


#: The setting that limits a unit of work, by what the station is doing; all else is the trainer's.
_SETTING = {"reset": "reset_s", "step": "step_s", "observe": "step_s", "pass": "pass_s"}


def _setting(doing: str) -> str:
    return _SETTING.get(doing, "update_s")


def _limit(doing: str, limits: Limits) -> float:
    limit: float = getattr(limits, _setting(doing))
    return limit


@dataclass(slots=True)
class Failures:
    """Counts failures; `verdict` says when they end the run.

    starts: failures in a row before a station stood ready; repeats: of a station in a row with the same words and after
    the same number of updates of the run.
    """

    total: int = 0
    starts: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    def count(self, station: str, *, was_present: bool, words: str = "", updates: int = 0) -> None:
        """words: with which its own program raised, "" if it was ended otherwise; updates: of the run so far."""
        self.total += 1
        self.starts[station] = 0 if was_present else self.starts.get(station, 0) + 1
        before, done, times = self.repeats.get(station, ("", 0, 0))
        again = times if (words, updates) == (before, done) else 0
        self.repeats[station] = (words, updates, again + 1 if words else 0)

    def verdict(self, station: str, limits: Limits) -> str:
        """Why the run ends; "" if it goes on."""
        if self.starts[station] >= MAX_FAILED_STARTS:
            return f"{station} failed {self.starts[station]} times in a row before it stood ready"
        if self.repeats[station][2] >= MAX_SAME_WORDS:
            return f"{station} failed {MAX_SAME_WORDS} times in a row in the same way, and no update was done meanwhile"
        if self.total > limits.max_failures:
            return f"{self.total} failures, {limits.max_failures} are allowed (supervision.max_failures)"
        return ""
