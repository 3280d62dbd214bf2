"""Grants tickets to rows: which tickets go out, to which rows, and again after their samples are lost.

Finished samples whose host is lost (`reissue_lost`) are produced again under the same numbers. buffered or scoring →
reissuing: number, version, deadline, group and place in `outstanding` stay, and no attempt is counted. A group that was
complete waits for its members again. A sample in training belongs to the trainer: it has read it, or it refuses the
update and is replaced, which returns the sample to the buffer.

Invariants: a group in the buffer is complete. A block that a scorer reads is released only after the scorer has
answered or is gone, as its fetch from the lost host still writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import islice

from polyrhythm.scheduler.records import Command, Grant, ReleasePayloads, StartRows, Ticket
from polyrhythm.scheduler.rollout.evaluation import EvaluationState
from polyrhythm.scheduler.rollout.rows import IdleRows
from polyrhythm.scheduler.rollout.tickets import RolloutScheduler
from polyrhythm.scheduler.samples import redundancy
from polyrhythm.scheduler.samples.groups import SampleState


def grant(rollout: RolloutScheduler, version: int, now: float, *, training: bool) -> list[Command]:
    """Give waiting rows the tickets that are due at applied version `version`. The tickets of a begun evaluation go
    first; without one, those of training if `training`."""
    rows, admission = rollout.rows, rollout.admission
    evaluation = rollout.evaluations.current if rollout.evaluations.begun else None
    if evaluation is not None:
        rows.sort_idle()
        dealt = _deal(rollout, lambda: _next_of(rollout, evaluation, version), lambda: rows.next_idle(fresh=True), now)
        return [*dealt, *_hedge(rollout, evaluation, rows.idle, now)]
    if not training or (admission.closed(version) and redundancy.is_closed(admission, rollout.buffer)):
        return []
    rows.sort_idle()
    samples, suspects = rollout.samples, rollout.suspects

    def is_held(lost: int) -> bool:
        return lost not in samples or suspects.holds(samples[lost].ticket, (), samples)

    def next_ticket() -> Ticket | None:
        if _is_held_back(rollout, version) and all(map(is_held, admission.lost)):
            return None
        lost_first = admission.next(version, samples, lambda lost: suspects.holds(lost, (), samples))
        return lost_first or redundancy.next_ticket(admission, rollout.buffer, version)

    return _deal(rollout, next_ticket, rows.next_idle, now)


def _is_held_back(rollout: RolloutScheduler, version: int) -> bool:
    """Whether an α below the setting's has no room for a new group. A group begun is completed all the same."""
    admission, settings = rollout.admission, rollout.settings
    if rollout.max_lag >= settings.max_lag or admission.open_group is not None:
        return False
    limit = settings.limit(version, rollout.max_lag)
    return admission.consumed + admission.outstanding_total + settings.group_size > limit


def grant_background(rollout: RolloutScheduler, now: float) -> list[Command]:
    """Give reserved rows the tickets of the background evaluation, once its weights are loaded."""
    evaluation, idle = rollout.evaluations.current_background, rollout.rows.reserved
    if evaluation is None or evaluation.version < 0 or not idle:
        return []
    own, version = lambda: idle[0] if idle else None, evaluation.version
    dealt = _deal(rollout, lambda: _next_of(rollout, evaluation, version), own, now)
    return [*dealt, *_hedge(rollout, evaluation, idle, now)]


def _next_of(rollout: RolloutScheduler, evaluation: EvaluationState, version: int) -> Ticket | None:
    if rollout.scoring.is_full(rollout):
        return None
    ticket = rollout.suspects.take(evaluation.waiting, rollout.samples)
    if ticket is None:
        return None
    ticket = replace(ticket, version=version)
    evaluation.start(ticket)
    return ticket


def _hedge(
    rollout: RolloutScheduler, evaluation: EvaluationState, idle: Iterable[IdleRows], now: float
) -> list[Command]:
    """Copies of the evaluation's last episodes on otherwise idle rows, except rows with parked episodes."""
    if not rollout.settings.evaluation_hedge or not evaluation.single:
        return []
    return _deal(
        rollout,
        lambda: None if rollout.scoring.is_full(rollout) else evaluation.copy(),
        lambda: next((rows for rows in idle if not rows.parked), None),
        now,
    )


def _deal(
    rollout: RolloutScheduler,
    next_ticket: Callable[[], Ticket | None],
    next_idle: Callable[[], IdleRows | None],
    now: float,
) -> list[Command]:
    """Grant tickets to waiting rows until tickets or rows run out."""
    rows, grants = rollout.rows, dict[str, list[Grant]]()
    while (idle := next_idle()) is not None:
        tickets = list(islice(iter(next_ticket, None), len(idle.rows)))
        if not tickets:
            break
        placed = rows.occupy(idle, [ticket.number for ticket in tickets])
        for ticket, (slot, row) in zip(tickets, placed, strict=True):
            rollout.start(ticket, slot.name, row, now)
            resume = idle.parked and not ticket.evaluation
            grants.setdefault(slot.name, []).append(Grant(row, ticket, resume))
        rollout.suspects.on_granted()
    return [StartRows(rows.slots[slot].simulator, slot, tuple(items)) for slot, items in grants.items()]


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
    rollout.reissue(lost)
    return [ReleasePayloads(tuple(free))] if free else []
