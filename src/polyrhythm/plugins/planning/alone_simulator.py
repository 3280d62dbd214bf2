"""Measures a simulator alone: steps of its env batch with the policy's actions, and resets where episodes end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.array_specs import step_settings
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.planning.alone_parts import SHOWN, RunParts
from polyrhythm.plugins.planning.profile import StationProfile
from polyrhythm.plugins.planning.timing import Budget, Measurements, held_on, sizes
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.messages import ACTIONS
from polyrhythm.stations.simulator.chunk import stepper, whole_batch
from polyrhythm.stations.simulator.guard import EnvFault, GuardedEnv

#: Seeds tried for an episode, since some may be refused.
_SEEDS = 32


@contextmanager
def open_simulator(parts: RunParts, left_out: list[str]) -> Iterator[MeasuredSimulator]:
    found, before = Measurements(), held_on(CPU)
    env = env_settings(parts.config).build(parts.config.rollout.rows)
    try:
        yield MeasuredSimulator(parts, GuardedEnv(env), found, before, left_out)
    except EnvFault as fault:
        raise RunHalted(
            f"profile: {fault}{fault.place}; fix the environment (`polyrhythm check` tries its whole contract)"
        ) from fault
    finally:
        env.close()


class MeasuredSimulator:
    """One env batch, whose rows step with the policy's actions and begin anew where an episode ends."""

    def __init__(self, parts: RunParts, env: GuardedEnv, found: Measurements, before: int, left_out: list[str]) -> None:
        self._parts, self._env, self._found, self._before, self._left_out = parts, env, found, before, left_out
        config, spec = parts.config, parts.spec
        settings = step_settings(config, parts.form.chunk, whole=bool(spec.chunk))
        settings.check(spec)
        self._step = env.step if spec.step_rows else whole_batch(env)
        self._step_chunk = stepper(spec, settings.action_repeat)
        self._elapsed = np.zeros(env.rows, np.int64)  # env steps
        self._steps = np.zeros(env.rows, np.int64)  # chunk steps
        self._seed, self._turn = 0, 0
        self._arrays = {name: np.zeros((env.rows, *a.shape), a.dtype) for name, a in spec.observation.items()}

    def observe(self) -> None:
        """Begin an episode in each row, and keep the observations as those of passes and samples."""
        rows = np.arange(self._env.rows)
        self._reset(rows)
        self._observe(rows)
        shown = dict(self._arrays)
        tasks = len(self._parts.spec.tasks)
        for name, array in self._parts.layout.obs.items():
            if name not in shown:  # the instruction and the progress
                values = np.arange(self._env.rows) % tasks if array.dtype == "int64" else np.zeros(self._env.rows)
                shown[name] = values.astype(array.dtype)
        self._parts.obs = {name: np.resize(x, (SHOWN, *x.shape[1:])) for name, x in shown.items()}

    def measure(self, budget: Budget) -> StationProfile:
        amounts = sizes(self._env.rows) if self._parts.spec.step_rows else [self._env.rows]
        if not self._parts.spec.step_rows:
            self._left_out.append("simulator: other numbers of rows, since the environment steps only whole batches")
        budget.parts = len(amounts)
        for rows in amounts:
            self._found.repeat(partial(self._chunk_step, rows), "step", rows, budget.part())
        self._reset(np.arange(self._env.rows))
        held, found = max(0, held_on(CPU) - self._before), self._found
        return StationProfile(host=held, works=found.works(), awake=found.awake)

    def _chunk_step(self, count: int) -> None:
        """Measure a chunk step of the first rows, observations included. Rows that end are reset after it."""
        parts, rows = self._parts, np.arange(count)
        answers = parts.answers
        actions = answers[ACTIONS][(rows + self._turn) % len(answers)]
        self._turn += count
        left = parts.spec.max_steps - self._elapsed[rows]
        with self._found.time("step", count):
            result = self._step_chunk(self._step, rows, actions, left)
            self._observe(rows)
        self._elapsed[rows] += result.steps
        self._steps[rows] += 1
        parts.row_steps += count
        over = rows[result.terminated | result.truncated]
        parts.ended += self._steps[over].tolist()
        if len(over):
            self._reset(over if parts.spec.reset_rows else np.arange(self._env.rows))

    def _reset(self, rows: NDArray[np.intp]) -> None:
        """Begin episodes, and measure it; for refused ones the next seeds are tried."""
        tasks = len(self._parts.spec.tasks)
        self._elapsed[rows] = self._steps[rows] = 0
        with self._found.time("reset", len(rows)):
            for _ in range(_SEEDS):
                seeds = list(range(self._seed, self._seed + len(rows)))
                self._seed += len(rows)
                self._env.reset(list(map(int, rows)), [seed % tasks for seed in seeds], seeds)
                rows = np.array(sorted(self._env.failed), np.intp)
                if not len(rows):
                    return
        raise next(iter(self._env.failed.values()))

    def _observe(self, rows: NDArray[np.intp]) -> None:
        self._env.observe(rows, {name: array[: len(rows)] for name, array in self._arrays.items()})
