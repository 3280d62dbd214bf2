"""The weights of a run in a file, and the whole run in a folder: written whole or not at all.

    policy.pt                       the newest whole weights
    checkpoints/run-<number>/       the run as it was at some moment; the highest number is the newest
        run.json                    the conductor, and what observers go on counting from; with a checksum
        samples.npz                 the finished samples that wait, or were lent
        trainer.pt                  policy, optimizer, updates
        published.pt                the newest published weights, where they are not the trainer's

A folder without its final name is one that was not finished; one that turned out to be damaged is put aside as
`run-<number>.damaged`. Nothing in any of them is executed when it is read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.yaml_text import read
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.persistence.phases import CONFIG_FILE
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.scheduler.conductor import Conductor
from polyrhythm.specs import EnvSpec, Trajectory
from polyrhythm.specs.plain import as_plain, from_plain
from polyrhythm.stations.trainer_factory import TrainerStates
from polyrhythm.training.checkpoint import load_state, save_state

log = logging.getLogger(__name__)

#: Name of the newest whole weights in a run folder: after the warm start, and when training ends, however it ends.
POLICY_FILE = "policy.pt"
#: Where in a run folder the trainer's states and the saved runs are.
STATES = "checkpoints"

_RUN, _SAMPLES, _TRAINER, _PUBLISHED = "run.json", "samples.npz", "trainer.pt", "published.pt"
_NAME, _DAMAGED, _CHECKSUM = re.compile(r"run-(\d+)"), ".damaged", "crc32"


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """A policy as it was saved. config: of its run, as plain data; spec: of its environment, None where the file is
    older than that, or gone; file: where config and spec were found."""

    config: dict[str, Any]
    weights: dict[str, Any]
    version: int
    spec: EnvSpec | None
    file: Path


def save_policy(
    weights: Mapping[str, Tensor], config: RunConfig, path: Path, version: int, spec: EnvSpec | None = None
) -> None:
    """Write {"policy": state_dict, "config": plain data, "version": int, "spec": plain data}.

    spec: of the environment; with it the policy can be used where there is no such environment.
    """
    content = {"policy": dict(weights), "config": config.model_dump(mode="json"), "version": version}
    save_state(content if spec is None else {**content, "spec": as_plain(spec)}, path)


def load_policy(path: Path) -> tuple[RunConfig, dict[str, Any], int]:
    """The configuration, weights and version of a file of weights, a run folder, or a saved run or trainer in it."""
    saved = read_policy(path)
    return validate(saved.config, origin=str(saved.file)), saved.weights, saved.version


def read_policy(path: Path) -> SavedPolicy:
    """The same without looking for the classes that the configuration names.

    A run folder's are its newest: a run that was killed has saved its trainer and itself after its last policy.pt.
    """
    if (path / _RUN).is_file():
        return _with_weights(_beside(path), *_saved_policy(path))
    if path.is_file() and path.match(TrainerStates.pattern):
        beside = _beside(path)
        return _with_weights(beside, *_trainer_policy(path, beside.config))
    if not path.is_dir():
        return _load_file(path)
    newest = _policy_of_run(path)
    found = [(newest.weights, newest.version)] if newest.weights else []
    for weights_of, files in (
        (_saved_policy, saved_runs(path / STATES)),
        (lambda file: _trainer_policy(file, newest.config), TrainerStates(str(path / STATES)).paths()),
    ):
        for file in reversed(files):
            try:
                found.append(weights_of(file))
                break
            except RunFolderError as error:
                log.warning("left out: %s", error)
    if not found:
        raise RunFolderError(
            f"{path} holds no {POLICY_FILE} and no whole checkpoint: the run did not get that far, or they were "
            "removed; name another"
        )
    return _with_weights(newest, *max(found, key=lambda policy: policy[1]))


def _with_weights(policy: SavedPolicy, weights: dict[str, Any], version: int) -> SavedPolicy:
    return replace(policy, weights=weights, version=version)


def _beside(path: Path) -> SavedPolicy:
    """Of the run in whose checkpoint folder this lies."""
    return _policy_of_run(path.resolve().parents[1])


def _policy_of_run(folder: Path) -> SavedPolicy:
    """Of its policy.pt; where that is gone, its settings alone, without weights, for those of a checkpoint."""
    file, settings = folder / POLICY_FILE, folder / CONFIG_FILE
    if not file.exists() and settings.is_file():
        return SavedPolicy(read(settings), {}, 0, None, settings)
    return _load_file(file)


def _load_file(file: Path) -> SavedPolicy:
    if not file.exists() and file.name != POLICY_FILE:
        raise RunFolderError(f"{file} is not there; name the folder of a run or one of its checkpoints")
    if not file.is_file():
        raise RunFolderError(
            f"{file.parent} holds no {file.name}: the run did not get that far, or the file was removed, or this is "
            "not a run folder; name another"
        )
    content = load_state(file)
    try:
        spec = from_plain(content["spec"]) if "spec" in content else None
        weights, version = dict(content["policy"]), int(content["version"])
        return SavedPolicy(dict(content["config"]), weights, version, spec, file)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{file} holds no policy with its settings ({type(error).__name__}: {error}); name a run's folder, or its "
            f"{POLICY_FILE}"
        ) from error


def _saved_policy(path: Path) -> tuple[dict[str, Any], int]:
    """The published weights of a saved run, and their version."""
    try:
        version = int(_read_run(path / _RUN)["version"])
        file = path / _PUBLISHED
        return load_state(file if file.exists() else path / _TRAINER)["policy"], version
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} cannot be read as a checkpoint ({error}); name another") from error


def _trainer_policy(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The weights of a trainer's state, and the version that they are, or were about to become."""
    try:
        return load_state(path)["policy"], TrainerStates.updates(path) // config["freshness"]["sync_interval"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read as a checkpoint ({error}); name another") from error


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run as it was saved. counts: what observers go on from; samples: by handle; trainer: its state's file, which
    contains `updates`; version, policy: the published weights."""

    conductor: dict[str, Any]
    counts: dict[str, Any]
    samples: dict[str, Trajectory]
    trainer: Path
    updates: int
    version: int
    policy: dict[str, Tensor]


def save_run(
    folder: Path, conductor: Conductor, arena: Arena, weights: Weights, states: TrainerStates, counts: dict[str, Any]
) -> Path:
    """Write the run into `folder`, beside older ones of which the newest stay, as many as of `states`; its path.

    The trainer's newest state goes with it. Updates that it lacks are rolled back when the run is resumed.
    """
    runs = saved_runs(folder)
    names = (_NAME.fullmatch(path.name.removesuffix(_DAMAGED)) for path in folder.glob("run-*"))
    taken = [int(name[1]) for name in names if name]
    whole = folder / f"run-{max(taken, default=-1) + 1:06d}"
    part = whole.with_name(whole.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    arrays: dict[str, NDArray[Any]] = {}
    for sample in conductor.rollout.samples.values():
        if sample.payload_id:
            arrays |= _flat(sample.payload_id, arena.trajectory(int(sample.payload_id)))
    with (part / _SAMPLES).open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    state, versions = states.paths()[-1], conductor.versions
    os.link(state, part / _TRAINER)  # a state is replaced, never changed
    version = versions.trained
    if versions.in_version or states.updates(state) != versions.updates:
        version, published = weights.read(versions.published)  # a newer one there may be of updates that were undone
        save_state({"policy": published}, part / _PUBLISHED)
    content = {"conductor": conductor.save(), "counts": counts, "version": version}
    content |= {_CHECKSUM: _checksum(content)}
    (part / _RUN).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    for path in part.iterdir():
        _sync(path)
    part.replace(whole)
    _sync(folder)
    for old in runs[: max(0, len(runs) + 1 - states.keep)]:
        shutil.rmtree(old)
    return whole


def saved_runs(folder: Path) -> list[Path]:
    """The whole runs in a checkpoint folder, oldest first; what else somebody has put there is none."""
    return sorted(path for path in folder.glob("run-*") if _NAME.fullmatch(path.name) and path.is_dir())


def newest_run(folder: Path) -> SavedRun | None:
    """The newest saved run of a checkpoint folder that is whole; None if there is none at all.

    Newer ones that are damaged are put aside, with a warning. RunFolderError: all are damaged.
    """
    damaged: list[tuple[Path, RunFolderError]] = []
    for path in reversed(saved_runs(folder)):
        try:
            saved = load_run(path)
        except RunFolderError as error:
            damaged.append((path, error))
            continue
        for other, problem in damaged:
            log.warning("%s; it is put aside, and %s is taken", problem, path.name)
            other.replace(other.with_name(other.name + _DAMAGED))
        return saved
    if damaged:
        raise RunFolderError(
            f"{folder} has no saved run that is whole ({damaged[0][1]}); begin another run, "
            f"with the weights of this one by init_from={folder.parent}"
        )
    return None


def _checksum(content: Mapping[str, Any]) -> int:
    """Of a run.json, but for the checksum in it."""
    rest = {key: value for key, value in content.items() if key != _CHECKSUM}
    return zlib.crc32(json.dumps(rest, allow_nan=False).encode())


def _read_run(path: Path) -> dict[str, Any]:
    """A run.json. ValueError: it is not as it was written."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds {type(content).__name__}")
    if content.get(_CHECKSUM, _checksum(content)) != _checksum(content):
        raise ValueError(f"{path.name} was changed")
    return content


def load_run(path: Path) -> SavedRun:
    """What `save_run` wrote. RunFolderError: something of it is missing or damaged."""
    try:
        content = _read_run(path / _RUN)
        with (path / _SAMPLES).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            samples = _unflat(arrays)
        conductor, counts, version = content["conductor"], content["counts"], int(content["version"])
        trainer = load_state(path / _TRAINER)
        published = load_state(path / _PUBLISHED) if (path / _PUBLISHED).exists() else trainer
        updates, policy = int(trainer["updates"]), published["policy"]
    except Exception as error:  # whatever a reader makes of bytes that nobody wrote
        # What a file's own reader advises, to name another file, fits no part of a saved run.
        why = (
            str(error).rpartition("; ")[0] if isinstance(error, RunFolderError) else f"{type(error).__name__}: {error}"
        )
        raise RunFolderError(f"{path.name} is damaged: {why}") from error
    return SavedRun(conductor, counts, samples, path / _TRAINER, updates, version, policy)


def _flat(payload_id: str, trajectory: Trajectory) -> dict[str, NDArray[Any]]:
    """The trajectory's arrays by `<handle>/<field>` or `<handle>/<field>/<name>`."""
    arrays: dict[str, NDArray[Any]] = {}
    for part in fields(trajectory):
        value = getattr(trajectory, part.name)
        if isinstance(value, dict):
            arrays |= {f"{payload_id}/{part.name}/{name}": array for name, array in value.items()}
        else:
            arrays[f"{payload_id}/{part.name}"] = np.asarray(value)
    return arrays


def _unflat(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Trajectory]:
    found: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        payload_id, field, *name = key.split("/", 2)
        sample = found.setdefault(payload_id, {"forward_inputs": {}})
        if name:
            sample.setdefault(field, {})[name[0]] = array
        else:
            sample[field] = array.item() if field in _SCALARS else array
    return {payload_id: Trajectory(**sample) for payload_id, sample in found.items()}


_SCALARS = frozenset({"terminated", "truncated", "success", "env_steps", "ticket", "group", "task"})


def _sync(path: Path) -> None:
    """To the disk, so that a power cut leaves it whole."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
