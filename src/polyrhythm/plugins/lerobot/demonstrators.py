"""Records the environment's expert, or a run's policy, into a dataset folder: `polyrhythm demos --out FOLDER`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import DemonstrationSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.plugins.demonstrations.episodes import Actor, DemoEpisode, expert_of
from polyrhythm.plugins.demonstrations.recording import OnProgress
from polyrhythm.plugins.demonstrations.warm_start import refuse_without_expert, validate_imitation
from polyrhythm.plugins.lerobot.layout import require_pyarrow
from polyrhythm.plugins.lerobot.recording import Source, open_recording, record_dataset, recorded_form
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published
from polyrhythm.runtime.memory.tensors import as_array, as_tensors
from polyrhythm.specs.hashing import mix, mix_array
from polyrhythm.stations.simulator.slot import StepSettings


def record_folder(config: RunConfig, folder: Path, run: Path | None, fps: int, watch: OnProgress) -> dict[str, Any]:
    """Record in the recipe's environment; return the summary. run: folder of the policy's run, None for the expert.

    Before the first episode: ConfigError or RunFolderError, also as from `open_recording`.
    """
    require_pyarrow()
    assert config.demonstrations is not None
    if env_settings(config).spec().chunk:
        raise ConfigError(
            f"--out = {folder}: a step of this environment takes a whole message, which no dataset of frames can hold; "
            "leave demos out, a run records such demonstrations itself"
        )
    settings = config.demonstrations
    actor, who = None, "expert"
    if run is not None:
        actor, who = _policy_of(config, run)
        settings = settings.model_copy(update={"noise_std": 0.0})
    else:
        refuse_without_expert(config)
    repeat = config.rollout.action_repeat
    what = recorded_form(config.env.model_dump(mode="json"), settings, repeat, fps) | {"demonstrator": who}
    open_recording(folder, what)
    return _record(config, folder, settings, what, actor, watch)


def _record(
    config: RunConfig,
    folder: Path,
    settings: DemonstrationSettings,
    what: dict[str, Any],
    actor: Actor | None,
    watch: OnProgress,
) -> dict[str, Any]:
    env = env_settings(config).build(config.rollout.rows)
    try:
        source = Source(what, actor or expert_of(env), settings.noise_std, keep_failed=actor is not None)
        return record_dataset(folder, env, source, settings, StepSettings(1, config.rollout.action_repeat), watch)
    finally:
        env.close()


def _policy_of(config: RunConfig, run: Path) -> tuple[Actor, str]:
    """The run's policy in this recipe's environment, acting greedily, and its name in the journal."""
    found, weights, version = load_policy(run)
    policy = validate_imitation(config.model_copy(update={"policy": found.policy})).policy
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"{run}: {error}; this policy belongs to another environment, name another run") from error
    return PolicyActor(policy, greedy=True), f"policy {run.resolve().name} version {version}"


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
            self._ask(begun)
        for key in self._chunks.keys() - {(e.task, e.index) for e in episodes}:
            del self._chunks[key]
        return np.stack([self._chunks[e.task, e.index][len(e.labels) % self._policy.chunk] for e in episodes])

    def _ask(self, episodes: Sequence[DemoEpisode]) -> None:
        cpu = torch.device("cpu")
        obs = {name: np.stack([e.obs[-1][name] for e in episodes]) for name in episodes[0].obs[-1]}
        streams = np.array([mix(e.seed, _NOISE) for e in episodes], np.int64)
        steps = np.array([len(e.labels) // self._policy.chunk for e in episodes], np.int64)
        keys = {"greedy": np.full(len(episodes), self._greedy), "noise_key": mix_array(streams, steps)}
        given = as_tensors(keys, cpu)
        with torch.inference_mode():
            actions = as_array(self._policy.act(as_tensors(obs, cpu), given["greedy"], given["noise_key"]).actions)
        for episode, chunk in zip(episodes, actions, strict=True):
            self._chunks[episode.task, episode.index] = np.array(chunk)
