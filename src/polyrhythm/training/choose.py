"""From the names in a configuration to functions: the loss, its selection rule and the advantage, ours or a user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyrhythm.algorithms.advantages import ADVANTAGES, AdvantageInput, Advantages, gae
from polyrhythm.algorithms.entry_selection import SELECTION_RULES, SelectionRule
from polyrhythm.algorithms.losses import POLICY_LOSSES, LossInput, LossOutput, PolicyLoss
from polyrhythm.config.sections.objectives import OwnFunction

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings


def policy_loss(algorithm: AlgorithmSettings) -> PolicyLoss:
    """entries -> LossOutput, with the keywords of `algorithm.loss`; a user's function may return the loss alone."""
    settings = algorithm.loss
    if not isinstance(settings, OwnFunction):
        return _bind(POLICY_LOSSES[settings.type], settings.model_dump())
    own = _bind(settings.function(), settings.settings)

    def loss(entries: LossInput) -> LossOutput:
        given = own(entries)
        output = LossOutput(given, {}) if isinstance(given, Tensor) else given
        if isinstance(output, LossOutput) and isinstance(output.loss, Tensor):
            got, expected = list(output.loss.shape), list(entries.mask.shape)
            if got != expected:
                raise ValueError(f"{settings.type} returned a loss {got}; return one number per entry, {expected}")
        return output

    return loss


def selection_rule(algorithm: AlgorithmSettings) -> SelectionRule | None:
    """The rule by which the loss selects entries of a mini-batch; None for losses that select none."""
    rule = SELECTION_RULES.get(algorithm.loss.type)
    return None if rule is None else _bind(rule, algorithm.loss.model_dump())


def advantage_estimate(algorithm: AlgorithmSettings) -> Callable[[AdvantageInput], Advantages]:
    """samples -> Advantages, with the keywords of `algorithm.advantage`, gamma and gae_lambda."""
    settings, common = algorithm.advantage, algorithm.model_dump(include={"gamma", "gae_lambda"})
    if isinstance(settings, OwnFunction):
        chosen = _bind(settings.function(), common | settings.settings)
    else:
        chosen = _bind(ADVANTAGES[settings.type], common | settings.model_dump())

    def estimate(samples: AdvantageInput) -> Advantages:
        given = chosen(samples)
        return Advantages(given, gae(samples, **common).returns) if isinstance(given, Tensor) else given

    return estimate


def _bind(function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """The function with those of the settings that it takes."""
    keywords = inspect.signature(function).parameters.values()
    if any(keyword.kind is keyword.VAR_KEYWORD for keyword in keywords):
        return partial(function, **settings)
    names = {keyword.name for keyword in keywords}
    return partial(function, **{name: value for name, value in settings.items() if name in names})
