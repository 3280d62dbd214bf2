"""Scales a row, a recipe whose numbers are for several devices (`devices: 8`), to another number of devices.

Invariant: scaled from d to n devices, a row has exactly n/d of its environments, of the samples of an update and of the
chunk steps of an optimizer step, so an epoch keeps its number of optimizer steps. Numbers per device (env batches and
their rows, micro-batches, requests of a pass), learning rates, versions and evaluations are unchanged. On one device
`hybrid` and `disaggregated` become `colocated`, with the row's share of environments in one simulator.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from polyrhythm.errors import ConfigError

Tree = dict[str, Any]

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
