"""Engine of one forward pass per batch: the batch is gathered, padded and computed, and its answers are sent.

Invariant: every answer carries the version that computed it; all answers of a batch are sent before its `BatchDone`;
batches are answered in the order of their commands.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.messages import Reply
from polyrhythm.runtime.spans import IN_BATCH, PASS, Span
from polyrhythm.scheduler.inference.batching import padded
from polyrhythm.scheduler.records import ApplyWeights, BatchDone, Serve
from polyrhythm.specs.hashing import row_digests
from polyrhythm.stations.batch_buffer import BatchBuffer, BatchLayout
from polyrhythm.stations.generator import EngineCommand, GeneratorContext, Todo
from polyrhythm.stations.passes import Graphs, Lending, Passes, UnfitAct, passes_on
from polyrhythm.stations.simulator.guard import IDLE


class _Flight(NamedTuple):
    """A launched, unfinished pass. rows: including padding; begun: launch time, by `time.monotonic`; digests [n]: of
    the observations of the rows that are lent."""

    command: Serve
    version: int
    rows: int
    begun: float
    lending: Lending | None
    digests: NDArray[np.int64]


class OnePassEngine:
    """Answers batches, each in one forward pass.

    buckets: row counts, ascending; a pass is padded with copies of its first row to the next bucket, so shape-compiled
    inference sees only these shapes, each once before the station joins. graphs: whether the passes of buckets are
    captured as CUDA graphs. passes: how passes run; None: as suits the policy's device.
    """

    commands: ClassVar[tuple[type, ...]] = (Serve,)

    def __init__(
        self,
        context: GeneratorContext,
        buckets: tuple[int, ...] = (),
        *,
        graphs: Graphs = "auto",
        passes: Passes | None = None,
    ) -> None:
        self._context, self._buckets, self._graphs = context, buckets, graphs
        self.doing = IDLE
        self._done: Serve | None = None  # in the last unit of work
        self._begun = self._computed = 0.0  # of the last pass that has finished
        self._took = dict[int, float]()  # rows → seconds of the last pass of that size
        self._served, self._rows, self._padding, self._lent = 0, 0, 0, 0
        self._flying: deque[_Flight] = deque()
        self._passes = passes or self._make_passes()
        self.depth = self._passes.depth
        self._warm_up()

    @property
    def _device(self) -> torch.device:
        return next(self._context.copies.module.parameters()).device

    def _make_passes(self) -> Passes:
        arena = self._context.arena
        rows = max(sum(arena.layout.slots.values()), *self._buckets, 0)
        lender = self._context.copies.policy if self._context.prefixes is not None else None
        return passes_on(self._device, BatchLayout.of(arena), rows, self._graphs, lender)

    def _warm_up(self) -> None:
        with torch.inference_mode():
            self._passes.warm_up(self._context.copies.all, self._buckets)

    def accepts(self, command: EngineCommand, todo: Todo) -> bool:  # noqa: ARG002 - the contract of engines
        """Whether the requests come from distinct slots and have valid row counts."""
        assert isinstance(command, Serve)
        slots, seen, batch = self._context.arena.layout.slots, set(), command.batch
        for request in batch.requests:
            if request.slot in seen or not 0 < request.rows <= slots.get(request.slot, 0):
                return False
            seen.add(request.slot)
        return bool(seen) and self._context.copies.can_serve(pinned=batch.pinned)

    def advance(self, todo: Todo) -> bool:
        """Launch one forward pass, finish one, or do both if passes run on the host. Waits for the oldest pass, unless
        a batch can be launched behind it."""
        self._done = None
        if todo and isinstance(todo[0], Serve) and len(self._flying) < self.depth:
            command = todo.popleft()
            assert isinstance(command, Serve)
            self._launch(command)
            if self.depth == 1:
                self._finish()
        elif self._flying:
            self._finish()
        else:
            return False
        self.doing = ("pass", self._started) if self._flying else IDLE
        return True

    def change_weights(self, command: ApplyWeights) -> int:
        return self._context.copies.apply(command)

    @property
    def _started(self) -> float:
        """Time from which the oldest pass had the device to itself."""
        return max(self._flying[0].begun, self._computed)

    def patience(self, todo: Todo) -> float:
        """Seconds to wait for a batch that could be launched behind the current pass: half the last duration of a pass
        of as many rows, from its start. Waiting for the pass itself blocks messages until its end."""
        if todo or not 0 < len(self._flying) < self.depth:
            return 0.0
        return max(0.0, self._started + 0.5 * self._took.get(self._flying[0].rows, 0.0) - time.monotonic())

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """A pass's span begins when the previous one had ended; a request's ends when its actions are computed."""
        if self._done is None:
            return
        batch, begin = self._done.batch, min(begin, self._begun)
        yield Span(self._context.name, PASS, begin, end, len(batch.requests))
        for request in batch.requests:
            yield Span(request.slot, IN_BATCH, begin, self._computed, request.sequence)

    def _launch(self, command: Serve) -> None:
        """Gather the active rows of all requests, pad them to the bucket, and launch the pass."""
        begun, batch = time.monotonic(), command.batch
        arena, observed = self._context.arena, self._context.observed
        if not self._flying:
            self.doing = ("pass", begun)
        rows = padded(sum(request.rows for request in batch.requests), self._buckets)
        buffer, first = self._passes.buffer(rows), 0
        gathered = np.zeros(rows, np.bool_)  # from this host's arena
        arena.fetch_requests((request.slot, request.rows) for request in batch.requests)
        for request in batch.requests:
            view = arena.view(request.slot, request.rows)
            buffer.put_request(first, view)
            gathered[first : first + request.rows] = view.obs is None
            seen = observed.find(request.slot, request.sequence, request.rows) if observed is not None else None
            if seen is not None:
                buffer.put_on_device(first, seen)
                gathered[first : first + request.rows] = False
            first += request.rows
        if first < rows:
            buffer.pad(first)
        buffer.gather(arena)
        policy, version = self._context.copies.serving(pinned=batch.pinned)
        lending = None if batch.pinned else self._lending(buffer, gathered)
        try:
            with torch.inference_mode():
                self._passes.launch(policy, rows, version, lending)
        except UnfitAct as wrong:
            raise RunHalted(f"{self._context.label}: act returned {wrong}; correct act") from wrong
        digests = np.empty(0, np.int64)
        if lending is not None:
            digests = row_digests({name: array[lending.rows] for name, array in buffer.obs.items()})
        self._flying.append(_Flight(command, version, rows, begun, lending, digests))

    def _lending(self, buffer: BatchBuffer, gathered: NDArray[np.bool_]) -> Lending | None:
        """What is lent of the pass: the rows of which the host has gathered the observations, and the pool a slot."""
        pool = self._context.prefixes.find() if self._context.prefixes is not None else None
        if pool is None:
            return None
        entries = buffer.view.entries
        rows = np.flatnonzero(gathered)
        rows = rows[pool.claim(entries[rows])]
        return Lending(pool, rows, entries[rows]) if len(rows) else None

    def _finish(self) -> None:
        started, (command, version, rows, _, lending, digests) = self._started, self._flying.popleft()
        answers, context = self._passes.finish().answers, self._context
        if lending is not None:
            lending.pool.stamp(lending.entries, digests)
            self._lent += len(digests)
        self._begun, self._computed = started, time.monotonic()
        self._took[rows] = self._computed - started
        batch, replies, first = command.batch, [], 0
        for request in batch.requests:
            stop = first + request.rows
            replies.append(Reply(request.reply_to, request.slot, request.sequence, answers[first:stop]))
            first = stop
        context.channels.reply(replies)
        self._served += 1
        self._rows += first
        self._padding += len(answers) - first
        context.channels.emit(BatchDone(context.name, context.incarnation, batch.number, version))
        self._done = command

    def suspend(self) -> None:
        assert not self._flying, f"{self._context.name} has a pass under way"
        del self._passes  # `resume` makes new ones
        if self._context.observed is not None:
            self._context.observed.drop()

    def resume(self) -> None:
        """Recreate the passes; on CUDA, warm up and capture again, as tensors have new addresses."""
        self._passes = self._make_passes()
        if self._device.type != "cpu":
            self._warm_up()

    def pending_work(self) -> list[str]:
        return [f"{self._context.name} has {type(flight.command).__name__} to do" for flight in list(self._flying)]

    def statistics(self) -> dict[str, float]:
        """passes: forward passes; rows: answered rows; padding: rows computed as padding; rows_on_device: rows whose
        observations were read in the memory of a simulator on the same device; lent: rows whose prefix was lent to the
        trainer."""
        counts = {"passes": self._served, "rows": self._rows, "padding": self._padding}
        if (observed := self._context.observed) is not None:
            counts["rows_on_device"] = observed.rows
        if self._context.prefixes is not None:
            counts["lent"] = self._lent
        return {name: float(count) for name, count in counts.items()}

    def close(self) -> None:
        self._flying.clear()
