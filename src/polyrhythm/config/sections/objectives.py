"""Settings of each advantage and each loss, by type. docs/objectives.md has formulas, sources and advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from polyrhythm.config.base import (
    Flag,
    InvalidSetting,
    NotNegative,
    Number,
    Positive,
    Section,
    function_address,
    type_or,
)
from polyrhythm.config.registry import import_object
from polyrhythm.plugin import table

Clip = Annotated[float, Field(gt=0, lt=1, strict=True)]
Bound = Annotated[float, Field(gt=1, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
RatioTo = Literal["behavior", "proximal"]
#: The tag of a user's function.
_OWN = "module:function"


class OwnFunction(Section):
    """A function of your own, of (entries, *, keywords) or (samples, *, keywords).

    See algorithms/losses.py and algorithms/advantages.py; an advantage is given gamma and gae_lambda if it takes them.
    """

    type: Annotated[str, function_address("mine.losses:asymmetric")]
    """module:function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its keywords."""
    uses_proximal: Flag = False
    """Whether it reads entries.proximal or samples.log_ratio, which costs a forward pass."""

    def function(self) -> Callable[..., Any]:
        """Import the function named by `type`. InvalidSetting: there is none, it is not a function, or it does not
        accept its settings."""
        found = import_object(self.type, self.type, "a function")
        if not callable(found):
            raise self.refusal("type", f"it is {type(found).__name__}; name a function")
        try:
            keywords = list(inspect.signature(found).parameters.values())[1:]
        except ValueError as error:
            raise self.refusal("type", f"{error}; name a function that is written in Python") from error
        names = [keyword.name for keyword in keywords]
        if not any(keyword.kind is keyword.VAR_KEYWORD for keyword in keywords):
            for unknown in (name for name in self.settings if name not in names):
                taken = ", ".join(names) or "nothing else"
                raise InvalidSetting(
                    f"settings.{unknown}", self.settings[unknown], f"{self.type} takes {taken}; leave it out"
                )
        given = {*self.settings, "gamma", "gae_lambda"}
        for keyword in keywords:
            open_ended = keyword.kind in (keyword.VAR_KEYWORD, keyword.VAR_POSITIONAL)
            if keyword.default is keyword.empty and not open_ended and keyword.name not in given:
                raise InvalidSetting(f"settings.{keyword.name}", None, f"{self.type} needs it; give it a value")
        own: Callable[..., Any] = found
        return own


class GaeAdvantage(Section):
    """Generalised advantage estimation against the value function."""

    type: Literal["gae"] = "gae"


class VTraceAdvantage(Section):
    """V-trace: gae corrected for samples of older policies; costs one forward pass."""

    type: Literal["v_trace"] = "v_trace"
    rho_cap: Positive = 1.0
    """Largest importance weight of a step's temporal difference (ρ̄); sets the policy whose value is learned."""
    trace_cap: Positive = 1.0
    """Largest importance weight of a trace (c̄), at most rho_cap; sets how fast it is learned."""

    @model_validator(mode="after")
    def _caps_are_in_order(self) -> VTraceAdvantage:
        if self.trace_cap > self.rho_cap:
            raise self.refusal("trace_cap", f"larger than rho_cap {self.rho_cap:g}; lower it")
        return self


class GrpoAdvantage(Section):
    """An episode's return, normalised within its group (groups.size > 1)."""

    type: Literal["grpo"] = "grpo"
    std: Literal["sample", "population", "none"] = "sample"
    """Divide by the group's standard deviation, by size - 1 or by size; none leaves it out."""
    epsilon: Positive = 1e-6
    """Added to the standard deviation (TRL: 1e-4)."""


class RlooAdvantage(Section):
    """An episode's return minus the mean of the others of its group (groups.size > 1)."""

    type: Literal["rloo"] = "rloo"


class MaxRlAdvantage(Section):
    """An episode's return minus its group's mean, divided by that mean (groups.size > 1)."""

    type: Literal["maxrl"] = "maxrl"


class ReinforcePlusPlusAdvantage(Section):
    """An episode's return without a value function, KL penalties included, whitened over the update."""

    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    returns: Literal["total", "to_go"] = "total"
    """The whole return at every step (a reward at the end), or the rewards from each step on, discounted by gamma."""
    group_baseline: Flag = False
    """Subtract the group's mean return from each (groups.size > 1; with returns total)."""

    @model_validator(mode="after")
    def _baseline_is_of_totals(self) -> ReinforcePlusPlusAdvantage:
        if self.group_baseline and self.returns == "to_go":
            raise self.refusal("group_baseline", "it is a mean of whole returns; set returns total, or this to false")
        return self


class LossSection(Section):
    """What all losses have in common: the policy in their ratio's denominator, for the checks of
    `AlgorithmSettings`."""

    @property
    def corrects_staleness(self) -> bool:
        """Whether the loss has an importance weight to the policy that acted."""
        return getattr(self, "ratio_to", "proximal") == "behavior"

    @property
    def uses_proximal(self) -> bool:
        """Whether the loss reads the proximal log-probs."""
        return getattr(self, "ratio_to", "proximal") == "proximal"


class PpoLoss(LossSection):
    """PPO: the ratio to the proximal policy is clipped."""

    type: Literal["ppo"] = "ppo"
    clip_low: Clip | None = 0.2
    """The ratio is clipped below at 1 - clip_low; null for no clip on this side."""
    clip_high: Positive | None = 0.2
    """The ratio is clipped above at 1 + clip_high (DAPO's clip-higher: larger than clip_low); null for no clip."""
    dual_clip: Bound | None = None
    """For negative advantages the loss is at most this multiple of |advantage|; null for no bound."""


class DecoupledPpoLoss(LossSection):
    """PPO around the proximal policy, weighted by its ratio to the one that acted: for samples of older versions."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    clip_low: Clip | None = 0.2
    """The ratio to the proximal policy is clipped below at 1 - clip_low; null for no clip on this side."""
    clip_high: Positive | None = 0.2
    """The ratio to the proximal policy is clipped above at 1 + clip_high; null for no clip on this side."""
    dual_clip: Bound | None = None
    """For negative advantages the loss is at most this multiple of |advantage|; null for no bound."""
    behave_weight_threshold: Positive | None = None
    """Entries whose weight (proximal over behaviour) is larger are masked; null for none."""

    @property
    def corrects_staleness(self) -> bool:
        """True: its weight is π_prox/π_b."""
        return True


class GspoLoss(LossSection):
    """PPO with one ratio for all entries of a chunk step."""

    type: Literal["gspo"] = "gspo"
    clip_low: Clip | None = 0.2
    """The ratio is clipped below at 1 - clip_low (3e-4 for long sequences of a language model); null for no clip."""
    clip_high: Positive | None = 0.2
    """The ratio is clipped above at 1 + clip_high (4e-4 for long sequences of a language model); null for no clip."""
    ratio_to: RatioTo = "behavior"
    """The policy in the ratio's denominator: the one that acted, or the proximal one (verl, AReaL, TRL)."""


class SapoLoss(LossSection):
    """SAPO: the ratio is bounded by a sigmoid instead of a clip."""

    type: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """Temperature where the advantage is positive; larger bounds the ratio more tightly."""
    tau_negative: Positive = 1.05
    """Temperature of the others."""
    ratio_to: RatioTo = "proximal"
    """The policy in the ratio's denominator: the proximal one, or the one that acted."""


class GipoLoss(LossSection):
    """GIPO: the ratio is multiplied by a Gaussian of its logarithm instead of clipped."""

    type: Literal["gipo"] = "gipo"
    sigma: Positive = 1.0
    """Width of the Gaussian, in nats of the log-ratio; smaller trusts old samples less."""
    ratio_to: RatioTo = "behavior"
    """The policy in the ratio's denominator: the one that acted, or the proximal one."""


class ClipCovLoss(LossSection):
    """Clip-Cov: PPO without a random few of the entries that would reduce the entropy most."""

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: Clip | None = 0.2
    """The ratio is clipped below at 1 - clip_low; null for no clip on this side."""
    clip_high: Positive | None = 0.2
    """The ratio is clipped above at 1 + clip_high; null for no clip on this side."""
    fraction: Share = 2e-4
    """Share of a mini-batch's entries that are left out, at least one."""
    cov_low: Number = 1.0
    """Only entries with a larger covariance of advantage and log-prob are left out."""
    cov_high: Number = 5.0
    """Only entries with a smaller covariance are left out."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> ClipCovLoss:
        if self.cov_low >= self.cov_high:
            raise self.refusal("cov_low", f"not below cov_high {self.cov_high:g}; lower it")
        return self


class KlCovLoss(LossSection):
    """KL-Cov: no clip, but a KL penalty on the entries that would reduce the entropy most."""

    type: Literal["kl_cov"] = "kl_cov"
    fraction: Share = 2e-4
    """Share of a mini-batch's entries that are penalised, at least one: those of the largest covariance."""
    kl_coef: Positive = 0.1
    """Weight of the penalty |log ratio| of these entries."""


class M2poLoss(LossSection):
    """M2PO: entries that hold the second moment of the log-ratio of proximal and behaviour policy too high are
    masked."""

    type: Literal["m2po"] = "m2po"
    threshold: Positive = 0.04
    """The mean square of log(proximal / behaviour) of the entries kept in a mini-batch stays below it."""
    clip_low: Clip | None = None
    """The ratio is also clipped below at 1 - clip_low (AReaL); null for no clip on this side."""
    clip_high: Positive | None = None
    """The ratio is also clipped above at 1 + clip_high (AReaL); null for no clip on this side."""
    ratio_to: RatioTo = "behavior"
    """The policy in the ratio's denominator: the one that acted, or the proximal one (AReaL)."""

    @property
    def uses_proximal(self) -> bool:
        """True: the second moment is of π_prox/π_b."""
        return True


class VanillaLoss(LossSection):
    """The policy gradient without any correction for staleness."""

    type: Literal["vanilla"] = "vanilla"

    @property
    def uses_proximal(self) -> bool:
        """False: it has no ratio."""
        return False


class TisLoss(LossSection):
    """Truncated importance sampling."""

    type: Literal["tis"] = "tis"
    cap: Positive | None = 2.0
    """Largest importance weight; null for no bound."""
    floor: NotNegative = 0.0
    """Smallest importance weight (ROLL's tis_lower_bound)."""
    ratio_to: RatioTo = "behavior"
    """The policy in the weight's denominator: the one that acted, or the proximal one (verl, ROLL)."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> TisLoss:
        if self.cap is not None and self.floor > self.cap:
            raise self.refusal("floor", f"larger than cap {self.cap:g}; lower it")
        return self


class CispoLoss(LossSection):
    """Importance weights clipped on both sides."""

    type: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """The weight is clipped below at 1 - clip_low; 1 for no lower bound."""
    clip_high: Positive = 0.28
    """The weight is clipped above at 1 + clip_high."""
    ratio_to: RatioTo = "behavior"
    """The policy in the weight's denominator: the one that acted, or the proximal one (verl, ROLL, TRL)."""


class ToprLoss(LossSection):
    """Successes are imitated without a weight, failures have a truncated importance weight."""

    type: Literal["topr"] = "topr"
    cap: Positive = 1.0
    """Largest importance weight of a negative advantage."""
    positive_weight: NotNegative = 1.0
    """Factor on entries of positive advantage (weighted TOPR)."""
    negative_weight: NotNegative = 1.0
    """Factor on the others (weighted TOPR)."""
    ratio_to: RatioTo = "behavior"
    """The policy in the weight's denominator: the one that acted, or the proximal one (ROLL)."""

    @model_validator(mode="after")
    def _something_counts(self) -> ToprLoss:
        if not self.positive_weight and not self.negative_weight:
            raise self.refusal("positive_weight", "negative_weight is 0 too, so nothing is learned; raise one of them")
        return self


def _named(value: Any) -> Any:
    """Expand a name to its section with all defaults."""
    if isinstance(value, str):
        return {"type": value}
    if not isinstance(value, BaseModel) and not (isinstance(value, dict) and isinstance(value.get("type", ""), str)):
        raise InvalidSetting("", value, "give a name, such as ppo or gae, or a section with a type")
    return value


def _with_address(value: Any) -> Any:
    """Replace the name of a plugin's loss by its address."""
    section = _named(value)
    address = table("loss").get(section.get("type", "")) if isinstance(section, dict) else None
    return section if address is None else {**section, "type": address}


def _type_of(default: str) -> Discriminator:
    type_of = type_or(default)

    def choose(value: Any) -> Any:
        name = type_of(value)
        return _OWN if isinstance(name, str) and ":" in name else name

    return Discriminator(choose)


Advantage = Annotated[
    Annotated[GaeAdvantage, Tag("gae")]
    | Annotated[VTraceAdvantage, Tag("v_trace")]
    | Annotated[GrpoAdvantage, Tag("grpo")]
    | Annotated[RlooAdvantage, Tag("rloo")]
    | Annotated[MaxRlAdvantage, Tag("maxrl")]
    | Annotated[ReinforcePlusPlusAdvantage, Tag("reinforce_plus_plus")]
    | Annotated[OwnFunction, Tag(_OWN)],
    _type_of("gae"),
    BeforeValidator(_named),
]
Loss = Annotated[
    Annotated[PpoLoss, Tag("ppo")]
    | Annotated[DecoupledPpoLoss, Tag("decoupled_ppo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[GipoLoss, Tag("gipo")]
    | Annotated[ClipCovLoss, Tag("clip_cov")]
    | Annotated[KlCovLoss, Tag("kl_cov")]
    | Annotated[M2poLoss, Tag("m2po")]
    | Annotated[VanillaLoss, Tag("vanilla")]
    | Annotated[TisLoss, Tag("tis")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[ToprLoss, Tag("topr")]
    | Annotated[OwnFunction, Tag(_OWN)],
    _type_of("ppo"),
    BeforeValidator(_with_address),
]
