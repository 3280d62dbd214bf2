"""Messages between the workers and the controller of a workflow, as MessagePack of tagged records, and its errors.

`ToWorker` carries a `Call`, an `Answered` or a `OnDevice`, `FromWorker` an `Asked`, a `Waits`, a `Returned` or a
`Raised`. Receiving one executes nothing.

WorkflowError            invalid use of a worker, a channel or a value
├── WorkerFailed         a worker raised or is lost: the worker, its rank and the cause; the workflow ends
├── WaitTimeout          a wait passed its deadline; the message lists all waits
├── ChannelClosed        a channel has no more items
└── WorkflowOver         the workflow has ended meanwhile
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from polyrhythm.errors import PolyrhythmError

Key = str | int | None
#: Characters of the longest key; bytes of the items in one answer, which is far less than a message may have
#: (`runtime.transport.wire.LARGEST`), also with one item more.
LONGEST_KEY, ANSWER_BYTES = 1024, 4 * 2**20
#: timeout: a deadline has passed; closed: a channel has no more items; refused: the request is invalid; over: the
#: workflow has ended.
Reason = Literal["timeout", "closed", "refused", "over"]


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """A value in transit: its bytes, or the host and the name under which they are kept. device: in whose memory its
    tensors are, "" if they are among the bytes."""

    nbytes: int
    content: bytes = b""
    host: str = ""
    name: str = ""
    device: str = ""


class Put(msgspec.Struct, frozen=True, tag=0):
    """Put an item into a channel within `timeout_s`. Answered by `Done`. direct: the channel connects two workers, and
    is created if missing."""

    channel: str
    parcel: Parcel
    key: Key = None
    weight: float = 1.0
    timeout_s: float = 0.0
    direct: bool = False


class Get(msgspec.Struct, frozen=True, tag=1):
    """Get `items` items of a channel, or the fewest that weigh `weight`, within `timeout_s`. Answered by `Given`. key:
    only items of this key, None for all; order: by name, "" for the channel's own."""

    channel: str
    key: Key = None
    items: int | None = 1
    weight: float | None = None
    timeout_s: float = 0.0
    direct: bool = False
    order: str = ""


class Close(msgspec.Struct, frozen=True, tag=2):
    """Close a channel for one of its producers. Answered by `Done`."""

    channel: str


Request = Put | Get | Close


class Done(msgspec.Struct, frozen=True, tag=3):
    """The request was granted."""


class Given(msgspec.Struct, frozen=True, tag=4):
    """Items in order, each with its key and weight. more: another answer to this request follows."""

    items: tuple[tuple[Parcel, Key, float], ...]
    more: bool = False


class Denied(msgspec.Struct, frozen=True, tag=5):
    """The request failed. reason: kind of error; why: its message."""

    reason: Reason
    why: str


Answer = Done | Given | Denied


#: The method of the `Call` that makes the object of a worker that shares its device.
MAKE = "__init__"
#: The number in the `Raised` of an error outside of all calls.
NO_CALL = 0


class Call(msgspec.Struct, frozen=True, tag=6):
    """Call a method, or `MAKE`. number: above 0; arguments: a tuple of positional and a dict of named ones."""

    number: int
    method: str
    arguments: Parcel


class Answered(msgspec.Struct, frozen=True, tag=7):
    """The answer to the worker's request of this number."""

    number: int
    answer: Answer


class Asked(msgspec.Struct, frozen=True, tag=8):
    """A request of a worker."""

    number: int
    request: Request


class Returned(msgspec.Struct, frozen=True, tag=9):
    """The result of a call. seconds: by timer; the whole call's by the name of its method."""

    number: int
    result: Parcel
    seconds: Mapping[str, float]


class Raised(msgspec.Struct, frozen=True, tag=10):
    """A call raised. error: one line; trace: traceback."""

    number: int
    error: str
    trace: str


class Waits(msgspec.Struct, frozen=True, tag=11):
    """The worker's call waits for the answer to its request of this number, and the worker can leave its device. Only
    of workers that may share theirs."""

    number: int


class OnDevice(msgspec.Struct, frozen=True, tag=12):
    """The first message to a worker that may share its device. device: its name among all hosts; beside: the other
    workers there; in_turn: whether it is on the device only when told to."""

    device: str
    beside: tuple[str, ...]
    in_turn: bool


To = Call | Answered | OnDevice
From = Asked | Waits | Returned | Raised
encode = msgspec.msgpack.Encoder().encode
decode_to = msgspec.msgpack.Decoder(To).decode
decode_from = msgspec.msgpack.Decoder(From).decode


def in_parts(answer: Answer) -> Iterator[Answer]:
    """The answer split into messages of acceptable size: large items go into several answers."""
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


class WorkflowError(PolyrhythmError):
    """Base of the errors of workflows."""


class WorkerFailed(WorkflowError):
    """A worker raised or is lost. group, rank: of the worker; cause: one line; trace: traceback, if it raised."""

    def __init__(self, group: str, rank: int, cause: str, trace: str = "") -> None:
        super().__init__(f"worker {group} rank {rank}: {cause}" + (f"\n{trace}" if trace else ""))
        self.group, self.rank, self.cause, self.trace = group, rank, cause, trace


class WaitTimeout(WorkflowError, TimeoutError):
    """A wait passed its deadline."""


class ChannelClosed(WorkflowError):
    """The channel is closed: it has no more items and accepts none."""


class WorkflowOver(WorkflowError):
    """The workflow has ended, for the reason in the message."""


#: The error of a `Denied`, by its reason.
ERRORS = {"timeout": WaitTimeout, "closed": ChannelClosed, "over": WorkflowOver, "refused": WorkflowError}
