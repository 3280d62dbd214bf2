"""What a worker of one's own is: a class whose public methods the driver calls on all ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.plugins.workflow.carrier import Carrier
from polyrhythm.plugins.workflow.channel import Pending, PendingPuts, Port, Reply, begin_get, begin_parcel, begin_put
from polyrhythm.plugins.workflow.protocol import Get, Put, Request


@dataclass(slots=True)
class Place:
    """Where a worker is, and how it reaches others. sizes: ranks of each group of the workflow; seconds: by timer, of
    the call under way."""

    group: str
    rank: int
    sizes: Mapping[str, int]
    device: str
    port: Port
    seconds: dict[str, float] = field(default_factory=dict)


class Worker:
    """Subclass it and give the class to `Workflow.group`: one object is made in each rank's process, with the arguments
    given there. Methods are called one at a time, in the order of the calls; what they return is sent back.

    A constructor can use `rank`, `size`, `group` and `device`; it cannot wait for others yet.
    """

    _place: Place

    @property
    def rank(self) -> int:
        """Which of the group's workers this is, from 0."""
        return self._place.rank

    @property
    def size(self) -> int:
        """How many workers the group has."""
        return self._place.sizes[self._place.group]

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._place.group

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`, by the seat of this rank."""
        return self._place.device

    def close(self) -> None:
        """Called once when the workflow ends in good order, for what this worker has to free."""

    def send(self, value: Any, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> None:
        """Send a value to a worker, of this group if none is named. Its `recv` gets what this worker sends in order; up
        to 64 values may be under way, then sending waits."""
        line = self._line(rank, group, out=True)
        begin_put(self._place.port, line, value, timeout_s=timeout_s, direct=True).wait()

    def send_async(self, value: Any, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> Pending:
        """As `send`, without waiting; as `Channel.put_async`."""
        port, line = self._place.port, self._line(rank, group, out=True)
        sending = begin_put(port, line, value, timeout_s=timeout_s, direct=True)
        port.puts.add(sending)
        return sending

    def recv(self, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> Any:
        """The next value that this worker is sent by that one. WaitTimeout: none came in time."""
        return self.recv_async(rank, group, timeout_s=timeout_s).wait()

    def recv_async(self, rank: int, group: str | None = None, *, timeout_s: float | None = None) -> Pending:
        """As `recv`, without waiting; as `Channel.get_async`. Several are given values in the order of the calls."""
        port = self._place.port
        patience = port.wait_s if timeout_s is None else float(timeout_s)
        return begin_get(port, Get(self._line(rank, group, out=False), timeout_s=patience, direct=True))

    def broadcast(self, value: Any = None, source: int = 0, *, timeout_s: float | None = None) -> Any:
        """The value that rank `source` gives, in all ranks of this group; every rank calls it. Rank `source` keeps it
        once for all of them, and gets its own object back."""
        port, others = self._place.port, [rank for rank in range(self.size) if rank != self.rank]
        if self.rank != self._known(source, self.group):
            return self.recv(source, timeout_s=timeout_s)
        parcels = port.carrier.pack(value, "the value", len(others)) if others else []
        patience = port.wait_s if timeout_s is None else timeout_s
        for rank, parcel in zip(others, parcels, strict=True):
            begin_parcel(port, Put(self._line(rank, None, out=True), parcel, timeout_s=patience, direct=True)).wait()
        return value

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measures what is done within it; `Handle.seconds(name)` has the sum over a call, reduced over the ranks."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = self._place.seconds
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begin

    def _line(self, rank: int, group: str | None, *, out: bool) -> str:
        """The name of the channel to that worker, or from it."""
        group = self.group if group is None else group
        own, other = f"{self.group}-{self.rank}", f"{group}-{self._known(rank, group)}"
        return f"{own}>{other}" if out else f"{other}>{own}"

    def _known(self, rank: int, group: str) -> int:
        sizes = self._place.sizes
        if group not in sizes:
            raise ValueError(f"group = {group!r}: there is none; this workflow has {', '.join(sizes)}")
        if not 0 <= rank < sizes[group]:
            raise ValueError(f"rank = {rank}: group {group!r} has ranks 0 to {sizes[group] - 1}")
        return rank


def is_public(kind: type[Worker], method: str) -> bool:
    """Whether the driver may call this method: one of the subclass's own, without a leading underscore."""
    return not method.startswith("_") and not hasattr(Worker, method) and callable(getattr(kind, method, None))


@dataclass(slots=True)
class WorkerPort:
    """A worker's port. reach: sends a request to the exchange."""

    carrier: Carrier
    wait_s: float
    reach: Callable[[Request], Reply]
    puts: PendingPuts = field(default_factory=PendingPuts)

    def begin(self, request: Request) -> Reply:
        return self.reach(request)
