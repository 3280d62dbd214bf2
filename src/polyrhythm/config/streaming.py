"""Decides whether the trainer may begin an update with a part of its samples (`training.streaming`).

It may if the gradient of the update's first optimizer step is a sum over groups of samples whose terms depend on their
own group alone, up to one factor that is applied at the end. Policies do not matter, except that observation statistics
make the first update wait (docs/freshness.md).
"""

from __future__ import annotations

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings

#: Losses that select entries by comparing all entries of an optimizer step
#: (`algorithms.entry_selection.SELECTION_RULES`).
SELECTING = frozenset({"clip_cov", "kl_cov", "m2po"})
#: Aggregations with one normaliser for policy and value if `value.aggregation` is `policy`.
_COMMON = frozenset({"trajectory_mean", "episode_mean", "sum_over_constant"})


def why_whole_objective(algorithm: AlgorithmSettings, training: TrainingSettings) -> str:
    """Reason, as a clause, why an update needs all of its samples from the start; "" if it does not."""
    loss, several = algorithm.loss.type, training.require_batches > 1
    correction = algorithm.rollout_correction
    alike = algorithm.aggregation != "trajectory_mean" or correction.count_rejected  # all entries may be rejected
    common = algorithm.value.aggregation == "policy" and algorithm.aggregation in _COMMON and alike
    reasons = {
        f"training.minibatch_steps = {training.minibatch_steps} draws each step from all samples (0 does not)": bool(
            training.minibatch_steps
        ),
        "algorithm.normalize_advantage compares each advantage with all of the update": algorithm.whitens,
        "algorithm.normalize_rewards divides by a deviation of all of the update": algorithm.scales_rewards,
        f"algorithm.loss.type = {loss} selects entries among all of a step": loss in SELECTING,
        f"{', '.join(algorithm.own_functions)} may compare samples of different groups": bool(algorithm.own_functions),
        "algorithm.rollout_correction.normalize divides by the mean of the update": correction.normalize,
        "policy and value loss have normalisers of their own, known once all samples are there": (
            algorithm.value.coef > 0 and not common
        ),
        "algorithm.proximal = recompute with training.require_batches > 1 takes the weights of its start": (
            several and algorithm.recomputes
        ),
        "values behind an episode's end, with training.require_batches > 1, are those of its start": (
            several and algorithm.uses_value
        ),
        "algorithm.aggregation = episode_mean with training.require_batches > 1 counts steps of the update": (
            several and algorithm.aggregation == "episode_mean"
        ),
    }
    return next((words for words, holds in reasons.items() if holds), "")


def why_whole_updates(config: RunConfig, *, ranks: int = 1, leased: bool = False) -> str:
    """Reason why a run's updates begin with all of their samples; "" if they begin with a part.

    ranks: of the trainer; leased: stations share devices in turns.
    """
    training = config.training
    if not training.streaming:
        return "training.streaming = false"
    if training.order == "ticket":
        return "training.order = ticket keeps one order of samples"
    if config.batching.type == "lockstep":
        return "batching.type = lockstep ends episodes together"
    if leased:
        return "placement.sharing = lease: a trainer that waits would keep the device that makes its samples"
    if ranks > 1:
        return f"{ranks} ranks share each update's samples out"
    return why_whole_objective(config.algorithm, training)
