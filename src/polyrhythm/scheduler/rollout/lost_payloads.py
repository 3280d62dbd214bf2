"""Finished samples whose host is lost: they are produced again under the same numbers.

buffered or scoring → reissuing: number, version, deadline, group and place in `outstanding` stay, and no attempt is
counted. A group that was complete waits for its members again. A sample in training belongs to the trainer: it has read
it, or it refuses the update and is replaced, which returns the sample to the buffer.

Invariants: a group in the buffer is complete. A block that a scorer reads is released only after the scorer has
answered or is gone, as its fetch from the lost host still writes there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from polyrhythm.scheduler.records import Command, ReleasePayloads
from polyrhythm.scheduler.rollout.scheduler import RolloutScheduler
from polyrhythm.scheduler.samples.groups import Sample
from polyrhythm.scheduler.samples.ledger import SampleState


def reissue_lost(rollout: RolloutScheduler, payload_ids: Collection[str]) -> list[Command]:
    """Grant the finished samples of these payload ids again; frees their blocks, except those being scored."""
    gone = set(payload_ids)
    waiting = (SampleState.BUFFERED, SampleState.SCORING)
    lost = [s for s in rollout.samples.values() if s.state in waiting and s.payload_id in gone]
    if not lost:
        return []
    free = [
        sample.payload_id
        for sample in lost
        if sample.state is not SampleState.SCORING or rollout.scoring.give_up(sample.ticket.number, sample.payload_id)
    ]
    for sample in lost:
        if sample.ticket.evaluation:  # it awaits its score
            rollout.end_evaluated(sample).waiting.append(sample.ticket)
        else:
            _reissue(rollout, sample)
    # They have the attempt that they had, whose deadline was that of the run that is lost.
    again = {sample.ticket.number for sample in lost}
    rollout.expiries = deque(expiry for expiry in rollout.expiries if expiry[1] not in again)
    return [ReleasePayloads(tuple(free))] if free else []


def _reissue(rollout: RolloutScheduler, sample: Sample) -> None:
    if sample.state is SampleState.BUFFERED:
        group = rollout.admission.groups[sample.ticket.group]
        if group.complete:
            rollout.buffer.remove(group)
            group.completed_order = -1
        group.finished -= 1
        group.returns -= sample.episode_return
    sample.payload_id, sample.oldest = "", -1
    rollout.move(sample, SampleState.REISSUING)
    rollout.admission.give_back(sample, blame=False)
