"""What a process asks the server of another host, and what a process knows of the hosts of its run.

    question   MessagePack of a tagged record
    answer     b"" or the reason why there is none, then the pieces as they lie in memory

No code is executed by receiving one (no pickle).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from polyrhythm.plugins.cluster.hosts.identity import Known

#: Seconds that an answer may take where nobody says otherwise: it is read from memory, so the rest is the link's.
#: No host is lost by one that does not come (`plugins.cluster.hosts.directory`).
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class HostView:
    """What a process knows of the hosts of its run. own: its host; folder: the run's there, in shared memory; address:
    where its inbox is bound. servers: endpoint of each host's server; slots: the host of each slot. publishers: hosts
    whose memory weights are published in, the trainer's first. silence_s: a process that cannot reach main's host for
    so long has been given up, and ends itself. answer_s: that an answer of another host may take; the link may be cut
    for a while."""

    own: str
    folder: str
    address: str
    servers: Mapping[str, str] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    publishers: tuple[str, ...] = ()
    silence_s: float = math.inf
    answer_s: float = ANSWER_S


#: The name of main's host.
MAIN = "main"


class Departure(NamedTuple):
    """Why a station is to be replaced that has done nothing wrong. moves: to a node that came and has room; else its
    host is lost."""

    reason: str
    moves: bool = False


class Changes(NamedTuple):
    """What has happened to hosts and places. hosts: those that came, with the endpoints of their servers; leaving: the
    stations that are to be replaced; placed: those that may start."""

    hosts: Sequence[tuple[str, str]]
    leaving: Mapping[str, Departure]
    placed: Sequence[str]


class Hosts(Protocol):
    """The hosts of a run, and where each station works."""

    def view(self, station: str) -> HostView:
        """What a process of the station that starts now knows of the hosts."""
        ...

    def host_of(self, station: str) -> str: ...

    @property
    def waiting(self) -> Sequence[str]:
        """The stations that no node has room for."""
        ...

    def seek(self, station: str, now: float) -> None:
        """A station has ended; `advance` says when it may start again."""
        ...

    def advance(self, now: float, heard: Collection[str], *, starting: bool = False) -> Changes:
        """What has happened since the last call. heard: the stations whose heartbeats come; starting: one is not ready
        yet."""
        ...


class Posted(msgspec.Struct, frozen=True, tag=0):
    """The requests that these slots posted: for each its noise keys, greedy flags and observations."""

    slots: Sequence[tuple[str, int]]


class Sample(msgspec.Struct, frozen=True, tag=1):
    """Entries of the finished sample in a block, as many as `pieces.entries_at_a_time` at most."""

    block: int
    begin: int
    count: int


class Held(msgspec.Struct, frozen=True, tag=2):
    """The versions that are published there, with the number of each publication."""


class Part(msgspec.Struct, frozen=True, tag=3):
    """Bytes of a publication, and b"1" if they are that; nothing, or b"0", if it is gone."""

    version: int
    number: int
    begin: int
    length: int


class Parcel(msgspec.Struct, frozen=True, tag=4):
    """Bytes of a parcel of a workflow. last: its reader has it now."""

    name: str
    begin: int
    length: int
    last: bool


class Clock(msgspec.Struct, frozen=True, tag=5):
    """What its monotonic and its wall clock show, in nanoseconds."""


class Sees(msgspec.Struct, frozen=True, tag=6):
    """Which of these hosts the asked one shares memory with, if any: its name, and the run's folder there. Otherwise
    nothing."""

    known: Sequence[Known]


Question = Posted | Sample | Held | Part | Parcel | Clock | Sees
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Question).decode

#: Bytes of one part of a version or of a sample; parts that are asked for before the first has come.
PART_BYTES, AHEAD = 4 * 2**20, 3
#: Bytes of the largest question; of an answer beside its arrays; of a ticket for a connection, or the reason for none.
LARGEST_QUESTION, HEAD_BYTES, TICKET_BYTES = 2**20, 2**16, 2**12
