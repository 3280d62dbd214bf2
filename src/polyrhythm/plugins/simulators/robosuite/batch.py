"""Env batch of robosuite and LIBERO: one environment per row, seeded resets, pixels or states on request.

A row that moves to another task releases its environment for the next row with that task, and takes a free environment
of its new task or creates one. An episode does not depend on the environment's history.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvTraits, RowNumbers
from polyrhythm.envs.mujoco import GL, choose_gl_backend
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.simulators.base import RowsBatch, SimulatorSettings
from polyrhythm.plugins.simulators.robosuite.library import MODEL_SEED, Instance, seeded
from polyrhythm.plugins.simulators.variation import SceneRenderer, fixed_camera

log = logging.getLogger(__name__)

#: Edge of a picture for a video of an environment without images, in pixels.
_VIDEO_SIZE = 256
#: A build that takes longer is explained in the log, in seconds.
_LONG_BUILD_S = 5.0
#: Geoms of group 0 are collision shapes, those of group 1 are drawn.
_COLLISION_GROUP = 0

#: Of environments with these batches.
TRAITS = EnvTraits(
    resets_ahead=True, variants=True, rendering=True, draws_rows=True, discards_rows=True, prepares_observations=True
)


@dataclass(frozen=True, slots=True)
class Views:
    """Images of a batch: `size` × `size` pixels of each of these cameras, the first one as `image`, further ones by the
    camera's name. mirrored: left and right are exchanged."""

    cameras: Sequence[str]
    size: int
    cheap: bool
    mirrored: bool = False
    gl: GL = "auto"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the images in the observation."""
        return ("image", *self.cameras[1:])


class RobosuiteBatch(RowsBatch):
    """make: creates an environment of a task; kept: number of idle environments, and of GL contexts, that are kept.
    ConfigError: an environment's arrays differ from the spec, for example in a version unknown to the table."""

    def __init__(
        self, settings: SimulatorSettings, rows: int, views: Views, make: Callable[[str], Instance], kept: int
    ) -> None:
        if settings.has_images:
            choose_gl_backend(views.gl)
        super().__init__(settings, rows)
        self.settings, self._views, self._make, self._kept = settings, views, make, kept
        #: By (row, task). Free are those whose row runs another task, the one that was left first in front.
        self.instances: dict[tuple[int, int], Instance] = {}
        self._changing = threading.Lock()  # held for changes of `instances` and of `row_tasks`
        #: By task, or by (row, task) where resets make new models, and image size.
        self.renderers: dict[tuple[object, int], SceneRenderer] = {}
        # The first row's environment is stepped once, which compiles robosuite's controllers.
        began = time.monotonic()
        instance = self._simulator_for(0, 0)
        instance.reset(0)
        objects, proprio = instance.state()
        state = self.spec.observation.get("state")
        found, told = len(proprio) + len(objects) * (state is not None), state or self.spec.observation["proprio"]
        if found != told.shape[0] or instance.env.action_dim != self.spec.action.dim:
            raise ConfigError(
                f"env.tasks = {self.spec.tasks[0].name}: robosuite gives {found} numbers and {instance.env.action_dim} "
                f"action entries, {told.shape[0]} and {self.spec.action.dim} are known; install a robosuite from 1.5 "
                "to 1.5.2"
            )
        instance.step(np.clip(np.zeros(len(self._low)), self._low, self._high))
        took = time.monotonic() - began
        if took > _LONG_BUILD_S:
            log.info("robosuite: the first environment took %.0f s; a new installation compiles its controllers", took)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        for i, row in enumerate(map(int, rows)):
            objects, proprio = self._simulator(row).state()
            if "state" in out:
                out["state"][i] = np.concatenate([objects, proprio])
                continue
            out["proprio"][i] = proprio
            for name, camera in zip(self._views.names, self._views.cameras, strict=True):
                self._draw(row, camera, self._views.size, out[name][i])

    def prepare_observation(self, row: int) -> None:
        """Create the renderer of a new model."""
        if self.settings.has_images and self._simulator(row).new_models:
            self._renderer(row, self._views.size)

    def render(self, row: int) -> NDArray[np.uint8]:
        """Image of the row from the first camera: uint8 [256,256,3]."""
        picture = np.zeros((_VIDEO_SIZE, _VIDEO_SIZE, 3), np.uint8)
        self._draw(row, self._views.cameras[0], _VIDEO_SIZE, picture)
        return picture

    def discard(self, row: int) -> None:
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
        instance = self._simulator(row)
        names = instance.camera_names()
        if camera not in names:
            task = self.spec.tasks[self.row_tasks[row]].name
            raise ConfigError(f"env.cameras = {camera}: the cameras of {task} are {', '.join(names)}")
        view, look = fixed_camera(names.index(camera)), self.appearance[row]
        self._renderer(row, size).draw(instance.model, instance.data, view, out, look)
        if self._views.mirrored:
            out[:] = out[:, ::-1].copy()

    def _renderer(self, row: int, size: int) -> SceneRenderer:
        """The renderer of the row's model, created on first use; not shared if resets create new models."""
        instance, task = self._simulator(row), self.row_tasks[row]
        key = ((row, task) if instance.new_models else task, size)
        found = self.renderers.pop(key, None)
        if found is not None and instance.new_models and found.model is not instance.model:
            found.close()
            found = None
        if found is None:
            if not instance.new_models:  # whose renderers another thread may make meanwhile
                # Close those of tasks that no row runs, except the last used ones.
                idle = [key for key in self.renderers if isinstance(key[0], int) and key[0] not in self.row_tasks]
                for other in idle[: max(0, len(idle) - self._kept)]:
                    self.renderers.pop(other).close()
            cheap, moves = self._views.cheap, instance.new_models
            found = SceneRenderer(instance.model, size, _COLLISION_GROUP, cheap=cheap, moves=moves)
        self.renderers[key] = found  # last in the order
        return found

    def _simulator(self, row: int) -> Instance:
        found = self.instances.get((row, self.row_tasks[row]))
        assert found is not None, f"row {row} was used before its first reset"
        return found

    def _simulator_for(self, row: int, task: int) -> Instance:
        """The row's environment of the task, created if none is free, with the same seed for all rows."""
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
            surplus = len(free) - self._kept if found is None else 0
            closed = [self.instances.pop(key) for key in free[: max(0, surplus)]]
        for instance in closed:
            instance.close()
        if found is None:
            with seeded(MODEL_SEED):
                found = self._make(self.spec.tasks[task].name)
            with self._changing:
                self.instances[row, task] = found
        return found
