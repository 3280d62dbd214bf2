"""Base class of user-defined workers: the driver calls their public methods on all ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.plugins.workflow.channel import Pending, Port, begin_get, begin_parcel, or_default
from polyrhythm.plugins.workflow.protocol import Get, Put
from polyrhythm.plugins.workflow.worker_device import WorkerDevice


@dataclass(slots=True)
class WorkerContext:
    """Identity of a worker and its connection to others. sizes: number of ranks by group; seconds: of the
    current call, by timer."""

    group: str
    rank: int
    sizes: Mapping[str, int]
    device: WorkerDevice
    port: Port
    seconds: dict[str, float] = field(default_factory=dict)


class Worker:
    """Base class of workers; give the subclass to `Workflow.group`. Each rank's process makes one object of it.

    Methods are called one at a time, in the order of the calls; their return values are sent to the driver. A
    constructor can use `rank`, `size`, `group` and `device`, but not wait for other workers.
    """

    _context: WorkerContext

    @property
    def rank(self) -> int:
        """Number of this worker in its group, from 0."""
        return self._context.rank

    @property
    def size(self) -> int:
        """Number of workers in the group."""
        return self._context.sizes[self._context.group]

    @property
    def group(self) -> str:
        """Name of the group."""
        return self._context.group

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`, from the rank's seat; `cpu` on a simulated device."""
        return self._context.device.name

    def close(self) -> None:
        """Free resources; called once if the workflow ends without an error."""

    def offload(self) -> int:
        """Free the device's memory; returns the bytes. With `sharing="lease"` it is called before another worker gets
        the device; the driver and the worker itself may call it too.

        The default moves the tensors in this object's attributes to host memory: those of modules, optimizers,
        collections and nested objects, with their gradients. An override may free more, and calls this one.
        """
        return self._context.device.offload(vars(self))

    def onload(self) -> None:
        """Undo `offload`: the same tensors with the same content. Called once this worker has its device again, and
        before another method is called."""
        self._context.device.onload()

    @contextmanager
    def device_lock(self) -> Iterator[None]:
        """Context manager that keeps the device within its body, also while the worker waits for others.

        Without it, a worker may be moved off its device wherever it waits. Do not wait in the body for something that
        only a worker of the same device can give: the wait ends at its deadline.
        """
        device = self._context.device
        device.locks += 1
        try:
            yield
        finally:
            device.locks -= 1

    def send(self, value: Any, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> None:
        """Send a value to a rank, by default of this group; its `recv` gets this worker's values in order. Blocks while
        64 values are under way."""
        self._begin_send(value, rank, group, timeout_s).wait()

    def send_async(self, value: Any, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> Pending:
        """As `send`, without waiting; errors as for `Channel.put_async`."""
        sending = self._begin_send(value, rank, group, timeout_s)
        self._context.port.puts.add(sending)
        return sending

    def _begin_send(self, value: Any, rank: int, group: str | None, timeout_s: float | None) -> Pending:
        port, line = self._context.port, self._line(rank, group, out=True)
        beside = port.carrier.is_beside(line.partition(">")[2])
        (parcel,) = port.carrier.pack(value, "the item", on_device=beside)
        return begin_parcel(port, Put(line, parcel, timeout_s=or_default(port, timeout_s), direct=True))

    def recv(self, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> Any:
        """The next value that the given rank has sent to this worker. WaitTimeout: none came in time."""
        return self.recv_async(rank, group, timeout_s=timeout_s).wait()

    def recv_async(self, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> Pending:
        """As `recv`, without waiting; as `Channel.get_async`. Several calls receive values in their order."""
        port = self._context.port
        wait_s = or_default(port, timeout_s)
        return begin_get(port, Get(self._line(rank, group, out=False), timeout_s=wait_s, direct=True))

    def broadcast(self, value: Any = None, source: int = 0, *, timeout_s: float | None = None) -> Any:
        """The value of rank `source`, on all ranks of this group; every rank must call it. Rank `source` packs the
        value once for all of them, and gets its own object back."""
        port, others = self._context.port, [rank for rank in range(self.size) if rank != self.rank]
        if self.rank != self._known(source, self.group):
            return self.recv(source, timeout_s=timeout_s)
        lines = [self._line(rank, None, out=True) for rank in others]
        beside = all(port.carrier.is_beside(line.partition(">")[2]) for line in lines)
        parcels = port.carrier.pack(value, "the value", len(others), on_device=beside) if others else []
        wait_s = or_default(port, timeout_s)
        for line, parcel in zip(lines, parcels, strict=True):
            begin_parcel(port, Put(line, parcel, timeout_s=wait_s, direct=True)).wait()
        return value

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Context manager that measures its body; `Handle.seconds(name)` has the sum over a call,
        reduced over the ranks."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = self._context.seconds
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    def _line(self, rank: int, group: str | None, *, out: bool) -> str:
        """Name of the channel to that worker (`out`), or from it."""
        group = self.group if group is None else group
        own, other = f"{self.group}-{self.rank}", f"{group}-{self._known(rank, group)}"
        return f"{own}>{other}" if out else f"{other}>{own}"

    def _known(self, rank: int, group: str) -> int:
        sizes = self._context.sizes
        if group not in sizes:
            raise ValueError(f"group = {group!r}: there is none; this workflow has {', '.join(sizes)}")
        if not 0 <= rank < sizes[group]:
            raise ValueError(f"rank = {rank}: group {group!r} has ranks 0 to {sizes[group] - 1}")
        return rank


#: Methods of the base class that the driver may call.
MOVES = ("offload", "onload")


def is_public(kind: type[Worker], method: str) -> bool:
    """Whether the driver may call the method: of `MOVES`, or defined by the subclass without a leading underscore."""
    own = not method.startswith("_") and not hasattr(Worker, method)
    return (own or method in MOVES) and callable(getattr(kind, method, None))
