"""Messages as bytes: a tag, then MessagePack of a typed record. Nothing that arrives is executed (no pickle).

A reply has a second frame, the answers' records as they lie in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from polyrhythm.flow import records
from polyrhythm.runtime.messages import Reply, Report, SaveTrainer, Start

Frame = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Hello:
    """A station stands ready. inboxes: address → endpoint, of its parts in order; joined: its announcement, encoded."""

    station: str
    epoch: int
    inboxes: Mapping[str, str]
    joined: bytes


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A station lives. doing: its unit of work under way, for `for_s` seconds; "" between two units."""

    station: str
    epoch: int
    doing: str
    for_s: float
    units: int
    outstanding: tuple[str, ...]
    statistics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Connect:
    """To generators: answers for `address` go to `endpoint`; "" when it is gone."""

    address: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A station's last words; fatal: another attempt would not mend it."""

    station: str
    epoch: int
    error: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """Send a heartbeat now."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish the unit of work under way and leave."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What a reply says beside its records."""

    handle: str
    slot: str
    sequence: int


Message = (
    records.Event | records.Command | Start | SaveTrainer | Report | Hello | Heartbeat | Connect | Failed | Ping | Stop
)

#: The order is the protocol: every process of a run has the same code.
_TYPES: tuple[type, ...] = (
    *(records.SimulatorJoined, records.GeneratorJoined, records.TrainerJoined, records.StationLost),
    *(records.RequestArrived, records.BatchDone, records.SampleFinished, records.SampleFailed),
    *(records.UpdateDone, records.Published, records.WeightsApplied, records.Checkpointed),
    *(records.CancelRow, records.RefuseRequest, records.Serve, records.ApplyWeights),
    *(records.LendSamples, records.PublishWeights),
    *(Start, SaveTrainer, Report, Hello, Heartbeat, Connect, Failed, Ping, Stop, ReplyHead),
)
_TAGS = {kind: bytes([tag]) for tag, kind in enumerate(_TYPES)}
_REPLY = _TAGS[ReplyHead]
_encode = msgspec.msgpack.Encoder().encode
_DECODERS: list[msgspec.msgpack.Decoder[Message | ReplyHead]] = [msgspec.msgpack.Decoder(kind) for kind in _TYPES]


def encode(message: Message) -> list[Frame]:
    """The message as one frame."""
    return [_TAGS[type(message)] + _encode(message)]


def encode_reply(reply: Reply) -> list[Frame]:
    """The reply as two frames; the second is the records' own memory."""
    head = ReplyHead(reply.handle, reply.slot, reply.sequence)
    return [_REPLY + _encode(head), reply.answers.view(np.uint8).data]


def decode(frames: Sequence[Frame], answer_dtype: np.dtype[Any] | None = None) -> Message | Reply:
    """What was encoded. ValueError: it is no message of ours."""
    try:
        first = frames[0]
        message = _DECODERS[first[0]].decode(first[1:])
        if not isinstance(message, ReplyHead):
            return message
        assert answer_dtype is not None, "a reply came to someone who asked nothing"
        return Reply(message.handle, message.slot, message.sequence, np.frombuffer(frames[1], answer_dtype))
    except (IndexError, ValueError) as error:
        raise ValueError(f"a message of {sum(map(len, frames))} bytes cannot be decoded ({error})") from error
