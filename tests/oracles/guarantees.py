"""Checks the guarantees of a running simulation, from events and commands alone.

1. A request is answered exactly once, or its slot is told why not: it leaves the queue by `Serve`, `StartStream` or
   `RefuseRequest`, is served again only after its generator was lost, and none is left when nothing moves. A stream
   whose request is refused is aborted.
2. The ledger balances at every event; no sample is trained twice.
3. A sample's lag when it is lent is at most ⌈α⌉ (`bound: sample`); the mean lag is at most α (`bound: mean`).
4. No generator that could serve idles while a batch is due (`batching_audit`), or has places for the request that came
   first (checked for `routing: least_loaded`). A batch waits behind a pass only at a generator of depth 2 that holds
   the newest version, only if it was full and no generator could begin it, and always then.

Beside these: groups are lent whole and within the filter's bounds, deadlines stay feasible, and redundancy stays within
its limits (`group_audit`); evaluations keep to their rows, their generator and one version, and end
(`evaluation_audit`); background ones change none of its decisions (`shadow`). What is trained has its score
(`scoring_audit`). A leased device has one holder, and only
those on all of theirs are given work (`lease_audit`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

from tests.oracles.batching_audit import idle_but_due
from tests.oracles.evaluation_audit import EvaluationAudit, disagreeing, unbalanced
from tests.oracles.group_audit import GroupAudit, misplaced
from tests.oracles.lease_audit import LeaseAudit
from tests.oracles.scoring_audit import ScoringAudit
from tests.oracles.shadow import TrainingOnlyConductor

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import (
    AbortStream,
    ApplyWeights,
    BatchDone,
    Command,
    Event,
    GeneratorJoined,
    Published,
    RefuseRequest,
    Request,
    RequestArrived,
    Serve,
    SimulatorJoined,
    StartStream,
    StartUpdate,
    StationLost,
    Stream,
    StreamDone,
    TrainerJoined,
    UpdateDone,
    WeightsApplied,
    WeightsOffered,
)


class Violation(AssertionError):
    """A guarantee does not hold."""


@dataclass(slots=True)
class GeneratorView:
    """A generator as its messages show it. version: -1 before the first weights; serving: the pass under way, and the
    batch behind it; began: when that pass began; applying: `ApplyWeights` is out;
    pinning: one for its second copy is, which does not keep it from serving. streams: by number until their end is
    told; aborted: those of them that it was told to abort."""

    version: int
    depth: int = 1
    serving: list[Serve] = field(default_factory=list)
    began: float = 0.0
    applying: bool = False
    pinning: bool = False
    streams: dict[int, Stream] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)

    def rows(self, *, pinned: bool = False) -> int:
        """Rows of its streams."""
        return sum(stream.request.rows for stream in self.streams.values() if stream.pinned == pinned)

    @property
    def requests(self) -> list[Request]:
        """What it serves and was not told to abort."""
        kept = [stream.request for number, stream in self.streams.items() if number not in self.aborted]
        return [*(request for serve in self.serving for request in serve.batch.requests), *kept]


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in the queue. arrived: when it first came, also after its generator was lost."""

    arrived: float
    asked: RequestArrived


class GuaranteeChecker:
    """Observes a cluster's driver; raises `Violation` at the event that breaks a guarantee."""

    def __init__(self, cluster: VirtualCluster, conductor: AnyConductor) -> None:
        self._cluster = cluster
        self._conductor = conductor
        self._settings = cluster.settings.scheduler
        self._refused = conductor.stations.refused
        self._latest: dict[str, RequestArrived] = {}
        self._answered: dict[str, tuple[str, Request]] = {}
        self._waiting: dict[str, QueuedRequest] = {}
        self._seats: dict[str, GeneratorView] = {}
        self._published = -1
        self._lent: list[StartUpdate] = []
        self._lent_lags: list[int] = []
        self._trained: set[int] = set()
        self._lags: list[int] = []
        self._groups = GroupAudit.of(conductor, self._settings)
        self._evaluations = EvaluationAudit(self._settings)
        self._scoring = ScoringAudit(self._settings.scoring)
        self.leases = None if self._settings.lease is None else LeaseAudit(self._settings.lease)
        # Evaluations change when training has its devices, so there training alone would decide otherwise.
        # Streams and tries of scoring are numbered in common, and evaluations' count in the loads.
        common = self._settings.batching == "streams" or self._settings.scoring is not None
        alone = self._settings.evaluator and self.leases is None and not common
        self._shadow = TrainingOnlyConductor(conductor, self._evaluations) if alone else None
        cluster.driver.observer = self.observe

    def observe(self, now: float, event: Event, commands: list[Command]) -> None:
        refused, self._refused = self._refused, self._conductor.stations.refused
        if refused != self._refused:  # of an earlier incarnation
            return
        self._hear(now, event)
        decided = commands if self.leases is None else self.leases.decided(self._conductor, commands)
        for command in decided:
            follow = self._COMMANDS.get(type(command))
            if follow is not None:
                follow(self, now, command)
        imbalance = self._conductor.ledger.imbalance
        if imbalance:
            raise Violation(f"at {now} the ledger is off by {imbalance} after {event}: {self._conductor.ledger}")
        wrong = self._groups.note(event, decided) or self._evaluations.note(event, decided)
        wrong = wrong or self._scoring.note(event, decided, self._conductor)
        if not wrong and type(event) not in (RequestArrived, BatchDone, StreamDone):
            wrong = misplaced(self._conductor)
        if not wrong and self.leases is not None:
            wrong = self.leases.note(commands)
        wrong = wrong or unbalanced(self._conductor, self._evaluations) or disagreeing(self._conductor)
        wrong = wrong or idle_but_due(self._conductor, now)
        if not wrong and self._shadow is not None:
            wrong = self._shadow.note(now, event, commands)
        if wrong:
            raise Violation(f"at {now} {wrong} after {event}")
        self._check_idle(now, event)

    def _hear(self, now: float, event: Event) -> None:
        note = self._EVENTS.get(type(event))
        if note is not None:
            note(self, now, event)
        if self.leases is not None:
            self.leases.hear(event)

    def finish(self) -> None:
        """The run is over: check the mean lag, and that every evaluation ended unless the run was cut short. (A request
        that nobody answers ends in the driver's `Deadlock`.)"""
        driver, limit = self._cluster.driver, self._cluster.settings.max_time
        if self._evaluations.open and not driver.halted and not 0 < limit <= driver.clock.now:
            raise Violation(f"these evaluations never ended: {self._evaluations.open}")
        clean = not self._conductor.ledger.dropped_by_faults and not self._conductor.ledger.rolled_back
        if self._settings.bound == "mean" and clean and self._lags:
            mean = sum(self._lags) / len(self._lags)
            if mean > self._settings.max_lag + 1e-9:
                raise Violation(f"the mean lag is {mean}, more than {self._settings.max_lag}")

    # ------------------------------------------------------------ events

    def _simulator(self, _now: float, event: SimulatorJoined) -> None:
        self._forget(event.simulator)

    def _generator(self, _now: float, event: GeneratorJoined) -> None:
        self._forget(event.generator)
        self._seats[event.generator] = GeneratorView(event.version, event.depth)

    def _trainer(self, _now: float, event: TrainerJoined) -> None:
        self._forget(event.trainer)

    def _new_version(self, _now: float, event: Published | WeightsOffered) -> None:
        self._published = max(self._published, event.version)

    def _lost(self, _now: float, event: StationLost) -> None:
        self._forget(event.station)

    def _forget(self, station: str) -> None:
        """A station is lost, or replaced by a later incarnation."""
        if self._lent and self._lent[0].trainer == station:
            self._lent = []
        seat = self._seats.pop(station, None)
        for request in seat.requests if seat is not None else ():
            self._put_back(request)
        for request in [request for generator, request in self._answered.values() if generator == station]:
            del self._answered[request.slot]  # the answer may have been lost with it
            self._put_back(request)
        for slot in [slot for slot, asked in self._latest.items() if asked.simulator == station]:
            del self._latest[slot]
            self._waiting.pop(slot, None)

    def _put_back(self, request: Request) -> None:
        """Unanswered, so it waits again; unless its slot is gone, or went on with an answer that nobody reported."""
        asked = self._latest.get(request.slot)
        if asked is not None and asked.reply_to == request.reply_to:
            self._waiting[request.slot] = QueuedRequest(request.arrived, asked)

    def _asked(self, now: float, event: RequestArrived) -> None:
        self._latest[event.slot] = event
        self._answered.pop(event.slot, None)
        self._waiting[event.slot] = QueuedRequest(now, event)

    def _batch_done(self, now: float, event: BatchDone) -> None:
        seat = self._seats[event.generator]
        batch, seat.began = seat.serving.pop(0).batch, now
        if batch.number != event.batch:
            raise Violation(f"at {now} {batch} is under way, but there is {event}")
        for request in batch.requests:
            asked = self._latest.get(request.slot)
            if asked is not None and asked.reply_to == request.reply_to:
                self._answered[request.slot] = (event.generator, request)

    def _stream_done(self, now: float, event: StreamDone) -> None:
        seat = self._seats[event.generator]
        stream = seat.streams.pop(event.stream)
        asked = self._latest.get(stream.request.slot)
        wanted = event.stream not in seat.aborted
        seat.aborted.discard(event.stream)
        if event.aborted and wanted:
            raise Violation(f"at {now} nobody told {event.generator} to abort {stream}")
        if wanted and asked is not None and asked.reply_to == stream.request.reply_to:
            self._answered[stream.request.slot] = (event.generator, stream.request)

    def _applied(self, _now: float, event: WeightsApplied) -> None:
        seat = self._seats[event.generator]
        if event.pinned:
            seat.pinning = False
        else:
            seat.version, seat.applying = event.version, False

    def _updated(self, now: float, _event: UpdateDone) -> None:
        lent, self._lent = self._lent, []
        if not lent or lent[-1].more:
            raise Violation(f"at {now} an update is done that was not lent whole: {lent}")
        tickets = [ticket for part in lent for ticket in part.tickets]
        twice = self._trained.intersection(tickets)
        if twice:
            raise Violation(f"at {now} these tickets are trained twice: {sorted(twice)}")
        self._trained.update(tickets)
        self._lags.extend(self._lent_lags)

    # ------------------------------------------------------------ commands

    def _serve(self, now: float, command: Serve) -> None:
        seat = self._seats[command.generator]
        if seat.applying or (seat.serving and not self._may_wait(command)):
            raise Violation(f"at {now} {command.generator} is busy and gets {command}")
        if not seat.serving:
            seat.began = now
        seat.serving.append(command)
        for request in command.batch.requests:
            self._leave_queue(now, request.slot, request.sequence, command)

    def _start_stream(self, now: float, command: StartStream) -> None:
        seat, stream = self._seats[command.generator], command.stream
        request, places = stream.request, self._settings.max_rows
        held = seat.rows(pinned=stream.pinned)
        if seat.applying or (held and held + request.rows > places) or stream.number in seat.streams:
            raise Violation(f"at {now} {command.generator} has no place for {command}: {seat}")
        seat.streams[stream.number] = stream
        self._leave_queue(now, request.slot, request.sequence, command)

    def _abort(self, now: float, command: AbortStream) -> None:
        seat = self._seats[command.generator]
        if command.stream not in seat.streams or command.stream in seat.aborted:
            raise Violation(f"at {now} no such stream is under way: {command}")
        seat.aborted.add(command.stream)
        request = seat.streams[command.stream].request
        asked = self._latest.get(request.slot)
        if asked is not None and asked.reply_to == request.reply_to:  # its slot lives, and has to be told
            self._waiting[request.slot] = QueuedRequest(now, asked)

    def _refuse(self, now: float, command: RefuseRequest) -> None:
        self._leave_queue(now, command.slot, command.sequence, command)

    def _leave_queue(self, now: float, slot: str, sequence: int, command: Command) -> None:
        waiting = self._waiting.pop(slot, None)
        if waiting is None or waiting.asked.sequence != sequence:
            raise Violation(f"at {now} request {sequence} of {slot} does not wait: {command}")

    def _apply(self, now: float, command: ApplyWeights) -> None:
        seat = self._seats[command.generator]
        if command.pinned:
            if seat.pinning:
                raise Violation(f"at {now} {command.generator} takes weights for evaluation already: {command}")
            seat.pinning = True
            return
        if seat.serving or seat.applying:
            raise Violation(f"at {now} {command.generator} is busy and gets {command}")
        seat.applying = True

    def _lend(self, now: float, command: StartUpdate) -> None:
        before, size = self._lent, self._settings.batch_size
        lags = [command.version - self._cluster.driver.payloads[number].oldest for number in command.payload_ids]
        self._lent_lags = [*(self._lent_lags if before else ()), *lags]
        if before and (command.update, command.version) != (before[0].update, before[0].version):
            raise Violation(f"at {now} {command} is lent while {before[0]} is under way")
        self._lent = [*before, command]
        tickets = [ticket for part in self._lent for ticket in part.tickets]
        if (len(tickets) < size) != command.more or len(tickets) > size or len(set(tickets)) != len(tickets):
            raise Violation(f"at {now} an update has not {size} different samples: {self._lent}")
        if command.more and not self._settings.parts:
            raise Violation(f"at {now} an update is lent in parts: {command}")
        if self._settings.bound == "sample" and max(lags) > ceil(self._settings.max_lag):
            raise Violation(f"at {now} the lags {lags} exceed {self._settings.max_lag}: {command}")

    # ------------------------------------------------------------ batches

    def _check_idle(self, now: float, event: Event) -> None:
        settings, tuning = self._settings, self._conductor.serving.tuning
        limits = settings if tuning is None else tuning.limits
        if settings.batching == "lockstep" or settings.routing != "least_loaded":
            return
        waiting = self._for_training()
        if not waiting:
            return
        able = self._able(waiting)
        if settings.batching == "streams":
            first = min(waiting, key=lambda w: w.arrived)
            earliest = [w.asked.rows for w in waiting if w.arrived == first.arrived]
            rows = {name: self._seats[name].rows() for name in able}
            open_to = [name for name, held in rows.items() if not held or held + max(earliest) <= settings.max_rows]
            if open_to:
                raise Violation(f"at {now} {open_to} have places although {first} waits: {event}")
            return
        oldest = min(w.arrived for w in waiting)
        full = self._full(waiting)
        if able and (full or now >= oldest + limits.max_wait_s):
            raise Violation(f"at {now} {able} idle although {len(waiting)} requests since {oldest} are due: {event}")
        if full and (room := self._with_room()):
            raise Violation(f"at {now} no batch waits at {room} although {len(waiting)} requests are one: {event}")

    def _for_training(self) -> list[QueuedRequest]:
        return [w for slot, w in self._waiting.items() if slot not in self._evaluations.reserved]

    def _full(self, waiting: list[QueuedRequest]) -> bool:
        tuning = self._conductor.serving.tuning
        limits = self._settings if tuning is None else tuning.limits
        return sum(w.asked.rows for w in waiting) >= limits.max_rows or len(waiting) >= limits.max_requests

    def _able(self, waiting: list[QueuedRequest]) -> list[str]:
        """Generators that could begin with what waits."""
        newest = max(w.asked.version for w in waiting)
        able = [n for n, s in self._seats.items() if not s.serving and not s.applying and s.version >= newest]
        return [name for name in able if self._on_devices(name) and name not in self._conductor.serving.generators.off]

    def _on_devices(self, name: str) -> bool:
        if self.leases is None:
            return True
        leased = self._conductor.delivery.leases.present
        return self.leases.present(name) and not (name in leased and leased[name].leaving)

    def _with_room(self) -> list[str]:
        """Generators behind whose passes a full batch has to wait, the one whose pass began first, first."""
        evaluator = self._settings.evaluator if self._conductor.serving.background else ""
        found = [
            name
            for name, seat in self._seats.items()
            if self._settings.batching == "dynamic" and seat.depth == 2 and len(seat.serving) == 1
            if not seat.serving[0].batch.pinned and seat.version >= self._published and name != evaluator
            if self._on_devices(name) and name not in self._conductor.serving.generators.off
        ]
        return sorted(found, key=lambda name: (self._seats[name].began, name))

    def _may_wait(self, command: Serve) -> bool:
        """Whether the batch may wait behind a pass of its generator."""
        waiting, room = self._for_training(), self._with_room()
        if command.batch.pinned or command.generator not in room or not self._full(waiting):
            return False
        return self._settings.routing != "least_loaded" or (command.generator == room[0] and not self._able(waiting))

    _EVENTS: ClassVar[dict[type, Callable[..., None]]] = {
        SimulatorJoined: _simulator,
        GeneratorJoined: _generator,
        **dict.fromkeys((Published, WeightsOffered), _new_version),
        StationLost: _lost,
        RequestArrived: _asked,
        BatchDone: _batch_done,
        StreamDone: _stream_done,
        WeightsApplied: _applied,
        UpdateDone: _updated,
        TrainerJoined: _trainer,
    }
    _COMMANDS: ClassVar[dict[type, Callable[..., None]]] = {
        Serve: _serve,
        StartStream: _start_stream,
        AbortStream: _abort,
        RefuseRequest: _refuse,
        ApplyWeights: _apply,
        StartUpdate: _lend,
    }


def check_target_reached(cluster: VirtualCluster, conductor: AnyConductor, watch: GuaranteeChecker) -> None:
    """Run the cluster; raise unless it reaches its versions with every guarantee, each sample accounted for."""
    cluster.run()
    watch.finish()
    assert cluster.driver.reached >= cluster.settings.versions
    assert cluster.driver.evaluating == set()
    assert conductor.ledger.imbalance == 0
    if all(fault.station != "trainer" for fault in cluster.settings.faults):
        assert conductor.ledger.trained == cluster.settings.versions * cluster.settings.scheduler.version_samples
