"""Writes a dataset turn by turn: the episodes of a turn are one file of frames and one of episodes.

Invariant: everything that meta/polyrhythm.json lists is complete. It is written last, so a kill loses at most one turn,
whose files the next turn overwrites; info.json, written just before it, counts the same episodes or one more turn, all
of whose files exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.files import atomic_write
from polyrhythm.plugins.demonstrations.episodes import DemoEpisode
from polyrhythm.plugins.lerobot import layout
from polyrhythm.specs import EnvSpec

#: Most images, evenly spread over the frames, of which a camera's statistics are made.
_IMAGES = 200


@dataclass(slots=True)
class Journal:
    """Content of meta/polyrhythm.json. recorded: settings that must be equal to resume; outcomes: [task, index,
    success (-1: not reported), episode in the dataset or -1] of each played episode; files: number of files of
    episodes."""

    recorded: dict[str, Any]
    outcomes: list[list[int]] = field(default_factory=list)
    episodes: int = 0
    frames: int = 0
    files: int = 0

    def save(self, folder: Path) -> None:
        write_json(folder / layout.OURS, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Journal:
        """OSError or ValueError: it cannot be read."""
        found = json.loads((folder / layout.OURS).read_text(encoding="utf-8"))
        try:
            return cls(**found)
        except TypeError as error:
            raise ValueError(f"{folder / layout.OURS} is damaged") from error


class DatasetWriter:
    """Appends turns of episodes to a dataset folder. fps: for the timestamps."""

    def __init__(self, folder: Path, spec: EnvSpec, journal: Journal, fps: int) -> None:
        self._folder, self._spec, self._fps = folder, spec, fps
        self._keys = layout.keys_of(spec)
        self._features = layout.features_of(spec)
        self.journal = journal

    def add(self, turn: Sequence[DemoEpisode], keeps: Sequence[bool]) -> None:
        """Write the episodes of a turn that are kept, and list the outcomes of all."""
        first, start, place = self.journal.episodes, self.journal.frames, layout.file_place(self.journal.files)
        kept = [episode for episode, keep in zip(turn, keeps, strict=True) if keep]
        if kept:
            tables, rows = [], []
            for number, episode in enumerate(kept, first):
                columns, row = self._tables(episode, number, start, place)
                tables.append(columns)
                rows.append(row)
                start += len(episode.labels)
            joined = {key: [x for columns in tables for x in columns[key]] for key in tables[0]}
            self._write(layout.DATA, place, joined, typed=True)
            self._write(layout.EPISODES, place, {key: [row[key] for row in rows] for key in rows[0]}, typed=False)
            self.journal.frames = start
            self.journal.files += 1
            self.journal.episodes += len(kept)
        numbers = iter(range(first, first + len(kept)))
        for episode, keep in zip(turn, keeps, strict=True):
            success = -1 if episode.success is None else int(episode.success)
            self.journal.outcomes.append([episode.task, episode.index, success, next(numbers) if keep else -1])
        self.write_meta()
        self.journal.save(self._folder)

    def write_meta(self) -> None:
        write_tasks(self._folder / layout.TASKS, layout.sentences_of(self._spec))
        info = {
            "codebase_version": layout.VERSION,
            "robot_type": None,
            "total_episodes": self.journal.episodes,
            "total_frames": self.journal.frames,
            "total_tasks": len(self._spec.tasks),
            "chunks_size": layout.CHUNK_FILES,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{self.journal.episodes}"},
            "data_path": layout.DATA,
            "video_path": None,
            "features": self._features,
        }
        write_json(self._folder / layout.INFO, info)

    def write_statistics(self) -> None:
        """Write stats.json over all frames; for a camera over at most 200 evenly spaced images."""
        import pyarrow.parquet as pq

        files = [self._folder / layout.DATA.format(**layout.file_place(number)) for number in range(self.journal.files)]
        found: dict[str, Any] = {}
        every = 1 + self.journal.frames // _IMAGES
        for key, feature in self._features.items():
            if feature["dtype"] == "image":
                images, first = [], 0
                for file in files:
                    column = pq.read_table(file, columns=[key])[key]
                    spread = range(-first % every, len(column), every)
                    images += [layout.decoded(column[i].as_py()["bytes"]) for i in spread]
                    first += len(column)
                found[key] = image_statistics(np.stack(images))
            else:
                parts = [np.array(pq.read_table(file, columns=[key])[key].to_pylist()) for file in files]
                found[key] = array_statistics(np.concatenate(parts))
        write_json(self._folder / layout.STATS, found)

    def _tables(
        self, episode: DemoEpisode, number: int, start: int, place: Mapping[str, int]
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """The episode's columns of frames, and its row in meta/episodes."""
        length = len(episode.labels)
        steps = np.arange(length)
        arrays: dict[str, NDArray[Any]] = {
            layout.ACTION: np.stack(episode.labels)[:, 0].astype(self._spec.action.dtype),
            layout.DONE: steps == length - 1,
            layout.SUCCESS: (steps >= episode.success_at) & (episode.success_at >= 0),
            "timestamp": (steps / self._fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, number),
            "index": steps + start,
            "task_index": np.full(length, episode.task),
        }
        columns, found = {}, {}
        for name, key in self._keys.items():
            seen = np.stack([observation[name] for observation in episode.obs])
            if self._features[key]["dtype"] == "image":
                images = layout.as_images(seen, tuple(self._features[key]["shape"]))
                columns[key] = [{"bytes": layout.png(image), "path": None} for image in images]
                found[key] = image_statistics(images[:: 1 + length // _IMAGES])
            else:
                arrays[key] = seen.reshape(length, -1)
        for key, array in arrays.items():
            single = self._features[key]["shape"] == [1]
            columns[key] = (array.reshape(length) if single else array).tolist()
            found[key] = array_statistics(array)
        row = {
            "episode_index": number,
            "tasks": [layout.sentences_of(self._spec)[episode.task]],
            "length": length,
            "dataset_from_index": start,
            "dataset_to_index": start + length,
            **{f"{of}/{name}": n for of in ("data", "meta/episodes") for name, n in place.items()},
            "seed": episode.seed,
            "noisy": episode.noise is not None,
            "success": episode.success_at >= 0,
            **{f"stats/{key}/{stat}": x for key, stats in found.items() for stat, x in stats.items()},
        }
        return columns, row

    def _write(self, pattern: str, place: Mapping[str, int], columns: Mapping[str, Any], *, typed: bool) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {}
        for key, feature in self._features.items() if typed else ():
            if feature["dtype"] == "image":
                types[key] = pa.struct({"bytes": pa.binary(), "path": pa.string()})
                continue
            kind = pa.from_numpy_dtype(np.dtype(feature["dtype"]))
            types[key] = kind if list(feature["shape"]) == [1] else pa.list_(kind, feature["shape"][0])
        arrays = {key: pa.array(values, types.get(key)) for key, values in columns.items()}
        path = self._folder / pattern.format(**place)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as unfinished:
            pq.write_table(pa.table(arrays), unfinished)


def write_tasks(path: Path, sentences: Sequence[str]) -> None:
    """Write tasks.parquet: a pandas table whose index is the sentence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = "__index_level_0__"
    kinds = {"task_index": ("task_index", "int64"), index: (None, "object")}
    columns = [
        {"name": name, "field_name": stored, "pandas_type": "int64" if kind == "int64" else "unicode"}
        | {"numpy_type": kind, "metadata": None}
        for stored, (name, kind) in kinds.items()
    ]
    pandas = {"index_columns": [index], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    table = pa.table({"task_index": pa.array(range(len(sentences)), pa.int64()), index: list(sentences)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), unfinished)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


#: Linearly interpolated (`numpy.quantile`). Of an array statistics are over all frames, entry by entry; of an image by
#: channel, over its pixels divided by 255. std is the population's.
QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def array_statistics(values: NDArray[Any]) -> dict[str, Any]:
    """Statistics of an array [N,D] over the N frames: lists of D numbers, and count [1]."""
    exact = np.asarray(values, np.float64).reshape(len(values), -1)
    return _statistics(exact, len(values), (exact.shape[1],))


def image_statistics(images: NDArray[np.uint8]) -> dict[str, Any]:
    """Statistics by channel of images [N,H,W,C], scaled to 0..1: nested lists [C,1,1], and count [1] of images."""
    channels = images.shape[-1]
    return _statistics(images.reshape(-1, channels) / 255.0, len(images), (channels, 1, 1))


def _statistics(values: NDArray[np.float64], count: int, shape: tuple[int, ...]) -> dict[str, Any]:
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    found = {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }
    return {name: x.reshape(shape).tolist() for name, x in found.items()} | {"count": [count]}
