"""What the objective of another system needs from the other sections of a recipe.

The needs follow from the resolved `algorithm` section, as far as the objective set it: what the recipe says itself
under `algorithm` is checked, and named, by the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.objective_presets import OBJECTIVE_PRESETS
from polyrhythm.config.sections.algorithm import AlgorithmSettings

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig


class Need(NamedTuple):
    """A need that the recipe does not meet. fix: the override that meets it."""

    words: str
    fix: str


def check_objective(config: RunConfig) -> None:
    """Raise InvalidSetting with all needs of `objective` that the recipe does not meet, and the overrides for them."""
    if config.objective not in OBJECTIVE_PRESETS:
        return
    needs = _unmet(config, AlgorithmSettings.model_validate(OBJECTIVE_PRESETS[config.objective][1]))
    if needs:
        fixes = " ".join(dict.fromkeys(need.fix for need in needs))
        why = f"it needs {', and '.join(need.words for need in needs)}; add {fixes}, or choose another objective"
        raise InvalidSetting("objective", config.objective, why)


def reward_level_of_objective(config: RunConfig) -> bool:
    """Whether `algorithm.reward_level` is what the objective set."""
    if config.objective not in OBJECTIVE_PRESETS:
        return False
    theirs = AlgorithmSettings.model_validate(OBJECTIVE_PRESETS[config.objective][1])
    return theirs.reward_level == config.algorithm.reward_level


def is_unchanged(config: RunConfig) -> bool:
    """Whether `algorithm` equals the objective's section."""
    return config.algorithm == AlgorithmSettings.model_validate(OBJECTIVE_PRESETS[config.objective][1])


def describe_objective(name: str) -> str:
    """`rlinf_libero: RLinf's PPO on LIBERO …`; "" for none."""
    return f"{name}: {OBJECTIVE_PRESETS[name][0]}" if name in OBJECTIVE_PRESETS else name


def _unmet(config: RunConfig, theirs: AlgorithmSettings) -> list[Need]:
    """The unmet needs of the settings that are as the objective set them."""
    ours, segments, training = config.algorithm, config.rollout.segment_steps, config.training
    name, same_advantage = ours.advantage.type, ours.advantage.type == theirs.advantage.type
    same_value = same_advantage and bool(ours.value.coef) == bool(theirs.value.coef)
    found = []
    if same_advantage and ours.needs_groups and config.groups.size == 1:
        found.append(Need(f"groups of 2 or more samples, which {name} compares (groups.size is 1)", "groups.size=2"))
    if segments:
        why = ""
        if same_advantage and not ours.needs_value:
            why = f"which {name} scores as a whole"
        elif ours.needs_value and ours.bootstrap == theirs.bootstrap == "never":
            why = "since it sets algorithm.bootstrap to never and a segment's end is not an episode's end"
        if why:
            found.append(
                Need(f"whole episodes, {why} (rollout.segment_steps is {segments})", "rollout.segment_steps=0")
            )
    if same_value and not (ours.needs_value and ours.value.coef):
        if warmup := training.critic_warmup_updates:
            words = f"no warm-up of a critic, since it has none (training.critic_warmup_updates is {warmup})"
            found.append(Need(words, "training.critic_warmup_updates=0"))
        if not ours.value.coef and (rate := training.optimizer.value_lr) is not None:
            words = f"no learning rate of a critic, since it has none (training.optimizer.value_lr is {rate:g})"
            found.append(Need(words, "training.optimizer.value_lr=null"))
    return found
