"""Simulates a generator, which serves one batch after another and changes its weights between batches."""

from __future__ import annotations

import random
from collections import Counter, deque

from polyrhythm.plugins.virtual.clustersim.costs import FREE
from polyrhythm.plugins.virtual.clustersim.driver import ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.measures import APPLY, BATCH_CLOCK, NO_REQUESTS, SERVE
from polyrhythm.plugins.virtual.clustersim.settings import GeneratorGroup
from polyrhythm.plugins.virtual.clustersim.stations.station import VirtualStation
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, Command, GeneratorJoined, Serve, WeightsApplied


class VirtualGenerator(VirtualStation):
    """One incarnation of a generator. It begins without weights.

    A pinned command uses the second copy of the weights; its costs have a separate random stream, so they do not change
    those of training. Executes commands in order; with depth 2 it gathers the batch behind a pass during the pass.
    Slots get their replies before the conductor gets `BatchDone`.
    """

    def __init__(self, name: str, incarnation: int, driver: VirtualDriver, seed: int, group: GeneratorGroup) -> None:
        super().__init__(name, incarnation, driver, seed)
        self._group, self.host = group, group.host
        self._todo: deque[Serve | ApplyWeights] = deque()
        self._batches: dict[int, Batch] = {}
        self._tokens: dict[int, list[int]] = {}
        self._version = -1
        self._pinned = -1
        self._gathered = -1.0  # time at which the queued batch is gathered; below 0: not begun
        self._rng_pinned = random.Random(f"{seed}/{name}/{incarnation}/pinned")
        self._state = NO_REQUESTS
        self._since = 0.0
        self._present = 0.0

    # ------------------------------------------------------------ lifecycle

    def join(self) -> None:
        now = self.clock.now
        self._since = now
        self._present = self.measures.present.integral(now)
        self.measures.generator.join(now, 1)
        self.emit(GeneratorJoined(self.name, self.incarnation, self._version, self.host, self._group.depth))

    def flush(self) -> None:
        self._enter(self._state)

    def close(self) -> None:
        now = self.clock.now
        self._enter(self._state)
        self.measures.generator.leave(now, 1, int(self._state == SERVE))
        self.alive = False
        self.vacate()

    def answer_and_fall_silent(self) -> None:
        """Send the replies of the current batch, for a failure between replies and report."""
        if self._state == SERVE:
            serve = self._todo[0]
            assert isinstance(serve, Serve)
            self._reply(serve.batch)

    def lost(self) -> None:
        """Return unanswered requests to their queues when the conductor learns of the loss."""
        for batch in self._batches.values():
            for request in batch.requests:
                self.driver.simulators[request.simulator].returned(request)

    # ------------------------------------------------------------ work

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
            elif self._group.depth == len(self._todo) == 2 and self._state == SERVE and isinstance(command, Serve):
                self._gathered = self.clock.now + self._gather(command.batch)

    def _begin(self) -> None:
        command, group = self._todo[0], self._group
        self.check_lease()
        if isinstance(command, ApplyWeights):
            held, rng = self._copy(pinned=command.pinned)
            if command.version < held:
                raise ProtocolError(f"{self.name} holds version {held} and shall go back: {command!r}")
            self._enter(APPLY)
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
        self._enter(SERVE)
        measures = self.measures
        measures.batches += 1
        measures.rows_served += rows
        near = (r.rows for r in batch.requests if self.driver.simulators[r.simulator].host == self.host)
        measures.rows_local += sum(near)
        measures.generator.begin(self.clock.now)
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
        network, rows = self.driver.network, Counter[str]()
        assert network is not None
        for request in batch.requests:
            rows[self.driver.simulators[request.simulator].host] += request.rows
        there = [network.fetch(self.host, host, count * network.observation) for host, count in rows.items()]
        return network.waits("observations", max(there))

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
            self.measures.generator.end(self.clock.now)
            self._reply(command.batch)
            held, _ = self._copy(pinned=command.batch.pinned)
            self.emit(BatchDone(self.name, self.incarnation, command.batch.number, held))
        self._todo.popleft()
        if self._todo:
            self._begin()
        else:
            self._enter(NO_REQUESTS)

    def _reply(self, batch: Batch) -> None:
        del self._batches[batch.number]
        self.measures.tokens += sum(self._tokens.pop(batch.number))
        version, _ = self._copy(pinned=batch.pinned)
        for request in batch.requests:
            self.driver.reply_from(self.host, request, version)

    def _copy(self, *, pinned: bool) -> tuple[int, random.Random]:
        """Version and cost random stream of a copy of the weights."""
        return (self._pinned, self._rng_pinned) if pinned else (self._version, self.rng)

    # ------------------------------------------------------------ measures

    def _enter(self, state: str) -> None:
        """Split idle time: with a waiting request it counts as the batch clock's, otherwise as no requests."""
        now, measures = self.clock.now, self.measures
        seconds = now - self._since
        present = measures.present.integral(now)
        if self._state == NO_REQUESTS:
            clock = min(seconds, present - self._present)
            measures.generator_states.add(BATCH_CLOCK, clock)
            measures.generator_states.add(NO_REQUESTS, seconds - clock)
        else:
            measures.generator_states.add(self._state, seconds)
            if measures.span is not None:
                measures.span(self.name, self._state, self._since, now)
        self._state, self._since, self._present = state, now, present
