"""A user-defined workflow: groups of workers, channels between them, and the driver's calls."""

from __future__ import annotations

import atexit
import math
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from polyrhythm.errors import StartError
from polyrhythm.plugins.workflow.channel import Channel, PendingPuts, Reply
from polyrhythm.plugins.workflow.exchange import Orders, orders_of
from polyrhythm.plugins.workflow.hosting import Launcher, Limits, Opened, open_inline, open_local, open_ray
from polyrhythm.plugins.workflow.protocol import Answer, Denied, Parcel, Request, WaitTimeout, WorkflowError
from polyrhythm.plugins.workflow.running import (
    Controller,
    ControllerThread,
    DriverTurns,
    Result,
    Running,
    SkippableClock,
    WorkerSeat,
)
from polyrhythm.plugins.workflow.station import WorkerFactory
from polyrhythm.plugins.workflow.values import Carrier, pack_whole
from polyrhythm.plugins.workflow.watching import TimeOver, WatchedWorkflow, current_watch
from polyrhythm.plugins.workflow.worker import Worker, is_public
from polyrhythm.runtime.devices import CPU, CUDA, SIMULATED, number_of
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.transport.sockets import Transport
from polyrhythm.scheduler.settings import LeaseSettings

Reduce = Literal["mean", "min", "max"]
Sharing = Literal["share", "lease"]
_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda seconds: sum(seconds) / len(seconds),
    "min": min,
    "max": max,
}


class Handle:
    """A call of a method on some ranks. It runs whether or not anybody waits for it."""

    def __init__(self, futures: Sequence[Future[Result]], method: str, driver: Workflow) -> None:
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

    def __init__(self, name: str, kind: type[Worker], ranks: Sequence[int], size: int, driver: Workflow) -> None:
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


@dataclass(frozen=True, slots=True)
class _Group:
    """worker: the class, as module:name; preload: slow modules that its module has imported."""

    worker: str
    seats: Sequence[Resources]
    arguments: Parcel
    preload: tuple[str, ...]


T = TypeVar("T")

_NAME = re.compile(r"[a-z][a-z0-9_]{0,29}")
#: Default limit of a wait, in seconds.
_WAIT_S = 600.0


class Workflow:
    """Declare groups, then call their methods. The first call, channel operation or `start` starts all workers.

    Use it in a `with` statement, or `close` it. launcher: `inline` (this process, taking turns), `local` (one process
    per rank) or `ray`; wait_s: default limit of a wait; heartbeat_s: seconds of silence after which a worker is lost;
    start_s: limit for constructing all workers; logs: folder for their output and logs (default: a temporary one);
    transport: of `local`; ray: settings of the section `ray`.

    sharing: `share` (all workers of a device are on it together) or `lease` (one at a time, the others' tensors in host
    memory). The host counts as a device if no worker has one.
    """

    def __init__(
        self,
        launcher: Launcher = "local",
        *,
        wait_s: float = _WAIT_S,
        heartbeat_s: float = Limits.heartbeat_s,
        start_s: float = Limits.start_s,
        logs: str | Path | None = None,
        transport: Transport = "ipc",
        ray: Mapping[str, Any] | None = None,
        sharing: Sharing = "share",
    ) -> None:
        if launcher not in ("inline", "local", "ray"):
            raise ValueError(f"launcher = {launcher!r}: write inline, local or ray")
        if sharing not in ("share", "lease"):
            raise ValueError(f"sharing = {sharing!r}: write share or lease")
        self._launcher, self._transport, self._ray = launcher, transport, dict(ray or {})
        self._sharing = sharing
        self._limits, self.wait_s = Limits(heartbeat_s, start_s), wait_s
        self._logs = Path(logs) if logs is not None else None
        self._groups: dict[str, _Group] = {}
        self._declared: list[tuple[str, int, int, Orders]] = []
        self._undo, self._closed, self._starting = ExitStack(), False, threading.RLock()
        self._controller: Controller | None = None
        self._running: Running | None = None
        self._carrier: Carrier | None = None
        self.puts = PendingPuts()

    def group(
        self, name: str, worker: type[Worker], seats: int | Sequence[Resources] = 1, /, *arguments: Any, **named: Any
    ) -> WorkerGroup:
        """A group of workers of this class, one rank per seat. seats: the number of seats on the CPU, or the seat of
        each rank (`seats`). The other arguments go to the class's constructor, on every rank."""
        by_rank = [Resources()] * seats if isinstance(seats, int) else list(seats)
        if not _NAME.fullmatch(name) or name in self._groups:
            raise ValueError(f"group {name!r}: give it a name of its own, of a-z, 0-9 and _, with a letter first")
        if not by_rank:
            raise ValueError(f"group {name!r}: seats = {seats}; it needs one at least")
        if not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ValueError(f"group {name!r}: {worker} is not a class derived from polyrhythm.plugins.workflow.Worker")
        if self._running is not None:
            raise WorkflowError(f"group {name!r}: the workflow has started; declare all groups before the first call")
        packed = pack_whole((arguments, named), f"group {name!r}: arguments")
        preload = ("torch",) if hasattr(sys.modules[worker.__module__], "torch") else ()
        self._groups[name] = _Group(_address(worker), by_rank, packed, preload)
        return WorkerGroup(name, worker, range(len(by_rank)), len(by_rank), self)

    def channel(
        self, name: str, capacity: int, *, order: Orders = None, producers: int = 1, on_device: bool = False
    ) -> Channel:
        """A channel that holds at most `capacity` items.

        order: sort key of the items, smallest first: a function of `Entry` that runs in this process, or `arrival` (the
        default), `lightest` or `heaviest`, or several functions by name, which consumers choose by `get(order=...)`
        (default: the first). producers: number of `close` calls that close the channel. on_device: tensors on a device
        stay in its memory, so only workers of the producer's device can have its items.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(f"channel {name!r}: give it a name of a-z, 0-9 and _, with a letter first")
        if capacity < 1 or producers < 1:
            raise ValueError(f"channel {name!r}: capacity = {capacity}, producers = {producers}; each is 1 or more")
        orders_of(order)  # raises if the order is unknown
        if self._running is None:
            if any(name == declared for declared, *_ in self._declared):
                raise ValueError(f"channel {name!r} is there already; give this one another name")
            self._declared.append((name, capacity, producers, order))
        else:
            exchange = self._started().exchange
            self._running.do(lambda: exchange.open(name, capacity, producers, order))
        return Channel(name, self, on_device)

    def start(self) -> None:
        """Start all workers and wait until they are constructed; a second call does nothing. WorkerFailed: a
        constructor failed. StartError: this machine or the cluster lacks something. Nothing is left running."""
        self._started()

    def _started(self) -> Controller:
        with self._starting:
            if self._controller is None:
                if self._closed:
                    raise WorkflowError("the workflow is closed; make another one")
                if not self._groups:
                    raise WorkflowError("the workflow has no workers; declare a group first")
                try:
                    self._start()
                except BaseException:
                    self.close()
                    raise
            assert self._controller is not None
            return self._controller

    def _start(self) -> None:
        sizes = {name: len(group.seats) for name, group in self._groups.items()}
        devices = {seat.device for group in self._groups.values() for seat in group.seats}
        if self._launcher != "ray":
            _check_devices(devices)
        stations: list[tuple[WorkerFactory, Resources]] = []
        workers: dict[str, WorkerSeat] = {}
        for name, group in self._groups.items():
            for rank, seat in enumerate(group.seats):
                station = station_name(name, rank)
                in_turn = self._sharing == "lease" and (seat.device != CPU or devices == {CPU})
                factory = WorkerFactory(
                    station, name, rank, group.worker, group.arguments, sizes, self.wait_s, in_turn, group.preload
                )
                stations.append((factory, seat))
                workers[station] = WorkerSeat(name, rank, seat.device, group.arguments if in_turn else None)
        opened = self._open(stations)
        self._undo.push(opened.undo)
        self._undo.callback(opened.hosting.close)
        self._carrier = Carrier(opened.parcels, lambda name, on_device: Channel(name, self, on_device))
        # Inline they change whenever they can, so that runs are reproducible.
        min_hold_s = 0.0 if self._launcher == "inline" else LeaseSettings({}).min_hold_s
        controller = Controller(opened.hosting, workers, SkippableClock(), self.wait_s, min_hold_s)
        for declared in self._declared:
            controller.exchange.open(*declared)
        self._running = ControllerThread(controller, opened.waker()) if opened.waker else DriverTurns(controller)
        made = self._running.do(controller.make)
        self.wait(made, self._limits.start_s)
        for future in made:
            future.result()
        self._running.do(controller.limit_turns)
        self._controller = controller
        atexit.register(self.close)

    def _open(self, stations: Sequence[tuple[WorkerFactory, Resources]]) -> Opened:
        """Open the workers' hosting; another class may put them elsewhere."""
        if self._launcher == "inline":
            return open_inline(stations)
        logs = self._logs or Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="workflow-")))
        if self._launcher == "ray":
            return open_ray(stations, self._limits, logs, self._ray)
        return open_local(stations, self._limits, logs, self._transport)

    def close(self) -> None:
        """End all workers; unfinished handles raise `WorkflowOver`. A second call does nothing."""
        if not self._closed and self._controller is not None and (watch := current_watch()) is not None:
            with suppress(WorkflowError):  # it has failed
                watch.found.append(self._watched())
        self._closed = True
        atexit.unregister(self.close)
        try:
            if self._running is not None:
                self._running.close()
        finally:
            self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._closed:
                self.puts.finish()
        finally:
            self.close()

    # ------------------------------------------------------------ for handles, groups and channels

    @property
    def carrier(self) -> Carrier:
        self._started()
        assert self._carrier is not None
        return self._carrier

    def call(self, station: str, method: str, arguments: Parcel) -> Future[Result]:
        controller = self._started()
        return self._run(lambda: controller.call(station, method, arguments))

    def begin(self, request: Request) -> Reply:
        controller = self._started()
        future = self._run(lambda: controller.ask(request))

        def wait() -> Answer:
            self.wait([future], math.inf)  # the exchange keeps the deadline
            answer = future.result()
            if isinstance(answer, Denied) and answer.reason == "over" and controller.failure is not None:
                raise controller.failure
            return answer

        return Reply(future.done, wait)

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Wait until all futures are set, or one has an error. WaitTimeout: not within `timeout_s`."""
        assert self._running is not None, "nobody has been called"
        watch = current_watch()
        if watch is None or watch.left_s >= timeout_s:
            self._running.wait(futures, timeout_s)
            return
        try:
            self._running.wait(futures, watch.left_s)
        except WaitTimeout:
            raise TimeOver from None

    def _run(self, action: Callable[[], T]) -> T:
        assert self._running is not None
        return self._running.do(action)

    def processes(self) -> dict[str, int]:
        """The process id of each worker that has a process on this machine, by `group-rank`."""
        hosting = self._started().hosting
        return self._run(lambda: process_ids(hosting))

    def statistics(self) -> dict[str, dict[str, float]]:
        """Latest counters by worker: calls, parcels received by way, seconds within calls without waits (`work_s`)."""
        hosting = self._started().hosting
        return self._run(lambda: hosting.statistics(fresh=True))

    def traffic(self) -> dict[str, tuple[set[str], set[str]]]:
        """The groups that have put into each channel, and those that have asked for its items, by its first thousand of
        each; `driver` is this process (docs/planning.md)."""
        exchange = self._started().exchange
        groups = {
            station_name(name, rank): name for name, group in self._groups.items() for rank in range(len(group.seats))
        }
        seen = self._run(lambda: {name: (set(puts), set(gets)) for name, (puts, gets) in exchange.traffic.items()})
        return {
            name: ({groups.get(one, "driver") for one in puts}, {groups.get(one, "driver") for one in gets})
            for name, (puts, gets) in seen.items()
        }

    def passed(self) -> set[tuple[str, str]]:
        """Pairs of channels: this process has put into the second after it had asked for items of the first."""
        exchange = self._started().exchange
        workers = {station_name(name, rank) for name, group in self._groups.items() for rank in range(len(group.seats))}
        return {(came, went) for who, came, went in self._run(lambda: set(exchange.passed)) if who not in workers}

    def _watched(self) -> WatchedWorkflow:
        devices = {name: tuple(seat.device for seat in group.seats) for name, group in self._groups.items()}
        return WatchedWorkflow(devices, self.traffic(), self.passed(), self.statistics())


def seats(count: int | None = None, *, devices: str = "cpu", threads: int = 1) -> list[Resources]:
    """Seats for a group: `count` of them (default: one for each device). devices: `cpu`, or CUDA ids such as `0-3` or
    `0,2`: rank i has the i-th, counted round; `sim:0-3`: simulated ones, which compute on the CPU. threads: per
    operation, of each rank's process."""
    from polyrhythm.config.sections.placement import list_device_ids, parse_devices

    kind, _, given = devices.partition(":") if devices.startswith(f"{SIMULATED}:") else (CUDA, "", devices)
    try:
        named = parse_devices(given)
    except ValueError:
        named = None
    if named in (None, "all") or (named == CPU and given != devices):
        raise ValueError(f"devices = {devices!r}: write cpu, ids such as 0-3 or 0,2, or sim: and ids, each once")
    known = [CPU] if named == CPU else [f"{kind}:{number}" for number in list_device_ids(str(named))]
    return [Resources(known[rank % len(known)], threads) for rank in range(count or len(known))]


def _check_devices(devices: AbstractSet[str]) -> None:
    """StartError: this machine does not have one of them."""
    numbers = {number_of(device) for device in devices if device.startswith(f"{CUDA}:")}
    if numbers:
        from polyrhythm.runtime.memory.tensors import count_devices

        if (count := count_devices()) <= max(numbers):
            raise StartError(
                f"devices: a seat is on cuda:{max(numbers)}, and this machine has {count} CUDA devices; name others, "
                f"or try it on a simulated one (sim:{max(numbers)})"
            )


def _address(worker: type[Worker]) -> str:
    """module:Class by which a worker's process finds its class. ValueError: it cannot be found by name."""
    module, name = worker.__module__, worker.__qualname__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else ""
    if not module or "<" in name:
        raise ValueError(
            f"{worker.__qualname__}: the processes of a group import its class by name; define it at the top of a "
            'file, and start the workflow below `if __name__ == "__main__":`'
        )
    return f"{module}:{name}"
