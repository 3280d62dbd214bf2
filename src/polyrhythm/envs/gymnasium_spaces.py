"""Converts Gymnasium's action spaces to specs. `where`: the environment's setting, which begins every error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import ConfigError
from polyrhythm.specs import ActionSpec

if TYPE_CHECKING:
    import gymnasium


def action_spec(space: gymnasium.Space[Any], where: str) -> ActionSpec:
    """Spec of an action space."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(bound.astype(float).ravel().tolist()) for bound in (space.low, space.high))
        if not all(a < b for a, b in zip(low, high, strict=True)):
            raise ConfigError(f"{where}: actions are {space}, with an entry that cannot change; wrap it away")
        return ActionSpec("continuous", len(low), low=low, high=high)
    counts: tuple[int, ...] = ()
    if isinstance(space, Discrete):
        counts = (int(space.n),)
    elif isinstance(space, MultiDiscrete):
        counts = tuple(space.nvec.ravel().tolist())
    elif isinstance(space, MultiBinary):
        counts = (2,) * int(np.prod(space.shape))
    if max(counts, default=0) < 2:
        what = f"{space}, with nothing to choose" if counts else space
        raise ConfigError(
            f"{where}: actions are {what}; wrap them into a float Box, Discrete, MultiDiscrete or MultiBinary"
        )
    return ActionSpec("discrete", len(counts), counts=counts)


def action_converter(space: gymnasium.Space[Any]) -> Callable[[NDArray[np.generic]], Sequence[Any] | NDArray[Any]]:
    """Function from actions [n,A] to n actions of the space."""
    from gymnasium.spaces import Discrete, MultiDiscrete

    if isinstance(space, Discrete):
        start = int(space.start)
        return lambda actions: (actions[:, 0] + start).tolist()
    shape, dtype = space.shape or (), space.dtype
    offset = space.start if isinstance(space, MultiDiscrete) else 0
    return lambda actions: np.asarray(actions, dtype).reshape(len(actions), *shape) + offset
