"""Quarantine: a task and seed whose episodes keep failing is set aside.

Counted are failures that the environment can cause: it raised, its numbers were not finite, the episode passed its
deadline, or the simulator was lost. An episode that the environment refuses is set aside at once. A lost simulator
takes episodes with it that did nothing wrong, and a lost host has several simulators. So a loss counts only together
with earlier attempts of the same ticket: the count becomes at least the number of this attempt. An episode that
finishes clears the count.

A training group whose task and seed is set aside is dropped whole and replaced; seeds of training never come again.
Episodes of evaluations come again, and are not started any more. Background evaluations have a quarantine of their own,
so that they change none of training's decisions.

Invariant: no ticket is granted for a task and seed that is set aside.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.records import DropReason, EpisodeSetAside

#: Task and seed.
Start = tuple[int, int]

#: Failures that the environment can cause.
COUNTED = frozenset(
    {
        DropReason.ENVIRONMENT_RAISED,
        DropReason.EPISODE_REFUSED,
        DropReason.ENVIRONMENT_NOT_FINITE,
        DropReason.DEADLINE,
        DropReason.SIMULATOR_LOST,
    }
)


@dataclass(slots=True)
class Quarantine:
    """failures: counted ones since an episode of this task and seed last finished; set_aside: those of whom that
    became too many, with the last failure's reason, in the order in which it happened. background: of the background
    evaluations."""

    background: bool = False
    failures: dict[Start, int] = field(default_factory=dict)
    set_aside: dict[Start, DropReason] = field(default_factory=dict)

    def note_failure(self, start: Start, reason: DropReason, attempt: int, limit: int) -> list[EpisodeSetAside]:
        """An attempt of an episode failed; the notice if that sets its task and seed aside. limit: failures that do, 0
        for never; one refusal does."""
        limit = 1 if reason is DropReason.EPISODE_REFUSED else limit
        if not limit or reason not in COUNTED or start in self.set_aside:
            return []
        count = self.failures.get(start, 0)
        count = max(count, attempt) if reason is DropReason.SIMULATOR_LOST else count + 1
        if count < limit:
            self.failures[start] = count
            return []
        self.failures.pop(start, None)
        self.set_aside[start] = reason
        return [EpisodeSetAside(*start, count, reason, self.background)]

    def forget(self, start: Start) -> None:
        """An episode finished, so this task and seed works; or it does not come again."""
        self.failures.pop(start, None)
