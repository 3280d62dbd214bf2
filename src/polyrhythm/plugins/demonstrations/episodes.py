"""Plays demonstration episodes, one per row of an env batch, with the actions of the expert or of a policy.

Each primitive action of a chunk is chosen in the state in which it begins and held for `action_repeat` env steps. In
every `noise_every`-th episode noise is added to the executed action but not to the label, so that the policy learns to
return to the expert's path; the last entry of an action, by convention the gripper, gets none. An episode ends if an
observation or a label is not finite, or its row fails (`RowsFailed`); `lost` tells why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.config.sections.learning import DemonstrationSettings
from polyrhythm.envs.base import EnvBatch, FullEnvBatch, RowsFailed, batch_traits
from polyrhythm.errors import RunHalted
from polyrhythm.specs import INSTRUCTION, PROGRESS, EnvSpec, split_seed
from polyrhythm.specs.finite import first_not_finite
from polyrhythm.specs.hashing import mix, seed_in_state
from polyrhythm.stations.simulator.chunk import ChunkResult, step_chunk, step_whole, whole_batch
from polyrhythm.stations.simulator.guard import EnvFault, GuardedEnv
from polyrhythm.stations.simulator.slot import StepSettings

log = logging.getLogger(__name__)

#: Hash domain that separates demonstration seeds from those of training and evaluation.
_DOMAIN = 5


@dataclass(slots=True)
class DemoEpisode:
    """One demonstration: observations and labels so far.

    index: number within its task; success_at: chunk step of the first success, -1 without one; reported: the
    environment has reported success or failure; lost: reason for dropping it, as a clause, else ""; keep_failed:
    imitated even without success.
    """

    task: int
    index: int
    seed: int
    noise: np.random.Generator | None
    obs: list[dict[str, NDArray[Any]]] = field(default_factory=list)
    labels: list[NDArray[Any]] = field(default_factory=list)
    steps: int = 0
    success_at: int = -1
    reported: bool = False
    lost: str = ""
    keep_failed: bool = False

    @property
    def success(self) -> bool | None:
        """None if the environment does not report it."""
        return self.success_at >= 0 if self.reported else None

    def add_success(self, success: int) -> None:
        """Add the success report of the next chunk step, as in `ChunkResult`."""
        self.reported |= success >= 0
        if success > 0 and self.success_at < 0:
            self.success_at = len(self.labels)

    @property
    def kept(self) -> bool:
        """Whether it is imitated: a success, or a noisy episode, whose labels are correct in any case."""
        return not self.lost and (bool(self.success) or self.noise is not None or self.keep_failed)


#: Returns the primitive actions [n,A] of n running episodes in these rows; [n,C,A] with `EnvSpec.chunk`.
Actor = Callable[[NDArray[np.intp], Sequence[DemoEpisode]], NDArray[Any]]


def expert_of(env: EnvBatch) -> Actor:
    """The environment's scripted expert as an actor."""
    assert batch_traits(env).expert
    return lambda rows, _: cast(FullEnvBatch, env).expert_actions(rows)


def describe_dropped(episodes: list[DemoEpisode], spec: EnvSpec) -> str:
    """Number of dropped episodes of one task, and the reason for the first; "" if there are none."""
    dropped = [episode for episode in episodes if episode.lost]
    if not dropped:
        return ""
    first = dropped[0]
    where = f"task {spec.tasks[first.task].name}, seed {first.seed}, env step {first.steps}"
    return f"{len(dropped)} episodes were dropped, the first since {first.lost} ({where})"


def plan_episode(settings: DemonstrationSettings, task: int, index: int, training_states: int = 0) -> DemoEpisode:
    """Episode `index` of a task; seed and noise are a hash of (seed, task, index), independent of the other rows.

    It takes the `EnvSpec.training_states` in turn.
    """
    seed = split_seed(mix(settings.seed, _DOMAIN, task, index), held_out=False)
    seed = seed_in_state(seed, index, training_states) if training_states else seed
    noisy = settings.noise_std > 0 and index % settings.noise_every == settings.noise_every - 1
    noise = np.random.default_rng(mix(seed, 1)) if noisy else None
    return DemoEpisode(task, index, seed, noise, keep_failed=settings.keep_failed)


def play_episodes(
    env: EnvBatch, episodes: list[DemoEpisode], noise_std: float, step: StepSettings, actor: Actor
) -> None:
    """Play these episodes in parallel, one per row; at most as many as the batch has rows.

    RunHalted: the environment raised for all rows of a call, so the failed episode is unknown.
    """
    guarded = GuardedEnv(env)
    try:
        _play(guarded, episodes, noise_std, step, actor)
    except EnvFault as fault:
        raise RunHalted(
            f"the environment failed while demonstrations were recorded: {fault}{fault.place}; correct it"
        ) from fault


def _play(env: GuardedEnv, episodes: list[DemoEpisode], noise_std: float, step: StepSettings, actor: Actor) -> None:
    rows = list(range(len(episodes) if env.spec.reset_rows else env.rows))
    given = [episodes[min(row, len(episodes) - 1)] for row in rows]
    env.reset(rows, [episode.task for episode in given], [episode.seed for episode in given])
    running = np.arange(len(episodes))
    _lose_failed(env, running, episodes)
    while len(running := running[_not_lost(episodes, running)]):
        _observe(env, running, [episodes[row] for row in running])
        running = running[_not_lost(episodes, running)]
        if len(running):
            running = running[_act(env, running, [episodes[row] for row in running], noise_std, step, actor)]


def _not_lost(episodes: list[DemoEpisode], rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    return np.array([not episodes[row].lost for row in rows], np.bool_)


def _lose_failed(env: GuardedEnv, rows: NDArray[np.intp], episodes: Sequence[DemoEpisode]) -> None:
    """Drop the episodes whose row has failed; failures of idle rows are discarded."""
    playing = dict(zip(map(int, rows), episodes, strict=True))
    for row, fault in env.take_failed(rows).items():
        if fault.refused:
            playing[row].lost = f"it is refused: {fault}"
            continue
        log.error("demonstrations: row %d: %s%s", row, fault, fault.place)
        playing[row].lost = f"the environment failed in {fault}"


def _observe(env: GuardedEnv, rows: NDArray[np.intp], episodes: list[DemoEpisode]) -> None:
    """Add the current observation to each episode, in the simulator station's form; drop episodes that are not
    finite."""
    seen = {name: np.empty((len(rows), *a.shape), a.dtype) for name, a in env.spec.observation.items()}
    env.observe(rows, seen)
    floating = {f"observation {name}": array for name, array in seen.items() if array.dtype.kind == "f"}
    for i, what in first_not_finite(floating).items():
        episodes[i].lost = f"{what} is not finite"
        env.discard(int(rows[i]))
    for i, episode in enumerate(episodes):
        obs = {name: array[i] for name, array in seen.items()}
        obs[INSTRUCTION] = np.array(episode.task, np.int64)
        obs[PROGRESS] = np.array(episode.steps / env.spec.max_steps, np.float32)
        episode.obs.append(obs)


def _act(
    env: GuardedEnv,
    rows: NDArray[np.intp],
    episodes: list[DemoEpisode],
    noise_std: float,
    step: StepSettings,
    actor: Actor,
) -> NDArray[np.bool_]:
    """Execute one chunk in these rows and add its labels to the episodes; returns which continue, [n]."""
    spec = env.spec
    if spec.chunk:
        return _act_whole(env, rows, episodes, actor)
    advance = env.step if spec.step_rows else whole_batch(env)
    labels = np.zeros((len(rows), step.chunk, spec.action.dim), spec.action.dtype)
    going = np.ones(len(rows), bool)
    for c in range(step.chunk):
        alive = np.flatnonzero(going)
        if not len(alive):
            break
        # A row that ends keeps its last label for the rest of the chunk.
        labels[alive, c:] = actor(rows[alive], [episodes[i] for i in alive])[:, None]
        floating = spec.action.kind == "continuous"
        for place in first_not_finite({"action": labels[alive, c]} if floating else {}):
            episodes[alive[place]].lost = "the expert's action is not finite"
            going[alive[place]] = False
        alive = np.flatnonzero(going)
        if not len(alive):
            break
        executed = labels[alive, c]
        if floating:
            noise = np.stack([_noise(episodes[i], noise_std, spec.action.dim) for i in alive])
            executed = np.clip(executed + noise, spec.action.low, spec.action.high).astype(np.float32)
        left = np.array([spec.max_steps - episodes[i].steps for i in alive])
        result = step_chunk(advance, rows[alive], executed[:, None], step.action_repeat, left)
        for place, i in enumerate(alive):
            episodes[i].add_success(int(result.success[place]))
            episodes[i].steps += int(result.steps[place])
        going[alive] = ~(result.terminated | result.truncated)
        _lose_stepped(env, rows[alive], result, [episodes[i] for i in alive])
    for episode, label in zip(episodes, labels, strict=True):
        episode.labels.append(label)
    return going


def _act_whole(env: GuardedEnv, rows: NDArray[np.intp], episodes: list[DemoEpisode], actor: Actor) -> NDArray[np.bool_]:
    """`_act` for an environment that takes whole chunks. Discrete actions get no noise."""
    going = np.zeros(len(rows), bool)
    try:
        labels = actor(rows, episodes)
    except RowsFailed as failed:
        labels = failed.result
        for row, episode in zip(map(int, rows), episodes, strict=True):
            if row in failed.errors:
                episode.lost = f"it is refused: {failed.errors[row]}"
    played = np.flatnonzero(_not_lost(episodes, np.arange(len(rows))))
    if not len(played):
        return going
    episodes = [episodes[i] for i in played]
    left = np.array([env.spec.max_steps - episode.steps for episode in episodes])
    result = step_whole(env.step, rows[played], labels[played], left)
    for place, episode in enumerate(episodes):
        episode.add_success(int(result.success[place]))
        episode.steps += 1
        episode.labels.append(labels[played[place]])
    _lose_stepped(env, rows[played], result, episodes)
    going[played] = ~(result.terminated | result.truncated)
    return going


def _lose_stepped(
    env: GuardedEnv, rows: NDArray[np.intp], result: ChunkResult, episodes: Sequence[DemoEpisode]
) -> None:
    failed = result.nan_rewards
    _lose_failed(env, rows[failed], [episodes[int(i)] for i in failed])


def _noise(episode: DemoEpisode, noise_std: float, dim: int) -> NDArray[np.float32]:
    """Noise for one executed action [A]: zero in clean episodes and for the last entry."""
    noise = np.zeros(dim, np.float32)
    if episode.noise is not None:
        noise[: max(1, dim - 1)] = episode.noise.normal(0.0, noise_std, max(1, dim - 1))
    return noise
