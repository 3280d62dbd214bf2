"""The plan of faults, a function of the seed, and the record of each applied fault.

Of three consecutive faults of processes each kind and each role has one; of nine, each pair of kind and role. With
nodes, of five consecutive faults three are of processes, one cuts a node off, and one loses it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from polyrhythm.runtime.messages import station_of

#: Seconds within which throughput must be back: after a fault of a process, and of a node or of one of several ranks,
#: which all start again.
RECOVERY_S, NODE_RECOVERY_S = 15.0, 30.0
#: Seconds that a node is cut off.
_PARTITION_S = (2.0, 20.0)

#: Seconds of undisturbed running before a fault; how long a station is slowed, as a share of the heartbeat's deadline.
_PAUSE_S, _SLOW_SHARE = (1.0, 5.0), (0.2, 0.6)


class Kind(StrEnum):
    """kill: SIGKILL; stop: SIGSTOP, for ever; slow: SIGSTOP, then SIGCONT before the station is given up. Of a node:
    partition: its link is down for a while; loss: all its processes and its memory are gone, and a new one comes."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"
    PARTITION = "partition"
    LOSS = "loss"


_OF_PROCESSES = (Kind.KILL, Kind.STOP, Kind.SLOW)
#: The `process` of a fault of a node, which is chosen when it is applied.
NODE = "node"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault to come. process: that it hits, of a station or of a rank of it, or `NODE`; pause_s: undisturbed seconds
    before it; slow_s: how long a slowed station stands still, or a node is cut off, or 0; allowed_s: seconds within
    which throughput must be back."""

    kind: Kind
    process: str
    pause_s: float
    slow_s: float
    allowed_s: float = RECOVERY_S

    @property
    def station(self) -> str:
        """The station that is lost with the process."""
        return station_of(self.process)

    @property
    def of_node(self) -> bool:
        return self.process == NODE


def plan(
    seed: int, count: int, processes: Sequence[str], heartbeat_s: float, *, nodes: bool = False
) -> list[PlannedFault]:
    """`count` faults of these processes (simulator-0, generator-0, …, trainer, trainer-rank1, …), the same for the same
    seed. nodes: and of nodes."""
    rng = random.Random(seed)
    roles: dict[str, list[str]] = {}
    for process in processes:
        roles.setdefault(process.partition("-")[0], []).append(process)
    pairs = _deal(rng, list(roles))
    planned = []
    for index in range(count):
        if nodes and index % 5 >= 3:
            kind = Kind.PARTITION if index % 5 == 3 else Kind.LOSS
            slow_s = rng.uniform(*_PARTITION_S) if kind is Kind.PARTITION else 0.0
            planned.append(PlannedFault(kind, NODE, rng.uniform(*_PAUSE_S), slow_s, NODE_RECOVERY_S))
            continue
        kind, role = next(pairs)
        slow_s = heartbeat_s * rng.uniform(*_SLOW_SHARE) if kind is Kind.SLOW else 0.0
        process = rng.choice(roles[role])
        ranks = [other for other in roles[role] if station_of(other) == station_of(process)]
        allowed_s = RECOVERY_S if len(ranks) == 1 else NODE_RECOVERY_S
        planned.append(PlannedFault(kind, process, rng.uniform(*_PAUSE_S), slow_s, allowed_s))
    return planned


def _deal(rng: random.Random, roles: list[str]) -> Iterator[tuple[Kind, str]]:
    kinds = list(_OF_PROCESSES)
    while True:
        rng.shuffle(kinds)
        rng.shuffle(roles)
        for shift in rng.sample(range(len(roles)), len(roles)):
            hand = [(kind, roles[(index + shift) % len(roles)]) for index, kind in enumerate(kinds)]
            rng.shuffle(hand)
            yield from hand


@dataclass(slots=True)
class Fault:
    """A fault that was applied. Times are the loop's clock, None until it happens.

    pace: usual chunk steps/s before it; noticed_at: `StationLost` arrived; over_at: the station joined again, or was no
    longer slowed; recovered_at: throughput was back; share: the fraction of its usual CPU that other processes left to
    the run then; given_up: why a slowed station was taken for lost. where: the node that was hit; healed_at: its link
    was up again, or a new one was started; stations: that were lost with it.
    """

    planned: PlannedFault
    at: float
    pace: float
    noticed_at: float | None = None
    over_at: float | None = None
    recovered_at: float | None = None
    share: float = 1.0
    given_up: str = ""
    where: str = ""
    healed_at: float | None = None
    stations: set[str] = field(default_factory=set)

    def as_dict(self, began: float) -> dict[str, Any]:
        """Plain data; times in seconds since `began` (at_s) and since the fault (the others)."""
        slowed = self.planned.kind is Kind.SLOW
        return {
            "station": f"{self.where} ({', '.join(sorted(self.stations))})" if self.where else self.planned.process,
            "kind": self.planned.kind.value,
            "at_s": round(self.at - began, 2),
            "slowed_s": self._since(self.over_at if slowed else self.healed_at),
            "noticed_s": self._since(self.noticed_at),
            "joined_s": None if slowed else self._since(self.over_at),
            "recovered_s": self._since(self.recovered_at),
            "allowed_s": self.planned.allowed_s,
            "usual_pace": round(self.pace, 1),
            "cpu_share": round(self.share, 2),
        }

    def complaints(self) -> Iterator[str]:
        """How the run broke its guarantees under this fault, in words."""
        planned = self.planned
        what = f"{self.where or planned.process} ({planned.kind})"
        if self.given_up:
            yield f"{what} was slowed for {planned.slow_s:.1f} s only, but given up: it {self.given_up}"
        if planned.kind not in (Kind.SLOW, Kind.PARTITION) and self.noticed_at is None:
            yield f"{what} was never noticed"
        if self.over_at is None:
            yield f"{what} never came back"
        elif self.recovered_at is None:
            yield f"{what}: throughput never came back to what it was"
        elif self.recovered_at > self.at + planned.allowed_s:
            took = f"{self.recovered_at - self.at:.1f} s, {planned.allowed_s:g} s are allowed"
            yield f"{what}: throughput was back after {took}"

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else round(moment - self.at, 2)


def totals(faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over the faults as plain data: how many, by kind, noticed_s and recovered_s (p50, max), recovered_in_time."""
    by_kind = {
        kind.value: {"faults": len(own), **_times(own)}
        for kind in Kind
        if (own := [fault for fault in faults if fault["kind"] == kind])
    }
    within = sum((took := fault["recovered_s"]) is not None and took <= fault["allowed_s"] for fault in faults)
    return {"faults": len(faults), "by_kind": by_kind, **_times(faults), "recovered_in_time": within}


def _times(faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for name in ("noticed_s", "recovered_s"):
        times = [fault[name] for fault in faults if fault[name] is not None]
        found[name] = {"p50": round(median(times), 2), "max": max(times)} if times else {"p50": None, "max": None}
    return found
