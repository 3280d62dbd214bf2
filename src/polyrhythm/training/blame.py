"""Cause of a gradient that is not finite: the first quantity between the samples and it that is not, as a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from polyrhythm.training.batch import PackedBatch, TrainingBatch
from polyrhythm.training.targets import TargetInputs, bootstrap_values

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings

#: The remedy where weights have grown until a forward or a backward pass overflows.
_SMALLER = "lower training.optimizer.lr, value_lr or grad_clip"


def find_culprit(
    packed: PackedBatch,
    batch: TrainingBatch,
    algorithm: AlgorithmSettings,
    inputs: TargetInputs,
    metrics: Mapping[str, bool],
    parameters: Mapping[str, bool],
) -> str:
    """What returned the value that is not finite, and the remedy. metrics, parameters: of the optimizer step, whether
    each metric and the gradient of each parameter is finite. All ranks ask at once, each looks at its own samples, and
    all get the first cause: what a rank finds may come from another's samples, as a mean over all does."""
    causes = [*_in_samples(packed), *_in_targets(packed, batch, algorithm, inputs)]
    found = next((i for i, (is_finite, _) in enumerate(causes) if not is_finite), len(causes))
    first = int(min(inputs.ranks.gather(found)))
    if first < len(causes):
        return causes[first][1]
    for name, what in _OF_EVALUATE.items():
        if not metrics.get(name, True):
            return f"policy.evaluate gives a {what} that is not finite; {_SMALLER}"
    if not metrics["train/actor/policy_loss"]:
        return f"algorithm.loss.type = {algorithm.loss.type}: it gives NaN or infinity; {_of_loss(algorithm)}"
    bad = [name for name, finite in parameters.items() if not finite]
    more = f" and {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    where = f"in {bad[0]}{more}" if bad else "in its norm alone"
    return f"the losses are finite, their gradient is not, {where}; {_of_loss(algorithm)}"


#: Metrics that only the policy's `evaluate` can make non-finite, where the targets are finite → what it returned.
_OF_EVALUATE = {
    "train/actor/ratio": "log-prob",
    "train/actor/approx_kl": "log-prob",
    "train/actor/proximal_approx_kl": "log-prob",
    "train/actor/entropy_loss": "entropy",
    "train/actor/reference_kl": "log-prob",
    "train/critic/value_loss": "value",
}


#: Whether a quantity is finite, and what to say if it is not.
_Finding = tuple[bool, str]


def _in_targets(
    packed: PackedBatch, batch: TrainingBatch, algorithm: AlgorithmSettings, inputs: TargetInputs
) -> Iterator[_Finding]:
    """What the targets were made of, in its order."""
    value = not algorithm.uses_value or _finite(bootstrap_values(packed, algorithm, inputs))
    yield value, f"policy.value gives NaN or infinity for the last observation of a sample; {_SMALLER}"
    yield _finite(batch.proximal), f"policy.evaluate gives log-probs that are not finite; {_SMALLER}"
    yield _finite(batch.old_value), f"policy.evaluate gives values that are not finite; {_SMALLER}"
    advantage, kind = _finite(batch.advantage) and _finite(batch.returns, batch.value_mask), algorithm.advantage.type
    yield advantage, f"algorithm.advantage.type = {kind}: it gives NaN or infinity; correct its formula"


def _in_samples(packed: PackedBatch) -> Iterator[_Finding]:
    """What samples hold. Slots refuse such that are not finite; samples from elsewhere may still have it."""
    shown = {f"observation {name}": x for name, x in packed.obs.items()}
    last = {f"the last observation {name}": x for name, x in packed.final_obs.items()}
    for what, values in {"a reward": packed.rewards[packed.valid], **shown, **last}.items():
        yield _finite(values), f"the environment gave {what} of NaN or infinity; correct the environment"
    value = packed.value[packed.valid] if packed.value.shape == packed.valid.shape else packed.value
    for what, values in {"log-prob": packed.logprob[packed.valid], "value": value}.items():
        yield _finite(values), f"policy.act gave a {what} of NaN or infinity; correct the policy"


def _of_loss(algorithm: AlgorithmSettings) -> str:
    own = algorithm.own_functions
    return f"look at {' and '.join(own)} first, or {_SMALLER}" if own else _SMALLER


def _finite(values: Tensor, mask: Tensor | None = None) -> bool:
    return bool((values if mask is None else values[mask]).isfinite().all())
