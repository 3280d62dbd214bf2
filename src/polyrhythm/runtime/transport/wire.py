"""Messages as bytes: a tag, then MessagePack of a typed record. Nothing that arrives is executed (no pickle).

A reply's head is followed by the answers' records as they lie in memory: one piece, as every piece costs the receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import Reply, Report, SaveTrainer, Spans, StartRowsInBlocks
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records


@dataclass(frozen=True, slots=True)
class Hello:
    """A station stands ready. inboxes: address → endpoint, of its parts in order; joined: its announcement, encoded."""

    station: str
    incarnation: int
    inboxes: Mapping[str, str]
    joined: bytes


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A station lives. doing: its unit of work under way, for `for_s` seconds; "" between two units. outstanding: what
    it has not finished, in words; None unless a `Ping` asked for it.
    """

    station: str
    incarnation: int
    doing: str
    for_s: float
    units: int
    outstanding: tuple[str, ...] | None
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
    incarnation: int
    error: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """Send a heartbeat now. outstanding: with what is not finished, which a stall report tells."""

    outstanding: bool = False


@dataclass(frozen=True, slots=True)
class MeasureSpans:
    """Say in `Spans` what you do, from now on or no longer."""

    on: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish the unit of work under way and leave."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What a reply says beside its records."""

    reply_to: str
    slot: str
    sequence: int


Message = (
    records.Event | records.Command | StartRowsInBlocks | SaveTrainer | Report | Spans
    | Hello | Heartbeat | Connect | Failed | Ping | MeasureSpans | Stop
)  # fmt: skip

#: The order is the protocol: every process of a run has the same code.
_TYPES: tuple[type, ...] = (
    *(records.SimulatorJoined, records.GeneratorJoined, records.TrainerJoined, records.StationLost),
    *(records.RequestArrived, records.BatchDone, records.SampleFinished, records.SampleFailed),
    *(records.UpdateDone, records.Published, records.WeightsApplied, records.Checkpointed),
    *(records.CancelRow, records.RefuseRequest, records.Serve, records.ApplyWeights),
    *(records.StartUpdate, records.PublishWeights),
    *(
        StartRowsInBlocks,
        SaveTrainer,
        Report,
        Hello,
        Heartbeat,
        Connect,
        Failed,
        Ping,
        Stop,
        Spans,
        MeasureSpans,
        ReplyHead,
    ),
)
_TAGS = {kind: bytes([tag]) for tag, kind in enumerate(_TYPES)}
_REPLY = _TAGS[ReplyHead]
#: Of a reply: bytes that tell the length of the head; where the records may begin, so that numpy finds them aligned.
_LENGTH, _ALIGNMENT = 4, 16
_encode = msgspec.msgpack.Encoder().encode
_DECODERS: list[msgspec.msgpack.Decoder[Message]] = [msgspec.msgpack.Decoder(kind) for kind in _TYPES]
#: Bytes of the largest message, answers left out: far above what a run says, far below what hurts.
LARGEST = 16 * 2**20
_decode_head = msgspec.msgpack.Decoder(ReplyHead).decode


def encode(message: Message) -> bytes:
    return _TAGS[type(message)] + _encode(message)


def encode_reply(reply: Reply) -> bytes:
    """Tag, length of the head, head, padding, records."""
    head = _encode(ReplyHead(reply.reply_to, reply.slot, reply.sequence))
    begin = _REPLY + len(head).to_bytes(_LENGTH, "little") + head
    return b"".join((begin, bytes(-len(begin) % _ALIGNMENT), reply.answers.view(np.uint8).data))


def largest_message(layout: ArenaLayout) -> int:
    """Bytes of the largest message of a run, a reply to its largest slot included."""
    return LARGEST + max(layout.slots.values(), default=0) * layout.answer_dtype.itemsize


def decode(content: bytes, answer_dtype: np.dtype[Any] | None = None, largest: int = LARGEST) -> Message | Reply:
    """What was encoded. answer_dtype: of replies; None where none is due. UnfitMessage: it is no message of ours."""
    if len(content) > largest:
        raise UnfitMessage("too_large", f"a message of {len(content)} bytes; at most {largest} are expected")
    try:
        if content[:1] == _REPLY:
            return _decode_reply(content, answer_dtype)
        return _DECODERS[content[0]].decode(content[1:])
    except UnfitMessage:
        raise
    except (IndexError, ValueError, RecursionError) as error:  # nesting without end is said by RecursionError
        why = f"a message of {len(content)} bytes cannot be decoded ({error})"
        raise UnfitMessage("undecodable", why) from error


def _decode_reply(content: bytes, answer_dtype: np.dtype[Any] | None) -> Reply:
    if answer_dtype is None:
        raise UnfitMessage("misdirected", "an answer came to someone who asked nothing")
    stop = 1 + _LENGTH + int.from_bytes(content[1 : 1 + _LENGTH], "little")
    head = _decode_head(content[1 + _LENGTH : stop])
    answers = np.frombuffer(content, answer_dtype, offset=stop + -stop % _ALIGNMENT)
    return Reply(head.reply_to, head.slot, head.sequence, answers)
