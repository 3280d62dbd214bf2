"""The virtual clock, and simulated hardware that stations contend for: devices and the network between hosts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

#: Remaining seconds of a pass that count as none, because of rounding.
_ROUNDING_S = 1e-12
#: Versions of the weights that hosts may still ask for.
_VERSIONS = 8


class VirtualClock:
    """A clock that jumps from one scheduled call to the next; calls at equal times run in scheduling order."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time: float, call: Callable[[Any], None], argument: object = None) -> None:
        """Schedule `call(argument)` at `time`; a bound method and one argument keep allocation low."""
        self._count += 1
        heappush(self._heap, (time, self._count, call, argument))

    def after(self, delay: float, call: Callable[[Any], None], argument: object = None) -> None:
        self.at(self.now + delay, call, argument)

    @property
    def upcoming(self) -> float:
        """Time of the next scheduled call; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def advance(self) -> None:
        time, _, call, argument = heappop(self._heap)
        self.now = max(self.now, time)
        call(argument)


@dataclass(slots=True, eq=False)
class Job:
    """A pass. number: in the order of arrival. seconds: at full speed; end: the device's work done at which it ends."""

    number: int
    owner: object
    seconds: float
    occupies: float
    done: Callable[[Any], None]
    argument: object
    end: float = inf


class Device:
    """A device on the virtual clock. busy: seconds weighted by the occupied share; ended: number of passes. resident:
    names of the stations that are on it, if stations lease it, and whether others may be.

    By default a pass alone takes a share of the device (`occupies`). While the shares of the running passes sum to at
    most 1, all run at full speed; above 1 each runs at the speed of 1 over the sum (processor sharing). exclusive: one
    pass at a time, whatever it occupies; the others wait in the order of arrival. A lease lets only one station on a
    device at a time (`VirtualStation`) unless they are to be together, so passes of different stations seldom meet.

    switching: what changing between passes costs, if not exclusive: each running pass beyond the first adds this to the
    sum of the shares. With 0.09 two passes that occupy a whole device each run at 1/2.09 of their speed. contention: if
    above 0, the shares do not matter: of k passes at once each takes k**contention times as long. Below 1 they gain
    from running together, at 1 nothing, above 1 they lose.

    Worked example, shared: a pass of 3 s that occupies 0.7 begins at 0 s, one of 1 s that occupies 0.8 at 1 s. Together
    they occupy 1.5, so that the second lasts until 2.5 s; the first has done 2 s by then and ends at 3.5 s.

    Invariant: seconds of work done in any interval, each times what it occupies, are at most the interval's.
    """

    __slots__ = (
        *("_clock", "_contention", "_count", "_done", "_exclusive", "_load", "_running", "_shares", "_since"),
        *("_switching", "_turn", "_waiting", "busy", "ended", "resident"),
    )

    def __init__(
        self, clock: VirtualClock, *, exclusive: bool = False, switching: float = 0.0, contention: float = 0.0
    ) -> None:
        self._clock = clock
        self._exclusive = exclusive
        self._switching = switching
        self._contention = contention
        self._running: list[tuple[float, int, Job]] = []  # a heap by end
        self._waiting: deque[Job] = deque()  # of an exclusive device
        self._shares: Counter[float] = Counter()  # running passes by the share that they occupy
        self._load = self._done = 0.0  # sum of the shares; seconds that a pass since the start would have done
        self._since = 0.0
        self._count = self._turn = self.ended = 0
        self.busy = 0.0
        self.resident: dict[str, bool] = {}

    def begin(
        self, owner: object, seconds: float, occupies: float, done: Callable[[Any], None], argument: object = None
    ) -> None:
        """Start a pass of `seconds` at full speed; `done(argument)` is called at its end."""
        self.flush()
        self._count += 1
        self._waiting.append(Job(self._count, owner, seconds, occupies, done, argument))
        self._plan()

    @property
    def at_work(self) -> bool:
        return bool(self._running)

    def forget(self, owner: object) -> None:
        self.flush()
        self._waiting = deque(job for job in self._waiting if job.owner is not owner)
        for _, _, job in (gone := [one for one in self._running if one[2].owner is owner]):
            self._leave(job)
        if gone:
            self._running = [one for one in self._running if one[2].owner is not owner]
            heapify(self._running)
        self._plan()

    def flush(self) -> None:
        """Account for the work of the running passes since the last change."""
        now = self._clock.now
        seconds, self._since = now - self._since, now
        self.busy += seconds * min(1.0, self._load)
        self._done += seconds / max(1.0, self._load)

    def _leave(self, job: Job) -> None:
        self._shares[job.occupies] -= 1
        if not self._shares[job.occupies]:
            del self._shares[job.occupies]

    def _sum(self) -> float:
        count = len(self._running)
        if self._exclusive and count:
            return 1.0
        if self._contention:
            return float(count**self._contention)
        load = 0.0
        for share, times in self._shares.items():
            load += share * times
        return load + self._switching * (count - 1) if self._switching and count else load

    def _plan(self) -> None:
        self._turn += 1
        if not self._running:
            self._done = 0.0  # small numbers are exact
        while self._waiting and not (self._exclusive and self._running):
            job = self._waiting.popleft()
            job.end = self._done + job.seconds
            heappush(self._running, (job.end, job.number, job))
            self._shares[job.occupies] += 1
        self._load = self._sum()
        if self._running:
            left = max(0.0, self._running[0][0] - self._done)
            self._clock.after(left * max(1.0, self._load), self._ring, self._turn)

    def _ring(self, turn: int) -> None:
        if turn != self._turn:
            return
        self.flush()
        end = max(self._done, self._running[0][0]) + _ROUNDING_S
        ended = list[Job]()
        while self._running and self._running[0][0] <= end:
            ended.append(heappop(self._running)[2])
            self._leave(ended[-1])
        self.ended += len(ended)
        self._plan()
        for job in sorted(ended, key=lambda job: job.number) if len(ended) > 1 else ended:
            job.done(job.argument)


@dataclass(slots=True)
class Nic:
    """A host's network card. until: time at which a direction is free; s, bytes: of transfers, queued ones included."""

    out_until: float = 0.0
    in_until: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    out_bytes: int = 0
    in_bytes: int = 0

    def busy_s(self, now: float) -> float:
        """Busy seconds of the busier direction so far, without queued transfers."""
        return max(self.out_s - max(0.0, self.out_until - now), self.in_s - max(0.0, self.in_until - now))


@dataclass(slots=True)
class Network:
    """The network between hosts: one NIC per host, with a queue in each direction.

    A transfer leaves the sender's NIC after earlier ones, enters the receiver's after earlier ones there, and arrives
    one latency later. Each NIC works without gaps while it has bytes; transfers on different routes do not block each
    other. Worked example, 1 GB/s, latency 0: of two transfers of 1 GB from A to B and C that begin together, the first
    has arrived after 1 s and the second after 2 s.

    Invariant: the bytes that pass a NIC in one direction, over its bandwidth, are at most the time.

    latency: seconds one way; bytes_per_s: of a NIC in each direction.

    observation: bytes of one row's request; sample: bytes of a chunk step of one row; weights: bytes of a version, sent
    by `trainer`; fan_out: hosts to which each host sends it on while it arrives, 0 if all fetch it from `trainer`;
    main: the conductor's host. waited: seconds that stations waited for transfers: generators for observations and
    weights, the trainer for samples.
    """

    clock: VirtualClock
    latency: float
    bytes_per_s: float
    observation: int = 0
    sample: int = 0
    weights: int = 0
    fan_out: int = 0
    main: str = ""
    trainer: str = ""
    nics: dict[str, Nic] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=lambda: {"observations": 0.0, "weights": 0.0, "samples": 0.0})
    _mirrors: dict[tuple[str, int], float] = field(default_factory=dict)
    _readers: dict[int, list[tuple[str, float]]] = field(default_factory=dict)

    def delay(self, source: str, target: str) -> float:
        """Seconds of a small message."""
        return 0.0 if source == target else self.latency

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        """Begin a transfer now; returns its arrival time."""
        now = self.clock.now
        if source == target:
            return now
        sender, receiver = (self.nics.setdefault(host, Nic()) for host in (source, target))
        seconds = nbytes / self.bytes_per_s
        sender.out_until = max(now, sender.out_until) + seconds
        # The first byte is there while the last is still sent: a free receiver ends with the sender.
        receiver.in_until = max(sender.out_until, receiver.in_until + seconds)
        sender.out_s, receiver.in_s = sender.out_s + seconds, receiver.in_s + seconds
        sender.out_bytes, receiver.in_bytes = sender.out_bytes + nbytes, receiver.in_bytes + nbytes
        return receiver.in_until + self.latency

    def fetch(self, reader: str, owner: str, nbytes: int) -> float:
        """Request bytes from a host; returns their arrival time."""
        return self.transfer(owner, reader, nbytes) + self.delay(reader, owner)

    def mirror(self, host: str, version: int) -> float:
        """Arrival time of a version of the weights at a host; the first process there that needs it fetches it."""
        key = (host, version)
        if key not in self._mirrors:
            self._mirrors = {known: at for known, at in self._mirrors.items() if known[0] != host}
            self._mirrors[key] = self._forward(host, version)
        return self._mirrors[key]

    def _forward(self, host: str, version: int) -> float:
        """Arrival time of a version at the next host that asks for it: from the trainer, or from an earlier host that
        has sent it to fewer than `fan_out`, as it arrives there."""
        if not self.fan_out or host == self.trainer:
            return self.fetch(host, self.trainer, self.weights)
        readers = self._readers.setdefault(version, [(self.trainer, self.clock.now)])
        owner, there = readers[(len(readers) - 1) // self.fan_out]
        readers.append((host, max(self.fetch(host, owner, self.weights), there + self.delay(owner, host))))
        self._readers = {known: own for known, own in self._readers.items() if known > version - _VERSIONS}
        return readers[-1][1]

    def waits(self, what: str, until: float) -> float:
        """Record a station's wait from now until `until`; returns its seconds."""
        seconds = max(0.0, until - self.clock.now)
        self.waited[what] += seconds
        return seconds

    def summary(self) -> dict[str, object]:
        """Summary so far. busiest: the host whose NIC had the most work in one direction, with its busy share."""
        now = self.clock.now
        busy = {name: nic.busy_s(now) / (now or 1.0) for name, nic in self.nics.items()}
        busiest = max(busy, key=busy.__getitem__, default="")
        return {
            "hosts": len(self.nics),
            "gb": sum(nic.out_bytes for nic in self.nics.values()) * 1e-9,
            "busiest": busiest,
            "busiest_share": busy.get(busiest, 0.0),
            "mean_share": sum(busy.values()) / max(1, len(busy)),
            "waited_s": dict(self.waited),
        }
