"""Delivers the calls of a run to its sinks. Invariant: no call raises, and none waits for a sink, except `close`, which
waits for a bounded time.

A call that fails is repeated after the seconds of `Patience.retry_s`, then given up; from then on each later call is
tried once, at the longest of these intervals, until one succeeds. Later calls wait in a queue of bounded length.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from polyrhythm.plugins.trackers.process import SinkFailed, SinkProcess, describe
from polyrhythm.plugins.trackers.sink import Sink, TrackedRun, TrackerSettings, perform

log = logging.getLogger(__name__)

#: Called with the id of a sink that was opened.
OnOpened = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """Rule of repetition and deadlines.

    retry_s: waits between tries; start_s, reply_s: maximum duration of an opening, of a call; queue: maximum number of
    waiting calls; close_s: maximum time from `end`, or from the first opening if that takes longer, to the end of
    `close`; failing_close_s: the same for a sink whose last call failed.
    """

    retry_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
    start_s: float = 300.0
    reply_s: float = 300.0
    queue: int = 10_000
    close_s: float = 60.0
    failing_close_s: float = 5.0


class Delivery(Protocol):
    """Delivers calls to one sink."""

    def send(self, call: str, *arguments: Any) -> None:
        """Deliver a call of `sink.perform`, now or later."""

    def end(self, finished: bool) -> None:
        """Let the sink close once all calls are delivered."""

    def close(self) -> None:
        """Wait, within the limits of the rule, until the sink has closed."""


class DirectDelivery:
    """Calls a sink that works in the run's own thread. A call that fails is lost; the next one tries again."""

    def __init__(self, settings: TrackerSettings, run: TrackedRun) -> None:
        self._settings, self._run, self._failures = settings, run, _Failures(settings.type)
        self._sink: Sink | None = None

    def send(self, call: str, *arguments: Any) -> None:
        try:
            if self._sink is None:
                self._sink = self._settings.open(self._run)
            perform(self._sink, call, arguments)
        except Exception as error:  # noqa: BLE001 - a sink never ends the run
            self._failures.add(describe(error))
            self._failures.lose()
        else:
            self._failures.clear()

    def end(self, finished: bool) -> None:
        self.send("close", finished)

    def close(self) -> None:
        self._failures.summarise()


class QueuedDelivery:
    """Calls a sink in a process of its own, from a thread of its own."""

    def __init__(
        self,
        settings: TrackerSettings,
        run: TrackedRun,
        process: SinkProcess,
        on_opened: OnOpened,
        patience: Patience = Patience(),
    ) -> None:
        self._run, self._process, self._on_opened, self._patience = run, process, on_opened, patience
        self._name, self._failures = settings.type, _Failures(settings.type)
        self._changed, self._queue = threading.Condition(), deque[tuple[str, Sequence[Any]]]()
        self._ended = self._abandoned = self._gave_up = False
        self._began, self._until, self._tried = time.monotonic(), 0.0, threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {settings.type}", daemon=True)
        self._thread.start()

    def send(self, call: str, *arguments: Any) -> None:
        with self._changed:
            if self._ended:
                return
            if len(self._queue) >= self._patience.queue and call != "close":
                self._failures.lose()
                return
            self._queue.append((call, arguments))
            self._changed.notify_all()

    def end(self, finished: bool) -> None:
        self.send("close", finished)
        with self._changed:
            self._ended, self._until = True, self._limit()
            self._changed.notify_all()

    def _limit(self, *, opened: bool = True) -> float:
        """Time by which it must have closed if it began to now."""
        works = opened and not self._failures.failing
        return time.monotonic() + (self._patience.close_s if works else self._patience.failing_close_s)

    def close(self) -> None:
        if not self._tried.is_set():  # ended half-way, it may leave a database that nothing opens any more
            log.info("tracking: %s is being opened, and is waited for", self._name)
            left_s = self._began + self._patience.start_s - time.monotonic()
            self._until = self._limit(opened=self._tried.wait(max(0.0, left_s)))
        self._thread.join(max(0.0, self._until - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                self._abandoned = True
                self._changed.notify_all()
            if not self._failures.failing:
                log.warning("tracking: %s did not close within %g s; it is ended", self._name, self._patience.close_s)
            while self._thread.is_alive():
                self._process.kill()
                self._thread.join(0.2)
        self._failures.lose(len(self._queue))
        self._failures.summarise()

    def _work(self) -> None:
        """Deliver the calls in order.

        Consumes the queue; waits for a call, the sink's reply, or the time of the next try; unblocked by `send`, `end`
        and `close`; produces the tracker's records.
        """
        try:
            self._attempt(None)
            self._tried.set()
            while (call := self._next()) is not None:
                self._deliver(call)
        finally:
            self._tried.set()
            self._process.finish(self._patience.failing_close_s)

    def _next(self) -> tuple[str, Sequence[Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended or self._abandoned)
            return self._queue.popleft() if self._queue and not self._abandoned else None

    def _deliver(self, call: tuple[str, Sequence[Any]]) -> None:
        waits = self._patience.retry_s[-1:] if self._gave_up else self._patience.retry_s
        for wait_s in waits:
            if self._attempt(call):
                self._gave_up = False
                return
            with self._changed:
                ended = self._ended
                self._changed.wait_for(partial(self._is_due, ended), wait_s)
                if self._abandoned:
                    break
        self._gave_up = True
        self._failures.lose()

    def _is_due(self, ended: bool) -> bool:
        """Whether the next try begins before its time: the run has ended since. ended: whether it had before."""
        return self._abandoned or self._ended != ended

    def _attempt(self, call: tuple[str, Sequence[Any]] | None) -> bool:
        """Open the sink if it is not open, and make the call; return whether that succeeded."""
        process, patience = self._process, self._patience
        try:
            if not process.open:
                if self._abandoned:
                    return False
                found = process.start(self._run, patience.start_s)
                self._run = replace(self._run, id=found)
                self._on_opened(found)
            if call is not None:
                process.call({"call": call[0], "arguments": call[1]}, patience.reply_s)
        except SinkFailed as failure:
            if not self._abandoned:
                self._failures.add(str(failure))
            return False
        self._failures.clear()
        return True


class _Failures:
    """Failures of one sink, of any thread: the first of a row is logged once. failing: the last call failed."""

    def __init__(self, name: str) -> None:
        self._name, self._logged, self._lock = name, False, threading.Lock()
        self._failing, self._lost = False, 0

    @property
    def failing(self) -> bool:
        with self._lock:
            return self._failing

    def add(self, problem: str) -> None:
        with self._lock:
            self._failing, logged, self._logged = True, self._logged, True
        if not logged:
            log.warning("tracking: %s failed (%s); it is tried again, and the run goes on", self._name, problem)

    def clear(self) -> None:
        with self._lock:
            failing, self._failing = self._failing, False
        if failing:
            log.info("tracking: %s works again", self._name)

    def lose(self, calls: int = 1) -> None:
        """Count calls that were given up."""
        with self._lock:
            self._lost += calls

    def summarise(self) -> None:
        """Log how much is missing at the end, if anything is."""
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            template = "tracking: %s lacks %d records that could not be delivered; the run's folder has all of them"
            log.warning(template, self._name, lost)
