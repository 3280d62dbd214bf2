"""The controller of a workflow: sends calls, receives results, owns the exchange. It runs in one thread.

Invariants: every call and every request of the driver is a future that is set once. The first failure of a worker or a
method ends the workflow; all waiting parties get an error with the worker, its rank and the cause.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from polyrhythm.errors import PolyrhythmError, RunHalted
from polyrhythm.plugins.workflow import protocol as p
from polyrhythm.plugins.workflow.carrier import Parcel
from polyrhythm.plugins.workflow.errors import WorkerFailed, WorkflowOver
from polyrhythm.plugins.workflow.exchange import Answers, Exchange
from polyrhythm.runtime.hosting import Hosting, process_ids
from polyrhythm.runtime.messages import Event, FromWorker, ToWorker
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.scheduler.records import StationLost

DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Result:
    """Return value of a call. seconds: by timer."""

    parcel: Parcel
    seconds: Mapping[str, float]


class SkippableClock:
    """Clock in seconds. In a single process, where nothing else can happen, it skips to the next deadline."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._skipped

    def skip_to(self, at: float) -> None:
        """Advance the clock to `at`; never moves it back."""
        self._skipped += max(0.0, at - self())


class Controller:
    """Connects `hosting`, which has the workers, with the exchange. workers: group and rank of each station. failure:
    the error that ended the workflow, if any."""

    def __init__(self, hosting: Hosting, workers: Mapping[str, tuple[str, int]], clock: SkippableClock) -> None:
        self.exchange, self.clock = Exchange(), clock
        self.failure: PolyrhythmError | None = None
        self._hosting, self._workers = hosting, workers
        self._numbers, self._drops = itertools.count(), DropCounter("the driver")
        self._calls: dict[tuple[str, int], Future[Result]] = {}
        self._requests: dict[int, Future[p.Answer]] = {}

    def start(self) -> None:
        """Start all workers and wait until they are constructed. WorkerFailed: a constructor failed."""
        try:
            self._hosting.start()
        except RunHalted as halted:
            raise self._as_failed(halted) from halted

    def _as_failed(self, halted: RunHalted) -> PolyrhythmError:
        if halted.station not in self._workers:
            return halted
        group, rank = self._workers[halted.station]
        own = halted.reason.removeprefix(f"worker {group} rank {rank}: ")  # the reason repeats the name
        return WorkerFailed(group, rank, own.replace("supervision.", ""))

    # ------------------------------------------------------------ for the driver

    def call(self, station: str, method: str, arguments: Parcel) -> Future[Result]:
        number, future = next(self._numbers), Future[Result]()
        if self.failure is not None:
            future.set_exception(self.failure)
            return future
        self._calls[station, number] = future
        self._tell(station, p.Call(number, method, arguments))
        return future

    def ask(self, request: p.Request) -> Future[p.Answer]:
        number, future = next(self._numbers), Future[p.Answer]()
        self._requests[number] = future
        self._answer(self.exchange.ask((DRIVER, number), request, self.clock()))
        return future

    def describe(self) -> str:
        """Description of what each worker does and what each waiting party waits for."""
        busy: dict[str, None] = {}
        for station, _ in self._calls:
            call = self._hosting.station(station).current_call()
            busy |= {f"{station} is {call}" if call else f"{station} is at its call": None}
        return "; ".join([*busy, *self.exchange.waits()]) or "nobody waits"

    def processes(self) -> dict[str, int]:
        """Process id by worker, of workers with a process of their own on this machine."""
        return process_ids(self._hosting)

    def statistics(self) -> dict[str, dict[str, float]]:
        return self._hosting.statistics(fresh=True)

    # ------------------------------------------------------------ events

    def step(self, timeout: float) -> bool:
        """Handle one event that arrives within `timeout` seconds; whether there was one.

        Consumes: messages of workers, ends of their processes, deadlines. Waits for: one of them. Unblocked by: it, the
        timeout, or the hosting's waker. Produces: answers, results.
        """
        now, worked = self.clock(), self._hosting.work_done
        late = self.exchange.expire(now)
        self._answer(late)
        try:
            event = self._hosting.receive(0.0 if late else min(timeout, max(0.0, self.exchange.deadline() - now)))
        except RunHalted as halted:
            self._lose(halted)
            return True
        if event is not None:
            self._handle(event)
        return bool(late) or event is not None or self._hosting.work_done != worked

    def _handle(self, event: Event) -> None:
        match event:
            case FromWorker(station=station, content=content):
                try:
                    message = p.decode_from(content)
                except (ValueError, RecursionError) as error:
                    self._drops.drop("undecodable", f"a message of {station} cannot be decoded ({error})")
                    return
                self._hear(station, message)
            case StationLost(station=station, reason=reason):
                self.end(WorkerFailed(*self._workers[station], reason.replace("supervision.", "")))
            case _:
                self._drops.drop("misdirected", f"{type(event).__name__} is not for a workflow")

    def _hear(self, station: str, message: p.From) -> None:
        if isinstance(message, p.Asked):
            self._answer(self.exchange.ask((station, message.number), message.request, self.clock()))
            return
        future = self._calls.pop((station, message.number), None)
        if future is None:
            self._drops.drop("impossible", f"{station} answers call {message.number}, which nobody has made")
        elif isinstance(message, p.Raised):
            failed = WorkerFailed(*self._workers[station], message.error, message.trace)
            self.end(failed)
            if not future.done():
                future.set_exception(self.failure or failed)
        else:
            future.set_result(Result(message.result, message.seconds))

    def _lose(self, halted: RunHalted) -> None:
        """A worker is lost: handle its earlier messages, then end the workflow."""
        try:
            while self.failure is None and (event := self._hosting.receive(0.0)) is not None:
                self._handle(event)
        except RunHalted:
            pass
        self.end(self._as_failed(halted))

    def _answer(self, answers: Answers) -> None:
        for (who, number), answer in answers:
            if who != DRIVER:
                for part in p.in_parts(answer):
                    self._tell(who, p.Answered(number, part))
            elif future := self._requests.pop(number, None):
                future.set_result(answer)

    def _tell(self, station: str, message: p.To) -> None:
        self._hosting.send(station, ToWorker(station, p.encode(message)))

    # ------------------------------------------------------------ the end

    def end(self, error: PolyrhythmError) -> None:
        """End the workflow with this error; later errors are ignored."""
        if self.failure is not None:
            return
        self.failure = error
        self._answer(self.exchange.end(f"the workflow has ended: {str(error).splitlines()[0]}"))
        calls, self._calls = self._calls, {}
        for future in calls.values():
            future.set_exception(error)

    def close(self) -> None:
        """End all workers and free their resources."""
        self.end(WorkflowOver("the workflow was closed"))
        self._hosting.close()
