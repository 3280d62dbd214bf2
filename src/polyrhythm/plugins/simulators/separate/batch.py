"""An env batch whose rows are in another process."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.env_warnings import warn_once
from polyrhythm.envs.base import EnvTraits, EpisodeRefused, RowNumbers, RowsFailed, StepResult
from polyrhythm.plugins.simulators.separate import protocol as p
from polyrhythm.plugins.simulators.separate.env_process import EnvProcess


class SeparateBatch:
    """The batch that `process` builds. It offers experts, pictures, discarding and texts if that one does."""

    def __init__(self, process: EnvProcess, rows: int) -> None:
        self._process = process
        os.ftruncate(process.memory, p.observation_bytes(process.spec.observation, rows))
        built = process.ask(p.Build(rows), p.Built)
        self.spec, self.rows = built.spec, built.rows
        self._views = p.map_observations(process.memory, built.spec.observation, rows)
        has = built.traits
        self.traits = EnvTraits(
            expert=has.expert, draws_rows=has.draws_rows, discards_rows=has.discards_rows, texts=has.texts
        )

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        done = self._process.ask(p.Reset(_numbers(rows), _numbers(tasks), _numbers(seeds)), p.Done)
        if done.failed:
            raise RowsFailed(_errors(done.failed, done.refused))

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        found = self._process.ask(p.Step(_numbers(rows), p.packed(actions)), p.Stepped)
        result = StepResult(
            p.unpacked(found.reward),
            p.unpacked(found.terminated),
            p.unpacked(found.truncated),
            p.unpacked(found.success),
            {name: p.unpacked(array) for name, array in found.metrics.items()},
            None if found.executed is None else p.unpacked(found.executed),
        )
        for text in found.warned:
            warn_once(text)
        if found.failed:
            raise RowsFailed(_errors(found.failed), result)
        return result

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._process.ask(p.Observe(_numbers(rows)), p.Done)
        for name, view in self._views.items():
            out[name][: len(rows)] = view[: len(rows)]

    def close(self) -> None:
        self._process.close()

    def expert_actions(self, rows: RowNumbers) -> NDArray[Any]:
        found = self._process.ask(p.ExpertActions(_numbers(rows)), p.Answer)
        actions = p.unpacked(found.array)
        if found.failed:
            raise RowsFailed(_errors(found.failed, found.refused), actions)
        return actions

    def render(self, row: int) -> NDArray[Any]:
        return p.unpacked(self._process.ask(p.Render(int(row)), p.Answer).array)

    def discard(self, row: int) -> None:
        self._process.ask(p.Discard(int(row)), p.Done)

    def texts(self, row: int) -> tuple[str, ...]:
        return self._process.ask(p.Texts(int(row)), p.Said).texts


def _errors(failed: Mapping[int, str], refused: Collection[int] = ()) -> dict[int, Exception]:
    return {row: (EpisodeRefused if row in refused else RuntimeError)(text) for row, text in failed.items()}


def _numbers(values: RowNumbers | Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, values))
