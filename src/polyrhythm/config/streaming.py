"""Whether the trainer may begin an update with a part of its samples (`training.streaming`).

It may where the gradient of the update's first optimizer step is a sum over groups of samples, each term of which
depends on its own group alone, up to one factor that is applied once all are there. What is said here holds for every
policy but one that keeps statistics of observations, whose first update waits (docs/freshness.md).
"""

from __future__ import annotations

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.config.sections.objectives import OwnFunction

#: Losses that select entries by comparing all of an optimizer step's (`algorithms.entry_selection.SELECTION_RULES`).
SELECTING = frozenset({"clip_cov", "kl_cov", "m2po"})
#: Aggregations with one normaliser for policy and value, where `value.aggregation` is `policy`.
_COMMON = frozenset({"trajectory_mean", "episode_mean", "sum_over_constant"})


def streams(algorithm: AlgorithmSettings, training: TrainingSettings) -> str:  # noqa: PLR0911 - a reason each
    """Why an update cannot begin with a part of its samples, as a clause with the setting; "" if it can."""
    if training.minibatch_steps:
        return f"training.minibatch_steps = {training.minibatch_steps} draws each step from all of them (0 does not)"
    if algorithm.whitens:
        return "algorithm.normalize_advantage compares each advantage with all of the update"
    if algorithm.scales_rewards:
        return "algorithm.normalize_rewards divides by a deviation that includes all of the update"
    if algorithm.loss.type in SELECTING:
        return f"algorithm.loss.type = {algorithm.loss.type} selects entries among all of a step"
    if isinstance(algorithm.loss, OwnFunction) or isinstance(algorithm.advantage, OwnFunction):
        return f"{algorithm.own_functions[0]} may compare samples of different groups"
    if algorithm.rollout_correction.normalize:
        return "algorithm.rollout_correction.normalize divides by the mean of the update"
    if algorithm.value.coef and not (algorithm.value.aggregation == "policy" and algorithm.aggregation in _COMMON):
        return "policy and value loss have normalisers of their own, which are known once all samples are there"
    if training.require_batches > 1:
        if algorithm.recomputes:
            return "algorithm.proximal = recompute with training.require_batches > 1 takes the weights of its start"
        if algorithm.uses_value:
            return "values behind an episode's end, with training.require_batches > 1, are those of its start"
        if algorithm.aggregation == "episode_mean":
            return "algorithm.aggregation = episode_mean with training.require_batches > 1 counts steps of the update"
    return ""


def why_whole_updates(config: RunConfig, *, ranks: int = 1, leased: bool = False) -> str:
    """Why a run's updates begin with all of their samples, "" if with a part of them. ranks: of the trainer; leased:
    stations are on their devices in turn."""
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
    return streams(config.algorithm, training)
