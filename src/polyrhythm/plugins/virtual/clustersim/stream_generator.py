"""Simulates a generator that serves by streams: all running streams decode together; each ends independently.

A decode step generates one token per running row and costs `decode`, by the rows. Steps are not simulated individually:
between two changes all rows advance evenly. While weights are loaded or a prompt is read, none advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from polyrhythm.plugins.virtual.clustersim.driver import ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.measures import APPLY, NO_REQUESTS, SERVE
from polyrhythm.plugins.virtual.clustersim.settings import GeneratorGroup
from polyrhythm.plugins.virtual.clustersim.station import VirtualStation
from polyrhythm.scheduler.records import (
    AbortStream,
    ApplyWeights,
    Command,
    GeneratorJoined,
    StartStream,
    Stream,
    StreamDone,
    WeightsApplied,
)

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
        self._step_s = self._decoded_to = 0.0

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

    # ------------------------------------------------------------ commands

    def obey(self, command: Command) -> None:
        if isinstance(command, StartStream):
            self._take(command.stream)
        elif isinstance(command, AbortStream):
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
        self.emit(WeightsApplied(self.name, self.incarnation, command.version, command.pinned))
        again = [run for run in self._streams.values() if run.begun and run.stream.pinned == command.pinned]
        if self._resumes and again:
            rows = sum(len(run.running) for run in again)
            self._pause(SERVE, self._group.prefill.draw(self.rng, rows), lambda: None)

    def _abort(self, run: VirtualStream) -> None:
        self.measures.tokens_aborted += run.tokens
        self.emit(StreamDone(self.name, self.incarnation, run.stream.number, run.version, run.tokens, aborted=True))

    # ------------------------------------------------------------ time

    def _pause(self, state: str, seconds: float, done: Callable[[], None]) -> None:
        """Decode nothing for `seconds`, after pauses already queued."""
        self._decode()
        self._pauses.append((state, seconds, done))
        if len(self._pauses) == 1:
            self._go_on()

    def _decode(self) -> None:
        now = self.clock.now
        steps = (now - self._decoded_to) / self._step_s if self._step_s else 0.0
        self._decoded_to = now
        for run in self._streams.values():
            if run.begun:
                run.done += steps

    def _go_on(self) -> None:
        """Schedule the next change: the end of the pause, or of the row that ends first."""
        self._plan += 1
        self._step_s, self._decoded_to = 0.0, self.clock.now
        if self._pauses:
            state, seconds, _ = self._pauses[0]
            self.enter(state)
            self.clock.after(seconds, self._end_pause, self._plan)
            return
        left = [row for run in self._streams.values() if run.begun for row in run.running]
        if not left:
            self.enter(NO_REQUESTS)
            return
        self.enter(SERVE)
        self._step_s = self._group.decode.draw(self.rng, len(left))
        self.clock.after(min(left) * self._step_s, self._end_rows, self._plan)

    def _end_pause(self, plan: int) -> None:
        if not self.alive or plan != self._plan:
            return
        _, _, done = self._pauses.popleft()
        done()
        self._go_on()

    def _end_rows(self, plan: int) -> None:
        if not self.alive or plan != self._plan:
            return
        if self._step_s:
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
                self.emit(StreamDone(self.name, self.incarnation, number, run.version, tokens))
