"""Any Gymnasium environment as an env batch: `rows` separate instances stepped in one plain loop.

No Gymnasium vector environment and no wrapper beyond the registered ones: rows reset and step on their own,
nothing resets by itself, and the time limit is counted here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.errors import ConfigError
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

if TYPE_CHECKING:
    import gymnasium

#: Observation key of an environment whose observation is one array.
STATE = "state"


class GymnasiumSettings(BaseModel):
    """A registered Gymnasium environment with one task.

    Observation: `state` for one array; a Dict space gives its keys, nested ones joined by a dot. float64 becomes
    float32. Actions: Box (flattened), Discrete, or MultiDiscrete with equal counts. `success` is what the
    environment reports as `success` or `is_success` in its info, else false.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    needs: ClassVar = ("gymnasium",)

    type: Literal["gymnasium"] = "gymnasium"
    id: str
    """Registered id such as `CartPole-v1`, or `module:id` to import the module that registers it."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    max_steps: Annotated[int, Field(ge=0)] = 0
    """Env steps after which an episode is truncated; 0 takes the registered limit."""

    def spec(self) -> EnvSpec:
        """What a batch offers; makes one environment to see."""
        env = self.make()
        try:
            return self.spec_of(env)
        finally:
            env.close()

    def build(self, rows: int) -> GymnasiumBatch:
        """A batch of `rows` environments."""
        return GymnasiumBatch(self, rows)

    def rendering(self) -> GymnasiumSettings | None:
        """The same environments with `render_mode: rgb_array`; None where they do not offer that."""
        env = self.make()
        try:
            offered = env.metadata.get("render_modes") or ()
        finally:
            env.close()
        if "rgb_array" not in offered:
            return None
        return self.model_copy(update={"kwargs": {**self.kwargs, "render_mode": "rgb_array"}})

    def make(self) -> gymnasium.Env[Any, Any]:
        """One environment without Gymnasium's checks and time limit. ConfigError: unknown id, bad kwargs."""
        import gymnasium

        registered = _registered(self.id)
        try:
            env: gymnasium.Env[Any, Any] = gymnasium.make(
                registered.id, max_episode_steps=-1, disable_env_checker=True, **self.kwargs
            )
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(
                f"env.id = {self.id}: cannot be made with kwargs {dict(self.kwargs)} ({error})"
            ) from error
        return env

    def spec_of(self, env: gymnasium.Env[Any, Any]) -> EnvSpec:
        """The spec of an environment that `make` gave."""
        limit = self.max_steps or _registered(self.id).max_episode_steps
        if not limit:
            raise ConfigError(f"env.max_steps = 0: {self.id} registers no time limit; set max_steps above 0")
        spaces = _array_spaces(env.observation_space, "", self.id)
        return EnvSpec(
            observation={key: _array_spec(space, key, self.id) for key, space in spaces.items()},
            action=_action_spec(env.action_space, self.id),
            tasks=(Task(self.id, self.id),),
            max_steps=limit,
        )


class GymnasiumBatch:
    """`rows` environments, and the last observation of each in one array per key, so that observing is one copy."""

    def __init__(self, settings: GymnasiumSettings, rows: int) -> None:
        first = settings.make()
        self.rows, self.spec = rows, settings.spec_of(first)
        self._envs = [first, *(settings.make() for _ in range(rows - 1))]
        self._to_env = _action_converter(first.action_space)
        self._single = set(self.spec.observation) == {STATE} and not _is_dict(first.observation_space)
        self._seen = {key: np.zeros((rows, *a.shape), a.dtype) for key, a in self.spec.observation.items()}
        self._steps = [0] * rows

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            assert task == 0, f"task {task}: a Gymnasium environment has one task"
            observation, _ = self._envs[row].reset(seed=seed)
            self._keep(row, observation)
            self._steps[row] = 0

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        n, limit = len(rows), self.spec.max_steps
        rewards, terminated, truncated, success = [0.0] * n, [False] * n, [False] * n, [False] * n
        for i, (row, action) in enumerate(zip(rows, self._to_env(actions), strict=True)):
            observation, rewards[i], terminated[i], cut, info = self._envs[row].step(action)
            self._keep(row, observation)
            self._steps[row] += 1
            truncated[i] = not terminated[i] and (cut or self._steps[row] >= limit)
            if info:
                success[i] = bool(info.get("success", info.get("is_success", False)))
        return StepResult(
            np.array(rewards, np.float32),
            np.array(terminated, np.bool_),
            np.array(truncated, np.bool_),
            np.array(success, np.bool_),
        )

    def observe(self, rows: RowNumbers, out: dict[str, NDArray[np.generic]]) -> None:
        picked = np.asarray(rows)
        for key, seen in self._seen.items():
            out[key][: len(rows)] = seen[picked]

    def render(self, row: int) -> NDArray[np.uint8]:
        """What the environment draws with `render_mode: rgb_array`: [H,W,3]. ConfigError: a package is missing."""
        import gymnasium

        try:
            return np.asarray(self._envs[row].render())
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"rendering: {error}") from error

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _keep(self, row: int, observation: Any) -> None:
        if self._single:
            self._seen[STATE][row] = observation
            return
        for key, seen in self._seen.items():
            part = observation
            for name in key.split("."):
                part = part[name]
            seen[row] = part


def _registered(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """Gymnasium's own spec of an id."""
    import gymnasium

    try:
        # An id of the form module:id imports the module first, which registers it.
        module, _, name = env_id.rpartition(":")
        if module:
            __import__(module)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        near = difflib.get_close_matches(env_id, gymnasium.registry, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"env.id = {env_id}: no such Gymnasium environment ({error}); the nearest is {near}"
        ) from error


def _is_dict(space: gymnasium.Space[Any]) -> bool:
    import gymnasium

    return isinstance(space, gymnasium.spaces.Dict)


def _array_spaces(space: gymnasium.Space[Any], prefix: str, env_id: str) -> dict[str, gymnasium.Space[Any]]:
    """The leaves of a (nested) Dict space by dotted key; a plain space is the one leaf `state`."""
    import gymnasium

    if not isinstance(space, gymnasium.spaces.Dict):
        return {prefix or STATE: space}
    leaves: dict[str, gymnasium.Space[Any]] = {}
    for key, part in space.spaces.items():
        if "." in key:
            raise ConfigError(f"env.id = {env_id}: observation key {key!r} has a dot; rename it with a wrapper")
        leaves.update(_array_spaces(part, f"{prefix}.{key}" if prefix else key, env_id))
    return leaves


def _array_spec(space: gymnasium.Space[Any], key: str, env_id: str) -> ArraySpec:
    import gymnasium

    kinds = (
        gymnasium.spaces.Box | gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary
    )
    if not isinstance(space, kinds) or space.shape is None or space.dtype is None:
        raise ConfigError(
            f"env.id = {env_id}: observation {key} is {space}; wrap it into a Box, Discrete or Dict space"
        )
    return ArraySpec(space.shape, "float32" if space.dtype == np.float64 else str(space.dtype))


def _action_spec(space: gymnasium.Space[Any], env_id: str) -> ActionSpec:
    from gymnasium.spaces import Box, Discrete, MultiDiscrete

    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(bound.astype(float).ravel().tolist()) for bound in (space.low, space.high))
        return ActionSpec("continuous", len(low), low=low, high=high)
    if isinstance(space, Discrete):
        return ActionSpec("discrete", 1, choices=int(space.n))
    if isinstance(space, MultiDiscrete) and len(set(space.nvec.ravel().tolist())) == 1:
        return ActionSpec("discrete", space.nvec.size, choices=int(space.nvec.flat[0]))
    raise ConfigError(
        f"env.id = {env_id}: actions are {space}; wrap them into a float Box, Discrete or MultiDiscrete of equal counts"
    )


def _action_converter(space: gymnasium.Space[Any]) -> Callable[[NDArray[np.generic]], Sequence[Any] | NDArray[Any]]:
    """From actions [n,A] to n actions as the space wants them."""
    from gymnasium.spaces import Discrete, MultiDiscrete

    if isinstance(space, Discrete):
        start = int(space.start)
        return lambda actions: (actions[:, 0] + start).tolist()
    shape, dtype = space.shape or (), space.dtype
    offset = space.start if isinstance(space, MultiDiscrete) else 0
    return lambda actions: np.asarray(actions, dtype).reshape(len(actions), *shape) + offset
