"""Forecast of the next episodes of an env batch's rows, for rows that are reset ahead.

Task and seed of a ticket follow from its group's number, so they are known before the ticket exists. A forecast changes
no ledger, version or order of tickets; a wrong one costs an unused reset.

Which row gets which ticket is guessed: waiting rows in their order, then running ones, the longest running first.
Across a barrier, which ends all episodes before the next one begins, rows take tickets in the order of their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from polyrhythm.scheduler.records import EnvBatchInfo, PrepareEpisodes
from polyrhythm.scheduler.rollout.evaluation import EvaluationState
from polyrhythm.scheduler.rollout.tickets import RolloutScheduler
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.samples.groups import SampleState

#: Task and seed.
Start = tuple[int, int]


@dataclass(slots=True)
class ResetForecast:
    """batches: those with spare rows: name → (simulator, first slot, spare rows); told: the forecasts last sent."""

    batches: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    told: dict[str, tuple[Start, ...]] = field(default_factory=dict)

    def join(self, simulator: str, infos: tuple[EnvBatchInfo, ...]) -> None:
        for info in infos:
            if info.spares:
                self.batches[info.name] = (simulator, info.slots[0].slot, info.spares)
                self.told.pop(info.name, None)

    def leave(self, simulator: str) -> None:
        for name in [name for name, (host, *_) in self.batches.items() if host == simulator]:
            del self.batches[name]
            self.told.pop(name, None)

    def changes(self, rollout: RolloutScheduler, version: int) -> list[PrepareEpisodes]:
        """The forecasts that differ from the last ones sent. version: the applied one, -1 if none is."""
        if not self.batches:
            return []
        found: dict[str, list[Start]] = {name: [] for name in self.batches}
        for batch, start in _assigned(rollout, version):
            own = found.get(batch)
            if own is not None and len(own) < self.batches[batch][2]:
                own.append(start)
        commands = []
        for name, episodes in ((name, tuple(starts)) for name, starts in found.items()):
            if self.told.get(name, ()) != episodes:
                self.told[name] = episodes
                simulator, slot, _ = self.batches[name]
                commands.append(PrepareEpisodes(simulator, slot, episodes))
        return commands


def _assigned(rollout: RolloutScheduler, version: int) -> Iterator[tuple[str, Start]]:
    """Env batch and episode of the coming grants: one for each row, and a second one across a barrier."""
    evaluation, training = rollout.evaluations.current, coming(rollout)
    if evaluation is None:
        in_order = _in_order(rollout)
        if rollout.settings.max_lag > 0:
            yield from zip(in_order, training, strict=False)
            return
        now = islice(training, max(0, _open(rollout.admission, version)))
        yield from zip(in_order, now, strict=False)
    elif rollout.evaluations.begun:
        yield from zip(_in_order(rollout), _of(evaluation), strict=False)
    places = _by_place(rollout)
    if evaluation is not None and not rollout.evaluations.begun:
        yield from zip(places, _of(evaluation), strict=False)
    yield from zip(places, training, strict=False)


def coming(rollout: RolloutScheduler) -> Iterator[Start]:
    """Task and seed of the remaining training tickets before the target, in the order of granting."""
    admission = rollout.admission
    for number in sorted(admission.lost):
        if (sample := rollout.samples.get(number)) is not None:
            yield sample.ticket.start
    if admission.open_group is not None:
        group = admission.groups[admission.open_group]
        yield from [admission.start_of(group.number)] * (group.size - group.granted)
    size = admission.settings.group_size
    left = admission.target * admission.settings.version_samples - admission.consumed - admission.outstanding_total
    for number in range(admission.next_group, admission.next_group + max(0, left) // size):
        yield from [admission.start_of(number)] * size


def _open(admission: Admission, version: int) -> int:
    """Number of these tickets that may be granted before the next version."""
    size = admission.settings.group_size
    group = None if admission.open_group is None else admission.groups[admission.open_group]
    begun = 0 if group is None else group.size - group.granted
    room = 0 if version < 0 else max(0, admission.room(version)) // size * size
    return len(admission.lost) + begun + room


def _of(evaluation: EvaluationState) -> Iterator[Start]:
    return (ticket.start for ticket in evaluation.waiting)


def _in_order(rollout: RolloutScheduler) -> list[str]:
    """The env batch of each training row, in the expected order of their next tickets."""
    rows = rollout.rows
    idle = [(waiting.env_batch, row) for waiting in rows.idle for row in waiting.rows]
    running = [
        (sample.started, rows.slots[sample.slot].env_batch, sample.row)
        for sample in rollout.samples.values()
        if sample.state is SampleState.RUNNING and not rows.slots[sample.slot].reserved
    ]
    ordered = idle if rows.live else sorted(idle)
    return [batch for batch, _ in ordered] + [batch for _, batch, _ in sorted(running)]


def _by_place(rollout: RolloutScheduler) -> list[str]:
    """The env batch of each training row, in the order of their places."""
    batches = rollout.rows.env_batches
    return [name for name in sorted(batches) for _ in batches[name].slot_of if not batches[name].reserved]
