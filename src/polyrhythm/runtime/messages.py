"""Messages between stations and launchers beside the conductor's records, and the interface of a station."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from polyrhythm.runtime.spans import Span
from polyrhythm.scheduler import records

#: Names in an answer; each of the policy's forward inputs is there as `FORWARD_INPUTS + name`.
ACTIONS = "actions"
LOGPROB = "logprob"
VALUE = "value"
FORWARD_INPUTS = "forward_inputs."
VERSION = "version"
#: Where answers are streamed: by how much newer than `VERSION` the weights were that sampled each token.
NEWER = "newer"
#: Between a station's name and the number of a rank.
_RANK = "-rank"
#: Longer numbers name no part of a process.
_DIGITS = 7


class Reply(NamedTuple):
    """A generator's answer to one request: records [n] (`ArenaLayout.answer_dtype`) for its n active rows, in order.

    reply_to: the address of the part that asked (`part_address`); sequence: the request's, so that a late answer is
    recognised. The records may be overwritten after `deliver` returns.
    """

    reply_to: str
    slot: str
    sequence: int
    answers: NDArray[Any]


def newest_version(answers: NDArray[Any]) -> int:
    """The newest weights that sampled a part of these records; 0 if there are none."""
    if NEWER not in (answers.dtype.names or ()):
        return int(answers[VERSION].max(initial=0))
    return int((answers[VERSION] + answers[NEWER].max(1)).max(initial=0))


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers for the observers, past the conductor: `topic` says of what, `step` which one."""

    station: str
    incarnation: int
    topic: str
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Spans:
    """What a station did, for a timeline. lost: spans since the last message that there was no room for."""

    station: str
    incarnation: int
    spans: tuple[Span, ...]
    lost: int


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker of a workflow of one's own is ready."""

    station: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ToWorker:
    """To a worker: a call, or the answer to what it asked, as the plugin workflow encodes it."""

    station: str
    content: bytes


@dataclass(frozen=True, slots=True)
class FromWorker:
    """What a worker asks, or the result of a call, encoded in the same way. number: counts what it has said."""

    station: str
    incarnation: int
    number: int
    content: bytes


#: How a station announces itself; what a station or its hosting says.
Joined = records.StationJoined | WorkerJoined
Event = records.Event | WorkerJoined | FromWorker
Order = records.Command | ToWorker
#: The orders that reach stations.
ORDERS = (
    *(records.StartRows, records.CancelRow, records.RefuseRequest, records.PrepareEpisodes),
    *(records.Serve, records.StartStream, records.AbortStream, records.ApplyWeights),
    *(records.StartUpdate, records.PublishWeights, records.SaveTrainer, records.ScoreSample),
    *(records.TakeDevice, records.YieldDevice, ToWorker),
)


def merge_joined(parts: Sequence[Joined]) -> Joined:
    first, *others = parts
    if isinstance(first, WorkerJoined):
        assert not others, "a worker in several parts"
        return first
    merged = records.merge_joined([part for part in parts if not isinstance(part, WorkerJoined)])
    assert isinstance(merged, Joined)
    return merged


@dataclass(frozen=True, slots=True)
class StationTraits:
    """What a station can do beside its units of work; None: it cannot.

    deliver: takes a generator's answer. UnfitMessage: it does not fit.
    patience: seconds to wait for a message before the next unit of work, asked after one. Of a station that hears
    nothing while it waits for its device, and would do more beside it if it were told to.
    calling_thread: the thread of `current_call`, if that may be one of its own; asked by another thread.
    wait_beside: from now on `work` is False rather than wait for something else than messages. Returns a descriptor
    that can be read once there may be work; None: its work never waits.
    attend: receives from simulators that want to join, for so many seconds at most; whether one has joined and is
    ready. Its work is theirs, and raises `Departed` when they leave. socket: ZeroMQ's, by which it hears of work.
    listen_by: from now on the function that it is given sends what was said, then has the station `handle` what comes
    within so many seconds; the station calls it within `work`. StopWork, out of it: the station is to leave.
    """

    deliver: Callable[[Reply], None] | None = None
    patience: Callable[[], float] | None = None
    calling_thread: Callable[[], int | None] | None = None
    wait_beside: Callable[[], int | None] | None = None
    attend: Callable[[float], bool] | None = None
    socket: Any = None
    listen_by: Callable[[Callable[[float], None]], None] | None = None


class Station(Protocol):
    """A worker that obeys commands, one unit of work at a time. `name` is what commands address."""

    name: str

    @property
    def traits(self) -> StationTraits: ...

    def handle(self, command: Order) -> None:
        """Accept a command; cheap, never blocks. UnfitMessage: it cannot be meant for this station as it stands; then
        nothing has changed."""

    def work(self) -> bool:
        """Do one unit of work; False if there was none. Unobeyable: nor will there be any."""

    def spans(self, begin: float, end: float) -> Iterable[Span]:
        """What the last unit of work, from begin to end, was for; asked after `work`, and only for a timeline."""

    def joined(self) -> Joined:
        """The event that announces it."""

    def current_call(self) -> tuple[str, float]:
        """The call under way (`step`, `pass`, …) and since when by `time.monotonic`; ("", 0) between units of work.

        Asked by another thread."""

    def pending_work(self) -> list[str]:
        """What it has not finished, in words, for a stall report."""

    def statistics(self) -> dict[str, float]:
        """Counters since the start, for the run's summary."""

    def close(self) -> None:
        """Free everything; called once."""


class OffloadStore(Protocol):
    """Keeps the content of tensors while their memory on a device is free."""

    def suspend(self, tensors: Iterable[Any]) -> int:
        """Free the memory of these tensors on the device; its bytes. Tensors that are elsewhere stay as they are."""

    def resume(self) -> None:
        """Give all of them their memory and content back."""

    def close(self) -> None:
        """Free what it keeps; tensors that are away are lost."""


class Offloadable(Station, Protocol):
    """A station that can leave its device and come back between two units of work, with the same bits."""

    def suspend(self, store: OffloadStore) -> int:
        """Drop what it can make again, and bring its other tensors to the store; the bytes freed on its device."""

    def resume(self, store: OffloadStore) -> None:
        """Bring them back."""


class StopWork(BaseException):
    """A unit of work that waits is to end, because the station is told to leave."""


class Unobeyable(Exception):
    """A command that was accepted cannot be obeyed: what it names is not there. Main is told, and the station is to do
    nothing more."""

    def __init__(self, command: Order, why: str) -> None:
        super().__init__(why)
        self.command = command


class Departed(Exception):
    """Who had joined a station is gone. blame: the episodes that it had count as attempts."""

    def __init__(self, reason: str, *, blame: bool) -> None:
        super().__init__(reason)
        self.blame = blame


@dataclass(frozen=True, slots=True)
class Channels:
    """Ways out of a station: events to the conductor, the replies of one batch to slots, reports to observers.

    Messages of one unit of work leave at its end, in one frame to each process.
    """

    emit: Callable[[records.Event | FromWorker], None]
    reply: Callable[[Sequence[Reply]], None]
    report: Callable[[Report], None]


def add_counts(counts: dict[str, float], more: Mapping[str, float]) -> None:
    """Add counters by name, in place."""
    for name, value in more.items():
        counts[name] = counts.get(name, 0) + value


#: The station that trains; its rank 0 publishes weights.
TRAINER = "trainer"


def rank_name(station: str, rank: int) -> str:
    """The name of a rank's process: `trainer`, `trainer-rank1`, … Rank 0 has the station's."""
    return f"{station}{_RANK}{rank}" if rank else station


def station_of(process: str) -> str:
    return process.partition(_RANK)[0]


def process_address(station: str, incarnation: int, rank: int = 0) -> str:
    """The name of a station process's inbox."""
    return f"{rank_name(station, rank)}.{incarnation}"


def part_address(process: str, part: int) -> str:
    """Where a part of the process with this address gets its replies."""
    return f"{process}.{part}"


def split_address(address: str) -> tuple[str, int]:
    """Process and part of a `part_address`; the part is -1 if it is none."""
    process, _, part = address.rpartition(".")
    return process, int(part) if part.isascii() and part.isdigit() and len(part) < _DIGITS else -1


def sender_of(message: object) -> tuple[str, int] | None:
    """The station and incarnation that signed a message; None if none did."""
    incarnation = getattr(message, "incarnation", None)
    name = getattr(message, records.SENDERS.get(type(message), "station"), None)
    return (name, incarnation) if name is not None and incarnation is not None else None
