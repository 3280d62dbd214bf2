"""Seeds robosuite for one reset: numpy's and Python's global random state, and the environment's own generator.

robosuite up to 1.5.1 draws from the global states, 1.5.2 and RoboCasa from a generator that the environment and its
placement samplers share, and still in places from the global ones. So all are set, and the global ones set back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_GLOBAL = threading.Lock()


@contextmanager
def seeded(seed: int, generator: np.random.Generator | None = None) -> Iterator[None]:
    """Within the block all of robosuite's randomness comes from `seed` (0..2^63-1); the global states are unchanged
    after it. One block at a time in a process."""
    with _GLOBAL:
        saved: Any = np.random.get_state(), random.getstate()
        np.random.seed(np.random.SeedSequence(seed).generate_state(8))
        random.seed(seed)
        if generator is not None:  # in place: placement samplers hold it too
            generator.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        try:
            yield
        finally:
            np.random.set_state(saved[0])
            random.setstate(saved[1])
