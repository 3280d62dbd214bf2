"""The loss and the advantage that a configuration names: ours from the tables, or a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyrhythm.algorithms.advantages import ADVANTAGES, Advantages, Samples, gae
from polyrhythm.algorithms.losses import POLICY_LOSSES, Entries, PolicyLoss, Terms
from polyrhythm.config.objectives import OwnFunction

if TYPE_CHECKING:
    from polyrhythm.config.algorithm import AlgorithmSettings


def policy_loss(algorithm: AlgorithmSettings) -> PolicyLoss:
    """entries -> Terms, with the keywords of `algorithm.loss`; a user's function may give the loss alone."""
    settings = algorithm.loss
    if not isinstance(settings, OwnFunction):
        return _with(POLICY_LOSSES[settings.type], settings.model_dump())
    own = _with(settings.function(), settings.settings)

    def loss(entries: Entries) -> Terms:
        given = own(entries)
        terms = Terms(given, {}) if isinstance(given, Tensor) else given
        if isinstance(terms, Terms) and isinstance(terms.loss, Tensor) and terms.loss.shape != entries.mask.shape:
            got, wanted = list(terms.loss.shape), list(entries.mask.shape)
            raise ValueError(f"{settings.type} returned a loss {got}; one number per entry is wanted, {wanted}")
        return terms

    return loss


def advantage_estimate(algorithm: AlgorithmSettings) -> Callable[[Samples], Advantages]:
    """samples -> Advantages, with the keywords of `algorithm.advantage`, gamma and gae_lambda."""
    settings, common = algorithm.advantage, algorithm.model_dump(include={"gamma", "gae_lambda"})
    if isinstance(settings, OwnFunction):
        chosen = _with(settings.function(), common | settings.settings)
    else:
        chosen = _with(ADVANTAGES[settings.type], common | settings.model_dump())

    def estimate(samples: Samples) -> Advantages:
        given = chosen(samples)
        return Advantages(given, gae(samples, **common).returns) if isinstance(given, Tensor) else given

    return estimate


def _with(function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """The function with those of the settings that it takes."""
    keywords = inspect.signature(function).parameters.values()
    if any(keyword.kind is keyword.VAR_KEYWORD for keyword in keywords):
        return partial(function, **settings)
    names = {keyword.name for keyword in keywords}
    return partial(function, **{name: value for name, value in settings.items() if name in names})
