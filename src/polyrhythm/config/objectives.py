"""Settings of each advantage and each loss, by type. docs/objectives.md has formulas, sources and advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from polyrhythm.config.base import Flag, InvalidSetting, NotNegative, Positive, Section, type_or
from polyrhythm.config.registry import import_object

Clip = Annotated[float, Field(gt=0, lt=1, strict=True)]
Bound = Annotated[float, Field(gt=1, strict=True)]
#: The tag of a user's function.
_OWN = "module:function"


def _address(text: str) -> str:
    module, _, name = text.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InvalidSetting("", text, "write module:function, such as mine.losses:asymmetric")
    return text


class OwnFunction(Section):
    """A function of your own, of (entries, *, keywords) or (samples, *, keywords).

    See algorithms/losses.py and algorithms/advantages.py; an advantage is given gamma and gae_lambda if it takes them.
    """

    type: Annotated[str, AfterValidator(_address)]
    """module:function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its keywords."""
    uses_proximal: Flag = False
    """Whether it looks at entries.proximal or samples.log_ratio, which costs a forward pass."""

    def function(self) -> Callable[..., Any]:
        """What `type` names. Refusal: it is not there, is no function, or does not take its settings."""
        found = import_object(self.type, self.type, "a function")
        if not callable(found):
            raise InvalidSetting("type", self.type, f"it is {type(found).__name__}; name a function")
        try:
            keywords = list(inspect.signature(found).parameters.values())[1:]
        except ValueError as error:
            raise InvalidSetting("type", self.type, f"{error}; name a function that is written in Python") from error
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
                raise InvalidSetting(f"settings.{keyword.name}", None, f"{self.type} wants it; give it a value")
        own: Callable[..., Any] = found
        return own


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
    """Largest weight of a step in those before it, at most rho_cap; decides how fast."""

    @model_validator(mode="after")
    def _caps_are_in_order(self) -> VTraceAdvantage:
        if self.trace_cap > self.rho_cap:
            raise InvalidSetting("trace_cap", self.trace_cap, f"larger than rho_cap {self.rho_cap:g}; lower it")
        return self


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


class DecoupledPpoLoss(Section):
    """PPO around the proximal policy, weighted by its ratio to the one that acted: for samples of older versions."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    """The loss's name."""
    clip_low: Clip = 0.2
    """The ratio to the proximal policy is clipped below at 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio to the proximal policy is clipped above at 1 + clip_high."""
    dual_clip: Bound | None = None
    """For negative advantages the loss is bounded by this multiple of the advantage; null for no bound."""
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

    @model_validator(mode="after")
    def _something_counts(self) -> ToprLoss:
        if not self.positive_weight and not self.negative_weight:
            raise InvalidSetting(
                "positive_weight", 0.0, "negative_weight is 0 too, so nothing is learned; raise one of them"
            )
        return self


def _named(value: Any) -> Any:
    """A name alone is a section of its defaults."""
    if isinstance(value, str):
        return {"type": value}
    if not isinstance(value, BaseModel) and not (isinstance(value, dict) and isinstance(value.get("type", ""), str)):
        raise InvalidSetting("", value, "give a name, such as ppo or gae, or a section with a type")
    return value


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
    | Annotated[ReinforcePlusPlusAdvantage, Tag("reinforce_plus_plus")]
    | Annotated[OwnFunction, Tag(_OWN)],
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
    | Annotated[OwnFunction, Tag(_OWN)],
    _type_of("ppo"),
    BeforeValidator(_named),
]
