"""Env batch of robosuite and LIBERO: one environment per row, seeded resets, pixels or states on request.

A row that moves to another task releases its environment for the next row with that task, and takes a free environment
of its new task or creates one. An episode does not depend on the environment's history.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvTraits, RowNumbers, RowsFailed, StepResult
from polyrhythm.envs.mujoco import choose_gl_backend
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.simulators.robosuite.cameras import CameraRenderer, Quality
from polyrhythm.plugins.simulators.robosuite.instance import Instance, seeded
from polyrhythm.plugins.simulators.robosuite.library import MODEL_SEED
from polyrhythm.plugins.simulators.variation import Appearance, AppearanceSettings
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Edge of a picture for a video of an environment without images, in pixels.
_VIDEO_SIZE = 256
#: A build that takes longer is explained in the log, in seconds.
_LONG_BUILD_S = 5.0


#: Of environments with these batches.
TRAITS = EnvTraits(
    resets_ahead=True,
    variants=True,
    rendering=True,
    draws_rows=True,
    discards_rows=True,
    prepares_observations=True,
)


class BatchSettings(Protocol):
    """Settings that a batch needs. mirrored: images are flipped horizontally; image_names: of the cameras' images in
    the observation; kept_environments: number of idle environments, and of GL contexts, that are kept."""

    @property
    def observation(self) -> str: ...
    @property
    def image_names(self) -> Sequence[str]: ...
    @property
    def cameras(self) -> Sequence[str]: ...
    @property
    def image_size(self) -> int: ...
    @property
    def render(self) -> Quality: ...
    @property
    def mirrored(self) -> bool: ...
    @property
    def kept_environments(self) -> int: ...
    @property
    def appearance(self) -> AppearanceSettings: ...
    @property
    def reward(self) -> str: ...
    @property
    def end_on_success(self) -> bool: ...
    @property
    def time_limit(self) -> str: ...

    def spec(self) -> EnvSpec: ...

    def step_limit(self, task: str) -> int:
        """Env steps per episode of the task."""
        ...

    def make(self, task: str) -> Instance:
        """Create an environment of the task."""
        ...

    def check_sizes(self, instance: Instance) -> None:
        """ConfigError: the environment's arrays differ from the spec."""
        ...


class RobosuiteBatch:
    """Rows that each run any task. Used by one thread, but another one may build it and reset rows."""

    def __init__(self, settings: BatchSettings, rows: int) -> None:
        if settings.observation == "pixels":
            choose_gl_backend()
        self.settings, self.rows, self.spec = settings, rows, settings.spec()
        #: By (row, task). Free are those whose row runs another task, the one that was left first in front.
        self.instances: dict[tuple[int, int], Instance] = {}
        self._changing = threading.Lock()  # held for changes of `_instances` and of `_tasks`
        self.row_tasks = [-1] * rows
        self._limits = [settings.step_limit(task.name) for task in self.spec.tasks]
        self._steps = [0] * rows
        self._succeeded = [False] * rows
        self._appearance: list[Appearance | None] = [None] * rows
        #: By task, or by (row, task) where resets make new models, and image size.
        self.renderers: dict[tuple[object, int], CameraRenderer] = {}
        self._low, self._high = np.array(self.spec.action.low), np.array(self.spec.action.high)
        self._warm_up()

    def _warm_up(self) -> None:
        """Create the first row's environment and step it once, which compiles robosuite's controllers."""
        began = time.monotonic()
        instance = self._instance_for(0, 0)
        instance.reset(0)
        self.settings.check_sizes(instance)
        instance.step(np.clip(np.zeros(len(self._low)), self._low, self._high))
        took = time.monotonic() - began
        if took > _LONG_BUILD_S:
            log.info("robosuite: the first environment took %.0f s; a new installation compiles its controllers", took)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        failed: dict[int, Exception] = {}
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            instance = self._instance_for(int(row), int(task))  # what fails here fails for every row
            self._steps[row], self._succeeded[row] = 0, False
            try:
                instance.reset(int(seed))
                self._appearance[int(row)] = Appearance.draw(self.settings.appearance, int(seed))
            except Exception as error:  # noqa: BLE001 - robosuite, numba and MuJoCo raise anything
                failed[int(row)] = error
                self.discard(int(row))
        if failed:
            raise RowsFailed(failed)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        outcome = StepResult.zeros(len(rows))
        clipped = np.clip(actions.astype(np.float64), self._low, self._high)
        failed: dict[int, Exception] = {}
        for i, row in enumerate(rows):
            try:
                dense, ended, success = self._instance(int(row)).step(clipped[i])
            except Exception as error:  # noqa: BLE001 - robosuite, numba and MuJoCo raise anything
                failed[int(row)] = error
                self.discard(int(row))
                continue
            self._steps[row] += 1
            sparse = float(success and not self._succeeded[row])
            self._succeeded[row] |= success
            outcome.reward[i] = sparse if self.settings.reward == "sparse" else dense
            outcome.success[i] = success
            in_time = self._steps[row] < self._limits[self.row_tasks[row]]
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
        """Create the renderer of a new model."""
        if self.settings.observation == "pixels" and self._instance(row).new_models:
            self._renderer(row, self.settings.image_size)

    def render(self, row: int) -> NDArray[np.uint8]:
        """Image of the row from the first camera: uint8 [256,256,3]."""
        picture = np.zeros((_VIDEO_SIZE, _VIDEO_SIZE, 3), np.uint8)
        self._draw(row, self.settings.cameras[0], _VIDEO_SIZE, picture)
        return picture

    def discard(self, row: int) -> None:
        """Drop the row's environment after an error; its next reset creates a new one."""
        with self._changing:
            given_up = self.instances.pop((row, self.row_tasks[row]), None)
        if given_up is not None:
            given_up.close()

    def close(self) -> None:
        for renderer in self.renderers.values():
            renderer.close()
        for instance in self.instances.values():
            instance.close()

    def _draw(self, row: int, camera: str, size: int, out: NDArray[np.generic]) -> None:
        instance, task = self._instance(row), self.row_tasks[row]
        names = instance.camera_names()
        if camera not in names:
            raise ConfigError(
                f"env.cameras = {camera}: the cameras of {self.spec.tasks[task].name} are {', '.join(names)}"
            )
        found = self._renderer(row, size)
        appearance = self._appearance[row]
        found.draw(instance.model, instance.data, names.index(camera), out, appearance)  # type: ignore[arg-type]
        if self.settings.mirrored:
            out[:] = out[:, ::-1].copy()

    def _renderer(self, row: int, size: int) -> CameraRenderer:
        """The renderer of the row's model, created on first use; not shared if resets create new models."""
        instance, task = self._instance(row), self.row_tasks[row]
        key = ((row, task) if instance.new_models else task, size)
        found = self.renderers.pop(key, None)
        if found is not None and instance.new_models and found.model is not instance.model:
            found.close()
            found = None
        if found is None:
            if not instance.new_models:  # whose renderers another thread may make meanwhile
                self._close_idle_renderers()
            found = CameraRenderer(instance.model, size, self.settings.render, moves=instance.new_models)
        self.renderers[key] = found  # last in the order
        return found

    def _close_idle_renderers(self) -> None:
        """Close the renderers of tasks that no row runs, except the last used ones."""
        idle = [key for key in self.renderers if isinstance(key[0], int) and key[0] not in self.row_tasks]
        for key in idle[: max(0, len(idle) - self.settings.kept_environments)]:
            self.renderers.pop(key).close()

    def _instance(self, row: int) -> Instance:
        found = self.instances.get((row, self.row_tasks[row]))
        assert found is not None, f"row {row} was used before its first reset"
        return found

    def _instance_for(self, row: int, task: int) -> Instance:
        """The row's environment of the task from now on, created if none is free, with the same seed for all rows."""
        with self._changing:
            left = (row, self.row_tasks[row])
            self.row_tasks[row] = task
            if left in self.instances:
                self.instances[left] = self.instances.pop(left)  # last in the order
            free = [key for key in self.instances if key[1] != self.row_tasks[key[0]]]
            found = self.instances.get((row, task))
            fitting = next((key for key in free if key[1] == task), None)
            if found is None and fitting is not None:
                found = self.instances[row, task] = self.instances.pop(fitting)
            surplus = len(free) - self.settings.kept_environments if found is None else 0
            closed = [self.instances.pop(key) for key in free[: max(0, surplus)]]
        for instance in closed:
            instance.close()
        if found is None:
            with seeded(MODEL_SEED):
                found = self.settings.make(self.spec.tasks[task].name)
            with self._changing:
                self.instances[row, task] = found
        return found
