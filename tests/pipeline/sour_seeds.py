"""CartPole that raises in every episode of one seed in four."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class SourSeeds(CartPoleEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._sour = seed is not None and seed % 4 == 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self._sour:
            raise RuntimeError("the solver diverged")
        return super().step(action)


gymnasium.register("SourSeeds-v0", SourSeeds, max_episode_steps=40)
