"""Tracks the tickets that rows hold (`granting`) until their samples are buffered or dropped.

A ticket goes running → buffered (→ reissuing, if its host is lost), or running → reissuing → running … → dropped after
`max_attempts`: with its group, or alone if the group has extra members. With scoring, it is `scoring` between running
and buffered (`SampleScoring`). When its task and seed is set aside (`quarantine`) the group is dropped at once. In any
state a ticket may also be dropped because others finished first (`redundancy`) or because its group is filtered
(`limits`). A row waits for a new ticket as soon as its ticket ends.

Invariant: every running ticket occupies one row of a present simulator; every cancelled one occupies its row until the
simulator answers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from polyrhythm.scheduler import records
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import CancelRow, Command, DropReason, Evaluate, EvaluationDone, ReleasePayloads
from polyrhythm.scheduler.rollout.evaluation import EvaluationQueue, EvaluationState
from polyrhythm.scheduler.rollout.rows import RowRegistry, SlotState
from polyrhythm.scheduler.samples import redundancy
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.samples.buffer import SampleBuffer
from polyrhythm.scheduler.samples.groups import Group, Sample, SampleLedger, SampleState
from polyrhythm.scheduler.samples.limits import ReturnFilter
from polyrhythm.scheduler.samples.quarantine import Quarantine, Suspects
from polyrhythm.scheduler.samples.redundancy import SelectionStats
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class SampleScoring:
    """Hook between a finished sample and its group or evaluation; this default does nothing.

    With `SchedulerSettings.scoring` a subclass has stations score samples first (`plugins/scoring`). saved: the
    dataclasses that its state consists of, including its own; empty if it has no state.
    """

    saved: ClassVar[tuple[type, ...]] = ()

    def finish(self, rollout: RolloutScheduler, sample: Sample, now: float) -> list[Command]:
        """Handle a finished sample. One to be scored is counted later, by `RolloutScheduler.complete`."""
        return rollout.complete(sample, now)

    def start(self, _rollout: RolloutScheduler) -> list[Command]:
        """Assign waiting samples to scorers with free places."""
        return []

    def is_full(self, _rollout: RolloutScheduler) -> bool:
        """Whether too many evaluation samples are under way for another evaluation episode to begin."""
        return False

    def give_up(self, _ticket: int, _payload_id: str) -> bool:
        """Drop this sample; whether its payload can be freed now, else it is released later."""
        return True

    def scores(self, _samples: Sequence[Sample]) -> tuple[float, ...]:
        """Score of each sample of an update, apart from its rewards; empty without scoring."""
        return ()

    def has(self, _station: str) -> bool:
        return False

    def join(self, event: records.ScorerJoined) -> None:
        raise AssertionError(f"{event.scorer} has nothing to score in this run")

    def lose(self, rollout: RolloutScheduler, station: str, now: float, *, blame: bool) -> list[Command]:
        """A scorer is lost. blame: that counts as a try of its samples."""
        raise NotImplementedError

    def on_score(self, rollout: RolloutScheduler, event: records.SampleScored, now: float) -> list[Command]:
        raise NotImplementedError

    def on_failure(self, rollout: RolloutScheduler, event: records.ScoringFailed, now: float) -> list[Command]:
        raise NotImplementedError

    def pending(self) -> list[str]:
        return []

    def detach(self, wanted: Collection[int]) -> None:
        """The run was resumed without its scorers. wanted: tickets that still exist."""


@dataclass(slots=True)
class RolloutScheduler:
    """samples: every ticket that is neither trained nor dropped; expiries: (time, ticket, attempt) in order of
    granting. cancelling: (ticket, attempt) → (slot, row) until the simulator answers. max_lag: α by which new groups
    are granted, if it is below the setting's, by which they are lent."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    scoring: SampleScoring = field(metadata=UNSAVED)
    admission: Admission
    buffer: SampleBuffer
    filter: ReturnFilter
    rows: RowRegistry = field(default_factory=RowRegistry)
    ledger: SampleLedger = field(default_factory=SampleLedger)
    evaluations: EvaluationQueue = field(default_factory=EvaluationQueue)
    quarantine: Quarantine = field(default_factory=Quarantine)
    background_quarantine: Quarantine = field(default_factory=lambda: Quarantine(background=True))
    suspects: Suspects = field(default_factory=Suspects)
    selection: SelectionStats = field(default_factory=SelectionStats)
    samples: dict[int, Sample] = field(default_factory=dict)
    cancelling: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    expiries: deque[tuple[float, int, int]] = field(default_factory=deque)
    max_lag: float = math.inf

    def summary(self) -> dict[str, Any]:
        """Counts of filtering and redundancy; empty if neither is on. kept_out_of_bounds: groups trained on although
        their mean return lies outside the filter's bounds."""
        settings, result = self.settings, dict[str, Any]()
        if settings.filters:
            result["kept_out_of_bounds"] = self.filter.accepted
        if settings.extra_groups or settings.extra_members:
            result["selection"] = self.selection.as_dict()
        return result

    def start(self, ticket: records.Ticket, slot: str, row: int, now: float) -> None:
        """A granted ticket occupies this row; one that is reissued keeps its place in the ledger."""
        if ticket.number in self.samples:
            self.ledger.move(SampleState.REISSUING, SampleState.RUNNING)
        elif not ticket.evaluation:
            self.ledger.start()
        self.samples[ticket.number] = Sample(ticket, slot=slot, row=row, started=now)
        if math.isfinite(self.settings.episode_deadline_s):
            self.expiries.append((now + self.settings.episode_deadline_s, ticket.number, ticket.attempt))

    def reissue(self, lost: Collection[Sample]) -> None:
        """Finished samples are lost with their host: their tickets are granted again, as if they had never finished."""
        for sample in lost:
            if sample.ticket.evaluation:  # it awaits its score
                self.end_evaluated(sample).waiting.append(sample.ticket)
                continue
            if sample.state is SampleState.BUFFERED:
                group = self.admission.groups[sample.ticket.group]
                if group.complete:
                    self.buffer.remove(group)
                    group.completed_order = -1
                group.finished -= 1
                group.returns -= sample.episode_return
            sample.payload_id, sample.oldest = "", -1
            self.move(sample, SampleState.REISSUING)
            self.admission.give_back(sample, blame=False)
        # They have the attempt that they had, whose deadline was that of the run that is lost.
        again = {sample.ticket.number for sample in lost}
        self.expiries = deque(expiry for expiry in self.expiries if expiry[1] not in again)

    def finish(self, event: records.SampleFinished, now: float) -> list[Command]:
        """A sample is complete; discard it if it was cancelled meanwhile."""
        sample = self._release_row(event.ticket, event.attempt, parked=event.end is records.SampleEnd.SEGMENT)
        if sample is None:
            return [ReleasePayloads((event.payload_id,))]
        self._quarantine_of(sample.ticket).forget(sample.ticket.start)
        self.suspects.forget(sample.ticket)
        sample.payload_id, sample.oldest, sample.episode_return = event.payload_id, event.oldest, event.episode_return
        sample.chunk_steps, sample.env_steps, sample.seconds = event.chunk_steps, event.env_steps, now - sample.started
        sample.success, sample.metrics, sample.texts = event.success, event.metrics, event.texts
        cancelled: list[Command] = []
        if sample.ticket.evaluation:  # the other running ticket of the episode is not needed any more
            evaluation = self.evaluations.find(sample.ticket)
            evaluation.single.pop(sample.ticket.number, None)
            if (twin := evaluation.twins.get(sample.ticket.number)) is not None:
                other = self.samples[twin]
                self.end_evaluated(other)
                cancelled.append(self._cancel(other))
        return cancelled + self.scoring.finish(self, sample, now)

    def complete(self, sample: Sample, now: float) -> list[Command]:
        """Count a finished sample, whose return is final, in its group or evaluation."""
        if sample.ticket.evaluation:
            return self._finish_evaluation(sample)
        self.move(sample, SampleState.BUFFERED)
        group = self.admission.groups[sample.ticket.group]
        group.finished += 1
        group.returns += sample.episode_return
        return self._complete(group, now) if group.complete else []

    def move(self, sample: Sample, state: SampleState) -> None:
        """Change a sample's state, also in the ledger unless it belongs to an evaluation."""
        if not sample.ticket.evaluation:
            self.ledger.move(sample.state, state)
        sample.state = state

    def _complete(self, group: Group, now: float) -> list[Command]:
        """A group has enough members: drop the others as surplus, and buffer the group or drop it."""
        commands: list[Command] = []
        if len(group.members) > group.size:
            for number in [n for n in group.members if self.samples[n].state is not SampleState.BUFFERED]:
                group.members.remove(number)
                commands += self._drop_member(self.samples[number], DropReason.SURPLUS, now)
        if self.settings.filters:
            kept, notices = self.filter.check(group)
            commands += notices
            if not kept:
                return commands + self.drop(group, DropReason.FILTERED, now)
        if group.spare:  # it takes the place of the oldest incomplete group
            others = (other for other in self.admission.groups.values() if not (other.spare or other.complete))
            self.admission.transfer_quota(next(others), group)
        self.buffer.add(group)
        return commands

    def drop_surplus(self, now: float) -> list[Command]:
        """Cancel the spare groups that no update needs any more."""
        groups = redundancy.surplus(self.admission, self.buffer)
        return [command for group in groups for command in self.drop(group, DropReason.SURPLUS, now)]

    def _finish_evaluation(self, sample: Sample) -> list[Command]:
        ticket = sample.ticket
        self.end_evaluated(sample).finished += 1
        result = records.SampleEvaluated(
            ticket.evaluation,
            ticket.task,
            ticket.instruction,
            ticket.greedy,
            sample.success,
            sample.episode_return,
            sample.oldest,
            sample.metrics,
            ticket.seed,
            sample.env_steps,
            sample.texts,
            ticket.noise,
        )
        return [result, ReleasePayloads((sample.payload_id,))]

    def end_evaluated(self, sample: Sample) -> EvaluationState:
        """Remove a sample of an evaluation; returns the evaluation, in which the caller counts it."""
        del self.samples[sample.ticket.number]
        evaluation = self.evaluations.find(sample.ticket)
        evaluation.end(sample.ticket.number)
        return evaluation

    def fail(self, event: records.SampleFailed, now: float) -> list[Command]:
        """The simulator failed a sample, or confirms a cancellation."""
        sample = self._release_row(event.ticket, event.attempt, parked=False)
        if sample is None:
            return []
        return [*self._on_failure(sample, event.reason), *self._requeue(sample, event.reason, now)]

    def expire(self, now: float) -> list[Command]:
        """Cancel tickets past their deadline and grant them again."""
        commands: list[Command] = []
        while self.expiries and self.expiries[0][0] <= now:
            _, number, attempt = self.expiries.popleft()
            sample = self._running(number, attempt)
            if sample is not None:
                commands += [self._cancel(sample), *self._on_failure(sample, DropReason.DEADLINE)]
                commands += self._requeue(sample, DropReason.DEADLINE, now)
        return commands

    def requeue_slots(
        self, gone: Sequence[SlotState], reason: DropReason, now: float, *, blame: bool = True
    ) -> list[Command]:
        """Requeue the running samples of lost slots. blame: each counts as an attempt."""
        names = {slot.name for slot in gone}
        self.cancelling = {key: place for key, place in self.cancelling.items() if place[0] not in names}
        held = [(slot.name, self.samples.get(number)) for slot in gone for number in slot.tickets.values()]
        # A slot may hold a ticket twice: an attempt that was cancelled, and the present one.
        running = [s for name, s in held if s is not None and s.state is SampleState.RUNNING and s.slot == name]
        lost = list({sample.ticket.number: sample for sample in running}.values())
        commands: list[Command] = []
        for sample in lost if blame else ():
            commands += self._on_failure(sample, reason)
        for sample in lost:
            if sample.ticket.number in self.samples:  # else dropped with the group of another lost sample
                commands += self._requeue(sample, reason, now, blame=blame)
        return commands

    def add_evaluation(self, asked: Evaluate) -> None:
        """Queue an evaluation; its episodes that are set aside are dropped at once."""
        self.evaluations.add(asked.name, asked.episodes, background=asked.background)
        aside = (self.background_quarantine if asked.background else self.quarantine).set_aside
        for start in dict.fromkeys((episode.task, episode.seed) for episode in asked.episodes):
            if start in aside:
                self.evaluations.set_aside(start, background=asked.background)

    def begin_evaluation(self) -> None:
        """Let the first evaluation take the rows; no training episode may run."""
        self.evaluations.begun = True

    def finish_evaluations(self) -> list[Command]:
        """Report the evaluations under way whose episodes have all ended."""
        return [self._end(evaluation) for evaluation in self.evaluations.under_way if evaluation.done]

    def end_early(self, evaluation: EvaluationState) -> list[Command]:
        """End an evaluation whose weights are gone; its missing episodes count as dropped."""
        evaluation.dropped = evaluation.wanted - evaluation.finished
        done, commands = self._end(evaluation), list[Command]()
        for sample in [each for each in self.samples.values() if each.ticket.evaluation == evaluation.name]:
            del self.samples[sample.ticket.number]
            commands += self._free(sample)
        return [*commands, done]

    def _end(self, evaluation: EvaluationState) -> EvaluationDone:
        self.evaluations.end(evaluation)
        self.suspects.end(evaluation.name)
        return EvaluationDone(evaluation.name, evaluation.finished, evaluation.dropped)

    def detach(self, simulators: Sequence[str]) -> None:
        """The run was resumed without its simulators: their tickets are granted again without counting an attempt.
        Evaluations are forgotten, because their requester is gone, and α is the setting's."""
        self.samples = {number: sample for number, sample in self.samples.items() if not sample.ticket.evaluation}
        self.evaluations.queue.clear()
        self.evaluations.background.clear()
        self.evaluations.begun = False
        gone = [slot for simulator in simulators for slot in self.rows.leave(simulator)]
        commands = self.requeue_slots(gone, DropReason.SIMULATOR_LOST, 0.0, blame=False)
        assert not commands, "resuming drops nothing"
        self.expiries.clear()
        self.cancelling.clear()
        self.scoring.detach(self.samples)
        self.max_lag = math.inf

    def next_expiry(self) -> float:
        """Time at which the oldest running ticket expires; infinite without a deadline."""
        while self.expiries:
            expires, number, attempt = self.expiries[0]
            if self._running(number, attempt) is not None:
                return expires
            self.expiries.popleft()
        return math.inf

    def _running(self, number: int, attempt: int) -> Sample | None:
        sample = self.samples.get(number)
        current = sample is not None and sample.state is SampleState.RUNNING and sample.ticket.attempt == attempt
        return sample if current else None

    def _release_row(self, number: int, attempt: int, *, parked: bool) -> Sample | None:
        """Free the row of this attempt; returns its sample, or None if it was cancelled."""
        cancelled = self.cancelling.pop((number, attempt), None)
        if cancelled is not None:
            name, row = cancelled
            self.rows.release(self.rows.slots[name], row, parked=False)
            return None
        sample = self.samples.get(number)
        assert sample is not None, f"ticket {number} ended but is unknown"
        assert sample.state is SampleState.RUNNING, f"ticket {number} ended but was {sample.state}"
        assert sample.ticket.attempt == attempt, f"ticket {number} ended its attempt {attempt}, not the present one"
        self.rows.release(self.rows.slots[sample.slot], sample.row, parked=parked)
        return sample

    def _cancel(self, sample: Sample) -> CancelRow:
        ticket = sample.ticket
        self.cancelling[ticket.number, ticket.attempt] = (sample.slot, sample.row)
        return CancelRow(self.rows.slots[sample.slot].simulator, sample.slot, ticket.number, ticket.attempt)

    def _on_failure(self, sample: Sample, reason: DropReason) -> list[Command]:
        """Count a failed attempt; returns the notice if its task and seed is now set aside. Waiting evaluation episodes
        are dropped then; the failed one goes to `_requeue` next."""
        ticket, limit = sample.ticket, self.settings.quarantine_after
        quarantine, start = self._quarantine_of(ticket), ticket.start
        notices: list[Command] = [*quarantine.on_failure(start, reason, ticket.attempt, limit)]
        if notices:
            self.evaluations.set_aside(start, background=quarantine.background)
        return notices

    def _quarantine_of(self, ticket: records.Ticket) -> Quarantine:
        background = ticket.evaluation and self.evaluations.find(ticket) is self.evaluations.current_background
        return self.background_quarantine if background else self.quarantine

    def _requeue(self, sample: Sample, reason: DropReason, now: float, *, blame: bool = True) -> list[Command]:
        """A running ticket did not finish: grant it again, or drop it with its group after its last attempt. If the
        episode has a copy, only the other of the two continues."""
        if sample.ticket.evaluation and sample.ticket.number in self.evaluations.find(sample.ticket).twins:
            self.end_evaluated(sample)
            return []
        set_aside = sample.ticket.start in self._quarantine_of(sample.ticket).set_aside
        exhausted = set_aside or (blame and sample.ticket.attempt >= self.settings.max_attempts)
        if blame and not exhausted and reason is DropReason.SIMULATOR_LOST:
            self.suspects.on_loss(sample.ticket, self.settings)
        if sample.ticket.evaluation:
            evaluation = self.end_evaluated(sample)
            if exhausted:
                evaluation.dropped += 1
            else:
                evaluation.waiting.append(replace(sample.ticket, attempt=sample.ticket.attempt + blame))
            return []
        if exhausted:
            return self.drop_sample(sample, reason, now, whole_group=set_aside)
        self.move(sample, SampleState.REISSUING)
        self.admission.give_back(sample, blame=blame)
        return []

    def drop_sample(
        self, sample: Sample, reason: DropReason, now: float, *, whole_group: bool = False
    ) -> list[Command]:
        """Drop a sample that has left its row: with its group, or alone if the group has members to spare."""
        group = self.admission.groups[sample.ticket.group]
        if len(group.members) > group.size and not whole_group:
            group.members.remove(sample.ticket.number)
            return self._drop_member(sample, reason, now, off_row=True)
        return self.drop(group, reason, now, already_off_row=sample)

    def drop(
        self, group: Group, reason: DropReason, now: float, already_off_row: Sample | None = None
    ) -> list[Command]:
        """Drop a group: running members are cancelled, finished ones released; a spare group takes its place."""
        commands: list[Command] = []
        if group.completed_order >= 0:
            self.buffer.remove(group)
        for number in group.members:
            sample = self.samples[number]
            commands += self._drop_member(sample, reason, now, off_row=sample is already_off_row)
        if not group.spare and reason != DropReason.ROLLBACK:
            redundancy.replace_by_spare(self.admission, group)
        self.admission.forget(group)
        self.quarantine.forget(sample.ticket.start)  # training seeds do not recur
        return commands

    def _drop_member(self, sample: Sample, reason: DropReason, now: float, *, off_row: bool = False) -> list[Command]:
        """Drop one sample. off_row: it was running and has left its row."""
        if reason == DropReason.SURPLUS:
            self.selection.add_surplus(sample, now)
        del self.samples[sample.ticket.number]
        self.ledger.move(sample.state, SampleState.DROPPED, reason=reason)
        return self._free(sample, off_row=off_row)

    def _free(self, sample: Sample, *, off_row: bool = False) -> list[Command]:
        """Free the row or payload of a dropped sample; a payload that a scorer reads is freed afterwards."""
        here = sample.slot in self.rows.slots  # false if its simulator is lost too
        if sample.state is SampleState.RUNNING:
            return [self._cancel(sample)] if here and not off_row else []
        free = sample.state is not SampleState.SCORING or self.scoring.give_up(sample.ticket.number, sample.payload_id)
        return [ReleasePayloads((sample.payload_id,))] if sample.payload_id and free else []
