"""A Gymnasium environment whose episodes say how they went under the key that is asked for."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Reporting(gymnasium.Env[Any, Any]):
    """Four steps of reward 1; every other seed succeeds. key: "" for an info without it; only: in successes alone."""

    action_space, observation_space = Discrete(2), Box(-1, 1, (2,))

    def __init__(self, key: str = "", *, only: bool = False) -> None:
        self.key, self.only = key, only

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.good = 0, bool(self.np_random.integers(2))
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        done = self.steps == 4
        told = self.key and (self.good or not self.only)
        info = {"height": 0.5, **({self.key: self.good and done} if told else {})}
        return self._seen(), 1.0, done, False, info

    def _seen(self) -> Any:
        return np.array([self.steps / 4, self.good], np.float32)


gymnasium.register("Reporting-v0", Reporting, max_episode_steps=9)
