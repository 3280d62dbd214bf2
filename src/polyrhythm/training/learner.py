"""Updates of a policy by reinforcement learning, on one rank or several: trajectories in, new weights and metrics out.

Invariants (tests/training/test_learner.py): the gradient of an optimizer step does not depend on the micro-batch size;
an update is a function of the weights, the optimizer's state, the trajectories, the seed and the update's index alone;
masked entries have no effect; a gradient that is not finite changes neither weights nor optimizer. The number of ranks
(tests/plugins/ranks/test_ranks.py) and the parts in which samples come (tests/training/test_streamed_updates.py) change
nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import published_state
from polyrhythm.specs import Trajectory
from polyrhythm.training import optim
from polyrhythm.training.batch import (
    MicroBatchLimits,
    MiniBatch,
    PackedBatch,
    Share,
    TrainingBatch,
    all_of_version,
    minibatches,
)
from polyrhythm.training.checkpoint import Saved, Saving, load
from polyrhythm.training.moments import (
    Reference,
    SharedReference,
    UpdateStatistics,
    load_weights,
    make_reference,
    room_for_copy,
)
from polyrhythm.training.nonfinite import NORM, SKIPPED, STOPPED, SkippedSteps, StepLog, find_culprit
from polyrhythm.training.objective import UNSCALED, MicroStep, Normalizers, Objective
from polyrhythm.training.pooled import PrefixSource
from polyrhythm.training.precomputed import lent_metrics, with_precomputed
from polyrhythm.training.ranks import ONE_RANK, Ranks, take_share
from polyrhythm.training.steps import (
    Metrics,
    PhaseTimes,
    SampleFeed,
    Steps,
    UpdatePart,
    join_batches,
    join_packed,
    target_metrics,
    weight_factor,
)
from polyrhythm.training.targets import MISMATCH, TargetInputs, compute_targets, mismatch

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings
    from polyrhythm.config.sections.learning import TrainingSettings

#: Optimizer steps of an update (read by the plugin `alarms`).
STEPS = "train/actor/optimizer_steps"
_ERROR, _RATIO = "train/actor/interpolation_error", "train/actor/ratio"
#: KL from the policy that the update began with.
_PROXIMAL_KL = "train/actor/proximal_approx_kl"
#: KL from the behaviour policy at an update's first optimizer step: to π_prox where there is one, otherwise to π_θ.
_BEHAVIOR_KL = ("train/actor/behav_approx_kl", "train/actor/approx_kl")


class Learner:
    """A policy and its optimizer; the policy stays on its device, or is sharded on that of its rank.

    total_updates: length of the learning-rate schedule (versions × sync_interval). seed: of the shuffles.
    sync_interval: updates of a version. If `algorithm.kl` needs a reference policy, it is the policy at the start of
    the first update (`training.moments`). halt: why the run must stop after the last update; "" if it need not.
    phase_seconds: of the last update, by phase (`PhaseTimes`). prefixes: where generators lend what frozen parts give,
    None if nowhere. token_versions: if weights change within a message, the log-prob of each token is that of its own
    weights, which keep nothing of older ones.

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
        self.token_versions, self.sync_interval = token_versions, sync_interval
        self.updates = 0
        self.halt = ""
        self.prefixes: PrefixSource | None = None
        self.phase_seconds: dict[str, float] = {}
        self.skipped = SkippedSteps(training)
        self.statistics = UpdateStatistics(as_module(policy), algorithm, ranks.total)
        self.reference: Reference | None = None
        self._saving: Saving = Saved()
        self.algorithm, self.training = algorithm, training
        self.total_updates, self.seed = total_updates, seed
        self.module = as_module(policy)
        self.device = ranks.device or next(p.device for p in self.module.parameters() if p.requires_grad)
        self.objective = Objective(algorithm)
        self.limits = MicroBatchLimits(policy, training.micro_batch_steps, training.micro_batch_tokens)
        self.room = room_for_copy(policy) if algorithm.kl.coef and ranks.divides else None
        self.micro_step = ranks.wrap(MicroStep(policy, self.objective))
        if self.room is not None:
            ranks.shard(as_module(self.room))
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = optim.adamw(self.module, training.optimizer, ranks)

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

        With `training.require_batches` above 1 the trajectories are mini-batches of `mini_batch_samples`, in order: an
        optimizer step has chunk steps of only one of them; targets are computed over the whole update. The first
        `next()` also collates (afterwards the trajectories' memory is no longer read) and prepares targets. Each rank
        reads its own trajectories, and only lengths and groups of the others.

        The learning rate, the shuffles and the critic's warm-up follow update_index (from 0). version: the one that the
        update belongs to, the trainer's present one + 1; interpolated proximal log-probs also count its earlier updates
        (after a trainer was lost, off by less than a version). Metrics are means over the optimizer steps that were not
        skipped (interpolation_error: of the first step, if the recomputed proximal policy is the trained one).

        own_weights: the update's initial weights made all trajectories; then mismatch_kl is the divergence of the
        log-probs of the first optimizer step from those of the generators, 0 but for rounding (absent if the statistics
        of observations begin here: `UpdateStatistics`). own_version: version of the initial weights, if generators
        could have them: among samples of several versions, chunk steps made entirely by it are compared (tokens with
        `token_versions`), if log-probs are recomputed.

        before_step is called before the weights change, and before the update counts even if no step changed them.
        Closing the generator early leaves the weights of the last finished step and `updates` unchanged. A step whose
        gradient is not finite is skipped and the update completed; `halt` names the cause, unless
        training.on_nonfinite_gradient is skip.
        """
        update = Update(self, update_index, version, own_version, before_step)
        update.prepare(trajectories, own_weights=own_weights)
        return (yield from update.run())

    def update_in_parts(
        self,
        feed: SampleFeed,
        update_index: int,
        *,
        version: int = 0,
        own_version: int | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Steps:
        """`update` on samples that arrive in parts: equal weights but for rounding, on one rank.

        Supported where `config.streaming.why_whole_objective` has no objection. A `next()` while `feed` is empty does
        nothing; otherwise it processes all waiting samples and adds to the gradient, or takes one optimizer step. If
        the policy has no statistics of observations yet, training begins only with the last sample.
        """
        update = Update(self, update_index, version, own_version, before_step)
        if self.statistics.are_empty:
            while not feed.complete:
                feed.starved = True
                yield
            update.times.skip()
            samples = feed.take()
            update.prepare(samples, own_weights=all_of_version(samples, own_version))
        else:
            yield from update.prepare_parts(feed)
        return (yield from update.run())

    def set_micro_batch(self, steps: int) -> None:
        """Chunk steps of a rank's training pass in updates that begin from now on, 0: the recipe's. Gradients
        accumulate over an optimizer step's passes, so that their sum differs in rounding alone."""
        self.limits = self.limits._replace(steps=steps or self.training.micro_batch_steps)

    def published(self) -> Mapping[str, Tensor]:
        """Published tensors by name; with shard each rank has a part. Only between two updates, as a forward pass has
        other tensors in their place."""
        return published_state(self.module)

    def publishable(self) -> Iterator[tuple[str, Tensor]]:
        """Whole published tensors by name, one at a time: with shard only the current one is whole."""
        yield from self.ranks.snapshot(self.published())

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Replace the published part of the policy by whole tensors. ValueError: they are of another policy."""
        load_weights(self.module, state, self.ranks)

    def save(self, path: Path, *, background: bool = False) -> Saving:
        """Save the state: as a file written by rank 0, or with shard as a folder that all ranks write in the
        background.

        It is complete once the result's `wait` has returned on rank 0; an unfinished save is waited for first.
        background: write a file in the background too, so the learner may continue at once. OSError, also from `wait`:
        cannot write.
        """
        self._saving.wait()
        self._saving = Saved()
        self._saving = self.ranks.save(self.state_dict(), path, background=background)
        return self._saving

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, with any number of ranks. RunFolderError: it is damaged. ValueError: it
        is of another policy."""
        like = self.module.state_dict()  # tensors sharded as those of a state are
        moments = {"state": self.optimizer.moments_like()}
        self.load_state_dict(load(path, {"policy": like, "reference": like, "optimizer": moments}))

    def state_dict(self) -> dict[str, Any]:
        """Published part of the policy (all of most policies), optimizer, number of completed updates, and the
        reference policy if there is one. Tensors are live, not copies; with shard sharded."""
        state = {
            "policy": published_state(self.module),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            **self.statistics.state_dict(),
        }
        return state if self.reference is None else state | {"reference": self.reference.state_dict()}

    def kept_tensors(self) -> list[Tensor]:
        """All tensors kept between updates, on any device; of sharded ones this rank's parts. Drops gradients."""
        self.optimizer.zero_grad()
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        copied = self.reference or self.room
        reference = [] if copied is None else list(copied.state_dict().values())
        policy = (*self.module.parameters(), *self.module.buffers())
        return [*(self.ranks.part(x) for x in (*policy, *moments, *reference)), *self.ranks.buffers()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; tensors may be whole or sharded. ValueError: it is of another policy."""
        load_weights(self.module, state["policy"], self.ranks)
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
        self.statistics.load_state_dict(state)
        if "reference" in state:
            self.reference = make_reference(self.policy, self.ranks, state["reference"], self.room)


class Update:
    """An update in three steps: `prepare` collates the samples and computes their targets; `accumulate` adds a
    mini-batch's gradient, which `step` applies; `finish` counts the update and returns its metrics.

    version, own_version, before_step: as in `Learner.update`. decay: factor on learning rates, without the warm-up by
    steps; factor: of its last step; ended: it takes no further step; epoch: the next one.
    """

    share: Share
    packed: PackedBatch
    batch: TrainingBatch
    inputs: TargetInputs
    target_metrics: Metrics
    own_weights: bool

    def __init__(
        self,
        learner: Learner,
        index: int,
        version: int,
        own_version: int | None,
        before_step: Callable[[], None] | None,
    ) -> None:
        self.learner, self.index, self.version, self.own_version = learner, index, version, own_version
        self.before_step = before_step
        self.times, self.log = PhaseTimes(), StepLog()
        self.ended, self.epoch, self.factor = False, 0, 0.0
        self.critic_only = index < learner.training.critic_warmup_updates
        settings = learner.training.optimizer
        self.decay = optim.linear_decay(index, learner.total_updates, settings.lr_final_fraction)
        self.decay *= optim.linear_warmup(index, settings.warmup_updates)
        self._steps_before = learner.optimizer.steps() if settings.warmup_steps else 0
        self._padded: list[float] = []
        learner.module.eval()  # dropout would make the ratio differ from 1 before the first step

    # ------------------------------------------------------------ samples and targets

    def prepare(self, trajectories: Sequence[Trajectory], *, own_weights: bool) -> None:
        """Collate all samples and compute their targets."""
        learner = self.learner
        self.share, packed = take_share(trajectories, learner.ranks, learner.training.step_samples)
        self.times.end("collate")
        unlike = learner.statistics.begin(packed, self.before_step)
        inputs = self._target_inputs((self.share.chunk_steps, self.share.trajectories))
        self.inputs = inputs._replace(own_version=None if own_weights or unlike else self.own_version)
        _, self.batch, self.target_metrics = self._targets(packed, self.inputs, 1.0)
        self.packed, self.own_weights = packed, own_weights and not unlike

    def prepare_parts(self, feed: SampleFeed) -> Generator[None, None, None]:
        """`prepare`, and the first epoch, over samples that arrive in parts."""
        learner, times = self.learner, self.times
        training = learner.training
        parts, inputs = list[UpdatePart](), None
        for first in range(0, training.batch_size, training.mini_batch_samples):
            learner.optimizer.zero_grad()
            metrics, before, end = dict[str, Tensor](), len(parts), first + training.mini_batch_samples
            while (taken := sum(part.samples for part in parts)) < end:
                while not feed:
                    feed.starved = True
                    yield
                times.skip()
                samples = feed.take(end - taken)
                inputs = inputs or self._target_inputs((1, 1))
                part, minibatch = self._part(samples, inputs)
                parts.append(part)
                metrics = self.accumulate(minibatch, UNSCALED, metrics)
                times.end("passes")
                yield
            times.skip()
            factor = weight_factor(learner.algorithm, [part.packed for part in parts])
            batch = join_batches([part.batch for part in parts[before:]], {}, {}, factor)
            (by,) = learner.objective.normalizers(batch, [torch.arange(len(batch))], learner.ranks.totals)
            optim.scale_gradient(learner.parameters, factor / by.policy, learner.ranks)
            self.step(learner.objective.scaled(metrics, by, factor))
            feed.stepped = True
            yield
            times.skip()
            self._end_if_far()
        assert inputs is not None
        self.epoch, self.inputs = 1, inputs
        self._join(parts)

    def _part(self, samples: Sequence[Trajectory], inputs: TargetInputs) -> tuple[UpdatePart, MiniBatch]:
        """These samples with their targets, also as one mini-batch."""
        learner = self.learner
        share, packed = take_share(samples, learner.ranks)
        self.times.end("collate")
        learner.statistics.begin(packed, None)  # finds that nothing of them is needed
        packed, batch, metrics = self._targets(packed, inputs, len(samples) / learner.training.batch_size)
        minibatch = share.minibatch(batch, torch.arange(len(batch)), learner.limits)
        self.times.end("targets")
        return UpdatePart(packed, batch, metrics, len(samples)), minibatch

    def _targets(
        self, packed: PackedBatch, inputs: TargetInputs, share: float
    ) -> tuple[PackedBatch, TrainingBatch, dict[str, float]]:
        """The samples with what is precomputed of them, the training batch, and metrics of both. share: of the update's
        samples."""
        learner = self.learner
        limit_mib, prefixes = learner.training.precomputed_mib, learner.prefixes
        packed = with_precomputed(packed, inputs, limit_mib=limit_mib, share=share, prefixes=prefixes)
        self.times.end("targets")
        batch, metrics = compute_targets(packed, learner.algorithm, inputs, self.times)
        if prefixes is not None:
            metrics |= lent_metrics(packed, learner.ranks.total)
        return packed, batch, metrics

    def _join(self, parts: Sequence[UpdatePart]) -> None:
        """Join the parts into the result of `prepare`."""
        learner, algorithm = self.learner, self.learner.algorithm
        packed = self.packed = join_packed([part.packed for part in parts])
        factor = weight_factor(algorithm, [part.packed for part in parts])
        batch = self.batch = join_batches([part.batch for part in parts], packed.obs, packed.forward_inputs, factor)
        lengths = torch.bincount(packed.trajectory).tolist()
        self.share = learner.ranks.share(packed.group.tolist(), lengths, learner.training.step_samples)
        self.target_metrics = target_metrics(algorithm, parts, batch)
        self.own_weights = all_of_version([packed], self.own_version)
        if algorithm.recomputes and self.own_version is not None and not self.own_weights:
            both = batch.behavior, batch.proximal
            self.target_metrics |= mismatch(packed, both, algorithm, self.inputs, self.own_version)

    def _target_inputs(self, counts: tuple[int, int]) -> TargetInputs:
        learner = self.learner
        if learner.algorithm.kl.coef and learner.reference is None:
            learner.reference = make_reference(learner.policy, learner.ranks, room=learner.room)
        reference = learner.reference if learner.algorithm.kl.coef else None
        if self.before_step is not None and isinstance(reference, SharedReference):
            self.before_step()  # the reference stands where the weights are, which a publication may still read
        micro_batch = learner.limits.steps or learner.training.minibatch_steps
        produced = (self.version - 1) * learner.sync_interval + self.index % learner.sync_interval + 1
        return TargetInputs(
            *(learner.policy, reference, produced, micro_batch, learner.device, learner.ranks, counts),
            tokens=learner.limits.tokens,
            token_versions=learner.token_versions,
            reward_scale=learner.statistics.reward_scale,
            sync_interval=learner.sync_interval,
        )

    # ------------------------------------------------------------ optimizer steps

    def run(self) -> Steps:
        """The remaining epochs, one optimizer step per `next()`, and `finish`."""
        for minibatch, by in self._minibatches():
            self.learner.optimizer.zero_grad()
            self.step(self.accumulate(minibatch, by, {}))
            self._padded.append(minibatch.padded)
            yield
            self.times.skip()
            self._end_if_far()
        return self.finish()

    def _minibatches(self) -> Iterator[tuple[MiniBatch, Normalizers]]:
        """Mini-batches of the remaining epochs, until `ended`, with their divisors."""
        learner, share, batch = self.learner, self.share, self.batch
        training, ranks = learner.training, learner.ranks
        drawn = [
            (index, (*seed, step))
            for seed in ((learner.seed, self.index, epoch) for epoch in range(self.epoch, training.epochs))
            for step, index in enumerate(minibatches(share.counts, training.minibatch_steps, seed))
        ]
        picked = [share.pick(index)[0] for index, _ in drawn]
        divisors = learner.objective.normalizers(batch, picked, ranks.totals) if drawn else []
        self.times.end("targets")
        for (index, seed), by in zip(drawn, divisors, strict=True):
            if self.ended:
                return
            minibatch = share.minibatch(batch, index, learner.limits)
            whole = partial(ranks.whole, places=minibatch.places, count=minibatch.chunk_steps)
            selected = learner.objective.select(minibatch.own, seed, whole, minibatch.places)
            if selected is not None:
                minibatch = minibatch._replace(own=replace(minibatch.own, selected=selected))
            yield minibatch, by

    def accumulate(self, minibatch: MiniBatch, by: Normalizers, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Forward and backward pass of a mini-batch, micro-batch by micro-batch: adds to the gradients and to
        `metrics`. The metrics are scalars, this rank's part of them."""
        learner = self.learner
        for batch, last, counts in minibatch.micro_batches(learner.device):
            with learner.ranks.reducing(learner.micro_step, last=last, counts=counts):
                loss = learner.micro_step(batch, by, self.critic_only)
                loss.total.backward()
            metrics = {name: x + metrics[name] for name, x in loss.metrics.items()} if metrics else loss.metrics
        return metrics

    def step(self, metrics: dict[str, Tensor]) -> None:
        """One optimizer step by the accumulated gradients; adds NORM and STOPPED, equal on all
        ranks, to the metrics."""
        learner = self.learner
        norm = optim.clip_gradient(learner.parameters, learner.training.optimizer.grad_clip, learner.ranks)
        metrics[NORM] = norm.total.float().to(learner.device)  # of shards in host memory it is there
        bound, outside = learner.algorithm.early_stop_ratio, False
        if bound is not None:
            ratio = learner.ranks.total(metrics[_RATIO])
            outside = not 1.0 / bound <= float(ratio) <= bound
            metrics[STOPPED] = torch.full_like(ratio, outside)
        self.times.end("passes")
        warmup = learner.training.optimizer.warmup_steps
        self.factor = self.decay * optim.linear_warmup(self._steps_before + len(self.log), warmup)
        if not outside:
            if self.before_step is not None:
                self.before_step()
                self.times.end("await_publication")
            learner.optimizer.scale_lr(self.factor)  # a state that is saved beside this update has the former rate
            learner.optimizer.step(norm.total.isfinite().float())
        self.log.add(metrics, norm)
        self.times.end("step")

    def _end_if_far(self) -> None:
        """End if the policy is further than `training.max_kl` from the update's initial one. Needs recomputed
        log-probs: another proximal policy also differs from the present one by the samples' age."""
        bound, last = self.learner.training.max_kl, self.log.last
        if bound is not None and self.learner.algorithm.recomputes and _PROXIMAL_KL in last:
            self.ended = float(self.learner.ranks.total(last[_PROXIMAL_KL])) > bound

    # ------------------------------------------------------------ end

    def finish(self) -> Metrics:
        learner, ranks = self.learner, self.learner.ranks
        if self.before_step is not None:
            self.before_step()  # publication and saving have read the weights before the update counts
        learner.statistics.finish(self.packed)
        table, why = self.log, ""
        table.fetch(ranks.total)
        if table.skipped.any():
            finite, gradients = table.first_skipped()
            names = [name for name, p in learner.module.named_parameters() if p.requires_grad]
            parameters = {names[place]: is_finite for place, is_finite in gradients.items()}
            why = find_culprit(self.packed, self.batch, learner.algorithm, self.inputs, finite, parameters)
        learner.halt = learner.skipped.note(self.index, table.skipped.tolist(), why)
        self.times.end("step")
        learner.phase_seconds = self.times.seconds
        learner.updates = self.index + 1
        metrics = table.means() | {STEPS: float(len(table.metrics))}
        if learner.training.on_nonfinite_gradient == "skip" or table.skipped.any():
            metrics[SKIPPED] = float(table.skipped.sum())
        if _ERROR in table.names:
            metrics[_ERROR] = table.first(_ERROR)
        if self.own_weights:
            metrics[MISMATCH] = table.first(next(name for name in _BEHAVIOR_KL if name in table.names))
        if ranks.size > 1:
            metrics["train/actor/padded_fraction"] = sum(self._padded) / len(self._padded)
        versions = ranks.total(self.packed.version.double().sum() * (not self.share.is_empty))
        metrics["train/actor/average_version"] = float(versions / self.share.chunk_steps)
        settings = learner.training.optimizer
        metrics["train/actor/lr"] = settings.lr * self.factor
        if settings.value_lr is not None:
            metrics["train/critic/lr"] = settings.value_lr * self.factor
        return metrics | self.target_metrics
