"""Updates of a policy by reinforcement learning, on one rank or several: trajectories in, new weights and metrics out.

Invariants (tests/training/test_learner.py): the gradient of an optimizer step does not depend on the micro-batch
size; an update is a function of the weights, the optimizer's state, the trajectories, the seed and the update's
index alone; masked entries have no effect; a gradient that is not finite changes neither weights nor optimizer.
The number of ranks changes nothing but rounding (tests/training/test_ranks.py), nor do the parts in which samples come
(tests/training/test_streamed_updates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import published_state
from polyrhythm.specs import Trajectory
from polyrhythm.training import optim
from polyrhythm.training.batch import PackedBatch, TrainingBatch, minibatches
from polyrhythm.training.blame import find_culprit
from polyrhythm.training.checkpoint import Saved, Saving, load, save
from polyrhythm.training.deal import Share, share_of
from polyrhythm.training.micro_batches import MicroBatchLimits
from polyrhythm.training.moments import UpdateStatistics
from polyrhythm.training.objective import UNSCALED, MicroStep, Normalizers, Objective
from polyrhythm.training.parts import (
    Part,
    SampleFeed,
    join_batches,
    join_packed,
    target_metrics,
    weight_factor,
)
from polyrhythm.training.precomputed import with_precomputed
from polyrhythm.training.rank_batch import RankBatch, rank_batch, take_share
from polyrhythm.training.ranks import ONE_RANK, Ranks, whole_from
from polyrhythm.training.reference import Reference, SharedReference, load_weights, make_reference, room_for_copy
from polyrhythm.training.shards import part_of
from polyrhythm.training.skipped import NORM, SKIPPED, STOPPED, SkippedSteps, StepLog, StepTable
from polyrhythm.training.steps import Metrics, PhaseTimes, Steps
from polyrhythm.training.targets import MISMATCH, TargetInputs, compute_targets, mismatch

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings
    from polyrhythm.config.sections.learning import TrainingSettings


#: Optimizer steps of an update (`observe.alarms`).
STEPS = "train/actor/optimizer_steps"
_ERROR, _RATIO = "train/actor/interpolation_error", "train/actor/ratio"
#: KL from the policy that the update began with.
_PROXIMAL_KL = "train/actor/proximal_approx_kl"
#: KL from the behaviour policy at an update's first optimizer step: to π_prox where there is one, otherwise to π_θ.
_BEHAVIOR_KL = ("train/actor/behav_approx_kl", "train/actor/approx_kl")


class _Prepared(NamedTuple):
    """An update's samples and targets. own_weights: as in `Learner.update`, but false where statistics began."""

    share: Share
    packed: PackedBatch
    batch: TrainingBatch
    inputs: TargetInputs
    metrics: Metrics
    own_weights: bool


@dataclass(slots=True)
class _Progress:
    """An update under way. decay: factor on learning rates, but for the warm-up by steps; steps: taken before it, where
    such a warm-up needs them; factor: of its last step; epoch: the next one; ended: it takes no further step."""

    index: int
    critic_only: bool
    before_step: Callable[[], None] | None
    decay: float
    steps: int
    factor: float = 0.0
    epoch: int = 0
    ended: bool = False
    times: PhaseTimes = field(default_factory=PhaseTimes)
    log: StepLog = field(default_factory=StepLog)
    padded: list[float] = field(default_factory=list)


class Learner:
    """A policy and its optimizer; the policy stays on the device where it is given, or is sharded on that of its rank.

    total_updates: length of the learning-rate schedule (versions × sync_interval). seed: of the shuffles.
    sync_interval: updates of a version. Where `algorithm.kl` needs a reference policy, it is the policy that the first
    update begins with (`training.reference`). halt: why the run must stop after the last update, as a sentence; "" if
    it need not. phase_seconds: of the last update, by phase (`PhaseTimes`). token_versions: where weights change within
    a message, the log-prob of each token is that of its own weights, which keep nothing of older ones.

    ranks: the processes that train one policy, each with a learner of the same arguments. All of them call every
    method, with the same arguments and in the same order.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSettings,
        training: TrainingSettings,
        *,
        total_updates: int,
        seed: int,
        ranks: Ranks = ONE_RANK,
        token_versions: bool = False,
        sync_interval: int = 1,
    ) -> None:
        self.policy, self.ranks = policy, ranks
        self._token_versions, self._sync_interval = token_versions, sync_interval
        self.updates = 0
        self.halt = ""
        self.phase_seconds: dict[str, float] = {}
        self._skipped = SkippedSteps(training)
        self._statistics = UpdateStatistics(as_module(policy), algorithm, ranks.total)
        self._reference: Reference | None = None
        self._saving: Saving = Saved()
        self._algorithm, self._training = algorithm, training
        self._total_updates, self._seed = total_updates, seed
        self._module = as_module(policy)
        self._device = ranks.device or next(p.device for p in self._module.parameters() if p.requires_grad)
        self._objective = Objective(algorithm)
        self._limits = MicroBatchLimits(policy, training.micro_batch_steps, training.micro_batch_tokens)
        self._room = room_for_copy(policy) if algorithm.kl.coef and ranks.strategy == "shard" else None
        self._micro_step = ranks.wrap(MicroStep(policy, self._objective))
        if self._room is not None:
            ranks.shard(as_module(self._room))
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._optimizer = optim.adamw_of(self._module, training.optimizer)

    def update(
        self,
        trajectories: Sequence[Trajectory],
        update_index: int,
        *,
        version: int = 0,
        own_weights: bool = False,
        own_version: int | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Steps:
        """All epochs over `trajectories`: one optimizer step per `next()`, metrics as the generator's return value.

        With `training.require_batches` above 1 the trajectories are mini-batches of `mini_batch_samples`, in the order
        given: an optimizer step has chunk steps of one of them alone. Targets are of the whole update all the same.
        The first `next()` also collates (afterwards the trajectories' memory is no longer read) and prepares targets.
        Of several ranks each reads its own trajectories, and of the others lengths and groups alone.
        The learning rate, the shuffles and the critic's warm-up follow update_index (from 0). version: the one that the
        update is part of, the trainer's present one + 1; interpolated proximal log-probs also count the updates of it
        that came before (after a trainer was lost, off by less than a version). Metrics are means over the optimizer
        steps that were not skipped (interpolation_error: of the first, where the recomputed proximal policy
        is the one that is trained). own_weights: all trajectories were made by the weights that this update begins
        with; then mismatch_kl is the divergence of the log-probs of the first optimizer step from those of the
        generators, 0 but for rounding (absent where the statistics of observations begin: `UpdateStatistics`).
        own_version: of those weights, where generators could have them: of samples of several versions the chunk steps
        that are wholly theirs are compared (by token with `token_versions`), where log-probs are recomputed.
        before_step is called before the weights change, and before the update counts even if no step changed them.
        Closing the generator early leaves the weights of the last step done and `updates` as it was. A step whose
        gradient is not finite is skipped and the update completed; `halt` names the cause, unless
        training.on_nonfinite_gradient is skip.
        """
        progress = self._begin(update_index, before_step)
        prepared = self._prepare(progress, trajectories, version, own_version, own_weights=own_weights)
        return (yield from self._epochs(progress, prepared))

    def update_in_parts(
        self,
        feed: SampleFeed,
        update_index: int,
        *,
        version: int = 0,
        own_version: int | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Steps:
        """`update` on samples that still come: the same weights but for rounding, where
        `config.streaming.why_whole_objective` has no objection.

        A `next()` while nothing waits in `feed` does nothing; otherwise it passes over all that waits, and adds to the
        gradient, or takes one optimizer step. Nothing is trained before all samples are there where the policy has no
        statistics of observations yet. One rank.
        """
        progress = self._begin(update_index, before_step)
        if self._statistics.are_empty:
            while not feed.complete:
                feed.starved = True
                yield
            progress.times.skip()
            samples = feed.take()
            own = own_version is not None and all(bool((x.version == own_version).all()) for x in samples)
            prepared = self._prepare(progress, samples, version, own_version, own_weights=own)
        else:
            prepared = yield from self._first_epoch(progress, feed, version, own_version)
        return (yield from self._epochs(progress, prepared))

    def _begin(self, update_index: int, before_step: Callable[[], None] | None) -> _Progress:
        settings = self._training.optimizer
        decay = optim.linear_decay(update_index, self._total_updates, settings.lr_final_fraction)
        decay *= optim.linear_warmup(update_index, settings.warmup_updates)
        steps = self._optimizer.steps() if settings.warmup_steps else 0
        critic_only = update_index < self._training.critic_warmup_updates
        self._module.eval()  # dropout would make the ratio differ from 1 before the first step
        return _Progress(update_index, critic_only, before_step, decay, steps)

    def _prepare(
        self,
        progress: _Progress,
        trajectories: Sequence[Trajectory],
        version: int,
        own_version: int | None,
        *,
        own_weights: bool,
    ) -> _Prepared:
        """All of the update's samples, collated, and their targets."""
        share, packed = take_share(trajectories, self.ranks, self._training.step_samples)
        progress.times.end("collate")
        unlike = self._statistics.begin(packed, progress.before_step)
        inputs = self._target_inputs(progress, version, (share.chunk_steps, share.trajectories))
        inputs = inputs._replace(own_version=None if own_weights or unlike else own_version)
        precomputed = self._precomputed(packed, inputs)
        progress.times.end("targets")
        batch, metrics = compute_targets(precomputed, self._algorithm, inputs, progress.times)
        return _Prepared(share, packed, batch, inputs, metrics, own_weights and not unlike)

    def _first_epoch(
        self, progress: _Progress, feed: SampleFeed, version: int, own_version: int | None
    ) -> Generator[None, None, _Prepared]:
        """The first epoch over samples that come in parts, and then all of them."""
        training, times = self._training, progress.times
        parts, inputs = list[Part](), None
        for first in range(0, training.batch_size, training.mini_batch_samples):
            self._optimizer.zero_grad()
            metrics, before, end = dict[str, Tensor](), len(parts), first + training.mini_batch_samples
            while (taken := sum(part.samples for part in parts)) < end:
                while not feed:
                    feed.starved = True
                    yield
                times.skip()
                samples = feed.take(end - taken)
                inputs = inputs or self._target_inputs(progress, version, (1, 1))
                part, minibatch = self._part(progress, samples, inputs)
                parts.append(part)
                metrics = self._passes(minibatch, UNSCALED, metrics, critic_only=progress.critic_only)
                times.end("passes")
                yield
            times.skip()
            factor = weight_factor(self._algorithm, [part.packed for part in parts])
            batch = join_batches([part.batch for part in parts[before:]], {}, {}, factor)
            (by,) = self._objective.normalizers(batch, [torch.arange(len(batch))], self.ranks.totals)
            optim.scale_gradient(self._parameters, factor / by.policy)
            done = self._apply(progress, self._objective.scaled(metrics, by, factor))
            feed.stepped = True
            yield
            times.skip()
            progress.ended = self._moved_far(done)
        assert inputs is not None
        progress.epoch = 1
        return self._joined(parts, inputs, own_version)

    def _part(self, progress: _Progress, samples: Sequence[Trajectory], inputs: TargetInputs) -> tuple[Part, RankBatch]:
        """These samples with their targets, and as one mini-batch."""
        share, packed = take_share(samples, self.ranks)
        progress.times.end("collate")
        self._statistics.begin(packed, None)  # finds that nothing of them is needed
        packed = self._precomputed(packed, inputs, len(samples) / self._training.batch_size)
        progress.times.end("targets")
        batch, metrics = compute_targets(packed, self._algorithm, inputs, progress.times)
        minibatch = rank_batch(batch, share, torch.arange(len(batch)), self._limits, self.ranks)
        progress.times.end("targets")
        return Part(packed, batch, metrics, len(samples)), minibatch

    def _joined(self, parts: Sequence[Part], inputs: TargetInputs, own_version: int | None) -> _Prepared:
        """All samples of the update, from its parts."""
        algorithm, ranks = self._algorithm, self.ranks
        packed = join_packed([part.packed for part in parts])
        factor = weight_factor(algorithm, [part.packed for part in parts])
        batch = join_batches([part.batch for part in parts], packed.obs, packed.forward_inputs, factor)
        lengths = torch.bincount(packed.trajectory).tolist()
        share = share_of(packed.group.tolist(), lengths, ranks.rank, ranks.size, self._training.step_samples)
        metrics = target_metrics(algorithm, parts, batch)
        own_weights = own_version is not None and bool((packed.version == own_version).all())
        if algorithm.recomputes and own_version is not None and not own_weights:
            metrics |= mismatch(packed, (batch.behavior, batch.proximal), algorithm, inputs, own_version)
        return _Prepared(share, packed, batch, inputs, metrics, own_weights)

    def _epochs(self, progress: _Progress, prepared: _Prepared) -> Steps:
        """The epochs that are left, and the end of the update."""
        share, packed, batch, inputs, target_metrics, own_weights = prepared
        training, ranks, times = self._training, self.ranks, progress.times
        drawn = [
            (index, (*seed, step))
            for seed in ((self._seed, progress.index, epoch) for epoch in range(progress.epoch, training.epochs))
            for step, index in enumerate(minibatches(share.counts, training.minibatch_steps, seed))
        ]
        picked = [share.pick(index)[0] for index, _ in drawn]
        divisors = self._objective.normalizers(batch, picked, ranks.totals) if drawn else []
        times.end("targets")
        for (index, seed), by in zip(drawn, divisors, strict=True):
            if progress.ended:
                break
            minibatch = self._selected(rank_batch(batch, share, index, self._limits, ranks), seed)
            self._optimizer.zero_grad()
            done = self._apply(progress, self._passes(minibatch, by, {}, critic_only=progress.critic_only))
            progress.padded.append(minibatch.padded)
            yield
            times.skip()
            progress.ended = self._moved_far(done)
        if progress.before_step is not None:
            progress.before_step()  # publication and saving have read the weights before the update counts
        self._statistics.finish(packed)
        table = progress.log.table(ranks.total)
        self._note_skipped(progress.index, table, packed, batch, inputs)
        times.end("step")
        self.phase_seconds = times.seconds
        self.updates = progress.index + 1
        metrics = self._step_metrics(table, own_weights=own_weights)
        if ranks.size > 1:
            metrics["train/actor/padded_fraction"] = sum(progress.padded) / len(progress.padded)
        versions = ranks.total(packed.version.double().sum() * (share.spare is None))
        metrics["train/actor/average_version"] = float(versions / share.chunk_steps)
        return metrics | self._rates(progress.factor) | target_metrics

    def _step_metrics(self, table: StepTable, *, own_weights: bool) -> dict[str, float]:
        """Metrics of an update's optimizer steps: means, and of the first step what only that has."""
        metrics = table.means() | {STEPS: float(len(table.metrics))}
        if self._training.on_nonfinite_gradient == "skip" or table.skipped.any():
            metrics[SKIPPED] = float(table.skipped.sum())
        if _ERROR in table.names:
            metrics[_ERROR] = table.first(_ERROR)
        if own_weights:
            metrics[MISMATCH] = table.first(next(name for name in _BEHAVIOR_KL if name in table.names))
        return metrics

    def _moved_far(self, step: Mapping[str, Tensor]) -> bool:
        """Whether the policy has left the one that the update began with by more than `training.max_kl`."""
        bound = self._training.max_kl
        if bound is None or not self._algorithm.recomputes or _PROXIMAL_KL not in step:
            return False  # another proximal policy differs from the present one by the samples' age too
        return float(self.ranks.total(step[_PROXIMAL_KL])) > bound

    def _rates(self, factor: float) -> dict[str, float]:
        """Learning rates of an update, for the metrics."""
        settings = self._training.optimizer
        of_value = {} if settings.value_lr is None else {"train/critic/lr": settings.value_lr * factor}
        return {"train/actor/lr": settings.lr * factor, **of_value}

    def _note_skipped(
        self, update: int, table: StepTable, packed: PackedBatch, batch: TrainingBatch, inputs: TargetInputs
    ) -> None:
        """Count the steps of the update that were skipped, and set `halt` if the run must stop for them."""
        self.halt, skipped = "", table.skipped.tolist()
        if not any(skipped):
            self._skipped.reset_count()
            return
        metrics, gradients = table.first_skipped()
        names = [name for name, p in self._module.named_parameters() if p.requires_grad]
        parameters = {names[place]: finite for place, finite in gradients.items()}
        why = find_culprit(packed, batch, self._algorithm, inputs, metrics, parameters)
        self.halt = self._skipped.note(update, skipped, why)

    def _target_inputs(self, progress: _Progress, version: int, counts: tuple[int, int]) -> TargetInputs:
        if self._algorithm.kl.coef and self._reference is None:
            self._reference = make_reference(self.policy, room=self._room)
        if progress.before_step is not None and isinstance(self._reference, SharedReference):
            progress.before_step()  # the reference stands where the weights are, which a publication may still read
        micro_batch = self._training.micro_batch_steps or self._training.minibatch_steps
        produced = (version - 1) * self._sync_interval + progress.index % self._sync_interval + 1
        return TargetInputs(
            *(self.policy, self._reference, produced, micro_batch, self._device, self.ranks, counts),
            tokens=self._limits.tokens,
            token_versions=self._token_versions,
            reward_scale=self._statistics.reward_scale,
            sync_interval=self._sync_interval,
        )

    def _precomputed(self, packed: PackedBatch, inputs: TargetInputs, share: float = 1.0) -> PackedBatch:
        """The batch with what the policy's frozen part gives; dropped with the update. share: the batch's part of
        it."""
        return with_precomputed(packed, inputs, limit_mib=int(share * self._training.precomputed_mib))

    def _selected(self, minibatch: RankBatch, seed: Sequence[int]) -> RankBatch:
        """The mini-batch with the entries that the loss's rule selects, where it has one; seed: of the rule's draws."""
        own, places = minibatch.own, minibatch.places
        whole = partial(whole_from, self.ranks, places=places, count=minibatch.chunk_steps)
        selected = self._objective.select(own, seed, whole, places)
        return minibatch if selected is None else minibatch._replace(own=replace(own, selected=selected))

    def _passes(
        self, minibatch: RankBatch, by: Normalizers, metrics: dict[str, Tensor], *, critic_only: bool
    ) -> dict[str, Tensor]:
        """Forward and backward pass of a mini-batch, micro-batch by micro-batch: adds to the gradients, and its metrics
        as scalars, this rank's part of them, to `metrics`."""
        for batch, last, counts in minibatch.micro_batches(self._device):
            with self.ranks.reducing(self._micro_step, last=last, counts=counts):
                loss = self._micro_step(batch, by, critic_only)
                loss.total.backward()
            metrics = {name: x + metrics[name] for name, x in loss.metrics.items()} if metrics else loss.metrics
        return metrics

    def _apply(self, progress: _Progress, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """One optimizer step by the gradients that are there. The metrics with those of the step, which are the same on
        all ranks (NORM, STOPPED)."""
        norm = optim.clip_gradient(self._parameters, self._training.optimizer.grad_clip, self.ranks.norms)
        metrics[NORM] = norm.total.float().to(self._device)  # of shards in host memory it is there
        bound, outside = self._algorithm.early_stop_ratio, False
        if bound is not None:
            ratio = self.ranks.total(metrics[_RATIO])
            outside = not 1.0 / bound <= float(ratio) <= bound
            metrics[STOPPED] = torch.full_like(ratio, outside)
        progress.times.end("passes")
        warmup = self._training.optimizer.warmup_steps
        progress.factor = progress.decay * optim.linear_warmup(progress.steps + len(progress.log), warmup)
        if not outside:
            if progress.before_step is not None:
                progress.before_step()
                progress.times.end("await_publication")
            self._optimizer.scale_lr(progress.factor)  # a state that is saved beside this update has the former rate
            self._optimizer.step(norm.total.isfinite().float())
        progress.log.add(metrics, norm)
        progress.times.end("step")
        return metrics

    def publishable(self) -> Iterator[tuple[str, Tensor]]:
        """What generators take, whole tensors by name, one at a time: with shard the others are not whole meanwhile."""
        yield from self.ranks.snapshot(published_state(self._module))

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Replace the published part of the policy, by whole tensors. ValueError: they are of another policy."""
        load_weights(self._module, state)

    def save(self, path: Path, *, background: bool = False) -> Saving:
        """Save the state: as a file that rank 0 writes, or with shard as a folder that all ranks write in the
        background. It is there, whole, once the answer's `wait` has returned on rank 0; a saving that is under way is
        waited for first. background: a file is written in the background, too, so the learner may go on at once.
        OSError, also of `wait`: cannot write."""
        self._saving.wait()
        self._saving = Saved()
        self._saving = save(self.state_dict(), path, self.ranks, background=background)
        return self._saving

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, with whatever ranks. RunFolderError: it is damaged. ValueError: it is of another
        policy."""
        self.load_state_dict(load(path, self._sharded_like()))

    def state_dict(self) -> dict[str, Any]:
        """Published part of the policy (all of most policies), optimizer, the number of completed updates, and the
        reference policy if there is one; tensors are live, not copies, and with shard sharded."""
        state = {
            "policy": published_state(self._module),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
            **self._statistics.state_dict(),
        }
        return state if self._reference is None else state | {"reference": self._reference.state_dict()}

    def kept_tensors(self) -> list[Tensor]:
        """All tensors that it keeps from one update to the next, on whatever device, of sharded ones this rank's parts;
        gradients are dropped."""
        self._optimizer.zero_grad()
        moments = [x for state in self._optimizer.state.values() for x in state.values()]
        copied = self._reference or self._room
        reference = [] if copied is None else list(copied.state_dict().values())
        policy = (*self._module.parameters(), *self._module.buffers())
        return [*(part_of(x) for x in (*policy, *moments, *reference)), *self.ranks.buffers()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; tensors may be whole, or sharded. ValueError: it is of another policy."""
        load_weights(self._module, state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
        self._statistics.load_state_dict(state)
        if "reference" in state:
            self._reference = make_reference(self.policy, state["reference"], self._room)

    def _sharded_like(self) -> dict[str, Any]:
        """In the form of `state_dict`, tensors sharded as those of a state are."""
        policy = self._module.state_dict()
        return {"policy": policy, "reference": policy, "optimizer": {"state": self._optimizer.moments_like()}}
