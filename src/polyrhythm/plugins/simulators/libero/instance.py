"""One environment of a LIBERO task: fixed initial states, idle steps before an episode, and proprioception.

LIBERO's initial-state files are zip files that contain a pickle of one array; nothing in them is executed.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import MissingError
from polyrhythm.plugins.simulators.robosuite.instance import Instance, seeded

ACTION_DIM, PROPRIO_DIM = 7, 8
#: The hand stays where it is, with the gripper open.
_REST = np.array([0.0] * 6 + [-1.0])
#: Placements that LIBERO may try before it gives up.
_TRIES = 20


class LiberoInstance(Instance):
    """An environment. states: initial states [N,K], of which an episode with seed s has number s mod N; None: LIBERO
    places the objects randomly, from the seed. settle_steps: idle steps before an episode begins."""

    def __init__(self, env: Any, states: NDArray[np.float64] | None, settle_steps: int) -> None:
        super().__init__(env, new_models=False)
        self._states, self._settle_steps = states, settle_steps

    def reset(self, seed: int) -> None:
        """Begin an episode. Fixtures are not part of a fixed initial state: LIBERO draws their positions, here from
        the state's number."""
        self._state = None
        number = None if self._states is None else seed % len(self._states)
        with seeded(seed if number is None else number, getattr(self.env, "rng", None)):
            self._place()
        gripper = self.env.robots[0].gripper
        gripper.current_action = np.zeros(
            gripper.dof
        )  # what it was told last, which a reset that keeps the model keeps
        if self._states is not None:
            self.env.sim.set_state_from_flattened(self._states[number])
            self.env.sim.forward()
            self.env._post_process()
        for _ in range(self._settle_steps):
            self.step(_REST)

    def _place(self) -> None:
        from robosuite.utils.errors import RandomizationError

        for attempt in range(_TRIES):
            try:
                self.env.reset()
                return
            except RandomizationError:  # no room for an object where it was drawn
                if attempt == _TRIES - 1:
                    raise

    def step(self, action: NDArray[np.float64]) -> tuple[float, bool, bool]:
        """Run one control step; return LIBERO's reward, False, and success. LIBERO ends an episode only on success."""
        reward, _, success = super().step(action)
        return reward, False, success

    def state(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """An empty object state, and proprioception [8] after the last step: hand position, orientation as axis
        times angle, positions of the two fingers."""
        if self._state is None:
            self.env._update_observables(force=True)
            seen = self.env._observables
            position, turn, fingers = (seen[f"robot0_{name}"].obs for name in ("eef_pos", "eef_quat", "gripper_qpos"))
            parts = position, axis_angle(turn), fingers
            self._state = np.zeros(0, np.float32), np.concatenate(parts).astype(np.float32)
        return self._state


def axis_angle(quaternion: NDArray[np.floating]) -> NDArray[np.float64]:
    """Axis times angle [3] of a unit quaternion (x, y, z, w), the angle in 0..2π."""
    x, y, z, w = (float(part) for part in quaternion)
    w = min(max(w, -1.0), 1.0)
    length = math.sqrt(1.0 - w * w)
    scale = 2.0 * math.acos(w) / length if length else 0.0
    return np.array([scale * x, scale * y, scale * z])


_PICKLE = "data.pkl"
#: What reading a damaged file raises.
_UNREADABLE = (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile)
_INTEGERS = {"BININT1", "BININT2", "BININT"}


def read_initial_states(file: Path) -> NDArray[np.float64]:
    """Initial states [N,K] of a task: time, positions and velocities of its MuJoCo model. file: its `.pruned_init`.
    MissingError: the file is missing or has other content."""
    try:
        with zipfile.ZipFile(io.BytesIO(file.read_bytes())) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(_PICKLE))
            return _pickled_matrix(archive.read(name))
    except _UNREADABLE as error:
        raise MissingError(
            f"LIBERO's initial states cannot be read ({file}: {error}); install LIBERO's package again"
        ) from error


def _pickled_matrix(content: bytes) -> NDArray[np.float64]:
    """The matrix in a pickle that contains only a numpy array: shape, dtype and order, Fortran flag, and its bytes
    as latin-1 text. ValueError: any other content."""
    steps = [(step.name, value) for step, value, _ in pickletools.genops(content) if "PUT" not in step.name]
    names = [name for name, _ in steps]
    pairs = [i for i, name in enumerate(names) if name == "TUPLE2" and set(names[i - 2 : i]) <= _INTEGERS]
    shape = [int(str(value)) for _, value in steps[pairs[0] - 2 : pairs[0]]]
    texts = [(i, value) for i, (_, value) in enumerate(steps) if isinstance(value, str | bytes)]
    end, data = max(texts, key=lambda text: len(text[1]))
    told = [value for i, value in texts if i < end]
    flags = [name for name in names[:end] if name in ("NEWTRUE", "NEWFALSE")]
    if "f8" not in told or "<" not in told or flags[-1:] != ["NEWFALSE"]:
        raise ValueError("it is not a matrix of 64-bit numbers")
    encoded = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(encoded, "<f8").reshape(shape).astype(np.float64)
