"""Live terminal display of a run: an observer that collects a status, and a thread that draws it twice a second.

The thread keeps the elapsed time current in phases without events. It reads only the status, which the run's thread
replaces as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TextIO

from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.hooks import RunPart
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram
from polyrhythm.pipeline.observers.totals import RunTotals, StationActivity, StationHosts, in_order
from polyrhythm.plugins.terminal.block import Status, Terminal, block
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records

#: Seconds between two drawings, and between two collections of the status.
_DRAW_S = 0.5
#: Number of updates from whose pace the remaining time is estimated.
_PACE = 40

#: Display names of phases.
_NAMES = {
    "start": "starting the stations",
    "supervised": "supervised warm start",
    "evaluation_before": "evaluation before training",
    "rl": "reinforcement learning",
    "evaluation_during": "evaluation of training's last stage",
    "evaluation_after": "evaluation after training",
}


@dataclass(slots=True)
class _Training:
    """Display state of training. updates: total of the run; after_s: estimated seconds of the phases after training."""

    updates: int
    episodes: EpisodeTracker
    totals: RunTotals
    lags: LagHistogram
    after_s: float


class LiveDisplay(Observer):
    """Observes a run from its first phase to its last."""

    hears: ClassVar[tuple[type, ...]] = (records.Evaluate, records.StationLost, records.SampleEvaluated)
    tick_s: ClassVar[float] = _DRAW_S

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._clock = terminal, clock
        try:
            "─█░·".encode(terminal.encoding or "ascii")
            self._plain = False
        except (UnicodeEncodeError, LookupError):
            self._plain = True
        self._began = clock()
        self._status = Status("", 0.0)
        self._pipeline: Pipeline | None = None
        self._stations: StationActivity | None = None
        self._training: _Training | None = None
        self._marks: deque[tuple[float, int]] = deque(maxlen=_PACE)
        self._done = self._of = 0
        self._faults: Counter[str] = Counter()  # by host
        self._hosts: StationHosts | None = None
        self._lag = 0.0
        self._parts: Sequence[RunPart] = ()

    # ------------------------------------------------------------ inputs

    def phase(self, name: str, began: float) -> None:
        """A phase begins. began: start time of the whole run."""
        self._began = began
        self._training, self._done, self._of = None, 0, 0
        self._marks.clear()
        words = _NAMES.get(name, name.replace("_", " "))
        self._status = Status(
            words, 0.0, utilisation=self._status.utilisation, faults=self._status.faults, hosts=self._status.hosts
        )
        self.draw()

    def count_episodes(self, done: int, of: int) -> None:
        """Set the progress of a phase without stations, such as the recording of demonstrations."""
        self._done, self._of = done, of
        self._mark(self._clock())
        self._status = replace(
            self._status, done=done, of=of, unit="episode", left_s=self._left(self._clock()), left_of="this phase"
        )

    def watch(self, pipeline: Pipeline, parts: Sequence[RunPart] = ()) -> None:
        self._pipeline, self._stations, self._parts = pipeline, StationActivity(pipeline.launcher), parts
        self._hosts = pipeline.hosts
        pipeline.loop.add_observers(self)

    def train(
        self, updates: int, episodes: EpisodeTracker, totals: RunTotals, lags: LagHistogram, after_s: float
    ) -> None:
        """The current phase is training with `updates` updates in all; the other arguments are read live."""
        assert self._pipeline is not None
        self._training = _Training(updates, episodes, totals, lags, after_s)
        self._done, self._of = self._pipeline.loop.conductor.versions.updates, updates
        self._faults = totals.faults_by_host()

    # ------------------------------------------------------------ as observer

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        assert self._hosts is not None
        match event:
            case records.Evaluate(episodes=episodes) if self._training is None:
                self._done, self._of = 0, len(episodes)
                self._mark(now)
            case records.StationLost(station=station, moves=False):
                self._faults[self._hosts.of(station)] += 1
        ended = sum(isinstance(command, records.SampleEvaluated) for command in commands)
        if ended and self._training is None:
            self._done += ended
            self._mark(now)

    def on_tick(self, now: float) -> None:
        assert self._stations is not None
        self._stations.on_tick(now)
        self._status = self._collect(now)

    def on_report(self, now: float, report: Report) -> None:
        if report.topic == "update" and self._training is not None:
            self._done, self._of = report.step + 1, self._training.updates
            self._lag = report.values["staleness/lag_mean"]
            self._mark(now)

    def _mark(self, now: float) -> None:
        self._marks.append((now, self._done))

    def _collect(self, now: float) -> Status:
        assert self._pipeline is not None
        assert self._stations is not None
        activity, training, utilisation = self._stations.activity, self._training, self._stations.activity.utilisation()
        status = replace(
            self._status,
            done=self._done,
            of=self._of,
            unit="update" if training else "episode",
            left_s=self._left(now),
            left_of="" if training else "this phase",
            transitions_per_s=activity.per_s("env_steps"),
            faults=self._faults.total(),
            utilisation=utilisation,
            hosts=self._of_hosts(utilisation),
            notes=[note for part in self._parts for note in part.status()],
        )
        if training is None:
            return status
        lag = (self._lag, max(training.lags.counts, default=0))
        buffered = self._pipeline.loop.conductor.ledger.buffered
        return replace(status, recent=tuple(training.episodes.recent), lag=lag, buffer=buffered)

    def _of_hosts(self, utilisation: Mapping[str, float]) -> dict[str, tuple[float | None, int]]:
        if self._hosts is None or not self._hosts.several:
            return {}
        shares = self._hosts.mean_of(utilisation)
        return {host: (shares.get(host), self._faults[host]) for host in in_order({*shares, *self._faults})}

    def _left(self, now: float) -> float | None:
        """Estimated seconds to the end of the run (of an evaluation: of the phase), by the pace of the last updates."""
        if len(self._marks) < 3:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        if last == first:
            return None
        pace = (end - begin) / (last - first)
        rest = max(0.0, (self._of - self._done) * pace - (now - end))
        return rest + (self._training.after_s if self._training else 0.0)

    # ------------------------------------------------------------ drawing

    def draw(self) -> None:
        if self._status.phase:
            status = replace(self._status, elapsed_s=self._clock() - self._began)
            self._terminal.show(block(status, self._terminal.width, plain=self._plain))


@contextlib.contextmanager
def live_terminal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> Iterator[LiveDisplay | None]:
    """Show a live block on `stream`, with logs and warnings above it.

    Yields None unless the stream is a terminal that can move its cursor.
    """
    if not stream.isatty() or environment.get("TERM", "dumb") == "dumb":
        yield None
        return
    terminal = Terminal(stream)
    live = LiveDisplay(terminal)
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]
    for handler in handlers:
        handler.setStream(terminal)
    over = threading.Event()

    def draw() -> None:
        """Consumes: the status. Waits for: the next drawing time. Unblocked by: that time, or `over`. Produces: the
        block."""
        while not over.wait(_DRAW_S):
            live.draw()

    drawing = threading.Thread(target=draw, name="live", daemon=True)
    drawing.start()
    try:
        with contextlib.redirect_stderr(terminal):
            yield live
    finally:
        over.set()
        drawing.join()
        for handler in handlers:
            handler.setStream(stream)
        terminal.end()
