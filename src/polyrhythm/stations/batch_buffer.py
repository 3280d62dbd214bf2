"""Host memory of a generator's forward passes, allocated once and refilled for each pass.

The inputs of a batch are contiguous, and so are its answers, so each crosses to or from a device in one copy. Both are
pinned if the policy is on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.policies.base import Act
from polyrhythm.runtime.memory.arena import Arena, RequestView
from polyrhythm.runtime.memory.tensors import as_array
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, NEWER, VALUE, VERSION

#: Observations, greedy and noise keys, as `Policy.act` takes them.
Inputs = tuple[dict[str, Tensor], Tensor, Tensor]

_ALIGNMENT = 64
#: What the station writes to an answer, not the policy.
_OWN = frozenset({VERSION, NEWER})
_OBS = "obs."
_NOISE_KEY, _GREEDY = "noise_key", "greedy"


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Layout of a batch. inputs: name → dtype and shape of one row, observations as `obs.<name>`. answers:
    record dtype of one row."""

    inputs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    answers: np.dtype[np.void]

    @classmethod
    def of(cls, arena: Arena) -> BatchLayout:
        obs = {_OBS + name: (torch_dtype(array.dtype), array.shape[1:]) for name, array in arena.obs.items()}
        own: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {_NOISE_KEY: (torch.int64, ()), _GREEDY: (torch.bool, ())}
        return cls({**obs, **own}, arena.layout.answer_dtype)

    def _places(self, rows: int) -> Iterator[tuple[str, int, int]]:
        """Name, offset and size in bytes of each input of `rows` rows; finally "" and the end offset."""
        offset = 0
        for name, (dtype, shape) in self.inputs.items():
            size = rows * prod(shape) * dtype.itemsize
            yield name, offset, size
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        yield "", offset, 0

    def input_bytes(self, rows: int) -> int:
        *_, (_, end, _) = self._places(rows)
        return end

    def obs_bytes(self, rows: int) -> int:
        """Size of the observations, which come first among the inputs."""
        return next(offset for name, offset, _ in self._places(rows) if not name.startswith(_OBS))

    def answer_bytes(self, rows: int) -> int:
        return rows * self.answers.itemsize

    def inputs_over(self, memory: Tensor, rows: int) -> Inputs:
        """The inputs of `rows` rows as views of `memory` (bytes on any device)."""
        found = {}
        for name, offset, size in self._places(rows):
            if name:
                dtype, shape = self.inputs[name]
                found[name] = memory[offset : offset + size].view(dtype).view(rows, *shape)
        obs = {name.removeprefix(_OBS): tensor for name, tensor in found.items() if name.startswith(_OBS)}
        return obs, found[_GREEDY], found[_NOISE_KEY]


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class BatchMemory:
    """Host memory for one batch of at most `rows` rows. Unpinned pages use no physical memory until touched."""

    def __init__(self, layout: BatchLayout, rows: int, *, pinned: bool = False) -> None:
        self.layout = layout
        self.inputs = _zero_bytes(layout.input_bytes(rows), pinned=pinned)
        self.answers = _zero_bytes(layout.answer_bytes(rows), pinned=pinned)
        self._entries = np.zeros(rows, np.int64)
        self._buffers: dict[int, BatchBuffer] = {}

    def buffer(self, rows: int) -> BatchBuffer:
        found = self._buffers.get(rows)
        if found is None:
            inputs = self.layout.inputs_over(self.inputs, rows)
            records = self.answers.numpy()[: self.layout.answer_bytes(rows)].view(self.layout.answers)
            found = self._buffers[rows] = BatchBuffer(inputs, self._entries[:rows], records)
        return found


def _zero_bytes(size: int, *, pinned: bool) -> Tensor:
    if pinned:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + size])


class BatchBuffer:
    """Buffers for n rows. view: requested arena entries, noise keys and greedy flags, each [n]; obs: name → [n, ...];
    answers: records [n]; inputs: obs, greedy and noise keys as tensors over the same memory; gathered: whether `obs`
    holds observations of the batch, as not all are on the device."""

    def __init__(self, inputs: Inputs, entries: NDArray[np.int64], answers: NDArray[Any]) -> None:
        obs, greedy, noise_key = inputs
        self.inputs, self.answers = inputs, answers
        self.view = RequestView(entries, noise_key.numpy(), greedy.numpy())
        self.obs = {name: tensor.numpy() for name, tensor in obs.items()}
        self._fetched: list[tuple[int, Mapping[str, NDArray[Any]]]] = []
        self._on_device: list[tuple[int, Mapping[str, Tensor]]] = []
        self.gathered = True
        self._requested = self._real = len(entries)  # rows that are not padding, of this and of the gathered batch
        self._fields = {name: answers[name] for name in answers.dtype.names or ()}
        self._forms = {n: (x.shape, x.dtype.kind == "f") for n, x in self._fields.items() if n not in _OWN}

    def put_request(self, first: int, view: RequestView) -> None:
        own, part = self.view, slice(first, first + len(view.entries))
        own.entries[part], own.noise_key[part], own.greedy[part] = view.entries, view.noise_key, view.greedy
        if view.obs is not None:
            self._fetched.append((first, view.obs))

    def put_on_device(self, first: int, obs: Mapping[str, Tensor]) -> None:
        """The observations of rows from `first` on are on the policy's device: `take_on_device` copies them."""
        self._on_device.append((first, obs))

    def take_on_device(self, obs: Mapping[str, Tensor]) -> None:
        """Copy the observations that are on the device to `obs`, the pass's inputs there [n, ...]."""
        for first, arrays in self._on_device:
            for name, tensor in arrays.items():
                obs[name][first : first + len(tensor)].copy_(tensor)
        for name in {name for _, arrays in self._on_device for name in arrays}:
            obs[name][self._real :] = obs[name][0]
        self._on_device.clear()

    def pad(self, first: int) -> None:
        for array in (self.view.entries, self.view.noise_key, self.view.greedy):
            array[first:] = array[0]
        self._requested = first

    def gather(self, arena: Arena) -> None:
        """Copy the observations of the requested rows that are not on the device, from the arena or as fetched."""
        self._real, self.gathered = self._requested, False
        there = Counter[str]()
        for _, arrays in self._on_device:
            there.update({name: len(tensor) for name, tensor in arrays.items()})
        for name, into in self.obs.items():
            if there[name] == self._real:
                continue
            self.gathered = True
            # A request that its slot has abandoned may name any entry; clipping keeps the index valid.
            arena.obs[name].take(self.view.entries, 0, into, "clip")
            for first, obs in self._fetched:
                into[first : first + len(obs[name])] = obs[name]
            if self._fetched:
                into[self._requested :] = into[0]
        self._fetched.clear()
        self._requested = len(self.view.entries)

    def form_error(self, act: Act) -> str:
        """How the policy's output differs in keys, shapes or types from that before the start; "" if equal."""
        given = act_fields(act)
        if given.keys() != self._forms.keys():
            own = sorted(name.removeprefix(FORWARD_INPUTS) for name in self._forms if name.startswith(FORWARD_INPUTS))
            return f"forward_inputs {sorted(act.forward_inputs)}, but {own} before the start"
        for name, (shape, is_float) in self._forms.items():
            tensor = given[name]
            if tensor.shape != shape or (tensor.is_floating_point() and not is_float):
                expected = f"{list(shape)} of {'floating-point numbers' if is_float else 'integers'}"
                return f"{name} {list(tensor.shape)} of {tensor.dtype}, expected {expected}"
        return ""

    def answer(self, act: Act) -> None:
        """Write the policy's output as records; requires `form_error(act) == ""`."""
        fields = self._fields
        fields[ACTIONS][...] = as_array(act.actions)
        fields[LOGPROB][...] = as_array(act.logprob)
        fields[VALUE][...] = as_array(act.value)
        for name, tensor in act.forward_inputs.items():
            fields[FORWARD_INPUTS + name][...] = as_array(tensor)

    def sign(self, version: int) -> None:
        self._fields[VERSION][...] = version


class PackedAnswers:
    """The records of n rows as bytes on any device. memory [n * record size]: copied to the host at once."""

    def __init__(self, layout: BatchLayout, memory: Tensor, rows: int) -> None:
        self.memory = memory[: layout.answer_bytes(rows)]
        table = self.memory.view(rows, layout.answers.itemsize)
        self._fields: dict[str, Tensor] = {}
        for name, (kind, offset, *_) in (layout.answers.fields or {}).items():
            if name not in _OWN:
                dtype, size = torch_dtype(kind.base), kind.base.itemsize
                first = offset // size
                columns = table.view(dtype)[:, first : first + prod(kind.shape)]
                self._fields[name] = columns.unflatten(1, kind.shape) if kind.shape else columns.squeeze(1)

    def write(self, act: Act) -> None:
        """Write the policy's output, cast as `BatchBuffer.answer` does, without the version."""
        given = act_fields(act)
        for name, field in self._fields.items():
            field.copy_(given[name])


def act_fields(act: Act) -> dict[str, Tensor]:
    """The policy's output by field name (`runtime.messages`)."""
    given = {ACTIONS: act.actions, LOGPROB: act.logprob, VALUE: act.value}
    return given | {FORWARD_INPUTS + name: tensor for name, tensor in act.forward_inputs.items()}
