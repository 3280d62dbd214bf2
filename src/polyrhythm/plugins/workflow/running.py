"""Runs the controller: in its own thread, or, in a single process, in the driver's thread while it waits."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.workflow.controller import Controller
from polyrhythm.plugins.workflow.errors import WaitTimeout, WorkflowError, WorkflowOver

T = TypeVar("T")

#: Longest time that the thread waits at a time; nothing depends on it.
_STEP_S = 60.0
#: Seconds for a round of turns in one process.
_ROUND_S = 1e-3


class Running(Protocol):
    """Runs a controller, from its start to `close`."""

    def do(self, action: Callable[[], T]) -> T:
        """Execute `action` in the controller's thread; returns or raises its outcome."""
        ...

    def wait(self, futures: Collection[Future[Any]], timeout_s: float) -> None:
        """Wait until all futures are set, or one has an error. WaitTimeout: not within `timeout_s`."""
        ...

    def close(self) -> None:
        """End the workers. A second call does nothing."""
        ...


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
            self._start()
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
            self._end()
            try:
                controller.close()
            except PolyrhythmError as error:
                self._error = error

    def _start(self) -> None:
        try:
            self._controller.start()
        except BaseException as error:  # noqa: BLE001 - whoever made this object is told
            self._leaving = True
            self._started.set_exception(error)
        else:
            self._started.set_result(None)

    def _end(self) -> None:
        """Accept no more actions; queued ones get an error."""
        with self._lock:
            self._over = True
            for _, future in self._actions:
                future.set_exception(self._controller.failure or WorkflowOver("the workflow was closed"))


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
        while not all(future.done() for future in futures) and not any(map(_has_failed, futures)):
            if controller.step(_ROUND_S):
                continue
            due = controller.exchange.deadline()
            if due >= until:
                raise WaitTimeout(_late(timeout_s, controller.describe()))
            controller.clock.skip_to(due)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._controller.close()


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _late(timeout_s: float, waits: str) -> str:
    return f"not done within {timeout_s:g} s: {waits}; look at who waits, or allow more time (timeout_s)"
