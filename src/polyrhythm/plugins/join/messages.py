"""Messages between a run and a simulator that joins it. A frame (`plugins.cluster.parcels`) is a message with its
arrays.

Messages are delivered once and in order across reconnections: each end numbers its messages from 1 and keeps them until
they are acknowledged. After a reconnection both ends exchange the last number received, and later messages are sent
again. Heartbeats acknowledge too, so at most the messages since the last one are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster import parcels
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import KeyPair, RunKeys
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import EnvBatchInfo
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.slot import StepSettings

#: Why a simulator is refused. taken: another one has this port; session: it was lost meanwhile, it may join anew.
RefusalKind = Literal["version", "messages", "spec", "taken", "session"]


class JoinHello(msgspec.Struct, frozen=True, tag=0):
    """Greeting of a simulator. messages: `protocol_digest`; spec: of the environment, encoded. session, received: to
    resume a session, with the number of the last message received."""

    polyrhythm: str
    messages: str
    spec: bytes
    session: str = ""
    received: int = 0


class Beat(msgspec.Struct, frozen=True, tag=1):
    """Heartbeat of a simulator. ready: its environment is built; doing, for_s: its current call
    and the seconds in it."""

    session: str
    received: int
    ready: bool
    doing: str
    for_s: float
    units: int
    statistics: Mapping[str, float]


class SimulatorMessage(msgspec.Struct, frozen=True, tag=2):
    """Message `number` of a simulator: an event encoded by `wire`. Pieces of a request: its entries, noise keys, greedy
    flags and observations; of a finished sample: the arrays that its requests did not contain."""

    session: str
    number: int
    received: int
    event: bytes


class Leave(msgspec.Struct, frozen=True, tag=3):
    """A simulator leaves. blame: its episodes count as attempts."""

    session: str
    reason: str
    blame: bool = False


class Welcome(msgspec.Struct, frozen=True, tag=4):
    """A simulator is accepted, as this station. info: its env batch; step: how it steps; layout: of the run's arena.
    address: reply address for its requests; reconnect_s: seconds that a session survives a lost connection."""

    session: str
    station: str
    incarnation: int
    address: str
    info: EnvBatchInfo
    step: StepSettings
    layout: ArenaLayout
    reconnect_s: float


class Resumed(msgspec.Struct, frozen=True, tag=5):
    """The session is resumed. received: number of the last message received."""

    session: str
    received: int


class JoinRefused(msgspec.Struct, frozen=True, tag=6):
    """A simulator is refused. ports: the run's other join ports, if this one is taken."""

    kind: RefusalKind
    reason: str
    ports: tuple[int, ...] = ()


class RunMessage(msgspec.Struct, frozen=True, tag=7):
    """Message `number` of the run. Its piece: a command or a reply, encoded by `wire`."""

    session: str
    number: int
    received: int


class Alive(msgspec.Struct, frozen=True, tag=8):
    """Heartbeat of the run."""

    session: str
    received: int


class Over(msgspec.Struct, frozen=True, tag=9):
    """The session has ended. fault: because of the simulator, else because the run is over."""

    session: str
    reason: str
    fault: bool


#: Messages of a simulator, and of the run.
FromSimulator = JoinHello | Beat | SimulatorMessage | Leave
FromRun = Welcome | Resumed | JoinRefused | RunMessage | Alive | Over
Message = FromSimulator | FromRun

#: Maximum bytes of a head with the fields beside the arrays; of a message to a simulator (a reply, or the layout).
HEAD_BYTES, LARGEST_MESSAGE = 2**16, 64 * 2**20
#: Maximum bytes of a spec; its head has some more.
LARGEST_SPEC = HEAD_BYTES - 4096
_decoders: dict[str, Any] = {
    "simulator": msgspec.msgpack.Decoder(tuple[FromSimulator, tuple[int, ...]]),
    "run": msgspec.msgpack.Decoder(tuple[FromRun, tuple[int, ...]]),
}


def pack(message: Message, pieces: Sequence[parcels.Piece] = ()) -> bytes:
    return parcels.pack(message, pieces)


def unpack(frame: bytes | memoryview, sender: Literal["simulator", "run"]) -> tuple[Any, list[memoryview]]:
    """The message and its pieces, without a copy. UnfitMessage: `sender` cannot have sent it."""
    return parcels.unpack(frame, _decoders[sender])


@cache
def protocol_digest() -> str:
    """Sixteen hexadecimal digits that are equal if all messages have the same fields and types."""
    types = (*wire.TYPES, *get_args(Message), EnvSpec)
    schemas, components = msgspec.json.schema_components(types)
    return hashlib.sha256(json.dumps([schemas, components], sort_keys=True).encode()).hexdigest()[:16]


class Numbering:
    """Sequence numbers of one end of a session. sent, received: the last ones; kept: unacknowledged messages."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._kept: deque[tuple[int, bytes]] = deque()

    def next(self) -> int:
        return self.sent + 1

    def keep(self, content: bytes) -> None:
        self.sent += 1
        self._kept.append((self.sent, content))

    def acknowledge(self, received: int) -> None:
        """The other end has received all messages up to this one. UnfitMessage: it was never sent."""
        if not 0 <= received <= self.sent:
            raise UnfitMessage("impossible", f"message {received} is said to have come; {self.sent} were sent")
        while self._kept and self._kept[0][0] <= received:
            self._kept.popleft()

    def take(self, number: int) -> bool:
        """Whether the message is the next one; False for a duplicate. UnfitMessage: an earlier one is missing."""
        if number > self.received + 1:
            raise UnfitMessage("impossible", f"message {number} comes after message {self.received}")
        if number <= self.received:
            return False
        self.received = number
        return True

    def kept(self) -> Iterator[bytes]:
        return (content for _, content in self._kept)

    def __len__(self) -> int:
        return len(self._kept)


#: The run's token: `polyrhythm-join-1 PUBLIC_KEY_OF_THE_RUN PUBLIC_KEY SECRET_KEY`, CURVE keys in Z85 that are made for
#: the run and give access to its join ports and nothing else.
_KIND = "polyrhythm-join-1"
#: Characters of a key in Z85; bytes of a file that can be a token.
_KEY, _LARGEST = 40, 4096


def write_token(path: Path, keys: RunKeys) -> None:
    """Write the token with mode 0600, replacing an existing file."""
    words = (_KIND, *(key.decode() for key in (keys.inbox.public, keys.outbox.public, keys.outbox.secret)))
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as out:
        out.write(" ".join(words) + "\n")
    unfinished.replace(path)


def read_token(path: Path) -> RunKeys:
    """The keys for joining, without the run's secret key. StartError: the file is not a token,
    or others can read it."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise StartError(f"--token-file = {path}: {error.strerror}; copy the file that the run names") from error
    if stat.S_IMODE(mode) & 0o077:
        raise StartError(
            f"--token-file = {path}: others can read it (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}"
        )
    kind, *keys = content.split() or [b""]
    if kind != _KIND.encode() or len(keys) != 3 or any(len(key) != _KEY for key in keys):
        raise StartError(f"--token-file = {path}: not a token of a run; copy the file that the run names, as it is")
    run, public, secret = keys
    return RunKeys(KeyPair(run, b""), KeyPair(public, secret))
