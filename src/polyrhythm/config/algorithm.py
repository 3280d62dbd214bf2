"""Settings of the objective: from trajectories to a loss. docs/objectives.md has formulas, sources and advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from polyrhythm.config.base import Flag, Fraction, NotNegative, Positive, Refusal, Section
from polyrhythm.config.registry import imported

Clip = Annotated[float, Field(gt=0, lt=1, strict=True)]
Bound = Annotated[float, Field(gt=1, strict=True)]
#: A user's function; its settings are whatever it takes.
_OWN = "module:function"


class OwnFunction(Section):
    """A function of your own, and its keywords."""

    type: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """module:function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its keywords."""

    def function(self) -> Callable[..., Any]:
        """What `type` names. Refusal: it is not there, or is no function."""
        found = imported(self.type, self.type, "a function")
        if not callable(found):
            raise Refusal("type", self.type, f"it is {type(found).__name__}; name a function")
        own: Callable[..., Any] = found
        return own

    @model_validator(mode="after")
    def _takes_its_settings(self) -> OwnFunction:
        keywords = inspect.signature(self.function()).parameters.values()
        if any(keyword.kind is keyword.VAR_KEYWORD for keyword in keywords):
            return self
        names = [keyword.name for keyword in list(keywords)[1:]]
        for unknown in (name for name in self.settings if name not in names):
            taken = ", ".join(names) or "nothing else"
            raise Refusal(f"settings.{unknown}", self.settings[unknown], f"{self.type} takes {taken}; leave it out")
        return self


class GaeAdvantage(Section):
    """Generalised advantage estimation against the value function."""

    type: Literal["gae"] = "gae"
    """The estimate's name."""


class VTraceAdvantage(Section):
    """V-trace: as gae, corrected for samples of older policies; costs one forward pass."""

    type: Literal["v_trace"] = "v_trace"
    """The estimate's name."""
    rho_cap: Positive = 1.0
    """Largest weight of a step's own temporal difference; decides which policy's value is learned."""
    trace_cap: Positive = 1.0
    """Largest weight of a step in those before it; decides how fast."""


class GrpoAdvantage(Section):
    """An episode's return against those of its group (groups.size > 1)."""

    type: Literal["grpo"] = "grpo"
    """The estimate's name."""
    std: Literal["sample", "population", "none"] = "sample"
    """Divide by the group's standard deviation, by size - 1 or by size; none leaves it out."""


class RlooAdvantage(Section):
    """An episode's return against the mean of the others of its group (groups.size > 1)."""

    type: Literal["rloo"] = "rloo"
    """The estimate's name."""


class ReinforcePlusPlusAdvantage(Section):
    """An episode's return, less the penalties still to come, whitened over the update."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The estimate's name."""
    group_baseline: Flag = False
    """Take the mean return of the group from each (groups.size > 1)."""


class OwnAdvantage(OwnFunction):
    """A function of your own, of (samples, *, keywords), see algorithms/advantages.py.

    gamma and gae_lambda are given where it takes them.
    """


class PpoLoss(Section):
    """PPO: the ratio to the proximal policy is clipped."""

    type: Literal["ppo"] = "ppo"
    """The loss's name."""
    clip_low: Clip = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio is clipped above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    dual_clip: Bound | None = None
    """For negative advantages the loss is bounded by this multiple of the advantage; null for no bound."""


class DecoupledPpoLoss(PpoLoss):
    """PPO around the proximal policy, weighted by its ratio to the one that acted: for samples of older versions."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"  # type: ignore[assignment]
    """The loss's name."""
    behave_weight_threshold: Positive | None = None
    """Entries whose weight (proximal over behaviour) is larger are masked; null for none."""


class GspoLoss(Section):
    """PPO with one ratio for all entries of a decision, against the policy that acted."""

    type: Literal["gspo"] = "gspo"
    """The loss's name."""
    clip_low: Clip = 0.2
    """The ratio is clipped below at 1 - clip_low; long sequences of a language model want 3e-4."""
    clip_high: Positive = 0.2
    """The ratio is clipped above at 1 + clip_high; long sequences of a language model want 4e-4."""


class VanillaLoss(Section):
    """The policy gradient without any correction for staleness."""

    type: Literal["vanilla"] = "vanilla"
    """The loss's name."""


class TisLoss(Section):
    """Truncated importance sampling."""

    type: Literal["tis"] = "tis"
    """The loss's name."""
    cap: Positive | None = 2.0
    """Largest importance weight; null for any."""


class CispoLoss(Section):
    """Importance weights clipped on both sides."""

    type: Literal["cispo"] = "cispo"
    """The loss's name."""
    clip_low: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """The weight is clipped below at 1 - clip_low; 1 for no lower bound."""
    clip_high: Positive = 0.28
    """The weight is clipped above at 1 + clip_high."""


class ToprLoss(Section):
    """What went well is imitated without a weight, what went badly has a truncated importance weight."""

    type: Literal["topr"] = "topr"
    """The loss's name."""
    cap: Positive = 1.0
    """Largest importance weight of a negative advantage."""
    positive_weight: NotNegative = 1.0
    """Factor on entries of positive advantage (weighted TOPR)."""
    negative_weight: NotNegative = 1.0
    """Factor on the others (weighted TOPR)."""


class OwnLoss(OwnFunction):
    """A function of your own, of (entries, *, keywords), see algorithms/losses.py."""

    uses_proximal: Flag = False
    """Whether it looks at the proximal log-probs, which may cost a forward pass."""


def _named(value: Any) -> Any:
    """A name alone is a section of its defaults."""
    return {"type": value} if isinstance(value, str) else value


def _type_of(default: str) -> Discriminator:
    def choose(value: Any) -> Any:
        name = getattr(value, "type", default) if isinstance(value, BaseModel) else default
        name = value.get("type", name) if isinstance(value, dict) else name
        return _OWN if isinstance(name, str) and ":" in name else name

    return Discriminator(choose)


Advantage = Annotated[
    Annotated[GaeAdvantage, Tag("gae")]
    | Annotated[VTraceAdvantage, Tag("v_trace")]
    | Annotated[GrpoAdvantage, Tag("grpo")]
    | Annotated[RlooAdvantage, Tag("rloo")]
    | Annotated[ReinforcePlusPlusAdvantage, Tag("reinforce_plus_plus")]
    | Annotated[OwnAdvantage, Tag(_OWN)],
    _type_of("gae"),
    BeforeValidator(_named),
]
Loss = Annotated[
    Annotated[PpoLoss, Tag("ppo")]
    | Annotated[DecoupledPpoLoss, Tag("decoupled_ppo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[VanillaLoss, Tag("vanilla")]
    | Annotated[TisLoss, Tag("tis")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[ToprLoss, Tag("topr")]
    | Annotated[OwnLoss, Tag(_OWN)],
    _type_of("ppo"),
    BeforeValidator(_named),
]


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
            raise Refusal("estimator", "k1", "its gradient as a loss is zero in expectation; use k2, or place reward")
        return self


class AlgorithmSettings(Section):
    """From trajectories to a loss."""

    gamma: Fraction = 0.99
    """Discount per chunk step (reward_level chunk) or per primitive action (action)."""
    gae_lambda: Fraction = 0.95
    """Decay of the generalised advantage estimate."""
    advantage: Advantage = GaeAdvantage()
    """gae, v_trace, grpo, rloo, reinforce_plus_plus, or module:function; with settings as {type: …}."""
    normalize_advantage: Flag = True
    """Whiten advantages over the valid entries of an update; false leaves grpo's as they are by group."""
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
    def uses_proximal(self) -> bool:
        """Whether the loss looks at the proximal log-probs."""
        if isinstance(self.loss, OwnLoss):
            return self.loss.uses_proximal
        return isinstance(self.loss, PpoLoss) or self.mismatch_cap is not None

    @property
    def recomputes(self) -> bool:
        """Whether log-probs are asked of the trainer before it trains."""
        return self.proximal == "recompute" and (self.uses_proximal or self.advantage.type == "v_trace")

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
        return isinstance(self.advantage, GaeAdvantage | VTraceAdvantage | OwnAdvantage)

    @model_validator(mode="after")
    def _parts_agree(self) -> AlgorithmSettings:
        if self.loss.type == "decoupled_ppo" and self.proximal == "behavior":
            raise Refusal(
                "proximal",
                "behavior",
                "decoupled_ppo needs a proximal policy of its own; set algorithm.proximal recompute",
            )
        if self.reward_level == "action" and self.logprob_level == "chunk":
            raise Refusal(
                "reward_level", "action", "a ratio per chunk cannot carry advantages per action; use reward_level chunk"
            )
        if self.advantage.type == "v_trace" and self.proximal != "recompute":
            why = "v_trace compares the proximal policy with the one that acted; set algorithm.proximal recompute"
            raise Refusal("proximal", self.proximal, why)
        if self.mismatch_cap is not None:
            _check_mismatch(self)
        if (self.aggregation == "sum_over_constant") != (self.aggregation_constant is not None):
            raise Refusal(
                "aggregation_constant",
                self.aggregation_constant,
                f"aggregation is {self.aggregation}; give the constant with sum_over_constant, and only there",
            )
        return self


def _check_mismatch(algorithm: AlgorithmSettings) -> None:
    if algorithm.proximal != "recompute":
        why = f"proximal {algorithm.proximal} never asks the trainer's engine; set algorithm.proximal recompute"
        raise Refusal("mismatch_cap", algorithm.mismatch_cap, why)
    if algorithm.loss.type not in ("ppo", "vanilla"):
        why = f"{algorithm.loss.type} already weighs by the policy that acted; use ppo or vanilla, or null here"
        raise Refusal("mismatch_cap", algorithm.mismatch_cap, why)
