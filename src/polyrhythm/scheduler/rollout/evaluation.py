"""Evaluations: their episodes run with one version of the weights, while training pauses or in the background.

Their tickets are numbered -1, -2, … and never enter the training ledger or an update. Seeds and noise come from the
episode alone, so the same episodes before and after training face the same states and the same noise.

With `evaluation_hedge`, rows that no episode waits for run copies of the last ones, in their order: the same task, seed
and noise, so the same episode wherever an environment is a function of these. The first of the two to finish counts and
the other is cancelled, so that a simulator that has become slow does not hold the evaluation up. Which one is first
says nothing about how the episode went. (More episodes than are reported, of which the first to finish count, would
select short ones.)

Invariant: per evaluation, wanted = waiting + running + finished + dropped - pairs of an episode and its copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from polyrhythm.scheduler.records import Episode, Ticket
from polyrhythm.scheduler.samples.admission import mix

#: Between the numbers of an episode's ticket and of its only copy's.
_COPY = 1 << 40


def noise_stream(episode: Episode) -> int:
    """The stream of an episode's sampling noise: a function of its seed and of its sample's number."""
    return mix(episode.seed, 3, episode.sample) if episode.sample else mix(episode.seed, 3)


@dataclass(slots=True)
class EvaluationState:
    """One evaluation. wanted: number of its episodes; waiting: tickets not granted yet. version: of the weights in the
    evaluator's second copy, for a background evaluation; -1 until the evaluator has them. single: first attempts that
    run and had no copy yet, as they began; twins: tickets that run of an episode and its copy, each to the other."""

    name: str
    wanted: int
    waiting: deque[Ticket]
    running: int = 0
    finished: int = 0
    dropped: int = 0
    version: int = -1
    single: dict[int, Ticket] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)

    def start(self, ticket: Ticket) -> None:
        """An episode runs."""
        self.running += 1
        if ticket.attempt == 1:  # others have failed, and a copy might fail as they did
            self.single[ticket.number] = ticket

    def end(self, number: int) -> None:
        """A ticket does not run any more, and neither waits for its score; a copy goes on alone."""
        self.running -= 1
        self.single.pop(number, None)
        if (twin := self.twins.pop(number, None)) is not None:
            del self.twins[twin]

    def copy(self) -> Ticket | None:
        """A ticket for a copy of the episode that has run longest without one, once no episode waits."""
        if self.waiting or not self.single:
            return None
        original = self.single.pop(next(iter(self.single)))
        number = original.number - _COPY
        copy = replace(original, number=number, group=number)
        self.running += 1
        self.twins |= {original.number: copy.number, copy.number: original.number}
        return copy

    @property
    def done(self) -> bool:
        return self.finished + self.dropped == self.wanted


@dataclass(slots=True)
class EvaluationQueue:
    """queue: evaluations that training pauses for; the first one is under way if `begun`. background: evaluations in
    the background; the first one is under way once its weights are there. tickets: numbers the tickets."""

    queue: deque[EvaluationState] = field(default_factory=deque)
    background: deque[EvaluationState] = field(default_factory=deque)
    tickets: int = 0
    begun: bool = False

    def add(self, name: str, episodes: Sequence[Episode], *, background: bool = False) -> None:
        """An evaluation is requested."""
        waiting = deque(self._ticket(name, episode) for episode in episodes)
        (self.background if background else self.queue).append(EvaluationState(name, len(waiting), waiting))

    def set_aside(self, start: tuple[int, int], *, background: bool) -> None:
        """Drop the waiting episodes of this task and seed."""
        for evaluation in self.background if background else self.queue:
            left = deque(ticket for ticket in evaluation.waiting if (ticket.task, ticket.seed) != start)
            evaluation.dropped += len(evaluation.waiting) - len(left)
            evaluation.waiting = left
            kept = evaluation.single.items()
            evaluation.single = {number: ticket for number, ticket in kept if (ticket.task, ticket.seed) != start}

    def _ticket(self, name: str, episode: Episode) -> Ticket:
        self.tickets += 1
        return Ticket(
            number=-self.tickets,
            group=-self.tickets,
            task=episode.task,
            instruction=episode.instruction,
            seed=episode.seed,
            noise=noise_stream(episode),
            version=0,
            greedy=episode.greedy,
            evaluation=name,
            shown=episode.shown,
        )

    @property
    def current(self) -> EvaluationState | None:
        """The evaluation that training pauses for, or will next."""
        return self.queue[0] if self.queue else None

    @property
    def current_background(self) -> EvaluationState | None:
        """The background evaluation that is under way, or next."""
        return self.background[0] if self.background else None

    @property
    def under_way(self) -> list[EvaluationState]:
        """Evaluations whose episodes may run: at most one that training pauses for, and one in the background."""
        pausing = [self.queue[0]] if self.begun else []
        return pausing + [first for first in (self.current_background,) if first and first.version >= 0]

    def find(self, ticket: Ticket) -> EvaluationState:
        """The evaluation under way that the ticket belongs to."""
        return next(evaluation for evaluation in self.under_way if evaluation.name == ticket.evaluation)

    def end(self, evaluation: EvaluationState) -> None:
        """The evaluation under way is complete or given up."""
        if evaluation is self.current_background:
            self.background.popleft()
        else:
            assert evaluation is self.current, f"{evaluation.name} is not under way"
            self.queue.popleft()
            self.begun = False
