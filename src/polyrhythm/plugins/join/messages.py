"""What a simulator that joins and the run that it joins say to each other. A frame (`runtime.transport.frames`) is one
message and the arrays that go with it.

Messages arrive once and in order although connections break: each end numbers its own from 1 and keeps it until the
other end has it. After a break the ends tell each other the last number that came, and what lies after it is sent
again. At most what was sent since the last sign of life is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args

import msgspec

from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.transport import frames, wire
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import EnvBatchInfo
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.slot import StepSettings

#: Why a simulator is not let in. taken: somebody else has this place; session: it was lost meanwhile, it may join anew.
RefusalKind = Literal["version", "messages", "spec", "taken", "session"]


class JoinHello(msgspec.Struct, frozen=True, tag=0):
    """From who wants in. messages: `protocol_digest`; spec: of the environment, encoded. session, received: of a
    session that goes on, with the number of the last message that came."""

    polyrhythm: str
    messages: str
    spec: bytes
    session: str = ""
    received: int = 0


class Beat(msgspec.Struct, frozen=True, tag=1):
    """A simulator lives. ready: its environment is built; doing, for_s: its call under way."""

    session: str
    received: int
    ready: bool
    doing: str
    for_s: float
    units: int
    statistics: Mapping[str, float]


class SimulatorSaid(msgspec.Struct, frozen=True, tag=2):
    """Message `number` of a simulator: an event as `wire` encodes it. Pieces: of a request its entries, noise keys,
    greedy flags and observations; of a finished sample what requests have not brought."""

    session: str
    number: int
    received: int
    event: bytes


class Leave(msgspec.Struct, frozen=True, tag=3):
    """A simulator goes, and why. blame: the episodes that it had count as attempts."""

    session: str
    reason: str
    blame: bool = False


class Welcome(msgspec.Struct, frozen=True, tag=4):
    """A simulator is let in, as this station. info: its env batch; step: how it steps; layout: of the run's
    arena; address: its own, in requests. reconnect_s: how long a session outlasts its connection."""

    session: str
    station: str
    incarnation: int
    address: str
    info: EnvBatchInfo
    step: StepSettings
    layout: ArenaLayout
    reconnect_s: float


class Resumed(msgspec.Struct, frozen=True, tag=5):
    """The session goes on. received: the last message that came."""

    session: str
    received: int


class JoinRefused(msgspec.Struct, frozen=True, tag=6):
    """A simulator is not let in. ports: of the run's other places, where it is taken."""

    kind: RefusalKind
    reason: str
    ports: tuple[int, ...] = ()


class Told(msgspec.Struct, frozen=True, tag=7):
    """Message `number` of the run. Its piece: a command or a reply as `wire` encodes it."""

    session: str
    number: int
    received: int


class Alive(msgspec.Struct, frozen=True, tag=8):
    """The run lives."""

    session: str
    received: int


class Over(msgspec.Struct, frozen=True, tag=9):
    """The session has ended, and why. fault: the simulator's; else the run is over."""

    session: str
    reason: str
    fault: bool


#: What a simulator says, and what the run says.
FromSimulator = JoinHello | Beat | SimulatorSaid | Leave
FromRun = Welcome | Resumed | JoinRefused | Told | Alive | Over
Message = FromSimulator | FromRun

#: Bytes that a head and the fields beside the arrays may take; of what a simulator receives (a reply, or the layout).
HEAD_BYTES, LARGEST_TOLD = 2**16, 64 * 2**20
#: Bytes of a spec; the head that it comes in has some more.
LARGEST_SPEC = HEAD_BYTES - 4096
_decoders: dict[str, Any] = {
    "simulator": msgspec.msgpack.Decoder(tuple[FromSimulator, tuple[int, ...]]),
    "run": msgspec.msgpack.Decoder(tuple[FromRun, tuple[int, ...]]),
}


def pack(message: Message, pieces: Sequence[frames.Piece] = ()) -> bytes:
    """The frame of a message."""
    return frames.pack(message, pieces)


def unpack(frame: bytes | memoryview, sender: Literal["simulator", "run"]) -> tuple[Any, list[memoryview]]:
    """The message and its pieces, in place. UnfitMessage: this is none that `sender` could send."""
    return frames.unpack(frame, _decoders[sender])


@cache
def protocol_digest() -> str:
    """Sixteen digits that two programs have in common if their messages have the same fields and types."""
    types = (*wire._TYPES, *get_args(Message), EnvSpec)
    schemas, components = msgspec.json.schema_components(types)
    return hashlib.sha256(json.dumps([schemas, components], sort_keys=True).encode()).hexdigest()[:16]


class Numbering:
    """One end of a session. sent, received: the last numbers; kept: messages that the other end may lack."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._kept: deque[tuple[int, bytes]] = deque()

    def next(self) -> int:
        """The number of the next message."""
        return self.sent + 1

    def keep(self, content: bytes) -> None:
        """The next message is this, packed with `next`."""
        self.sent += 1
        self._kept.append((self.sent, content))

    def note(self, received: int) -> None:
        """The other end has everything up to this number. UnfitMessage: it cannot."""
        if not 0 <= received <= self.sent:
            raise UnfitMessage("impossible", f"message {received} is said to have come; {self.sent} were sent")
        while self._kept and self._kept[0][0] <= received:
            self._kept.popleft()

    def take(self, number: int) -> bool:
        """Whether a message that comes now is the next; False if it came before. UnfitMessage: one before it is
        missing."""
        if number > self.received + 1:
            raise UnfitMessage("impossible", f"message {number} comes after message {self.received}")
        if number <= self.received:
            return False
        self.received = number
        return True

    def kept(self) -> Iterator[bytes]:
        """What the other end may lack, in order."""
        return (content for _, content in self._kept)

    def __len__(self) -> int:
        return len(self._kept)
