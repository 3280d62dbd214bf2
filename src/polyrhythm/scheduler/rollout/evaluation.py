"""Evaluations: their episodes run with one version of the weights, while training pauses or in the background.

Their tickets are numbered -1, -2, … and never enter the training ledger or an update. Seeds and noise depend on the
episode alone, so the same episodes before and after training have the same initial states and noise.

With `evaluation_hedge`, rows without a waiting episode run copies of the last ones, in order: the same task, seed and
noise, so the same episode if the environment is a function of these. The first of the two to finish counts and the
other is cancelled, so a slow simulator does not delay the evaluation. Which one is first does not depend on the
episode's outcome. (Running more episodes than are reported, and counting the first to finish, would select short ones.)

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
    """Stream of an episode's sampling noise, from its seed and its sample number."""
    return mix(episode.seed, 3, episode.sample) if episode.sample else mix(episode.seed, 3)


@dataclass(slots=True)
class EvaluationState:
    """One evaluation. wanted: number of its episodes; waiting: tickets not granted yet.

    version: of the weights in the evaluator's second copy, for a background evaluation; -1 until it has them. single:
    running first attempts without a copy, in order of start; twins: running tickets of an episode and its copy, each
    mapped to the other.
    """

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
        self.running += 1
        if ticket.attempt == 1:  # later attempts follow a failure, and a copy might fail too
            self.single[ticket.number] = ticket

    def end(self, number: int) -> None:
        """A ticket neither runs nor waits for its score any more; its twin continues alone."""
        self.running -= 1
        self.single.pop(number, None)
        if (twin := self.twins.pop(number, None)) is not None:
            del self.twins[twin]

    def copy(self) -> Ticket | None:
        """A ticket for a copy of the longest-running episode without one, once no episode waits."""
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
    """queue: evaluations that pause training; the first is under way if `begun`. background: background evaluations;
    the first is under way once its weights are loaded. tickets: counter that numbers the tickets."""

    queue: deque[EvaluationState] = field(default_factory=deque)
    background: deque[EvaluationState] = field(default_factory=deque)
    tickets: int = 0
    begun: bool = False

    def add(self, name: str, episodes: Sequence[Episode], *, background: bool = False) -> None:
        waiting = deque[Ticket]()
        for episode in episodes:
            self.tickets += 1
            waiting.append(
                Ticket(
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
            )
        (self.background if background else self.queue).append(EvaluationState(name, len(waiting), waiting))

    def set_aside(self, start: tuple[int, int], *, background: bool) -> None:
        for evaluation in self.background if background else self.queue:
            left = deque(ticket for ticket in evaluation.waiting if ticket.start != start)
            evaluation.dropped += len(evaluation.waiting) - len(left)
            evaluation.waiting = left
            kept = evaluation.single.items()
            evaluation.single = {number: ticket for number, ticket in kept if ticket.start != start}

    @property
    def current(self) -> EvaluationState | None:
        """The first evaluation that pauses training, begun or not."""
        return self.queue[0] if self.queue else None

    @property
    def current_background(self) -> EvaluationState | None:
        """The first background evaluation, begun or not."""
        return self.background[0] if self.background else None

    @property
    def under_way(self) -> list[EvaluationState]:
        """Evaluations whose episodes may run: at most one that pauses training, and one in the background."""
        pausing = [self.queue[0]] if self.begun else []
        return pausing + [first for first in (self.current_background,) if first and first.version >= 0]

    def find(self, ticket: Ticket) -> EvaluationState:
        return next(evaluation for evaluation in self.under_way if evaluation.name == ticket.evaluation)

    def end(self, evaluation: EvaluationState) -> None:
        """Remove an evaluation that is complete or given up."""
        if evaluation is self.current_background:
            self.background.popleft()
        else:
            assert evaluation is self.current, f"{evaluation.name} is not under way"
            self.queue.popleft()
            self.begun = False
