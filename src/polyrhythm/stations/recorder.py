"""Where a slot's observations and answers are written, once: rings of arrays [L, rows, ...].

One ring position is one request of the slot. An observation is written at the position of the request that will
show it, the answer and the rewards beside it, so that a sample is a run of consecutive positions in its row's column.
L is at least the longest sample plus one, hence nothing of a running sample is overwritten. The column is copied out
once, when the sample ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvBatch
from polyrhythm.flow.records import SlotInfo, Ticket
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE, Reply
from polyrhythm.runtime.payloads import Index, Payloads
from polyrhythm.specs import INSTRUCTION, PROGRESS, Trajectory

Rings = dict[str, NDArray[Any]]

#: Above this many runs of consecutive rows, an observation is made in one piece elsewhere and copied into the ring.
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class Ending:
    """What a trajectory tells of its sample beside the arrays."""

    task: int
    terminated: bool
    success: bool
    env_steps: int


class Recorder:
    """The rings of one slot, whose rows are `first`..`first + rows - 1` of `env`; `length` is L.

    Answer rings are made at the first answer, which shows their layout.
    """

    def __init__(self, info: SlotInfo, env: EnvBatch, chunk: int, length: int, payloads: Payloads) -> None:
        self.length = length
        self._owner, self._rows = info.slot, info.rows
        self._env, self._payloads = env, payloads
        self._numbers = np.arange(info.first, info.first + info.rows)
        spec, rows = env.spec, info.rows
        self._shown = tuple(spec.observation)
        self._scratch: Rings = {}
        self.obs: Rings = {
            name: self._ring(name, spec.observation[name].shape, spec.observation[name].dtype) for name in self._shown
        }
        self.obs[INSTRUCTION] = self._ring(INSTRUCTION, (), "int64")
        self.obs[PROGRESS] = self._ring(PROGRESS, (), "float32")
        self.rewards = np.zeros((length, rows, chunk), np.float32)
        self.valid = np.zeros((length, rows, chunk), bool)
        self.version = np.zeros((length, rows), np.int64)
        self.answers: Rings = {}

    def _ring(self, name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        return self._payloads.allocate(self._owner, name, (self.length, self._rows, *shape), dtype)

    def observe(self, position: int, rows: Index) -> None:
        """Have the environment write these rows' observations (ascending, within the slot) straight into the ring."""
        if isinstance(rows, slice):
            self._env.observe(
                self._numbers[rows],  # type: ignore[arg-type]
                {name: self.obs[name][position, rows] for name in self._shown},
            )
            return
        breaks = np.flatnonzero(np.diff(rows) > 1) + 1
        if len(breaks) < _MOST_RUNS:
            for run in np.split(rows, breaks):
                self.observe(position, slice(int(run[0]), int(run[-1]) + 1))
            return
        if not self._scratch:
            self._scratch = {name: np.empty_like(self.obs[name][0]) for name in self._shown}
        made = {name: array[: len(rows)] for name, array in self._scratch.items()}
        self._env.observe(self._numbers[rows], made)  # type: ignore[arg-type]
        for name, array in made.items():
            self.obs[name][position, rows] = array

    def restore(self, position: int, row: int, observation: Rings) -> None:
        """Show a row the observation that `final` gave."""
        for name, array in observation.items():
            self.obs[name][position, row] = array

    def at(self, position: int) -> Rings:
        """The whole observation at a position: arrays [rows, ...]."""
        return {name: ring[position] for name, ring in self.obs.items()}

    def show(self, row: int, instruction: int) -> None:
        """The row shows this instruction from now on."""
        self.obs[INSTRUCTION][:, row] = instruction

    def final(self, row: int, position: int) -> Rings:
        """A copy of the environment's observation of one row."""
        return {name: self.obs[name][position, row].copy() for name in self._shown}

    def answer(self, position: int, rows: Index, reply: Reply) -> None:
        """Keep the answer for these rows."""
        if not self.answers:
            self.answers = {
                name: self._ring(name, array.shape[1:], array.dtype.name) for name, array in reply.arrays.items()
            }
        for name, array in reply.arrays.items():
            self.answers[name][position, rows] = array
        self.version[position, rows] = reply.version

    def cut(self, row: int, start: int, steps: int, ticket: Ticket, ending: Ending) -> Trajectory:
        """Copy out the sample of `steps` chunk steps whose first observation lies at position `start`."""
        answers = {name: self._column(ring, row, start, steps) for name, ring in self.answers.items()}
        return Trajectory(
            obs={name: self._column(ring, row, start, steps + 1) for name, ring in self.obs.items()},
            actions=answers.pop(ACTIONS),
            logprob=answers.pop(LOGPROB),
            value=answers.pop(VALUE),
            forward_inputs={name.removeprefix(FORWARD_INPUTS): array for name, array in answers.items()},
            rewards=self._column(self.rewards, row, start, steps),
            valid=self._column(self.valid, row, start, steps),
            version=self._column(self.version, row, start, steps),
            terminated=ending.terminated,
            truncated=not ending.terminated,
            success=ending.success,
            env_steps=ending.env_steps,
            ticket=ticket.number,
            group=ticket.group,
            task=ending.task,
        )

    def versions(self, row: int, start: int, steps: int) -> tuple[int, int]:
        """Oldest and newest weights that answered in this sample."""
        column = self._column(self.version, row, start, steps)
        return int(column.min()), int(column.max())

    def _column(self, ring: NDArray[Any], row: int, start: int, count: int) -> NDArray[Any]:
        """A copy of `count` positions of the row, from `start` on, around the ring's end."""
        stop = start + count
        if stop <= self.length:
            return ring[start:stop, row].copy()
        return np.concatenate((ring[start:, row], ring[: stop - self.length, row]))
