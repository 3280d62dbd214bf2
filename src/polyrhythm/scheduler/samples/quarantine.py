"""Quarantine: sets a task and seed aside whose episodes keep failing.

It counts failures that the environment can cause: it raised, its numbers were not finite, the episode passed its
deadline, or the simulator was lost. An episode that the environment refuses is set aside at once. A lost simulator or
host takes innocent episodes with it, so a loss counts only together with earlier attempts of the same ticket: the count
becomes at least the number of this attempt. An episode that finishes clears the count.

A training group whose task and seed is set aside is dropped whole and replaced; training seeds do not recur. Evaluation
episodes recur, and are not started any more. Background evaluations have their own quarantine, so that they change no
decision of training.

Suspects: a call that hangs or crashes takes a whole simulator and all episodes that ran there; any of them may be the
cause, and would cause it again. So an episode that lost a simulator in its second-to-last attempt (before it is set
aside or dropped) runs its last attempt as the only suspect of its run or evaluation: the others wait, and rows go to
other tickets meanwhile. The cause then fails alone, and the others finish in turn. Example with three attempts
(`max_attempts`, `quarantine_after`): 4 rows of one simulator, one hangs at its first step. All four lose attempts 1 and
2. In attempt 3 the four run one after another: three finish, one is set aside.

Invariants: no ticket is granted for a task and seed that is set aside; two suspects of a run, or of an evaluation,
never run simultaneously unless they have the same task and seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polyrhythm.scheduler.records import DropReason, EpisodeSetAside, Ticket
from polyrhythm.scheduler.samples.groups import Sample, SampleState
from polyrhythm.scheduler.settings import SchedulerSettings

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
    """failures: counted failures since an episode of this task and seed last finished. set_aside: tasks and seeds with
    too many failures, with the last reason, in order; background: of background evaluations."""

    background: bool = False
    failures: dict[Start, int] = field(default_factory=dict)
    set_aside: dict[Start, DropReason] = field(default_factory=dict)

    def on_failure(self, start: Start, reason: DropReason, attempt: int, limit: int) -> list[EpisodeSetAside]:
        """Count a failed attempt; returns the notice if its task and seed is now set aside. limit: failures that set it
        aside, 0 for never; one refusal always does."""
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
        """Clear the count of a task and seed: an episode finished, or the seed does not recur."""
        self.failures.pop(start, None)


#: Name of the evaluation (empty: training), task, seed.
Suspect = tuple[str, int, int]


@dataclass(slots=True)
class Suspects:
    """Isolates episodes that may have crashed their simulator. order: suspects in order of suspicion; the first that
    still has a ticket may run. dealt: suspects whose ticket an evaluation has handed out and that have no row yet."""

    order: dict[Suspect, None] = field(default_factory=dict)
    dealt: list[Suspect] = field(default_factory=list)

    def on_loss(self, ticket: Ticket, settings: SchedulerSettings) -> None:
        """The simulator of this attempt was lost; its next attempt may be the last."""
        last = min(settings.max_attempts, settings.quarantine_after or settings.max_attempts)
        if ticket.attempt + 1 >= last:
            self.order[_suspect(ticket)] = None

    def on_granted(self) -> None:
        """All tickets that were handed out have rows."""
        self.dealt.clear()

    def forget(self, ticket: Ticket) -> None:
        """An episode of this task and seed finished: it is no suspect."""
        self.order.pop(_suspect(ticket), None)

    def end(self, evaluation: str) -> None:
        self.order = {known: None for known in self.order if known[0] != evaluation}

    def holds(self, ticket: Ticket, waiting: Iterable[Ticket], samples: Mapping[int, Sample]) -> bool:
        """Whether this ticket must wait for another suspect. waiting: tickets of its evaluation that do not run."""
        own = _suspect(ticket)
        if own not in self.order:
            return False
        present = {*self.dealt, *(_suspect(other) for other in waiting)}
        states = (SampleState.RUNNING, SampleState.REISSUING)
        present |= {_suspect(sample.ticket) for sample in samples.values() if sample.state in states}
        for other in [known for known in self.order if known[0] == own[0]]:
            if other in present or other == own:
                return other != own
            del self.order[other]
        return False

    def take(self, waiting: deque[Ticket], samples: Mapping[int, Sample]) -> Ticket | None:
        """Remove and return an evaluation's first ticket that need not wait for a suspect; None without any."""
        found = next((ticket for ticket in waiting if not self.holds(ticket, waiting, samples)), None)
        if found is not None:
            waiting.remove(found)
            self.dealt.append(_suspect(found))
        return found


def _suspect(ticket: Ticket) -> Suspect:
    return ticket.evaluation, ticket.task, ticket.seed
