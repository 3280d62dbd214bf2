"""Checks that a dataset folder is one, and that it fits an environment, from its small files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.files import inner_path
from polyrhythm.pipeline.lerobot import layout
from polyrhythm.pipeline.lerobot.images import require_video
from polyrhythm.specs import EnvSpec

_CONVERT = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
_IMAGES = ("image", "video")


@dataclass(frozen=True, slots=True)
class CheckedDataset:
    """A dataset that fits. keys: name of an array → key; tasks: task_index → the environment's task; episodes: rows of
    meta/episodes that pass the filters, by column; info, recorded: content of info.json and of our own file's."""

    folder: Path
    info: Mapping[str, Any]
    recorded: Mapping[str, Any]
    keys: Mapping[str, str]
    tasks: Mapping[int, int]
    episodes: list[dict[str, Any]]


def check_dataset(settings: DatasetSettings, spec: EnvSpec, action_repeat: int) -> CheckedDataset:
    """Open a dataset for this environment. MissingError: pyarrow is missing; RunFolderError: the folder has no v3.0
    dataset, or files are missing; ConfigError: its arrays or tasks are not the environment's."""
    layout.require_pyarrow()
    folder = Path(settings.folder).expanduser()
    info = read_info(folder)
    keys = layout.keys_of(spec, settings.keys)
    unknown = settings.keys.keys() - spec.observation.keys()
    if unknown:
        raise ConfigError(
            f"demonstrations.dataset.keys = {min(unknown)}: the environment has no such array but "
            f"{', '.join(spec.observation)}; name one of these"
        )
    _check_arrays(folder, info["features"], keys, spec)
    recorded = _recorded(folder)
    if recorded.get("action_repeat", action_repeat) != action_repeat:
        raise ConfigError(
            f"rollout.action_repeat = {action_repeat}: the demonstrations in {folder} hold each action for "
            f"{recorded['action_repeat']} steps; set it to that"
        )
    if settings.only_success and layout.SUCCESS not in info["features"]:
        raise ConfigError(
            f"demonstrations.dataset.only_success = true: {folder} has no {layout.SUCCESS}, so nobody knows; set it to "
            "false"
        )
    return _with_episodes(folder, settings, spec, info, recorded, keys)


def read_info(folder: Path) -> dict[str, Any]:
    """The content of info.json. RunFolderError: it is missing, damaged, or of another version."""
    file = folder / layout.INFO
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not there; name the folder of a dataset")
    if not file.is_file():
        raise RunFolderError(f"{folder} has no {layout.INFO}, so it is no LeRobot dataset; name the folder that has it")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
        version = str(info["codebase_version"])
        described = isinstance(info["features"], dict) and float(info["fps"]) > 0
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RunFolderError(f"{file} is damaged ({type(error).__name__}: {error}); copy it again") from error
    if version.split(".", maxsplit=1)[0] != "v3":
        convert = f"; convert it with lerobot: {_CONVERT}" if version.startswith("v2") else "; name another"
        raise RunFolderError(f"{folder} is {version}, and only v3 is read{convert}")
    if not described:
        raise RunFolderError(f"{file} is damaged (features or fps); copy it again")
    return dict(info)


def _recorded(folder: Path) -> dict[str, Any]:
    """What our own file says of the recording; empty for a dataset of others."""
    from polyrhythm.pipeline.lerobot.writing import Journal

    if not (folder / layout.OURS).is_file():
        return {}
    try:
        return Journal.load(folder).recorded
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder / layout.OURS} cannot be read ({error}); copy it again") from error


def _check_arrays(folder: Path, features: Mapping[str, Any], keys: Mapping[str, str], spec: EnvSpec) -> None:
    """Compare the features with the environment's arrays and action."""
    for name, key in keys.items():
        array = spec.observation[name]
        if key not in features:
            raise ConfigError(
                f"{folder} has no {key}, which would be the environment's {name}; it has "
                f"{', '.join(k for k in features if k.startswith('observation')) or 'no observations'}: name one in "
                "demonstrations.dataset.keys"
            )
        feature, image = features[key], layout.image_shape(array)
        shape = list(feature["shape"])
        if image is not None and feature["dtype"] in _IMAGES and (feature.get("names") or [""])[0] == "channels":
            shape = [*shape[1:], shape[0]]
        expected = [math.prod(array.shape)] if image is None else list(image)
        if shape != expected or (image is None) != (feature["dtype"] not in _IMAGES):
            raise ConfigError(
                f"{folder}: {key} is {feature['dtype']} {shape}, the environment's {name} is "
                f"{'image' if image else array.dtype} {expected}; make the environment's equal, or name another key in "
                "demonstrations.dataset.keys"
            )
        if feature["dtype"] == "video":
            require_video(folder)
    action = list(features.get(layout.ACTION, {}).get("shape", []))
    if action != [spec.action.dim]:
        raise ConfigError(
            f"{folder}: an action is of {action or 'no'} entries, the environment's of [{spec.action.dim}]; name a "
            "dataset of this robot"
        )


def _with_episodes(
    folder: Path,
    settings: DatasetSettings,
    spec: EnvSpec,
    info: Mapping[str, Any],
    recorded: Mapping[str, Any],
    keys: Mapping[str, str],
) -> CheckedDataset:
    sentences = read_tasks(folder)
    known = {word: i for i, task in enumerate(spec.tasks) for word in (task.instruction, task.name)}
    known |= {word: i for i, word in enumerate(layout.sentences_of(spec))}
    for word in settings.tasks:
        if word not in known:
            raise ConfigError(
                f"demonstrations.dataset.tasks = {word}: the environment has no such task but "
                f"{', '.join(task.name for task in spec.tasks)}; name one of these"
            )
    chosen = {known[word] for word in settings.tasks} or set(range(len(spec.tasks)))
    episodes = read_episodes(folder)
    used = {sentence for row in episodes for sentence in row["tasks"]}
    strange = [sentence for sentence in sentences.values() if sentence in used and sentence not in known]
    if strange and not settings.tasks:
        raise ConfigError(
            f"{folder} has the task {strange[0]!r}, which the environment has not "
            f"({', '.join(known)}); choose tasks with demonstrations.dataset.tasks, or name another dataset"
        )
    tasks = {index: known[words] for index, words in sentences.items() if known.get(words) in chosen}
    names = {sentences[index] for index in tasks}
    kept = [row for row in episodes if names & set(row["tasks"])]
    if not kept:
        raise ConfigError(f"{folder} has no episode of the chosen tasks; set demonstrations.dataset.tasks otherwise")
    _refuse_missing_files(folder, info, keys, kept)
    return CheckedDataset(folder, info, recorded, keys, tasks, kept)


def _refuse_missing_files(folder: Path, info: Mapping[str, Any], keys: Mapping[str, str], rows: Any) -> None:
    files = {data_file(folder, info, row) for row in rows}
    videos = [key for key in keys.values() if info["features"][key]["dtype"] == "video"]
    files |= {video_file(folder, info, row, key) for row in rows for key in videos}
    missing = sorted(file for file in files if not file.is_file())
    if missing:
        raise RunFolderError(
            f"{missing[0]} is not there (missing: {len(missing)} of {len(files)} files); copy the dataset again"
        )


def data_file(folder: Path, info: Mapping[str, Any], row: Mapping[str, Any]) -> Path:
    """The file with an episode's frames."""
    place = {name: row[f"data/{name}"] for name in ("chunk_index", "file_index")}
    return inner_file(folder, str(info.get("data_path") or layout.DATA).format(**place), layout.INFO)


def video_file(folder: Path, info: Mapping[str, Any], row: Mapping[str, Any], key: str) -> Path:
    """The file with an episode's video of a camera."""
    place = {name: row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
    return inner_file(folder, str(info["video_path"]).format(video_key=key, **place), layout.INFO)


def inner_file(folder: Path, name: object, named_by: str) -> Path:
    """The file of the dataset that `named_by`, another of its files, names. RunFolderError: it leads out of it."""
    try:
        return inner_path(folder, name, folders=True)
    except ValueError as error:
        raise RunFolderError(f"{folder / named_by}: {error}; copy the dataset again") from error


def read_tasks(folder: Path) -> dict[int, str]:
    """task_index → sentence."""
    table = _table(folder / layout.TASKS)
    words = [name for name in table.column_names if name != "task_index" and str(table[name].type).endswith("string")]
    if "task_index" not in table.column_names or not words:
        raise RunFolderError(f"{folder / layout.TASKS} has no tasks; copy it again")
    name = "task" if "task" in words else words[-1]
    return dict(zip(table["task_index"].to_pylist(), table[name].to_pylist(), strict=True))


def read_episodes(folder: Path) -> list[dict[str, Any]]:
    """The rows of meta/episodes without statistics, by episode_index. RunFolderError: there are none."""
    files = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise RunFolderError(f"{folder} has no file in meta/episodes; copy the dataset again, or record it to its end")
    rows = [row for file in files for row in _table(file, without="stats/").to_pylist()]
    lacking = {"episode_index", "tasks", "length", "data/chunk_index", "data/file_index"} - rows[0].keys()
    if lacking:
        raise RunFolderError(f"{files[0]} has no column {min(lacking)}; copy it again")
    return sorted(rows, key=lambda row: int(row["episode_index"]))


def _table(file: Path, without: str = "\n") -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise RunFolderError(f"{file} is not there; copy the dataset again")
    try:
        names = [name for name in pq.read_schema(file).names if not name.startswith(without)]
        return pq.ParquetFile(file).read(columns=names)
    except (pa.ArrowException, OSError) as error:
        raise RunFolderError(
            f"{file} cannot be read as parquet ({str(error).splitlines()[0]}); copy it again"
        ) from error
