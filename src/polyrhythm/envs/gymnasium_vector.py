"""Adapter for Gymnasium vector environments: an env batch is one vector environment.

With any autoreset mode, a row shows one episode: from a reset with its seed to its last observation, which stays until
the next reset. What the vector environment does with the row in between is discarded.

    DISABLED    rows reset individually, by `reset_mask`; ended rows are also reset unseen, as stepping requires
    SAME_STEP   all rows begin together; a row's last observation and info are `final_obs` and `final_info`
    NEXT_STEP   all rows begin together; the action after a row's last step is ignored
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from polyrhythm.conformance import raised
from polyrhythm.envs.base import EnvTraits, RowNumbers, StepResult
from polyrhythm.envs.gymnasium_env import GymnasiumFields, GymnasiumWrapper, as_wrapper
from polyrhythm.envs.gymnasium_spaces import action_converter, action_spec
from polyrhythm.envs.info import InfoReader
from polyrhythm.errors import ConfigError, EnvLost, PolyrhythmError
from polyrhythm.specs import EnvSpec, Task
from polyrhythm.specs.hashing import library_seed

if TYPE_CHECKING:
    import gymnasium

Autoreset = Literal["disabled", "same_step", "next_step"]
#: Names of the values of `metadata["autoreset_mode"]`, an enumeration or its name.
_MODES: dict[str, Autoreset] = {"Disabled": "disabled", "SameStep": "same_step", "NextStep": "next_step"}


class GymnasiumVectorSettings(GymnasiumFields):
    """One Gymnasium vector environment per env batch: of a registered `id`, or from a function of yours.

    All rows step in one call. With autoreset disabled rows are reset on their own; in the other modes the rows of a
    batch begin their episodes together. Observation, action and success are as in `gymnasium`.
    """

    traits: ClassVar = EnvTraits(wraps=True)

    type: Literal["gymnasium_vector"] = "gymnasium_vector"
    id: str = ""
    """Registered id, or `module:id` to import the module that registers it; empty with make."""
    mode: Literal["sync", "async", "own"] = "sync"
    """With id. sync: in a loop; async: a process per row; own: the vector environment that the id registers."""
    make: str = ""
    """module:function that takes `num_envs` and kwargs and returns a `gymnasium.vector.VectorEnv`; empty with id."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment, or of make."""
    autoreset: Literal["auto", "disabled", "same_step", "next_step"] = "auto"
    """What a vector environment that does not say it (`metadata["autoreset_mode"]`) does with a row that ended."""
    wrappers: tuple[Annotated[GymnasiumWrapper, BeforeValidator(as_wrapper)], ...] = ()
    """With id, in the modes sync and async: what is applied to the environment of each row, as in `gymnasium`."""
    instruction: str = ""
    """Instruction for the policy; the id, or the name of make's function, if empty."""

    @model_validator(mode="after")
    def _id_or_make(self) -> GymnasiumVectorSettings:
        if bool(self.id) == bool(self.make):
            raise ValueError("set either id or make: a registered id such as CartPole-v1, or module:function")
        if self.wrappers and (self.make or self.mode == "own"):
            what = "the function of make" if self.make else "mode: own"
            raise ValueError(f"wrappers are applied to single rows, which {what} does not make; leave them out")
        return self

    def spec(self) -> EnvSpec:
        """The spec of a batch; makes a vector environment of one row to get it."""
        env = self.made(1)
        try:
            return self.spec_of(env)
        finally:
            env.close()

    def build(self, rows: int) -> GymnasiumVectorBatch:
        return GymnasiumVectorBatch(self, rows)

    def made(self, rows: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """Make the vector environment. ConfigError: that fails."""
        import gymnasium

        self.check()
        try:
            if self.make:
                module, _, name = self.make.partition(":")
                env = getattr(importlib.import_module(module), name)(num_envs=rows, **self.kwargs)
            else:
                env = self._registered(rows)
        except ConfigError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(f"{self.where}: it {raised(error)}; correct it, or its kwargs") from error
        if not isinstance(env, gymnasium.vector.VectorEnv):
            raise ConfigError(f"{self.where}: it gave {type(env).__name__}; return a gymnasium.vector.VectorEnv")
        if env.num_envs != rows:
            env.close()
            raise ConfigError(f"{self.where}: it has {env.num_envs} rows, {rows} were asked for by num_envs")
        return env

    def _registered(self, rows: int) -> Any:
        import gymnasium
        from gymnasium.vector import AutoresetMode

        from polyrhythm.envs.gymnasium_make import CheckedForms, apply_wrapper, checked_inside, find_registered

        spec = copy.deepcopy(find_registered(self.id, self.where))
        spec.max_episode_steps = self.max_steps or spec.max_episode_steps
        spec.disable_env_checker = True  # `CheckedForms` does it
        if self.mode == "own":
            return gymnasium.make_vec(spec, rows, "vector_entry_point", **self.kwargs)
        own = {"autoreset_mode": AutoresetMode.DISABLED}
        wrappers: list[Any] = [partial(checked_inside, where=self.where)]
        wrappers += [
            partial(apply_wrapper, address=wrapper.apply, kwargs=wrapper.kwargs, where=f"env.wrappers.{place}")
            for place, wrapper in enumerate(self.wrappers)
        ]
        wrappers.append(partial(CheckedForms, where=self.where, observations=True, drop=self.drop))
        return gymnasium.make_vec(spec, rows, self.mode, own, wrappers, **self.kwargs)

    @property
    def where(self) -> str:
        """The setting that names the environment, `env.id = …`, for errors."""
        return f"env.id = {self.id}" if self.id else f"env.make = {self.make}"

    def autoreset_of(self, env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> Autoreset:
        """Autoreset mode. ConfigError: neither the environment nor the settings declare it."""
        said = env.metadata.get("autoreset_mode")
        if said is not None:
            mode = _MODES.get(getattr(said, "value", said))
            if mode is None or self.autoreset not in ("auto", mode):
                raise ConfigError(
                    f"env.autoreset = {self.autoreset}: the vector environment says {said}; set it to auto, or correct "
                    "its metadata['autoreset_mode'] to one of gymnasium.vector.AutoresetMode"
                )
            return mode
        if self.autoreset == "auto":
            raise ConfigError(
                f"{self.where}: the vector environment does not say what happens to a row that ended "
                "(metadata['autoreset_mode']); set env.autoreset"
            )
        return self.autoreset

    def spec_of(self, env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> EnvSpec:
        """Spec of a vector environment from `made`."""
        limit = self.max_steps or (env.spec and env.spec.max_episode_steps)
        if not limit:
            raise ConfigError(f"env.max_steps = 0: {self.id or self.make} has no time limit; set max_steps above 0")
        name = self.id or self.make.rpartition(":")[2]
        return EnvSpec(
            observation=self.observations(env.single_observation_space, self.where).spec,
            action=action_spec(env.single_action_space, self.where),
            tasks=(Task(name, self.instruction or name),),
            max_steps=limit,
            reset_rows=self.autoreset_of(env) == "disabled",
            step_rows=False,
            metrics=dict(self.metrics),
        )


class GymnasiumVectorBatch:
    """One vector environment. ended: rows whose episode is over, until their next reset."""

    def __init__(self, settings: GymnasiumVectorSettings, rows: int) -> None:
        self._env, self._where = settings.made(rows), settings.where
        self.rows, self.spec = rows, settings.spec_of(self._env)
        self._autoreset = settings.autoreset_of(self._env)
        self._to_env = action_converter(self._env.single_action_space)
        self._seen = settings.observations(self._env.single_observation_space, settings.where, rows)
        self._info = InfoReader(settings.success, settings.metrics)
        self._steps = np.zeros(rows, np.int64)
        self._ended = np.ones(rows, np.bool_)
        self._done_inside = np.zeros(rows, np.bool_)  # to be reset before the next step
        self._begun = False  # whether all rows were reset once, which the first reset must do

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:  # noqa: ARG002 - one task
        seed_of = {int(row): library_seed(int(seed)) for row, seed in zip(rows, seeds, strict=True)}
        given = [seed_of.get(row) for row in range(self.rows)]
        chosen = np.isin(np.arange(self.rows), list(seed_of))
        whole = chosen.all() or not self._begun
        with _lost_with_its_processes():
            found = self._env.reset(seed=given, options=None if whole else {"reset_mask": chosen.copy()})
        observation, _ = self._parts("reset", found, 2)
        self._begun = True
        self._seen.keep_rows(chosen, observation)
        self._steps[chosen] = 0
        self._ended[chosen] = False
        self._done_inside[chosen | whole] = False

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:  # noqa: ARG002 - all of them
        acted = np.asarray(self._to_env(actions), self._env.action_space.dtype)
        with _lost_with_its_processes():
            if self._autoreset == "disabled" and self._done_inside.any():
                self._env.reset(options={"reset_mask": self._done_inside.copy()})  # not observed, but it steps too
                self._done_inside[:] = False
            found = self._env.step(acted)
        observation, reward, terminated, truncated, info = self._parts("step", found, 5)
        reward = self._per_row("reward", reward)
        terminated, truncated = self._flags("terminated", terminated), self._flags("truncated", truncated)
        live = ~self._ended
        done = np.logical_or(terminated, truncated)
        self._seen.keep_rows(live, observation)
        if self._autoreset == "same_step" and (done & live).any():
            for row in map(int, np.flatnonzero(done & live)):
                self._seen.keep(row, info["final_obs"][row])
        self._steps[live] += 1
        self._done_inside |= done
        late = self._steps >= self.spec.max_steps
        self._ended |= done | late
        success, metrics = self._info.read_rows(info, done)
        if ((done | late) & live).any():
            self._info.end_episode()
        return StepResult(reward.astype(np.float32), terminated, (truncated | late) & ~terminated, success, metrics)

    @property
    def success_key(self) -> str:
        """Key of `info` that success was read from, "" if there was none so far."""
        return self._info.success_key

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._seen.write(rows, out)

    def close(self) -> None:
        self._env.close()

    def _parts(self, call: str, found: Any, count: int) -> Any:
        """ConfigError: the call did not return a tuple of `count` values."""
        if not isinstance(found, tuple) or len(found) != count:
            size = f" of {len(found)}" if isinstance(found, tuple) else ""
            raise ConfigError(
                f"{self._where}: {call} returned {type(found).__name__}{size}; return a tuple of {count}, as "
                "gymnasium.vector.VectorEnv says"
            )
        return found

    def _per_row(self, name: str, value: Any) -> NDArray[Any]:
        """One number per row, [rows]. ConfigError: there are others."""
        array = np.asarray(value)
        if array.shape not in ((self.rows,), (self.rows, 1)) or array.dtype.kind not in "biuf":
            raise ConfigError(
                f"{self._where}: step returned {name} as {array.dtype} {list(array.shape)}; return one number or flag "
                f"for each of its {self.rows} rows"
            )
        return array.reshape(self.rows)

    def _flags(self, name: str, value: Any) -> NDArray[np.bool_]:
        """One flag per row, [rows], copied. ConfigError: there are others."""
        numbers = self._per_row(name, value)
        flags = numbers.astype(np.bool_)
        if (flags != numbers).any():
            raise ConfigError(
                f"{self._where}: step returned {name} = {numbers.tolist()}; return True or False for each"
            )
        return flags


@contextmanager
def _lost_with_its_processes() -> Iterator[None]:
    """Turn an exception into EnvLost: it may have ended one of several processes, and with it the vector
    environment."""
    try:
        yield
    except PolyrhythmError:
        raise
    except Exception as error:
        raise EnvLost(f"the vector environment {raised(error)}") from error
