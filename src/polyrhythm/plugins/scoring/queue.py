"""Scoring of finished samples: running → scoring → buffered.

A try fails if the reward function raises or the scorer is lost; after `max_attempts` failed tries the sample is dropped
and replaced. It is not produced again, since the sample itself could not be scored. A score is added to the sample's
return, and goes to the trainer with the sample.

First come, first served; a sample whose try failed goes first. Each try has its own number, because a sample may be
dropped, or run again, while a scorer still works on the old one.

A sample whose scorer was lost is next scored alone: its scorer has no other sample meanwhile. So a sample that crashes
its scorer takes others with it only once.

Invariants: a sample in the state scoring waits here or has one current try; a sample that is dropped while a scorer
reads it keeps its payload until the scorer has answered or is gone; no scorer has more samples than places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import Command, DropReason, ReleasePayloads, SampleScored, ScoreCounted, ScorerJoined
from polyrhythm.scheduler.rollout.tickets import RolloutScheduler, SampleScoring
from polyrhythm.scheduler.samples.groups import Sample, SampleState


@dataclass(frozen=True, slots=True)
class ScoringTry:
    """A sample to score. failed: earlier failed tries; alone: its scorer gets no other sample meanwhile. number: of the
    try, -1 before it begins; given_up: the score is no longer needed; payload_id: to release then, "" for none."""

    ticket: int
    failed: int = 0
    alone: bool = False
    number: int = -1
    given_up: bool = False
    payload_id: str = ""


@dataclass(slots=True)
class ScorerState:
    """A present scorer. under_way: its tries by number."""

    places: int
    under_way: dict[int, ScoringTry] = field(default_factory=dict)

    def takes(self, waiting: ScoringTry) -> bool:
        """Whether it has a place for this sample now."""
        if waiting.alone or any(other.alone for other in self.under_way.values()):
            return not self.under_way
        return len(self.under_way) < self.places


@dataclass(slots=True)
class ScoringQueue(SampleScoring):
    """waiting: samples without a scorer, in order; scorers: by name; begun: number of tries so far."""

    saved: ClassVar[tuple[type, ...]] = ()  # below: this class is one of them

    waiting: deque[ScoringTry] = field(default_factory=deque)
    scorers: dict[str, ScorerState] = field(default_factory=dict)
    begun: int = 0

    def add(self, ticket: int) -> None:
        self.waiting.append(ScoringTry(ticket))

    def begin(self) -> list[tuple[str, ScoringTry]]:
        """Assign waiting samples to scorers with free places, least busy first; returns the new tries."""
        started: list[tuple[str, ScoringTry]] = []
        while self.waiting:
            first = self.waiting[0]
            able = [(len(scorer.under_way), name) for name, scorer in self.scorers.items() if scorer.takes(first)]
            if not able:
                break
            _, name = min(able)
            self.waiting.popleft()
            begun = replace(first, number=self.begun)
            self.begun += 1
            self.scorers[name].under_way[begun.number] = begun
            started.append((name, begun))
        return started

    def end(self, scorer: str, number: int) -> ScoringTry:
        return self.scorers[scorer].under_way.pop(number)

    def retry(self, ended: ScoringTry, *, blame: bool = True, alone: bool = False) -> None:
        """Queue the sample first. blame: the ended try counts as failed."""
        self.waiting.appendleft(replace(ended, number=-1, failed=ended.failed + blame, alone=ended.alone or alone))

    def finish(self, rollout: RolloutScheduler, sample: Sample, now: float) -> list[Command]:  # noqa: ARG002
        rollout.move(sample, SampleState.SCORING)
        self.add(sample.ticket.number)
        return []

    def start(self, rollout: RolloutScheduler) -> list[Command]:
        commands: list[Command] = []
        for scorer, begun in self.begin():
            sample = rollout.samples[begun.ticket]
            number, start, evaluated = begun.number, sample.ticket.start, bool(sample.ticket.evaluation)
            commands.append(records.ScoreSample(scorer, number, begun.ticket, sample.payload_id, *start, evaluated))
        return commands

    def is_full(self, rollout: RolloutScheduler) -> bool:
        """Whether the evaluations have as many unscored samples in blocks as allowed."""
        rules = rollout.settings.scoring
        assert rules is not None, "samples are scored in a run without scorers"
        return sum(each.running for each in rollout.evaluations.under_way) >= rules.max_evaluations

    def give_up(self, ticket: int, payload_id: str) -> bool:
        self.waiting = deque(waiting for waiting in self.waiting if waiting.ticket != ticket)
        for scorer in self.scorers.values():
            for number, begun in scorer.under_way.items():
                if begun.ticket == ticket and not begun.given_up:
                    scorer.under_way[number] = replace(begun, given_up=True, payload_id=payload_id)
                    return False
        return True

    def scores(self, samples: Sequence[Sample]) -> tuple[float, ...]:
        return tuple(sample.score for sample in samples)

    def has(self, station: str) -> bool:
        return station in self.scorers

    def join(self, event: ScorerJoined) -> None:
        self.scorers[event.scorer] = ScorerState(event.places)

    def lose(self, rollout: RolloutScheduler, station: str, now: float, *, blame: bool) -> list[Command]:
        under_way = self.scorers.pop(station).under_way
        commands: list[Command] = []
        for ended in sorted(under_way.values(), key=lambda ended: -ended.number):  # the earliest goes first again
            if blame:
                commands += self._fail(rollout, ended, DropReason.SCORER_LOST, now)
            elif ended.given_up:
                commands += _release(ended)
            else:
                self.retry(ended, blame=False)
        return commands

    def on_score(self, rollout: RolloutScheduler, event: SampleScored, now: float) -> list[Command]:
        ended = self.end(event.scorer, event.number)
        if ended.given_up:
            return _release(ended)
        sample = rollout.samples[ended.ticket]
        sample.score = event.score
        sample.episode_return += event.score
        if event.success is not None:
            sample.success = event.success
        counted: list[Command] = [ScoreCounted(ended.ticket, event.score, sample.success)]
        return [*([] if sample.ticket.evaluation else counted), *rollout.complete(sample, now)]

    def on_failure(self, rollout: RolloutScheduler, event: records.ScoringFailed, now: float) -> list[Command]:
        """The reward function failed: retry, or drop the sample."""
        ended = self.end(event.scorer, event.number)
        return self._fail(rollout, ended, DropReason.SCORING_FAILED, now)

    def _fail(self, rollout: RolloutScheduler, ended: ScoringTry, reason: DropReason, now: float) -> list[Command]:
        if ended.given_up:
            return _release(ended)
        sample = rollout.samples.get(ended.ticket)
        if sample is None:
            return []  # dropped with another one's group when their scorer was lost, and released
        rules = rollout.settings.scoring
        assert rules is not None, "a sample is scored in a run without scorers"
        if ended.failed + 1 < rules.max_attempts:
            self.retry(ended, alone=reason is DropReason.SCORER_LOST)
            return []
        if not sample.ticket.evaluation:
            assert sample.state is SampleState.SCORING, f"{sample} is dropped unscored"
            return rollout.drop_sample(sample, reason, now)
        rollout.end_evaluated(sample).dropped += 1
        return [ReleasePayloads((sample.payload_id,))]

    def pending(self) -> list[str]:
        scorers = ", ".join(f"{name} ({len(state.under_way)} samples)" for name, state in self.scorers.items())
        return [f"{len(self.waiting)} samples wait for scorers {scorers or '(none)'}"]

    def detach(self, wanted: Collection[int]) -> None:
        """The scorers are gone, which counts as no try."""
        under_way = [begun for scorer in self.scorers.values() for begun in scorer.under_way.values()]
        kept = [begun for begun in under_way if not begun.given_up]
        again = [replace(begun, number=-1) for begun in sorted(kept, key=lambda begun: begun.number)]
        self.waiting = deque(each for each in (*again, *self.waiting) if each.ticket in wanted)
        self.scorers.clear()


ScoringQueue.saved = (ScoringQueue, ScorerState, ScoringTry)


def _release(ended: ScoringTry) -> list[Command]:
    return [ReleasePayloads((ended.payload_id,))] if ended.payload_id else []
