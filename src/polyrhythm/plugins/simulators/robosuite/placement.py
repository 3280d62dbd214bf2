"""Places objects beyond the range in which robosuite places them, by changing its placement samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.plugins.simulators.variation import draw_beyond

#: Tasks whose objects are drawn from a range on the table, so that there is room around it; the others have bins.
PLACED = frozenset(
    {
        *("Lift", "Stack", "Door", "TwoArmLift", "TwoArmHandover"),
        *("NutAssembly", "NutAssemblySingle", "NutAssemblySquare", "NutAssemblyRound"),
    }
)


def place_beyond(env: Any) -> None:
    """Have an environment of `PLACED` draw its objects' positions from a shell around robosuite's range: outside of it
    in one horizontal coordinate at least, by up to a quarter of its extent. Later models of the environment too."""
    load = env._load_model

    def load_and_change() -> None:
        load()
        _change(env.placement_initializer)

    env._load_model = load_and_change
    _change(env.placement_initializer)


def _change(sampler: Any) -> None:
    for part in getattr(sampler, "samplers", {}).values():
        _change(part)
    if hasattr(sampler, "x_range") and not isinstance(getattr(sampler, "_sample_x", None), _Shell):
        shell = _Shell(sampler)
        sampler._sample_x, sampler._sample_y = shell, shell.y


class _Shell:
    """Takes the place of a sampler's draws of x and of the y that belongs to it."""

    def __init__(self, sampler: Any) -> None:
        self.low, self.high = np.array([sorted(sampler.x_range), sorted(sampler.y_range)], np.float64).T
        self._drawn: NDArray[np.float64] = self.low

    def __call__(self, object_horizontal_radius: float) -> float:  # noqa: ARG002 - robosuite names it
        self._drawn = draw_beyond(np.random.uniform, self.low, self.high, self.high > self.low)
        return float(self._drawn[0])

    def y(self, object_horizontal_radius: float) -> float:  # noqa: ARG002
        return float(self._drawn[1])
