"""The generator station: holds the policy for inference and serves one batch in one forward pass.

Invariant: weights change only between two passes, whole; every reply carries the version that computed it; a batch is
answered completely before `BatchDone`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.flow.records import (
    ApplyWeights,
    Batch,
    BatchDone,
    Command,
    Event,
    GeneratorJoined,
    Serve,
    WeightsApplied,
)
from polyrhythm.policies.base import Act, Policy, as_module
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE, Reply
from polyrhythm.runtime.payloads import GREEDY, NOISE_KEY, Payloads, RequestView
from polyrhythm.runtime.tensors import apply_state, as_array, as_tensors
from polyrhythm.runtime.weights import Weights


class Generator:
    """Serves `policy`, which is its own copy. version: of the weights in it, -1 until the first are applied."""

    def __init__(
        self,
        name: str,
        epoch: int,
        policy: Policy,
        payloads: Payloads,
        weights: Weights,
        emit: Callable[[Event], None],
        reply: Callable[[Reply], None],
    ) -> None:
        self.name, self.epoch, self.version = name, epoch, -1
        self._policy, self._module = policy, as_module(policy).eval()
        self._device = next(self._module.parameters()).device
        self._payloads, self._weights, self._emit, self._reply = payloads, weights, emit, reply
        self._todo: deque[Serve | ApplyWeights] = deque()
        self._buffers: dict[str, NDArray[Any]] = {}
        self._passes, self._rows = 0, 0

    def joined(self) -> GeneratorJoined:
        """The event that announces it."""
        return GeneratorJoined(self.name, self.epoch, self.version)

    def handle(self, command: Command) -> None:
        if not isinstance(command, Serve | ApplyWeights):
            raise TypeError(f"a generator does not do {type(command).__name__}")
        self._todo.append(command)

    def work(self) -> bool:
        """One forward pass, or one change of weights.

        Consumes: batches and weights, in the order commanded. Waits for: nothing. Unblocked by: `handle`.
        Produces: a reply to each slot of the batch, then `BatchDone`; or `WeightsApplied`.
        """
        if not self._todo:
            return False
        command = self._todo.popleft()
        if isinstance(command, Serve):
            self._serve(command.batch)
        else:
            self._apply(command.version)
        return True

    def _apply(self, version: int) -> None:
        version, state = self._weights.fetch(version)
        if version != self.version:
            apply_state(self._module, state)
            self.version = version
        self._emit(WeightsApplied(self.name, self.epoch, version))

    def _serve(self, batch: Batch) -> None:
        views = [self._payloads.view(request.handle) for request in batch.requests]
        obs = as_tensors(self._gather(views), self._device)
        noise_key, greedy = obs.pop(NOISE_KEY), obs.pop(GREEDY)
        with torch.inference_mode():
            answer = _arrays(self._policy.act(obs, greedy, noise_key))
        first = 0
        for request, view in zip(batch.requests, views, strict=True):
            stop = first + view.count
            part = answer if len(views) == 1 else {name: array[first:stop] for name, array in answer.items()}
            self._reply(Reply(request.slot, request.sequence, self.version, part))
            first = stop
        self._passes += 1
        self._rows += first
        self._emit(BatchDone(self.name, self.epoch, batch.number, self.version))

    def _gather(self, views: Sequence[RequestView]) -> dict[str, NDArray[Any]]:
        """The active rows of all requests, one after another; in place if they are one run, else copied once."""
        first = views[0]
        if len(views) == 1 and isinstance(first.index, slice):
            return {name: array[first.index] for name, array in first.arrays.items()}
        total = sum(view.count for view in views)
        gathered = {}
        for name, array in first.arrays.items():
            buffer = gathered[name] = self._buffer(name, total, array)
            start = 0
            for view in views:
                stop = start + view.count
                if isinstance(view.index, slice):
                    buffer[start:stop] = view.arrays[name][view.index]
                else:
                    np.take(view.arrays[name], view.index, axis=0, out=buffer[start:stop], mode="clip")
                start = stop
        return gathered

    def _buffer(self, name: str, rows: int, like: NDArray[Any]) -> NDArray[Any]:
        """The first `rows` rows of the batch buffer for this array, grown when it is too small."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < rows:
            buffer = self._buffers[name] = np.empty((rows, *like.shape[1:]), like.dtype)
        return buffer[:rows]

    def outstanding(self) -> list[str]:
        return [f"{self.name} has {type(command).__name__} to do" for command in self._todo]

    def statistics(self) -> dict[str, float]:
        """passes: forward passes; rows: answered in them."""
        return {"passes": float(self._passes), "rows": float(self._rows)}

    def close(self) -> None:
        self._buffers.clear()


def _arrays(act: Act) -> dict[str, NDArray[Any]]:
    """The answer by the names of `runtime.messages`."""
    arrays = {ACTIONS: as_array(act.actions), LOGPROB: as_array(act.logprob), VALUE: as_array(act.value)}
    for name, tensor in act.forward_inputs.items():
        arrays[FORWARD_INPUTS + name] = as_array(tensor)
    return arrays
