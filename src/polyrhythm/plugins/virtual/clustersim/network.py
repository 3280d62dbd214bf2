"""Simulates the network between hosts: one NIC per host, with a queue in each direction.

A transfer leaves the sender's NIC after earlier ones, enters the receiver's after earlier ones there, and arrives one
latency later. Each NIC works without gaps while it has bytes; transfers on different routes do not block each other.

Worked example, 1 GB/s, latency 0: of two transfers of 1 GB from A to B and C that begin together, the first has arrived
after 1 s and the second after 2 s.

Invariant: the bytes that pass a NIC in one direction, over its bandwidth, are at most the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.plugins.virtual.clustersim.clock import VirtualClock


@dataclass(slots=True)
class Nic:
    """A host's network card. until: time at which a direction is free; s, bytes: of all transfers begun,
    queued ones included."""

    out_until: float = 0.0
    in_until: float = 0.0
    out_s: float = 0.0
    in_s: float = 0.0
    out_bytes: int = 0
    in_bytes: int = 0


@dataclass(slots=True)
class Network:
    """The hosts' NICs. latency: seconds one way; bytes_per_s: of a NIC in each direction.

    observation: bytes of one row's request; sample: bytes of a chunk step of one row; weights: bytes of a version, sent
    by `trainer`; main: the conductor's host. waited: seconds that stations waited for transfers: generators for
    observations and weights, the trainer for samples.
    """

    clock: VirtualClock
    latency: float
    bytes_per_s: float
    observation: int = 0
    sample: int = 0
    weights: int = 0
    main: str = ""
    trainer: str = ""
    nics: dict[str, Nic] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=lambda: {"observations": 0.0, "weights": 0.0, "samples": 0.0})
    _mirrors: dict[tuple[str, int], float] = field(default_factory=dict)

    def delay(self, source: str, target: str) -> float:
        """Seconds of a small message."""
        return 0.0 if source == target else self.latency

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        """Begin a transfer now; returns its arrival time."""
        now = self.clock.now
        if source == target:
            return now
        sender, receiver = self._nic(source), self._nic(target)
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
            self._mirrors[key] = self.fetch(host, self.trainer, self.weights)
        return self._mirrors[key]

    def waits(self, what: str, until: float) -> float:
        """Record a station's wait from now until `until`; returns its seconds."""
        seconds = max(0.0, until - self.clock.now)
        self.waited[what] += seconds
        return seconds

    def _nic(self, host: str) -> Nic:
        return self.nics.setdefault(host, Nic())

    def summary(self) -> dict[str, object]:
        """Summary so far. busiest: the host whose NIC had the most work in one direction, with its busy share."""
        now = self.clock.now
        busy = {name: _busy_s(nic, now) / (now or 1.0) for name, nic in self.nics.items()}
        busiest = max(busy, key=lambda name: busy[name], default="")
        return {
            "hosts": len(self.nics),
            "gb": sum(nic.out_bytes for nic in self.nics.values()) * 1e-9,
            "busiest": busiest,
            "busiest_share": busy.get(busiest, 0.0),
            "mean_share": sum(busy.values()) / max(1, len(busy)),
            "waited_s": dict(self.waited),
        }


def _busy_s(nic: Nic, now: float) -> float:
    """Busy seconds of the busier direction so far, without queued transfers."""
    return max(nic.out_s - max(0.0, nic.out_until - now), nic.in_s - max(0.0, nic.in_until - now))
