"""Scales a row, a recipe whose numbers are for several devices (`devices: 8`), to another number of them.

Invariant: n devices of a row for d have n/d of its environments, of the samples of an update and of the chunk steps of
an optimizer step, each exactly, so an epoch has as many optimizer steps. What belongs to one device (env batches and
their rows, micro-batches, the requests of a pass), learning rates, versions and evaluations stay.

On one device `hybrid` and `disaggregated` become `colocated`, with the row's share of environments in one simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from polyrhythm.errors import ConfigError

Tree = dict[str, Any]

#: What the devices of a row have together.
_SHARED = (
    *("rollout.simulators", "rollout.generators", "training.mini_batch_samples", "training.minibatch_steps"),
    *("groups.extra_groups", "scoring.processes", "placement.trainer.ranks"),
)
#: `placement.preset` that takes at least two devices.
_DIVIDED = ("hybrid", "disaggregated")


class Scaled(NamedTuple):
    """A row for another number of devices. changes: each as `rollout.simulators 8 → 1`; problems: settings that cannot
    be scaled, which are left as they were."""

    tree: Tree
    changes: tuple[str, ...]
    problems: tuple[str, ...]


def scale(row: Tree, devices: int, origin: str = "") -> Scaled:
    """The row for `devices`. ConfigError names all numbers that cannot be scaled, and for which devices they can be."""
    scaled = _scale(row, devices)
    if scaled.problems:
        own = row["devices"]
        possible = ", ".join(str(count) for count in (*range(1, own + 1), 2 * own) if not _scale(row, count).problems)
        why = f"{', '.join(scaled.problems)} cannot be scaled to {devices} of the row's {own} devices; use {possible}"
        raise ConfigError(f"devices = {devices}: {why}", origin=origin)
    return scaled


def _scale(row: Tree, devices: int) -> Scaled:
    share, values = Fraction(devices, row["devices"]), {path: _get(row, path) for path in _SHARED}
    given = {path: value for path, value in values.items() if isinstance(value, int)}
    wanted = {path: value * share for path, value in given.items()}
    if devices == 1 and _preset(row) in _DIVIDED:
        wanted |= _one_device(row, share)
    problems = [f"{path} {_get(row, path)}" for path, value in wanted.items() if value.denominator > 1]
    problems += _named_devices(row.get("placement")) if share != 1 else ()
    changed: dict[str, Any] = {path: int(value) for path, value in wanted.items() if value.denominator == 1}
    samples, group = changed.get("training.mini_batch_samples"), _get(row, "groups.size") or 1
    if samples is not None and samples * (_get(row, "training.require_batches") or 1) % group:
        problems.append(f"groups.size {group} (an update would have {samples} samples)")
    micro, steps = _get(row, "training.micro_batch_steps"), changed.get("training.minibatch_steps")
    if micro and steps and micro > steps:
        changed["training.micro_batch_steps"] = steps
    if devices == 1 and _preset(row) in _DIVIDED:
        changed["placement.preset"] = "colocated"
    changed["devices"] = devices
    tree, changes = row, []
    for path, value in changed.items():
        old = _preset(row) if path == "placement.preset" else _get(row, path)
        if old != value:
            tree = _set(tree, path.split("."), value)
            changes += [f"{path} {old} → {value}"] * (path != "devices")
    return Scaled(tree, tuple(changes), tuple(problems))


def _one_device(row: Tree, share: Fraction) -> dict[str, Fraction]:
    """One simulator and one generator, with rows for the share of all environments."""
    simulators, rows = _get(row, "rollout.simulators") or 1, _get(row, "rollout.rows")
    found = {"rollout.simulators": Fraction(1), "rollout.generators": Fraction(1)}
    return found | ({"rollout.rows": simulators * rows * share} if isinstance(rows, int) else {})


def _named_devices(placement: Any) -> Iterator[str]:
    """Settings that name single devices of the row."""
    for kind, section in placement.items() if isinstance(placement, dict) else ():
        for key in ("devices", "device") if isinstance(section, dict) else ():
            if section.get(key) not in (None, "all", "cpu"):
                yield f"placement.{kind}.{key} {section[key]}"


def _preset(row: Tree) -> Any:
    """`placement.preset`, however it is written."""
    placement = row.get("placement")
    if isinstance(placement, dict):
        return placement.get("preset", placement.get("type"))
    return placement


def _get(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _set(tree: Any, keys: list[str], value: Any) -> Tree:
    """The tree with another value there; a preset in its short form becomes a section."""
    if not isinstance(tree, dict):
        tree = {}
    inner = value if len(keys) == 1 else _set(tree.get(keys[0]), keys[1:], value)
    return {**tree, keys[0]: inner}
