"""One robosuite environment: seeded resets, steps, and its state when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.mujoco import refuse_unstable
from polyrhythm.plugins.simulators.robosuite.randomness import seeded

if TYPE_CHECKING:
    import mujoco

#: Only some versions of robosuite have joint accelerations, and those are noisy.
_LEFT_OUT = "joint_acc"
_OBJECTS = "object"


class Instance:
    """A made environment. new_models: each reset makes a new MuJoCo model, so `model` changes."""

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
        """Begin an episode; its initial state depends on the seed alone."""
        self._state = None
        with seeded(seed, getattr(self.env, "rng", None)):
            self.env.reset()

    def step(self, action: NDArray[np.float64]) -> tuple[float, bool, bool]:
        """One control step; robosuite's reward, its own end of the episode, and success.

        Raises UnstableSimulationError if MuJoCo had to reset the state.
        """
        self._state = None
        _, reward, ended, _ = self.env.step(action)
        refuse_unstable(self.data, f"at step {self.env.timestep}")
        return float(reward), bool(ended), bool(self.env._check_success())

    def state(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Object state [K] and proprioception of all robots [P], at the end of the last step."""
        if self._state is None:
            self.env._update_observables(force=True)
            objects, proprio = [], []
            for name, observable in self.env._observables.items():
                if not (observable.is_enabled() and observable.is_active()):
                    continue  # of objects that a task of one object leaves out
                if observable.modality == _OBJECTS:
                    objects.append(np.ravel(observable.obs))
                elif name.startswith("robot") and not name.endswith(_LEFT_OUT):
                    proprio.append(np.ravel(observable.obs))
            self._state = _joined(objects), _joined(proprio)
        return self._state

    def camera_names(self) -> tuple[str, ...]:
        """The model's cameras."""
        return tuple(self.env.sim.model.camera_names)

    def close(self) -> None:
        self.env.close()


def _joined(parts: list[NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)
