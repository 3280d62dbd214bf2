"""Updates: which samples the trainer gets, and when a version is published.

With `parts` an update begins with the groups that may be lent, and gets the others as soon as they may be. Each is lent
by the rule for whole updates (`SampleBuffer.choose`): at that moment the deadlines of all unlent samples can be kept.
As `consumed` counts lent samples, that rule keeps the lag bound of every group, however many parts an update has.

Invariant: at most one update is in training; its groups are either trained or return to the buffer, never both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from polyrhythm.scheduler import records
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import Command, DropReason, Halt, PublishWeights, ReleasePayloads, StartUpdate
from polyrhythm.scheduler.rollout.tickets import RolloutScheduler
from polyrhythm.scheduler.samples.groups import Group, SampleState
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.scheduler.versions import VersionLedger


@dataclass(slots=True)
class UpdateScheduler:
    """trainer: name of the present one, "" for none; in_training: groups of the update under way. undoable: (update,
    samples) trained since the last checkpoint, oldest first: a lost trainer may undo them. micro_batch: chunk steps of
    a training pass of updates that begin from now on, 0: the recipe's."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    trainer: str = ""
    in_training: list[Group] = field(default_factory=list)
    undoable: deque[tuple[int, int]] = field(default_factory=deque)
    micro_batch: int = 0

    @property
    def is_complete(self) -> bool:
        return sum(group.size for group in self.in_training) == self.settings.batch_size

    def join(
        self, trainer: str, updates: int, versions: VersionLedger, rollout: RolloutScheduler, now: float
    ) -> list[Command]:
        """Add a trainer, new or restarted from a checkpoint. updates: contained in its weights."""
        self.trainer = trainer
        undone, publish = versions.restart(updates)
        if undone < 0:
            raise ValueError(f"trainer {trainer!r} has {updates} updates; only {updates + undone} were ever trained")
        while self.undoable and self.undoable[-1][0] >= updates:
            _, count = self.undoable.pop()
            rollout.ledger.move(SampleState.TRAINED, SampleState.ROLLED_BACK, count)
        settings, admission = self.settings, rollout.admission
        admission.consumed = versions.trained * settings.version_samples + versions.in_version * settings.batch_size
        commands = self._drop_late(rollout, now) if settings.bound == "sample" else []
        return [*commands, PublishWeights(trainer, versions.trained)] if publish else commands

    def _drop_late(self, rollout: RolloutScheduler, now: float) -> list[Command]:
        """Drop samples that can no longer be lent in time after a jump of the version, unfinished ones first."""
        admission, commands = rollout.admission, list[Command]()
        while late := [version for version, slack in admission.slack() if slack < 0]:
            group = min(
                (group for group in admission.groups.values() if group.version <= late[0] and not group.spare),
                key=lambda group: (group.complete, -group.number),
            )
            commands += rollout.drop(group, DropReason.ROLLBACK, now)
        return commands

    def leave(self, rollout: RolloutScheduler) -> None:
        """Remove the trainer: its samples return to the buffer."""
        self.trainer = ""
        rollout.admission.restore(self.in_training)
        for group in self.in_training:
            for number in group.members:
                rollout.samples[number].state = SampleState.BUFFERED
            rollout.ledger.move(SampleState.IN_TRAINING, SampleState.BUFFERED, group.size)
            rollout.buffer.add(group)
        self.in_training = []

    def start(self, versions: VersionLedger, rollout: RolloutScheduler) -> list[Command]:
        """Start an idle trainer's next update if its samples are available, or lend more samples to the current one."""
        settings = self.settings
        if not self.trainer or (self.in_training and (not settings.parts or self.is_complete)):
            return []
        if not (settings.streaming or versions.in_version) and rollout.buffer.samples < settings.version_samples:
            return []
        groups = rollout.buffer.choose(rollout.admission, sum(group.size for group in self.in_training))
        if groups is None:
            return []
        if not self.in_training:
            rollout.filter.next_update()
        self.in_training += groups
        numbers: list[int] = []
        for group in groups:
            rollout.buffer.remove(group)
            rollout.admission.consume(group)
            rollout.ledger.move(SampleState.BUFFERED, SampleState.IN_TRAINING, group.size)
            numbers += sorted(group.members)
        if self.settings.order == "ticket":
            numbers.sort()
        samples = [rollout.samples[number] for number in numbers]
        for sample in samples:
            sample.state = SampleState.IN_TRAINING
        return [
            StartUpdate(
                self.trainer,
                versions.updates,
                versions.trained,
                tuple(numbers),
                tuple(sample.payload_id for sample in samples),
                tuple(sample.oldest for sample in samples),
                rollout.scoring.scores(samples),
                tuple(max(0, versions.updates - versions.updates_in(sample.oldest)) for sample in samples),
                more=not self.is_complete,
                micro_batch=self.micro_batch,
            )
        ]

    def finish(self, event: records.UpdateDone, versions: VersionLedger, rollout: RolloutScheduler) -> list[Command]:
        assert self.is_complete, f"update {event.update} is done, but not all of its samples were lent"
        assert event.update == versions.updates, f"update {event.update} is done, {versions.updates} was due"
        payload_ids: list[str] = []
        for group in self.in_training:
            for number in group.members:
                sample = rollout.samples.pop(number)
                rollout.selection.trained.add(sample, sample.seconds)
                payload_ids.append(sample.payload_id)
        count = len(payload_ids)
        rollout.ledger.move(SampleState.IN_TRAINING, SampleState.TRAINED, count)
        self.undoable.append((versions.updates, count))
        self.in_training = []
        commands: list[Command] = [ReleasePayloads(tuple(payload_ids))]
        if versions.count_update():
            commands.append(PublishWeights(self.trainer, versions.trained))
        if event.halt:
            commands.append(Halt(event.halt))
        return commands

    def on_checkpoint(self, updates: int) -> None:
        """The first `updates` updates are saved and cannot be undone."""
        while self.undoable and self.undoable[0][0] < updates:
            self.undoable.popleft()
