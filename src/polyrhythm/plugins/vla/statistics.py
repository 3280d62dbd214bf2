"""Reads the normalisation statistics of a released folder and chooses those of one robot.

assets/ID/norm_stats.json          openpi: {"norm_stats": {"state" | "actions": {mean, std, q01, q99}}}, key ID
dataset_statistics.json            OpenVLA: {KEY: {"action" | "proprio": {mean, std, min, max, q01, q99, mask}}};
                                   the same may be in config.json under norm_stats
experiment_cfg/metadata.json       GR00T: see `groot_statistics`
policy_*processor*.safetensors     lerobot: observation.state.mean, ..., one robot without a key
meta/stats.json, stats.json        a LeRobot dataset's, copied here: {"observation.state" | "action": {mean, std, ...}};
                                   used where the folder has no others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint, read_stored
from polyrhythm.plugins.pretrained.folder_files import CHOICES, mapping_in, number_pair, read_json, value_of
from polyrhythm.plugins.vla import scaling
from polyrhythm.plugins.vla.groot_statistics import groot_scalings
from polyrhythm.plugins.vla.images import Resizing
from polyrhythm.plugins.vla.scaling import Scaling, StatePart
from polyrhythm.readable import few

_RELATIVE = "relative_actions_processor"
_STATE_DIM = 32


@dataclass(frozen=True, slots=True)
class FolderInputs:
    """resizing: method for images of other sizes. state_entries: of the state in π0.5's prompt, zero-padded; 0: the
    state's own number. cleans: whether π0's instruction is cleaned (`prompts.cleaned`). relative: whether actions
    are relative to the state."""

    resizing: Resizing = "openpi"
    state_entries: int = 0
    cleans: bool = True
    relative: bool = False


def folder_inputs(source: Checkpoint | None) -> FolderInputs:
    """Input conventions of the folder's own code; openpi's without a folder."""
    if source is None:
        return FolderInputs()
    steps, config = lerobot_steps(source), source.config
    openpi = any(path.name == "norm_stats.json" for path in source.statistics)
    if not (steps or source.extra or ("input_features" in config and not openpi)):
        return FolderInputs()
    if _RELATIVE in steps or "use_relative_actions" in config:
        return FolderInputs("lerobot", cleans=False, relative=bool(steps.get(_RELATIVE, {}).get("enabled")))
    if not steps and (source.extra or "resize_imgs_with_padding" in config):
        return FolderInputs("lerobot_0.3", cleans=False)
    return FolderInputs("lerobot_0.4", source.number("max_state_dim", _STATE_DIM), cleans=False)


def camera_names(opened: Checkpoint) -> tuple[str, ...]:
    """Camera names in config.json or GR00T's metadata; () if there are none."""
    config = opened.config
    saved = (config.get(CHOICES) or {}).get("cameras")
    named, features = saved or config.get("image_keys"), config.get("input_features")
    if named and isinstance(named, list):
        return tuple(map(str, named))
    features = features if isinstance(features, Mapping) else {}
    if visual := [
        name for name, feature in features.items() if isinstance(feature, Mapping) and feature.get("type") == "VISUAL"
    ]:
        return tuple(visual)
    for path in opened.statistics:
        if path.name == "metadata.json":
            tags = [tag for tag in read_json(path).values() if isinstance(tag, dict)]
            return tuple(dict.fromkeys(name for tag in tags for name in (tag.get("modalities") or {}).get("video", ())))
    return ()


def lerobot_steps(source: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Settings of each step of policy_preprocessor.json, by name."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in source.statistics:
        if path.suffix == ".json" and "preprocessor" in path.name:
            for step in read_json(path).get("steps") or ():
                if not isinstance(step, Mapping):
                    raise ConfigError(f"{path}: {step!r} is not a step; copy it again from its release")
                name = str(step.get("registry_name") or step.get("class", ""))
                found[name] = mapping_in(step, "config", f"{path}: {name}")
    return found


#: `policy.robot` that asks for no statistics: actions between the environment's bounds, the state as it is.
BOUNDS = "bounds"
#: Files of statistics by policy type, for messages.
_EXPECTED = {"openvla_oft": "dataset_statistics.json", "groot_n1d5": "experiment_cfg/metadata.json"}
_OPENPI = "assets/ID/norm_stats.json, or lerobot's policy_preprocessor files"


@dataclass(frozen=True, slots=True)
class RobotStatistics:
    """Normalisation of one robot's state and actions; None if the folder has none. origin: the file, "" where none is
    asked for; parts: of a state in another form (GR00T)."""

    key: str = ""
    origin: str = ""
    state: Scaling | None = None
    actions: Scaling | None = None
    parts: tuple[StatePart, ...] = ()


#: A robot's key, and what reads its statistics: those of other robots may be unknown here.
_Keyed = tuple[str, Callable[[], RobotStatistics]]


def robot_statistics(source: Checkpoint, kind: str, robot: str, data_config: str = "") -> RobotStatistics:
    """The statistics of the robot with this key ("": the only one). data_config: GR00T's, "" for its embodiment's.
    ConfigError: none, several, or an unknown key."""
    found = list(_all(source, kind, data_config)) or list(_dataset(source))[:1]
    keys = [key for key, _ in found]
    if not found:
        wanted = f"policy.robot = {robot!r}: " if robot else ""
        raise ConfigError(
            f"{wanted}checkpoint = {source.folder} has no normalisation statistics "
            f"({_EXPECTED.get(kind, _OPENPI)}); copy that file from the release, or set "
            f"policy.robot = {BOUNDS!r} to map actions to the environment's bounds"
        )
    if not robot and len(found) == 1:
        return found[0][1]()
    # OpenVLA's keys may have the ending _no_noops, openpi's ids are paths.
    names = {key: (key, key.removesuffix("_no_noops"), key.rsplit("/", 1)[-1]) for key in keys}
    matching = [read for key, read in found if robot and robot in names[key]]
    if len(matching) == 1:
        return matching[0]()
    if not robot:
        raise ConfigError(
            f"policy.robot is not set, and checkpoint = {source.folder} has statistics of {len(found)} robots "
            f"({few(keys, 8)}); set policy.robot to one of them"
        )
    raise ConfigError(
        f"policy.robot = {robot!r}: checkpoint = {source.folder} has statistics of {few(keys, 8) or 'one robot'}; set "
        "policy.robot to one of them"
    )


def _all(source: Checkpoint, kind: str, data_config: str) -> Iterator[_Keyed]:
    for path in source.statistics:
        if path.name == "norm_stats.json":
            key = openpi_key(path, source.folder)
            yield key, partial(openpi, path, kind, key)
        elif path.name == "dataset_statistics.json":
            yield from ((key, partial(openvla, key, robot, str(path))) for key, robot in read_json(path).items())
        elif path.name == "metadata.json":
            for tag, robot in read_json(path).items():
                if isinstance(robot, Mapping) and "statistics" in robot:
                    yield tag, partial(_groot, tag, robot, data_config, str(path))
    named = source.config.get("norm_stats")
    if isinstance(named, Mapping) and not any(path.name == "dataset_statistics.json" for path in source.statistics):
        origin = f"{source.folder}/config.json"
        yield from ((key, partial(openvla, key, robot, origin)) for key, robot in named.items())
    yield from _lerobot(source)


def openpi_key(path: Path, folder: Path) -> str:
    """The key of a norm_stats.json in a released folder: the path of its parent below `assets`."""
    inner = path.parent.relative_to(folder).parts
    return "/".join(inner[1:] if inner[:1] == ("assets",) else inner)


def openpi(path: Path, kind: str, key: str) -> RobotStatistics:
    """openpi's statistics: quantiles for π0.5, mean and deviation for π0; with epsilon, without clipping."""
    found = value_of(read_json(path), "norm_stats", str(path))

    def of(name: str) -> Scaling | None:
        if name not in found:
            return None
        stats, origin = found[name], f"{path}: {name}"
        if kind == "pi05":
            return scaling.bounds(*number_pair(stats, "q01", "q99", origin), eps=1e-6)
        return scaling.mean_std(*number_pair(stats, "mean", "std", origin), eps=1e-6)

    return RobotStatistics(key, str(path), of("state"), of("actions"))


def openvla(key: str, robot: Any, origin: str) -> RobotStatistics:
    """OpenVLA's statistics of a data set: quantiles, for ALOHA extremes; masked entries only; clipped."""
    ends = ("min", "max") if "aloha" in key.lower() else ("q01", "q99")

    def of(name: str) -> Scaling | None:
        stats = robot.get(name) if isinstance(robot, Mapping) else None
        if stats is None:
            return None
        low, high = number_pair(stats, *ends, f"{origin}: {key}.{name}")
        method: scaling.Method = "min_max" if ends[0] == "min" else "quantile"
        mask = stats.get("mask")
        if mask is not None and np.shape(mask) != low.shape:
            raise ConfigError(
                f"{origin}: {key}.{name} has {len(low)} numbers and a mask of {np.size(mask)}; copy it again from its "
                "release"
            )
        return scaling.bounds(low, high, method=method, eps=1e-8, mask=mask, clipped=True)

    return RobotStatistics(key, origin, of("proprio"), of("action"))


def _groot(tag: str, robot: Mapping[str, Any], data_config: str, origin: str) -> RobotStatistics:
    return RobotStatistics(tag, origin, *groot_scalings(tag, robot, data_config, origin))


def _lerobot(source: Checkpoint) -> Iterator[_Keyed]:
    """Statistics of lerobot's processors, or of the buffers in its older checkpoints."""
    found: dict[str, dict[str, Any]] = {}
    for path in source.statistics:
        for name, array in _read(path) if path.suffix == ".safetensors" else ():
            key, _, stat = name.rpartition(".")
            found.setdefault(key, {})[stat] = array
    for name, place in source.extra.items():  # (un)normalize_X.buffer_observation_state.mean
        buffer, stat = name.split(".buffer_", 1)[-1].rsplit(".", 1)
        key = "action" if buffer == "action" else buffer.replace("observation_", "observation.", 1)
        for _, array in _read(place.file, place.stored):
            found.setdefault(key, {})[stat] = array
    yield from _only_robot(source, found, f"{source.folder} (lerobot)", str(source.folder))


def _dataset(source: Checkpoint) -> Iterator[_Keyed]:
    """Statistics of the LeRobot datasets whose stats.json lies in the folder."""
    for path in source.statistics:
        if path.name == "stats.json":
            yield from _only_robot(source, read_json(path), str(path), str(path))


def _only_robot(source: Checkpoint, found: Mapping[str, Any], origin: str, where: str) -> Iterator[_Keyed]:
    """lerobot's one robot, if there are numbers, in the modes of the processor's file or of the policy's (default
    MEAN_STD). found: array -> statistic -> numbers."""
    modes = dict(source.config.get("normalization_mapping") or {})
    for settings in lerobot_steps(source).values():
        modes |= settings.get("norm_map", {})

    def of(key: str, kind: str) -> Scaling | None:
        stats = mapping_in(found, key, where)
        return _lerobot_scaling(stats, modes.get(kind, "MEAN_STD"), f"{where}: {key}") if stats else None

    state, actions = of("observation.state", "STATE"), of("action", "ACTION")
    if state is not None or actions is not None:
        yield "", partial(RobotStatistics, "", origin, state, actions)


def _lerobot_scaling(stats: Mapping[str, np.ndarray], mode: str, origin: str) -> Scaling:
    """lerobot's modes: epsilon 1e-8, not used in the inverse of mean and deviation."""
    if mode == "IDENTITY":
        return scaling.identity(len(stats["mean"] if "mean" in stats else next(iter(stats.values()))))
    if mode == "MEAN_STD":
        return scaling.mean_std(*number_pair(stats, "mean", "std", origin), eps=1e-8, back_eps=0.0)
    ends = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}.get(mode)
    if ends is None:
        raise ConfigError(f"{origin} is normalised by {mode!r}, which is not known here; use a folder with MEAN_STD")
    low, high = number_pair(stats, *ends, origin)
    return scaling.bounds(low, np.where(high == low, low + 1e-8, high), method="quantile")


def _read(path: Path, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for stored, tensor in read_stored(path, {name: name} if name else None):
        yield stored, tensor.double().flatten().numpy()
