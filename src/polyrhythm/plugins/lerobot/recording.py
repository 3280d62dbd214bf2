"""Records demonstrations to a dataset folder, one turn of the env batch at a time; a stopped recording can be resumed.

The settings determine all episodes with their initial states and noise, so a resumed recording plays only the missing
ones. Expert episodes are kept if they would be imitated (successful, or with noise); a policy's if they are finite,
with `next.success`. An episode whose row fails is dropped and not repeated, since it would fail again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyrhythm.config.sections.learning import DemonstrationSettings
from polyrhythm.envs.base import EnvBatch
from polyrhythm.errors import RunFolderError, RunHalted
from polyrhythm.observe.intervals import success_rate
from polyrhythm.observe.run_folder import LOCK_FILE, lock_run_folder
from polyrhythm.plugins.demonstrations.episodes import Actor, DemoEpisode, describe_dropped, plan_episode, play_episodes
from polyrhythm.plugins.demonstrations.recording import OnProgress
from polyrhythm.plugins.lerobot import layout
from polyrhythm.plugins.lerobot.writing import DatasetWriter, Frames, Journal
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.slot import StepSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """The demonstrator. what: must be equal to resume a recording; actor: its actions; noise_std: noise on executed
    actions, in every n-th episode; keep_failed: keep unsuccessful episodes too."""

    what: dict[str, Any]
    actor: Actor
    noise_std: float
    keep_failed: bool


def recorded_form(env: dict[str, Any], settings: DemonstrationSettings, action_repeat: int, fps: int) -> dict[str, Any]:
    """Settings that must be equal to resume a recording, besides the demonstrator. env: the environment's settings."""
    noise = settings.model_dump(include={"noise_std", "noise_every", "seed"}, mode="json")
    return {"env": env, "action_repeat": action_repeat, "fps": fps, **noise}


def open_recording(folder: Path, recorded: dict[str, Any]) -> Journal:
    """The journal of a new or stopped recording; creates the folder. RunFolderError: it has other content, or a
    recording with other settings."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = [path.name for path in folder.iterdir() if path.name != LOCK_FILE]
    except OSError as error:
        raise RunFolderError(f"folder {folder} cannot be made ({error.strerror}); name another") from error
    if not content or (content == ["meta"] and not (folder / layout.OURS).exists() and _only_begun(folder)):
        return Journal(recorded)
    if not (folder / layout.OURS).is_file():
        raise RunFolderError(f"folder {folder} is not empty and no recording of polyrhythm; name another")
    try:
        journal = Journal.load(folder)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder / layout.OURS} cannot be read ({error}); name another folder") from error
    for name, value in recorded.items():
        if journal.recorded.get(name) != value:
            raise RunFolderError(
                f"the recording in {folder} has {name} = {journal.recorded.get(name)} and this one {value}; "
                "make them equal to go on with it, or name another folder"
            )
    return journal


def _only_begun(folder: Path) -> bool:
    """Whether meta/ contains only unfinished files."""
    return all(path.name.endswith(".part") for path in (folder / "meta").rglob("*") if path.is_file())


def record_dataset(
    folder: Path,
    env: EnvBatch,
    source: Source,
    settings: DemonstrationSettings,
    step: StepSettings,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Play and write the missing episodes; return the summary: episodes, frames, resumed, tasks.

    step: with chunks of one action. RunFolderError: another process records to the folder, or it has other content;
    RunHalted: no episode was kept.
    """
    assert step.chunk == 1, "a frame is one primitive action"
    open_recording(folder, source.what)
    with lock_run_folder(folder):
        journal = open_recording(folder, source.what)
        if not (folder / layout.OURS).exists():
            (folder / layout.OURS).parent.mkdir(exist_ok=True)
            journal.save(folder)  # marks the folder as ours
        _remove_unlisted(folder, journal)
        done = {(task, index) for task, index, _, _ in journal.outcomes}
        planned = [(task, index) for task in range(len(env.spec.tasks)) for index in range(settings.episodes_per_task)]
        states = env.spec.training_states
        missing = [plan_episode(settings, task, index, states) for task, index in planned if (task, index) not in done]
        writer = DatasetWriter(folder, env.spec, journal, source.what["fps"])
        on_progress(len(planned) - len(missing), len(planned))
        for first in range(0, len(missing), env.rows):
            turn = missing[first : first + env.rows]
            (folder / layout.STATS).unlink(missing_ok=True)  # it would cover fewer episodes
            play_episodes(env, turn, source.noise_std, step, source.actor)
            _add(writer, turn, env.spec, source)
            finished = len(planned) - len(missing) + first + len(turn)
            on_progress(finished, len(planned))
            log.info("demonstrations: %d of %d episodes", finished, len(planned))
        if not journal.frames:
            raise RunHalted(
                f"no episode of {len(journal.outcomes)} was kept: the demonstrator never succeeded; lower "
                f"demonstrations.noise_std ({settings.noise_std:g}) or rollout.action_repeat ({step.action_repeat})"
            )
        if not (folder / layout.STATS).is_file():
            writer.write_statistics()
        return {
            "episodes": journal.episodes,
            "frames": journal.frames,
            "resumed": len(done),
            "tasks": _successes(journal, env.spec),
        }


def _add(writer: DatasetWriter, turn: list[DemoEpisode], spec: EnvSpec, source: Source) -> None:
    keeps = [not e.lost and bool(e.labels) and (source.keep_failed or e.kept) for e in turn]
    for task in range(len(spec.tasks)):
        if dropped := describe_dropped([episode for episode in turn if episode.task == task], spec):
            log.warning("demonstrations: %s", dropped)
    outcomes = [(e.task, e.index, e.success, kept) for e, kept in zip(turn, keeps, strict=True)]
    writer.add([_frames(episode, spec) for episode, kept in zip(turn, keeps, strict=True) if kept], outcomes)
    for episode in turn:
        episode.obs.clear()
        episode.labels.clear()


def _frames(episode: DemoEpisode, spec: EnvSpec) -> Frames:
    obs = {name: np.stack([seen[name] for seen in episode.obs]) for name in spec.observation}
    actions = np.stack(episode.labels)[:, 0].astype(spec.action.dtype)
    noisy = episode.noise is not None
    return Frames(episode.task, episode.index, episode.seed, noisy, obs, actions, episode.success_at)


def _successes(journal: Journal, spec: EnvSpec) -> dict[str, dict[str, Any]]:
    """`success_rate` of all played episodes, by task name."""
    found = {}
    for number, task in enumerate(spec.tasks):
        outcomes = [None if success < 0 else bool(success) for of, _, success, _ in journal.outcomes if of == number]
        if outcomes:
            found[task.name] = success_rate(outcomes)
    return found


def _remove_unlisted(folder: Path, journal: Journal) -> None:
    """Remove the files of a turn that was interrupted before it was listed; never follows links out of the folder."""
    home = folder.resolve()
    for pattern in (layout.DATA, layout.EPISODES):
        listed = {folder / pattern.format(**layout.file_place(number)) for number in range(journal.files)}
        root = folder / pattern.split("/chunk-", maxsplit=1)[0]
        for path in root.glob("chunk-*/*"):
            if path not in listed and path.parent.resolve() == home / path.parent.relative_to(folder):
                path.unlink()
