"""A user-defined workflow: groups of workers, channels between them, and the driver's calls."""

from __future__ import annotations

import atexit
import math
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from polyrhythm.plugins.workflow.channel import Channel, PendingPuts
from polyrhythm.plugins.workflow.exchange import Orders, orders_of
from polyrhythm.plugins.workflow.group import WorkerGroup, station_name
from polyrhythm.plugins.workflow.hosting import Launcher, Limits, Opened, open_inline, open_local, open_ray
from polyrhythm.plugins.workflow.protocol import Answer, Denied, Parcel, Request, WorkflowError
from polyrhythm.plugins.workflow.running import (
    Controller,
    ControllerThread,
    DriverTurns,
    Result,
    Running,
    SkippableClock,
)
from polyrhythm.plugins.workflow.station import WorkerFactory
from polyrhythm.plugins.workflow.values import Carrier, pack_whole
from polyrhythm.plugins.workflow.worker import Worker
from polyrhythm.runtime.factories import Resources, StationList
from polyrhythm.runtime.transport.sockets import Transport

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
    ) -> None:
        if launcher not in ("inline", "local", "ray"):
            raise ValueError(f"launcher = {launcher!r}: write inline, local or ray")
        self._launcher, self._transport, self._ray = launcher, transport, dict(ray or {})
        self._limits, self.wait_s = Limits(heartbeat_s, start_s), wait_s
        self._logs = Path(logs) if logs is not None else None
        self._groups: dict[str, tuple[str, Sequence[Resources], Parcel]] = {}
        self._declared: list[tuple[str, int, int, Orders]] = []
        self._undo, self._closed, self._starting = ExitStack(), False, threading.RLock()
        self._controller: Controller | None = None
        self._running: Running | None = None
        self._carrier: Carrier | None = None
        self.puts = PendingPuts()

    # ------------------------------------------------------------ declarations

    def group(
        self, name: str, worker: type[Worker], seats: int | Sequence[Resources] = 1, /, *arguments: Any, **named: Any
    ) -> WorkerGroup:
        """A group of workers of this class, one rank per seat. seats: the number of seats on the CPU, or the seat of
        each rank (`seats`). The other arguments go to the class's constructor, on every rank."""
        places = [Resources()] * seats if isinstance(seats, int) else list(seats)
        if not _NAME.fullmatch(name) or name in self._groups:
            raise ValueError(f"group {name!r}: give it a name of its own, of a-z, 0-9 and _, with a letter first")
        if not places:
            raise ValueError(f"group {name!r}: seats = {seats}; it needs one at least")
        if not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ValueError(f"group {name!r}: {worker} is not a class derived from polyrhythm.plugins.workflow.Worker")
        if self._running is not None:
            raise WorkflowError(f"group {name!r}: the workflow has started; declare all groups before the first call")
        packed = pack_whole((arguments, named), f"group {name!r}: arguments")
        self._groups[name] = (_address(worker), places, packed)
        return WorkerGroup(name, worker, range(len(places)), len(places), self)

    def channel(self, name: str, capacity: int, *, order: Orders = None, producers: int = 1) -> Channel:
        """A channel that holds at most `capacity` items.

        order: sort key of the items, smallest first: a function of `Entry` that runs in this process, or `arrival` (the
        default), `lightest` or `heaviest`, or several functions by name, which consumers choose by `get(order=...)`
        (default: the first). producers: number of `close` calls that close the channel.
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
        return self._channel(name)

    def _channel(self, name: str) -> Channel:
        return Channel(name, self)

    # ------------------------------------------------------------ the start and the end

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
        workers = {
            station_name(group, rank): (group, rank)
            for group, (_, places, _) in self._groups.items()
            for rank in range(len(places))
        }
        opened = self._open([*self._stations()])
        self._undo.push(opened.undo)
        self._undo.callback(opened.hosting.close)
        self._carrier = Carrier(opened.parcels, self._channel)
        controller = Controller(opened.hosting, workers, SkippableClock())
        for declared in self._declared:
            controller.exchange.open(*declared)
        self._running = ControllerThread(controller, opened.waker()) if opened.waker else DriverTurns(controller)
        self._controller = controller
        atexit.register(self.close)

    def _stations(self) -> Iterator[tuple[WorkerFactory, Resources]]:
        sizes = {group: len(places) for group, (_, places, _) in self._groups.items()}
        for group, (address, places, arguments) in self._groups.items():
            for rank, seat in enumerate(places):
                name = station_name(group, rank)
                yield WorkerFactory(name, group, rank, address, arguments, sizes, self.wait_s), seat

    def _open(self, stations: StationList) -> Opened:
        if self._launcher == "inline":
            return open_inline(stations)
        logs = self._logs or Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="workflow-")))
        if self._launcher == "ray":
            return open_ray(stations, self._limits, logs, self._ray)
        return open_local(stations, self._limits, logs, self._transport)

    def close(self) -> None:
        """End all workers; unfinished handles raise `WorkflowOver`. A second call does nothing."""
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

    def begin(self, request: Request) -> DriverReply:
        controller = self._started()
        return DriverReply(self._run(lambda: controller.ask(request)), controller, self)

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Wait until all futures are set, or one has an error. WaitTimeout: not within `timeout_s`."""
        assert self._running is not None, "nobody has been called"
        self._running.wait(futures, timeout_s)

    def _run(self, action: Callable[[], T]) -> T:
        assert self._running is not None
        return self._running.do(action)

    def processes(self) -> dict[str, int]:
        """The process id of each worker that has a process on this machine, by `group-rank`."""
        return self._run(self._started().processes)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Latest counters by worker: calls, parcels received by way, seconds within calls (`busy_s`)."""
        return self._run(self._started().statistics)


@dataclass(frozen=True, slots=True)
class DriverReply:
    """Future answer to a request of the driver. PolyrhythmError: the error that ended the workflow."""

    future: Future[Answer]
    controller: Controller
    workflow: Workflow

    @property
    def done(self) -> bool:
        """Whether it has come. With `inline`, workers run only while the driver waits."""
        return self.future.done()

    def wait(self) -> Answer:
        self.workflow.wait([self.future], math.inf)  # the exchange keeps the deadline
        answer, failure = self.future.result(), self.controller.failure
        if isinstance(answer, Denied) and answer.reason == "over" and failure is not None:
            raise failure
        return answer


def seats(count: int | None = None, *, devices: str = "cpu", threads: int = 1) -> list[Resources]:
    """Seats for a group: `count` of them (default: one for each device). devices: `cpu`, or CUDA ids such as `0-3` or
    `0,2`: rank i has the i-th, counted round. threads: per operation, of each rank's process."""
    from polyrhythm.config.sections.placement import list_device_ids, parse_devices

    named = parse_devices(devices)
    ids = () if named in (None, "cpu") else list_device_ids(str(named))
    places = [f"cuda:{number}" for number in ids] or ["cpu"]
    return [Resources(places[rank % len(places)], threads) for rank in range(count or len(places))]


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
