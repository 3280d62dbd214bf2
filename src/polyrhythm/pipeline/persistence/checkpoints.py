"""Layout and readers of saved weights and saved runs in a run folder.

    policy.pt                       the newest whole weights
    checkpoints/run-<number>/       a saved run; the highest number is the newest
        run.json                    state of the conductor and the observers' counts, with a checksum
        samples.npz                 finished samples that are waiting or in training
        trainer.pt, or trainer/     policy, optimizer, updates (a folder if the trainer's ranks are sharded)
        published.pt                the newest published weights, if they differ from the trainer's

A folder without its final name is incomplete; a damaged one is renamed to `run-<number>.damaged`. Reading executes no
content of these files.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.config.load import validate
from polyrhythm.config.recipes import read
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.files import parse_json
from polyrhythm.observe.run_folder import CONFIG_FILE, find_run
from polyrhythm.safetensors_files import read_header, read_tensors
from polyrhythm.specs import EnvSpec, Trajectory
from polyrhythm.specs.plain import as_plain, from_plain
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import load, load_state, save_state

log = logging.getLogger(__name__)

#: Newest whole weights in a run folder, written after the warm start and whenever training ends.
POLICY_FILE = "policy.pt"
#: Demonstrations of the warm start.
DEMONSTRATIONS_FILE = "demonstrations.npz"
#: The weights of the best evaluation during training (`evaluation.background`).
BEST_FILE = "best.pt"
#: The files of an exported policy without a released layout.
EXPORTED_MODEL, EXPORTED_SETTINGS = "model.safetensors", "policy.json"
#: Folder of the trainer's states and the saved runs in a run folder.
STATES = "checkpoints"

#: The files of a saved run.
RUN_FILE, SAMPLES_FILE, TRAINER_FILE, PUBLISHED_FILE = "run.json", "samples.npz", "trainer.pt", "published.pt"
#: Folder of a saved trainer with sharded ranks.
TRAINER_FOLDER = "trainer"
#: Suffixes of folders that hold no whole run.
DAMAGED, PART = ".damaged", ".part"
#: Key of the checksum in run.json.
CHECKSUM = "crc32"
_NAME = re.compile(r"run-(\d+)")


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """A saved policy. config: of its run, as plain data; spec: of its environment, None if no file has it; file: the
    one with config and spec."""

    config: dict[str, Any]
    weights: dict[str, Any]
    version: int
    spec: EnvSpec | None
    file: Path


def save_policy(
    weights: Mapping[str, Tensor], config: RunConfig, path: Path, version: int, spec: EnvSpec | None = None
) -> None:
    """Write {"policy": state_dict, "config": plain data, "version": int, "spec": plain data}.

    spec: of the environment; with it the policy can be used where the environment is not installed.
    """
    content = {"policy": dict(weights), "config": config.model_dump(mode="json"), "version": version}
    save_state(content if spec is None else {**content, "spec": as_plain(spec)}, path)


def load_policy(path: Path) -> tuple[RunConfig, dict[str, Any], int]:
    """Configuration, weights and version of a policy file, a run folder, a saved run or trainer in it, or an export."""
    saved = read_policy(path)
    return validate(saved.config, origin=str(saved.file)), saved.weights, saved.version


def read_policy(path: Path) -> SavedPolicy:
    """Like `load_policy`, without importing the classes that the configuration names.

    A run folder's newest weights are taken: a killed run has saved its trainer and itself after its last policy.pt. For
    a folder of runs the newest run is taken.
    """
    path = find_run(path)
    if (path / RUN_FILE).is_file():
        weights, version = _saved_policy(path)
        return replace(_policy_of_run(path.resolve().parents[1]), weights=weights, version=version)
    if TrainerStates.holds(path):
        beside = _policy_of_run(path.resolve().parents[1])
        weights, version = _trainer_policy(path, beside.config)
        return replace(beside, weights=weights, version=version)
    if (path / EXPORTED_SETTINGS).is_file():
        return _load_export(path)
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
        raise RunFolderError(_no_policy(path))
    weights, version = max(found, key=lambda policy: policy[1])
    return replace(newest, weights=weights, version=version)


def read_policy_settings(path: Path) -> dict[str, Any]:
    """Settings of `read_policy(path)` as plain data; reads no weights if the run folder has its settings file.

    RunFolderError: there is no policy, judged by file names.
    """
    path = find_run(path)
    if (path / EXPORTED_SETTINGS).is_file():
        return _load_export(path).config
    file = path if path.is_file() else path / (RUN_FILE if (path / RUN_FILE).is_file() else POLICY_FILE)
    run = path if file.name == POLICY_FILE and path.is_dir() else file.resolve().parent
    if file.name == RUN_FILE or TrainerStates.holds(path):
        run = path.resolve().parents[1]
    if not (run / CONFIG_FILE).is_file():
        return _load_file(file).config
    states = run / STATES
    if not (file.is_file() or saved_runs(states) or TrainerStates(str(states)).paths()):
        raise RunFolderError(_no_policy(path))
    return read(run / CONFIG_FILE)


def _no_policy(path: Path) -> str:
    return (
        f"{path} holds no {POLICY_FILE} and no whole checkpoint: the run did not get that far, or they were removed; "
        "name another"
    )


def _policy_of_run(folder: Path) -> SavedPolicy:
    """The run's policy.pt; if that is missing, its settings without weights."""
    file, settings = folder / POLICY_FILE, folder / CONFIG_FILE
    if not file.exists() and settings.is_file():
        return SavedPolicy(read(settings), {}, 0, None, settings)
    return _load_file(file)


def _load_file(file: Path) -> SavedPolicy:
    if not file.exists() and file.name == BEST_FILE:
        raise RunFolderError(
            f"{file} is not there: the best policy is kept where the run evaluates during training (evaluation.every "
            "above 0), from the first evaluation on; name the run's folder for its newest policy"
        )
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


def _load_export(folder: Path) -> SavedPolicy:
    """Policy that `polyrhythm export` wrote without a released layout. ConfigError: its tensors are damaged."""
    file, model = folder / EXPORTED_SETTINGS, folder / EXPORTED_MODEL
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        spec = None if content["spec"] is None else from_plain(content["spec"])
        weights = dict(read_tensors(model, {name: name for name in read_header(model).tensors}))
        return SavedPolicy(dict(content["config"]), weights, int(content["version"]), spec, file)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise RunFolderError(
            f"{folder} is not an exported policy that can be loaded ({type(error).__name__}: {error}); export it again"
        ) from error


def _saved_policy(path: Path) -> tuple[dict[str, Any], int]:
    try:
        version = int(_read_run(path / RUN_FILE)["version"])
        file = path / PUBLISHED_FILE
        return load(file if file.exists() else trainer_in(path))["policy"], version
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} cannot be read as a checkpoint ({error}); name another") from error


def _trainer_policy(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Weights of a trainer's state, and the version that they belong to or were about to become."""
    try:
        return load(path)["policy"], TrainerStates.updates(path) // config["freshness"]["sync_interval"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read as a checkpoint ({error}); name another") from error


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A saved run. counts: of the observers; samples: by payload id; trainer: file or folder of its state after
    `updates` updates; version, policy: the published weights."""

    conductor: dict[str, Any]
    counts: dict[str, Any]
    samples: dict[str, Trajectory]
    trainer: Path
    updates: int
    version: int
    policy: dict[str, Tensor]


def saved_runs(folder: Path) -> list[Path]:
    """Saved runs with their final name in a checkpoint folder, oldest first."""
    return sorted(path for path in folder.glob("run-*") if _NAME.fullmatch(path.name) and path.is_dir())


def next_run(folder: Path) -> Path:
    """Path of the next saved run, numbered above all others, including damaged ones."""
    names = (_NAME.fullmatch(path.name.removesuffix(DAMAGED)) for path in folder.glob("run-*"))
    return folder / f"run-{max((int(name[1]) for name in names if name), default=-1) + 1:06d}"


def newest_run(folder: Path) -> SavedRun | None:
    """Newest undamaged saved run of a checkpoint folder; None if there is none.

    Newer damaged ones are renamed, with a warning. RunFolderError: all are damaged.
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
            other.replace(other.with_name(other.name + DAMAGED))
        return saved
    if damaged:
        raise RunFolderError(
            f"{folder} has no saved run that is whole ({damaged[0][1]}); begin another run, "
            f"with the weights of this one by init_from={folder.parent}"
        )
    return None


def trainer_in(path: Path) -> Path:
    folder = path / TRAINER_FOLDER
    return folder if folder.is_dir() else path / TRAINER_FILE


def checksum_of(content: Mapping[str, Any]) -> int:
    """CRC-32 of run.json's content without its checksum."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    return zlib.crc32(json.dumps(rest, allow_nan=False).encode())


def _read_run(path: Path) -> dict[str, Any]:
    """Content of run.json. ValueError: it has another form or checksum."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds {type(content).__name__}")
    if content.get(CHECKSUM, checksum_of(content)) != checksum_of(content):
        raise ValueError(f"{path.name} was changed")
    return content


def load_run(path: Path) -> SavedRun:
    """Read what `persistence.snapshot` wrote. RunFolderError: a part is missing or damaged."""
    try:
        content = _read_run(path / RUN_FILE)
        with (path / SAMPLES_FILE).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            samples = _unflat(arrays)
        conductor, counts, version = content["conductor"], content["counts"], int(content["version"])
        trainer = load(trainer_in(path))
        published = load_state(path / PUBLISHED_FILE) if (path / PUBLISHED_FILE).exists() else trainer
        updates, policy = int(trainer["updates"]), published["policy"]
    except Exception as error:  # readers of damaged files may raise any exception
        # Drop the reader's advice to name another file, which does not apply to a part of a saved run.
        why = (
            str(error).rpartition("; ")[0] if isinstance(error, RunFolderError) else f"{type(error).__name__}: {error}"
        )
        raise RunFolderError(f"{path.name} is damaged: {why}") from error
    return SavedRun(conductor, counts, samples, trainer_in(path), updates, version, policy)


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
