"""Reads a dataset as chunk steps to imitate: all of it into memory, as supervised training takes it.

The chunk step that begins at frame t has the observation of t and the actions of t..t+C-1; after the episode's last
frame its last action is repeated. `every: n` begins one at every n-th frame: with n = C the steps are those that
`polyrhythm demos --out FILE.npz` records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.pipeline.lerobot import layout
from polyrhythm.pipeline.lerobot.checking import CheckedDataset, check_dataset, data_file, inner_file, video_file
from polyrhythm.pipeline.lerobot.images import VideoFrames, as_array, decoded
from polyrhythm.specs import INSTRUCTION, PROGRESS, ArraySpec, EnvSpec
from polyrhythm.specs.finite import first_not_finite
from polyrhythm.training.demonstrations import Demonstrations

log = logging.getLogger(__name__)


def read_demonstrations(settings: DatasetSettings, spec: EnvSpec, chunk: int, action_repeat: int) -> Demonstrations:
    """The chosen episodes of a dataset for a policy with chunks of C = `chunk` actions.

    Raises what `check_dataset` raises; ConfigError if the filters leave nothing; RunFolderError if a file is damaged or
    a number is NaN or infinite.
    """
    dataset = check_dataset(settings, spec, action_repeat)
    parts: list[tuple[dict[str, NDArray[Any]], NDArray[Any]]] = []
    taken = dict.fromkeys(range(len(spec.tasks)), 0)
    with closing(VideoFrames()) as videos:
        for row, columns in _episodes(dataset, settings, taken):
            begins = np.arange(0, len(columns["frame_index"]), settings.every)
            task = dataset.tasks[int(columns["task_index"][0])]
            obs = {
                name: _array(dataset, videos, row, key, columns, begins, spec.observation[name].shape).astype(
                    spec.observation[name].dtype, copy=False
                )
                for name, key in dataset.keys.items()
            }
            obs[INSTRUCTION] = np.full(len(begins), task, np.int64)
            done = np.minimum(begins * action_repeat / spec.max_steps, 1.0)
            obs[PROGRESS] = done.astype(np.float32)
            parts.append((obs, _chunks(columns[layout.ACTION], begins, chunk, spec)))
            _refuse_not_finite(dataset, row, parts[-1])
    if not parts:
        raise ConfigError(
            f"no episode of {dataset.folder} passes the filters (only_success, tasks); change demonstrations.dataset"
        )
    log.info("demonstrations: %d episodes of %s", len(parts), dataset.folder)
    return Demonstrations(
        {name: np.concatenate([obs[name] for obs, _ in parts]) for name in parts[0][0]},
        np.concatenate([actions for _, actions in parts]),
        tuple(task.name for task in spec.tasks),
        action_repeat,
    )


def _episodes(
    dataset: CheckedDataset, settings: DatasetSettings, taken: dict[int, int]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Row and columns of each episode that passes the filters; file by file. taken: episodes so far by task."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = dataset.info["features"]
    names = [layout.ACTION, *layout.INDICES, *(k for k in dataset.keys.values() if features[k]["dtype"] != "video")]
    if settings.only_success:
        names.append(layout.SUCCESS)
    for file, rows in groupby(dataset.episodes, lambda row: data_file(dataset.folder, dataset.info, row)):
        if settings.max_episodes and all(taken[task] >= settings.max_episodes for task in dataset.tasks.values()):
            return
        try:
            table = pq.ParquetFile(file).read(columns=names)
            lacking = set(names) - set(table.column_names)
        except (pa.ArrowException, OSError) as error:
            words = str(error).splitlines()[0]
            raise RunFolderError(f"{file} cannot be read as parquet ({words}); copy it again") from error
        if lacking:
            raise RunFolderError(f"{file} has no column {min(lacking)}; copy it again")
        numbers = table["episode_index"].to_numpy()
        for row in rows:
            places = np.flatnonzero(numbers == row["episode_index"])
            if len(places) != row["length"]:
                raise RunFolderError(
                    f"{file} has {len(places)} frames of episode {row['episode_index']} and should have "
                    f"{row['length']}; copy it again"
                )
            found = {name: table[name].take(places) for name in names}
            columns = {name: x if _is_image(features, name) else _numbers(x) for name, x in found.items()}
            task = dataset.tasks.get(int(columns["task_index"][0]))
            full = bool(settings.max_episodes) and task is not None and taken[task] >= settings.max_episodes
            if task is None or full or (settings.only_success and not columns[layout.SUCCESS].any()):
                continue
            taken[task] += 1
            yield row, columns


def _is_image(features: Mapping[str, Any], name: str) -> bool:
    return bool(features.get(name, {}).get("dtype") == "image")


def _numbers(column: Any) -> NDArray[Any]:
    """A column of numbers, or of lists of equal length: [T] or [T,D]."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat.reshape(len(column), -1))
    return np.asarray(column.to_numpy())


def _array(
    dataset: CheckedDataset,
    videos: VideoFrames,
    row: Mapping[str, Any],
    key: str,
    columns: Mapping[str, Any],
    begins: NDArray[np.intp],
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """The environment's array [n, *shape] at the frames where chunk steps begin."""
    kind = dataset.info["features"][key]["dtype"]
    if kind == "image":
        stored = columns[key]
        return as_array(np.stack([decoded(_bytes(dataset, stored[int(t)].as_py())) for t in begins]), shape)
    if kind == "video":
        image = layout.image_shape(ArraySpec(shape, "uint8"))
        assert image is not None
        return as_array(_video(dataset, videos, row, key, begins, image[:2]), shape)
    return np.asarray(columns[key][begins].reshape(len(begins), *shape))


def _bytes(dataset: CheckedDataset, stored: Mapping[str, Any]) -> bytes:
    """The image's file, which is in the column or beside it."""
    if stored.get("bytes"):
        return bytes(stored["bytes"])
    file = inner_file(dataset.folder, stored.get("path"), "data")
    if not file.is_file():
        raise RunFolderError(f"{dataset.folder}: the image {stored.get('path')} is not there; copy the dataset again")
    return file.read_bytes()


def _video(
    dataset: CheckedDataset,
    videos: VideoFrames,
    row: Mapping[str, Any],
    key: str,
    begins: NDArray[np.intp],
    size: tuple[int, int],
) -> NDArray[np.uint8]:
    """A camera's frames of an episode, which begins at `from_timestamp` seconds of its file."""
    first = round(float(row[f"videos/{key}/from_timestamp"]) * float(dataset.info["fps"]))
    return videos.take(key, video_file(dataset.folder, dataset.info, row, key), [first + int(t) for t in begins], size)


def _chunks(actions: NDArray[Any], begins: NDArray[np.intp], chunk: int, spec: EnvSpec) -> NDArray[Any]:
    """Action chunks [n,C,A]; past the end the last action is repeated."""
    frames = np.minimum(begins[:, None] + np.arange(chunk), len(actions) - 1)
    return np.asarray(actions.reshape(len(actions), spec.action.dim)[frames], spec.action.dtype)


def _refuse_not_finite(
    dataset: CheckedDataset, row: Mapping[str, Any], part: tuple[Mapping[str, NDArray[Any]], NDArray[Any]]
) -> None:
    obs, actions = part
    floating = {name: x for name, x in (*obs.items(), ("action", actions)) if x.dtype.kind == "f"}
    for name in first_not_finite(floating).values():
        raise RunFolderError(
            f"{dataset.folder}: {name} of episode {row['episode_index']} is not finite; leave that episode out"
        )
