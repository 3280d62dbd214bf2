"""Settings of the objective: from trajectories to a loss."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from polyrhythm.config.base import Flag, Fraction, InvalidSetting, NotNegative, Positive, Section
from polyrhythm.config.objectives import (
    Advantage,
    Bound,
    DecoupledPpoLoss,
    GaeAdvantage,
    GrpoAdvantage,
    Loss,
    OwnFunction,
    PpoLoss,
    ReinforcePlusPlusAdvantage,
    RlooAdvantage,
    VTraceAdvantage,
)


class ValueSettings(Section):
    """The value loss. Whether it reaches the trunk is the policy's setting (value_detach)."""

    coef: NotNegative = 0.5
    """Its weight in the total loss."""
    clip: Positive | None = None
    """Largest move of the value from the behaviour policy's; null for no clipping."""
    huber: Positive | None = None
    """Huber threshold; null for squared error."""


class KlSettings(Section):
    """Distance to a frozen copy of the weights that training began with; costs a copy and one forward pass."""

    coef: NotNegative = 0.0
    """Its weight; 0 for no reference policy."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated from the actions taken."""
    place: Literal["loss", "reward"] = "loss"
    """Add it to the loss, or take it from the rewards (then k1 is the usual estimator)."""

    @model_validator(mode="after")
    def _k1_has_a_gradient(self) -> KlSettings:
        if self.coef and self.place == "loss" and self.estimator == "k1":
            raise InvalidSetting(
                "estimator", "k1", "its gradient as a loss is zero in expectation; use k2, or place reward"
            )
        if not self.coef and (self.estimator, self.place) != ("k3", "loss"):
            raise InvalidSetting(
                "coef", self.coef, "there is no reference policy whose distance could be set; give a weight"
            )
        return self


class AlgorithmSettings(Section):
    """From trajectories to a loss."""

    gamma: Fraction = 0.99
    """Discount per chunk step (reward_level chunk) or per primitive action (action)."""
    gae_lambda: Fraction = 0.95
    """Decay of the generalised advantage estimate."""
    advantage: Advantage = GaeAdvantage()
    """gae, v_trace, grpo, rloo, reinforce_plus_plus, or module:function; with settings as {type: …}."""
    normalize_advantage: Flag | None = None
    """Whiten advantages over the valid entries of an update; null for yes, but for grpo and rloo."""
    bootstrap: Literal["standard", "always"] = "standard"
    """Add the final observation's value where an episode was truncated (standard), or at every end (always)."""
    loss: Loss = PpoLoss()
    """ppo, decoupled_ppo, gspo, vanilla, tis, cispo, topr, or module:function; with settings as {type: …}."""
    proximal: Literal["recompute", "interpolate", "behavior"] = "recompute"
    """The policy that ppo clips against: of the update's start, an estimate of it, or the sample's own."""
    mismatch_cap: Positive | None = None
    """Weigh entries by the trainer's over the generator's probability, at most this; null where engines agree."""
    early_stop_ratio: Bound | None = None
    """Skip an optimizer step whose mean ratio is above it, or below its inverse; null for never."""
    logprob_level: Literal["token", "action", "chunk"] = "token"
    """What one ratio covers: an action entry, a primitive action, or a whole chunk."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """What one reward covers: a whole chunk, or a primitive action (needs a policy with a value per action)."""
    aggregation: Literal["token_mean", "trajectory_mean", "sum_over_constant"] = "token_mean"
    """The mean of the loss over valid entries, over trajectories of equal weight, or a sum over a constant."""
    aggregation_constant: Positive | None = None
    """What sum_over_constant divides an optimizer step's sum by."""
    value: ValueSettings = ValueSettings()
    """The value loss."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    kl: KlSettings = KlSettings()
    """Distance to the reference policy."""

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened. Where groups are compared it would give a group of equals, which says
        nothing, the update's mean."""
        if self.normalize_advantage is None:
            return not isinstance(self.advantage, GrpoAdvantage | RlooAdvantage)
        return self.normalize_advantage

    @property
    def uses_proximal(self) -> bool:
        """Whether the loss looks at the proximal log-probs."""
        if isinstance(self.loss, OwnFunction):
            return self.loss.uses_proximal
        return isinstance(self.loss, PpoLoss | DecoupledPpoLoss) or self.mismatch_cap is not None

    @property
    def corrects(self) -> bool:
        """Whether the advantage compares the proximal policy with the one that acted."""
        advantage = self.advantage
        return advantage.uses_proximal if isinstance(advantage, OwnFunction) else advantage.type == "v_trace"

    @property
    def recomputes(self) -> bool:
        """Whether log-probs are asked of the trainer before it trains."""
        return self.proximal == "recompute" and (self.uses_proximal or self.corrects)

    @property
    def interpolates(self) -> bool:
        """Whether proximal log-probs are estimated while it trains."""
        return self.proximal == "interpolate" and self.uses_proximal

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage compares samples of a group."""
        advantage = self.advantage
        return isinstance(advantage, GrpoAdvantage | RlooAdvantage) or (
            isinstance(advantage, ReinforcePlusPlusAdvantage) and advantage.group_baseline
        )

    @property
    def needs_value(self) -> bool:
        """Whether the advantage is taken against the value function."""
        return isinstance(self.advantage, GaeAdvantage | VTraceAdvantage | OwnFunction)

    @property
    def uses_value(self) -> bool:
        """Whether the policy's value is looked at, for the advantage or to train it."""
        return self.needs_value or self.value.coef > 0

    @property
    def own_functions(self) -> list[str]:
        """A user's functions in it."""
        return [part.type for part in (self.loss, self.advantage) if isinstance(part, OwnFunction)]

    @model_validator(mode="after")
    def _parts_agree(self) -> AlgorithmSettings:
        if self.loss.type == "decoupled_ppo" and self.proximal == "behavior":
            raise InvalidSetting(
                "proximal",
                "behavior",
                "decoupled_ppo needs a proximal policy of its own; set algorithm.proximal recompute",
            )
        if self.reward_level == "action" and self.logprob_level == "chunk":
            raise InvalidSetting(
                "reward_level", "action", "a ratio per chunk cannot carry advantages per action; use reward_level chunk"
            )
        _check_proximal(self)
        if self.mismatch_cap is not None:
            _check_mismatch(self)
        if (self.aggregation == "sum_over_constant") != (self.aggregation_constant is not None):
            raise InvalidSetting(
                "aggregation_constant",
                self.aggregation_constant,
                f"aggregation is {self.aggregation}; give the constant with sum_over_constant, and only there",
            )
        return self


def _check_proximal(algorithm: AlgorithmSettings) -> None:
    if algorithm.corrects and algorithm.proximal != "recompute":
        why = f"{algorithm.advantage.type} compares the recomputed policy with the one that acted; set it to recompute"
        raise InvalidSetting("proximal", algorithm.proximal, why)
    if algorithm.advantage.type == "v_trace" and algorithm.loss.type in ("ppo", "vanilla"):
        why = "v_trace leaves the weight of a stale sample to the loss; use tis, cispo, topr, gspo or decoupled_ppo"
        raise InvalidSetting("loss.type", algorithm.loss.type, why)
    if algorithm.proximal == "interpolate" and not algorithm.uses_proximal:
        why = f"{algorithm.loss.type} looks at no proximal policy; leave it out, or use ppo or decoupled_ppo"
        raise InvalidSetting("proximal", "interpolate", why)


def _check_mismatch(algorithm: AlgorithmSettings) -> None:
    if algorithm.proximal != "recompute":
        why = f"proximal {algorithm.proximal} never asks the trainer's engine; set algorithm.proximal recompute"
        raise InvalidSetting("mismatch_cap", algorithm.mismatch_cap, why)
    if algorithm.loss.type not in ("ppo", "vanilla"):
        why = f"with {algorithm.loss.type} samples would be weighed twice; use ppo or vanilla, or null here"
        raise InvalidSetting("mismatch_cap", algorithm.mismatch_cap, why)
