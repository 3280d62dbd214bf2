"""Presets and objectives, named sets of settings in presets.yaml, and the scaling of rows to other numbers of devices.

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
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.registry import expand
from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.errors import ConfigError, nearest

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


def changed_settings(settings: Tree, tree: Tree, section: str = "") -> Iterator[str]:
    """`freshness.max_lag = 3 (not 0.0)` for each setting of a preset or an objective that `tree` has otherwise."""
    if "type" in settings and tree.get("type") != settings["type"]:  # the other keys belong to the type
        settings = {"type": settings["type"]}
    for key, value in settings.items():
        found = tree.get(key)
        if isinstance(value, dict):
            section_of = expand(found)
            yield from changed_settings(value, section_of if isinstance(section_of, dict) else {}, f"{section}{key}.")
        elif found != value:
            yield f"{section}{key} = {found} (not {value})"


def _named(kind: str, name: Any, known: dict[str, tuple[str, Tree]], origin: str) -> Tree:
    if not isinstance(name, str) or name not in known:
        near = nearest(name, sorted(known)) if isinstance(name, str) else ""
        raise ConfigError(f"{kind} = {name}: {near}{kind}s are {', '.join(sorted(known))}", origin=origin)
    return copy.deepcopy(known[name][1])


# ------------------------------------------------------------ what an objective needs


def check_objective(
    objective: str, ours: AlgorithmSettings, training: TrainingSettings, *, segment_steps: int, group_size: int
) -> None:
    """Raise InvalidSetting with all requirements of the objective that the recipe does not meet, and the overrides to
    add."""
    if objective not in OBJECTIVE_PRESETS:
        return
    needs = _unmet(_theirs(objective), ours, training, segment_steps, group_size)
    if needs:
        fixes = " ".join(dict.fromkeys(needs.values()))
        why = f"it needs {', and '.join(needs)}; add {fixes}, or choose another objective"
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
) -> dict[str, str]:
    """Unmet requirements that follow from settings which the objective set, each with an override that meets it."""
    name, same_advantage = ours.advantage.type, ours.advantage.type == theirs.advantage.type
    same_value = same_advantage and bool(ours.value.coef) == bool(theirs.value.coef)
    found, why = {}, ""
    if same_advantage and ours.needs_groups and group_size == 1:
        found[f"groups of 2 or more samples, which {name} compares (groups.size is 1)"] = "groups.size=2"
    if same_advantage and not ours.needs_value:
        why = f"which {name} scores as a whole"
    elif ours.needs_value and ours.bootstrap == theirs.bootstrap == "never":
        why = "since it sets algorithm.bootstrap to never and a segment's end is not an episode's end"
    if segments and why:
        found[f"whole episodes, {why} (rollout.segment_steps is {segments})"] = "rollout.segment_steps=0"
    if same_value and not (ours.needs_value and ours.value.coef):
        if warmup := training.critic_warmup_updates:
            words = f"no warm-up of a critic, since it has none (training.critic_warmup_updates is {warmup})"
            found[words] = "training.critic_warmup_updates=0"
        if not ours.value.coef and (rate := training.optimizer.value_lr) is not None:
            words = f"no learning rate of a critic, since it has none (training.optimizer.value_lr is {rate:g})"
            found[words] = "training.optimizer.value_lr=null"
    return found


# ------------------------------------------------------------ rows
#
# A row is a recipe whose numbers are for several devices (`devices: 8`). Invariant: scaled from d to n devices, it has
# exactly n/d of its environments, of the samples of an update and of the chunk steps of an optimizer step, so an epoch
# keeps its number of optimizer steps. Numbers per device (env batches and their rows, micro-batches, requests of a
# pass), learning rates, versions and evaluations are unchanged. On one device `hybrid` and `disaggregated` become
# `colocated`, with the row's share of environments in one simulator.

#: Numbers that count over all devices of a row.
_SHARED = (
    *("rollout.simulators", "rollout.generators", "training.mini_batch_samples", "training.minibatch_steps"),
    *("groups.extra_groups", "scoring.processes", "placement.trainer.ranks"),
)
#: Values of `placement.preset` that need at least two devices.
_DIVIDED = ("hybrid", "disaggregated")


def scale(row: Tree, devices: int, origin: str = "") -> tuple[Tree, list[str]]:
    """The row for `devices`, and its changes, each as `rollout.simulators 8 → 1`.

    ConfigError: lists the numbers that cannot be scaled, and the numbers of devices for which all can.
    """
    tree, changes, problems = _scale(row, devices)
    if problems:
        own = row["devices"]
        possible = ", ".join(str(count) for count in (*range(1, own + 1), 2 * own) if not _scale(row, count)[2])
        why = f"{', '.join(problems)} cannot be scaled to {devices} of the row's {own} devices; use {possible}"
        raise ConfigError(f"devices = {devices}: {why}", origin=origin)
    return tree, changes


def _scale(row: Tree, devices: int) -> tuple[Tree, list[str], list[str]]:
    """Like `scale`, plus the settings that cannot be scaled, which stay unchanged."""
    share, placement = Fraction(devices, row["devices"]), row.get("placement")
    numbers = {path: _get(row, path) for path in _SHARED}
    wanted = {path: number * share for path, number in numbers.items() if isinstance(number, int)}
    preset = placement.get("preset", placement.get("type")) if isinstance(placement, dict) else placement
    colocates = devices == 1 and preset in _DIVIDED
    if colocates:
        wanted |= {"rollout.simulators": Fraction(1), "rollout.generators": Fraction(1)}
        if isinstance(rows := _get(row, "rollout.rows"), int):
            wanted["rollout.rows"] = (_get(row, "rollout.simulators") or 1) * rows * share
    problems = [f"{path} {_get(row, path)}" for path, value in wanted.items() if value.denominator > 1]
    problems += [  # these name single devices of the row
        f"placement.{kind}.{key} {section[key]}"
        for kind, section in (placement.items() if share != 1 and isinstance(placement, dict) else ())
        for key in (("devices", "device") if isinstance(section, dict) else ())
        if section.get(key) not in (None, "all", "cpu")
    ]
    scaled = {path: int(value) for path, value in wanted.items() if value.denominator == 1}
    samples, group = scaled.get("training.mini_batch_samples"), _get(row, "groups.size") or 1
    if samples is not None and samples * (_get(row, "training.require_batches") or 1) % group:
        problems.append(f"groups.size {group} (an update would have {samples} samples)")
    micro, steps = _get(row, "training.micro_batch_steps"), scaled.get("training.minibatch_steps")
    if micro and steps and micro > steps:
        scaled["training.micro_batch_steps"] = steps
    pairs = {path: (_get(row, path), value) for path, value in scaled.items()}
    changed: dict[str, tuple[Any, Any]] = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
    if colocates:
        changed["placement.preset"] = preset, "colocated"
    tree = {**row, "devices": devices}
    for path, (_, value) in changed.items():
        tree = _set(tree, path.split("."), value)
    return tree, [f"{path} {old} → {value}" for path, (old, value) in changed.items()], problems


def _get(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _set(tree: Any, keys: list[str], value: Any) -> Tree:
    """The tree with the value at these keys; a preset in its short form becomes a section."""
    if not isinstance(tree, dict):
        tree = {}
    inner = value if len(keys) == 1 else _set(tree.get(keys[0]), keys[1:], value)
    return {**tree, keys[0]: inner}
