"""Records the environment's expert, or a run's policy, into a dataset folder: `polyrhythm demos --out FOLDER`.

One turn of the env batch is recorded at a time; a stopped recording can be resumed.

The settings determine all episodes with their initial states and noise, so a resumed recording plays only the missing
ones. Expert episodes are kept if they would be imitated (successful, or with noise); a policy's if they are finite,
with `next.success`. An episode whose row fails is dropped and not repeated, since it would fail again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import DemonstrationSettings
from polyrhythm.envs.base import EnvBatch
from polyrhythm.errors import ConfigError, RunFolderError, RunHalted
from polyrhythm.observe.intervals import success_rate
from polyrhythm.observe.run_folder import LOCK_FILE, find_run, lock_run_folder
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.pipeline.persistence.resume_rules import naming_where_it_began
from polyrhythm.plugins.demonstrations.episodes import (
    Actor,
    DemoEpisode,
    describe_dropped,
    expert_of,
    plan_episode,
    play_episodes,
)
from polyrhythm.plugins.demonstrations.recording import OnProgress
from polyrhythm.plugins.demonstrations.warm_start import refuse_without_expert, validate_imitation
from polyrhythm.plugins.lerobot import layout
from polyrhythm.plugins.lerobot.writing import DatasetWriter, Journal
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published
from polyrhythm.runtime.memory.tensors import as_array, as_tensors
from polyrhythm.specs.hashing import mix, mix_array
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


def record_folder(config: RunConfig, folder: Path, run: Path | None, fps: int, watch: OnProgress) -> dict[str, Any]:
    """Record in the recipe's environment; return the summary. run: folder of the policy's run, None for the expert.

    Before the first episode: ConfigError or RunFolderError, also as from `open_recording`.
    """
    layout.require_pyarrow()
    assert config.demonstrations is not None
    if env_settings(config).spec().chunk:
        raise ConfigError(
            f"--out = {folder}: a step of this environment takes a whole message, which no dataset of frames can hold; "
            "leave demos out, a run records such demonstrations itself"
        )
    settings = config.demonstrations
    actor: Actor | None = None
    who = "expert"
    if run is not None:
        run = find_run(run)
        with naming_where_it_began(run):
            found, weights, version = load_policy(run)
        policy = validate_imitation(config.model_copy(update={"policy": found.policy})).policy
        try:
            load_published(as_module(policy), weights)
        except ValueError as error:
            why = "this policy belongs to another environment, name another run"
            raise RunFolderError(f"{run}: {error}; {why}") from error
        actor, who = PolicyActor(policy, greedy=True), f"policy {run.resolve().name} version {version}"
        settings = settings.model_copy(update={"noise_std": 0.0})
    else:
        refuse_without_expert(config)
    repeat = config.rollout.action_repeat
    what = recorded_form(config.env.model_dump(mode="json"), settings, repeat, fps) | {"demonstrator": who}
    open_recording(folder, what)
    with closing(env_settings(config).build(config.rollout.rows)) as env:
        source = Source(what, actor or expert_of(env), settings.noise_std, keep_failed=actor is not None)
        return record_dataset(folder, env, source, settings, StepSettings(1, repeat), watch)


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
    unfinished = all(path.name.endswith(".part") for path in (folder / "meta").rglob("*") if path.is_file())
    if not content or (content == ["meta"] and unfinished):
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


def record_dataset(
    folder: Path,
    env: EnvBatch,
    source: Source,
    settings: DemonstrationSettings,
    step: StepSettings,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Play and write the missing episodes; return the summary: episodes, frames, resumed, success rates by task.

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
        remove_unlisted(folder, journal)
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
            for task in range(len(env.spec.tasks)):
                if dropped := describe_dropped([episode for episode in turn if episode.task == task], env.spec):
                    log.warning("demonstrations: %s", dropped)
            writer.add(turn, [not e.lost and bool(e.labels) and (source.keep_failed or e.kept) for e in turn])
            for episode in turn:
                episode.obs.clear()
                episode.labels.clear()
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
        rates = {}
        for number, named in enumerate(env.spec.tasks):
            outcomes = [
                None if success < 0 else bool(success) for of, _, success, _ in journal.outcomes if of == number
            ]
            if outcomes:
                rates[named.name] = success_rate(outcomes)
        return {"episodes": journal.episodes, "frames": journal.frames, "resumed": len(done), "tasks": rates}


def remove_unlisted(folder: Path, journal: Journal) -> None:
    """Remove the files of a turn that was interrupted before it was listed; never follows links out of the folder."""
    home = folder.resolve()
    for pattern in (layout.DATA, layout.EPISODES):
        listed = {folder / pattern.format(**layout.file_place(number)) for number in range(journal.files)}
        root = folder / pattern.split("/chunk-", maxsplit=1)[0]
        for path in root.glob("chunk-*/*"):
            if path not in listed and path.parent.resolve() == home / path.parent.relative_to(folder):
                path.unlink()


#: Hash domain of a demonstrator's own noise, within its episode's seed.
_NOISE = 2


class PolicyActor:
    """Acts in running episodes; requests a new chunk when the previous one is used up. greedy: act without noise."""

    def __init__(self, policy: Policy, *, greedy: bool) -> None:
        self._policy, self._greedy = policy, greedy
        self._chunks: dict[tuple[int, int], NDArray[Any]] = {}

    def __call__(self, _rows: NDArray[np.intp], episodes: Sequence[DemoEpisode]) -> NDArray[Any]:
        """Actions [n,A]."""
        begun = [e for e in episodes if len(e.labels) % self._policy.chunk == 0]
        if begun:
            cpu = torch.device("cpu")
            obs = {name: np.stack([e.obs[-1][name] for e in begun]) for name in begun[0].obs[-1]}
            streams = np.array([mix(e.seed, _NOISE) for e in begun], np.int64)
            steps = np.array([len(e.labels) // self._policy.chunk for e in begun], np.int64)
            keys = {"greedy": np.full(len(begun), self._greedy), "noise_key": mix_array(streams, steps)}
            given = as_tensors(keys, cpu)
            with torch.inference_mode():
                found = self._policy.act(as_tensors(obs, cpu), given["greedy"], given["noise_key"])
            for episode, chunk in zip(begun, as_array(found.actions), strict=True):
                self._chunks[episode.task, episode.index] = np.array(chunk)
        for key in self._chunks.keys() - {(e.task, e.index) for e in episodes}:
            del self._chunks[key]
        return np.stack([self._chunks[e.task, e.index][len(e.labels) % self._policy.chunk] for e in episodes])
