"""Updates of a policy by reinforcement learning, on one rank: trajectories in, new weights and metrics out.

Invariants (tests/training/test_learner.py): the gradient of an optimizer step does not depend on the micro-batch
size; an update is a function of the weights, the optimizer's state, the trajectories, the seed and the update's
index alone; masked entries have no effect; a gradient that is not finite changes neither weights nor optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.specs import Trajectory
from polyrhythm.training import optim
from polyrhythm.training.batch import PackedBatch, TrainingBatch, collate, minibatches
from polyrhythm.training.blame import find_culprit
from polyrhythm.training.objective import Objective
from polyrhythm.training.precomputed import with_precomputed
from polyrhythm.training.reference import Reference, SharedReference, make_reference
from polyrhythm.training.skipped import NORM, SKIPPED, SkippedSteps, StepTable, make_step_table
from polyrhythm.training.steps import Steps
from polyrhythm.training.targets import TargetInputs, compute_targets

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings
    from polyrhythm.config.sections.learning import TrainingSettings


_ERROR = "train/actor/interpolation_error"
_MISMATCH = "train/actor/mismatch_kl"
#: KL from the behaviour policy at an update's first optimizer step: to π_prox where there is one, otherwise to π_θ.
_BEHAVIOR_KL = ("train/actor/behav_approx_kl", "train/actor/approx_kl")


class Learner:
    """A policy and its optimizer; the policy stays on the device where it is given.

    total_updates: length of the learning-rate schedule (versions × sync_interval). seed: of the shuffles. Where
    `algorithm.kl` needs a reference policy, it is the policy that the first update begins with (`training.reference`).
    halt: why the run must stop after the last update, as a sentence; "" if it need not.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmSettings,
        training: TrainingSettings,
        *,
        total_updates: int,
        seed: int,
    ) -> None:
        self.policy = policy
        self.updates = 0
        self.halt = ""
        self._skipped = SkippedSteps(training)
        self._reference: Reference | None = None
        self._algorithm, self._training = algorithm, training
        self._total_updates, self._seed = total_updates, seed
        self._module = as_module(policy)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._objective = Objective(algorithm)
        self._optimizer = optim.adamw_of(self._module, training.optimizer)

    def update(
        self,
        trajectories: Sequence[Trajectory],
        update_index: int,
        *,
        version: int = 0,
        own_weights: bool = False,
        before_step: Callable[[], None] | None = None,
    ) -> Steps:
        """All epochs over `trajectories`: one optimizer step per `next()`, metrics as the generator's return value.

        The first `next()` also collates (afterwards the trajectories' memory is no longer read) and prepares targets.
        The learning rate, the shuffles and the critic's warm-up follow update_index (from 0). version: the one that the
        update produces, the trainer's present one + 1 (for interpolated proximal log-probs). Metrics are means over the
        optimizer steps that were not skipped (interpolation_error: of the first, where the recomputed proximal policy
        is the one that is trained). own_weights: all trajectories were made by the weights that this update begins
        with; then mismatch_kl is the divergence of the log-probs of the first optimizer step from those of the
        generators, 0 but for rounding. before_step is called before the weights change, and before the update counts
        even if no step changed them. Closing the generator early leaves the weights of the last step done and `updates`
        as it was. A step whose gradient is not finite is skipped and the update completed; `halt` names the cause,
        unless training.on_nonfinite_gradient is skip.
        """
        training = self._training
        self._module.eval()  # dropout would make the ratio differ from 1 before the first step
        packed = collate(trajectories)
        inputs = self._target_inputs(version)
        if before_step is not None and isinstance(inputs.reference, SharedReference):
            before_step()  # the reference stands where the weights are, which a publication may still read
        batch, target_metrics = compute_targets(self._precomputed(packed, inputs), self._algorithm, inputs)
        decay = optim.linear_decay(update_index, self._total_updates, training.optimizer.lr_final_fraction)
        self._optimizer.scale_lr(decay)
        critic_only = update_index < training.critic_warmup_updates
        rows: list[Tensor] = []
        norms: list[optim.GradientNorm] = []
        names: tuple[str, ...] = ()
        for epoch in range(training.epochs):
            seed = (self._seed, update_index, epoch)
            for step, index in enumerate(minibatches(len(batch), training.minibatch_steps, seed)):
                minibatch = self._objective.select(batch.take(index), (*seed, step))
                step_metrics, norm = self._step(minibatch, critic_only=critic_only, before=before_step)
                names = tuple(step_metrics)
                rows.append(torch.stack(list(step_metrics.values())))
                norms.append(norm)
                yield
        if before_step is not None:
            before_step()  # publication and saving have read the weights before the update counts
        table = make_step_table(names, rows, norms)
        metrics = table.means()
        self._note_skipped(update_index, table, packed, batch, version)
        if self._training.on_nonfinite_gradient == "skip" or table.skipped.any():
            metrics[SKIPPED] = float(table.skipped.sum())
        self.updates = update_index + 1
        if _ERROR in names:
            metrics[_ERROR] = float(rows[0][names.index(_ERROR)])
        if own_weights:
            metrics[_MISMATCH] = float(rows[0][next(names.index(name) for name in _BEHAVIOR_KL if name in names)])
        metrics["train/actor/lr"] = training.optimizer.lr * decay
        if training.optimizer.value_lr is not None:
            metrics["train/critic/lr"] = training.optimizer.value_lr * decay
        metrics["train/actor/average_version"] = float(packed.version.double().mean())
        return metrics | target_metrics

    def _note_skipped(
        self, update: int, table: StepTable, packed: PackedBatch, batch: TrainingBatch, version: int
    ) -> None:
        """Count the steps of the update that were skipped, and set `halt` if the run must stop for them."""
        self.halt, skipped = "", table.skipped.tolist()
        if not any(skipped):
            self._skipped.reset_count()
            return
        metrics, gradients = table.first_skipped()
        names = [name for name, p in self._module.named_parameters() if p.requires_grad]
        parameters = {names[place]: finite for place, finite in gradients.items()}
        why = find_culprit(packed, batch, self._algorithm, self._target_inputs(version), metrics, parameters)
        self.halt = self._skipped.note(update, skipped, why)

    def _target_inputs(self, version: int) -> TargetInputs:
        if self._algorithm.kl.coef and self._reference is None:
            self._reference = make_reference(self.policy)
        micro_batch = self._training.micro_batch_steps or self._training.minibatch_steps
        return TargetInputs(self.policy, self._reference, version, micro_batch, self._device)

    def _precomputed(self, packed: PackedBatch, inputs: TargetInputs) -> PackedBatch:
        """The batch with what the policy's frozen part gives; dropped with the update."""
        limit = self._training.precomputed_mib
        return with_precomputed(
            packed, self.policy, micro_batch=inputs.micro_batch, device=self._device, limit_mib=limit
        )

    def _step(
        self, minibatch: TrainingBatch, *, critic_only: bool, before: Callable[[], None] | None
    ) -> tuple[dict[str, Tensor], optim.GradientNorm]:
        """One optimizer step on a mini-batch, micro-batch by micro-batch; returns its metrics as scalars, and the norm
        of the gradient before clipping."""
        by = self._objective.normalizers(minibatch)
        self._optimizer.zero_grad()
        metrics: dict[str, Tensor] = {}
        for batch in minibatch.micro_batches(self._training.micro_batch_steps, self._device):
            evaluation = self.policy.evaluate(batch.obs, batch.forward_inputs)
            loss = self._objective.loss(evaluation, batch, by, critic_only=critic_only)
            loss.total.backward()
            metrics = {name: x + metrics[name] for name, x in loss.metrics.items()} if metrics else loss.metrics
        norm = optim.clip_gradient(self._parameters, self._training.optimizer.grad_clip)
        metrics[NORM] = norm.total.float()
        bound = self._algorithm.early_stop_ratio
        if bound is not None:
            ratio = metrics["train/actor/ratio"]
            outside = not 1.0 / bound <= float(ratio) <= bound
            metrics["train/actor/early_stopped"] = torch.full_like(ratio, outside)
            if outside:
                return metrics, norm
        if before is not None:
            before()
        self._optimizer.step(norm.total.isfinite().float())
        return metrics, norm

    def state_dict(self) -> dict[str, Any]:
        """Published part of the policy (all of most policies), optimizer, the number of completed updates, and the
        reference policy if there is one; tensors are live, not copies."""
        state = {
            "policy": published_state(self._module),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
        }
        return state if self._reference is None else state | {"reference": self._reference.state_dict()}

    def kept_tensors(self) -> list[Tensor]:
        """All tensors that it keeps from one update to the next, on whatever device; gradients are dropped."""
        self._optimizer.zero_grad()
        moments = [x for state in self._optimizer.state.values() for x in state.values()]
        reference = [] if self._reference is None else list(self._reference.state_dict().values())
        return [*self._module.parameters(), *self._module.buffers(), *moments, *reference]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. ValueError: it is of another policy."""
        load_published(self._module, state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
        if "reference" in state:
            self._reference = make_reference(self.policy, state["reference"])
