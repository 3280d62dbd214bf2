"""Converts Gymnasium's spaces to specs. `where`: the environment's setting, which begins every error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import ConfigError
from polyrhythm.specs import ActionSpec, ArraySpec

if TYPE_CHECKING:
    import gymnasium

#: Observation key of an environment whose observation is one array.
STATE = "state"

#: Path of an array in a nested observation; () is the observation itself.
Path = tuple[str, ...]


def array_paths(
    space: gymnasium.Space[Any], where: str, rename: Mapping[str, str], drop: Sequence[str] = ()
) -> dict[str, Path]:
    """Observation key → path: nested keys joined by a dot, `state` for a single array; without those of `drop`, then
    renamed."""
    paths = {".".join(path) or STATE: path for path in _leaves(space, where)}
    for key in drop:
        if key not in paths:
            raise ConfigError(f"env.drop = {key}: no such observation, there are {', '.join(paths)}; name one of them")
    paths = {key: path for key, path in paths.items() if key not in drop}
    if not paths:
        raise ConfigError(f"env.drop = {list(drop)}: no observation is left; leave out one of them")
    for old in rename:
        if old not in paths:
            raise ConfigError(f"env.rename.{old} = {rename[old]}: no such observation, there are {', '.join(paths)}")
    named = [(rename.get(key, key), path) for key, path in paths.items()]
    for new, _ in named:
        if not new or [name for name, _ in named].count(new) > 1:
            raise ConfigError(f"env.rename = {dict(rename)}: two observations would be {new!r}; give each its own name")
    return dict(named)


def _leaves(space: gymnasium.Space[Any], where: str) -> list[Path]:
    import gymnasium

    if not isinstance(space, gymnasium.spaces.Dict):
        return [()]
    found: list[Path] = []
    for key, part in space.spaces.items():
        if "." in key:
            raise ConfigError(f"{where}: observation key {key!r} has a dot; rename it with a wrapper")
        found += [(key, *path) for path in _leaves(part, where)]
    return found


def array_spec(space: gymnasium.Space[Any], path: Path, where: str) -> ArraySpec:
    """Spec of the array at this path of an observation space."""
    import gymnasium

    for name in path:
        assert isinstance(space, gymnasium.spaces.Dict)
        space = space[name]
    kinds = (
        gymnasium.spaces.Box | gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete | gymnasium.spaces.MultiBinary
    )
    if not isinstance(space, kinds) or space.shape is None or space.dtype is None:
        key = ".".join(path) or STATE
        drop = f", or leave it out by env.drop=[{key}]" if path else ""
        raise ConfigError(f"{where}: observation {key} is {space}; wrap it into a Box, Discrete or Dict space{drop}")
    return ArraySpec(space.shape, "float32" if space.dtype == np.float64 else str(space.dtype))


def action_spec(space: gymnasium.Space[Any], where: str) -> ActionSpec:
    """Spec of an action space."""
    from gymnasium.spaces import Box, Discrete, MultiDiscrete

    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(bound.astype(float).ravel().tolist()) for bound in (space.low, space.high))
        return ActionSpec("continuous", len(low), low=low, high=high)
    if isinstance(space, Discrete):
        return ActionSpec("discrete", 1, choices=int(space.n))
    if isinstance(space, MultiDiscrete) and len(set(space.nvec.ravel().tolist())) == 1:
        return ActionSpec("discrete", space.nvec.size, choices=int(space.nvec.flat[0]))
    raise ConfigError(
        f"{where}: actions are {space}; wrap them into a float Box, Discrete or MultiDiscrete of equal counts"
    )


def action_converter(space: gymnasium.Space[Any]) -> Callable[[NDArray[np.generic]], Sequence[Any] | NDArray[Any]]:
    """Function from actions [n,A] to n actions of the space."""
    from gymnasium.spaces import Discrete, MultiDiscrete

    if isinstance(space, Discrete):
        start = int(space.start)
        return lambda actions: (actions[:, 0] + start).tolist()
    shape, dtype = space.shape or (), space.dtype
    offset = space.start if isinstance(space, MultiDiscrete) else 0
    return lambda actions: np.asarray(actions, dtype).reshape(len(actions), *shape) + offset
