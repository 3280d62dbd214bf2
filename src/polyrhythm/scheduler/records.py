"""Records: events (to the conductor), commands (from it), and the data that both contain.

All records are immutable plain data. A payload is represented by its id, a string that the launcher interprets.
`incarnation` is that of the sending station; an event of an older incarnation is refused. `Request` and
`RequestArrived`, one per chunk step, are named tuples: they are made and decoded in half the time of a frozen
dataclass, and are encoded without field names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, get_args

from polyrhythm.scheduler.codec import UNSAVED


class DropReason(StrEnum):
    """Why a sample failed or was dropped: the only keys of `SampleLedger.dropped` and of the metrics made from it. The
    text of an exception is never a reason: it is the error of `SampleFailed` and goes to the log."""

    #: Answer to `CancelRow`: given up by command, not a failure.
    CANCELLED = "cancelled"
    #: Other samples of the same update were finished first (redundant tickets).
    SURPLUS = "surplus"
    #: The mean return of its group lies outside the filter's bounds.
    FILTERED = "filtered"
    #: Its deadline has passed, after a lost trainer came back with older weights.
    ROLLBACK = "rollback"
    #: It ran longer than `episode_deadline_s`.
    DEADLINE = "deadline"
    #: Its simulator was lost.
    SIMULATOR_LOST = "simulator lost"
    #: The environment raised an exception.
    ENVIRONMENT_RAISED = "environment raised"
    #: The environment refuses the episode, such as one with a prompt that is too long.
    EPISODE_REFUSED = "episode refused"
    #: The environment gave a number that is not finite.
    ENVIRONMENT_NOT_FINITE = "environment not finite"
    #: The policy gave a number that is not finite.
    POLICY_NOT_FINITE = "policy not finite"
    #: Its request was refused (`RefuseRequest`).
    REFUSED = "request refused"
    #: The reward function raised, or returned no score.
    SCORING_FAILED = "scoring failed"
    #: Its scorer was lost while it scored the sample.
    SCORER_LOST = "scorer lost"


#: Reasons of samples that were not needed or impossible: they do not count as faults.
NO_FAULTS = frozenset({DropReason.SURPLUS, DropReason.FILTERED, DropReason.EPISODE_REFUSED})


class SampleEnd(StrEnum):
    """How a sample ended."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    SEGMENT = "segment"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to produce one sample.

    number: unique and increasing in the order of granting; attempt: 1 for the first try. version: applied version when
    granted; its deadline is version + max_lag. group: samples that share task and seed; a group of one has its own
    number. seed: initial state; noise: stream of the sampling noise, independent of attempt and of the batch.
    instruction: index of the sentence shown, equal to `task` unless an evaluation swaps them. evaluation: name of its
    evaluation, "" for training. shown: its result must contain its texts.
    """

    number: int
    group: int
    task: int
    instruction: int
    seed: int
    noise: int
    version: int
    attempt: int = 1
    greedy: bool = False
    evaluation: str = ""
    shown: bool = False

    @property
    def start(self) -> tuple[int, int]:
        return self.task, self.seed


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A shard of an env batch: its consecutive rows first..first+rows-1, and the generator that it must use."""

    slot: str
    first: int
    rows: int
    generator: str | None = None


@dataclass(frozen=True, slots=True)
class EnvBatchInfo:
    """An env batch as its simulator announces it. reset_rows: rows reset individually, else episodes begin together.
    reserved: only for background evaluations. spares: additional rows, in which it resets coming episodes ahead."""

    name: str
    slots: tuple[SlotInfo, ...]
    reset_rows: bool = True
    reserved: bool = False
    spares: int = 0


class Request(NamedTuple):
    """A slot's waiting request for actions.

    rows: active rows, each of which holds a ticket; version: highest version among those tickets (a generator with
    older weights never serves the request); sequence: the slot's request number, which its answer repeats.
    """

    slot: str
    simulator: str
    sequence: int
    rows: int
    version: int
    reply_to: str
    arrived: float
    generator: str | None = None
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that a generator serves in one forward pass. pinned: with the copy that is kept for evaluation."""

    number: int
    generator: str
    requests: tuple[Request, ...]
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """A request that a generator answers token by token. pinned: with the weights that are kept for evaluation."""

    number: int
    generator: str
    request: Request
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A ticket for a row (index within its env batch).

    resume: continue the parked episode without a reset; the episode keeps its task, seed and instruction. block: arena
    block of its sample; assigned when the command is sent to its simulator, -1 before.
    """

    row: int
    ticket: Ticket
    resume: bool = False
    block: int = field(default=-1, metadata=UNSAVED)


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of an evaluation. shown: its result contains its conversation, if the environment has texts. sample:
    its number among the episodes of one initial state, which differ in noise alone."""

    task: int
    instruction: int
    seed: int
    greedy: bool
    shown: bool = False
    sample: int = 0


# ---------------------------------------------------------------- events: station or operator → conductor


@dataclass(frozen=True, slots=True)
class SimulatorJoined:
    """host: where its observations lie, "" if the run has one host."""

    simulator: str
    incarnation: int
    batches: tuple[EnvBatchInfo, ...]
    host: str = ""


@dataclass(frozen=True, slots=True)
class GeneratorJoined:
    """version: the weights it holds already, -1 for none. host: where it works, "" if the run has one host. depth: how
    many batches it can have at once, 1 or 2: with 2 it gathers the next one during a pass."""

    generator: str
    incarnation: int
    version: int = -1
    host: str = ""
    depth: int = 1


@dataclass(frozen=True, slots=True)
class TrainerJoined:
    """updates: updates that its weights contain (0 for the initial weights)."""

    trainer: str
    incarnation: int
    updates: int = 0


@dataclass(frozen=True, slots=True)
class ScorerJoined:
    """places: samples that it scores at a time. host: where it works, "" if the run has one host."""

    scorer: str
    incarnation: int
    places: int = 1
    host: str = ""


#: How a station of a run announces itself.
StationJoined = SimulatorJoined | GeneratorJoined | TrainerJoined | ScorerJoined


def merge_joined(parts: Sequence[StationJoined]) -> Event:
    """One announcement for all parts of a station: a simulator has one part per env batch, others have one."""
    first = parts[0]
    if isinstance(first, SimulatorJoined):
        batches = tuple(info for part in parts if isinstance(part, SimulatorJoined) for info in part.batches)
        return replace(first, batches=batches)
    assert len(parts) == 1, f"{type(first).__name__} in several parts"
    return first


@dataclass(frozen=True, slots=True)
class StationLost:
    """A station died or was removed; later events of this incarnation are refused. blame: its episodes count as
    attempts; false if it left in good order. moves: it was ended to use a node that joined, which is no fault."""

    station: str
    incarnation: int
    reason: str
    blame: bool = True
    moves: bool = False


class RequestArrived(NamedTuple):
    simulator: str
    incarnation: int
    slot: str
    sequence: int
    rows: int
    version: int
    reply_to: str
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The replies have been sent to their slots."""

    generator: str
    incarnation: int
    batch: int
    version: int


@dataclass(frozen=True, slots=True)
class StreamDone:
    """The stream has ended: its reply was sent to the slot, unless it was aborted. tokens: number generated; version:
    oldest weights that sampled them, -1 for none."""

    generator: str
    incarnation: int
    stream: int
    version: int
    tokens: int = 0
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """A row's episode or segment is complete and its data is the payload `payload_id`.

    payload_id: "" for an evaluation's, whose trajectory is not kept unless it is to be scored. oldest, newest:
    behaviour versions in it. success: of the episode so far, None if the environment has not reported it. metrics:
    (name, number) of the whole episode by the environment's own metrics, once it ended. texts: if the ticket is shown,
    the prompt, then messages and replies in turn.

    After `SampleEnd.SEGMENT` the row is parked in mid-episode and waits for a continuation; otherwise it is free.
    """

    simulator: str
    incarnation: int
    ticket: int
    attempt: int
    payload_id: str
    end: SampleEnd
    chunk_steps: int
    env_steps: int
    oldest: int
    newest: int
    success: bool | None
    episode_return: float
    metrics: tuple[tuple[str, float], ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFailed:
    """The sample could not be completed (the environment raised, a number is not finite); the row is free again.

    Also the answer to `CancelRow`, with the reason CANCELLED. error: what failed, without numbers of the sample, so
    that equal failures are counted together ("" if the reason suffices). detail: the episode's task and seed, and the
    position in the episode.
    """

    simulator: str
    incarnation: int
    ticket: int
    attempt: int
    reason: DropReason
    error: str = ""
    detail: str = ""

    @property
    def what(self) -> str:
        return self.error or self.reason


@dataclass(frozen=True, slots=True)
class SampleScored:
    """A sample's score. number: of the `ScoreSample`; success: None if the score does not determine it."""

    scorer: str
    incarnation: int
    number: int
    ticket: int
    score: float
    success: bool | None = None


@dataclass(frozen=True, slots=True)
class ScoringFailed:
    """The reward function raised or returned no score. error, detail: as in `SampleFailed`."""

    scorer: str
    incarnation: int
    number: int
    ticket: int
    error: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class UpdateDone:
    """The update is trained. halt: why the run must stop after it; "" if it may continue."""

    trainer: str
    incarnation: int
    update: int
    halt: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """Weights of `version` can be fetched by generators."""

    trainer: str
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class WeightsApplied:
    """pinned: to the copy that is kept for evaluation."""

    generator: str
    incarnation: int
    version: int
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class DeviceTaken:
    """The station is on this leased device. seconds: duration of the switch."""

    station: str
    incarnation: int
    device: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceYielded:
    """The station has left this leased device. freed_bytes: freed on it; seconds: duration of the switch."""

    station: str
    incarnation: int
    device: int
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The trainer's state after `updates` updates is saved: their samples cannot be rolled back."""

    trainer: str
    incarnation: int
    updates: int


@dataclass(frozen=True, slots=True)
class SaveRequested:
    """The run requests that the trainer's current state be saved."""


@dataclass(frozen=True, slots=True)
class PayloadsLost:
    """A host is lost, and with it the finished samples with these payload ids."""

    host: str
    payload_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightsOffered:
    """The run offers weights of `version` to the generators: initial or restored ones."""

    version: int


@dataclass(frozen=True, slots=True)
class TrainUntil:
    """Grant training tickets until a total of `version` versions has been consumed."""

    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run these episodes with one version of the weights; training pauses meanwhile unless `background`. background: in
    the reserved rows and with the evaluator's second copy of the weights, so that training goes on."""

    name: str
    episodes: tuple[Episode, ...]
    background: bool = False


@dataclass(frozen=True, slots=True)
class Wake:
    """The conductor's deadline has passed."""


ServingEvent = RequestArrived | BatchDone | StreamDone
SampleEvent = SampleFinished | SampleFailed | SampleScored | ScoringFailed | PayloadsLost
TrainerEvent = UpdateDone | Published | Checkpointed
DeviceEvent = DeviceTaken | DeviceYielded
RunEvent = SaveRequested | WeightsOffered | TrainUntil | Evaluate | Wake
Event = (
    StationJoined | StationLost | ServingEvent | SampleEvent | TrainerEvent | WeightsApplied | DeviceEvent | RunEvent
)


# ---------------------------------------------------------------- commands: conductor → station or run


@dataclass(frozen=True, slots=True)
class StartRows:
    """Begin (or resume) these rows of one slot. They join the slot's next request."""

    simulator: str
    slot: str
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class CancelRow:
    """Cancel the row's sample; the simulator answers `SampleFailed` with the reason CANCELLED."""

    simulator: str
    slot: str
    ticket: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PrepareEpisodes:
    """Forecast of the next episodes (task, seed) of this slot's env batch, in order; replaces the last forecast. The
    simulator may reset spare rows for them. Grants come only in `StartRows`, and may differ."""

    simulator: str
    slot: str
    episodes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """This request will not be answered. reason: why."""

    simulator: str
    slot: str
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Serve:
    generator: str
    batch: Batch


@dataclass(frozen=True, slots=True)
class StartStream:
    """The generator begins to answer this request at its next decode step; answered by `StreamDone`."""

    generator: str
    stream: Stream


@dataclass(frozen=True, slots=True)
class AbortStream:
    """Abort this stream. Answered by `StreamDone`; its reply may have been sent already."""

    generator: str
    stream: int


@dataclass(frozen=True, slots=True)
class ApplyWeights:
    """pinned: to the copy that is kept for evaluation."""

    generator: str
    version: int
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ScoreSample:
    """Score the finished sample of this payload id; answered by `SampleScored` or `ScoringFailed`. number: of this try;
    task, seed: of its initial state; evaluation: whether it is an evaluation's."""

    scorer: str
    number: int
    ticket: int
    payload_id: str
    task: int
    seed: int
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class StartUpdate:
    """Train update `update` (counted from 0) on these samples, in this order, at trainer version `version`.

    more: further samples follow in another command of the same update and version. oldest: the oldest behaviour version
    in each sample; version - oldest is its lag. scores: the scorer's part of each sample's reward; empty without
    scorers. updates_since: updates contained in the trainer's weights but not in those of the oldest version, at least
    0. micro_batch: chunk steps of a rank's training pass, as of the update's first command; 0: the recipe's.
    """

    trainer: str
    update: int
    version: int
    tickets: tuple[int, ...]
    payload_ids: tuple[str, ...]
    oldest: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    updates_since: tuple[int, ...] = ()
    more: bool = False
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class PublishWeights:
    trainer: str
    version: int


@dataclass(frozen=True, slots=True)
class SaveTrainer:
    """Save the trainer's state, between two updates; answered by `Checkpointed`."""

    trainer: str


@dataclass(frozen=True, slots=True)
class TakeDevice:
    """Move the station's tensors onto this leased device; answered by `DeviceTaken`. beside: other stations may be on
    it."""

    station: str
    device: int
    beside: bool = False


@dataclass(frozen=True, slots=True)
class YieldDevice:
    """Leave this leased device after the unit of work under way; answered by `DeviceYielded`."""

    station: str
    device: int


@dataclass(frozen=True, slots=True)
class ReleasePayloads:
    """These payloads can be freed."""

    payload_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleEvaluated:
    """One evaluation episode is complete; the conductor releases its payload. seed: of its initial state; noise: stream
    of its sampling noise; env_steps: primitive steps; success, texts: as in `SampleFinished`."""

    name: str
    task: int
    instruction: int
    greedy: bool
    success: bool | None
    episode_return: float
    version: int
    metrics: tuple[tuple[str, float], ...] = ()
    seed: int = -1
    env_steps: int = 0
    texts: tuple[str, ...] = ()
    noise: int = -1


@dataclass(frozen=True, slots=True)
class ScoreCounted:
    """A training sample is scored and complete. success: by the score, else by the environment; None if by neither."""

    ticket: int
    score: float
    success: bool | None


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """An evaluation ended; finished + dropped = number of its episodes."""

    name: str
    finished: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class TargetReached:
    """Every update up to `version` is trained, published and applied."""

    version: int


@dataclass(frozen=True, slots=True)
class EpisodeSetAside:
    """Episodes of this task and seed failed too often and are no longer started. reason: of the last failure.
    background: in background evaluations, which are counted separately."""

    task: int
    seed: int
    failures: int
    reason: DropReason
    background: bool = False


@dataclass(frozen=True, slots=True)
class FilterExhausted:
    """The filter's limit for this update is reached: its remaining groups are kept whatever their return."""

    filtered: int


@dataclass(frozen=True, slots=True)
class BatchingChosen:
    """Limits chosen by `batching: auto` (`BatchLimits`). reason: the measurement and the forecast, as text."""

    max_rows: int
    max_requests: int
    max_wait_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class MoveChosen:
    """A change of the running operation (`plugins/moves`), or its result.

    outcome: it was `begun`, or after some versions `kept` or `undone`; `reset` if costs changed, so that α is the
    setting's again, and a move that had begun stays without a result. move: what changed, as text. reason: the times
    and rates that it rests on, as text. expected, measured: trained samples per second with it, over those without;
    measured is 0 until known, and if a lost station ended it.
    """

    outcome: Literal["begun", "kept", "undone", "reset"]
    move: str
    reason: str
    expected: float
    measured: float = 0.0


@dataclass(frozen=True, slots=True)
class Halt:
    """The run cannot continue."""

    reason: str


SimulatorCommand = StartRows | CancelRow | PrepareEpisodes | RefuseRequest
GeneratorCommand = Serve | StartStream | AbortStream | ApplyWeights
TrainerCommand = StartUpdate | PublishWeights | SaveTrainer
DeviceCommand = TakeDevice | YieldDevice
Notice = SampleEvaluated | ScoreCounted | EpisodeSetAside | FilterExhausted | BatchingChosen | MoveChosen
RunCommand = ReleasePayloads | EvaluationDone | TargetReached | Halt | Notice
Command = SimulatorCommand | GeneratorCommand | ScoreSample | TrainerCommand | DeviceCommand | RunCommand


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of an event trace: an event, its time and the commands that it caused."""

    now: float
    event: Event
    commands: tuple[Command, ...]


# ---------------------------------------------------------------- sender of an event, addressee of a command

_ROLES = frozenset({"simulator", "generator", "trainer", "scorer", "station"})


def _station_fields(kinds: Iterable[type]) -> Mapping[type, str]:
    """Record type → its field that names a station, for types with such a field."""
    found = ((kind, next((name for name in kind.__annotations__ if name in _ROLES), "")) for kind in kinds)
    return {kind: name for kind, name in found if name}


#: Events by which stations join.
JOINED: frozenset[type] = frozenset(get_args(StationJoined))
#: Event → field that names the station which sends it; command → that which it is for.
SENDERS = _station_fields(get_args(Event))
ADDRESSEES = _station_fields(get_args(Command))


def sender_name(event: Event) -> str:
    """Name of the station that sends the event, or that joins; "" for an event of the run."""
    field = SENDERS.get(type(event))
    return "" if field is None else str(getattr(event, field))


def address_of(command: Command) -> str:
    """Name of the station that the command is for; "" for the run."""
    field = ADDRESSEES.get(type(command))
    return "" if field is None else str(getattr(command, field))
