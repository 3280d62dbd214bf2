"""What a process asks the server of another host, and what a process knows of the hosts of its run.

    question   number (8 bytes), MessagePack of a tagged record
    answer     the same number, b"" or the reason why there is none, then the pieces as they lie in memory

No code is executed by receiving one (no pickle).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec


@dataclass(frozen=True, slots=True)
class HostView:
    """What a process knows of the hosts of its run. own: its host; folder: the run's there, in shared memory; address:
    where its inbox is bound. servers: endpoint of each host's server; slots: the host of each slot. publishers: hosts
    whose memory weights are published in, the trainer's first."""

    own: str
    folder: str
    address: str
    servers: Mapping[str, str] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)
    publishers: tuple[str, ...] = ()


class Hosts(Protocol):
    """The hosts of a run, and where each station works."""

    def view(self, station: str) -> HostView:
        """What a process of the station that starts now knows of the hosts."""
        ...

    def host_of(self, station: str) -> str: ...

    def find_place(self, station: str) -> list[str]:
        """A place for the next incarnation of a station; the stations on hosts that are found to be lost now."""
        ...


class Posted(msgspec.Struct, frozen=True, tag=0):
    """The requests that these slots posted: for each its noise keys, greedy flags and observations."""

    slots: Sequence[tuple[str, int]]


class Sample(msgspec.Struct, frozen=True, tag=1):
    """The finished sample in a block."""

    block: int


class Held(msgspec.Struct, frozen=True, tag=2):
    """The versions that are published there, with the number of each publication."""


class Part(msgspec.Struct, frozen=True, tag=3):
    """Bytes of a publication; none if it is gone."""

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


Question = Posted | Sample | Held | Part | Parcel
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Question).decode

#: Bytes of one part of a version; parts that are asked for before the first has come.
PART_BYTES, AHEAD = 4 * 2**20, 3
#: Bytes of the largest question; of an answer beside its arrays.
LARGEST_QUESTION, HEAD_BYTES = 2**20, 2**16
