"""Shared by the adapters: common settings, and batches whose rows each have a MuJoCo simulator of their own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from polyrhythm.envs.base import EnvSettings, RowNumbers, RowsFailed, StepResult
from polyrhythm.plugins.simulators.variation import Appearance, AppearanceSettings
from polyrhythm.specs import EnvSpec

#: Steps and observations whose median time is reported.
_TIMED = 5


class SimulatorSettings(BaseModel):
    """Settings of every adapter. task_sets: names that stand for several tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    task_sets: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    type: str
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    max_steps: int
    time_limit: Literal["terminates", "truncates"] = "terminates"
    """Meaning of the end by `max_steps`. `terminates`: the task must succeed in time, no reward follows.
    `truncates`: the value function estimates the remaining return; with a sparse reward that would reward failures."""
    end_on_success: bool = True
    """The first success ends the episode."""
    appearance: AppearanceSettings = AppearanceSettings()
    """How far pictures differ from the usual ones."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _spelled_out(cls, tasks: Any) -> Any:
        if not isinstance(tasks, list | tuple):
            return tasks
        named = (cls.task_sets.get(task, (task,)) if isinstance(task, str) else (task,) for task in tasks)
        return tuple(name for names in named for name in names)

    @field_validator("tasks")
    @classmethod
    def _distinct(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        for task in tasks:
            if tasks.count(task) > 1:
                raise ValueError(f"task {task!r} is listed {tasks.count(task)} times; list it once")
        return tasks

    @model_validator(mode="after")
    def _is_seen(self) -> SimulatorSettings:
        if not self.has_images:
            self.appearance.refuse_unseen()
        return self

    @property
    def has_images(self) -> bool:
        """Whether the policy observes images."""
        return True

    @property
    def is_dense(self) -> bool:
        """Whether the reward is the simulator's shaped one, not 1 at the first success."""
        return False

    def step_limit(self, task: str) -> int:  # noqa: ARG002 - equal for all
        """Env steps after which an episode of the task ends."""
        return self.max_steps

    def spec(self) -> EnvSpec:
        raise NotImplementedError


class RowsBatch:
    """Base of batches whose rows each run any task. Used by one thread, but another one may build it and reset rows.

    action_dtype: of the clipped actions that simulators get. A row's simulator has `reset(seed)`, after which the state
    depends only on the seed, and `step(action)`, which returns the dense reward, its own end of the episode, and
    success, or raises UnstableSimulationError.
    """

    action_dtype: ClassVar[type[np.floating]] = np.float64

    def __init__(self, settings: SimulatorSettings, rows: int) -> None:
        self.rows, self.spec = rows, settings.spec()
        self.row_tasks = [-1] * rows
        self.appearance: list[Appearance | None] = [None] * rows
        self._common = settings
        self._limits = [settings.step_limit(task.name) for task in self.spec.tasks]
        self._steps, self._succeeded = [0] * rows, [False] * rows
        self._low, self._high = np.array(self.spec.action.low), np.array(self.spec.action.high)

    def _simulator(self, row: int) -> Any:
        """The row's simulator of its current task."""
        raise NotImplementedError

    def _simulator_for(self, row: int, task: int) -> Any:
        """The row's simulator from now on, for this task."""
        raise NotImplementedError

    def discard(self, row: int) -> None:
        """Drop the row's simulator after an error; its next reset creates or takes another one."""
        raise NotImplementedError

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        failed: dict[int, Exception] = {}
        for row, task, seed in zip(map(int, rows), map(int, tasks), map(int, seeds), strict=True):
            simulator = self._simulator_for(row, task)  # what fails here fails for every row
            self._steps[row], self._succeeded[row] = 0, False
            try:
                simulator.reset(seed)
                self.appearance[row] = Appearance.draw(self._common.appearance, seed)
            except Exception as error:  # noqa: BLE001 - simulators, numba and MuJoCo raise anything
                failed[row] = error
                self.discard(row)
        if failed:
            raise RowsFailed(failed)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        settings, outcome = self._common, StepResult.zeros(len(rows))
        clipped = np.clip(actions.astype(np.float64), self._low, self._high).astype(self.action_dtype, copy=False)
        failed: dict[int, Exception] = {}
        for i, row in enumerate(map(int, rows)):
            try:
                dense, ended, success = self._simulator(row).step(clipped[i])
            except Exception as error:  # noqa: BLE001 - simulators, numba and MuJoCo raise anything
                failed[row] = error
                self.discard(row)
                continue
            self._steps[row] += 1
            outcome.reward[i] = dense if settings.is_dense else float(success and not self._succeeded[row])
            outcome.success[i] = success
            self._succeeded[row] |= success
            late = self._steps[row] >= self._limits[self.row_tasks[row]]
            solved = success and settings.end_on_success
            outcome.terminated[i] = solved or ended or (late and settings.time_limit == "terminates")
            outcome.truncated[i] = late and not outcome.terminated[i]
        if failed:
            raise RowsFailed(failed, outcome)
        return outcome


class Timing(NamedTuple):
    """Times of a batch of one row: to build it, of a reset, medians of steps and observations; the last observation."""

    spec: EnvSpec
    start_s: float
    reset_ms: float
    step_ms: float
    observe_ms: float
    observation: Mapping[str, NDArray[Any]]


def time_batch(settings: EnvSettings) -> Timing:
    """Build a batch of one row; reset, step and observe it."""
    began = time.perf_counter()
    batch = settings.build(1)
    built = time.perf_counter()
    spec, steps, looks = batch.spec, [], []
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in spec.observation.items()}
    idle = np.clip(np.zeros((1, spec.action.dim)), spec.action.low, spec.action.high).astype(np.float32)
    try:
        batch.reset([0], [0], [0])
        reset = time.perf_counter()
        for _ in range(_TIMED):
            before = time.perf_counter()
            batch.step([0], idle)
            between = time.perf_counter()
            batch.observe([0], out)
            steps.append(between - before)
            looks.append(time.perf_counter() - between)
    finally:
        batch.close()
    step, look = (1000 * statistics.median(times) for times in (steps, looks))
    return Timing(spec, built - began, 1000 * (reset - built), step, look, out)
