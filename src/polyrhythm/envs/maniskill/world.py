"""One ManiSkill environment of one row (CPU) or many (GPU), seen through numpy.

ManiSkill draws every camera at each reset and step. Here it does not: only `observe` draws, because an action chunk
needs one image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.appearance import Appearance
from polyrhythm.envs.maniskill.appearance import Scene
from polyrhythm.envs.maniskill.construction import episode_steps, make_env
from polyrhythm.envs.maniskill.placement import place_beyond
from polyrhythm.errors import ConfigError
from polyrhythm.specs import ActionSpec, ArraySpec

if TYPE_CHECKING:
    from polyrhythm.envs.maniskill.settings import ManiSkillSettings

#: ManiSkill's depth is in whole millimetres.
_MILLIMETRES = 1000.0


class Outcome(NamedTuple):
    """What a step gave each row, [rows] each: reward; ended by the task; success; metrics by name, NaN without one."""

    reward: NDArray[np.float32]
    ended: NDArray[np.bool_]
    success: NDArray[np.bool_]
    metrics: Mapping[str, NDArray[np.floating]]


class World:
    """A ManiSkill environment of one task with `rows` rows; used by one thread. Raises as `make_env` does."""

    def __init__(self, settings: ManiSkillSettings, task: str, rows: int) -> None:
        self.settings, self.task, self.rows = settings, task, rows
        self.limit = episode_steps(settings, task)
        self._env = make_env(settings, task, rows)
        if rows > 1 and self._env.reconfiguration_freq:
            raise ConfigError(
                f"env.backend = gpu: {task} makes all objects anew at a reset, so rows cannot be reset alone; "
                "set it to cpu"
            )
        self.reports_success = "success" in self._env.get_info()
        self._camera = "" if settings.observation == "state" else self._find_camera()
        if self._camera:  # its own get_obs, which step and reset call, would draw
            self._env.get_obs = self._observe_numbers
        self._scene = Scene(self._env, self._camera)
        self._numbers = np.zeros((rows, 0), np.float32)
        self._reset(list(range(rows)), 0)
        self.action = self._action_spec()

    def reset(self, row: int, seed: int) -> None:
        """Begin an episode in one row; its numbers and images change, those of other rows do not.

        seed: 0..2^63-1; ManiSkill takes 32 bits, so it is hashed to these. On a GPU each row is reset by a call of its
        own: ManiSkill draws the states of all rows that are reset together from the seed of the first.
        """
        self._reset([row], int(np.random.SeedSequence(seed).generate_state(1)[0]))
        if self.settings.placement == "beyond":  # with one row, as another appearance
            place_beyond(self._env, self.task, seed)
            self._numbers = self._to_numbers(self._env.get_obs(self._env.get_info()))
        if appearance := Appearance.draw(self.settings.appearance, seed):
            self._scene.show(appearance)

    def step(self, actions: NDArray[np.generic]) -> Outcome:
        """One step of all rows; actions [rows,A], clipped to the bounds."""
        clipped = np.clip(actions, self.action.low, self.action.high).astype(np.float32, copy=False)
        observation, reward, ended, _, info = self._env.step(clipped)
        self._numbers = self._to_numbers(observation)
        success, ended = self._flag(info.get("success")), self._flag(ended)
        goes_on = success & ~self._flag(info.get("fail")) & (not self.settings.end_on_success)
        return Outcome(
            _numpy(reward).astype(np.float32).reshape(self.rows),
            ended & ~goes_on,
            success,
            {name: self._metric(name, info.get(name)) for name in self.settings.metrics},
        )

    def observe(self) -> dict[str, NDArray[np.generic]]:
        """The observation of all rows, [rows, ...] by name; draws the images."""
        if not self._camera:
            return {"state": self._numbers}
        drawn = self._env._get_obs_sensor_data()[self._camera]
        found: dict[str, NDArray[np.generic]] = {"image": _numpy(drawn["rgb"]), "proprio": self._numbers}
        if self.settings.observation == "rgbd":
            found["depth"] = (_numpy(drawn["depth"]) / _MILLIMETRES).astype(np.float32)
        return found

    def arrays(self) -> dict[str, ArraySpec]:
        """What `observe` gives for one row."""
        return {name: ArraySpec(array.shape[1:], str(array.dtype)) for name, array in self.observe().items()}

    def render(self, row: int) -> NDArray[np.uint8]:
        """The row as ManiSkill's camera for videos sees it: [H,W,3]. Raises ConfigError if the task has none."""
        picture = self._env.render_rgb_array()
        if picture is None:
            raise ConfigError(f"env.tasks = {self.task}: it has no camera for videos; use env.observation=rgb")
        shown: NDArray[np.uint8] = _numpy(picture)[row]
        return shown

    def close(self) -> None:
        """Free the simulation."""
        self._env.close()

    def _reset(self, rows: list[int], seed: int) -> None:
        from mani_skill.utils import common

        where = common.to_tensor(np.array(rows, np.int64), device=self._env.device)
        # The seed of every row, so that a row's own generator is the same wherever the row is.
        observation, _ = self._env.reset(seed=[seed] * self.rows, options={"env_idx": where})
        numbers = self._to_numbers(observation)
        if len(rows) < self.rows:
            kept = self._numbers.copy()
            kept[rows] = numbers[rows]
            numbers = kept
        self._numbers = numbers

    def _observe_numbers(self, info: Any = None, unflattened: bool = False) -> Any:  # noqa: ARG002
        """In place of ManiSkill's `get_obs`: what it gives without images."""
        return self._env._get_obs_state_dict(self._env.get_info() if info is None else info)

    def _to_numbers(self, observation: Any) -> NDArray[np.float32]:
        """Numbers of all rows as a new array, [rows,N]."""
        from mani_skill.utils import common

        if self._camera and self.settings.proprio == "joints":
            observation = observation["agent"]["qpos"]
        elif self._camera:
            observation = common.flatten_state_dict(observation, use_torch=True, device=self._env.device)
        return np.array(_numpy(observation), np.float32)

    def _flag(self, value: Any) -> NDArray[np.bool_]:
        """[rows] flags; false where the task has none."""
        return np.zeros(self.rows, np.bool_) if value is None else _numpy(value).astype(np.bool_).reshape(self.rows)

    def _metric(self, name: str, value: Any) -> NDArray[np.floating]:
        """[rows] numbers; NaN where the task has none."""
        if value is None:
            return np.full(self.rows, np.nan, np.float32)
        numbers = _numpy(value)
        if numbers.size != self.rows or numbers.dtype.kind not in "biuf":
            shape = list(numbers.shape)
            raise ConfigError(f"env.metrics.{name}: {self.task} gives an array {shape}, not a number; remove it")
        return numbers.astype(np.float32).reshape(self.rows)

    def _find_camera(self) -> str:
        known = list(self._env._sensors)
        wanted = self.settings.camera or (known[0] if known else "")
        if wanted not in known:
            fix = f"choose one of {', '.join(known)}" if known else "set env.observation to state"
            raise ConfigError(f"env.camera = {wanted!r}: {self.task} has no such camera; {fix}")
        return wanted

    def _action_spec(self) -> ActionSpec:
        space = self._env.single_action_space
        shape = getattr(space, "shape", None)
        if space is None or shape is None or len(shape) != 1:
            raise ConfigError(f"env.tasks = {self.task}: its action is no vector but {space}; choose a one-robot task")
        return ActionSpec("continuous", shape[0], low=tuple(space.low), high=tuple(space.high))


def _numpy(value: Any) -> NDArray[Any]:
    """A tensor on any device, or a number, as an array."""
    from mani_skill.utils import common

    return np.asarray(common.to_numpy(value))
