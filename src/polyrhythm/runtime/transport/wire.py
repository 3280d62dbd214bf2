"""Messages as bytes: a tag, then MessagePack of a typed record. Receiving executes no code (no pickle).

In a reply the head is followed by the answers' records as they lie in memory, in one message, because each message
costs the receiver.

A process has one inbox. Messages that are sent to it together go in one frame, which names for each message the part
of the process that it is for:

    tag, length of the index, index [[part, bytes], ...], padding, message, padding, message, padding, ...

A single message for part 0 is sent without a frame. Frames do not nest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from polyrhythm.runtime.messages import ORDERS, FromWorker, Reply, Report, Spans, ToWorker, WorkerJoined
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records


class Hello(msgspec.Struct, frozen=True):
    """A station is ready, or one rank of it. endpoint: of its process's inbox; addresses: of its parts, in order;
    joined: its announcement, encoded."""

    station: str
    incarnation: int
    endpoint: str
    addresses: tuple[str, ...]
    joined: bytes
    rank: int = 0


class Heartbeat(msgspec.Struct, frozen=True):
    """A station lives, or one rank of it. doing: its call under way, for `for_s` seconds; "" between two units of work.
    pending_work: what it has not finished, in words; None unless a `Ping` asked for it. place: of a call that lasts
    long, where in user code it is, in words; "" if it is elsewhere.
    """

    station: str
    incarnation: int
    doing: str
    for_s: float
    units: int
    pending_work: tuple[str, ...] | None
    statistics: Mapping[str, float]
    rank: int = 0
    place: str = ""


class Connect(msgspec.Struct, frozen=True):
    """To generators: send replies for the process `address` to `endpoint`; "" means that it has ended. slots: of that
    simulator, whose requests lie on `host`, where there are several hosts."""

    address: str
    endpoint: str
    host: str = ""
    slots: tuple[str, ...] = ()


class HostAt(msgspec.Struct, frozen=True):
    """To every process: the run has another host, whose server is at `endpoint`."""

    host: str
    endpoint: str


class Dismissed(msgspec.Struct, frozen=True):
    """To a process that was given up and speaks again: if it is this incarnation of the station, it is to leave."""

    station: str
    incarnation: int


class Failed(msgspec.Struct, frozen=True):
    """Why a station ends. fatal: it would fail again if it was started again; at: when, by this host's monotonic
    clock. departed: nobody's fault, who had joined it is gone; blame: then the episodes that it had count as attempts.
    """

    station: str
    incarnation: int
    error: str
    fatal: bool
    rank: int = 0
    at: float = 0.0
    departed: bool = False
    blame: bool = True


class Refused(msgspec.Struct, frozen=True):
    """A station cannot obey a command, encoded as it came. why: the reason."""

    station: str
    incarnation: int
    command: bytes
    why: str
    rank: int = 0


class Warned(msgspec.Struct, frozen=True):
    """A module of the station's environment has logged a warning."""

    station: str
    incarnation: int
    text: str


class Ping(msgspec.Struct, frozen=True):
    """Send a heartbeat now. pending_work: with the unfinished work, for a stall report."""

    pending_work: bool = False


class MeasureSpans(msgspec.Struct, frozen=True):
    """Start (on) or stop sending `Spans`."""

    on: bool


class Stop(msgspec.Struct, frozen=True):
    """Finish the unit of work under way and leave."""


class WakeUp(msgspec.Struct, frozen=True):
    """From main to itself: another of its threads has something for the one that receives."""


class ReplyHead(msgspec.Struct, frozen=True):
    """The part of a reply before its records."""

    reply_to: str
    slot: str
    sequence: int


Message = (
    records.Event | records.Command | Report | Spans
    | Hello | Heartbeat | Connect | HostAt | Dismissed | Failed | Refused | Warned | Ping | MeasureSpans | Stop
    | WorkerJoined | ToWorker | FromWorker | WakeUp
)  # fmt: skip

#: Events of main's own.
_OWN = (
    records.PayloadsLost, records.WeightsOffered, records.SaveRequested, records.TrainUntil, records.Evaluate,
    records.Wake,
)  # fmt: skip
#: The order is the protocol: every process of a run has the same code.
TYPES: tuple[type, ...] = (
    *(kind for kind in get_args(records.Event) if kind not in _OWN), *ORDERS, WorkerJoined, FromWorker, Report, Spans,
    Hello, Heartbeat, Connect, HostAt, Dismissed, Failed, Refused, Warned, Ping, MeasureSpans, Stop, WakeUp, ReplyHead,
)  # fmt: skip
_TAGS = {kind: bytes([tag]) for tag, kind in enumerate(TYPES)}
_REPLY, _FRAME = _TAGS[ReplyHead], b"\xff"
#: Bytes of the field with the length of a reply's head or of a frame's index; alignment of a reply's records and of the
#: messages in a frame, which numpy needs.
_LENGTH, _ALIGNMENT = 4, 16
_encode = msgspec.msgpack.Encoder().encode
_DECODERS: list[msgspec.msgpack.Decoder[Message]] = [msgspec.msgpack.Decoder(kind) for kind in TYPES]
#: Bytes of the largest message without answers: far more than any real message, and little memory.
LARGEST = 16 * 2**20
_decode_head = msgspec.msgpack.Decoder(ReplyHead).decode
_decode_index = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode

#: One encoded message: as it came, or where it lies in a frame.
Content = bytes | memoryview


def encode(message: Message) -> bytes:
    return _TAGS[type(message)] + _encode(message)


def encode_reply(reply: Reply) -> bytes:
    """Tag, length of the head, head, padding, records."""
    head = _encode(ReplyHead(reply.reply_to, reply.slot, reply.sequence))
    begin = _REPLY + len(head).to_bytes(_LENGTH, "little") + head
    return b"".join((begin, bytes(-len(begin) % _ALIGNMENT), reply.answers.view(np.uint8).data))


def frame(messages: Sequence[tuple[int, bytes]]) -> bytes:
    """One frame of encoded messages, at least one, each with the number of the part that it is for."""
    if len(messages) == 1 and messages[0][0] == 0:
        return messages[0][1]
    index = _encode([(part, len(content)) for part, content in messages])
    pieces = [_FRAME, len(index).to_bytes(_LENGTH, "little"), index, bytes(-(1 + _LENGTH + len(index)) % _ALIGNMENT)]
    for _, content in messages:
        pieces += (content, bytes(-len(content) % _ALIGNMENT))
    return b"".join(pieces)


def unframe(content: bytes, largest: int = LARGEST) -> Iterator[tuple[int, Content]]:
    """The messages of a frame, in order, each with the part that it is for; not decoded yet.

    UnfitMessage, before the first of them: it is larger than `largest`, or a damaged frame.
    """
    if len(content) > largest:
        raise UnfitMessage("too_large", f"a message of {len(content)} bytes; at most {largest} are expected")
    if content[:1] != _FRAME:
        return iter(((0, content),))
    view = memoryview(content)
    messages: list[tuple[int, Content]] = []
    stop = 1 + _LENGTH + int.from_bytes(content[1 : 1 + _LENGTH], "little")
    try:
        index = _decode_index(view[1 + _LENGTH : stop])
    except (ValueError, RecursionError) as error:
        raise UnfitMessage("undecodable", f"a frame of {len(content)} bytes has no index ({error})") from error
    begin = stop + -stop % _ALIGNMENT
    for part, length in index:
        stop = begin + length
        if not begin < stop <= len(content):
            raise UnfitMessage("undecodable", f"a frame of {len(content)} bytes cannot hold a message of {length}")
        messages.append((part, view[begin:stop]))
        begin = stop + -stop % _ALIGNMENT
    if not index or begin != len(content):
        raise UnfitMessage("undecodable", f"a frame of {len(content)} bytes; its index counts {begin}")
    return iter(messages)


def decode(content: Content, answer_dtype: np.dtype[Any] | None = None, largest: int = LARGEST) -> Message | Reply:
    """Decode a message. answer_dtype: of replies; None where no reply is expected. UnfitMessage: it is not valid."""
    if len(content) > largest:
        raise UnfitMessage("too_large", f"a message of {len(content)} bytes; at most {largest} are expected")
    try:
        if content[:1] != _REPLY:
            return _DECODERS[content[0]].decode(content[1:])
        if answer_dtype is None:
            raise UnfitMessage("misdirected", "a reply came to a station that sends no requests")
        stop = 1 + _LENGTH + int.from_bytes(content[1 : 1 + _LENGTH], "little")
        head = _decode_head(content[1 + _LENGTH : stop])
        answers = np.frombuffer(content, answer_dtype, offset=stop + -stop % _ALIGNMENT)
        return Reply(head.reply_to, head.slot, head.sequence, answers)
    except UnfitMessage:
        raise
    except (IndexError, ValueError, RecursionError) as error:  # nesting without end is said by RecursionError
        why = f"a message of {len(content)} bytes cannot be decoded ({error})"
        raise UnfitMessage("undecodable", why) from error
