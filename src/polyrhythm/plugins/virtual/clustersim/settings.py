"""Defines the settings of a cluster file: stations, costs of their work, and faults."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from polyrhythm.plugins.virtual.clustersim.costs import FREE, Cost, Count, parse_cost, parse_count
from polyrhythm.scheduler.settings import LeaseSettings, SchedulerSettings, ScoringRules
from polyrhythm.specs.distributions import parse_duration


def _numbers(value: object) -> tuple[int, ...]:
    """Parse device numbers: a list, or text such as 0-5 or 0-3,6."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _numbers([value])
    if isinstance(value, list | tuple):
        if not all(isinstance(each, int) and each >= 0 for each in value) or len(set(value)) < len(value):
            raise ValueError(f"devices {value!r} are not different whole numbers of at least 0; write 0-5 or [0, 2]")
        return tuple(value)
    if not isinstance(value, str) or _RANGES.fullmatch(value.replace(" ", "")) is None:
        raise ValueError(f"devices {value!r} are neither a list of numbers nor ranges; write 0-5, 0-3,6 or [0, 2]")
    if any(int(low) > int(high) for low, high in re.findall(r"(\d+)-(\d+)", value)):
        raise ValueError(f"devices {value!r} go down; write the smaller number first, as in 0-5")
    ends = [part.split("-") for part in value.replace(" ", "").split(",")]
    return _numbers([number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)])


def _seconds(value: object) -> float:
    """Parse a duration with a unit; code may give a number of seconds."""
    if isinstance(value, float) and value >= 0:
        return value
    if isinstance(value, str):
        return parse_duration(value)
    raise ValueError(f"duration {value!r} has no unit; write for example 10ms or 2s")


_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_AsText = PlainSerializer(str)
CostText = Annotated[Cost, PlainValidator(parse_cost), _AsText]
CountText = Annotated[Count, PlainValidator(parse_count), _AsText]
Seconds = Annotated[float, PlainValidator(_seconds)]
Devices = Annotated[tuple[int, ...], PlainValidator(_numbers), PlainSerializer(list)]


class ClusterSection(BaseModel):
    """A part of the cluster file: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StationGroup(ClusterSection):
    """A group of equal stations: its size, devices and failures. kind: what they are called.

    count: stations of the group; host: where they are, in words; requests are served on their hosts where that costs no
    waiting. hosts: with 2 or more, so many hosts, HOST-0 and so on, among which the stations are dealt evenly in order
    (the trainer's ranks: each host trains on its share of the samples); groups with the same `host` share them. gpus:
    devices per station if `devices` is empty (used only for the summary's total). devices: numbers of the group's
    devices, as 0-5 or a list; station i is on device i modulo their number. Groups with the same numbers share the
    devices. If empty, each station has its own device. occupies: share of its device that a pass takes when it is
    alone. resident_gb: what a station keeps on each of its devices (10^9 bytes): under `sharing: lease` it is moved at
    every switch. mean_life: mean time to a random failure, exponential; 0s means never. detected: time from a failure
    to its detection; restart: from there to the new incarnation.
    """

    kind: ClassVar[str]

    count: int = Field(default=1, ge=1)
    host: str = ""
    hosts: int = Field(default=1, ge=1)
    gpus: float = Field(default=0.0, ge=0)
    devices: Devices = ()
    occupies: float = Field(default=1.0, gt=0, le=1)
    resident_gb: float = Field(default=0.0, ge=0)
    mean_life: Seconds = 0.0
    detected: Seconds = 1.0
    restart: Seconds = 10.0

    @model_validator(mode="after")
    def _gpus_once(self) -> Self:
        if self.devices and self.gpus:
            raise ValueError(f"gpus is {self.gpus:g} but devices are given, which are counted; leave gpus out")
        return self

    @property
    def host_names(self) -> list[str]:
        """The hosts of the group, in order."""
        return [f"{self.host or 'host'}-{n}" for n in range(self.hosts)] if self.hosts > 1 else [self.host]

    def seat(self, index: int) -> tuple[Self, tuple[int, ...]]:
        """The group as station `index` of it sees it, on one host; and the devices of that station."""
        devices = (self.devices[index % len(self.devices)],) if self.devices else ()
        if self.hosts == 1:
            return self, devices
        return self.model_copy(update={"host": self.host_names[index * self.hosts // self.count]}), devices


class SimulatorGroup(StationGroup):
    """A group of `count` equal simulators.

    env_batches: per simulator; slots: per env batch; rows: per slot. reserved: number of a simulator's env batches, the
    last ones, that run only background evaluations. shared_thread: the slots of an env batch take turns on one stepping
    thread; otherwise each has its own. reset_rows: rows reset independently; otherwise the episodes of an env batch
    begin together. step: one chunk step of a slot, per active row; reset: per row that resets at once; sample: of each
    sample that begins, at its slot's next step or reset. times_by: source
    of these random times: chance, or the seeds of the slot's episodes, so that a live run of the synthetic environment
    draws the same. steps: env steps of an episode; chunk: env steps per chunk step (C). episode_time: duration of
    a whole episode, replaces `step`: its chunk steps share the time evenly, and a slot's step takes as long as that of
    its slowest row. contention: how a simulator's steps at once slow each other down in its process, instead of on its
    device (`hardware.Device`); 0 if they do not. segment_steps: chunk steps after which an unfinished episode ships a
    segment; 0 for whole episodes. tokens: of the answer to one row's request, if the policy generates tokens; else it
    counts as one. same_tokens: share of the answers to an initial state (prompt) that are equally long; the others are
    as long as it happens. raises: probability that a row's chunk step fails. broken: share of initial states from
    which each one does. solved, hopeless: shares of initial states from which all episodes or no episodes succeed; from
    the others half succeed. The return of an episode is 1 or 0; where there are scorers, it is their score.
    """

    kind = "simulator"

    env_batches: int = Field(default=1, ge=1)
    slots: int = Field(default=1, ge=1)
    rows: int = Field(default=1, ge=1)
    reserved: int = Field(default=0, ge=0)
    shared_thread: bool = False
    reset_rows: bool = True
    step: CostText = FREE
    reset: CostText = FREE
    sample: CostText = FREE
    times_by: Literal["seed", "chance"] = "chance"
    steps: CountText = Field(default_factory=lambda: parse_count(1))
    chunk: int = Field(default=1, ge=1)
    episode_time: CostText | None = None
    contention: float = Field(default=0.0, ge=0)
    segment_steps: int = Field(default=0, ge=0)
    tokens: CountText | None = None
    same_tokens: float = Field(default=0.0, ge=0, le=1)
    raises: float = Field(default=0.0, ge=0, lt=1)
    broken: float = Field(default=0.0, ge=0, lt=1)
    solved: float = Field(default=0.0, ge=0, le=1)
    hopeless: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.solved + self.hopeless > 1:
            raise ValueError(f"solved {self.solved} and hopeless {self.hopeless} are more than 1 together; lower one")
        if self.reserved > self.env_batches:
            raise ValueError(f"reserved {self.reserved} is more than env_batches {self.env_batches}; raise env_batches")
        return self


class GeneratorGroup(StationGroup):
    """A group of `count` equal generators. serve: cost of a forward pass, per row; apply: of loading a version.

    gather: cost of bringing a batch's inputs together and onto the device, per row, before its pass. depth: 2 for a
    generator on a GPU, which gathers the next batch during a pass, if one is full by then; 1 for one on a CPU.
    most_rows: rows for which the device's memory is enough; a batch of more takes several passes, each of which costs
    `serve` for its rows. 0: no limit.

    For answers of several tokens: prefill: cost of reading prompts, per row, during which nothing is decoded; decode:
    of a decode step, per row that has not ended; context: mean cost that each token which such rows have so far adds to
    a decode step, as it reads their keys and values. A pass lasts until its longest answer has ended; under
    `scheduler.batching: streams` each answer ends by itself, and `serve` is not used.

    `scheduler.evaluator` names the generator with the second copy of the weights, for background evaluations;
    `scheduler.evaluator_only` reserves it for them.
    """

    kind = "generator"

    depth: int = Field(default=1, ge=1, le=2)
    gather: CostText = FREE
    serve: CostText = FREE
    most_rows: int = Field(default=0, ge=0)
    prefill: CostText = FREE
    decode: CostText = FREE
    context: CostText = FREE
    apply: CostText = FREE


class TrainerSettings(StationGroup):
    """The trainer, of any number of ranks.

    update: cost of an update, per transition of a rank: ranks share the transitions evenly. streamed: share of the
    cost per transition that its first pass takes, which begins with a part of the samples if they are lent in `parts`.
    ranks: data-parallel ranks; with `devices`, one on each of them.
    gradient_steps: number per update; ranks synchronise after each. synchronise: cost of one exchange, per rank.
    publish: time until generators can fetch a version, per generator; overlaps with the next update.
    checkpoint_every: updates between checkpoints; 0 for none. A restarted trainer resumes from the last one.
    by_passes: share of an update's cost that goes with the number of its micro-batches, if these have `micro_batch`
    chunk steps; below 0 if larger ones are slower. It has effect where the scheduler moves their size.
    """

    kind = "trainer"

    update: CostText = FREE
    streamed: float = Field(default=1.0, ge=0, le=1)
    count: int = Field(default=1, ge=1, le=1)
    ranks: int = Field(default=1, ge=1)
    gradient_steps: int = Field(default=1, ge=1)
    synchronise: CostText = FREE
    publish: CostText = FREE
    checkpoint_every: int = Field(default=0, ge=0)
    micro_batch: int = Field(default=1, ge=1)
    by_passes: float = Field(default=0.0, gt=-1, lt=1)

    @model_validator(mode="after")
    def _a_rank_each(self) -> Self:
        if self.devices and self.ranks not in (1, len(self.devices)):
            raise ValueError(f"ranks is {self.ranks} but devices are {len(self.devices)}, a rank on each; drop ranks")
        return self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.devices) or self.ranks

    def times_with(self, micro_batch: int) -> float:
        """Factor of an update's cost with micro-batches of this size; 0: the usual ones."""
        return 1.0 + self.by_passes * (self.micro_batch / (micro_batch or self.micro_batch) - 1.0)


class ScorerGroup(StationGroup):
    """A group of `count` equal scorers, which score finished samples. places: samples that each scores at a time.

    score: cost of one sample. raises: probability that a try fails; hangs: that it never ends, so that its scorer is
    lost `deadline` later and starts again.
    """

    kind = "scorer"

    places: int = Field(default=1, ge=1)
    score: CostText = FREE
    raises: float = Field(default=0.0, ge=0, lt=1)
    hangs: float = Field(default=0.0, ge=0, lt=1)
    deadline: Seconds = 60.0


class FaultPlan(ClusterSection):
    """A planned failure: `station` (simulator-0, generator-3, trainer, scorer-1) dies or hangs `at` a time.

    after_reply: a generator dies between its replies and its report: the slots continue with answers unknown to the
    conductor. A trainer dies after writing its next version, before it reports it.
    detected, restart: override the group's.
    """

    station: str
    at: Seconds
    kind: Literal["dies", "hangs"] = "dies"
    after_reply: bool = False
    detected: Seconds | None = None
    restart: Seconds | None = None


class CostChange(ClusterSection):
    """A planned change: from `at` on, this cost of all stations is `times` what the groups say. An update's first pass
    over a part of its samples (`parts`) keeps its cost."""

    at: Seconds
    cost: Literal["step", "reset", "serve", "apply", "update", "publish"]
    times: float = Field(gt=0)


class EvaluationPlan(ClusterSection):
    """A planned evaluation, requested `at` a time, in the background or (background: false) while training pauses."""

    at: Seconds
    episodes: int = Field(default=1, ge=1)
    background: bool = True


class LeaseCosts(ClusterSection):
    """How stations take turns on a device (`sharing: lease`).

    devices: numbers of those on which they do; on the others their passes slow each other down. If empty, no other.
    min_hold: how long a station with work may keep a device that another waits for; switch_order: who gets a free one
    (`plugins.lease.lease`). host_gb_per_s: bandwidth between a device and its host, 10^9 bytes per second.
    """

    devices: Devices = ()
    min_hold: Seconds = 1.0
    switch_order: Literal["data_flow", "arrival"] = "data_flow"
    host_gb_per_s: float = Field(default=25.0, gt=0)


class LinkSection(ClusterSection):
    """The network between hosts (`plugins.virtual.clustersim.hardware`).

    latency: of a message, one way; gb_per_s: bandwidth of a host's one NIC in each direction, 10^9 bytes per second.
    main: the conductor's host; default: the trainer's first.
    observation_mb: of a row's request; sample_mb: of a chunk step of a row, as the trainer fetches it (10^6 bytes);
    weights_gb: of a version, which each host of a generator fetches once from the trainer's first host. fan_out: hosts
    to which each of them sends it on, as it arrives; 0: none does, all fetch it from the trainer's.
    """

    latency: Seconds = 50e-6
    gb_per_s: float = Field(default=12.5, gt=0)
    main: str = ""
    observation_mb: float = Field(default=0.0, ge=0)
    sample_mb: float = Field(default=0.0, ge=0)
    weights_gb: float = Field(default=0.0, ge=0)
    fan_out: int = Field(default=0, ge=0)


class ConductorSection(ClusterSection):
    """The CPU of the conductor (`clustersim.hardware`). event: of one event, per command that it gives.

    serving: `main`: one thread hears everything; `beside`: requests and batches are heard on their hosts, so that
    only tickets, samples and weights reach the conductor.
    """

    event: CostText = FREE
    serving: Literal["main", "beside"] = "main"


class ClusterSettings(ClusterSection):
    """The settings of a cluster file.

    sharing: how stations share a device: their passes slow each other down (`shared`) or take turns (`exclusive`, or
    `thread` if the conductor is in their thread, so that its time limits end between two units of work at best), or
    only one station is on it at a time, the others in host memory (`lease`). versions: run until this version is
    trained, published and applied, and all evaluations requested by then ended. switching: of each device, if shared
    (`hardware.Device`). message_delay: latency of a message
    between a station and the conductor. links: the network between hosts; without it everything is everywhere at once.
    conductor: what its events cost. max_time: virtual time limit of the run; 0s for none. trace_slots: number of slots
    in the trace, besides all generators and the trainer.
    """

    seed: int = 0
    versions: int = Field(default=10, ge=1)
    scheduler: SchedulerSettings
    simulators: tuple[SimulatorGroup, ...] = Field(min_length=1)
    generators: tuple[GeneratorGroup, ...] = Field(min_length=1)
    trainer: TrainerSettings = TrainerSettings()
    scorers: tuple[ScorerGroup, ...] = ()
    faults: tuple[FaultPlan, ...] = ()
    evaluations: tuple[EvaluationPlan, ...] = ()
    changes: tuple[CostChange, ...] = ()
    sharing: Literal["shared", "exclusive", "thread", "lease"] = "shared"
    switching: float = Field(default=0.0, ge=0)
    lease: LeaseCosts = LeaseCosts()
    message_delay: CostText = FREE
    links: LinkSection | None = None
    conductor: ConductorSection | None = None
    max_time: Seconds = 0.0
    trace_slots: int = Field(default=64, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check settings that depend on each other."""
        scheduler, names = self.scheduler, self.station_names()
        if any(g.segment_steps for g in self.simulators) and not scheduler.segments:
            raise ValueError("simulators have segment_steps above 0 but scheduler.segments is false; set it to true")
        if any(c.cost == "step" for c in self.changes) and any(g.episode_time is not None for g in self.simulators):
            raise ValueError("a change of step, but simulators have episode_time instead; give these step and steps")
        for fault in self.faults:
            if fault.station not in names:
                known = ", ".join(names[:4])
                raise ValueError(f"fault of {fault.station!r}: there is no such station; write one of {known}, …")
        if self.links is not None and scheduler.batching == "streams":
            raise ValueError("links with scheduler.batching: streams are not simulated; leave links out")
        if scheduler.scoring is not None and not self.scorers:
            raise ValueError("scheduler.scoring is set but there are no scorers, so no sample is scored; add scorers")
        if self.sharing == "lease" and any(group.devices for group in self.scorers):
            raise ValueError("scorers have devices but sharing is lease, which they do not take part in; drop devices")
        if scheduler.lease is not None and self.sharing != "lease":
            raise ValueError("scheduler.lease follows from the devices of the groups; set sharing to lease instead")
        return self

    @model_validator(mode="after")
    def _evaluations_fit(self) -> Self:
        """Check that evaluations have generators and rows, and training both besides."""
        evaluator, groups = self.scheduler.evaluator, self.simulators
        names = [name for name in self.station_names() if name.startswith("generator-")]
        if evaluator and evaluator not in names:
            raise ValueError(f"scheduler.evaluator = {evaluator!r}: there is no such generator; write one of {names}")
        if self.scheduler.evaluator_only and names == [evaluator]:
            raise ValueError("scheduler.evaluator_only leaves no generator for training; add one")
        if all(group.reserved == group.env_batches for group in groups):
            raise ValueError("all env batches are reserved for evaluations; training needs one")
        if any(asked.background for asked in self.evaluations):
            if not evaluator:
                raise ValueError("a background evaluation needs a generator but scheduler.evaluator is empty; name one")
            if not any(group.reserved for group in groups):
                raise ValueError("a background evaluation needs rows but no env batch is reserved for it; set reserved")
        return self

    @model_validator(mode="after")
    def _streams_are_alone(self) -> Self:
        """Streams on a device that other passes slow down are not simulated."""
        crowded = {number for number, count in self._stations_on().items() if count > 1 and not self._is_leased(number)}
        for name, group, devices in self.seats() if self.scheduler.batching == "streams" else ():
            if isinstance(group, GeneratorGroup) and not crowded.isdisjoint(devices):
                raise ValueError(
                    f"scheduler.batching is streams but {name} shares devices {list(devices)}, which is not simulated; "
                    f"give it devices of its own, or set sharing to lease"
                )
        return self

    @model_validator(mode="after")
    def _tell_scheduler(self) -> Self:
        """Tell the scheduler that samples are scored, and which stations are on which devices in turn."""
        added: dict[str, Any] = {}
        if self.scorers and self.scheduler.scoring is None:
            added["scoring"] = ScoringRules()
        if self.sharing == "lease":
            added["lease"] = self.lease_rules()
        if added:
            object.__setattr__(self, "scheduler", replace(self.scheduler, **added))  # the model is frozen
        return self

    def lease_rules(self) -> LeaseSettings:
        """The stations that are on a device of others too, with these devices, and how they take turns there."""
        leased = {number for number, count in self._stations_on().items() if count > 1 and self._is_leased(number)}
        shared = {name: tuple(n for n in devices if n in leased) for name, _, devices in self.seats()}
        devices = {name: own for name, own in shared.items() if own}
        return LeaseSettings(devices, self.lease.min_hold, self.lease.switch_order)

    def _stations_on(self) -> Counter[int]:
        """Number of stations on each device."""
        return Counter(number for _, _, devices in self.seats() for number in devices)

    def _is_leased(self, number: int) -> bool:
        """Whether several stations on this device would take turns."""
        return self.sharing == "lease" and (not self.lease.devices or number in self.lease.devices)

    def seats(self) -> list[tuple[str, StationGroup, tuple[int, ...]]]:
        """Every station with its group and its devices (`StationGroup.seat`); the trainer is on all of its own."""

        def dealt(groups: Sequence[StationGroup]) -> list[tuple[str, StationGroup, tuple[int, ...]]]:
            seats = [group.seat(index) for group in groups for index in range(group.count)]
            return [(f"{group.kind}-{number}", group, devices) for number, (group, devices) in enumerate(seats)]

        trainer = ("trainer", self.trainer, self.trainer.devices)
        return [*dealt(self.simulators), *dealt(self.generators), trainer, *dealt(self.scorers)]

    def station_names(self) -> tuple[str, ...]:
        """simulator-0 …, generator-0 …, trainer, scorer-0 …: in the order of the groups."""
        return tuple(name for name, _, _ in self.seats())

    @property
    def gpus(self) -> float:
        """Devices of the whole cluster."""
        groups = (*self.simulators, *self.generators, self.trainer, *self.scorers)
        named = {number for group in groups for number in group.devices}
        return sum(group.gpus * group.count for group in groups) + len(named)
