"""The controller of a workflow sends calls, receives results and owns the exchange. It runs in its own thread or, in a
single process, in the driver's thread while it waits.

Invariants: every call and every request of the driver is a future that is set once. The first failure of a worker or a
method ends the workflow; all waiting parties get an error with the worker, its rank and the cause.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from polyrhythm.errors import PolyrhythmError, RunHalted
from polyrhythm.plugins.workflow import protocol as p
from polyrhythm.plugins.workflow.exchange import Answers, Exchange
from polyrhythm.plugins.workflow.protocol import Parcel, WaitTimeout, WorkerFailed, WorkflowError, WorkflowOver
from polyrhythm.plugins.workflow.turns import DeviceTurns
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.hosting import Hosting
from polyrhythm.runtime.messages import Event, FromWorker, ToWorker
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.scheduler.records import DeviceTaken, DeviceYielded, StationLost

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


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """Where a worker is to be. device: of its host, or `cpu`; make: what constructs it, if it is constructed on the
    device once that is its turn."""

    group: str
    rank: int
    device: str
    make: Parcel | None = None


class Controller:
    """Connects `hosting`, which has the workers, with the exchange, and gives devices in turn. wait_s: limit of a wait
    for a device; min_hold_s: as in `LeaseSettings`. failure: the error that ended the workflow, if any."""

    def __init__(
        self,
        hosting: Hosting,
        workers: Mapping[str, WorkerSeat],
        clock: SkippableClock,
        wait_s: float = math.inf,
        min_hold_s: float = 0.0,
    ) -> None:
        self.exchange, self.clock = Exchange(), clock
        self.failure: PolyrhythmError | None = None
        self.hosting, self._workers = hosting, workers
        self._wait_s, self._min_hold_s = wait_s, min_hold_s
        self._numbers, self._drops = itertools.count(p.NO_CALL + 1), DropCounter("the driver")
        self._turns = DeviceTurns({}, min_hold_s)
        self._calls: dict[tuple[str, int], Future[Result]] = {}
        self._requests: dict[int, Future[p.Answer]] = {}

    def start(self) -> None:
        """Start all workers and wait until they are constructed, except those whose call `make` is still to come.
        WorkerFailed: a constructor failed."""
        try:
            self.hosting.start()
        except RunHalted as halted:
            raise self._as_failed(halted) from halted
        self._place()

    def _place(self) -> None:
        """Tell each worker that may share its device which others are there."""
        found = {
            name: f"{self.hosting.station(name).host}/{seat.device}".lstrip("/") for name, seat in self._workers.items()
        }
        in_turn = {name: found[name] for name, seat in self._workers.items() if seat.make is not None}
        self._turns = DeviceTurns(in_turn, self._min_hold_s)
        for name, seat in self._workers.items():
            beside = tuple(other for other in found if found[other] == found[name] and other != name)
            if seat.make is not None or (beside and seat.device != CPU):
                self._send(name, p.OnDevice(found[name], beside, in_turn=name in self._turns))

    def make(self) -> list[Future[Result]]:
        """Construct the workers that take turns on their device, one after another there; `limit_turns` comes next."""
        return [self.call(name, p.MAKE, seat.make) for name, seat in self._workers.items() if seat.make is not None]

    def limit_turns(self) -> None:
        """From now on a wait for a device has a limit."""
        self._turns.wait_s = self._wait_s

    def _as_failed(self, halted: RunHalted) -> PolyrhythmError:
        if halted.station not in self._workers:
            return halted
        seat = self._workers[halted.station]
        own = halted.reason.removeprefix(f"worker {seat.group} rank {seat.rank}: ")  # the reason repeats the name
        return self._failed(halted.station, own.replace("supervision.", ""))

    def _failed(self, station: str, cause: str, trace: str = "") -> WorkerFailed:
        seat = self._workers[station]
        return WorkerFailed(seat.group, seat.rank, cause, trace)

    def call(self, station: str, method: str, arguments: Parcel) -> Future[Result]:
        number, future = next(self._numbers), Future[Result]()
        if self.failure is not None:
            future.set_exception(self.failure)
            return future
        self._calls[station, number] = future
        self._send(station, p.Call(number, method, arguments))
        self._turns.on_call(station, self.clock())
        self._switch()
        return future

    def ask(self, request: p.Request) -> Future[p.Answer]:
        number, future = next(self._numbers), Future[p.Answer]()
        self._requests[number] = future
        self._answer(self.exchange.ask((DRIVER, number), request, self.clock()))
        self._switch()
        return future

    def describe(self) -> str:
        busy: dict[str, None] = {}
        for station, _ in self._calls:
            call = self.hosting.station(station).current_call()
            busy |= {f"{station} is {call}" if call else f"{station} is at its call": None}
        return "; ".join([*busy, *self.exchange.waits(), *self._turns.waits()]) or "nobody waits"

    def deadline(self) -> float:
        """Time at which `step` has something to do if no event comes before."""
        return min(self.exchange.deadline(), self._turns.deadline())

    def _switch(self) -> None:
        """Have workers leave their devices and come onto them."""
        for command in self._turns.switch(self.clock()):
            self.hosting.send(command.station, command)

    def step(self, timeout: float) -> bool:
        """Handle one event that arrives within `timeout` seconds; whether there was one.

        Consumes: messages of workers, ends of their processes, deadlines. Waits for: one of them. Unblocked by: it, the
        timeout, or the hosting's waker. Produces: answers, results.
        """
        now, worked = self.clock(), self.hosting.work_done
        late = self._expire(now)
        try:
            event = self.hosting.receive(0.0 if late else min(timeout, max(0.0, self.deadline() - now)))
        except RunHalted as halted:
            self._lose(halted)
            return True
        if event is not None:
            self.on_event(event)
            self._switch()
        return late or event is not None or self.hosting.work_done != worked

    def _expire(self, now: float) -> bool:
        """Whether a deadline had passed by now: of a request, or of a worker on its device."""
        late = self.exchange.expire(now, self._turns.waits())
        self._answer(late)
        if overdue := self._turns.overdue(now):
            self.end(self._failed(*overdue))
        self._switch()
        return bool(late) or overdue is not None

    def on_event(self, event: Event) -> None:
        match event:
            case FromWorker(station=station, content=content):
                try:
                    message = p.decode_from(content)
                except (ValueError, RecursionError) as error:
                    self._drops.drop("undecodable", f"a message of {station} cannot be decoded ({error})")
                    return
                self._on_message(station, message)
            case DeviceTaken() | DeviceYielded() if self._turns.is_due(event):
                self._turns.on_switched(event, self.clock())
            case StationLost(station=station, reason=reason):
                self.end(self._failed(station, reason.replace("supervision.", "")))
            case _:
                self._drops.drop("misdirected", f"{type(event).__name__} is not for a workflow")

    def _on_message(self, station: str, message: p.From) -> None:
        if isinstance(message, p.Asked):
            self._turns.on_request(station, message.number, message.request)
            self._answer(self.exchange.ask((station, message.number), message.request, self.clock()))
            return
        if isinstance(message, p.Waits):
            self._turns.on_wait(station, message.number, self.clock())
            return
        future = self._calls.pop((station, message.number), None)
        between_calls = message.number == p.NO_CALL and station in self._turns
        if isinstance(message, p.Raised) and (future is not None or between_calls):
            failed = self._failed(station, message.error, message.trace)
            self.end(failed)
            if future is not None and not future.done():
                future.set_exception(self.failure or failed)
        elif isinstance(message, p.Raised) or future is None:
            self._drops.drop("impossible", f"{station} answers call {message.number}, which nobody has made")
        else:
            self._turns.on_return(station, self.clock())
            future.set_result(Result(message.result, message.seconds))

    def _lose(self, halted: RunHalted) -> None:
        """A worker is lost: handle its earlier messages, then end the workflow."""
        try:
            while self.failure is None and (event := self.hosting.receive(0.0)) is not None:
                self.on_event(event)
        except RunHalted:
            pass
        self.end(self._as_failed(halted))

    def _answer(self, answers: Answers) -> None:
        for (who, number), answer in answers:
            if who != DRIVER:
                for part in p.in_parts(answer):
                    self._send(who, p.Answered(number, part))
                self._turns.on_answer(who, number, self.clock())
            elif future := self._requests.pop(number, None):
                future.set_result(answer)

    def _send(self, station: str, message: p.To) -> None:
        self.hosting.send(station, ToWorker(station, p.encode(message)))

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
        self.end(WorkflowOver("the workflow was closed"))
        self.hosting.close()


T = TypeVar("T")

#: Longest time that the thread waits at a time; nothing depends on it.
_STEP_S = 60.0
#: Seconds for a round of turns in one process.
_ROUND_S = 1e-3


class ControllerThread:
    """Runs the controller in its own thread, so that workers are served whatever the driver does. wake: interrupts the
    hosting's `receive`. `close` raises the error that kept workers from ending."""

    def __init__(self, controller: Controller, wake: Callable[[], None]) -> None:
        self._controller, self._wake = controller, wake
        self._actions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lock, self._over, self._leaving = threading.Lock(), False, False
        self._error: PolyrhythmError | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="workflow", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    def do(self, action: Callable[[], T]) -> T:
        """Execute `action` in the controller's thread; returns or raises its outcome."""
        future: Future[T] = Future()
        if threading.current_thread() is self._thread:
            raise WorkflowError("the order of a channel cannot use the workflow that calls it")
        with self._lock:
            if self._over:
                raise self._controller.failure or WorkflowOver("the workflow was closed")
            self._actions.append((action, future))
            self._wake()
        return future.result()

    def wait(self, futures: Collection[Future[Any]], timeout_s: float) -> None:
        """Wait until all futures are set, or one has an error. WaitTimeout: not within `timeout_s`."""
        done, waiting = wait(futures, None if timeout_s == math.inf else timeout_s, "FIRST_EXCEPTION")
        if waiting and not any(future.exception() for future in done):
            raise WaitTimeout(_late(timeout_s, self.do(self._controller.describe)))

    def close(self) -> None:
        with self._lock:
            self._leaving = True
            if not self._over:
                self._wake()
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        """Consumes: actions of the driver, and events of the controller. Waits for: these. Unblocked by: them.
        Produces: results. Ends with the first failure or with `close`, after the workers have ended."""
        controller = self._controller
        try:
            try:
                controller.start()
                self._started.set_result(None)
            except BaseException as error:  # noqa: BLE001 - whoever made this object is told
                self._leaving = True
                self._started.set_exception(error)
            while not self._leaving and controller.failure is None:
                while self._actions:
                    action, future = self._actions.popleft()
                    try:
                        future.set_result(action())
                    except BaseException as error:  # noqa: BLE001 - whoever asked is told
                        future.set_exception(error)
                if not self._leaving:
                    controller.step(_STEP_S)
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            controller.end(WorkflowError(f"the controller failed: {type(error).__name__}: {error}"))
        finally:
            with self._lock:  # no more actions are accepted; queued ones get an error
                self._over = True
                for _, future in self._actions:
                    future.set_exception(controller.failure or WorkflowOver("the workflow was closed"))
            try:
                controller.close()
            except PolyrhythmError as error:
                self._error = error


class DriverTurns:
    """The driver runs the controller while it waits. When nothing else can happen, the clock skips
    to the next deadline."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self._closed = controller, False
        try:
            controller.start()
        except BaseException:
            self.close()
            raise

    def do(self, action: Callable[[], T]) -> T:
        return action()

    def wait(self, futures: Collection[Future[Any]], timeout_s: float) -> None:
        controller = self._controller
        until = controller.clock() + timeout_s
        while not all(future.done() for future in futures):
            if any(future.done() and future.exception() is not None for future in futures):
                return
            if controller.step(_ROUND_S):
                continue
            due = controller.deadline()
            if due >= until:
                raise WaitTimeout(_late(timeout_s, controller.describe()))
            controller.clock.skip_to(due)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._controller.close()


Running = ControllerThread | DriverTurns


def _late(timeout_s: float, waits: str) -> str:
    return f"not done within {timeout_s:g} s: {waits}; look at who waits, or allow more time (timeout_s)"
