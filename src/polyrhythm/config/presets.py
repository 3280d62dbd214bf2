"""Presets and objectives: named sets of settings, read from presets.yaml.

`preset: NAME`, a common training mode, overrides what the recipe extends and is overridden by the recipe; on the
command line, it overrides the recipe and is overridden by the other options. The resolved configuration has no preset.
A recipe with `batching: streams` keeps it under a preset with `batching: dynamic`.

`objective: NAME`, the objective of another system, replaces the inherited `algorithm` section; keys of the recipe or of
overrides under `algorithm` are merged over it. The resolved configuration has its settings, and the name as
`objective`. Requirements of an objective on other sections are checked here if the objective set the cause, else by the
schema.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.nearest import nearest
from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.errors import ConfigError

Tree = dict[str, Any]


def _read(kind: str) -> dict[str, tuple[str, Tree]]:
    text = Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")
    found: dict[str, Tree] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))[kind]  # noqa: S506 - ours
    return {name: (section.pop("about"), section) for name, section in found.items()}


PRESETS = _read("presets")
#: Values are `algorithm` sections.
OBJECTIVE_PRESETS = _read("objectives")


def preset(name: Any, base: Tree, origin: str = "") -> Tree:
    """Settings of a preset, to merge over `base`. ConfigError: there is no such preset."""
    settings = _named("preset", name, PRESETS, origin)
    batching = base.get("batching")
    dynamic = settings.get("batching") == {"type": "dynamic"}
    if dynamic and isinstance(batching, dict) and batching.get("type") == "streams":
        del settings["batching"]
    return settings


def objective_preset(name: Any, origin: str = "") -> Tree:
    """The `algorithm` section of an objective. ConfigError: there is no such objective."""
    return _named("objective", name, OBJECTIVE_PRESETS, origin)


def _named(kind: str, name: Any, known: dict[str, tuple[str, Tree]], origin: str) -> Tree:
    if not isinstance(name, str) or name not in known:
        near = nearest(name, sorted(known)) if isinstance(name, str) else ""
        raise ConfigError(f"{kind} = {name}: {near}{kind}s are {', '.join(sorted(known))}", origin=origin)
    return copy.deepcopy(known[name][1])


# ------------------------------------------------------------ what an objective needs


class UnmetNeed(NamedTuple):
    """A requirement that the recipe does not meet. fix: override that meets it."""

    words: str
    fix: str


def check_objective(
    objective: str, ours: AlgorithmSettings, training: TrainingSettings, *, segment_steps: int, group_size: int
) -> None:
    """Raise InvalidSetting with all requirements of the objective that the recipe does not meet, and the overrides to
    add."""
    if objective not in OBJECTIVE_PRESETS:
        return
    needs = _unmet(_theirs(objective), ours, training, segment_steps, group_size)
    if needs:
        fixes = " ".join(dict.fromkeys(need.fix for need in needs))
        why = f"it needs {', and '.join(need.words for need in needs)}; add {fixes}, or choose another objective"
        raise InvalidSetting("objective", objective, why)


def sets_reward_level(objective: str, ours: AlgorithmSettings) -> bool:
    """Whether `algorithm.reward_level` has the objective's value."""
    return objective in OBJECTIVE_PRESETS and _theirs(objective).reward_level == ours.reward_level


def is_unchanged(objective: str, ours: AlgorithmSettings) -> bool:
    return ours == _theirs(objective)


def _theirs(objective: str) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(OBJECTIVE_PRESETS[objective][1])


def describe_objective(name: str) -> str:
    """`rlinf_libero: RLinf's PPO on LIBERO …`; "" for none."""
    return f"{name}: {OBJECTIVE_PRESETS[name][0]}" if name in OBJECTIVE_PRESETS else name


def _unmet(
    theirs: AlgorithmSettings, ours: AlgorithmSettings, training: TrainingSettings, segments: int, group_size: int
) -> list[UnmetNeed]:
    """Unmet requirements that follow from settings which the objective set."""
    name, same_advantage = ours.advantage.type, ours.advantage.type == theirs.advantage.type
    same_value = same_advantage and bool(ours.value.coef) == bool(theirs.value.coef)
    found = []
    if same_advantage and ours.needs_groups and group_size == 1:
        found.append(
            UnmetNeed(f"groups of 2 or more samples, which {name} compares (groups.size is 1)", "groups.size=2")
        )
    if segments:
        why = ""
        if same_advantage and not ours.needs_value:
            why = f"which {name} scores as a whole"
        elif ours.needs_value and ours.bootstrap == theirs.bootstrap == "never":
            why = "since it sets algorithm.bootstrap to never and a segment's end is not an episode's end"
        if why:
            found.append(
                UnmetNeed(f"whole episodes, {why} (rollout.segment_steps is {segments})", "rollout.segment_steps=0")
            )
    if same_value and not (ours.needs_value and ours.value.coef):
        if warmup := training.critic_warmup_updates:
            words = f"no warm-up of a critic, since it has none (training.critic_warmup_updates is {warmup})"
            found.append(UnmetNeed(words, "training.critic_warmup_updates=0"))
        if not ours.value.coef and (rate := training.optimizer.value_lr) is not None:
            words = f"no learning rate of a critic, since it has none (training.optimizer.value_lr is {rate:g})"
            found.append(UnmetNeed(words, "training.optimizer.value_lr=null"))
    return found
