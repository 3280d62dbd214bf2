"""Input and output buffers of a generator's forward passes, allocated once and refilled for each pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.policies.base import Act
from polyrhythm.runtime.memory.arena import Arena, RequestView
from polyrhythm.runtime.memory.tensors import as_array, as_tensors
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE, VERSION

#: Observations, greedy and noise keys, as `Policy.act` takes them.
Inputs = tuple[dict[str, Tensor], Tensor, Tensor]


class BatchBuffer:
    """Buffers for n rows. view: requested arena entries, noise keys and greedy flags, each [n]; obs: name → [n, ...];
    answers: records [n]."""

    def __init__(
        self, view: RequestView, obs: Mapping[str, NDArray[Any]], answers: NDArray[Any], device: torch.device
    ) -> None:
        self.view, self.obs, self.answers = view, obs, answers
        self._fields = {name: answers[name] for name in answers.dtype.names or ()}
        self._forms = {n: (x.shape, x.dtype.kind == "f") for n, x in self._fields.items() if n != VERSION}
        self._device = device
        self._shared = self._tensors() if device.type == "cpu" else None

    @classmethod
    def of(cls, arena: Arena, device: torch.device, least: int = 0) -> BatchBuffer:
        """Buffers for the largest possible batch, at least `least` rows; untouched pages use no physical memory."""
        rows = max(least, sum(arena.layout.slots.values()))
        view = RequestView(np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, bool))
        obs = {name: np.zeros((rows, *array.shape[1:]), array.dtype) for name, array in arena.obs.items()}
        return cls(view, obs, np.zeros(rows, arena.layout.answer_dtype), device)

    def first(self, rows: int) -> BatchBuffer:
        """A view of the first rows of the same memory."""
        view = RequestView(self.view.entries[:rows], self.view.noise_key[:rows], self.view.greedy[:rows])
        obs = {name: array[:rows] for name, array in self.obs.items()}
        return BatchBuffer(view, obs, self.answers[:rows], self._device)

    def put_request(self, first: int, view: RequestView) -> None:
        """Write a request's rows from row `first` on."""
        own, part = self.view, slice(first, first + len(view.entries))
        own.entries[part], own.noise_key[part], own.greedy[part] = view.entries, view.noise_key, view.greedy

    def pad(self, first: int) -> None:
        """Fill the rows from `first` on with copies of row 0."""
        for array in (self.view.entries, self.view.noise_key, self.view.greedy):
            array[first:] = array[0]

    def gather(self, arena: Arena) -> None:
        """Copy the observations of the requested rows from the arena."""
        for name, into in self.obs.items():
            # A request that its slot has abandoned may name any entry; clipping keeps the index valid.
            arena.obs[name].take(self.view.entries, 0, into, "clip")

    def inputs(self) -> Inputs:
        """The gathered inputs on the policy's device; on the CPU they share this memory."""
        return self._shared or self._tensors()

    def _tensors(self) -> Inputs:
        keys = as_tensors({"greedy": self.view.greedy, "noise_key": self.view.noise_key}, self._device)
        return as_tensors(self.obs, self._device), keys["greedy"], keys["noise_key"]

    def form_error(self, act: Act) -> str:
        """How the policy's output differs in keys, shapes or types from its output before the start; "" if equal."""
        given = {ACTIONS: act.actions, LOGPROB: act.logprob, VALUE: act.value}
        given |= {FORWARD_INPUTS + name: tensor for name, tensor in act.forward_inputs.items()}
        if given.keys() != self._forms.keys():
            return f"forward_inputs {sorted(act.forward_inputs)}, but {self._forward_inputs()} before the start"
        for name, (shape, is_float) in self._forms.items():
            tensor = given[name]
            if tensor.shape != shape or (tensor.is_floating_point() and not is_float):
                expected = f"{list(shape)} of {'floating-point numbers' if is_float else 'integers'}"
                return f"{name} {list(tensor.shape)} of {tensor.dtype}, expected {expected}"
        return ""

    def _forward_inputs(self) -> list[str]:
        return sorted(name.removeprefix(FORWARD_INPUTS) for name in self._forms if name.startswith(FORWARD_INPUTS))

    def answer(self, act: Act, version: int) -> None:
        """Write the policy's output as records; requires `form_error(act) == ""`."""
        fields = self._fields
        fields[ACTIONS][...] = as_array(act.actions)
        fields[LOGPROB][...] = as_array(act.logprob)
        fields[VALUE][...] = as_array(act.value)
        for name, tensor in act.forward_inputs.items():
            fields[FORWARD_INPUTS + name][...] = as_array(tensor)
        fields[VERSION][...] = version
