"""Reads the normalisation statistics of a released folder and chooses those of one robot.

assets/ID/norm_stats.json          openpi: {"norm_stats": {"state" | "actions": {mean, std, q01, q99}}}, key ID
dataset_statistics.json            OpenVLA: {KEY: {"action" | "proprio": {mean, std, min, max, q01, q99, mask}}};
                                   the same may be in config.json under norm_stats
experiment_cfg/metadata.json       GR00T: {TAG: {"statistics": {"state" | "action": {KEY: {min, max, ...}}}}}
policy_*processor*.safetensors     lerobot: observation.state.mean, ..., one robot without a key
meta/stats.json, stats.json        a LeRobot dataset's, copied here: {"observation.state" | "action": {mean, std, ...}};
                                   used where the folder has no others
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyrhythm.errors import ConfigError
from polyrhythm.policies.vla import scaling
from polyrhythm.policies.vla.checkpoint import Checkpoint, read_stored
from polyrhythm.policies.vla.folder_files import few, read_json
from polyrhythm.policies.vla.scaling import Scaling

#: `policy.robot` that asks for no statistics: actions between the environment's bounds, the state as it is.
BOUNDS = "bounds"
#: OpenVLA's statistics of data sets without idle steps have this ending, which settings may leave out.
_NO_NOOPS = "_no_noops"


@dataclass(frozen=True, slots=True)
class RobotStatistics:
    """How one robot's state and actions are normalised; None where the folder does not say. origin: the file."""

    key: str
    origin: str
    state: Scaling | None
    actions: Scaling | None


def robot_statistics(source: Checkpoint, kind: str, robot: str) -> RobotStatistics:
    """The statistics of the robot with this key ("": the only one). ConfigError: none, several, or another key."""
    found = list(_all(source, kind)) or _dataset(source)
    keys = [one.key for one in found]
    if not found:
        wanted = f"policy.robot = {robot!r}: " if robot else ""
        raise ConfigError(
            f"{wanted}checkpoint = {source.folder} has no normalisation statistics ({_expected(kind)}); copy that file "
            f"from the release, or set policy.robot = {BOUNDS!r} to map actions to the environment's bounds"
        )
    if not robot and len(found) == 1:
        return found[0]
    matching = [one for one in found if _is_named(one.key, robot)] if robot else []
    if len(matching) == 1:
        return matching[0]
    if not robot:
        raise ConfigError(
            f"policy.robot is not set, and checkpoint = {source.folder} has statistics of {len(found)} robots "
            f"({few(keys, 8)}); set policy.robot to one of them"
        )
    raise ConfigError(
        f"policy.robot = {robot!r}: checkpoint = {source.folder} has statistics of {few(keys, 8) or 'one robot'}; set "
        "policy.robot to one of them"
    )


def _is_named(key: str, robot: str) -> bool:
    """Whether a setting means this key: equal, without _no_noops, or its last part (openpi's ids are paths)."""
    return robot in (key, key.removesuffix(_NO_NOOPS), key.rsplit("/", 1)[-1])


def _expected(kind: str) -> str:
    files = {
        "openvla_oft": "dataset_statistics.json",
        "groot_n1d5": "experiment_cfg/metadata.json",
    }
    return files.get(kind, "assets/ID/norm_stats.json, or lerobot's policy_preprocessor files")


def _all(source: Checkpoint, kind: str) -> Iterator[RobotStatistics]:
    for path in source.statistics:
        if path.name == "norm_stats.json":
            yield openpi(path, kind, openpi_key(path, source.folder))
        elif path.name == "dataset_statistics.json":
            yield from openvla(read_json(path), str(path))
        elif path.name == "metadata.json":
            yield from groot(read_json(path), str(path))
    named = source.config.get("norm_stats")
    if isinstance(named, Mapping) and not any(path.name == "dataset_statistics.json" for path in source.statistics):
        yield from openvla(named, f"{source.folder}/config.json")
    yield from _lerobot(source)


def openpi_key(path: Path, folder: Path) -> str:
    """The key of a norm_stats.json within a released folder: the path of its own folder below `assets`."""
    inner = path.parent.relative_to(folder).parts
    return "/".join(inner[1:] if inner[:1] == ("assets",) else inner)


def openpi(path: Path, kind: str, key: str) -> RobotStatistics:
    """A file of openpi: quantiles for π0.5, mean and deviation for π0; with epsilon, without clipping."""
    found = _get(read_json(path), "norm_stats", str(path))

    def of(name: str) -> Scaling | None:
        if name not in found:
            return None
        return _openpi_scaling(found[name], kind, f"{path}: {name}")

    return RobotStatistics(key, str(path), of("state"), of("actions"))


def _openpi_scaling(stats: Mapping[str, Any], kind: str, origin: str) -> Scaling:
    if kind == "pi05":
        low, high = _pair(stats, "q01", "q99", origin)
        return scaling.bounds(low, high, eps=1e-6)
    mean, std = _pair(stats, "mean", "std", origin)
    return scaling.mean_std(mean, std, eps=1e-6)


def openvla(found: Mapping[str, Any], origin: str) -> Iterator[RobotStatistics]:
    """OpenVLA's statistics by data set: quantiles, for ALOHA extremes, of the entries that the mask has; clipped."""
    for key, robot in found.items():
        ends = ("min", "max") if "aloha" in key.lower() else ("q01", "q99")

        def of(name: str, robot: Any = robot, ends: tuple[str, str] = ends, key: str = key) -> Scaling | None:
            stats = robot.get(name) if isinstance(robot, Mapping) else None
            if stats is None:
                return None
            low, high = _pair(stats, *ends, f"{origin}: {key}.{name}")
            method: scaling.Method = "min_max" if ends[0] == "min" else "quantile"
            mask = stats.get("mask")
            if mask is not None and np.shape(mask) != low.shape:
                raise ConfigError(
                    f"{origin}: {key}.{name} has {len(low)} numbers and a mask of {np.size(mask)}; copy it again from "
                    "its release"
                )
            return scaling.bounds(low, high, method=method, eps=1e-8, mask=mask, clipped=True)

        yield RobotStatistics(key, origin, of("proprio"), of("action"))


def groot(found: Mapping[str, Any], origin: str) -> Iterator[RobotStatistics]:
    """GR00T's statistics by embodiment: extremes, key after key; an entry that never varied becomes 0."""
    for tag, robot in found.items():
        if not isinstance(robot, Mapping) or "statistics" not in robot:
            continue

        def of(name: str, robot: Mapping[str, Any] = robot, tag: str = tag) -> Scaling | None:
            joined: Scaling | None = None
            for key, stats in _mapping(_mapping(robot, "statistics", f"{origin}: {tag}"), name, origin).items():
                low, high = _pair(stats, "min", "max", f"{origin}: {tag}.{name}.{key}")
                part = groot_scaling("min_max", low, high)
                joined = part if joined is None else joined.joined(part)
            return joined

        yield RobotStatistics(tag, origin, of("state"), of("action"))


def groot_scaling(method: scaling.Method, first: np.ndarray, second: np.ndarray) -> Scaling:
    """One of GR00T's modes. first, second: lower and upper bounds, or mean and deviation. What never varied becomes 0
    with extremes and is kept otherwise; quantiles are clipped."""
    if method == "mean_std":
        return scaling.mean_std(first, second, eps=0.0, constant="keep")
    if method == "binary":
        return scaling.switches(len(first))
    clipped = method == "quantile"
    constant: scaling.Constant = "keep" if clipped else "zero"
    return scaling.bounds(first, second, method=method, constant=constant, clipped=clipped)


def _lerobot(source: Checkpoint) -> Iterator[RobotStatistics]:
    """lerobot's processors, or the buffers of its older checkpoints."""
    arrays = {name: array for path in source.statistics if path.suffix == ".safetensors" for name, array in _read(path)}
    for name, place in source.extra.items():  # (un)normalize_X.buffer_observation_state.mean
        buffer, stat = name.split(".buffer_", 1)[-1].rsplit(".", 1)
        key = "action" if buffer == "action" else buffer.replace("observation_", "observation.", 1)
        arrays.update((f"{key}.{stat}", array) for _, array in _read(place.file, place.stored))
    modes = _lerobot_modes(source)

    def of(key: str, kind: str) -> Scaling | None:
        stats = {name.rsplit(".", 1)[-1]: x for name, x in arrays.items() if name.rsplit(".", 1)[0] == key}
        return _lerobot_scaling(stats, modes.get(kind, "MEAN_STD"), f"{source.folder}: {key}") if stats else None

    state, actions = of("observation.state", "STATE"), of("action", "ACTION")
    if state is not None or actions is not None:
        yield RobotStatistics("", f"{source.folder} (lerobot)", state, actions)


def _dataset(source: Checkpoint) -> list[RobotStatistics]:
    """The first stats.json of a LeRobot dataset, by the modes of the policy's configuration (MEAN_STD)."""
    for path in source.statistics:
        if path.name != "stats.json":
            continue
        found, modes = read_json(path), _lerobot_modes(source)

        def of(key: str, kind: str, path: Path = path, found: Any = found, modes: Any = modes) -> Scaling | None:
            stats = _mapping(found, key, str(path))
            return _lerobot_scaling(stats, modes.get(kind, "MEAN_STD"), f"{path}: {key}") if stats else None

        state, actions = of("observation.state", "STATE"), of("action", "ACTION")
        if state is not None or actions is not None:
            return [RobotStatistics("", str(path), state, actions)]
    return []


def _lerobot_modes(source: Checkpoint) -> Mapping[str, str]:
    """Kind of array (STATE, ACTION) -> its mode, from the processor's file or the policy's."""
    modes = dict(source.config.get("normalization_mapping") or {})
    for path in source.statistics:
        if path.suffix == ".json" and "preprocessor" in path.name:
            for step in read_json(path).get("steps", ()):
                modes |= step.get("config", {}).get("norm_map", {})
    return modes


def _lerobot_scaling(stats: Mapping[str, np.ndarray], mode: str, origin: str) -> Scaling:
    """lerobot's modes: epsilon 1e-8; the way back from mean and deviation is without it."""
    if mode == "IDENTITY":
        return scaling.identity(len(stats["mean"] if "mean" in stats else next(iter(stats.values()))))
    if mode == "MEAN_STD":
        return scaling.mean_std(*_pair(stats, "mean", "std", origin), eps=1e-8, back_eps=0.0)
    ends = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}.get(mode)
    if ends is None:
        raise ConfigError(f"{origin} is normalised by {mode!r}, which is not known here; use a folder with MEAN_STD")
    low, high = _pair(stats, *ends, origin)
    return scaling.bounds(low, np.where(high == low, low + 1e-8, high), method="quantile")


def _read(path: Path, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    from polyrhythm.policies.vla.safetensors_headers import read_header

    names = [name] if name else [*read_header(path).tensors]
    for stored, tensor in read_stored(path, {one: one for one in names}):
        yield stored, tensor.double().flatten().numpy()


def _get(found: Any, key: str, origin: str) -> Any:
    if not isinstance(found, Mapping) or key not in found:
        held = few([*found]) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ConfigError(f"{origin} has no {key!r} but {held or 'nothing'}; copy it again from its release")
    return found[key]


def _mapping(found: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    """The mapping under a key, empty where the key is absent. ConfigError: it is none."""
    inner = found.get(key, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{origin} has a {type(inner).__name__} as {key!r}; copy it again from its release")
    return inner


def _pair(stats: Any, first: str, second: str, origin: str) -> tuple[np.ndarray, np.ndarray]:
    """Two statistics of an array. ConfigError: one is missing or no list of numbers, or their lengths differ."""
    a, b = (_numbers(_get(stats, name, origin), f"{origin}.{name}") for name in (first, second))
    if a.shape != b.shape:
        raise ConfigError(
            f"{origin} has {len(a)} numbers in {first} and {len(b)} in {second}; copy it again from its release"
        )
    return a, b


def _numbers(found: Any, origin: str) -> np.ndarray:
    try:
        array = np.asarray(found, np.float64).reshape(-1)
    except (TypeError, ValueError):
        array = np.array([np.nan])
    if not np.isfinite(array).all():
        raise ConfigError(f"{origin} is no list of finite numbers; copy it again from its release")
    return array
