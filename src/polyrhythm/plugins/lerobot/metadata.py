"""Reads and validates the small files of a dataset: info.json, tasks.parquet and meta/episodes.

All content is untrusted: a value that is missing, null, of another type or not finite raises an error with its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyrhythm.config.explain import explain
from polyrhythm.errors import MissingError, RunFolderError
from polyrhythm.files import inner_path, parse_json
from polyrhythm.plugins.lerobot import layout

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
    return dict(zip(_whole(table, "task_index", file), sentences, strict=True))


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
    table = read_table(file, without="stats/")

    def paths(prefix: str, pattern: str, setting: str, **more: str) -> list[Path]:
        chunks, files = (_whole(table, f"{prefix}/{name}", file) for name in ("chunk_index", "file_index"))
        return [
            _file_of(folder, pattern, setting, {"chunk_index": chunk, "file_index": number, **more})
            for chunk, number in zip(chunks, files, strict=True)
        ]

    numbers, lengths = _whole(table, "episode_index", file), _whole(table, "length", file)
    tasks = _sentences(table, file)
    data = paths("data", info.data_path, "data_path")
    videos: list[dict[str, VideoPart]] = [{} for _ in numbers]
    for key in cameras:
        if info.video_path is None:
            raise RunFolderError(f"{folder / layout.INFO} has no video_path, and {key} is a video; copy it again")
        times = _times(table, f"videos/{key}/from_timestamp", file)
        for row, (path, first_s) in enumerate(
            zip(paths(f"videos/{key}", info.video_path, "video_path", video_key=key), times, strict=True)
        ):
            videos[row][key] = VideoPart(path, first_s)
    return [Episode(*row) for row in zip(numbers, lengths, tasks, data, videos, strict=True)]


def _sentences(table: Any, file: Path) -> list[tuple[str, ...]]:
    if "tasks" not in table.column_names:
        return [()] * len(table)
    found = [(row,) if isinstance(row, str) else tuple(row or ()) for row in table["tasks"].to_pylist()]
    for row in found:
        if not all(isinstance(sentence, str) for sentence in row):
            raise RunFolderError(f"{file}: tasks has {list(row)}; it must be a list of sentences")
    return found


def _whole(table: Any, name: str, file: Path) -> list[int]:
    """A column of non-negative whole numbers, which pandas may have stored as floats."""
    values = _column(table, name, file)
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value // 1:
            raise RunFolderError(f"{file}: {name} of row {row} is {value!r}; it must be a whole number, at least 0")
    return [int(value) for value in values]


def _times(table: Any, name: str, file: Path) -> list[float]:
    values = _column(table, name, file)
    for row, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise RunFolderError(f"{file}: {name} of row {row} is {value!r}; it must be a time in seconds, at least 0")
    return [float(value) for value in values]


def _column(table: Any, name: str, file: Path) -> list[Any]:
    if name not in table.column_names:
        raise RunFolderError(f"{file} has no column {name}; copy it again")
    return list(table[name].to_pylist())


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


def read_table(file: Path, without: str = "\n") -> Any:
    """A parquet file without the columns that start with `without`. RunFolderError: it is missing or damaged."""
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
