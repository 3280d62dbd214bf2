"""Checks that a folder is a dataset and that it fits an environment, from its small files only.

All content is untrusted: a value that is missing, null, of another type or not finite raises an error with its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyrhythm.config.explain import explain
from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import ConfigError, MissingError, RunFolderError
from polyrhythm.files import inner_path, parse_json
from polyrhythm.plugins.lerobot import layout
from polyrhythm.plugins.lerobot.writing import Journal
from polyrhythm.sources import local_folder
from polyrhythm.specs import EnvSpec

_CONVERT = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"
_FIELD = re.compile(r"\{(\w+)(?::0(\d)d)?\}")


class Feature(BaseModel):
    """One array of info.json; keys that are not named here are ignored."""

    model_config = ConfigDict(frozen=True)

    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    names: Any = None

    @property
    def is_camera(self) -> bool:
        """Whether its frames are images, in parquet or in a video."""
        return self.dtype in ("image", "video")

    @property
    def size(self) -> list[int]:
        """The shape; for a camera always [H,W,C], even if the dataset puts channels first."""
        names = next(iter(self.names.values()), None) if isinstance(self.names, Mapping) else self.names
        first = names[0] if isinstance(names, list) and names else ""
        if self.is_camera and str(first).startswith("channel"):
            return [*self.shape[1:], self.shape[0]]
        return list(self.shape)


class DatasetInfo(BaseModel):
    """The content of info.json, as far as it is used."""

    model_config = ConfigDict(frozen=True)

    codebase_version: str
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    features: dict[str, Feature]
    data_path: str = layout.DATA
    video_path: str | None = None


@dataclass(frozen=True, slots=True)
class VideoPart:
    """An episode's section of a video. first_s: time of its first frame in the file, in seconds."""

    file: Path
    first_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """One row of meta/episodes. length: number of frames; tasks: its sentences, empty if the dataset does not list
    them; videos: by key, of the requested cameras."""

    number: int
    length: int
    tasks: tuple[str, ...]
    file: Path
    videos: Mapping[str, VideoPart]


def read_info(folder: Path) -> DatasetInfo:
    """Content of info.json. MissingError: the folder does not exist; RunFolderError: the file is missing, damaged or
    of another version."""
    file = folder / layout.INFO
    if not folder.is_dir():
        raise MissingError(f"{folder} is not there; name the folder of a dataset")
    if not file.is_file():
        raise RunFolderError(f"{folder} has no {layout.INFO}: it is not a LeRobot dataset; name the folder that has it")
    try:
        found = parse_json(file.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        raise RunFolderError(f"{file} is damaged ({type(error).__name__}: {error}); copy it again") from error
    if not isinstance(found, dict):
        raise RunFolderError(f"{file} is damaged (it holds a {type(found).__name__}); copy it again")
    version = str(found.get("codebase_version", ""))
    if version.removeprefix("v").partition(".")[0] != "3":
        convert = f"; convert it with lerobot: {_CONVERT}" if version.removeprefix("v")[:1] == "2" else "; name another"
        raise RunFolderError(f"{folder} has version {version or 'nothing'}, and only v3 is read{convert}")
    try:
        return DatasetInfo.model_validate({name: value for name, value in found.items() if value is not None})
    except ValidationError as error:
        raise RunFolderError(f"{file}: {explain(error, DatasetInfo)[0]}; correct it or copy it again") from error


def read_tasks(folder: Path) -> dict[int, str]:
    """task_index → sentence."""
    file = folder / layout.TASKS
    table = read_table(file)
    texts = [name for name in table.column_names if str(table[name].type).endswith("string")]
    # lerobot keeps the sentences in the index, whose column pandas names so if it has no name.
    known = [name for name in ("task", "__index_level_0__") if name in texts]
    if "task_index" not in table.column_names or not (known or len(texts) == 1):
        raise RunFolderError(f"{file} needs the columns task_index and task; it has {', '.join(table.column_names)}")
    sentences = table[(known or texts)[0]].to_pylist()
    if None in sentences:
        raise RunFolderError(f"{file}: the sentence of row {sentences.index(None)} is null; copy it again")
    return dict(zip(_numbers(table, "task_index", file), sentences, strict=True))


def read_episodes(folder: Path, info: DatasetInfo, cameras: Sequence[str]) -> list[Episode]:
    """All non-empty episodes, by number. cameras: keys of videos. RunFolderError: there are none, a number occurs
    twice, or a row has an invalid value."""
    found: dict[int, Episode] = {}
    files = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
    for file in files:
        for episode in _rows(file, folder, info, cameras):
            if found.setdefault(episode.number, episode) is not episode:
                raise RunFolderError(f"{file} has episode {episode.number} twice; copy the dataset again")
    if not found:
        raise RunFolderError(f"{folder} has no episode in meta/episodes; copy it again, or record it to its end")
    return [found[number] for number in sorted(found) if found[number].length]


def _rows(file: Path, folder: Path, info: DatasetInfo, cameras: Sequence[str]) -> list[Episode]:
    table = read_table(file, lambda name: not name.startswith("stats/"))

    def paths(prefix: str, pattern: str, setting: str, **more: str) -> list[Path]:
        chunks, files = (_numbers(table, f"{prefix}/{name}", file) for name in ("chunk_index", "file_index"))
        return [
            _file_of(folder, pattern, setting, {"chunk_index": chunk, "file_index": number, **more})
            for chunk, number in zip(chunks, files, strict=True)
        ]

    numbers, lengths = _numbers(table, "episode_index", file), _numbers(table, "length", file)
    tasks: list[tuple[str, ...]] = [()] * len(table)
    if "tasks" in table.column_names:
        tasks = [(row,) if isinstance(row, str) else tuple(row or ()) for row in table["tasks"].to_pylist()]
    for row in tasks:
        if not all(isinstance(sentence, str) for sentence in row):
            raise RunFolderError(f"{file}: tasks has {list(row)}; it must be a list of sentences")
    data = paths("data", info.data_path, "data_path")
    videos: list[dict[str, VideoPart]] = [{} for _ in numbers]
    for key in cameras:
        if info.video_path is None:
            raise RunFolderError(f"{folder / layout.INFO} has no video_path, and {key} is a video; copy it again")
        times = _numbers(table, f"videos/{key}/from_timestamp", file, whole=False)
        files = paths(f"videos/{key}", info.video_path, "video_path", video_key=key)
        for found, path, first_s in zip(videos, files, times, strict=True):
            found[key] = VideoPart(path, first_s)
    return [Episode(*fields) for fields in zip(numbers, lengths, tasks, data, videos, strict=True)]


def _numbers(table: Any, name: str, file: Path, *, whole: bool = True) -> list[Any]:
    """A column of non-negative whole numbers, which pandas may have stored as floats, or of times in seconds."""
    if name not in table.column_names:
        raise RunFolderError(f"{file} has no column {name}; copy it again")
    values = list(table[name].to_pylist())
    for row, value in enumerate(values):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (whole and value != value // 1):
            kind = "a whole number" if whole else "a time in seconds"
            raise RunFolderError(f"{file}: {name} of row {row} is {value!r}; it must be {kind}, at least 0")
    return [int(value) if whole else float(value) for value in values]


def _file_of(folder: Path, pattern: str, setting: str, values: Mapping[str, int | str]) -> Path:
    """The file in the folder that a pattern of info.json names, such as `data/chunk-{chunk_index:03d}/...`."""

    def filled(field: re.Match[str]) -> str:
        value = values.get(field[1])
        return field[0] if value is None else str(value).rjust(int(field[2] or 0), "0")

    name = _FIELD.sub(filled, pattern)
    try:
        if "{" in name:
            raise ValueError("an unknown field")
        return inner_path(folder, name, folders=True)
    except ValueError as error:
        raise RunFolderError(
            f"{folder / layout.INFO}: {setting} = {pattern!r}: it must be a path inside the folder, with no fields but "
            f"{', '.join(values)}; correct it or copy it again"
        ) from error


def read_table(file: Path, keeps: Callable[[str], bool] = lambda _: True) -> Any:
    """The columns of a parquet file whose names pass `keeps`. RunFolderError: it is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise RunFolderError(f"{file} is not there; copy the dataset again")
    try:
        return pq.ParquetFile(file).read(columns=list(filter(keeps, pq.read_schema(file).names)))
    except (pa.ArrowException, OSError) as error:
        raise RunFolderError(
            f"{file} cannot be read as parquet ({str(error).splitlines()[0]}); copy it again"
        ) from error


@dataclass(frozen=True, slots=True)
class CheckedDataset:
    """A dataset that fits. keys: name of an array -> its feature's key; sentences: task_index -> sentence; tasks:
    task_index -> the environment's task, for the chosen tasks; episodes: those that may pass the filters."""

    folder: Path
    info: DatasetInfo
    keys: Mapping[str, str]
    sentences: Mapping[int, str]
    tasks: Mapping[int, int]
    episodes: list[Episode]

    def __str__(self) -> str:
        return f"{len(self.episodes)} episodes of {self.folder}"


def check_dataset(settings: DatasetSettings, spec: EnvSpec, action_repeat: int) -> CheckedDataset:
    """Open a dataset for this environment.

    MissingError: the folder or a package is missing; RunFolderError: it is not a v3.0 dataset, or files are missing or
    damaged; ConfigError: its arrays or tasks differ from the environment's.
    """
    layout.require_pyarrow()
    folder = local_folder(settings.folder, "dataset", "demonstrations.dataset.folder")
    info = read_info(folder)
    keys = layout.keys_of(spec, settings.keys)
    unknown = settings.keys.keys() - spec.observation.keys()
    if unknown:
        raise ConfigError(
            f"demonstrations.dataset.keys = {min(unknown)}: the environment has no such array but "
            f"{', '.join(spec.observation)}; name one of these"
        )
    _check_arrays(folder, info.features, keys, spec)
    recorded: dict[str, Any] = {}  # of a dataset from elsewhere
    if (folder / layout.OURS).is_file():
        try:
            recorded = Journal.load(folder).recorded
        except (OSError, TypeError, ValueError) as error:
            raise RunFolderError(f"{folder / layout.OURS} cannot be read ({error}); copy it again") from error
    if recorded.get("action_repeat", action_repeat) != action_repeat:
        raise ConfigError(
            f"rollout.action_repeat = {action_repeat}: the demonstrations in {folder} hold each action for "
            f"{recorded['action_repeat']} steps; set it to that"
        )
    if settings.only_success and layout.SUCCESS not in info.features:
        raise ConfigError(
            f"demonstrations.dataset.only_success = true: {folder} has no {layout.SUCCESS}; set it to false"
        )
    return _with_episodes(folder, settings, spec, info, keys)


def _check_arrays(folder: Path, features: Mapping[str, Feature], keys: Mapping[str, str], spec: EnvSpec) -> None:
    """ConfigError: the features differ from the environment's arrays and action."""
    for name, key in keys.items():
        array = spec.observation[name]
        if key not in features:
            raise ConfigError(
                f"{folder} has no {key}, which would be the environment's {name}; it has "
                f"{', '.join(k for k in features if k.startswith('observation')) or 'no observations'}: name one in "
                "demonstrations.dataset.keys"
            )
        feature, image = features[key], layout.image_shape(array)
        expected = [math.prod(array.shape)] if image is None else list(image)
        if feature.size != expected or (image is None) == feature.is_camera:
            raise ConfigError(
                f"{folder}: {key} is {feature.dtype} {feature.size}, the environment's {name} is "
                f"{'image' if image else array.dtype} {expected}; make the environment's equal, or name another key in "
                "demonstrations.dataset.keys"
            )
        if feature.dtype == "video":
            layout.require_video(folder)
    action = features[layout.ACTION].size if layout.ACTION in features else None
    if action != [spec.action.dim]:
        raise ConfigError(
            f"{folder}: an action is of {action or 'no'} entries, the environment's of [{spec.action.dim}]; name a "
            "dataset of this robot"
        )


def _with_episodes(
    folder: Path, settings: DatasetSettings, spec: EnvSpec, info: DatasetInfo, keys: Mapping[str, str]
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
    episodes = read_episodes(folder, info, [key for key in keys.values() if info.features[key].dtype == "video"])
    used = {sentence for episode in episodes for sentence in episode.tasks}
    strange = sorted(used - known.keys())
    if strange and not settings.tasks:
        raise ConfigError(
            f"{folder} has the task {strange[0]!r}, which the environment does not have "
            f"({', '.join(known)}); choose tasks with demonstrations.dataset.tasks, or name another dataset"
        )
    tasks = {index: known[words] for index, words in sentences.items() if known.get(words) in chosen}
    names = {sentences[index] for index in tasks}
    kept = [episode for episode in episodes if not episode.tasks or names & set(episode.tasks)]
    if not kept:
        raise ConfigError(f"{folder} has no episode of the chosen tasks; set demonstrations.dataset.tasks otherwise")
    files = {episode.file for episode in kept} | {part.file for episode in kept for part in episode.videos.values()}
    if missing := sorted(file for file in files if not file.is_file()):
        raise RunFolderError(
            f"{missing[0]} is not there (missing: {len(missing)} of {len(files)} files); copy the dataset again"
        )
    for key, part in kept[0].videos.items():
        height, width, _ = info.features[key].size
        layout.check_size(part.file, (height, width))
    return CheckedDataset(folder, info, keys, sentences, tasks, kept)
