"""Records demonstrations of an environment's scripted expert as chunk steps to imitate, in memory.

Unsuccessful episodes are dropped, except noisy ones, whose labels are still correct, unless `keep_failed`. Episodes
that are not finite, or whose row fails, are dropped. Playing: episodes.py; datasets in files:
plugins/lerobot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import DatasetSettings, DemonstrationSettings
from polyrhythm.envs.base import EnvBatch, EnvSettings, FullEnvSettings, batch_traits, traits_of
from polyrhythm.errors import ConfigError, RunHalted, nearest
from polyrhythm.observe.intervals import success_rate
from polyrhythm.pipeline.array_specs import shown
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugin import load, table
from polyrhythm.plugins.demonstrations.episodes import (
    DemoEpisode,
    describe_dropped,
    expert_of,
    plan_episode,
    play_episodes,
)
from polyrhythm.plugins.demonstrations.imitation import Demonstrations
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.slot import StepSettings

log = logging.getLogger(__name__)

#: Called with (episodes done, episodes in all) after each turn of the env batch.
OnProgress = Callable[[int, int], None]


class DatasetFormat(Protocol):
    """A folder layout of demonstrations, such as a module; a plugin registers it under kind `demonstrations`."""

    def check_dataset(self, settings: DatasetSettings, spec: EnvSpec, action_repeat: int) -> object:
        """Check the small files and return a description.

        MissingError: folder or package is missing; RunFolderError: it is damaged, or has another layout; ConfigError:
        its arrays or tasks differ from the environment's.
        """

    def read_demonstrations(
        self, settings: DatasetSettings, spec: EnvSpec, chunk: int, action_repeat: int
    ) -> Demonstrations:
        """The selected episodes, for a policy with `chunk` actions per chunk. Raises what `check_dataset` raises."""


def dataset_format(settings: DatasetSettings) -> DatasetFormat:
    """The layout that the settings name. ConfigError: it is unknown."""
    if settings.format not in (known := table("demonstrations")):
        raise ConfigError(
            f"demonstrations.dataset.format = {settings.format}: there is no such layout; "
            f"{nearest(settings.format, known)}known are {', '.join(known)}"
        )
    found: DatasetFormat = load("demonstrations", settings.format)
    return found


class Recorded(NamedTuple):
    """Demonstrations, and the expert's `success_rate` by task name (noisy episodes included)."""

    demonstrations: Demonstrations
    tasks: dict[str, dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """decisions: number of chunk steps; tasks."""
        return {"decisions": len(self.demonstrations), "tasks": self.tasks}


def record(
    config: RunConfig, settings: DemonstrationSettings, chunk: int, on_progress: OnProgress = lambda *_: None
) -> Recorded:
    env = env_settings(config).build(config.rollout.rows)
    try:
        return demonstrate(env, settings, StepSettings(chunk, config.rollout.action_repeat), on_progress)
    finally:
        env.close()


def has_expert(env: EnvSettings) -> bool:
    """Whether the environment has a scripted expert; builds a batch of one row."""
    batch = env.build(1)
    try:
        return batch_traits(batch).expert
    finally:
        batch.close()


def check_expert(env: EnvSettings, settings: DemonstrationSettings) -> None:
    """Raise ConfigError if it is known before the start that the expert can act in no episode of some task."""
    if not traits_of(env).checks_expert:
        return
    spec = env.spec()
    for task in range(len(spec.tasks)):
        planned = (plan_episode(settings, task, i, spec.training_states) for i in range(settings.episodes_per_task))
        cast(FullEnvSettings, env).check_expert([(task, episode.seed) for episode in planned])


def refuse_misfit(found: Demonstrations, spec: EnvSpec, chunk: int, action_repeat: int) -> None:
    """Raise ConfigError if the demonstrations are of another environment, chunk length or action repeat."""
    here = [task.name for task in spec.tasks]
    if found.tasks and list(found.tasks) != here:
        raise ConfigError(
            f"these demonstrations are of the tasks {', '.join(found.tasks)}, the environment's are {', '.join(here)}; "
            "make them equal, in this order"
        )
    if found.action_repeat and found.action_repeat != action_repeat:
        raise ConfigError(
            f"rollout.action_repeat = {action_repeat}: these demonstrations hold each action for {found.action_repeat} "
            "steps; set it to that"
        )
    shapes = {name: x.shape[1:] for name, x in found.obs.items()} | {"actions": found.actions.shape[1:]}
    expected = {name: x.shape for name, x in shown(spec).items()} | {"actions": (chunk, spec.action.dim)}
    if shapes != expected:
        odd = next(name for name in sorted(expected | shapes) if shapes.get(name) != expected.get(name))
        raise ConfigError(
            f"these demonstrations are of other settings: {odd} is {shapes.get(odd, 'absent')}, "
            f"the policy and environment need {expected.get(odd, 'none')}; record them again"
        )


def demonstrate(
    env: EnvBatch, settings: DemonstrationSettings, step: StepSettings, on_progress: OnProgress = lambda *_: None
) -> Recorded:
    """Record `episodes_per_task` episodes of the expert per task.

    ConfigError: the environment has no expert. RunHalted: some task has no successful, finite episode; with
    `keep_failed`, where a reward function may judge later, no finite one.
    """
    if not batch_traits(env).expert:
        raise ConfigError("demonstrations = set: this environment has no scripted expert; set demonstrations to null")
    episodes = [
        plan_episode(settings, task, index, env.spec.training_states)
        for task in range(len(env.spec.tasks))
        for index in range(settings.episodes_per_task)
    ]
    for first in range(0, len(episodes), env.rows):
        play_episodes(env, episodes[first : first + env.rows], settings.noise_std, step, expert_of(env))
        on_progress(min(first + env.rows, len(episodes)), len(episodes))
    succeeded = [episode for episode in episodes if episode.success]
    log.info("demonstrations: the expert succeeded in %d of %d episodes", len(succeeded), len(episodes))
    for task, name in enumerate(env.spec.tasks):
        dropped = describe_dropped([episode for episode in episodes if episode.task == task], env.spec)
        if dropped:
            log.warning("demonstrations: %s", dropped)
        good = [episode for episode in episodes if episode.kept] if settings.keep_failed else succeeded
        if not any(episode.task == task for episode in good):
            lower = [f"demonstrations.noise_std ({settings.noise_std:g})"] if settings.noise_std else []
            lower += [f"rollout.action_repeat ({step.action_repeat})"] if step.action_repeat > 1 else []
            raise RunHalted(
                f"the expert never succeeded at {name.name} in {settings.episodes_per_task} episodes; "
                f"{dropped and dropped + '; '}correct the environment or its expert"
                f"{', or lower ' + ' or '.join(lower) if lower else ''}"
            )
    kept = [episode for episode in episodes if episode.kept]
    observed = [obs for episode in kept for obs in episode.obs]
    labels = [label for episode in kept for label in episode.labels]
    demonstrations = Demonstrations(
        {name: np.stack([obs[name] for obs in observed]) for name in observed[0]},
        np.stack(labels),
        tuple(task.name for task in env.spec.tasks),
        step.action_repeat,
    )
    return Recorded(demonstrations, successes(episodes, env.spec))


def successes(episodes: list[DemoEpisode], spec: EnvSpec) -> dict[str, dict[str, Any]]:
    by_task = [[episode.success for episode in episodes if episode.task == task] for task in range(len(spec.tasks))]
    return {task.name: success_rate(outcomes) for task, outcomes in zip(spec.tasks, by_task, strict=True)}
