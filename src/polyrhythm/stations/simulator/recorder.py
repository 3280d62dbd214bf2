"""Writes a slot's observations into the arena blocks of its rows.

Rows at the same step in adjacent blocks are rendered in one call, straight into their entries. Otherwise small
observations are made for all rows in one call and scattered, large ones are rendered row by row.
"""

from __future__ import annotations

from types import MappingProxyType as ReadOnly
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvBatch
from polyrhythm.runtime.memory.arena import Arena, Entries, whole
from polyrhythm.scheduler.records import SlotInfo
from polyrhythm.specs import INSTRUCTION, PROGRESS
from polyrhythm.specs.finite import first_not_finite
from polyrhythm.stations.simulator.rows import Index

#: Observations of at least this many bytes per row are rendered in place rather than scattered.
_LARGE = 4096


class Recorder:
    """Observation writer of one slot, whose rows are `first`..`first + rows - 1` of `env`."""

    def __init__(self, info: SlotInfo, env: EnvBatch, arena: Arena) -> None:
        self.arena = arena
        self._env = env
        self._numbers = np.arange(info.first, info.first + info.rows)
        self._shown = {name: arena.obs[name] for name in env.spec.observation}
        self._floating = {n: f"observation {n}" for n, array in self._shown.items() if array.dtype.kind == "f"}
        self._instruction, self._progress = arena.obs[INSTRUCTION], arena.obs[PROGRESS]
        size = sum(array[0].nbytes for array in self._shown.values())
        self._scratch = {
            name: np.zeros((info.rows, *array.shape[1:]), array.dtype)
            for name, array in self._shown.items()
            if size < _LARGE and info.rows > 1
        }
        self._moves = [(whole(array), whole(self._shown[name])) for name, array in self._scratch.items()]

    def observe(self, rows: Index, entries: Entries, progress: NDArray[np.float64] | float) -> dict[int, str]:
        """Observe these rows (ascending, numbered within the slot), each into its entry.

        Returns for each row with NaN or infinity: position in `rows` → name of the observation.
        """
        numbers = self._numbers[rows]
        self._progress[entries] = progress
        if isinstance(entries, slice):
            seen = {name: array[entries] for name, array in self._shown.items()}
            self._env.observe(numbers, ReadOnly(seen))
        elif self._scratch:
            count = len(entries)
            seen = {name: array[:count] for name, array in self._scratch.items()}
            self._env.observe(numbers, ReadOnly(seen))
            for made, shown in self._moves:
                shown.put(entries, made[:count])
        else:
            for place, entry in enumerate(entries.tolist()):
                into = {name: array[entry : entry + 1] for name, array in self._shown.items()}
                self._env.observe(numbers[place : place + 1], ReadOnly(into))
            seen = {name: self._shown[name][entries] for name in self._floating}
        # Scattered entries are checked in the scratch array: no second gather.
        return first_not_finite({label: seen[name] for name, label in self._floating.items()})

    def show_instruction(self, block: int, instruction: int) -> None:
        """Write this instruction to the whole block."""
        layout = self.arena.layout
        self._instruction[layout.block(block, layout.entries)] = instruction

    def restore(self, entry: int, observation: dict[str, NDArray[Any]], progress: float) -> None:
        """Write to an entry the observation that `final` returned."""
        for name, array in observation.items():
            self._shown[name][entry] = array
        self._progress[entry] = progress

    def final(self, entry: int) -> dict[str, NDArray[Any]]:
        """A copy of the environment's observation at an entry."""
        return {name: array[entry].copy() for name, array in self._shown.items()}
