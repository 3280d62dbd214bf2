"""Settings of the objective: from trajectories to a loss."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from polyrhythm.config.base import Count, Flag, Fraction, NotNegative, Positive, Section
from polyrhythm.config.sections.objectives import (
    Advantage,
    Bound,
    ClipCovLoss,
    GaeAdvantage,
    GrpoAdvantage,
    KlCovLoss,
    Loss,
    M2poLoss,
    MaxRlAdvantage,
    OwnFunction,
    PpoLoss,
    ReinforcePlusPlusAdvantage,
    RlooAdvantage,
    VTraceAdvantage,
)


class ValueSettings(Section):
    """The value loss. Whether its gradient reaches the trunk is the policy's setting (value_detach)."""

    coef: NotNegative = 0.5
    """Its weight in the total loss."""
    clip: Positive | None = None
    """Largest change of the value from the recorded one; null for no clipping."""
    huber: Positive | None = None
    """Huber threshold; null for squared error."""
    aggregation: Literal["token_mean", "policy"] = "token_mean"
    """A mean over the valid rewards, or aggregated as the policy loss is (algorithm.aggregation)."""


class KlSettings(Section):
    """KL divergence to a frozen copy of the weights that training began with; costs a copy and one forward pass."""

    coef: NotNegative = 0.0
    """Its weight; 0 for no reference policy."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated from the actions taken."""
    cap: Positive | None = None
    """Largest value of k3 for one entry, 10 in RLinf, verl and ROLL; null for no bound."""
    place: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or subtract it from the rewards (then k1 is the usual estimator)."""

    @model_validator(mode="after")
    def _k1_has_a_gradient(self) -> KlSettings:
        if self.coef and self.place == "loss" and self.estimator == "k1":
            raise self.refusal("estimator", "its gradient as a loss is zero in expectation; use k2, or place reward")
        if not self.coef and (self.estimator, self.place, self.cap) != ("k3", "loss", None):
            raise self.refusal("coef", "there is no reference policy, so nothing to estimate; give a weight")
        if self.cap is not None and self.estimator != "k3":
            raise self.refusal("cap", f"it bounds k3, not {self.estimator}; set estimator k3, or this to null")
        return self


class OverlongSettings(Section):
    """A penalty on messages near env.max_new_tokens, in the rewards that training sees (DAPO's soft overlong
    punishment)."""

    tokens: Count | None = None
    """Over so many last tokens of env.max_new_tokens the penalty grows, in proportion; null for no penalty."""
    penalty: Positive = 1.0
    """Of a message of env.max_new_tokens tokens."""

    @model_validator(mode="after")
    def _penalty_has_an_effect(self) -> OverlongSettings:
        if self.tokens is None and self.penalty != 1.0:
            raise self.refusal("penalty", "tokens is null, so it has no effect; give a number")
        return self


class RolloutCorrectionSettings(Section):
    """Importance weights proximal/behaviour on the policy loss, and rejection of entries where the two differ too
    much."""

    weight: Literal["none", "token", "chunk_step", "trajectory"] = "none"
    """What one weight covers: an entry of the loss, a chunk step or a trajectory; none for no weights."""
    weight_by: Literal["product", "geometric_mean"] = "product"
    """How the ratios of a chunk step's or trajectory's entries are combined."""
    weight_min: Positive | None = None
    """Smallest weight; null for no bound."""
    weight_max: Positive | None = None
    """Largest weight (truncated importance sampling); null for no bound."""
    normalize: Flag = False
    """Divide the weights by their mean over the update, where each entry, chunk step or trajectory counts once."""
    reject: Literal["none", "ratio", "k2", "k3"] = "none"
    """What is compared with the bounds: the ratio, or an estimate of the KL divergence; none rejects nothing."""
    reject_level: Literal["token", "chunk_step", "trajectory"] = "token"
    """What is rejected as a whole."""
    reject_by: Literal["mean", "sum", "max"] = "mean"
    """How a chunk step's or trajectory's entries are combined (for ratio: their logarithms)."""
    reject_below: Positive | None = None
    """Reject what is smaller; null for no bound."""
    reject_above: Positive | None = None
    """Reject what is larger; null for no bound."""
    count_rejected: Flag = True
    """Whether rejected entries still count in the mean of the loss (AReaL, TRL), or not (verl, ROLL)."""

    @property
    def active(self) -> bool:
        """Whether anything is weighted or rejected."""
        return self.weight != "none" or self.reject != "none"

    @property
    def keywords(self) -> dict[str, Any]:
        """Arguments of `algorithms.rollout_correction.correct`."""
        return self.model_dump(exclude={"count_rejected"})

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> RolloutCorrectionSettings:
        defaults = RolloutCorrectionSettings.model_fields
        for switch in ("weight", "reject"):
            if getattr(self, switch) != "none":
                continue
            names = [name for name in defaults if name.startswith(f"{switch}_")]
            names += ["normalize"] if switch == "weight" else ["count_rejected"]
            for name in names:
                if getattr(self, name) != defaults[name].default:
                    raise self.refusal(name, f"{switch} is none, so it has no effect; set {switch}")
        bounds = (self.reject_below, self.reject_above)
        if self.reject != "none" and bounds == (None, None):
            raise self.refusal("reject", "it needs a bound; set reject_above or reject_below")
        for low, lowest, high, highest in (
            ("weight_min", self.weight_min, "weight_max", self.weight_max),
            ("reject_below", self.reject_below, "reject_above", self.reject_above),
        ):
            if lowest is not None and highest is not None and lowest > highest:
                raise self.refusal(low, f"larger than {high} {highest:g}; lower it")
        return self


class AlgorithmSettings(Section):
    """From trajectories to a loss."""

    gamma: Fraction = 0.99
    """Discount per chunk step (reward_level chunk) or per primitive action (action)."""
    gae_lambda: Fraction = 0.95
    """Decay of the generalised advantage estimate."""
    advantage: Advantage = GaeAdvantage()
    """gae, v_trace, grpo, rloo, maxrl, reinforce_plus_plus, or module:function; with settings as {type: …}."""
    normalize_advantage: Flag | None = None
    """Whiten advantages over the valid entries of an update; null for yes, but for grpo, rloo and maxrl."""
    advantage_std: Literal["population", "sample"] = "population"
    """Whitening's standard deviation, over n entries or over n - 1 (RLinf, verl, ROLL, AReaL)."""
    normalize_rewards: Flag | None = None
    """Divide rewards by their discounted sum's running deviation, for advantages and values; null: gae and v_trace."""
    advantage_clip: Positive | None = None
    """Advantages are clamped to ± this after whitening (ROLL); null for no bound."""
    overlong: OverlongSettings = OverlongSettings()
    """The penalty on overlong messages."""
    bootstrap: Literal["standard", "always", "never"] = "standard"
    """Where the final observation's value is added: at truncations (standard), at every end (always), or never."""
    loss: Loss = PpoLoss()
    """ppo, decoupled_ppo, gspo, sapo, gipo, clip_cov, kl_cov, m2po, vanilla, tis, cispo, topr, or module:function."""
    proximal: Literal["recompute", "interpolate", "behavior"] = "recompute"
    """The policy that ppo clips against: that of the update's start, an estimate of it, or the one that acted."""
    mismatch_cap: Positive | None = None
    """Weight entries by the trainer's over the generator's probability, at most this; null where engines agree."""
    rollout_correction: RolloutCorrectionSettings = RolloutCorrectionSettings()
    """Importance weights of the policy loss, and rejection."""
    early_stop_ratio: Bound | None = None
    """Skip an optimizer step whose mean ratio is above it, or below its inverse; null for never."""
    logprob_level: Literal["token", "action", "chunk"] = "token"
    """What one ratio covers: an action entry, a primitive action, or a whole chunk."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """What a reward and its advantage cover: a whole chunk, or a primitive action or token (with a value for each)."""
    aggregation: Literal["token_mean", "trajectory_mean", "episode_mean", "sum_over_constant"] = "token_mean"
    """Mean over valid entries, over trajectories, over episodes by executed actions (RLinf), or sum / constant."""
    aggregation_constant: Positive | None = None
    """What sum_over_constant divides an optimizer step's sum by."""
    value: ValueSettings = ValueSettings()
    """The value loss."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    kl: KlSettings = KlSettings()
    """KL divergence to the reference policy."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened.

        The default is no for algorithms that compare groups: a group of equal returns has no signal, and whitening
        would assign it the update's mean.
        """
        if self.normalize_advantage is None:
            return not isinstance(self.advantage, GrpoAdvantage | RlooAdvantage | MaxRlAdvantage)
        return self.normalize_advantage

    @property
    def scales_rewards(self) -> bool:
        """Whether rewards are normalised. The default is yes if a value function learns them, since large rewards would
        dominate its gradient."""
        if self.normalize_rewards is None:
            return isinstance(self.advantage, GaeAdvantage | VTraceAdvantage)
        return self.normalize_rewards

    @property
    def uses_proximal(self) -> bool:
        """Whether the policy loss or its weights read the proximal log-probs."""
        return self.loss.uses_proximal or self.mismatch_cap is not None or self.rollout_correction.active

    @property
    def clips_around_behavior(self) -> bool:
        """Whether the loss keeps the policy near the one that acted, regardless of its age."""
        clips = self.loss.type in ("ppo", "clip_cov", "gspo", "sapo")
        return clips and (self.loss.corrects_staleness or self.proximal == "behavior")  # type: ignore[union-attr]

    @property
    def corrects(self) -> bool:
        """Whether the advantage compares the proximal policy with the one that acted."""
        advantage = self.advantage
        return advantage.uses_proximal if isinstance(advantage, OwnFunction) else advantage.type == "v_trace"

    @property
    def recomputes(self) -> bool:
        """Whether the trainer recomputes log-probs before an update."""
        return self.proximal == "recompute" and (self.uses_proximal or self.corrects)

    @property
    def interpolates(self) -> bool:
        """Whether proximal log-probs are interpolated during the update."""
        return self.proximal == "interpolate" and self.uses_proximal

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage compares samples of a group."""
        advantage = self.advantage
        return isinstance(advantage, GrpoAdvantage | RlooAdvantage | MaxRlAdvantage) or (
            isinstance(advantage, ReinforcePlusPlusAdvantage) and advantage.group_baseline
        )

    @property
    def needs_value(self) -> bool:
        """Whether the advantage uses the value function."""
        return isinstance(self.advantage, GaeAdvantage | VTraceAdvantage | OwnFunction)

    @property
    def uses_value(self) -> bool:
        """Whether the policy's value is used, for the advantage or to train it."""
        return self.needs_value or self.value.coef > 0

    @property
    def own_functions(self) -> list[str]:
        """The user's functions in this section."""
        return [part.type for part in (self.loss, self.advantage) if isinstance(part, OwnFunction)]

    @model_validator(mode="after")
    def _parts_agree(self) -> AlgorithmSettings:
        if self.loss.type == "decoupled_ppo" and self.proximal == "behavior":
            raise self.refusal(
                "proximal", "decoupled_ppo needs a proximal policy of its own; set algorithm.proximal recompute"
            )
        if self.reward_level == "action" and self.logprob_level == "chunk":
            raise self.refusal(
                "reward_level", "a ratio per chunk cannot carry advantages per action; use reward_level chunk"
            )
        if self.normalize_rewards and not self.needs_value:
            raise self.refusal(
                "normalize_rewards",
                f"{self.advantage.type} compares returns, whatever their scale; leave it out, or use gae or v_trace",
            )
        _check_proximal(self)
        if self.mismatch_cap is not None:
            _check_mismatch(self)
        if self.rollout_correction.active:
            _check_rollout_correction(self)
        if (self.aggregation == "sum_over_constant") != (self.aggregation_constant is not None):
            raise self.refusal(
                "aggregation_constant",
                f"aggregation is {self.aggregation}; give the constant with sum_over_constant, and only there",
            )
        return self


def _check_proximal(algorithm: AlgorithmSettings) -> None:
    loss = algorithm.loss
    if algorithm.corrects and algorithm.proximal != "recompute":
        why = f"{algorithm.advantage.type} compares the recomputed policy with the one that acted; set it to recompute"
        raise algorithm.refusal("proximal", why)
    weighted = isinstance(loss, OwnFunction) or loss.corrects_staleness or algorithm.rollout_correction.weight != "none"
    if algorithm.advantage.type == "v_trace" and not weighted:
        why = (
            "v_trace leaves the importance weight of a stale sample to the loss; use tis, cispo, topr, gspo, gipo "
            "or decoupled_ppo, or set algorithm.rollout_correction.weight"
        )
        raise algorithm.refusal("loss.type", why)
    if algorithm.proximal == "interpolate" and not algorithm.uses_proximal:
        why = f"{loss.type} reads no proximal policy; leave it out, or use ppo or decoupled_ppo"
        raise algorithm.refusal("proximal", why)
    if isinstance(loss, ClipCovLoss | KlCovLoss) and algorithm.proximal == "interpolate":
        why = f"{loss.type} selects entries before the forward pass that interpolates; set it to recompute"
        raise algorithm.refusal("proximal", why)
    if isinstance(loss, M2poLoss) and algorithm.proximal != "recompute":
        why = "m2po compares the recomputed policy with the one that acted; set it to recompute"
        raise algorithm.refusal("proximal", why)


def _check_mismatch(algorithm: AlgorithmSettings) -> None:
    loss = algorithm.loss
    if algorithm.proximal != "recompute":
        why = f"proximal {algorithm.proximal} never asks the trainer's engine; set algorithm.proximal recompute"
        raise algorithm.refusal("mismatch_cap", why)
    if isinstance(loss, OwnFunction) or loss.corrects_staleness:
        why = f"with {loss.type} samples would be weighted twice; use ppo or vanilla, or null here"
        raise algorithm.refusal("mismatch_cap", why)


def _check_rollout_correction(algorithm: AlgorithmSettings) -> None:
    correction, loss = algorithm.rollout_correction, algorithm.loss
    switch = "weight" if correction.weight != "none" else "reject"
    path = f"rollout_correction.{switch}"
    if algorithm.proximal != "recompute":
        why = "it compares the recomputed policy with the one that acted; set algorithm.proximal recompute"
        raise algorithm.refusal(path, why)
    if correction.weight == "none":
        return
    if algorithm.mismatch_cap is not None:
        why = "algorithm.mismatch_cap is such a weight too (token, weight_max); set one of them"
        raise algorithm.refusal(path, why)
    if not isinstance(loss, OwnFunction) and loss.corrects_staleness:
        other = "ppo" if loss.type == "decoupled_ppo" else f"{loss.type} with ratio_to proximal"
        raise algorithm.refusal(path, f"{loss.type} has an importance weight of its own; use {other}, or weight none")
