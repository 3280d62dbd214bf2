"""Adapter for Gymnasium environments: an env batch of `rows` separate instances, stepped in a loop.

Rows reset and step individually, without autoreset. `gymnasium.make` applies the time limit inside the user's wrappers;
steps are counted here too, in case a wrapper hides it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from polyrhythm.conformance import raised
from polyrhythm.envs.base import EnvTraits, RowNumbers, RowsFailed, StepResult, Variant, method_traits
from polyrhythm.envs.gymnasium_spaces import Observations, action_converter, action_entries, action_spec
from polyrhythm.envs.info import InfoReader, as_aggregates
from polyrhythm.envs.mujoco import GL, instabilities, mujoco_data, offer_gl_backend, refuse_unstable
from polyrhythm.errors import ConfigError, pip_install
from polyrhythm.specs import Aggregate, EnvSpec, Task
from polyrhythm.specs.hashing import library_seed
from polyrhythm.specs.spaces import check_metrics

if TYPE_CHECKING:
    import gymnasium
    import mujoco


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class GymnasiumWrapper(_Section):
    """A function or class that takes an environment and returns one."""

    apply: str
    """module:function or module:Class, from the working folder or anything importable."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class GymnasiumTask(_Section):
    """One of several tasks that share observation and action spaces."""

    id: str
    """Registered id, as in `id` of the settings."""
    instruction: str = ""
    """Instruction for the policy; the id if empty."""
    name: str = ""
    """Name in results; the instruction if empty."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its environment; they override those of all tasks."""


class GymnasiumVariant(_Section):
    """Other keyword arguments of the environments, with which a trained policy is evaluated too."""

    what: str
    """The difference, in words."""
    kind: Literal["vision", "semantic", "position"] = "vision"
    """Aspect that is new to the policy."""
    kwargs: Mapping[str, Any]
    """Keyword arguments that differ, also from those of a task; the others stay."""


def as_wrapper(value: Any) -> Any:
    return {"apply": value} if isinstance(value, str) else value


class GymnasiumFields(_Section):
    """Settings of single and of vector environments."""

    needs: ClassVar = ("gymnasium",)

    type: str
    id: str = ""
    max_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of the environment inside the wrappers after which an episode is truncated; 0: the registered limit."""
    rename: Mapping[str, str] = Field(default_factory=dict)
    """Observation key → new name."""
    drop: tuple[str, ...] = ()
    """Observation keys to leave out, such as MiniGrid's text `mission`."""
    success: str = ""
    """Key of `info` that says whether the task is solved, `a.b` if nested; empty: success, is_success or succeed."""
    metrics: Annotated[Mapping[str, Aggregate], BeforeValidator(as_aggregates)] = Field(default_factory=dict)
    """Numbers of `info` to report as env/metrics/NAME: {key: last | sum | mean | max} over an episode; a list: last."""
    gl: GL = "auto"
    """How MuJoCo draws: osmesa on the cores, egl on a GPU, auto by what else uses it; MUJOCO_GL overrides it."""

    @field_validator("metrics")
    @classmethod
    def _metrics_have_names(cls, metrics: Mapping[str, Aggregate]) -> Mapping[str, Aggregate]:
        check_metrics(metrics)
        return metrics

    def check(self) -> None:
        """Set the GL backend before a module imports MuJoCo."""
        offer_gl_backend(self.gl)

    def observations(self, space: gymnasium.Space[Any], where: str, rows: int = 0) -> Observations:
        """The last observations of `rows` rows. where: begins errors."""
        return Observations(space, where, self.rename, rows, self.drop)


class GymnasiumSettings(GymnasiumFields):
    """Registered Gymnasium environments: one task by its `id`, or several `tasks`.

    Observation: `state` for one array; Dict and Tuple spaces give keys and positions, nested ones joined by a dot.
    float64 becomes float32; Discrete and MultiDiscrete become one-hot vectors. Actions: a float Box (flattened),
    Discrete, MultiDiscrete or MultiBinary. A state that MuJoCo finds unstable fails its row.
    """

    traits: ClassVar = EnvTraits(
        resets_ahead=True, wraps=True, rendering=True, draws_rows=True, discards_rows=True, variants=True
    )

    type: Literal["gymnasium"] = "gymnasium"
    id: str = ""
    """Registered id such as `CartPole-v1`, or `module:id` to import the module that registers it; empty with tasks."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    tasks: tuple[GymnasiumTask, ...] = ()
    """Several tasks instead of one id, each {id, instruction, name, kwargs}; a row keeps an instance of each it met."""
    wrappers: tuple[Annotated[GymnasiumWrapper, BeforeValidator(as_wrapper)], ...] = ()
    """Applied to each environment in this order: module:Class, or {apply: module:Class, kwargs: {...}}."""
    expert: str = ""
    """module:function that takes an environment and returns the action to demonstrate in its state; empty: none."""
    altered: Mapping[str, GymnasiumVariant] = Field(default_factory=dict)
    """Variants for `polyrhythm eval RUN --variants`, by name: {what: text, kwargs: {...}}."""

    @model_validator(mode="after")
    def _id_or_tasks(self) -> GymnasiumSettings:
        if bool(self.id) == bool(self.tasks):
            raise ValueError("set either id or tasks: a registered id such as CartPole-v1, or a list of tasks")
        return self

    def spec(self) -> EnvSpec:
        """The spec of a batch; makes an environment of each task to get it."""
        envs = [self.make(task) for task in range(len(self.task_list))]
        try:
            return self.spec_of(envs)
        finally:
            for env in envs:
                env.close()

    def variants(self) -> dict[str, Variant]:
        """The variants of `altered`."""
        return {
            name: Variant(other.kind, other.what, self._changes(dict(other.kwargs)))
            for name, other in self.altered.items()
        }

    def _changes(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Settings that give these keyword arguments to all tasks, also to one that sets its own."""
        from polyrhythm.config.load import merge

        if not any(task.kwargs.keys() & kwargs for task in self.tasks):
            return {"kwargs": kwargs}
        tasks = [task.model_dump(mode="json") for task in self.tasks]
        for task in tasks:
            own = {name: value for name, value in kwargs.items() if name in task["kwargs"]}
            task["kwargs"] = merge(task["kwargs"], own)
        return {"kwargs": kwargs, "tasks": tasks}

    def load_expert(self) -> Callable[[gymnasium.Env[Any, Any]], Any]:
        """The function of `expert`; without one, a function that is not called. ConfigError: it cannot be imported."""
        from polyrhythm.envs.gymnasium_make import import_address

        return import_address(self.expert, "env.expert") if self.expert else lambda _: None

    def build(self, rows: int) -> GymnasiumBatch:
        return GymnasiumBatch(self, rows)

    @property
    def task_list(self) -> tuple[GymnasiumTask, ...]:
        """All tasks, at least one."""
        return self.tasks or (GymnasiumTask(id=self.id),)

    def rendering(self) -> GymnasiumSettings | None:
        """The same environments with `render_mode: rgb_array`; None if they do not support it."""
        env = self.make()
        try:
            supported = env.metadata.get("render_modes") or ()
        finally:
            env.close()
        if "rgb_array" not in supported:
            return None
        return self.model_copy(update={"kwargs": {**self.kwargs, "render_mode": "rgb_array"}})

    def make(self, task: int = 0) -> gymnasium.Env[Any, Any]:
        """Make one wrapped environment, without Gymnasium's checks. ConfigError: it fails."""
        from polyrhythm.envs.gymnasium_make import CheckedForms, apply_wrapper, make_registered

        self.check()
        given, where = self.task_list[task], self.where(task)
        env = make_registered(given.id, {**self.kwargs, **given.kwargs}, self.max_steps, where)
        for place, wrapper in enumerate(self.wrappers):
            env = apply_wrapper(env, wrapper.apply, wrapper.kwargs, f"env.wrappers.{place}")
        return CheckedForms(env, f"{where} in its wrappers") if self.wrappers else env

    def limit(self, task: int) -> int:
        """Env steps after which this task's episodes are truncated."""
        from polyrhythm.envs.gymnasium_make import find_registered

        limit = self.max_steps or find_registered(self.task_list[task].id, self.where(task)).max_episode_steps
        if not limit:
            raise ConfigError(
                f"env.max_steps = 0: {self.task_list[task].id} registers no time limit; set max_steps above 0"
            )
        return limit

    def spec_of(self, envs: Sequence[gymnasium.Env[Any, Any]]) -> EnvSpec:
        """Spec of environments from `make`, one per task."""
        spaces = [
            (self.observations(env.observation_space, self.where(task)).spec, env.action_space)
            for task, env in enumerate(envs)
        ]
        for task, other in enumerate(spaces):
            for what, here, first in zip(("observations", "actions"), other, spaces[0], strict=True):
                if here != first:
                    raise ConfigError(
                        f"{self.where(task)}: its {what} are {here}, those of {self.task_list[0].id} are {first}; "
                        "tasks need equal ones: use env.wrappers that make them equal"
                    )
        names = [task.name or task.instruction or task.id for task in self.task_list]
        for task, name in enumerate(names):
            if name in names[:task]:
                raise ConfigError(f"env.tasks.{task}.name = {name}: another task has this name; make names unique")
        return EnvSpec(
            observation=spaces[0][0],
            action=action_spec(envs[0].action_space, self.where(0)),
            tasks=tuple(map(Task, names, [task.instruction or task.id for task in self.task_list])),
            max_steps=max(self.limit(task) for task in range(len(envs))),
            metrics=dict(self.metrics),
        )

    def where(self, task: int) -> str:
        """Setting of this task's environment, `name = value`, for errors."""
        return f"env.tasks.{task}.id = {self.tasks[task].id}" if self.tasks else f"env.id = {self.id}"


class GymnasiumBatch:
    """`rows` environments, and their last observations in one array per key, so that observing is one copy.

    With several tasks a row has one instance per task, made at the task's first reset. made: instances by row and task;
    envs: that of each row's current task.
    """

    def __init__(self, settings: GymnasiumSettings, rows: int) -> None:
        firsts = [settings.make(task) for task in range(len(settings.task_list))]
        self.rows, self.spec, self._settings = rows, settings.spec_of(firsts), settings
        self.made = {(0, task): env for task, env in enumerate(firsts)}
        self.envs = [self._env(row, 0) for row in range(rows)]
        self._to_env = action_converter(firsts[0].action_space)
        self.traits = replace(method_traits(self), expert=bool(settings.expert))
        self._expert = settings.load_expert()
        self._where = [settings.where(task) for task in range(len(firsts))]
        self._seen = settings.observations(firsts[0].observation_space, self._where[0], rows)
        self._limits = [settings.limit(task) for task in range(len(firsts))]
        self._steps = [0] * rows
        self._task = [0] * rows
        self._info = InfoReader(settings.success, settings.metrics)
        #: The row's MuJoCo state, if it has one, and how often that was unstable before the episode began.
        self._mujoco: list[mujoco.MjData | None] = [None] * rows
        self._unstable = [0] * rows

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        failed: dict[int, Exception] = {}
        for row, task, seed in zip(map(int, rows), map(int, tasks), seeds, strict=True):
            self._steps[row], self._task[row] = 0, task
            try:
                env = self.envs[row] = self._env(row, task)
                observation, _ = env.reset(seed=library_seed(int(seed)))
                self._seen.keep(row, observation, self._where[task])
                data = self._mujoco[row] = mujoco_data(env.unwrapped)
                self._unstable[row] = 0 if data is None else instabilities(data)
            except Exception as error:  # noqa: BLE001 - an environment may raise anything
                failed[row] = error
                self.discard(row)
        if failed:
            raise RowsFailed(failed)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        n = len(rows)
        rewards, terminated, truncated, success = [0.0] * n, [False] * n, [False] * n, [-1] * n
        metrics = {name: np.full(n, np.nan) for name in self.spec.metrics}
        failed: dict[int, Exception] = {}
        for i, (row, action) in enumerate(zip(rows, self._to_env(actions), strict=True)):
            try:
                observation, rewards[i], terminated[i], cut, info = self.envs[row].step(action)
                self._seen.keep(row, observation, self._where[self._task[row]])
                if (data := self._mujoco[row]) is not None:
                    refuse_unstable(data, f"at step {self._steps[row] + 1}", self._unstable[row])
            except Exception as error:  # noqa: BLE001 - an environment may raise anything
                failed[int(row)] = error
                self.discard(int(row))
                continue
            self._steps[row] += 1
            truncated[i] = not terminated[i] and (cut or self._steps[row] >= self._limits[self._task[row]])
            if info:
                success[i], own = self._info.read(info)
                for name, number in own.items():
                    metrics[name][i] = number
            if terminated[i] or truncated[i]:
                self._info.end_episode()
        ends = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        result = StepResult(np.array(rewards, np.float32), *ends, np.array(success, np.int8), metrics)
        if failed:
            raise RowsFailed(failed, result)
        return result

    @property
    def success_key(self) -> str:
        """Key of `info` that success was read from, "" if there was none so far."""
        return self._info.success_key

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._seen.write(rows, out)

    def render(self, row: int) -> NDArray[np.uint8]:
        """Render the row with `render_mode: rgb_array`: [H,W,3]. ConfigError: a package is missing."""
        import gymnasium

        try:
            return np.asarray(self.envs[row].render())
        except gymnasium.error.DependencyNotInstalled as error:
            advice = str(error).replace("pip install ", pip_install("")).replace("`", "")
            raise ConfigError(f"rendering: {advice}") from error

    def expert_actions(self, rows: RowNumbers) -> NDArray[Any]:
        """The expert's action in the state of each row: [n,A]. ConfigError: it raises, or returns another size."""
        where, dim = f"env.expert = {self._settings.expert}", self.spec.action.dim
        found = np.zeros((len(rows), dim), self.spec.action.dtype)
        for i, row in enumerate(rows):
            env = self.envs[row]
            try:
                entries = action_entries(env.action_space, self._expert(env))
            except Exception as error:  # a user's function may raise anything
                raise ConfigError(f"{where}: it {raised(error)}; correct it") from error
            if entries.shape != (dim,):
                raise ConfigError(
                    f"{where}: it returned {len(entries)} numbers; return an action of {env.action_space}"
                )
            found[i] = entries
        return found

    def discard(self, row: int) -> None:
        """Drop the row's instance; its next reset makes another."""
        env = self.made.pop((row, self._task[row]), None)
        if env is not None:
            with suppress(Exception):
                env.close()

    def close(self) -> None:
        for env in self.made.values():
            env.close()

    def _env(self, row: int, task: int) -> gymnasium.Env[Any, Any]:
        if (row, task) not in self.made:
            self.made[row, task] = self._settings.make(task)
        return self.made[row, task]
