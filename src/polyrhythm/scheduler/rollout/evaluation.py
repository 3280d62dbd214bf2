"""Evaluations: episodes of their own, run with one version of the weights, while training tickets wait or beside them.

Their tickets are numbered -1, -2, … and never enter the training ledger or an update. Seeds and noise come from the
episode alone, so the same episodes before and after training face the same states and the same noise.

Invariant: per evaluation, wanted = waiting + running + finished + dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.records import Episode, Ticket
from polyrhythm.scheduler.samples.admission import mix


def noise_stream(episode: Episode) -> int:
    """Of the noise that its actions are sampled with: a function of its seed alone."""
    return mix(episode.seed, 3)


@dataclass(slots=True)
class EvaluationState:
    """The evaluation under way (the first of its queue when it begins). version: of the weights, beside training; -1
    until the evaluator has them."""

    name: str
    wanted: int
    waiting: deque[Ticket]
    running: int = 0
    finished: int = 0
    dropped: int = 0
    version: int = -1

    @property
    def done(self) -> bool:
        return self.finished + self.dropped == self.wanted


@dataclass(slots=True)
class EvaluationQueue:
    """queue: evaluations asked for, the first one under way once it may begin; beside: the same for those that run
    beside training."""

    queue: deque[EvaluationState] = field(default_factory=deque)
    beside: deque[EvaluationState] = field(default_factory=deque)
    tickets: int = 0
    begun: bool = False

    def ask(self, name: str, episodes: Sequence[Episode], *, beside: bool = False) -> None:
        waiting = deque(self._ticket(name, episode) for episode in episodes)
        (self.beside if beside else self.queue).append(EvaluationState(name, len(waiting), waiting))

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
        )

    @property
    def current(self) -> EvaluationState | None:
        return self.queue[0] if self.queue else None

    @property
    def aside(self) -> EvaluationState | None:
        """The evaluation beside training that is under way, or next."""
        return self.beside[0] if self.beside else None

    @property
    def under_way(self) -> list[EvaluationState]:
        """Those whose episodes may run: at most one that training waits for, and one beside it."""
        pausing = [self.queue[0]] if self.begun else []
        return pausing + [evaluation for evaluation in (self.aside,) if evaluation and evaluation.version >= 0]

    def of(self, ticket: Ticket) -> EvaluationState:
        """The evaluation under way that the ticket belongs to."""
        return next(evaluation for evaluation in self.under_way if evaluation.name == ticket.evaluation)

    def end(self, evaluation: EvaluationState) -> None:
        """The evaluation under way is over, by whatever way."""
        if evaluation is self.aside:
            self.beside.popleft()
        else:
            assert evaluation is self.current, f"{evaluation.name} is not under way"
            self.queue.popleft()
            self.begun = False
