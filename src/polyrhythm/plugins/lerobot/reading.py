"""Reads a dataset as chunk steps for imitation: entirely into memory, for supervised training.

The chunk step at frame t has the observation of t and the actions of t..t+C-1; after the episode's last frame its last
action is repeated. `every: n` starts a chunk step at every n-th frame: n = C gives the steps that `polyrhythm demos
--out FILE.npz` records.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.files import inner_path
from polyrhythm.plugins.demonstrations.imitation import Demonstrations
from polyrhythm.plugins.lerobot import layout
from polyrhythm.plugins.lerobot.checking import CheckedDataset, Episode, check_dataset, read_table
from polyrhythm.readable import counted
from polyrhythm.specs import INSTRUCTION, PROGRESS, EnvSpec
from polyrhythm.specs.finite import first_not_finite

log = logging.getLogger(__name__)

#: Share of actions outside the environment's bounds above which a warning says so.
_MOST_BEYOND = 0.1


def read_demonstrations(settings: DatasetSettings, spec: EnvSpec, chunk: int, action_repeat: int) -> Demonstrations:
    """The chosen episodes of a dataset for a policy with chunks of C = `chunk` actions.

    Errors of `check_dataset`; ConfigError: no episode passes the filters; RunFolderError: a file is damaged, or a
    number is NaN or infinite.
    """
    dataset = check_dataset(settings, spec, action_repeat)
    parts: list[tuple[dict[str, NDArray[Any]], NDArray[Any]]] = []
    taken = dict.fromkeys(range(len(spec.tasks)), 0)
    episodes = 0
    with closing(layout.VideoFrames()) as videos:
        for episode, columns in _episodes(dataset, settings, taken):
            begins, tasks = _begins(dataset, settings, episode, columns, taken)
            if not len(begins):
                continue
            episodes += 1
            where = f"{dataset.folder}, episode {episode.number}"
            obs = {
                name: _exactly(
                    _array(dataset, videos, episode, key, columns, begins, spec.observation[name].shape),
                    spec.observation[name].dtype,
                    f"{where}: {key}",
                )
                for name, key in dataset.keys.items()
            }
            obs[INSTRUCTION] = tasks
            obs[PROGRESS] = np.minimum(begins * action_repeat / spec.max_steps, 1.0).astype(np.float32)
            actions = _exactly(columns[layout.ACTION], spec.action.dtype, f"{where}: an action")
            # After the end the last action is repeated: [n,C,A].
            steps = np.minimum(begins[:, None] + np.arange(chunk), len(actions) - 1)
            parts.append((obs, np.asarray(actions[steps])))
            _check_values(where, parts[-1], spec)
    if not parts:
        raise ConfigError(
            f"no episode of {dataset.folder} passes the filters (only_success, tasks); change demonstrations.dataset"
        )
    log.info("demonstrations: %d episodes of %s", episodes, dataset.folder)
    actions = np.concatenate([actions for _, actions in parts])
    if spec.action.kind == "continuous":
        beyond = ((actions < np.array(spec.action.low)) | (actions > np.array(spec.action.high))).any(-1).mean()
        if beyond > _MOST_BEYOND:
            log.warning(
                "%.0f%% of the actions of %s are outside the environment's bounds; they are imitated as they are",
                100 * beyond,
                dataset.folder,
            )
    return Demonstrations(
        {name: np.concatenate([obs[name] for obs, _ in parts]) for name in parts[0][0]},
        actions,
        tuple(task.name for task in spec.tasks),
        action_repeat,
    )


def _episodes(
    dataset: CheckedDataset, settings: DatasetSettings, taken: dict[int, int]
) -> Iterator[tuple[Episode, dict[str, Any]]]:
    """Each episode with its columns in frame order; reads file by file until all tasks have enough."""
    features = dataset.info.features
    names = [layout.ACTION, *layout.INDICES, *(k for k in dataset.keys.values() if features[k].dtype != "video")]
    if settings.only_success:
        names.append(layout.SUCCESS)
    for file, episodes in groupby(dataset.episodes, lambda episode: episode.file):
        if settings.max_episodes and all(taken[task] >= settings.max_episodes for task in dataset.tasks.values()):
            return
        table = read_table(file, names.__contains__)
        if lacking := set(names) - set(table.column_names):
            raise RunFolderError(f"{file} has no column {min(lacking)}; copy it again")
        numbers = _numbers(table["episode_index"], 1, f"{file}: episode_index")
        for episode in episodes:
            places = np.flatnonzero(numbers == episode.number)
            where = f"{file}, episode {episode.number}"
            frames = _numbers(table["frame_index"].take(places), 1, f"{where}: frame_index")
            if len(places) != episode.length or sorted(frames) != list(range(episode.length)):
                raise RunFolderError(
                    f"{where} has {len(places)} frames and should have {episode.length}, numbered from 0; copy it again"
                )
            found = {name: table[name].take(places[np.argsort(frames)]) for name in names}
            yield episode, {name: _values(dataset, column, name, where) for name, column in found.items()}


def _values(dataset: CheckedDataset, column: Any, name: str, where: str) -> Any:
    """A column's numbers [T,D], or [T] if it is not a feature; images as stored."""
    feature = dataset.info.features.get(name)
    if feature is not None and feature.is_camera:
        return column.to_pylist()
    is_array = feature is not None and name not in layout.INDICES and name != layout.SUCCESS
    size = math.prod(feature.shape) if feature is not None and is_array else 1
    numbers = _numbers(column, size, f"{where}: {name}")
    return numbers.reshape(-1, size) if is_array else numbers


def _numbers(column: Any, size: int, what: str) -> NDArray[Any]:
    """All numbers of a column whose rows have `size` each, nested or scalar. RunFolderError: a row has another
    number of values, is null, or contains something else."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, values = len(column), pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    lists = (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_large_list)
    while any(is_kind(values.type) for is_kind in lists):
        if values.null_count:
            raise RunFolderError(f"{what} is null in a frame; correct the dataset")
        if pc.count_distinct(pc.list_value_length(values)).as_py() > 1:
            raise RunFolderError(f"{what} has lists of different lengths; correct the dataset")
        values = values.flatten()
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    if values.null_count or not any(is_kind(values.type) for is_kind in kinds):
        found = "null in a frame" if values.null_count else f"of type {values.type}"
        raise RunFolderError(f"{what} is {found}; it must be {counted(size, 'number')} in each frame")
    if len(values) != rows * size:
        raise RunFolderError(
            f"{what} has {len(values) / max(rows, 1):g} numbers in a frame, and info.json says {size}; correct one"
        )
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _begins(
    dataset: CheckedDataset,
    settings: DatasetSettings,
    episode: Episode,
    columns: Mapping[str, Any],
    taken: dict[int, int],
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """The frames at which chunk steps of chosen tasks begin, and their tasks [n]; both empty if no step passes the
    filters. Counts the episode for each of its tasks in `taken`."""
    where = f"{dataset.folder}, episode {episode.number}"
    indices = columns["task_index"]
    present = {int(index) for index in np.unique(indices)}
    for index in sorted(present):
        sentence = dataset.sentences.get(index)
        if sentence is None or (episode.tasks and sentence not in episode.tasks):
            raise RunFolderError(
                f"{where}: a frame has task_index {index} ({sentence or 'no sentence in ' + layout.TASKS}), and "
                f"meta/episodes names {', '.join(episode.tasks) or 'no task'}; correct the dataset"
            )
    if settings.only_success:
        outcome = columns[layout.SUCCESS].astype(np.float64)
        if not np.isin(outcome, (0.0, 1.0)).all():
            raise RunFolderError(f"{where}: {layout.SUCCESS} is neither true nor false in a frame; correct the dataset")
        if not outcome.any():
            present = set()
    wanted = {
        index: task
        for index, task in dataset.tasks.items()
        if index in present and not (settings.max_episodes and taken[task] >= settings.max_episodes)
    }
    for task in set(wanted.values()):
        taken[task] += 1
    begins = np.arange(0, episode.length, settings.every)
    begins = begins[np.isin(indices[begins], list(wanted))]
    return begins, np.array([wanted[int(index)] for index in indices[begins]], np.int64)


def _array(
    dataset: CheckedDataset,
    videos: layout.VideoFrames,
    episode: Episode,
    key: str,
    columns: Mapping[str, Any],
    begins: NDArray[np.intp],
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """The environment's array [n, *shape] at the frames where chunk steps begin."""
    feature = dataset.info.features[key]
    if not feature.is_camera:
        return np.asarray(columns[key][begins].reshape(len(begins), *shape))
    if feature.dtype == "video":
        part, (height, width, _) = episode.videos[key], feature.size
        times = part.first_s + np.asarray(columns["timestamp"], np.float64)[begins]
        if not np.isfinite(times).all() or (np.diff(times) <= 0).any():
            raise RunFolderError(f"{dataset.folder}, episode {episode.number}: timestamp does not ascend; correct it")
        return layout.as_array(videos.take(key, part.file, times.tolist(), (height, width)), shape)
    images = []
    for frame in begins:
        try:
            images.append(layout.decoded(_stored(dataset.folder, columns[key][frame]), feature.size))
        except ValueError as error:
            raise RunFolderError(
                f"{dataset.folder}: {key} in frame {frame} of episode {episode.number}: {error}; correct the dataset"
            ) from error
    return layout.as_array(np.stack(images), shape)


def _stored(folder: Path, stored: Any) -> bytes:
    """An image's bytes, from the column or from its file. ValueError: there are none."""
    if isinstance(stored, bytes):
        return stored
    if not isinstance(stored, dict):
        raise ValueError(f"it is stored as {type(stored).__name__}, not as a picture")
    if stored.get("bytes"):
        return bytes(stored["bytes"])
    file = inner_path(folder, stored.get("path"), folders=True)
    if not file.is_file():
        raise ValueError(f"{file} is not there")
    return file.read_bytes()


def _exactly(values: NDArray[Any], dtype: str, what: str) -> NDArray[Any]:
    """The values in this dtype. RunFolderError: the dtype is integer and a value is not."""
    with np.errstate(invalid="ignore"):  # NaN differs from every number
        found = values.astype(dtype, copy=False)
    if found.dtype.kind != "f" and (found != values).any():
        odd = values[found != values][0]
        raise RunFolderError(f"{what} has {odd}, which {dtype} does not hold; name a dataset of this environment")
    return found


def _check_values(where: str, part: tuple[Mapping[str, NDArray[Any]], NDArray[Any]], spec: EnvSpec) -> None:
    """RunFolderError: a number is not finite, or a discrete action is not in the environment's range."""
    obs, actions = part
    floating = {name: x for name, x in (*obs.items(), ("action", actions)) if x.dtype.kind == "f"}
    for name in first_not_finite(floating).values():
        raise RunFolderError(f"{where}: {name} is not finite; leave that episode out")
    if spec.action.kind == "discrete" and not ((actions >= 0) & (actions < np.array(spec.action.counts))).all():
        most = ", ".join(str(count - 1) for count in dict.fromkeys(spec.action.counts))
        raise RunFolderError(f"{where}: an action is not one of 0 to {most}; name a dataset of this robot")
