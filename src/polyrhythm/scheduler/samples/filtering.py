"""Dynamic filtering: a complete group whose mean return lies outside the bounds is dropped and replaced.

If all members of a group fail, or all succeed, GRPO's advantages are all zero and the group carries no gradient. The
number of groups dropped per update is bounded; beyond it the run keeps them or halts, as configured, and reports it.

Invariant: at most `max_filtered` groups are dropped between two updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import Command, FilterExhausted, Halt
from polyrhythm.scheduler.samples.groups import Group
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class ReturnFilter:
    """filtered: groups dropped since an update was lent; accepted: groups out of bounds that were kept, in all;
    exhausted: the run has been told that this update's groups are kept."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    filtered: int = 0
    accepted: int = 0
    exhausted: bool = False

    def check(self, group: Group) -> tuple[bool, list[Command]]:
        """Whether the complete group is kept, and the commands that report it."""
        settings = self.settings
        if settings.min_return <= group.returns / group.size <= settings.max_return:
            return True, []
        if self.filtered < settings.max_filtered:
            self.filtered += 1
            return False, []
        bounds = f"[{settings.min_return:g}, {settings.max_return:g}]"
        if settings.on_max_filtered == "stop":
            count = f"more than max_filtered {settings.max_filtered} groups of one"
            remedy = "widen the bounds, raise max_filtered, or make on_max_filtered accept"
            return False, [Halt(f"{count} update had a mean return outside {bounds}; {remedy}")]
        self.accepted += 1
        said, self.exhausted = self.exhausted, True
        return True, [] if said else [FilterExhausted(self.filtered)]

    def next_update(self) -> None:
        """An update starts: the count begins anew."""
        self.filtered, self.exhausted = 0, False
