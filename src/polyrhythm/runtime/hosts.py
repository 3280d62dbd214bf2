"""The hosts of a run that has several, as its processes see them. A plugin finds and serves them.

Monotonic clocks begin when a machine is started, so those of two machines differ by any time: spans that stations of
other hosts measured are shifted to main's clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from polyrhythm.runtime.messages import Spans

log = logging.getLogger(__name__)

#: The name of main's host.
MAIN = "main"


class ClockOffset(NamedTuple):
    """A host's monotonic clock is ahead_s ahead of main's (negative: behind), ± uncertainty_s."""

    ahead_s: float
    uncertainty_s: float

    def __str__(self) -> str:
        where = "ahead of" if self.ahead_s >= 0 else "behind"
        return f"{abs(self.ahead_s):.6f} s {where} main's, ± {1000 * self.uncertainty_s:.2g} ms"


SAME = ClockOffset(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class HostView:
    """What a process knows of the hosts of its run. own: its host; folder: the run's there, in shared memory; address:
    where its inbox is bound. ranks: host and address of each rank of its station; process: its own name
    (`messages.rank_name`). servers: endpoint of each host's server; slots: the host of each slot. publishers: hosts
    whose memory weights are published in, the trainer's first. silence_s: a process that cannot reach main's host for
    so long has been given up, and ends itself. answer_s: that an answer of another host may take. memory:
    `module:Class` of the process's memory (`runtime.memory.process_memory.ProcessMemory`)."""

    own: str
    folder: str
    address: str
    servers: Mapping[str, str] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    publishers: tuple[str, ...] = ()
    silence_s: float = math.inf
    answer_s: float = 5.0
    memory: str = ""
    ranks: tuple[tuple[str, str], ...] = ()
    process: str = ""


class Departure(NamedTuple):
    """Why a station is to be replaced that has done nothing wrong. moves: to a node that came and has room; else its
    host is lost."""

    reason: str
    moves: bool = False


class Changes(NamedTuple):
    """Changes of hosts and nodes. hosts: those that came, with the endpoints of their servers; leaving: the stations
    that are to be replaced; placed: those that may start."""

    hosts: Sequence[tuple[str, str]]
    leaving: Mapping[str, Departure]
    placed: Sequence[str]


class Hosts(Protocol):
    """The hosts of a run, and where each station works."""

    def view(self, process: str) -> HostView:
        """What this process (`messages.rank_name`) knows of the hosts if it starts now."""

    def host_of(self, station: str) -> str:
        """The host of a station's rank 0."""

    def offset_of(self, host: str) -> ClockOffset | None:
        """How far a host's monotonic clock is ahead of main's; None while nothing is known of it."""

    @property
    def waiting(self) -> Sequence[str]:
        """The stations that no node has room for, and that the run goes on without."""

    def on_station_ended(self, station: str, now: float) -> None:
        """A station has ended; `advance` says when it may start again."""

    def advance(self, now: float, heard: Collection[str], *, starting: bool = False) -> Changes:
        """The changes since the last call. heard: the processes whose heartbeats come; starting: a station is not
        ready yet."""


class SpanAlignment:
    """offset_of: the offset of a host's clock, None while it is unknown. used: the offset of each host by which its
    last spans were shifted."""

    def __init__(self, offset_of: Callable[[str], ClockOffset | None]) -> None:
        self._offset_of = offset_of
        self.used: dict[str, ClockOffset] = {}
        self._unknown: set[str] = set()

    def align(self, spans: Spans, host: str) -> tuple[Spans, float]:
        """The spans by main's clock, and the bound of the error in seconds; none of them while the offset of the host
        is unknown, which is logged once."""
        offset = self._offset_of(host)
        if offset is SAME:
            return spans, 0.0
        if offset is None:
            if host not in self._unknown:
                self._unknown.add(host)
                log.warning(
                    "host %s has not said what its clock shows: what its stations do is missing in the timeline until "
                    "it has",
                    host,
                )
            return replace(spans, spans=(), lost=0), 0.0
        self.used[host] = offset
        moved = (
            span._replace(begin=span.begin - offset.ahead_s, end=span.end - offset.ahead_s) for span in spans.spans
        )
        return replace(spans, spans=tuple(moved)), offset.uncertainty_s
