"""The memory of a generator's passes: what is gathered for one, and what comes out of it. Made once, filled again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.runtime.arena import Arena, RequestView
from polyrhythm.runtime.messages import VERSION
from polyrhythm.runtime.tensors import as_array, as_tensors


class BatchBuffer:
    """For n rows. view: which entries ask, and how [n]; obs: name → [n, ...]; answers: records [n]."""

    def __init__(self, view: RequestView, obs: Mapping[str, NDArray[Any]], answers: NDArray[Any]) -> None:
        self.view, self.obs, self.answers = view, obs, answers
        self._fields = {name: answers[name] for name in answers.dtype.names or ()}
        self._inputs: tuple[dict[str, Tensor], Tensor, Tensor] | None = None

    @classmethod
    def of(cls, arena: Arena) -> BatchBuffer:
        """For the largest batch there can be; memory that no batch has touched costs nothing."""
        rows = sum(arena.layout.slots.values())
        view = RequestView(np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, bool))
        obs = {name: np.empty((rows, *array.shape[1:]), array.dtype) for name, array in arena.obs.items()}
        return cls(view, obs, np.zeros(rows, arena.layout.answer_dtype))

    def first(self, rows: int) -> BatchBuffer:
        """The same memory, for its first rows only."""
        view = RequestView(self.view.index[:rows], self.view.noise_key[:rows], self.view.greedy[:rows])
        return BatchBuffer(view, {name: array[:rows] for name, array in self.obs.items()}, self.answers[:rows])

    def ask(self, first: int, view: RequestView) -> None:
        """Put a request's rows at `first` and after."""
        own, part = self.view, slice(first, first + len(view.index))
        own.index[part], own.noise_key[part], own.greedy[part] = view.index, view.noise_key, view.greedy

    def gather(self, arena: Arena) -> None:
        """Copy what the rows that ask are shown, once."""
        for name, into in self.obs.items():
            # A request that its slot has given up meanwhile may show any entry: clipped, it does no harm.
            arena.obs[name].take(self.view.index, 0, into, "clip")

    def inputs(self, device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Observations, greedy and noise keys on `device`; on the CPU they share this memory, and are made once."""
        if self._inputs is None or device.type != "cpu":
            keys = as_tensors({"greedy": self.view.greedy, "noise_key": self.view.noise_key}, device)
            self._inputs = (as_tensors(self.obs, device), keys["greedy"], keys["noise_key"])
        return self._inputs

    def answer(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Write the answer as records."""
        for name, tensor in tensors.items():
            self._fields[name][...] = as_array(tensor)
        self._fields[VERSION][...] = version
