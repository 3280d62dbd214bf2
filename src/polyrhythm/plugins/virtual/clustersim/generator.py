"""Simulates a generator, which serves one batch after another and changes its weights between batches."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import ClassVar

from polyrhythm.plugins.virtual.clustersim.costs import FREE
from polyrhythm.plugins.virtual.clustersim.driver import ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.measures import APPLY, BATCH_CLOCK, NO_REQUESTS, SERVE
from polyrhythm.plugins.virtual.clustersim.settings import GeneratorGroup
from polyrhythm.plugins.virtual.clustersim.station import VirtualStation
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, Command, GeneratorJoined, Serve, WeightsApplied


class VirtualGenerator(VirtualStation):
    """One incarnation of a generator. It begins without weights.

    A pinned command uses the second copy of the weights; its costs have a separate random stream, so they do not change
    those of training. Executes commands in order; with depth 2 it gathers the batch behind a pass during the pass.
    Slots get their replies before the conductor gets `BatchDone`.
    """

    states = "generators"
    at_work = frozenset({SERVE})
    bars: ClassVar = {SERVE: SERVE, APPLY: APPLY}

    def __init__(self, name: str, incarnation: int, driver: VirtualDriver, group: GeneratorGroup) -> None:
        super().__init__(name, incarnation, driver, group, NO_REQUESTS)
        self._group = group
        self._todo: deque[Serve | ApplyWeights] = deque()
        self._batches: dict[int, Batch] = {}
        self._tokens: dict[int, list[int]] = {}
        self._version = self._pinned = -1
        self._gathered = -1.0  # time at which the queued batch is gathered; below 0: not begun
        self._rng_pinned = random.Random(f"{driver.seed}/{name}/{incarnation}/pinned")
        self._present = self.measures.waiting.present(self.clock.now)

    def joined(self) -> GeneratorJoined:
        return GeneratorJoined(self.name, self.incarnation, self._version, self.host, self._group.depth)

    def answer_and_fall_silent(self) -> None:
        if self.state == SERVE:
            serve = self._todo[0]
            assert isinstance(serve, Serve)
            self._reply(serve.batch)

    def lost(self) -> None:
        for batch in self._batches.values():
            for request in batch.requests:
                self.driver.simulators[request.simulator].returned(request)

    def count(self, seconds: float) -> None:
        """Split idle time: with a waiting request it counts as the batch clock's, otherwise as no requests."""
        states, before = self.measures.states[self.states], self._present
        self._present = self.measures.waiting.present(self.clock.now)
        clock = min(seconds, self._present - before) if self.state == NO_REQUESTS else 0.0
        states[BATCH_CLOCK] += clock
        states[self.state] += seconds - clock

    def obey(self, command: Command) -> None:
        if isinstance(command, Serve):
            simulators = self.driver.simulators
            wanted = self._tokens[command.batch.number] = []
            for request in command.batch.requests:
                simulators[request.simulator].taken(request)
                wanted += simulators[request.simulator].tokens(request)
            self._batches[command.batch.number] = command.batch
        elif not isinstance(command, ApplyWeights):
            raise ProtocolError(f"generator {self.name} cannot obey {command!r}")
        elif self.alive and self.driver.network is not None:
            self.driver.network.mirror(self.host, command.version)  # beside earlier passes
        if self.alive:
            self._todo.append(command)
            if len(self._todo) == 1:
                self._begin()
            elif self._group.depth == len(self._todo) == 2 and self.state == SERVE and isinstance(command, Serve):
                self._gathered = self.clock.now + self._gather(command.batch)

    def _begin(self) -> None:
        command, group = self._todo[0], self._group
        self.check_lease()
        if isinstance(command, ApplyWeights):
            held, rng = self._copy(pinned=command.pinned)
            if command.version < held:
                raise ProtocolError(f"{self.name} holds version {held} and shall go back: {command!r}")
            self.enter(APPLY)
            network = self.driver.network
            wait = network.waits("weights", network.mirror(self.host, command.version)) if network else 0.0
            self.clock.after(wait + group.apply.draw(rng), self._end, command)
            return
        batch, rows = command.batch, 0
        held, rng = self._copy(pinned=batch.pinned)
        for request in batch.requests:
            rows += request.rows
            if request.version > held:
                raise ProtocolError(f"{self.name} at version {held} cannot serve {request!r}")
        self.enter(SERVE)
        measures = self.measures
        measures.batches += 1
        measures.rows_served += rows
        measures.rows_local += self._rows_by_host(batch)[self.host]
        gathered, self._gathered = self._gathered, -1.0
        left = self._gather(batch) if gathered < 0 else max(0.0, gathered - self.clock.now)
        seconds = group.serve.draw(rng, rows) + self._generate(self._tokens[batch.number], rng)
        if left:
            self.clock.after(left, self._compute, (command, seconds))
        else:
            self.work(seconds, self._end, command)

    def _gather(self, batch: Batch) -> float:
        fetched = self._fetch(batch) if self.driver.network is not None else 0.0
        if self._group.gather is FREE:
            return fetched
        _, rng = self._copy(pinned=batch.pinned)
        return fetched + self._group.gather.draw(rng, sum(request.rows for request in batch.requests))

    def _fetch(self, batch: Batch) -> float:
        """Seconds until observations on other hosts have arrived, by one request to each host."""
        network = self.driver.network
        assert network is not None
        there = [
            network.fetch(self.host, host, rows * network.observation)
            for host, rows in self._rows_by_host(batch).items()
        ]
        return network.waits("observations", max(there))

    def _rows_by_host(self, batch: Batch) -> Counter[str]:
        rows = Counter[str]()
        for request in batch.requests:
            rows[self.driver.simulators[request.simulator].host] += request.rows
        return rows

    def _compute(self, launched: tuple[Serve, float]) -> None:
        """The inputs are gathered: begin the pass."""
        if self.alive:
            command, seconds = launched
            self.work(seconds, self._end, command)

    def _generate(self, wanted: list[int], rng: random.Random) -> float:
        """Seconds until the longest of these answers has ended; rows that have ended cost nothing more."""
        group, seconds, done = self._group, 0.0, 0
        if group.prefill is not FREE:
            seconds += group.prefill.draw(rng, len(wanted))
        if group.decode is FREE:
            return seconds
        for ended, length in enumerate(sorted(wanted)):
            if length > done:
                seconds += (length - done) * group.decode.draw(rng, len(wanted) - ended)
                done = length
        return seconds

    def _end(self, command: Serve | ApplyWeights) -> None:
        if not self.alive:
            return
        if isinstance(command, ApplyWeights):
            if command.pinned:
                self._pinned = command.version
            else:
                self._version = command.version
            self.emit(WeightsApplied(self.name, self.incarnation, command.version, command.pinned))
        else:
            self._reply(command.batch)
            held, _ = self._copy(pinned=command.batch.pinned)
            self.emit(BatchDone(self.name, self.incarnation, command.batch.number, held))
        self._todo.popleft()
        if self._todo:
            self._begin()
        else:
            self.enter(NO_REQUESTS)

    def _reply(self, batch: Batch) -> None:
        del self._batches[batch.number]
        self.measures.tokens += sum(self._tokens.pop(batch.number))
        version, _ = self._copy(pinned=batch.pinned)
        for request in batch.requests:
            self.driver.reply(self.host, request, version)

    def _copy(self, *, pinned: bool) -> tuple[int, random.Random]:
        """Version and cost random stream of a copy of the weights."""
        return (self._pinned, self._rng_pinned) if pinned else (self._version, self.rng)
