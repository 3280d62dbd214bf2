"""One update of a learner: samples in, optimizer steps, metrics out. See `Learner`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyrhythm.specs import Trajectory
from polyrhythm.training import optim
from polyrhythm.training.batch import PackedBatch, TrainingBatch, all_of_version, minibatches
from polyrhythm.training.micro_batches import MiniBatch, Share
from polyrhythm.training.nonfinite import NORM, SKIPPED, STOPPED, StepLog, StepTable, find_culprit
from polyrhythm.training.objective import UNSCALED, Normalizers
from polyrhythm.training.parts import SampleFeed, UpdatePart, join_batches, join_packed, target_metrics, weight_factor
from polyrhythm.training.ranks import take_share
from polyrhythm.training.reference import SharedReference
from polyrhythm.training.steps import Metrics, PhaseTimes, Steps
from polyrhythm.training.targets import MISMATCH, TargetInputs, compute_targets, mismatch, with_precomputed

if TYPE_CHECKING:
    from polyrhythm.training.learner import Learner

#: Optimizer steps of an update (`observe.alarms`).
STEPS = "train/actor/optimizer_steps"
_ERROR, _RATIO = "train/actor/interpolation_error", "train/actor/ratio"
#: KL from the policy that the update began with.
_PROXIMAL_KL = "train/actor/proximal_approx_kl"
#: KL from the behaviour policy at an update's first optimizer step: to π_prox where there is one, otherwise to π_θ.
_BEHAVIOR_KL = ("train/actor/behav_approx_kl", "train/actor/approx_kl")


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
        precomputed = self._with_precomputed(packed, self.inputs)
        self.times.end("targets")
        self.batch, self.target_metrics = compute_targets(precomputed, learner.algorithm, self.inputs, self.times)
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
        packed = self._with_precomputed(packed, inputs, len(samples) / learner.training.batch_size)
        self.times.end("targets")
        batch, metrics = compute_targets(packed, learner.algorithm, inputs, self.times)
        minibatch = share.minibatch(batch, torch.arange(len(batch)), learner.limits)
        self.times.end("targets")
        return UpdatePart(packed, batch, metrics, len(samples)), minibatch

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
        reference = learner.reference_policy()
        if self.before_step is not None and isinstance(reference, SharedReference):
            self.before_step()  # the reference stands where the weights are, which a publication may still read
        micro_batch = learner.training.micro_batch_steps or learner.training.minibatch_steps
        produced = (self.version - 1) * learner.sync_interval + self.index % learner.sync_interval + 1
        return TargetInputs(
            *(learner.policy, reference, produced, micro_batch, learner.device, learner.ranks, counts),
            tokens=learner.limits.tokens,
            token_versions=learner.token_versions,
            reward_scale=learner.statistics.reward_scale,
            sync_interval=learner.sync_interval,
        )

    def _with_precomputed(self, packed: PackedBatch, inputs: TargetInputs, share: float = 1.0) -> PackedBatch:
        """The batch with the output of the policy's frozen part. share: the batch's part of the update."""
        return with_precomputed(packed, inputs, limit_mib=int(share * self.learner.training.precomputed_mib))

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
        table = self.log.table(ranks.total)
        learner.halt = self._note_skipped(table)
        self.times.end("step")
        learner.phase_seconds = self.times.seconds
        learner.updates = self.index + 1
        metrics = self._step_metrics(table)
        if ranks.size > 1:
            metrics["train/actor/padded_fraction"] = sum(self._padded) / len(self._padded)
        versions = ranks.total(self.packed.version.double().sum() * (not self.share.is_empty))
        metrics["train/actor/average_version"] = float(versions / self.share.chunk_steps)
        settings = learner.training.optimizer
        metrics["train/actor/lr"] = settings.lr * self.factor
        if settings.value_lr is not None:
            metrics["train/critic/lr"] = settings.value_lr * self.factor
        return metrics | self.target_metrics

    def _step_metrics(self, table: StepTable) -> Metrics:
        """Means of the optimizer steps' metrics, and those that only the first step has."""
        metrics = table.means() | {STEPS: float(len(table.metrics))}
        if self.learner.training.on_nonfinite_gradient == "skip" or table.skipped.any():
            metrics[SKIPPED] = float(table.skipped.sum())
        if _ERROR in table.names:
            metrics[_ERROR] = table.first(_ERROR)
        if self.own_weights:
            metrics[MISMATCH] = table.first(next(name for name in _BEHAVIOR_KL if name in table.names))
        return metrics

    def _note_skipped(self, table: StepTable) -> str:
        """Count the skipped steps; why the run must stop for them, "" if it need not."""
        learner, skipped = self.learner, table.skipped.tolist()
        if not any(skipped):
            learner.skipped.reset_count()
            return ""
        metrics, gradients = table.first_skipped()
        names = [name for name, p in learner.module.named_parameters() if p.requires_grad]
        parameters = {names[place]: finite for place, finite in gradients.items()}
        why = find_culprit(self.packed, self.batch, learner.algorithm, self.inputs, metrics, parameters)
        return learner.skipped.note(self.index, skipped, why)
