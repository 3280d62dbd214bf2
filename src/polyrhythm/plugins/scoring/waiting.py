"""From a finished sample to one that has its score: running → scoring → buffered.

A try fails where the reward function raises, and where its scorer is lost; after `max_attempts` of them the sample is
dropped and replaced like any other lost one. It is not produced again, since what the scorer could not score was the
sample. A score is added to the sample's return, and goes to the trainer with the sample.

Invariant: a sample in the state scoring waits in the queue or has one try under way that is not given up.
"""

from __future__ import annotations

from polyrhythm.plugins.scoring.rules import ScorerState, ScoringTry
from polyrhythm.scheduler.records import (
    Command,
    DropReason,
    ReleasePayloads,
    SampleScored,
    ScoreCounted,
    ScorerJoined,
    ScoreSample,
    ScoringFailed,
)
from polyrhythm.scheduler.rollout.scheduler import RolloutScheduler
from polyrhythm.scheduler.samples.groups import Sample
from polyrhythm.scheduler.samples.ledger import SampleState


def join_scorer(rollout: RolloutScheduler, event: ScorerJoined) -> None:
    """A scorer is there."""
    assert rollout.settings.scoring is not None, f"{event.scorer} has nothing to score in this run"
    rollout.scoring.scorers[event.scorer] = ScorerState(event.places)


def start_scoring(rollout: RolloutScheduler) -> list[Command]:
    """Give waiting samples to scorers that have places."""
    commands: list[Command] = []
    for scorer, begun in rollout.scoring.start():
        sample = rollout.samples[begun.ticket]
        ticket = sample.ticket
        commands.append(
            ScoreSample(
                scorer,
                begun.number,
                ticket.number,
                sample.payload_id,
                ticket.task,
                ticket.seed,
                bool(ticket.evaluation),
            )
        )
    return commands


def note_score(rollout: RolloutScheduler, event: SampleScored, now: float) -> list[Command]:
    """A sample has its score: it counts for its group, or its evaluation."""
    ended = rollout.scoring.end(event.scorer, event.number)
    if ended.given_up:
        return _release(ended)
    sample = rollout.samples[ended.ticket]
    sample.score = event.score
    sample.episode_return += event.score
    if event.success is not None:
        sample.success = event.success
    told: list[Command] = [ScoreCounted(ended.ticket, event.score, sample.success)]
    return [*([] if sample.ticket.evaluation else told), *rollout.complete(sample, now)]


def note_scoring_failure(rollout: RolloutScheduler, event: ScoringFailed, now: float) -> list[Command]:
    """The reward function raised: again, or drop the sample."""
    return _fail(rollout, rollout.scoring.end(event.scorer, event.number), DropReason.SCORING_FAILED, now)


def lose_scorer(rollout: RolloutScheduler, name: str, now: float, *, blame: bool) -> list[Command]:
    """A scorer is lost, and with it what it was scoring. blame: that counts as a try."""
    under_way = rollout.scoring.scorers.pop(name).under_way
    commands: list[Command] = []
    for ended in sorted(under_way.values(), key=lambda ended: -ended.number):  # the earliest goes first again
        if blame:
            commands += _fail(rollout, ended, DropReason.SCORER_LOST, now)
        elif ended.given_up:
            commands += _release(ended)
        else:
            rollout.scoring.retry(ended, blame=False)
    return commands


def _fail(rollout: RolloutScheduler, ended: ScoringTry, reason: DropReason, now: float) -> list[Command]:
    if ended.given_up:
        return _release(ended)
    sample = rollout.samples.get(ended.ticket)
    if sample is None:
        return []  # dropped with another one's group when their scorer was lost, and released
    rules = rollout.settings.scoring
    assert rules is not None, "a sample is scored in a run without scorers"
    if ended.failed + 1 < rules.max_attempts:
        rollout.scoring.retry(ended, alone=reason is DropReason.SCORER_LOST)
        return []
    return _drop(rollout, sample, reason, now)


def _drop(rollout: RolloutScheduler, sample: Sample, reason: DropReason, now: float) -> list[Command]:
    """The sample has had all its tries."""
    if not sample.ticket.evaluation:
        assert sample.state is SampleState.SCORING, f"{sample} is dropped unscored"
        return rollout.drop_sample(sample, reason, now)
    rollout.end_evaluated(sample).dropped += 1
    return [ReleasePayloads((sample.payload_id,))]


def _release(ended: ScoringTry) -> list[Command]:
    """Nobody reads the sample any more."""
    return [ReleasePayloads((ended.payload_id,))] if ended.payload_id else []
