"""The generator station: holds the policy for inference and serves one batch in one forward pass.

Invariant: weights change only between two passes and all at once; every answer carries the version that computed it;
all answers of a batch are sent before its `BatchDone`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import torch

from polyrhythm.errors import RunHalted
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.runtime.messages import Channels, Order, Reply
from polyrhythm.runtime.spans import APPLY, IN_BATCH, PASS, Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.padding import padded
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, GeneratorJoined, Serve, WeightsApplied
from polyrhythm.stations.batch_buffer import BatchBuffer
from polyrhythm.stations.simulator.guard import IDLE


class Generator:
    """Inference server of one policy copy. version: of its weights, -1 until the first are applied.

    pinned: the policy copy for evaluations during training, if this is the evaluator; equal to `policy` where the
    station does nothing else. buckets: row counts, ascending; a pass is padded with copies of its first row to the next
    bucket, so that shape-compiled inference sees these shapes only, each once before the station joins. label: the
    policy's name in errors; a caller that knows its setting may replace it.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        policy: Policy,
        arena: Arena,
        weights: Weights,
        channels: Channels,
        pinned: Policy | None = None,
        buckets: tuple[int, ...] = (),
    ) -> None:
        self.name, self.incarnation, self.version = name, incarnation, -1
        self._policy, self._module = policy, as_module(policy).eval()
        self._receiver = Receiver(weights, self._module)
        self._pinned, self._pinned_version = pinned, -1
        self._pinned_receiver = Receiver(weights, as_module(pinned).eval()) if pinned is not None else None
        self._arena, self._weights, self._channels = arena, weights, channels
        self._todo: deque[Serve | ApplyWeights] = deque()
        # On the CPU a second copy would gain nothing; the evaluator alone takes versions only when it is told.
        self._stages_ahead = pinned is not policy and not next(self._module.parameters()).is_cpu
        self._staging: threading.Thread | None = None
        self._doing = IDLE
        self._done: Serve | ApplyWeights | None = None  # in the last unit of work
        self._computed = 0.0
        self._passes, self._rows, self._padding = 0, 0, 0
        self._buckets = buckets
        self.label = f"policy {type(policy).__name__}"
        self._buffer = BatchBuffer.of(arena, next(self._module.parameters()).device, max(buckets, default=0))
        self._buffers: dict[int, BatchBuffer] = {}  # the same memory, by the rows of a pass
        self._warm_up()

    def _warm_up(self) -> None:
        """Run one pass of every bucket's shape on zeros."""
        copies = [self._policy] if self._pinned in (None, self._policy) else [self._policy, self._evaluated()]
        with torch.inference_mode():
            for rows in self._buckets:
                for policy in copies:
                    policy.act(*self._buffer.first(rows).inputs())

    def joined(self) -> GeneratorJoined:
        """The event that announces this station."""
        return GeneratorJoined(self.name, self.incarnation, self.version)

    def handle(self, command: Order) -> None:
        if not isinstance(command, Serve | ApplyWeights) or command.generator != self.name:
            raise UnfitMessage("misdirected", f"{self.name} received {type(command).__name__}, which is not for it")
        if not (self._can_serve(command.batch) if isinstance(command, Serve) else self._can_apply(command)):
            raise UnfitMessage("impossible", f"{self.name} cannot execute {command}")
        self._todo.append(command)

    def _can_serve(self, batch: Batch) -> bool:
        """Whether its requests come from distinct slots, each with a valid row count."""
        slots, seen = self._arena.layout.slots, set()
        for request in batch.requests:
            if request.slot in seen or not 0 < request.rows <= slots.get(request.slot, 0):
                return False
            seen.add(request.slot)
        return bool(seen) and (self._pinned is not None or not batch.pinned)

    def _can_apply(self, command: ApplyWeights) -> bool:
        """Whether the version is published, and the pinned copy exists if it is for that."""
        return 0 <= command.version <= self._weights.newest and (self._pinned is not None or not command.pinned)

    def work(self) -> bool:
        """Do one forward pass or one weight change.

        Consumes: batches and weights, in command order. Waits for: nothing. Unblocked by: `handle`.
        Produces: a reply to each slot of the batch, then `BatchDone`; or `WeightsApplied`.
        """
        if not self._todo:
            return False
        command = self._todo.popleft()
        self._doing = ("pass" if isinstance(command, Serve) else "weights", time.monotonic())
        if isinstance(command, Serve):
            self._serve(command.batch)
        else:
            self._apply(command)
        self._doing, self._done = IDLE, command
        self._stage_ahead()
        return True

    def _stage_ahead(self) -> None:
        """Copy a version that was published in host memory to this station's device, in a thread, while passes go
        on."""
        newest, receiver = self._weights.newest, self._receiver
        idle = self._staging is None or not self._staging.is_alive()
        if not self._stages_ahead or not idle or newest <= max(receiver.version, receiver.staged):
            return
        self._staging = threading.Thread(target=receiver.stage, args=(newest,), name="staging", daemon=True)
        self._staging.start()

    def _wait_for_staging(self) -> None:
        if self._staging is not None:
            self._staging.join()
            self._staging = None

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """Spans of the last unit of work. A request's span ends when its actions are computed."""
        match self._done:
            case Serve(batch=batch):
                yield Span(self.name, PASS, begin, end, len(batch.requests))
                for request in batch.requests:
                    yield Span(request.slot, IN_BATCH, begin, self._computed, request.sequence)
            case ApplyWeights(version=version):
                yield Span(self.name, APPLY, begin, end, version)

    def _apply(self, command: ApplyWeights) -> None:
        if command.pinned:
            assert self._pinned_receiver is not None, f"{self.name} does not evaluate"
            version = self._pinned_version = self._pinned_receiver.apply(command.version)
        else:
            self._wait_for_staging()
            version = self.version = self._receiver.apply(command.version)
        self._channels.emit(WeightsApplied(self.name, self.incarnation, version, command.pinned))

    def _evaluated(self) -> Policy:
        assert self._pinned is not None, f"{self.name} is not the evaluator"
        return self._pinned

    def _serve(self, batch: Batch) -> None:
        buffer = self._gather(batch)
        policy, version = (self._evaluated(), self._pinned_version) if batch.pinned else (self._policy, self.version)
        with torch.inference_mode():
            act = policy.act(*buffer.inputs())
            if wrong := buffer.form_error(act):
                raise RunHalted(f"{self.label}: act returned {wrong}; correct act")
            buffer.answer(act, version)
        self._computed = time.monotonic()
        replies, first = [], 0
        for request in batch.requests:
            stop = first + request.rows
            replies.append(Reply(request.reply_to, request.slot, request.sequence, buffer.answers[first:stop]))
            first = stop
        self._channels.reply(replies)
        self._passes += 1
        self._rows += first
        self._padding += len(buffer.answers) - first
        self._channels.emit(BatchDone(self.name, self.incarnation, batch.number, version))

    def _gather(self, batch: Batch) -> BatchBuffer:
        """Gather the active rows of all requests, one after another, and pad them to the bucket."""
        rows = padded(sum(request.rows for request in batch.requests), self._buckets)
        buffer = self._buffers.get(rows)
        if buffer is None:
            buffer = self._buffers[rows] = self._buffer.first(rows)
        first = 0
        for request in batch.requests:
            buffer.put_request(first, self._arena.view(request.slot, request.rows))
            first += request.rows
        if first < rows:
            buffer.pad(first)
        buffer.gather(self._arena)
        return buffer

    def current_call(self) -> tuple[str, float]:
        return self._doing

    def pending_work(self) -> list[str]:
        return [f"{self.name} has {type(command).__name__} to do" for command in list(self._todo)]

    def statistics(self) -> dict[str, float]:
        """passes: forward passes; rows: answered in them; padding: rows computed as padding."""
        return {"passes": float(self._passes), "rows": float(self._rows), "padding": float(self._padding)}

    def close(self) -> None:
        self._wait_for_staging()
        self._buffers.clear()
