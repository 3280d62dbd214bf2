"""One robosuite environment: seeded resets, positions beyond its range, steps, and its state.

robosuite up to 1.5.1 draws from the global random states of numpy and Python; 1.5.2 and RoboCasa draw from a generator
shared by the environment and its placement samplers, and partly still from the global ones. So all are seeded, and the
global ones restored.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.mujoco import refuse_unstable
from polyrhythm.plugins.simulators.variation import draw_beyond

if TYPE_CHECKING:
    import mujoco

#: Only some versions of robosuite have joint accelerations, and those are noisy.
_LEFT_OUT = "joint_acc"
_OBJECTS = "object"


class Instance:
    """An environment. new_models: each reset creates a new MuJoCo model, so `model` changes."""

    def __init__(self, env: Any, new_models: bool) -> None:
        self.env, self.new_models = env, new_models
        self._state: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    @property
    def model(self) -> mujoco.MjModel:
        return self.env.sim.model._model

    @property
    def data(self) -> mujoco.MjData:
        return self.env.sim.data._data

    def reset(self, seed: int) -> None:
        """Begin an episode whose initial state depends only on the seed."""
        self._state = None
        with seeded(seed, getattr(self.env, "rng", None)):
            self.env.reset()

    def step(self, action: NDArray[np.float64]) -> tuple[float, bool, bool]:
        """Run one control step; return robosuite's reward, its own end of the episode, and success.

        UnstableSimulationError: MuJoCo had to reset the state.
        """
        self._state = None
        _, reward, ended, _ = self.env.step(action)
        refuse_unstable(self.data, f"at step {self.env.timestep}")
        return float(reward), bool(ended), bool(self.env._check_success())

    def state(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Object state [K] and proprioception of all robots [P] after the last step."""
        if self._state is None:
            self.env._update_observables(force=True)
            objects, proprio = [], []
            for name, observable in self.env._observables.items():
                if not (observable.is_enabled() and observable.is_active()):
                    continue  # objects that a single-object task omits
                if observable.modality == _OBJECTS:
                    objects.append(np.ravel(observable.obs))
                elif name.startswith("robot") and not name.endswith(_LEFT_OUT):
                    proprio.append(np.ravel(observable.obs))
            self._state = _joined(objects), _joined(proprio)
        return self._state

    def camera_names(self) -> tuple[str, ...]:
        return tuple(self.env.sim.model.camera_names)

    def close(self) -> None:
        self.env.close()


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)


_GLOBAL = threading.Lock()


@contextmanager
def seeded(seed: int, generator: np.random.Generator | None = None) -> Iterator[None]:
    """Seed all of robosuite's randomness from `seed` (0..2^63-1) inside the context, and restore the global states
    afterwards. Only one context per process at a time."""
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


#: Tasks whose objects are drawn from a range on the table, so that there is room around it; the others have bins.
PLACED = frozenset(
    {
        *("Lift", "Stack", "Door", "TwoArmLift", "TwoArmHandover"),
        *("NutAssembly", "NutAssemblySingle", "NutAssemblySquare", "NutAssemblyRound"),
    }
)


def place_beyond(env: Any) -> None:
    """Make an environment of `PLACED` draw object positions from a shell around robosuite's range: outside it in at
    least one horizontal coordinate, by up to a quarter of its extent. Applies to later models of the environment,
    too."""
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
    """Replaces a sampler's draws of x and of the following y."""

    def __init__(self, sampler: Any) -> None:
        self.low, self.high = np.array([sorted(sampler.x_range), sorted(sampler.y_range)], np.float64).T
        self._drawn: NDArray[np.float64] = self.low

    def __call__(self, object_horizontal_radius: float) -> float:  # noqa: ARG002 - robosuite names it
        self._drawn = draw_beyond(np.random.uniform, self.low, self.high, self.high > self.low)
        return float(self._drawn[0])

    def y(self, object_horizontal_radius: float) -> float:  # noqa: ARG002
        return float(self._drawn[1])
