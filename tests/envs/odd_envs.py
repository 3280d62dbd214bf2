"""A Gymnasium environment whose reset or step returns what it is told to."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

SPACES: dict[str, gymnasium.Space[Any]] = {
    "three": Box(-9, 9, (3,), np.float32),
    "picture": Box(0, 255, (2, 2), np.uint8),
    "counts": Box(-9, 9, (2,), np.int32),
    "discrete": Discrete(3, start=2),
    "many": MultiDiscrete([2, 3], start=[1, -1]),
    "flags": MultiBinary(2),
    "nested": Dict({"arm": Dict({"x": Box(-9, 9, (1,))}), "mode": Discrete(2)}),
    "tuple": Tuple((Discrete(2), Box(-9, 9, (2,)))),
    "huge": Discrete(10**6),
}
SEEN: dict[str, Any] = {
    "three": np.zeros(3, np.float32),
    "picture": np.full((2, 2), 7, np.uint8),
    "counts": np.zeros(2, np.int32),
    "discrete": 2,
    "many": np.array([1, -1]),
    "flags": np.zeros(2, np.int8),
    "nested": {"arm": {"x": np.zeros(1, np.float32)}, "mode": 0},
    "tuple": (0, np.zeros(2, np.float32)),
    "huge": 3,
}


class Odd(gymnasium.Env[Any, Any]):
    """first, later: observations of reset and step; reward, terminated, truncated: of step; call: returns of reset and
    step as a whole, which take the place of these."""

    action_space = Discrete(2)

    def __init__(self, space: str = "three", **given: Any) -> None:
        self.observation_space, self.given = SPACES[space], given
        self.usual = SEEN[space]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.given.get("whole_reset", (self.given.get("first", self.usual), {}))

    def step(self, action: Any) -> Any:
        flags = self.given.get("terminated", False), self.given.get("truncated", False)
        usual = self.given.get("later", self.usual), self.given.get("reward", 0.5), *flags, {}
        return self.given.get("whole_step", usual)


class OldGym(Odd):
    """Its reset takes no seed, and returns the observation alone."""

    def reset(self) -> Any:  # type: ignore[override]
        return self.usual


class Seeded(Odd):
    """numpy's old generator takes 32 bits of a seed, C code 31."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        state = np.random.RandomState(seed)
        assert int(np.int32(seed)) >= 0
        return state.uniform(-1, 1, 3).astype(np.float32), {}


class Unwrapping(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Its step returns the four values of the old gym."""

    def step(self, action: Any) -> Any:
        observation, reward, done, _, info = self.env.step(action)
        return observation, reward, done, info


class Together(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A vector environment; state, reward, terminated: of its step; four: it returns four values."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, num_envs: int, given: dict[str, Any]) -> None:
        self.num_envs, self.given = num_envs, given
        self.single_observation_space, self.single_action_space = SPACES["three"], Discrete(2)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((self.num_envs, 3), np.float32), {}

    def step(self, actions: Any) -> Any:
        never = np.zeros(self.num_envs, bool)
        state = self.given.get("state", np.zeros((self.num_envs, 3), np.float32))
        found = state, self.given.get("reward", np.ones(self.num_envs)), self.given.get("terminated", never), never, {}
        return found[:4] if "four" in self.given else found


def together(num_envs: int, **given: Any) -> Together:
    return Together(num_envs, given)


for name, kind in (("Odd-v0", Odd), ("OldGym-v0", OldGym), ("Seeded-v0", Seeded)):
    gymnasium.register(name, kind, max_episode_steps=4)
