"""What workers and the controller of a workflow say to each other, as MessagePack of tagged records.

`ToWorker` carries a `Call` or an `Answered`, `FromWorker` an `Asked`, a `Returned` or a `Raised`. Receiving one
executes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from polyrhythm.plugins.workflow.carrier import Parcel

Key = str | int | None
#: Characters of the longest key; bytes of the items in one answer, which is far less than a message may have
#: (`runtime.transport.wire.LARGEST`), also with one item more.
LONGEST_KEY, ANSWER_BYTES = 1024, 4 * 2**20
#: timeout: a deadline has passed; closed: a channel has no more; refused: it was asked for what cannot be; over: the
#: workflow ends.
Reason = Literal["timeout", "closed", "refused", "over"]


class Put(msgspec.Struct, frozen=True, tag=0):
    """Put an item into a channel, within `timeout_s`. direct: the channel is between two workers, and is made if it is
    not there. Answered by `Done`."""

    channel: str
    parcel: Parcel
    key: Key = None
    weight: float = 1.0
    timeout_s: float = 0.0
    direct: bool = False


class Get(msgspec.Struct, frozen=True, tag=1):
    """Get `items` items of a channel, or as many as weigh `weight`, within `timeout_s`. key: only items of this key,
    None for all; order: by name, "" for the channel's own. Answered by `Given`."""

    channel: str
    key: Key = None
    items: int | None = 1
    weight: float | None = None
    timeout_s: float = 0.0
    direct: bool = False
    order: str = ""


class Close(msgspec.Struct, frozen=True, tag=2):
    """One of a channel's producers has no more. Answered by `Done`."""

    channel: str


Request = Put | Get | Close


class Done(msgspec.Struct, frozen=True, tag=3):
    """It is done."""


class Given(msgspec.Struct, frozen=True, tag=4):
    """Items in order, each with its key and weight. more: further ones follow in the next answer to this request."""

    items: tuple[tuple[Parcel, Key, float], ...]
    more: bool = False


class Denied(msgspec.Struct, frozen=True, tag=5):
    """It cannot be done, and why."""

    reason: Reason
    why: str


Answer = Done | Given | Denied


class Call(msgspec.Struct, frozen=True, tag=6):
    """Call a method; arguments: a tuple of positional and a dict of named ones."""

    number: int
    method: str
    arguments: Parcel


class Answered(msgspec.Struct, frozen=True, tag=7):
    """The answer to the request of this number."""

    number: int
    answer: Answer


class Asked(msgspec.Struct, frozen=True, tag=8):
    """A request of a worker."""

    number: int
    request: Request


class Returned(msgspec.Struct, frozen=True, tag=9):
    """The result of a call. seconds: by timer, those of this call; the call's own by the name of its method."""

    number: int
    result: Parcel
    seconds: Mapping[str, float]


class Raised(msgspec.Struct, frozen=True, tag=10):
    """A call raised. error: what, in one line; trace: where."""

    number: int
    error: str
    trace: str


To = Call | Answered
From = Asked | Returned | Raised
encode = msgspec.msgpack.Encoder().encode
decode_to = msgspec.msgpack.Decoder(To).decode
decode_from = msgspec.msgpack.Decoder(From).decode


def in_parts(answer: Answer) -> Iterator[Answer]:
    """The answer as messages can have it: items in several answers if they are large together."""
    if isinstance(answer, Given):
        items: list[tuple[Parcel, Key, float]] = []
        nbytes = 0
        for item in answer.items:
            if items and nbytes + len(item[0].content) > ANSWER_BYTES:
                yield Given(tuple(items), more=True)
                items, nbytes = [], 0
            items.append(item)
            nbytes += len(item[0].content)
        answer = Given(tuple(items))
    yield answer
