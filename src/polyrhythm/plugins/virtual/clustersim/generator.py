"""Simulates generators: by passes, one batch after another with changes of weights between them, and by streams."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from polyrhythm.plugins.virtual.clustersim.costs import FREE
from polyrhythm.plugins.virtual.clustersim.driver import ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.measures import APPLY, BATCH_CLOCK, NO_REQUESTS, SERVE
from polyrhythm.plugins.virtual.clustersim.settings import GeneratorGroup
from polyrhythm.plugins.virtual.clustersim.station import VirtualStation
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, Command, GeneratorJoined, Serve, Stream


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
            self.after(wait + group.apply.draw(rng), self._end, command)
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
        most = group.most_rows or max(1, rows)
        seconds = sum(group.serve.draw(rng, min(most, rows - first)) for first in range(0, rows, most))
        seconds += self._generate(self._tokens[batch.number], rng)
        if left:
            self.after(left, self._compute, (command, seconds))
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
        command, seconds = launched
        self.work(seconds, self._end, command)

    def _generate(self, wanted: list[int], rng: random.Random) -> float:
        """Seconds until the longest of these answers has ended; rows that have ended cost nothing more."""
        group, seconds, done = self._group, 0.0, 0
        if group.prefill is not FREE:
            seconds += group.prefill.draw(rng, len(wanted))
        if group.decode is FREE and group.context is FREE:
            return seconds
        for ended, length in enumerate(sorted(wanted)):
            if length > done:
                left, context = len(wanted) - ended, (done + length) / 2
                seconds += (length - done) * (group.decode.draw(rng, left) + left * context * group.context.mean())
                done = length
        return seconds

    def _end(self, command: Serve | ApplyWeights) -> None:
        if isinstance(command, ApplyWeights):
            if command.pinned:
                self._pinned = command.version
            else:
                self._version = command.version
            self.emit(records.WeightsApplied(self.name, self.incarnation, command.version, command.pinned))
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


#: Tokens that count as none: sums of times are not exact.
_ROUNDING = 1e-6


@dataclass(slots=True)
class VirtualStream:
    """A current stream. wanted: tokens of each row's answer; done: decode steps since it began. version: oldest of the
    weights that sampled a token; begun: its prompt is read."""

    stream: Stream
    wanted: list[int]
    done: float = 0.0
    version: int = -1
    begun: bool = False

    @property
    def left(self) -> float:
        return max(self.wanted) - self.done

    @property
    def running(self) -> list[float]:
        """Remaining decode steps of each unfinished row."""
        return [wanted - self.done for wanted in self.wanted if wanted - self.done > _ROUNDING]

    @property
    def tokens(self) -> int:
        """Tokens generated so far, over its rows."""
        return sum(min(wanted, round(self.done)) for wanted in self.wanted)


class VirtualStreamGenerator(VirtualStation):
    """One incarnation of a streaming generator, which begins without weights.

    All running streams decode together; each ends independently. A decode step generates one token per running row and
    costs `decode`, by the rows, and `context` for each token that these rows have so far. Steps are not simulated
    individually: between two changes x steps last x · (step + growth · x / 2), as contexts grow. While weights are
    loaded or a prompt is read, none advances.

    Slots get their replies before the conductor gets `StreamDone`. resumes: new weights interrupt running streams,
    whose prompts and tokens are read again (`abort`).
    """

    states = "generators"
    at_work = frozenset({SERVE})
    bars: ClassVar = {SERVE: SERVE, APPLY: APPLY}

    def __init__(
        self, name: str, incarnation: int, driver: VirtualDriver, group: GeneratorGroup, *, resumes: bool
    ) -> None:
        super().__init__(name, incarnation, driver, group, NO_REQUESTS)
        self._group, self._resumes = group, resumes
        self._streams: dict[int, VirtualStream] = {}
        self._pauses: deque[tuple[str, float, Callable[[], None]]] = deque()
        self._versions = {False: -1, True: -1}
        self._plan = 0
        self._step_s = self._growth_s = self._decoded_to = 0.0

    def joined(self) -> GeneratorJoined:
        return GeneratorJoined(self.name, self.incarnation, self._versions[False], self.host)

    def answer_and_fall_silent(self) -> None:
        for run in self._streams.values():
            if run.version >= 0:
                self.driver.reply(self.host, run.stream.request, run.version)
                return

    def lost(self) -> None:
        for run in self._streams.values():
            self.driver.simulators[run.stream.request.simulator].returned(run.stream.request)

    def obey(self, command: Command) -> None:
        if isinstance(command, records.StartStream):
            self._take(command.stream)
        elif isinstance(command, records.AbortStream):
            if self.alive and command.stream in self._streams:
                self._decode()
                self._abort(self._streams.pop(command.stream))
                if not self._pauses:
                    self._go_on()
        elif not isinstance(command, ApplyWeights):
            raise ProtocolError(f"generator {self.name} cannot obey {command!r}")
        elif self.alive:
            if command.version < self._versions[command.pinned]:
                raise ProtocolError(f"{self.name} holds {self._versions} and shall go back: {command!r}")
            self.check_lease()
            self._pause(APPLY, self._group.apply.draw(self.rng), lambda: self._applied(command))

    def _take(self, stream: Stream) -> None:
        request = stream.request
        simulator = self.driver.simulators[request.simulator]
        simulator.taken(request)
        run = self._streams[stream.number] = VirtualStream(stream, simulator.tokens(request))
        if not self.alive:
            return
        self.check_lease()
        self.measures.batches += 1
        self.measures.rows_served += request.rows
        near = self.driver.simulators[request.simulator].host == self.host
        self.measures.rows_local += near * request.rows
        self._pause(SERVE, self._group.prefill.draw(self.rng, request.rows), lambda: self._begin(run))

    def _begin(self, run: VirtualStream) -> None:
        if run.stream.number not in self._streams:
            return  # aborted before its prompt was read
        held = self._versions[run.stream.pinned]
        if run.stream.request.version > held:
            raise ProtocolError(f"{self.name} at version {held} cannot serve {run.stream!r}")
        run.begun, run.version = True, held

    def _applied(self, command: ApplyWeights) -> None:
        self._versions[command.pinned] = command.version
        self.emit(records.WeightsApplied(self.name, self.incarnation, command.version, command.pinned))
        again = [run for run in self._streams.values() if run.begun and run.stream.pinned == command.pinned]
        if self._resumes and again:
            rows = sum(len(run.running) for run in again)
            self._pause(SERVE, self._group.prefill.draw(self.rng, rows), lambda: None)

    def _abort(self, run: VirtualStream) -> None:
        self.measures.tokens_aborted += run.tokens
        self.emit(
            records.StreamDone(self.name, self.incarnation, run.stream.number, run.version, run.tokens, aborted=True)
        )

    def _pause(self, state: str, seconds: float, done: Callable[[], None]) -> None:
        """Decode nothing for `seconds`, after pauses already queued."""
        self._decode()
        self._pauses.append((state, seconds, done))
        if len(self._pauses) == 1:
            self._go_on()

    def _decode(self) -> None:
        now = self.clock.now
        seconds = now - self._decoded_to
        twice_mean_s = self._step_s + sqrt(self._step_s**2 + 2 * self._growth_s * seconds)
        steps = 2 * seconds / twice_mean_s if twice_mean_s else 0.0
        self._decoded_to = now
        for run in self._streams.values():
            if run.begun:
                run.done += steps

    def _go_on(self) -> None:
        """Schedule the next change: the end of the pause, or of the row that ends first."""
        self._plan += 1
        self._step_s = self._growth_s = 0.0
        self._decoded_to = self.clock.now
        if self._pauses:
            state, seconds, _ = self._pauses[0]
            self.enter(state)
            self.after(seconds, self._end_pause, self._plan)
            return
        left = [row for run in self._streams.values() if run.begun for row in run.running]
        if not left:
            self.enter(NO_REQUESTS)
            return
        self.enter(SERVE)
        a_token_s = self._group.context.mean()
        context = sum(run.done * len(run.running) for run in self._streams.values() if run.begun) if a_token_s else 0.0
        self._step_s = self._group.decode.draw(self.rng, len(left)) + a_token_s * context
        self._growth_s = a_token_s * len(left)
        steps = min(left)
        self.after(steps * (self._step_s + self._growth_s * steps / 2), self._end_rows, self._plan)

    def _end_pause(self, plan: int) -> None:
        if plan != self._plan:
            return
        _, _, done = self._pauses.popleft()
        done()
        self._go_on()

    def _end_rows(self, plan: int) -> None:
        if plan != self._plan:
            return
        if self._step_s or self._growth_s:
            self._decode()
        else:  # free decoding: the rows that end first have ended
            steps = min(row for run in self._streams.values() if run.begun for row in run.running)
            for run in self._streams.values():
                run.done += steps if run.begun else 0.0
        self._finish()
        self._go_on()

    def _finish(self) -> None:
        for number, run in list(self._streams.items()):
            if run.begun and run.left <= _ROUNDING:
                del self._streams[number]
                tokens = sum(run.wanted)
                self.measures.tokens += tokens
                self.driver.reply(self.host, run.stream.request, run.version)
                self.emit(records.StreamDone(self.name, self.incarnation, number, run.version, tokens))
