"""Functions that make vector environments, for `gymnasium_vector`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

Made = gymnasium.vector.VectorEnv[Any, Any, Any]


class Countdown(gymnasium.Env[Any, Any]):
    """Ends when its seed's number of steps is done; the info says how it went."""

    observation_space = Dict({"left": Box(-np.inf, np.inf, (1,)), "last": Dict({"action": Discrete(9)})})
    action_space = Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed, options=options)
        self.left, self.action = int(self.np_random.integers(2, 9)), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self.left, self.action = self.left - 1, int(action)
        info = {"success": self.left == 0 and self.action == 2, "left": float(self.left)}
        info["last"] = {"action": 10.0 * self.action}
        return self._seen(), float(self.left), self.left == 0, False, info

    def _seen(self) -> dict[str, Any]:
        return {"left": np.array([self.left], np.float32), "last": {"action": self.action}}


class Raised(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The reward is so many times as high."""

    def __init__(self, env: gymnasium.Env[Any, Any], times: float = 2.0) -> None:
        super().__init__(env)
        self.times = times

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        observation, reward, *others = self.env.step(action)
        return (observation, self.times * float(reward), *others)


def counting(num_envs: int, autoreset: str = "NextStep", *, silent: bool = False) -> Made:
    """silent: it does not say what it does with a row that ended."""
    env = SyncVectorEnv([Countdown] * num_envs, autoreset_mode=AutoresetMode(autoreset))
    if silent:
        env.metadata = {name: value for name, value in env.metadata.items() if name != "autoreset_mode"}
    return env


def too_few(num_envs: int) -> Made:
    return counting(num_envs + 1)


def no_vector(num_envs: int) -> gymnasium.Env[Any, Any]:
    return Countdown()


class Fragile(Countdown):
    """Is broken for good after an action 3, and refuses the seed 13."""

    broken = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if seed == 13:
            raise ValueError("no such state")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self.broken |= int(action) == 3
        if self.broken:
            raise RuntimeError("the solver diverged")
        return super().step(action)


class Ageing(gymnasium.Env[Any, Any]):
    """Shows how many episodes it has begun; draws itself, in that shade of grey."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as Gymnasium has it
    observation_space = Box(0, 255, (1,))
    action_space = Box(-1.0, 1.0, (1,))

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.age = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed, options=options)
        self.age += 1
        return np.array([self.age], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        return np.array([self.age], np.float32), 1.0, False, False, {}

    def render(self) -> Any:
        return np.full((20, 30, 3), self.age, np.uint8) if self.render_mode == "rgb_array" else None


gymnasium.register("Ageing-v0", "tests.envs.vector_envs:Ageing", max_episode_steps=5)
gymnasium.register("Fragile-v0", "tests.envs.vector_envs:Fragile", max_episode_steps=50)
gymnasium.register("Countdown-v0", "tests.envs.vector_envs:Countdown", max_episode_steps=50)
