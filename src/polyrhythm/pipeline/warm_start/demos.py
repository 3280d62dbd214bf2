"""Records demonstrations of an environment's scripted expert.

Each primitive action of a chunk is the expert's action in the state in which it begins, held for `action_repeat` env
steps. In every `noise_every`-th episode noise is added to the executed action, not to the label, so that the policy
learns to return to the expert's path. The last entry of an action, by convention the gripper, gets no noise. Of the
unsuccessful episodes only the noisy ones are kept: their labels are still correct. An episode in which an observation
or a label is NaN or infinite ends there and is dropped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import DemonstrationSettings
from polyrhythm.envs.base import EnvBatch, EnvSettings, Expert, RowsFailed, first_cause
from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm.observe import wilson
from polyrhythm.pipeline.array_specs import shown
from polyrhythm.pipeline.build import env_settings
from polyrhythm.specs import INSTRUCTION, PROGRESS, EnvSpec
from polyrhythm.specs.finite import first_not_finite
from polyrhythm.specs.hashing import mix
from polyrhythm.stations.simulator.chunk import step_chunk, whole_batch
from polyrhythm.stations.simulator.slot import StepSettings
from polyrhythm.training.demonstrations import Demonstrations

log = logging.getLogger(__name__)

#: Hash domain that separates demonstration seeds from those of training and evaluation.
_DOMAIN = 5


@dataclass(slots=True)
class _Episode:
    """One demonstration: observations and labels so far. nonfinite: the one that has NaN or infinity, "" if none."""

    task: int
    seed: int
    noise: np.random.Generator | None
    obs: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    labels: list[NDArray[np.float32]] = field(default_factory=list)
    steps: int = 0
    success: bool = False
    nonfinite: str = ""


class Recorded(NamedTuple):
    """Demonstrations, and by task name the expert's successes (noisy episodes included): successes, episodes, rate,
    low, high (Wilson 95%)."""

    demonstrations: Demonstrations
    tasks: dict[str, dict[str, float]]

    def summary(self) -> dict[str, Any]:
        """decisions: number of chunk steps; tasks."""
        return {"decisions": len(self.demonstrations), "tasks": self.tasks}


def record(config: RunConfig, settings: DemonstrationSettings, chunk: int) -> Recorded:
    """Record demonstrations in the run's environment, for a policy with chunks of this length."""
    env = env_settings(config).build(config.rollout.rows)
    try:
        return demonstrate(env, settings, StepSettings(chunk, config.rollout.action_repeat))
    except RowsFailed as failed:
        raise first_cause(failed) from failed
    finally:
        env.close()


def has_expert(env: EnvSettings) -> bool:
    """Whether the environment has a scripted expert; builds a batch of one row to find out."""
    batch = env.build(1)
    try:
        return isinstance(batch, Expert)
    finally:
        batch.close()


def refuse_misfit(found: Demonstrations, spec: EnvSpec, chunk: int, action_repeat: int) -> None:
    """Raise ConfigError if these demonstrations are not of this environment, chunk length or action repeat."""
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


def demonstrate(env: EnvBatch, settings: DemonstrationSettings, step: StepSettings) -> Recorded:
    """Record `episodes_per_task` episodes of the expert per task.

    Raises ConfigError if the environment has no expert, RunHalted if the expert has no successful, finite episode of
    some task.
    """
    if not isinstance(env, Expert):
        raise ConfigError("demonstrations = set: this environment has no scripted expert; set demonstrations to null")
    episodes = [
        _episode(settings, task, index)
        for task in range(len(env.spec.tasks))
        for index in range(settings.episodes_per_task)
    ]
    for first in range(0, len(episodes), env.rows):
        _perform(env, episodes[first : first + env.rows], settings, step)
    succeeded = [episode for episode in episodes if episode.success]
    log.info("demonstrations: the expert succeeded in %d of %d episodes", len(succeeded), len(episodes))
    for task, name in enumerate(env.spec.tasks):
        dropped = _describe_dropped([episode for episode in episodes if episode.task == task], env.spec)
        if dropped:
            log.warning("demonstrations: %s", dropped)
        if not any(episode.task == task for episode in succeeded):
            raise RunHalted(
                f"the expert never succeeded at {name.name} in {settings.episodes_per_task} episodes; "
                f"{dropped and dropped + '; correct the environment or its expert, or '}"
                f"lower demonstrations.noise_std ({settings.noise_std:g}) or rollout.action_repeat "
                f"({step.action_repeat})"
            )
    kept = [episode for episode in episodes if not episode.nonfinite and (episode.success or episode.noise is not None)]
    observed = [obs for episode in kept for obs in episode.obs]
    labels = [label for episode in kept for label in episode.labels]
    demonstrations = Demonstrations(
        {name: np.stack([obs[name] for obs in observed]) for name in observed[0]},
        np.stack(labels),
        tuple(task.name for task in env.spec.tasks),
        step.action_repeat,
    )
    return Recorded(demonstrations, _successes(episodes, env.spec))


def _describe_dropped(episodes: list[_Episode], spec: EnvSpec) -> str:
    """How many of these episodes of one task were dropped, and the first of them; "" if none was."""
    dropped = [episode for episode in episodes if episode.nonfinite]
    if not dropped:
        return ""
    first = dropped[0]
    where = f"task {spec.tasks[first.task].name}, seed {first.seed}, env step {first.steps}"
    return f"{len(dropped)} episodes were dropped, the first since {first.nonfinite} is not finite ({where})"


def _successes(episodes: list[_Episode], spec: EnvSpec) -> dict[str, dict[str, float]]:
    by_task = [[episode.success for episode in episodes if episode.task == task] for task in range(len(spec.tasks))]
    return {
        task.name: wilson(sum(successes), len(successes))._asdict()
        for task, successes in zip(spec.tasks, by_task, strict=True)
    }


def _episode(settings: DemonstrationSettings, task: int, index: int) -> _Episode:
    seed = mix(settings.seed, _DOMAIN, task, index)
    noisy = settings.noise_std > 0 and index % settings.noise_every == settings.noise_every - 1
    return _Episode(task, seed, np.random.default_rng(mix(seed, 1)) if noisy else None)


def _perform(env: EnvBatch, episodes: list[_Episode], settings: DemonstrationSettings, step: StepSettings) -> None:
    """Run these episodes in parallel, one per row."""
    rows = list(range(len(episodes) if env.spec.reset_rows else env.rows))
    given = [episodes[min(row, len(episodes) - 1)] for row in rows]
    env.reset(rows, [episode.task for episode in given], [episode.seed for episode in given])
    running = np.arange(len(episodes))
    while len(running):
        under_way = [episodes[row] for row in running]
        _observe(env, running, under_way)
        finite = np.array([not episode.nonfinite for episode in under_way])
        running, under_way = running[finite], [episode for episode in under_way if not episode.nonfinite]
        if len(running):
            running = running[_act(env, running, under_way, settings.noise_std, step)]


def _observe(env: EnvBatch, rows: NDArray[np.intp], episodes: list[_Episode]) -> None:
    """Add the current observation to each episode, in the simulator station's form; note non-finite ones."""
    seen = {name: np.empty((len(rows), *a.shape), a.dtype) for name, a in env.spec.observation.items()}
    env.observe(rows, seen)
    floating = {f"observation {name}": array for name, array in seen.items() if array.dtype.kind == "f"}
    for i, what in first_not_finite(floating).items():
        episodes[i].nonfinite = what
    for i, episode in enumerate(episodes):
        obs = {name: array[i] for name, array in seen.items()}
        obs[INSTRUCTION] = np.array(episode.task, np.int64)
        obs[PROGRESS] = np.array(episode.steps / env.spec.max_steps, np.float32)
        episode.obs.append(obs)


def _act(
    env: EnvBatch, rows: NDArray[np.intp], episodes: list[_Episode], noise_std: float, step: StepSettings
) -> NDArray[np.bool_]:
    """Execute one chunk of the expert in these rows and add its labels to the episodes; which ones continue [n]."""
    assert isinstance(env, Expert)
    spec = env.spec
    advance = env.step if spec.step_rows else whole_batch(env)
    labels = np.zeros((len(rows), step.chunk, spec.action.dim), np.float32)
    going = np.ones(len(rows), bool)
    for c in range(step.chunk):
        alive = np.flatnonzero(going)
        if not len(alive):
            break
        # A row that ends keeps its last label for the rest of the chunk.
        labels[alive, c:] = env.expert_actions(rows[alive])[:, None]
        for place in first_not_finite({"action": labels[alive, c]}):
            episodes[alive[place]].nonfinite = "the expert's action"
            going[alive[place]] = False
        alive = np.flatnonzero(going)
        if not len(alive):
            break
        noise = np.stack([_noise(episodes[i], noise_std, spec.action.dim) for i in alive])
        executed = np.clip(labels[alive, c] + noise, spec.action.low, spec.action.high).astype(np.float32)
        left = np.array([spec.max_steps - episodes[i].steps for i in alive])
        result = step_chunk(advance, rows[alive], executed[:, None], step.action_repeat, left)
        for place, i in enumerate(alive):
            episodes[i].success |= bool(result.success[place])
            episodes[i].steps += int(result.steps[place])
        going[alive] = ~(result.terminated | result.truncated)
    for episode, label in zip(episodes, labels, strict=True):
        episode.labels.append(label)
    return going


def _noise(episode: _Episode, noise_std: float, dim: int) -> NDArray[np.float32]:
    """Noise for one executed action [A]: zero in clean episodes and for the last entry."""
    noise = np.zeros(dim, np.float32)
    if episode.noise is not None:
        noise[: max(1, dim - 1)] = episode.noise.normal(0.0, noise_std, max(1, dim - 1))
    return noise
