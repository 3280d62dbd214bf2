"""Places objects and goals beyond the range in which Meta-World places them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.placement import draw_beyond

#: A range narrower than this (metres) is a fixed coordinate.
_NARROW = 0.005


def place_beyond(env: Any) -> None:
    """Have this environment draw positions from a shell around Meta-World's range: outside of it in one horizontal
    coordinate at least, by up to a quarter of the range. Heights stay in their range."""

    def draw() -> NDArray[np.float64]:
        low, high = np.array(env._random_reset_space.low), np.array(env._random_reset_space.high)
        wide = (high - low > _NARROW) & (np.arange(len(low)) % 3 != 2)
        drawn = draw_beyond(env.np_random.uniform, low, high, wide)
        env._last_rand_vec = drawn
        return drawn

    env._get_state_rand_vec = draw
