"""The generator station: holds the policy for inference and serves one batch in one forward pass.

Invariant: weights change only between two passes, whole; every answer carries the version that computed it; a batch is
answered completely before `BatchDone`.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch
from torch import Tensor

from polyrhythm.flow.records import ApplyWeights, Batch, BatchDone, GeneratorJoined, Serve, WeightsApplied
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.runtime.arena import Arena
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE, VERSION, Links, Order, Reply
from polyrhythm.runtime.tensors import as_array, as_tensors
from polyrhythm.runtime.weights import WeightsBus
from polyrhythm.stations.guard import IDLE


class Generator:
    """Serves `policy`, which is its own copy. version: of the weights in it, -1 until the first are applied."""

    def __init__(self, name: str, epoch: int, policy: Policy, arena: Arena, weights: WeightsBus, links: Links) -> None:
        self.name, self.epoch, self.version = name, epoch, -1
        self._policy, self._module = policy, as_module(policy).eval()
        self._device = next(self._module.parameters()).device
        self._arena, self._weights, self._links = arena, weights, links
        self._todo: deque[Serve | ApplyWeights] = deque()
        self._doing = IDLE
        self._passes, self._rows = 0, 0
        # One buffer for the largest batch there can be; memory that no batch has touched costs nothing.
        most = sum(arena.layout.slots.values())
        self._obs = {name: np.empty((most, *array.shape[1:]), array.dtype) for name, array in arena.obs.items()}
        self._index, self._noise_key = np.empty(most, np.int64), np.empty(most, np.int64)
        self._greedy = np.empty(most, bool)
        self._answers = np.zeros(most, arena.layout.answer_dtype)

    def joined(self) -> GeneratorJoined:
        """The event that announces it."""
        return GeneratorJoined(self.name, self.epoch, self.version)

    def handle(self, command: Order) -> None:
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
        self._doing = ("pass" if isinstance(command, Serve) else "weights", time.monotonic())
        if isinstance(command, Serve):
            self._serve(command.batch)
        else:
            self._apply(command.version)
        self._doing = IDLE
        return True

    def _apply(self, version: int) -> None:
        self.version = self._weights.apply(version, self._module, self.version)
        self._links.emit(WeightsApplied(self.name, self.epoch, self.version))

    def _serve(self, batch: Batch) -> None:
        rows = self._gather(batch)
        obs = as_tensors({name: buffer[:rows] for name, buffer in self._obs.items()}, self._device)
        keys = as_tensors({"noise_key": self._noise_key[:rows], "greedy": self._greedy[:rows]}, self._device)
        with torch.inference_mode():
            act = self._policy.act(obs, keys["greedy"], keys["noise_key"])
            self._pack(rows, {ACTIONS: act.actions, LOGPROB: act.logprob, VALUE: act.value}, act.forward_inputs)
        first = 0
        for request in batch.requests:
            stop = first + request.rows
            self._links.reply(Reply(request.handle, request.slot, request.sequence, self._answers[first:stop]))
            first = stop
        self._passes += 1
        self._rows += rows
        self._links.emit(BatchDone(self.name, self.epoch, batch.number, self.version))

    def _gather(self, batch: Batch) -> int:
        """The active rows of all requests, one after another, copied once into the batch buffer; how many."""
        rows = 0
        for request in batch.requests:
            view = self._arena.view(request.slot, request.rows)
            part = slice(rows, rows + request.rows)
            self._index[part], self._noise_key[part], self._greedy[part] = view.index, view.noise_key, view.greedy
            rows += request.rows
        for name, array in self._arena.obs.items():
            # A request that its slot has given up meanwhile may show any entry: clipped, it does no harm.
            np.take(array, self._index[:rows], axis=0, out=self._obs[name][:rows], mode="clip")
        return rows

    def _pack(self, rows: int, answer: dict[str, Tensor], forward_inputs: dict[str, Tensor]) -> None:
        """Write the answer as records."""
        answers = self._answers[:rows]
        for name, tensor in answer.items():
            answers[name] = as_array(tensor)
        for name, tensor in forward_inputs.items():
            answers[FORWARD_INPUTS + name] = as_array(tensor)
        answers[VERSION] = self.version

    def doing(self) -> tuple[str, float]:
        return self._doing

    def outstanding(self) -> list[str]:
        return [f"{self.name} has {type(command).__name__} to do" for command in list(self._todo)]

    def statistics(self) -> dict[str, float]:
        """passes: forward passes; rows: answered in them."""
        return {"passes": float(self._passes), "rows": float(self._rows)}

    def close(self) -> None:
        self._obs.clear()
