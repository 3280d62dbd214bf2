"""The generator station: holds the policy for inference and serves one batch in one forward pass.

Invariant: weights change only between two passes and all at once; every answer carries the version that computed it;
all answers of a batch are sent before its `BatchDone`; batches are answered in the order of their commands.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.lease.offload import OffloadStore
from polyrhythm.policies.base import Policy
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.tensors import tensors_of
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.runtime.messages import Channels, Order, Reply
from polyrhythm.runtime.spans import APPLY, IN_BATCH, PASS, Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.inference.batching import padded
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, GeneratorJoined, Serve, WeightsApplied
from polyrhythm.stations.batch_buffer import BatchLayout
from polyrhythm.stations.copies import PolicyCopies
from polyrhythm.stations.passes import Graphs, Passes, UnfitAct, passes_on
from polyrhythm.stations.simulator.guard import IDLE


class _Flight(NamedTuple):
    """A pass that was launched and not finished. rows: with padding; begun: when, by `time.monotonic`."""

    command: Serve
    version: int
    rows: int
    begun: float


class Generator:
    """Inference server of one policy copy. version: of its weights, -1 until the first are applied.

    pinned: the policy copy for evaluations during training, if this is the evaluator; equal to `policy` where the
    station does nothing else. buckets: row counts, ascending; a pass is padded with copies of its first row to the next
    bucket, so that shape-compiled inference sees these shapes only, each once before the station joins. graphs: whether
    the passes of buckets are captured as CUDA graphs on a device. passes: how passes run; None: as suits the policy's
    device. label: the policy's name in errors; a caller that knows its setting may replace it. store: where its
    tensors are while it is off the device that it leases; None if it leases none.
    """

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        name: str,
        incarnation: int,
        policy: Policy,
        arena: Arena,
        weights: Weights,
        channels: Channels,
        pinned: Policy | None = None,
        buckets: tuple[int, ...] = (),
        *,
        graphs: Graphs = "auto",
        passes: Passes | None = None,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self._copies = PolicyCopies(name, policy, pinned, weights)
        self._arena, self._channels = arena, channels
        self._todo: deque[Serve | ApplyWeights] = deque()
        self._doing = IDLE
        self._done: Serve | ApplyWeights | None = None  # in the last unit of work
        self._begun = self._computed = 0.0  # of the last pass that has finished
        self._took = dict[int, float]()  # rows → seconds of the last pass of so many
        self._served, self._rows, self._padding = 0, 0, 0
        self._buckets = buckets
        self.label = f"policy {type(policy).__name__}"
        self.store: OffloadStore | None = None
        self._flying: deque[_Flight] = deque()
        self._graphs = graphs
        self._passes = passes or self._make_passes()
        self._warm_up()

    @property
    def version(self) -> int:
        return self._copies.version

    def _make_passes(self) -> Passes:
        device = next(self._copies.module.parameters()).device
        rows = max(sum(self._arena.layout.slots.values()), *self._buckets, 0)
        return passes_on(device, BatchLayout.of(self._arena), rows, self._graphs)

    def _warm_up(self) -> None:
        with torch.inference_mode():
            self._passes.warm_up(self._copies.all, self._buckets)

    def joined(self) -> GeneratorJoined:
        """The event that announces this station."""
        return GeneratorJoined(self.name, self.incarnation, self.version, depth=self._passes.depth)

    def handle(self, command: Order) -> None:
        if not isinstance(command, Serve | ApplyWeights) or command.generator != self.name:
            raise UnfitMessage("misdirected", f"{self.name} received {type(command).__name__}, which is not for it")
        if not (self._can_serve(command.batch) if isinstance(command, Serve) else self._copies.can_apply(command)):
            raise UnfitMessage("impossible", f"{self.name} cannot execute {command}")
        self._todo.append(command)

    def _can_serve(self, batch: Batch) -> bool:
        """Whether its requests come from distinct slots, each with a valid row count."""
        slots, seen = self._arena.layout.slots, set()
        for request in batch.requests:
            if request.slot in seen or not 0 < request.rows <= slots.get(request.slot, 0):
                return False
            seen.add(request.slot)
        return bool(seen) and self._copies.can_serve(pinned=batch.pinned)

    def work(self) -> bool:
        """Launch one forward pass, finish one, or do both where passes run on the host; or change weights once.

        Consumes: batches and weights, in command order. Waits for: the oldest pass, unless a batch can be launched
        behind it. Unblocked by: `handle`, the device. Produces: a reply to each slot of the batch, then `BatchDone`; or
        `WeightsApplied`.
        """
        command = self._todo[0] if self._todo else None
        if isinstance(command, Serve) and len(self._flying) < self._passes.depth:
            self._todo.popleft()
            self._launch(command)
            if self._passes.depth == 1:
                self._finish()
        elif self._flying:
            self._finish()
        elif isinstance(command, ApplyWeights):
            self._todo.popleft()
            self._doing = ("weights", time.monotonic())
            self._apply(command)
            self._done = command
        else:
            return False
        self._doing = ("pass", self._started) if self._flying else IDLE
        self._copies.stage_ahead()
        return True

    @property
    def _started(self) -> float:
        """When the oldest pass had the device to itself."""
        return max(self._flying[0].begun, self._computed)

    def patience(self) -> float:
        """While a batch could be launched behind the pass under way, half of what the last one of as many rows took,
        from its begin: whoever waits for a pass hears nothing until its end."""
        if self._todo or not 0 < len(self._flying) < self._passes.depth:
            return 0.0
        return max(0.0, self._started + 0.5 * self._took.get(self._flying[0].rows, 0.0) - time.monotonic())

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """Spans of the last unit of work. A pass begins when it was launched and the one before it has ended; a
        request's span ends when its actions are computed."""
        match self._done:
            case Serve(batch=batch):
                begin = min(begin, self._begun)
                yield Span(self.name, PASS, begin, end, len(batch.requests))
                for request in batch.requests:
                    yield Span(request.slot, IN_BATCH, begin, self._computed, request.sequence)
            case ApplyWeights(version=version):
                yield Span(self.name, APPLY, begin, end, version)

    def _apply(self, command: ApplyWeights) -> None:
        version = self._copies.apply(command)
        self._channels.emit(WeightsApplied(self.name, self.incarnation, version, command.pinned))

    def _launch(self, command: Serve) -> None:
        """Gather the active rows of all requests, one after another, pad them to the bucket, and begin the pass."""
        begun = time.monotonic()
        self._doing, self._done = self._doing if self._flying else ("pass", begun), None
        batch = command.batch
        rows = padded(sum(request.rows for request in batch.requests), self._buckets)
        buffer, first = self._passes.buffer(rows), 0
        self._arena.fetch_requests((request.slot, request.rows) for request in batch.requests)
        for request in batch.requests:
            buffer.put_request(first, self._arena.view(request.slot, request.rows))
            first += request.rows
        if first < rows:
            buffer.pad(first)
        buffer.gather(self._arena)
        policy, version = self._copies.serving(pinned=batch.pinned)
        try:
            with torch.inference_mode():
                self._passes.launch(policy, rows, version)
        except UnfitAct as wrong:
            raise RunHalted(f"{self.label}: act returned {wrong}; correct act") from wrong
        self._flying.append(_Flight(command, version, rows, begun))

    def _finish(self) -> None:
        """Answer the oldest pass."""
        started, (command, version, rows, _) = self._started, self._flying.popleft()
        answers = self._passes.finish().answers
        self._begun, self._computed = started, time.monotonic()
        self._took[rows] = self._computed - started
        batch, replies, first = command.batch, [], 0
        for request in batch.requests:
            stop = first + request.rows
            replies.append(Reply(request.reply_to, request.slot, request.sequence, answers[first:stop]))
            first = stop
        self._channels.reply(replies)
        self._served += 1
        self._rows += first
        self._padding += len(answers) - first
        self._channels.emit(BatchDone(self.name, self.incarnation, batch.number, version))
        self._done = command

    def suspend(self) -> int:
        """Leave the device: bring both copies of the weights to the store; drop what is made again (staged weights, the
        memory of passes, captured graphs). The bytes freed."""
        assert self.store is not None, f"{self.name} leases no device"
        assert not self._flying, f"{self.name} has a pass under way"
        self._copies.drop_staged()
        del self._passes  # `resume` makes others
        return self.store.suspend(tensor for module in self._copies.modules for tensor in tensors_of(module))

    def resume(self) -> None:
        """Come back; on a CUDA device passes are warmed up and captured anew, as tensors have new addresses."""
        assert self.store is not None, f"{self.name} leases no device"
        self.store.resume()
        self._passes = self._make_passes()
        if not next(self._copies.module.parameters()).is_cpu:
            self._warm_up()

    def current_call(self) -> tuple[str, float]:
        return self._doing

    def pending_work(self) -> list[str]:
        commands = [*(flight.command for flight in list(self._flying)), *list(self._todo)]
        return [f"{self.name} has {type(command).__name__} to do" for command in commands]

    def statistics(self) -> dict[str, float]:
        """passes: forward passes; rows: answered in them; padding: rows computed as padding; weights/...: what was
        taken (`runtime.memory.traffic`), for evaluations too."""
        found = {"passes": float(self._served), "rows": float(self._rows), "padding": float(self._padding)}
        return {**found, **self._copies.statistics()}

    def close(self) -> None:
        self._copies.wait_for_staging()
        self._flying.clear()
        if self.store is not None:
            self.store.close()
