"""Resets of rows of one ManiSkill environment, the check that a task's rows are independent, and the state of all rows
while the simulation is away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.conformance import raised
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.simulators.maniskill.isolation import (
    NotByRowError,
    OtherRows,
    RowDraws,
    first_differing,
    put_rows,
    row_tensors,
    sim_state,
    use_own_turns,
)

log = logging.getLogger(__name__)

#: How often rows are checked for their independence, each with other seeds: states may agree by chance.
_CHECKS = 4


class KeptStates(NamedTuple):
    """On the host: state of the simulation, tensors of the task and of controllers, numpy's generators."""

    simulation: Any
    tensors: Mapping[str, Tensor]
    random: Any


class Resets:
    """Resets of an environment of `task` with so many rows, once `use` has it. on_reset: called after each call of
    ManiSkill's `reset`, with the rows that it reset and its observation of all rows; calls: number of these calls."""

    env: Any

    def __init__(self, task: str, rows: int, on_reset: Callable[[Sequence[int], Any], None]) -> None:
        self._task, self._on_reset, self.calls = task, on_reset, 0
        self.rows = rows
        self._by_row = self.rows > 1  # several rows are reset by one call
        self._generators = [torch.Generator() for _ in range(self.rows)]
        self._begun: list[tuple[int, int]] = [(0, -1)] * self.rows  # seed, and episode number or -1

    def use(self, env: Any) -> None:
        """From now on reset this environment, which is like the one before."""
        self.env = env
        if self.rows > 1:
            if env.reconfiguration_freq:
                raise ConfigError(
                    f"env.backend = gpu: {self._task} makes all objects anew at a reset, so rows cannot be reset "
                    "alone; set it to cpu"
                )
            use_own_turns(env)

    def reset(
        self, rows: Sequence[int], seeds: Sequence[int], episodes: NDArray[np.int64] | None = None
    ) -> Mapping[str, Any]:
        """Reset rows, ascending, and return ManiSkill's info of the last call. seeds: ManiSkill's; episodes: numbers,
        for tasks with numbered episodes; one for each of the rows."""
        for place, row in enumerate(rows):
            self._begun[row] = int(seeds[place]), -1 if episodes is None else int(episodes[place])
        if self._by_row:
            try:
                with RowDraws(seeds, self._generators) as draws:
                    self.env._set_episode_rng = lambda _seed, _rows: draws.begin(self.env, rows)
                    self.env._set_main_rng = lambda _seed: None  # of seeds that nobody gives
                    try:
                        return self._call(rows, 0, episodes)
                    finally:
                        del self.env._set_episode_rng, self.env._set_main_rng
            except NotByRowError as error:
                self._by_row = False
                log.info("%s draws %s, so its rows are reset one after another", self._task, error)
        info: Mapping[str, Any] = {}
        for place, row in enumerate(rows):
            info = self._call([row], int(seeds[place]), None if episodes is None else episodes[place : place + 1])
        return info

    def _call(self, rows: Sequence[int], seed: int, episodes: NDArray[np.int64] | None) -> Mapping[str, Any]:
        from mani_skill.utils import common

        others = OtherRows(self.env, rows) if len(rows) < self.rows else None
        options = {"env_idx": common.to_tensor(np.array(rows, np.int64), device=self.env.device)}
        if episodes is not None:
            options["episode_id"] = common.to_tensor(episodes, device=self.env.device)
        self.calls += 1
        # The same seed for all rows, so that a row's generator does not depend on its index.
        observation, info = self.env.reset(seed=[seed] * self.rows, options=options)
        if others is not None:
            others.restore(self.env)
        self._on_reset(rows, observation)
        found: Mapping[str, Any] = info
        return found

    def check_rows(self) -> None:
        """ConfigError: the task's partial reset fails, changes other rows, or depends on them. Where rows that are
        reset by one call do so, each is reset by a call of its own."""
        if self.rows == 1:
            return
        what = ""
        for _ in range(2):
            try:
                found = (self._first_dependence(seed) for seed in range(0, _CHECKS * 2 * self.rows, 2 * self.rows))
                what = next(filter(None, found), "")
            except Exception as error:
                raise ConfigError(
                    f"env.backend = gpu: {self._task} cannot reset some rows alone ({raised(error)}); set it to cpu"
                ) from error
            if not what:
                return
            self._by_row = False
        raise ConfigError(f"env.backend = gpu: {self._task}: a row that is reset alone {what}; set it to cpu")

    def _first_dependence(self, seed: int) -> str:
        """How the last row and the others depend on each other, "" if they do not. The last one is reset twice with one
        seed: with all rows, and alone when the others are in other states."""

        def reset(rows: range, first: int) -> dict[str, Tensor]:
            self.reset(rows, [first + row for row in rows])
            return {name: x.clone() for name, x in {"positions": sim_state(self.env), **row_tensors(self.env)}.items()}

        last = self.rows - 1
        together, others = reset(range(self.rows), seed), reset(range(last), seed + self.rows)
        alone = reset(range(last, self.rows), seed)
        if name := first_differing(others, alone, slice(0, last)):
            return f"changes {name} of others"
        name = first_differing(together, alone, slice(last, self.rows))
        return f"takes {name} from others" if name else ""

    def keep_states(self) -> KeptStates:
        """The states of all rows, on the host."""
        from mani_skill.utils import common

        tensors = {name: tensor.cpu().clone() for name, tensor in row_tensors(self.env).items()}
        return KeptStates(common.to_cpu_tensor(self.env.get_state_dict()), tensors, self.env._batched_episode_rng)

    def put_states(self, states: KeptStates) -> None:
        """Give all rows these states, equal to the bit. Each is reset with its seed first, for what larger tensors of
        the task hold; contacts are no part of a state."""
        begun, every = list(self._begun), range(self.rows)
        for numbered in (False, True):
            if rows := [row for row in every if (begun[row][1] >= 0) == numbered]:
                seeds, episodes = zip(*(begun[row] for row in rows), strict=True)
                self.reset(rows, seeds, np.array(episodes, np.int64) if numbered else None)
        self.env.set_state_dict(_on_device(states.simulation, self.env.device))
        put_rows(self.env, states.tensors, torch.ones(self.rows, dtype=torch.bool))
        self.env._batched_episode_rng = states.random


def _on_device(state: Any, device: Any) -> Any:
    """A state's tensors there, in dictionaries of any depth."""
    if isinstance(state, dict):
        return {name: _on_device(value, device) for name, value in state.items()}
    return state.to(device)
