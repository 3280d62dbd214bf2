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
from polyrhythm.plugins.pretrained.folder_files import CHOICES, few, mapping_in, number_pair, read_json, value_of
from polyrhythm.plugins.vla import scaling
from polyrhythm.plugins.vla.groot_statistics import groot_scalings
from polyrhythm.plugins.vla.images import Resizing
from polyrhythm.plugins.vla.scaling import Scaling, StatePart

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
    if source is None or not _is_lerobots(source):
        return FolderInputs()
    steps, config = lerobot_steps(source), source.config
    if _RELATIVE in steps or "use_relative_actions" in config:
        return FolderInputs("lerobot", cleans=False, relative=bool(steps.get(_RELATIVE, {}).get("enabled")))
    if not steps and (source.extra or "resize_imgs_with_padding" in config):
        return FolderInputs("lerobot_0.3", cleans=False)
    entries = config.get("max_state_dim", _STATE_DIM)
    if not isinstance(entries, int):
        raise ConfigError(
            f"checkpoint = {source.folder}: config.json has max_state_dim = {entries!r}, which is not a number; copy "
            "it again from its release"
        )
    return FolderInputs("lerobot_0.4", entries, cleans=False)


def _is_lerobots(source: Checkpoint) -> bool:
    """Whether lerobot saved the folder: it has lerobot's processors, buffers or configuration."""
    openpi = any(path.name == "norm_stats.json" for path in source.statistics)
    return bool(lerobot_steps(source) or source.extra or ("input_features" in source.config and not openpi))


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
#: OpenVLA's statistics of data sets without idle steps have this ending, which settings may leave out.
_NO_NOOPS = "_no_noops"


@dataclass(frozen=True, slots=True)
class RobotStatistics:
    """Normalisation of one robot's state and actions; None if the folder has none. origin: the file; parts: of a
    state in another form (GR00T)."""

    key: str
    origin: str
    state: Scaling | None
    actions: Scaling | None
    parts: tuple[StatePart, ...] = ()


#: A robot's key, and what reads its statistics: those of other robots may be unknown here.
_Keyed = tuple[str, Callable[[], RobotStatistics]]


def robot_statistics(source: Checkpoint, kind: str, robot: str, data_config: str = "") -> RobotStatistics:
    """The statistics of the robot with this key ("": the only one). data_config: GR00T's, "" for its embodiment's.
    ConfigError: none, several, or an unknown key."""
    found = list(_all(source, kind, data_config)) or _dataset(source)
    keys = [key for key, _ in found]
    if not found:
        wanted = f"policy.robot = {robot!r}: " if robot else ""
        raise ConfigError(
            f"{wanted}checkpoint = {source.folder} has no normalisation statistics ({_expected(kind)}); copy that file "
            f"from the release, or set policy.robot = {BOUNDS!r} to map actions to the environment's bounds"
        )
    if not robot and len(found) == 1:
        return found[0][1]()
    matching = [read for key, read in found if _is_named(key, robot)] if robot else []
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


def _is_named(key: str, robot: str) -> bool:
    """Whether a setting matches this key: equal, equal without _no_noops, or equal to its last part (openpi's ids
    are paths)."""
    return robot in (key, key.removesuffix(_NO_NOOPS), key.rsplit("/", 1)[-1])


def _expected(kind: str) -> str:
    files = {
        "openvla_oft": "dataset_statistics.json",
        "groot_n1d5": "experiment_cfg/metadata.json",
    }
    return files.get(kind, "assets/ID/norm_stats.json, or lerobot's policy_preprocessor files")


def _all(source: Checkpoint, kind: str, data_config: str) -> Iterator[_Keyed]:
    for path in source.statistics:
        if path.name == "norm_stats.json":
            key = openpi_key(path, source.folder)
            yield key, partial(openpi, path, kind, key)
        elif path.name == "dataset_statistics.json":
            yield from openvla(read_json(path), str(path))
        elif path.name == "metadata.json":
            for tag, robot in read_json(path).items():
                if isinstance(robot, Mapping) and "statistics" in robot:
                    yield tag, partial(groot, tag, robot, data_config, str(path))
    named = source.config.get("norm_stats")
    if isinstance(named, Mapping) and not any(path.name == "dataset_statistics.json" for path in source.statistics):
        yield from openvla(named, f"{source.folder}/config.json")
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
        return _openpi_scaling(found[name], kind, f"{path}: {name}")

    return RobotStatistics(key, str(path), of("state"), of("actions"))


def _openpi_scaling(stats: Mapping[str, Any], kind: str, origin: str) -> Scaling:
    if kind == "pi05":
        low, high = number_pair(stats, "q01", "q99", origin)
        return scaling.bounds(low, high, eps=1e-6)
    mean, std = number_pair(stats, "mean", "std", origin)
    return scaling.mean_std(mean, std, eps=1e-6)


def openvla(found: Mapping[str, Any], origin: str) -> Iterator[_Keyed]:
    """OpenVLA's statistics by data set: quantiles, for ALOHA extremes; masked entries only; clipped."""
    for key, robot in found.items():
        yield key, partial(_openvla, key, robot, origin)


def _openvla(key: str, robot: Any, origin: str) -> RobotStatistics:
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


def groot(tag: str, robot: Mapping[str, Any], data_config: str, origin: str) -> RobotStatistics:
    found = groot_scalings(tag, robot, data_config, origin)
    return RobotStatistics(tag, origin, found.state, found.action, found.parts)


def _lerobot(source: Checkpoint) -> Iterator[_Keyed]:
    """Statistics of lerobot's processors, or of the buffers in its older checkpoints."""
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
        yield "", partial(RobotStatistics, "", f"{source.folder} (lerobot)", state, actions)


def _dataset(source: Checkpoint) -> list[_Keyed]:
    """The first stats.json of a LeRobot dataset, with the modes of the policy's configuration (default MEAN_STD)."""
    for path in source.statistics:
        if path.name != "stats.json":
            continue
        found, modes = read_json(path), _lerobot_modes(source)

        def of(key: str, kind: str, path: Path = path, found: Any = found, modes: Any = modes) -> Scaling | None:
            stats = mapping_in(found, key, str(path))
            return _lerobot_scaling(stats, modes.get(kind, "MEAN_STD"), f"{path}: {key}") if stats else None

        state, actions = of("observation.state", "STATE"), of("action", "ACTION")
        if state is not None or actions is not None:
            return [("", partial(RobotStatistics, "", str(path), state, actions))]
    return []


def _lerobot_modes(source: Checkpoint) -> Mapping[str, str]:
    """Mode of each kind of array (STATE, ACTION), from the processor's file or the policy's."""
    modes = dict(source.config.get("normalization_mapping") or {})
    for settings in lerobot_steps(source).values():
        modes |= settings.get("norm_map", {})
    return modes


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
    from polyrhythm.safetensors_files import read_header

    names = [name] if name else [*read_header(path).tensors]
    for stored, tensor in read_stored(path, {one: one for one in names}):
        yield stored, tensor.double().flatten().numpy()
