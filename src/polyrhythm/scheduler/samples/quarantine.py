"""Quarantine: a task and seed whose episodes keep failing is set aside.

Counted are failures that the environment can cause: it raised, its numbers were not finite, the episode passed its
deadline, or the simulator was lost. An episode that the environment refuses is set aside at once. A lost simulator
takes episodes with it that did nothing wrong, and a lost host has several simulators. So a loss counts only together
with earlier attempts of the same ticket: the count becomes at least the number of this attempt. An episode that
finishes clears the count.

A training group whose task and seed is set aside is dropped whole and replaced; seeds of training never come again.
Episodes of evaluations come again, and are not started any more. Background evaluations have a quarantine of their own,
so that they change none of training's decisions.

Suspects: a call that hangs, or a crash, takes a whole simulator and all episodes that ran there. One of them may be
the cause, and would be again. So an episode has its last attempt (before it is set aside or dropped), if it lost a
simulator in the one before, as the only such one of its run or evaluation: the others wait, rows go to other tickets
meanwhile. The cause then fails alone, and its neighbours finish in their turn. With three attempts (`max_attempts`,
`quarantine_after`): 4 rows of one simulator, one of them hangs at its first step. Attempts 1 and 2 are lost by all
four. In attempt 3 the four run one after another: three finish, one is set aside.

Invariants: no ticket is granted for a task and seed that is set aside; of the suspects of a run, or of an evaluation,
no two run that have different tasks or seeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from polyrhythm.scheduler.records import DropReason, EpisodeSetAside, Ticket
from polyrhythm.scheduler.samples.groups import Sample
from polyrhythm.scheduler.samples.ledger import SampleState
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
    """failures: counted ones since an episode of this task and seed last finished; set_aside: those of whom that
    became too many, with the last failure's reason, in the order in which it happened. background: of the background
    evaluations."""

    background: bool = False
    failures: dict[Start, int] = field(default_factory=dict)
    set_aside: dict[Start, DropReason] = field(default_factory=dict)

    def on_failure(self, start: Start, reason: DropReason, attempt: int, limit: int) -> list[EpisodeSetAside]:
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


#: Name of the evaluation (empty: training), task, seed.
Suspect = tuple[str, int, int]


@dataclass(slots=True)
class Suspects:
    """order: suspects in the order in which they became it; the first that still has a ticket may run. dealt: suspects
    whose ticket an evaluation gave away, and who have no row yet."""

    order: dict[Suspect, None] = field(default_factory=dict)
    dealt: list[Suspect] = field(default_factory=list)

    def on_loss(self, ticket: Ticket, settings: SchedulerSettings) -> None:
        """The simulator of this attempt was lost, and another attempt follows."""
        last = min(settings.max_attempts, settings.quarantine_after or settings.max_attempts)
        if ticket.attempt + 1 >= last:
            self.order[_suspect(ticket)] = None

    def forget(self, ticket: Ticket) -> None:
        """An episode of this task and seed finished."""
        self.order.pop(_suspect(ticket), None)

    def end(self, evaluation: str) -> None:
        """This evaluation is over."""
        self.order = {known: None for known in self.order if known[0] != evaluation}

    def holds(self, ticket: Ticket, waiting: Iterable[Ticket], samples: Mapping[int, Sample]) -> bool:
        """Whether this ticket has to wait for another suspect. waiting: tickets of its evaluation that do not run."""
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
        """Remove the first of an evaluation's waiting tickets that has not to wait for a suspect; None without one."""
        found = next((ticket for ticket in waiting if not self.holds(ticket, waiting, samples)), None)
        if found is not None:
            waiting.remove(found)
            self.dealt.append(_suspect(found))
        return found


def _suspect(ticket: Ticket) -> Suspect:
    return ticket.evaluation, ticket.task, ticket.seed
