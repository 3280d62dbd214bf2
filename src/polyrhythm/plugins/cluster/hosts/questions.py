"""Questions to the server of another host.

    question   MessagePack of a tagged record
    answer     b"" or the reason why there is none, then the pieces as they lie in memory

No code is executed by receiving one (no pickle).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

#: Seconds that an answer may take where nobody says otherwise: it is read from memory, so the rest is the link's.
#: No host is lost by one that does not come (`plugins.cluster.hosts.directory`).
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Known:
    """A host of the run. folder: the name of the run's folder there; token: what was written into it."""

    host: str
    folder: str
    token: str


class Posted(msgspec.Struct, frozen=True, tag=0):
    """The requests that these slots posted: for each its noise keys, greedy flags and observations."""

    slots: Sequence[tuple[str, int]]


class SampleEntries(msgspec.Struct, frozen=True, tag=1):
    """Entries of the finished sample in a block, as many as `pieces.entries_at_a_time` at most. obs: with its
    observations."""

    block: int
    begin: int
    count: int
    obs: bool = True


class Held(msgspec.Struct, frozen=True, tag=2):
    """The versions that are published there, with the number of each publication."""


class Part(msgspec.Struct, frozen=True, tag=3):
    """Bytes of a publication, and b"1" if they are that; nothing, or b"0", if it is gone."""

    version: int
    number: int
    begin: int
    length: int


class ParcelPart(msgspec.Struct, frozen=True, tag=4):
    """Bytes of a parcel of a workflow. last: its reader has it now."""

    name: str
    begin: int
    length: int
    last: bool


class ReadClocks(msgspec.Struct, frozen=True, tag=5):
    """What its monotonic and its wall clock show, in nanoseconds."""


class Sees(msgspec.Struct, frozen=True, tag=6):
    """Which of these hosts the asked one shares memory with, if any: its name, and the run's folder there. Otherwise
    nothing."""

    known: Sequence[Known]


class Relayed(msgspec.Struct, frozen=True):
    """A publication, and the hosts above who asks (name, endpoint of the server), nearest first: the last has published
    it, under this number."""

    version: int
    number: int
    route: Sequence[tuple[str, str]]


class RelayedPart(msgspec.Struct, frozen=True, tag=7):
    """As `Part`, of a publication of another host, which the asked one copies if it has not got it. source: as the
    asked host sees it."""

    source: Relayed
    begin: int
    length: int


class Bring(msgspec.Struct, frozen=True, tag=8):
    """How far the copy of a publication in the asked host's mirror is (`relay.CopyProgress`); it begins if there is
    none."""

    source: Relayed


class RunFile(msgspec.Struct, frozen=True, tag=9):
    """Where the ranks of a station meet, or who sends weights to devices (`PAIR_FILE`): what rank 0, or that process,
    which works there, has written to the file of this name. Nothing while there is none."""

    name: str


Question = Posted | SampleEntries | Held | Part | ParcelPart | ReadClocks | Sees | RelayedPart | Bring | RunFile
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Question).decode

#: In the run's folder of a host: the endpoint of the process that sends weights to devices of other hosts (`pairs`).
PAIR_FILE = "weights.pair"
#: Bytes of one part of a version or of a sample; parts that are asked for before the first has come.
PART_BYTES, AHEAD = 4 * 2**20, 3
#: Seconds that either end of a pair waits for the other.
PAIR_S = 10.0
#: Seconds after which a host that has not got a part of a version is passed over, and after which a process is told how
#: far a copy is that is not whole.
RELAY_S, PROGRESS_S = 2.0, 1.0
#: Bytes of the largest question; of an answer beside its arrays; of a ticket for a connection, or the reason for none.
LARGEST_QUESTION, HEAD_BYTES, TICKET_BYTES = 2**20, 2**16, 2**12


_IDENTITY = "identity"


def write_identity(folder: Path) -> str:
    token = secrets.token_hex(16)
    file = folder / _IDENTITY
    file.touch(mode=0o600)
    file.write_text(token)
    return token


def find_shared(known: Iterable[Known], root: Path) -> tuple[Known, Path] | None:
    """The first of these hosts whose memory can be opened below `root`, and its folder; None if there is none."""
    for host in known:
        folder = root / host.folder
        if folder.parent != root:
            continue
        try:
            found = (folder / _IDENTITY).read_text()
        except (OSError, ValueError):
            continue
        if found == host.token:
            return host, folder
    return None
