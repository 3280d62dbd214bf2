"""Defines the work that all systems do, as plain functions and classes on numpy, with gymnasium on request.

Runs in the environment of every peer and imports nothing else of this package.

Two workloads. `sleeping`: single environments whose step sleeps a random time, a policy that sleeps when it acts and a
training step that sleeps too; waiting decides the speed. `zero_cost`: an environment of many rows that costs a few
array operations, a small network, PPO; overhead decides the speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: Every system's network: two hidden layers of this many tanh units, separate for policy and value.
HIDDEN = (64, 64)
GAMMA, LAMBDA, CLIP, LEARNING_RATE = 0.99, 0.95, 0.2, 3e-4


@dataclass(frozen=True, slots=True)
class Sleeping:
    """The sleeping workload; times in seconds. A step takes lognormal(mean step_s, sigma); a forward pass for actions
    act_s + act_row_s per row, one pass at a time; an update train_s.

    An update uses `envs` trajectories of `episode_steps` steps. max_lag: most versions that a sample may lag, if the
    system has such a setting.
    """

    envs: int = 16
    step_s: float = 0.010
    sigma: float = 0.8
    act_s: float = 0.010
    act_row_s: float = 0.0001
    train_s: float = 0.7
    episode_steps: int = 50
    max_lag: int = 2
    observation_dim: int = 8
    action_dim: int = 7

    @property
    def transitions(self) -> int:
        """Transitions of an update."""
        return self.envs * self.episode_steps

    def acting_s(self, rows: int) -> float:
        """Seconds that a forward pass of this many rows sleeps."""
        return self.act_s + rows * self.act_row_s


@dataclass(frozen=True, slots=True)
class ZeroCost:
    """The workload without sleep. Rows step together for episodes of episode_steps; an update trains on one episode of
    each for `epochs` epochs, in optimizer steps of minibatch transitions."""

    rows: int = 16
    episode_steps: int = 128
    epochs: int = 4
    observation_dim: int = 16
    action_dim: int = 4

    @property
    def transitions(self) -> int:
        """Transitions of an update."""
        return self.rows * self.episode_steps

    @property
    def minibatch(self) -> int:
        """Transitions of an optimizer step."""
        return max(512, self.rows * 32)


class SleepingEpisodes:
    """One environment: a step sleeps, observations are noise, the reward is 1, the time limit ends an episode.

    `sleep` is a parameter so that tests need no real time.
    """

    def __init__(self, work: Sleeping, seed: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._work, self._rng, self._sleep, self._steps = work, np.random.default_rng(seed), sleep, 0
        self._location = math.log(work.step_s) - 0.5 * work.sigma**2

    def reset(self) -> Floats:
        """The first observation, float32 [observation_dim]."""
        self._steps = 0
        return self._observation()

    def step(self) -> tuple[Floats, bool]:
        """The next observation, and whether the time limit is reached."""
        self._sleep(self._rng.lognormal(self._location, self._work.sigma))
        self._steps += 1
        return self._observation(), self._steps >= self._work.episode_steps

    def _observation(self) -> Floats:
        return self._rng.random(self._work.observation_dim, dtype=np.float32)


class Drift:
    """A batch of rows whose states decay and are pushed by actions, in a few array operations; rows end together.

    The same arithmetic as `polyrhythm_bench/workloads/drift_env.py`.
    """

    def __init__(self, work: ZeroCost) -> None:
        self.work, self.steps = work, 0
        shape = (work.action_dim, work.observation_dim)
        self._push = np.random.default_rng(0).normal(size=shape).astype(np.float32) * np.float32(0.1)
        self._phase = np.arange(work.observation_dim)
        self._rng = np.random.default_rng(1)
        self.state = np.zeros((work.rows, work.observation_dim), np.float32)

    def reset(self) -> Floats:
        """New states of all rows, float32 [rows, observation_dim]."""
        self.steps = 0
        starts = self._rng.integers(0, 1000, self.work.rows)
        self.state = np.sin(starts[:, None] + self._phase).astype(np.float32)
        return self.state

    def step(self, actions: Floats) -> tuple[Floats, Floats, bool]:
        """Actions [rows, action_dim] to states, rewards [rows], and whether the time limit is reached."""
        self.state = self.state * np.float32(0.9) + np.clip(actions, -1.0, 1.0) @ self._push
        self.steps += 1
        return self.state, -np.abs(self.state[:, 0]), self.steps >= self.work.episode_steps


def gymnasium_sleeping(work: Sleeping, seed: int) -> Any:
    """The sleeping environment as a gymnasium.Env of whichever version is installed."""
    import gymnasium
    from gymnasium.spaces import Box

    class SleepingEnv(gymnasium.Env):  # type: ignore[misc]
        observation_space = Box(0.0, 1.0, (work.observation_dim,), np.float32)
        action_space = Box(-1.0, 1.0, (work.action_dim,), np.float32)

        def __init__(self) -> None:
            self._episodes = SleepingEpisodes(work, seed)

        def reset(self, **_: Any) -> tuple[Floats, dict[str, Any]]:
            return self._episodes.reset(), {}

        def step(self, action: Floats) -> tuple[Floats, float, bool, bool, dict[str, Any]]:  # noqa: ARG002
            observation, over = self._episodes.step()
            return observation, 1.0, False, over, {}

    return SleepingEnv()
