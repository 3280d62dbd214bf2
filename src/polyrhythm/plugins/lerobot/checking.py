"""Checks that a folder is a dataset and that it fits an environment, from its small files only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.plugins.lerobot import layout
from polyrhythm.plugins.lerobot.metadata import DatasetInfo, Episode, Feature, read_episodes, read_info, read_tasks
from polyrhythm.plugins.lerobot.video import check_size, require_video
from polyrhythm.specs import EnvSpec


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
    folder = Path(settings.folder).expanduser()
    info = read_info(folder)
    keys = layout.keys_of(spec, settings.keys)
    unknown = settings.keys.keys() - spec.observation.keys()
    if unknown:
        raise ConfigError(
            f"demonstrations.dataset.keys = {min(unknown)}: the environment has no such array but "
            f"{', '.join(spec.observation)}; name one of these"
        )
    _check_arrays(folder, info.features, keys, spec)
    recorded = _recorded(folder)
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


def _recorded(folder: Path) -> dict[str, Any]:
    """Content of meta/polyrhythm.json; empty for a dataset from elsewhere."""
    from polyrhythm.plugins.lerobot.writing import Journal

    if not (folder / layout.OURS).is_file():
        return {}
    try:
        return dict(Journal.load(folder).recorded)
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(f"{folder / layout.OURS} cannot be read ({error}); copy it again") from error


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
            require_video(folder)
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
    _check_files(info, kept)
    return CheckedDataset(folder, info, keys, sentences, tasks, kept)


def _check_files(info: DatasetInfo, episodes: list[Episode]) -> None:
    """RunFolderError: files are missing, or a camera's first video has another size than declared."""
    files = {episode.file for episode in episodes}
    files |= {part.file for episode in episodes for part in episode.videos.values()}
    missing = sorted(file for file in files if not file.is_file())
    if missing:
        raise RunFolderError(
            f"{missing[0]} is not there (missing: {len(missing)} of {len(files)} files); copy the dataset again"
        )
    for key, part in episodes[0].videos.items():
        height, width, _ = info.features[key].size
        check_size(part.file, (height, width))
