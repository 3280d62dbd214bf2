"""Finished samples whose host is lost: they are produced again under the same numbers.

buffered → reissuing: number, version, deadline, group and place in `outstanding` stay, and it counts as no attempt. A
group that was complete waits for its members again. A sample in training is the trainer's: it has read it, or refuses
the update and is replaced, so that the sample is in the buffer again.

Invariant: a group in the buffer is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from polyrhythm.scheduler.records import Command, ReleasePayloads
from polyrhythm.scheduler.rollout.scheduler import RolloutScheduler
from polyrhythm.scheduler.samples.ledger import SampleState


def reissue_lost(rollout: RolloutScheduler, payload_ids: Collection[str]) -> list[Command]:
    """Let the buffered samples of these payload ids go out again; their blocks are free."""
    gone = set(payload_ids)
    released: list[str] = []
    again: set[int] = set()
    for sample in rollout.samples.values():
        if sample.state is not SampleState.BUFFERED or sample.payload_id not in gone:
            continue
        group = rollout.admission.groups[sample.ticket.group]
        if group.complete:
            rollout.buffer.remove(group)
            group.completed_order = -1
        group.finished -= 1
        group.returns -= sample.episode_return
        released.append(sample.payload_id)
        again.add(sample.ticket.number)
        sample.payload_id, sample.oldest = "", -1
        rollout.ledger.move(SampleState.BUFFERED, SampleState.REISSUING)
        sample.state = SampleState.REISSUING
        rollout.admission.give_back(sample, blame=False)
    if not released:
        return []
    # They have the attempt that they had, whose deadline was that of the run that is lost.
    rollout.expiries = deque(expiry for expiry in rollout.expiries if expiry[1] not in again)
    return [ReleasePayloads(tuple(released))]
