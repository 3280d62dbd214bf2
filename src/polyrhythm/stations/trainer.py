"""The trainer station: trains on samples, one optimizer step per unit of work, and publishes weights.

Every rank of a trainer runs this station and executes the same commands in the same order, so that their collectives
are in the same order too. Only rank 0's events leave its process.

If publication may overlap the next update and needs no collective (as strategy shard does where its ranks lie on
several hosts, see `Publisher`), a thread copies the weights, or the whole state if it is to be saved, while that update
collates, prepares and does its first forward and backward pass; the first step that changes weights waits for the copy.
The state is written during later steps.

Invariant: a publication or save contains exactly the earlier commands, as commands run in order. A state that is due is
announced once it is written, before any later `UpdateDone`; if it is one file, before its version is published. So
`Published(N)` may come after the next `UpdateDone`, if it is published from the saved copy, but before anything of
version N + 1. A sample is read only between `StartUpdate` and `UpdateDone`. Samples of other hosts are fetched before
training on them, so from then on no other host is needed. While an update lacks samples (`StartUpdate.more`) and has
not changed the weights, a later `SaveTrainer` is executed first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np

from polyrhythm.runtime.memory.arena import FAR, Arena
from polyrhythm.runtime.messages import Channels, OffloadStore, Order, Report, StationTraits, Unobeyable
from polyrhythm.runtime.spans import PUBLISH, SAVE, UPDATE, Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import Checkpointed, PublishWeights, SaveTrainer, StartUpdate, TrainerJoined
from polyrhythm.specs.scores import with_score
from polyrhythm.specs.trajectory import Trajectory
from polyrhythm.stations.simulator.guard import IDLE
from polyrhythm.stations.trainer_io import FarSamples, PublicationJob, Publish, Publisher
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.batch import all_of_version
from polyrhythm.training.checkpoint import Saving
from polyrhythm.training.learner import STEPS
from polyrhythm.training.steps import Metrics, SampleFeed, Steps

#: The number of updates in a state, and its saving.
_Saving = tuple[int, Saving]


class Trainer:
    """Trainer around a `publisher`'s learner; reports the metrics of each update to `channels.report` under the topic
    "update". states: its saved states, if any. overlap: publish in a separate thread if possible."""

    traits = StationTraits()

    def __init__(
        self,
        name: str,
        incarnation: int,
        publisher: Publisher,
        arena: Arena,
        channels: Channels,
        states: TrainerStates | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self._learner, self._publisher, self._arena = publisher.learner, publisher, arena
        self._channels, self._states = channels, states
        self._overlap = overlap and publisher.overlaps
        self._todo: deque[StartUpdate | PublishWeights | SaveTrainer] = deque()
        self._parts: deque[StartUpdate] = deque()  # of the current update, not in its feed yet
        self._far = FarSamples(arena, publisher.learner)
        self._feed: SampleFeed | None = None
        self._samples: list[Trajectory] = []
        self._scores: list[float] = []
        self._updates_since: list[int] = []
        self._steps: Steps | None = None
        self._publication: PublicationJob | None = None
        self._saving: _Saving | None = None  # a state that is being written
        self._saving_began = 0.0
        self._done: StartUpdate | PublishWeights | SaveTrainer | None = None  # in the last unit of work
        self._publication_span: Span | None = None
        self._open = -1  # the update that awaits further samples, if any
        self._published = publisher.learner.updates == 0  # whether its weights are those of the newest version
        self._doing = IDLE
        self._updates_before = publisher.learner.updates
        self._optimizer_steps = 0
        self._update_s = self._publish_s = 0.0

    def joined(self) -> TrainerJoined:
        return TrainerJoined(self.name, self.incarnation, self._learner.updates)

    def handle(self, command: Order) -> None:
        if not isinstance(command, StartUpdate | PublishWeights | SaveTrainer) or command.trainer != self.name:
            raise UnfitMessage("misdirected", f"{self.name} received {type(command).__name__}, which is not for it")
        if isinstance(command, StartUpdate) and not self._can_train(command):
            raise UnfitMessage("impossible", f"{self.name} cannot train on {command}")
        if isinstance(command, PublishWeights) and not 0 <= command.version < FAR - 1:
            raise UnfitMessage("impossible", f"{self.name} cannot publish version {command.version}")
        if isinstance(command, StartUpdate):
            self._far.add(command)
            if self._open == command.update:
                self._open = command.update if command.more else -1
                self._parts.append(command)
                return
            self._open = command.update if command.more else -1
        self._todo.append(command)

    def _can_train(self, command: StartUpdate) -> bool:
        """Whether it is the next update and its samples are in the arena, or may be on another host."""
        due = self._learner.updates + sum(isinstance(other, StartUpdate) for other in self._todo)
        return (
            command.update == (due if self._open < 0 else self._open)
            and 0 < len(command.tickets) == len(command.payload_ids)
            and len(command.scores) in (0, len(command.tickets))
            and command.micro_batch >= 0
            and self._far.could_have(command)
        )

    def work(self) -> bool:
        """Fetch the samples of an update, or do one optimizer step, one publication, or one save.

        Consumes: samples and requests to publish or save, in command order. Waits for: a publication that is still
        copying weights that a step would change; a host that has samples of an update. Unblocked by: `handle`.
        Produces: `UpdateDone` and a report after an update's last step; `Checkpointed`; `Published`. Detecting the end
        of a publication or a save counts as a unit, so that it is reported even if nothing follows.
        """
        noticed = self._publication is not None and self._publication.over
        if noticed:
            self._await_publication()
        if self._saving is not None and self._saving[1].over:
            self._finish_saving()
            noticed = True
        command = self._next()
        if command is None:
            self._done = None
            return noticed
        begin = time.monotonic()
        if self._far and isinstance(command, StartUpdate):
            self._doing, self._done = (_FETCH, begin), None
            self._fetch()
            return True
        self._doing = (_WORDS[type(command)], begin)
        match command:
            case PublishWeights():
                self._publish(command.version)
                self._todo.popleft()
            case SaveTrainer():
                self._await_publication()
                if self._states is not None:
                    self._report_saved(*self._begin_saving(background=False))
                self._todo.remove(command)
            case StartUpdate():
                self._train(command, begin)
        self._doing, self._done = IDLE, command
        return True

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """Spans of the last unit of work, and of the last publication once it has ended."""
        if isinstance(self._done, StartUpdate):
            yield Span(self.name, UPDATE, begin, end, self._done.update)
        elif self._done is not None and not isinstance(self._done, PublishWeights):
            yield Span(self.name, SAVE, begin, end, self._learner.updates)
        if self._publication_span is not None:
            yield self._publication_span
            self._publication_span = None

    def _fetch(self) -> None:
        try:
            self._far.fetch_next()
        except Unobeyable:
            self._todo.clear()
            self._parts.clear()
            self._steps = self._feed = None
            raise
        finally:
            self._doing = IDLE

    def _next(self) -> StartUpdate | PublishWeights | SaveTrainer | None:
        """The command to execute; None if there is none, or only one that waits for samples."""
        if not self._awaits_samples():
            return self._todo[0] if self._todo else None
        assert self._feed is not None
        return None if self._feed.stepped else next((x for x in self._todo if isinstance(x, SaveTrainer)), None)

    def _awaits_samples(self) -> bool:
        return self._feed is not None and self._feed.starved and not self._parts

    def _train(self, command: StartUpdate, begin: float) -> None:
        if self._steps is None:
            self._steps = self._begin_update(command)
        while self._parts and self._feed is not None:
            part = self._parts.popleft()
            self._feed.add(self._read(part), more=part.more)
        try:
            next(self._steps)
            self._optimizer_steps += self._feed is None
            self._update_s += time.monotonic() - begin
        except StopIteration as stop:
            self._todo.popleft()
            self._await_saved()
            metrics = _sample_metrics(self._samples, self._scores, self._updates_since, command.version)
            metrics["time/actor/update"] = self._update_s + time.monotonic() - begin
            metrics |= {f"time/actor/{phase}": s for phase, s in self._learner.phase_seconds.items()}
            if self._publish_s:
                metrics["time/actor/publish"] = self._publish_s
            metrics["train/actor/parts"] = 1.0 if self._feed is None else float(self._feed.taken)
            if self._feed is not None:
                self._optimizer_steps += int(stop.value[STEPS])
            self._steps, self._feed = None, None
            self._samples, self._scores, self._updates_since = [], [], []
            self._published = False
            self._update_s = self._publish_s = 0.0
            self._channels.report(
                Report(self.name, self.incarnation, "update", command.update, {**metrics, **stop.value})
            )
            self._channels.emit(records.UpdateDone(self.name, self.incarnation, command.update, self._learner.halt))

    def _begin_update(self, command: StartUpdate) -> Steps:
        samples, version = self._read(command), command.version
        own = version if self._published else None
        self._learner.set_micro_batch(command.micro_batch)
        if command.more:
            self._feed = SampleFeed()
            self._feed.add(samples, more=True)
            return self._learner.update_in_parts(
                self._feed, command.update, version=version + 1, own_version=own, before_step=self._await_read
            )
        return self._learner.update(
            samples,
            command.update,
            version=version + 1,
            own_weights=self._published and all_of_version(samples, version),
            own_version=own,
            before_step=self._await_read,
        )

    def _read(self, command: StartUpdate) -> list[Trajectory]:
        samples = [self._arena.read(payload_id) for payload_id in command.payload_ids]
        if self._learner.prefixes is not None:
            for payload_id, sample in zip(command.payload_ids, samples, strict=True):
                part = self._arena.layout.block(self._arena.block_of(payload_id), sample.steps)
                sample.entries = np.arange(part.start, part.stop, part.step)
        if command.scores:
            samples = [with_score(sample, score) for sample, score in zip(samples, command.scores, strict=True)]
        self._samples += samples
        self._scores += command.scores
        self._updates_since += command.updates_since
        return samples

    def _publish(self, version: int) -> None:
        self._await_publication()
        self._published = True
        begun = None
        if self._learner.ranks.divides and self._states is not None and self._states.due(version):
            begun = self._begin_saving(background=False)  # which needs the shards where a pass has whole tensors
        publish = partial(self._save_and_publish, self._publisher.prepare(), begun)
        self._publication = PublicationJob(publish, version, self._overlap)

    def _save_and_publish(self, publish: Publish, begun: _Saving | None, publication: PublicationJob) -> None:
        """A state written from a whole copy is written first, and published from that copy. begun: the saving of the
        state that is due, if it has begun."""
        version, policy = publication.version, None
        if self._states is not None and self._states.due(version):
            last = version == self._states.last
            updates, saving = begun or self._begin_saving(background=self._overlap and not last)
            if saving.copied is not None:
                policy = saving.copied["policy"]
                publication.read.set()
            if last or policy is not None or saving.over:
                self._report_saved(updates, saving)
                publication.saved.set()
            else:
                self._saving = updates, saving
        publish(version, policy)
        self._channels.emit(records.Published(self.name, self.incarnation, version))

    def _begin_saving(self, *, background: bool) -> _Saving:
        """Number of updates in the state, and its saving; only one runs at a time."""
        assert self._states is not None
        self._finish_saving()
        self._saving_began = time.monotonic()
        return self._learner.updates, self._states.save(self._learner, background=background)

    def _finish_saving(self) -> None:
        """Wait for the save in the background, if any; raises its error."""
        if self._saving is not None:
            done, self._saving = self._saving, None
            self._report_saved(*done)

    def _report_saved(self, updates: int, saving: Saving) -> None:
        saving.wait()
        self._channels.emit(Checkpointed(self.name, self.incarnation, updates))

    def _await_read(self) -> None:
        """Wait until the current publication has read the weights; raises its error."""
        if self._publication is not None:
            self._publication.wait_for(self._publication.read)

    def _await_saved(self) -> None:
        """Wait until the state that is due is saved; raises the error."""
        if self._publication is not None:
            self._publication.wait_for(self._publication.saved)
        self._finish_saving()

    def _await_publication(self) -> None:
        """Wait for the current publication; raises its error."""
        if self._publication is not None:
            self._publication.wait()
            begin, end = self._publication.lasted
            self._publication_span = Span(self.name, PUBLISH, begin, end, self._publication.version)
            self._publish_s += end - begin
            self._publication = None

    def suspend(self, store: OffloadStore) -> int:
        """As `Offloadable`, all ranks together, after publications and saves; returns the bytes freed on all ranks."""
        assert self._steps is None, f"{self.name} has an update under way"
        self._await_publication()
        self._finish_saving()
        freed = store.suspend(self._learner.kept_tensors())
        return int(self._learner.ranks.totals([freed])[0])

    def resume(self, store: OffloadStore) -> None:
        store.resume()
        self._learner.ranks.totals([0.0])

    def current_call(self) -> tuple[str, float]:
        """The current unit of work, else a background thread's, which has the same time limit and is no stall."""
        return self._doing if self._doing[0] else next(self._background_calls(), IDLE)

    def _background_calls(self) -> Iterator[tuple[str, float]]:
        publication, saving = self._publication, self._saving
        if publication is not None and not publication.over:
            yield _WORDS[PublishWeights], publication.begun
        if saving is not None and not saving[1].over:
            yield _WORDS[SaveTrainer], self._saving_began

    def pending_work(self) -> list[str]:
        waiting = [f"{self.name} has {type(command).__name__} to do" for command in list(self._todo)]
        if self._awaits_samples():
            waiting[0] = f"{self.name} waits for samples of an update"
        return [f"{self.name} is at a {word} in the background" for word, _ in self._background_calls()] + waiting

    def statistics(self) -> dict[str, float]:
        updates = self._learner.updates - self._updates_before  # earlier incarnations counted their own
        counts = {"optimizer_steps": float(self._optimizer_steps), "updates": float(updates)}
        return {**counts, **self._publisher.traffic.statistics()}

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        try:
            self._await_publication()
            self._finish_saving()
        finally:
            self._learner.ranks.close()


#: Command type → name of its unit of work; that in which an update's samples are fetched.
_WORDS: dict[type, str] = {StartUpdate: "update", PublishWeights: "publish", SaveTrainer: "save"}
_FETCH = "fetch"


def _sample_metrics(samples: list[Trajectory], scored: list[float], since: list[int], version: int) -> Metrics:
    """Metrics of the samples. lag: the trainer's version minus a sample's oldest behaviour version; span: its newest
    minus its oldest, above zero if new weights arrived during the sample. Counters by verl's names, whose samples are
    our groups and whose trajectories are our samples."""
    oldest = [int(sample.version.min()) for sample in samples]
    spans = [sample.newest - first for sample, first in zip(samples, oldest, strict=True)]
    lags = [version - first for first in oldest]
    count, stale = len(samples), [sample.group for sample, lag in zip(samples, lags, strict=True) if lag > 0]
    values = {"env/sample_score": sum(scored) / count} if scored else {}
    if since:
        values |= {"staleness/updates_mean": sum(since) / count, "staleness/updates_max": float(max(since))}
    return {
        **values,
        "env/sample_env_steps": sum(sample.env_steps for sample in samples) / count,
        "env/sample_chunk_steps": sum(sample.steps for sample in samples) / count,
        "staleness/lag_mean": sum(lags) / count,
        "staleness/lag_max": float(max(lags)),
        "staleness/partial_ratio": sum(span > 0 for span in spans) / count,
        "staleness/max_partial_span": float(max(spans)),
        "staleness/total_partial_num": float(sum(span > 0 for span in spans)),
        "staleness/stale_samples_processed": float(len(set(stale))),
        "staleness/stale_trajectory_processed": float(len(stale)),
        "train/actor/current_version": float(version),
    }
