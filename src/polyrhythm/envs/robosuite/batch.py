"""Env batch of robosuite: an environment per row and task, seeded resets, pixels or states on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.appearance import Appearance
from polyrhythm.envs.base import RowNumbers, RowsFailed, StepResult
from polyrhythm.envs.metaworld.mujoco_rendering import choose_gl_backend
from polyrhythm.envs.robosuite.cameras import CameraRenderer
from polyrhythm.envs.robosuite.instance import Instance
from polyrhythm.envs.robosuite.library import MODEL_SEED
from polyrhythm.envs.robosuite.randomness import seeded
from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    from polyrhythm.envs.robosuite.env import RobosuiteSettings

log = logging.getLogger(__name__)

#: Edge of a picture for a video of an environment without images, in pixels.
_VIDEO_SIZE = 256
#: A build that takes longer is explained in the log, in seconds.
_LONG_BUILD_S = 5.0


class RobosuiteBatch:
    """Rows that each run any of the tasks. Used by one thread, except that others may have built it and reset rows."""

    def __init__(self, settings: RobosuiteSettings, rows: int) -> None:
        if settings.observation == "pixels":
            choose_gl_backend()
        self.settings, self.rows, self.spec = settings, rows, settings.spec()
        self._instances: dict[tuple[int, int], Instance] = {}
        self._tasks = [-1] * rows
        self._steps = [0] * rows
        self._succeeded = [False] * rows
        self._appearance: list[Appearance | None] = [None] * rows
        #: By task, or by (row, task) where resets make new models, and image size.
        self._renderers: dict[tuple[object, int], CameraRenderer] = {}
        self._low, self._high = np.array(self.spec.action.low), np.array(self.spec.action.high)
        self._warm_up()

    def _warm_up(self) -> None:
        """Make the first row's environment and do a step, which compiles robosuite's controllers."""
        began = time.monotonic()
        instance = self._instance_for(0, 0)
        instance.reset(0)
        self._check_sizes(instance)
        instance.step(np.clip(np.zeros(len(self._low)), self._low, self._high))
        took = time.monotonic() - began
        if took > _LONG_BUILD_S:
            log.info("robosuite: the first environment took %.0f s; a new installation compiles its controllers", took)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        failed: dict[int, Exception] = {}
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            instance = self._instance_for(int(row), int(task))  # what fails here fails for every row
            self._tasks[row], self._steps[row], self._succeeded[row] = int(task), 0, False
            try:
                instance.reset(int(seed))
                self._appearance[int(row)] = Appearance.draw(self.settings.appearance, int(seed))
            except Exception as error:  # noqa: BLE001 - robosuite, numba and MuJoCo raise anything
                failed[int(row)] = error
                self._discard(int(row))
        if failed:
            raise RowsFailed(failed)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        outcome = _empty_result(len(rows))
        clipped = np.clip(actions.astype(np.float64), self._low, self._high)
        failed: dict[int, Exception] = {}
        for i, row in enumerate(rows):
            try:
                dense, ended, success = self._instance(int(row)).step(clipped[i])
            except Exception as error:  # noqa: BLE001 - robosuite, numba and MuJoCo raise anything
                failed[int(row)] = error
                self._discard(int(row))
                continue
            self._steps[row] += 1
            sparse = float(success and not self._succeeded[row])
            self._succeeded[row] |= success
            outcome.reward[i] = sparse if self.settings.reward == "sparse" else dense
            outcome.success[i] = success
            in_time = self._steps[row] < self.spec.max_steps
            solved = success and self.settings.end_on_success
            late = not in_time and self.settings.time_limit == "terminates"
            outcome.terminated[i] = solved or ended or late
            outcome.truncated[i] = not (in_time or outcome.terminated[i])
        if failed:
            raise RowsFailed(failed, outcome)
        return outcome

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        for i, row in enumerate(rows):
            objects, proprio = self._instance(int(row)).state()
            if "state" in out:
                out["state"][i] = np.concatenate([objects, proprio])
                continue
            out["proprio"][i] = proprio
            for name, camera in zip(self.settings.image_names, self.settings.cameras, strict=True):
                self._draw(int(row), camera, self.settings.image_size, out[name][i])

    def prepare_observation(self, row: int) -> None:
        """Make the renderer of a new model."""
        if self.settings.observation == "pixels" and self._instance(row).new_models:
            self._renderer(row, self.settings.image_size)

    def render(self, row: int) -> NDArray[np.uint8]:
        """Picture of the row by the first camera: uint8 [256,256,3]."""
        picture = np.zeros((_VIDEO_SIZE, _VIDEO_SIZE, 3), np.uint8)
        self._draw(row, self.settings.cameras[0], _VIDEO_SIZE, picture)
        return picture

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        for instance in self._instances.values():
            instance.close()

    def _draw(self, row: int, camera: str, size: int, out: NDArray[np.generic]) -> None:
        instance, task = self._instance(row), self._tasks[row]
        names = instance.camera_names()
        if camera not in names:
            raise ConfigError(
                f"env.cameras = {camera}: the cameras of {self.spec.tasks[task].name} are {', '.join(names)}"
            )
        found = self._renderer(row, size)
        appearance = self._appearance[row]
        found.draw(instance.model, instance.data, names.index(camera), out, appearance)  # type: ignore[arg-type]

    def _renderer(self, row: int, size: int) -> CameraRenderer:
        """The renderer of the row's model, made if there is none: of its own if resets make new models."""
        instance, task = self._instance(row), self._tasks[row]
        key = ((row, task) if instance.new_models else task, size)
        found = self._renderers.get(key)
        if found is not None and instance.new_models and found.model is not instance.model:
            found.close()
            found = None
        if found is None:
            found = CameraRenderer(instance.model, size, self.settings.render, moves=instance.new_models)
            self._renderers[key] = found
        return found

    def _instance(self, row: int) -> Instance:
        found = self._instances.get((row, self._tasks[row]))
        assert found is not None, f"row {row} was used before its first reset"
        return found

    def _instance_for(self, row: int, task: int) -> Instance:
        """The row's environment of the task, made if there is none: from the same seed in all rows."""
        found = self._instances.get((row, task))
        if found is None:
            with seeded(MODEL_SEED):
                found = self.settings.make(self.spec.tasks[task].name)
            self._instances[row, task] = found
        return found

    def _discard(self, row: int) -> None:
        """Give up the row's environment after an error; its next reset makes a new one."""
        self._instances.pop((row, self._tasks[row])).close()

    def _check_sizes(self, instance: Instance) -> None:
        """Raise ConfigError if robosuite's arrays are not those of the spec, as with a version unknown to the table."""
        objects, proprio = instance.state()
        told = self.spec.observation["state" if self.settings.observation == "state" else "proprio"].shape[0]
        found = len(proprio) + (len(objects) if self.settings.observation == "state" else 0)
        if found != told or instance.env.action_dim != self.spec.action.dim:
            raise ConfigError(
                f"env.tasks = {self.spec.tasks[0].name}: robosuite gives {found} numbers and {instance.env.action_dim} "
                f"action entries, {told} and {self.spec.action.dim} are known; install a robosuite from 1.5 to 1.5.2"
            )


def _empty_result(rows: int) -> StepResult:
    return StepResult(
        reward=np.zeros(rows, np.float32),
        terminated=np.zeros(rows, np.bool_),
        truncated=np.zeros(rows, np.bool_),
        success=np.zeros(rows, np.bool_),
    )
