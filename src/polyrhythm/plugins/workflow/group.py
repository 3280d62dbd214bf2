"""Groups of workers as the driver sees them, and handles of the calls of their methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from polyrhythm.plugins.workflow.channel import Port
from polyrhythm.plugins.workflow.protocol import Parcel, WorkflowError
from polyrhythm.plugins.workflow.running import Result
from polyrhythm.plugins.workflow.worker import Worker, is_public

Reduce = Literal["mean", "min", "max"]
_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda seconds: sum(seconds) / len(seconds),
    "min": min,
    "max": max,
}


class Driver(Port, Protocol):
    """The driver's connection to the workers."""

    def call(self, station: str, method: str, arguments: Parcel) -> Future[Result]: ...

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None: ...


class Handle:
    """A call of a method on some ranks. It runs whether or not anybody waits for it."""

    def __init__(self, futures: Sequence[Future[Result]], method: str, driver: Driver) -> None:
        self._futures, self._method, self._driver = futures, method, driver
        self._results: list[Any] | None = None

    @property
    def done(self) -> bool:
        """Whether all ranks have returned or failed. With `inline`, workers run only while the driver waits."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """The return value of each rank, in rank order. timeout_s: default is the workflow's `wait_s`.

        WorkerFailed: a worker of the workflow, this one or another, raised or was lost; the workflow has ended.
        WaitTimeout: the call takes longer; it continues, and `wait` can be called again.
        """
        if self._results is None:
            results = self._wait(timeout_s)
            try:
                self._results = [self._driver.carrier.unpack(result.parcel) for result in results]
            except LookupError as error:
                raise WorkflowError(f"what {self._method} returned cannot be had: {error}") from error
        return self._results

    def seconds(self, timer: str | None = None, reduce: Reduce = "mean") -> float:
        """Seconds of the call, or within its `timer` of this name, reduced over the ranks that used the timer. Waits as
        `wait` does. ValueError: no rank used it."""
        name, results = timer or self._method, self._wait(None)
        found = [result.seconds[name] for result in results if name in result.seconds]
        if not found:
            known = sorted({known for result in results for known in result.seconds})
            raise ValueError(f"timer = {name!r}: no rank of {self._method} has it; there are {', '.join(known)}")
        return _REDUCE[reduce](found)

    def _wait(self, timeout_s: float | None) -> list[Result]:
        self._driver.wait(self._futures, self._driver.wait_s if timeout_s is None else timeout_s)
        for future in self._futures:
            if future.done() and (error := future.exception()) is not None:
                raise error
        return [future.result() for future in self._futures]


class WorkerGroup:
    """The workers of one class. `group.method(...)` calls the method on all ranks and returns a `Handle` at once."""

    def __init__(self, name: str, kind: type[Worker], ranks: Sequence[int], size: int, driver: Driver) -> None:
        self.name, self.size = name, size
        self._kind, self._ranks, self._driver = kind, tuple(ranks), driver

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name!r}, {self._kind.__name__}, ranks {self._ranks})"

    def on(self, *ranks: int) -> WorkerGroup:
        """Only these ranks of the group. ValueError: the group has no such rank."""
        odd = [rank for rank in ranks if rank not in range(self.size)]
        if odd or not ranks:
            raise ValueError(f"ranks = {odd or ranks}: group {self.name!r} has ranks 0 to {self.size - 1}")
        return WorkerGroup(self.name, self._kind, ranks, self.size, self._driver)

    def __getattr__(self, method: str) -> Callable[..., Handle]:
        if not is_public(self._kind, method):
            known = ", ".join(name for name in vars(self._kind) if is_public(self._kind, name))
            raise AttributeError(f"{self._kind.__name__} has no public method {method!r}; it has {known or 'none'}")

        def call(*positional: Any, **named: Any) -> Handle:
            arguments = self._driver.carrier.pack((positional, named), f"{method}: arguments", len(self._ranks))
            pairs = zip(self._ranks, arguments, strict=True)
            futures = [self._driver.call(station_name(self.name, rank), method, parcel) for rank, parcel in pairs]
            return Handle(futures, method, self._driver)

        return call


def station_name(group: str, rank: int) -> str:
    return f"{group}-{rank}"
