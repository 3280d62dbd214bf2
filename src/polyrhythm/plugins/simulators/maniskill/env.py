"""Adapter for ManiSkill's tasks: an instance per row and task on the CPU, or all rows in one scene on a GPU.

Another process starts the simulator to determine observations and actions (`library.probe`): `python -m` this module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import Finding, raised
from polyrhythm.envs.base import EnvBatch, RowNumbers, RowsFailed, StepResult
from polyrhythm.errors import ConfigError, MissingError, PolyrhythmError, install_command
from polyrhythm.plugins.simulators.base import time_batch
from polyrhythm.plugins.simulators.maniskill.library import examine, named_tasks, probe
from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillFields
from polyrhythm.plugins.simulators.maniskill.world import World
from polyrhythm.plugins.simulators.variation import AppearanceSettings
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec
from polyrhythm.specs.plain import as_plain


class ManiSkillSettings(ManiSkillFields):
    """ManiSkill 3 tasks with state or camera images, simulated on the CPU or all rows together on a GPU.

    Observation: `state` float32 [N], ManiSkill's own, with objects and goals; or with `rgb` `image` uint8 [H,W,3] of
    `image_size` and `proprio` float32 [N]; `rgbd` adds `depth` float32 [H,W,1] in metres. Action: float32 [A],
    ManiSkill's own of the control mode.

    backend cpu: an instance per row; equal (task, seed) give bit-equal initial states. backend gpu: one task, all rows
    step together; rows that begin together are reset by one call, each from its own seed, but they lie at different
    places of one scene, so that equal seeds are equal up to float32 rounding, and contacts are not reproducible. The
    gpu backend was never run.
    """

    def check(self) -> None:
        """Create an instance of each task in another process. MissingError: an asset or driver is missing;
        ConfigError: an unknown task or setting."""
        self.spec()

    def spec(self) -> EnvSpec:
        """The spec of a batch, determined in another process once per settings, which takes some seconds.

        ConfigError or MissingError as from `check`.
        """
        usual = {"placement": "usual", "appearance": AppearanceSettings()}
        backend = "gpu" if self.simulates_on_gpu else "cpu"  # which `auto` would choose anew for the usual ones
        return probe(self.model_copy(update={**usual, "backend": backend})).spec

    def rendering(self) -> ManiSkillSettings:
        """Settings whose batches can render rows for a video: these."""
        return self

    def build(self, rows: int) -> EnvBatch:
        """A batch of `rows` rows; starts the first instance of each task."""
        if self.simulates_on_gpu:
            return GpuBatch(self, World(self, self.tasks[0], rows))
        return CpuBatch(self, rows)

    @classmethod
    def findings(cls) -> Iterator[Finding]:
        """Driver, GPU and a trial run of the simulator, for `polyrhythm doctor`."""
        return examine(cls(tasks=("PickCube-v1",), observation="rgb"))


Form = Mapping[str, ArraySpec] | ActionSpec


def spec_of(settings: ManiSkillFields, worlds: Sequence[World]) -> EnvSpec:
    """The spec of a batch, from one world per task. ConfigError: their arrays or actions differ."""
    arrays, action = worlds[0].arrays(), worlds[0].action
    for world in worlds[1:]:
        forms: tuple[tuple[str, Form, Form], ...] = (
            ("observation", world.arrays(), arrays),
            ("action", world.action, action),
        )
        for what, here, first in forms:
            if here != first:
                fix = "use rgb with proprio: joints, or one task" if what == "observation" else "choose one task"
                raise ConfigError(
                    f"env.tasks = {world.task}: its {what} ({_brief(here)}) differs from that of {worlds[0].task} "
                    f"({_brief(first)}); tasks of a run have equal ones: {fix}"
                )
    tasks = [task for world in worlds for task in world.tasks()]
    several = any(task.suite for task in tasks)  # a suite has one task for each sentence of an id
    return EnvSpec(
        observation=arrays,
        action=action,
        tasks=tuple(replace(task, suite=task.suite or task.name) if several else task for task in tasks),
        max_steps=max(world.limit for world in worlds),
        reset_rows=True,
        step_rows=not settings.simulates_on_gpu,
        metrics=dict(settings.metrics),
        reports_success=all(world.reports_success for world in worlds),
    )


def _kinds(worlds: Iterable[World]) -> list[tuple[int, str]]:
    """For each task of the spec: the number of its world, and its sentence if that world has several."""
    return [
        (number, task.instruction if task.suite else "")
        for number, world in enumerate(worlds)
        for task in world.tasks()
    ]


class CpuBatch:
    """Rows with one instance per row and task, created on first use; used by one thread."""

    def __init__(self, settings: ManiSkillFields, rows: int) -> None:
        self.settings, self.rows = settings, rows
        first = [World(settings, task, 1) for task in settings.tasks]
        self.worlds = {(0, number): world for number, world in enumerate(first)}
        self._kinds, self._sentences = _kinds(first), [world.sentences for world in first]
        self.spec = spec_of(settings, first)
        self.row_worlds: list[World | None] = [None] * rows
        self._steps, self._limits = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._runs = np.zeros(rows, np.bool_)  # rows whose episode has not ended

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        failed: dict[int, Exception] = {}
        for row, task, seed in zip(map(int, rows), tasks, seeds, strict=True):
            number, sentence = self._kinds[task]
            if (row, number) not in self.worlds:
                kind, read = self.settings.tasks[number], self._sentences[number]
                self.worlds[row, number] = World(self.settings, kind, 1, read)
            world = self.row_worlds[row] = self.worlds[row, number]
            self._steps[row], self._limits[row], self._runs[row] = 0, world.limit, True
            try:
                world.reset([0], [seed], [sentence])
            except Exception as error:  # noqa: BLE001 - a task may raise anything
                failed[row] = error
                self.discard(row)
        if failed:
            raise RowsFailed(failed)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        outcomes: list[StepResult] = []
        failed: dict[int, Exception] = {}
        order = np.asarray(rows)
        for i, row in enumerate(order.tolist()):
            try:
                outcomes.append(self._world(row).step(actions[i : i + 1]))
            except Exception as error:  # noqa: BLE001 - a task may raise anything
                failed[row] = error
                nothing = {name: np.full(1, np.nan, np.float32) for name in self.spec.metrics}
                outcomes.append(StepResult.zeros(1)._replace(metrics=nothing))
                self.discard(row)
        self._steps[order] += 1
        reward, ended, cut, success, *_ = (list(parts) for parts in zip(*outcomes, strict=True))
        flags = np.concatenate(ended), np.concatenate(cut), np.concatenate(success)
        metrics = {name: np.concatenate([one.metrics[name] for one in outcomes]) for name in self.spec.metrics}
        result = _limited(
            self.settings,
            StepResult(np.concatenate(reward), *flags, metrics),
            self._steps[order] >= self._limits[order],
        )
        self._runs[order] = ~(result.terminated | result.truncated)
        if failed:
            raise RowsFailed(failed, result)
        return result

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        for i, row in enumerate(rows):
            for name, array in self._world(row).observe().items():
                out[name][i] = array[0]

    def render(self, row: int) -> NDArray[np.uint8]:
        """Image [H,W,3] of the row from ManiSkill's video camera. ConfigError: the task has none."""
        return self._world(row).render(0)

    def suspend(self) -> int:
        """End all instances; returns the bytes freed. Rows keep the actions of their episodes."""

        def release() -> None:
            for world in self.worlds.values():
                world.suspend()

        return _freed_by(self.settings, release)

    def resume(self) -> None:
        """Make the instances of running episodes anew, each by repeating its episode; others once they are needed."""
        for row in np.flatnonzero(self._runs):
            if self.row_worlds[row] is not None:
                self._world(int(row))

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()

    def discard(self, row: int) -> None:
        """Drop the row's current instance; its next reset creates a new one."""
        broken, self.row_worlds[row] = self.row_worlds[row], None
        self.worlds = {where: world for where, world in self.worlds.items() if world is not broken}
        if broken is not None:
            with suppress(Exception):
                broken.close()

    def _world(self, row: int) -> World:
        world = self.row_worlds[row]
        assert world is not None, f"row {row} was used before its first reset"
        if not world.is_open:
            world.resume()
        return world


class GpuBatch:
    """All rows of one world, a GPU simulation: they step together, and those that begin together reset by one call."""

    def __init__(self, settings: ManiSkillFields, world: World) -> None:
        self.settings, self.rows, self._world = settings, world.rows, world
        self.spec, self._kinds = spec_of(settings, [world]), _kinds([world])
        self._steps = np.zeros(world.rows, np.int64)
        self._seen: Mapping[str, Any] | None = None  # tensors of all rows on the device

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        self._seen = None
        self._world.reset(list(rows), seeds, [self._kinds[task][1] for task in tasks])
        self._steps[list(rows)] = 0

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        self._seen = None
        order = np.asarray(rows)
        whole = np.empty((self.rows, self.spec.action.dim), np.float32)
        whole[order] = actions
        outcome = self._world.step(whole)
        self._steps += 1
        metrics = {name: values[order] for name, values in outcome.metrics.items()}
        ended, cut, success = outcome.terminated[order], outcome.truncated[order], outcome.success[order]
        asked = StepResult(outcome.reward[order], ended, cut, success, metrics)
        return _limited(self.settings, asked, self._steps[order] >= self.spec.max_steps)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        for name, tensor in self.observe_on_device(rows).items():
            out[name][: len(tensor)] = tensor.cpu().numpy()

    def observe_on_device(self, rows: RowNumbers) -> Mapping[str, Any]:
        """The rows' observations in tensors where they were made. All rows are rendered at once, and only once until
        the next step or reset, since a station may observe row by row."""
        if self._seen is None:
            self._seen = self._world.tensors()
        order = np.asarray(rows, np.int64)
        return {name: tensor[order] for name, tensor in self._seen.items()}

    def render(self, row: int) -> NDArray[np.uint8]:
        """Image [H,W,3] of the row from ManiSkill's video camera. ConfigError: the task has none."""
        return self._world.render(row)

    def suspend(self) -> int:
        """End the simulation, and keep its rows' states on the host; returns the bytes freed."""
        self._seen = None
        return _freed_by(self.settings, self._world.suspend)

    def resume(self) -> None:
        """Make the simulation anew, with the states of its rows."""
        self._world.resume()

    def close(self) -> None:
        self._world.close()


def _freed_by(settings: ManiSkillFields, release: Callable[[], object]) -> int:
    """Bytes by which the memory in use shrinks: that of the device, else the process's own."""
    if not (settings.simulates_on_gpu or settings.draws_on_gpu):
        before = _resident_bytes()
        release()
        return max(0, before - _resident_bytes())
    import torch

    before, _ = torch.cuda.mem_get_info()
    release()
    torch.cuda.empty_cache()
    return max(0, torch.cuda.mem_get_info()[0] - before)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _brief(form: Form) -> str:
    """The form in a message: `image uint8 [64, 64, 3], proprio float32 [9]`, or the number of action entries."""
    if isinstance(form, ActionSpec):
        return f"{form.dim} entries"
    return ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in form.items())


def _limited(settings: ManiSkillFields, result: StepResult, late: NDArray[np.bool_]) -> StepResult:
    """late: [n], whether the time limit is reached."""
    terminated = result.terminated | late if settings.time_limit == "terminates" else result.terminated
    return result._replace(terminated=terminated, truncated=late & ~terminated)


def _answer(given: str) -> dict[str, Any]:
    settings = ManiSkillSettings.model_validate_json(given)
    try:
        found = time_batch(settings)
        times = {"start_s": found.start_s, "step_ms": found.step_ms, "observe_ms": found.observe_ms}
        return {"spec": as_plain(found.spec), **times}
    except PolyrhythmError as error:
        return {"problem": str(error), "missing": isinstance(error, MissingError)}
    except ImportError as error:
        install = install_command("maniskill")
        return {"problem": f"env.type = maniskill: {error}; run: {install}", "missing": True}
    except Exception as error:  # noqa: BLE001 - a task of the user, or of ManiSkill, may raise anything
        problem = f"{named_tasks(settings)}: a trial of them {raised(error)}; choose other settings or tasks"
        return {"problem": problem, "missing": False}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_answer(sys.argv[1])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without SAPIEN's clean-up at exit, which some drivers do not survive
