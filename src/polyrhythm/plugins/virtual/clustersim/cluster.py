"""Builds the cluster that the settings describe, injects the planned faults, and restarts lost stations.

A station that dies or hangs stops sending; on detection the conductor gets `StationLost`, and after the restart the
next incarnation joins. A trainer resumes from the last checkpoint that the conductor knows of.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.costs import ScaledCost
from polyrhythm.plugins.virtual.clustersim.driver import ConductorCpu, Decider, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.generator import VirtualGenerator, VirtualStreamGenerator
from polyrhythm.plugins.virtual.clustersim.hardware import Device, Network
from polyrhythm.plugins.virtual.clustersim.measures import Measures
from polyrhythm.plugins.virtual.clustersim.settings import (
    ClusterSettings,
    FaultPlan,
    GeneratorGroup,
    ScorerGroup,
    SimulatorGroup,
    StationGroup,
    TrainerSettings,
)
from polyrhythm.plugins.virtual.clustersim.simulator import VirtualSimulator
from polyrhythm.plugins.virtual.clustersim.station import VirtualLease, VirtualScorer, VirtualStation
from polyrhythm.plugins.virtual.clustersim.trainer import VirtualTrainer
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import JOINED, Checkpointed, Episode, Evaluate, Event, StationLost, sender_name


@dataclass(slots=True)
class Member:
    """A station over all its incarnations. incarnation: the latest; up: it is alive; failed_at: its last failure."""

    name: str
    group: StationGroup
    devices: tuple[int, ...] = ()
    incarnation: int = -1
    up: bool = False
    failed_at: float = 0.0


class VirtualCluster:
    """The stations, faults and driver of one simulation. conductor: the one to drive; by default a fresh one for the
    settings. record: keep the decisions in `driver.steps`."""

    def __init__(self, settings: ClusterSettings, conductor: Decider | None = None, record: bool = False) -> None:
        self.settings = settings
        self.conductor = build_conductor(settings.scheduler) if conductor is None else conductor
        self.driver = VirtualDriver(self.conductor, settings.seed, settings.message_delay, record)
        self._connect()
        self.driver.delivered = self._on_event
        self.driver.scored = bool(settings.scorers)
        self.stations: dict[str, VirtualStation] = {}
        self.members = {name: Member(name, self._changing(group), devices) for name, group, devices in settings.seats()}
        numbers = sorted({number for member in self.members.values() for number in member.devices})
        exclusive, switching = settings.sharing in ("exclusive", "thread"), settings.switching
        self.devices = {n: Device(self.driver.clock, exclusive=exclusive, switching=switching) for n in numbers}
        if settings.sharing == "thread":
            self.driver.threads = tuple(self.devices.values())
        self._rng = random.Random(f"{settings.seed}/faults")
        self.checkpoint = 0
        for member in self.members.values():
            self.start(member)
        for fault in settings.faults:
            self.driver.clock.at(fault.at, self.fail, fault)
        for index, asked in enumerate(settings.evaluations):
            episodes = tuple(Episode(task=0, instruction=0, seed=i, greedy=True) for i in range(asked.episodes))
            evaluate = Evaluate(f"evaluation-{index}", episodes, asked.background)
            self.driver.clock.at(asked.at, self.driver.submit, evaluate)

    def _changing(self, group: StationGroup) -> StationGroup:
        """The group with costs that change when the settings say."""

        def factor(cost: str) -> float:
            now = self.driver.clock.now
            passed = [change for change in self.settings.changes if change.cost == cost and change.at <= now]
            return max(passed, key=lambda change: change.at).times if passed else 1.0

        planned = sorted({change.cost for change in self.settings.changes} & type(group).model_fields.keys())
        costs = {name: getattr(group, name) for name in planned}
        return group.model_copy(
            update={
                name: ScaledCost(cost.base, cost.per_unit, factor=partial(factor, name)) for name, cost in costs.items()
            }
        )

    def _connect(self) -> None:
        links, conductor, driver = self.settings.links, self.settings.conductor, self.driver
        if links is not None:
            trainer = self.settings.trainer.host_names[0]
            driver.connect(
                Network(
                    driver.clock,
                    links.latency,
                    links.gb_per_s * 1e9,
                    observation=round(links.observation_mb * 1e6),
                    sample=round(links.sample_mb * 1e6),
                    weights=round(links.weights_gb * 1e9),
                    fan_out=links.fan_out,
                    main=links.main or trainer,
                    trainer=trainer,
                )
            )
        if conductor is not None:
            driver.cpu = ConductorCpu(driver, conductor.event, beside=conductor.serving == "beside")

    def run(self) -> None:
        """Run until `versions` is reached and all evaluations have ended, a halt, or `max_time`."""
        self.driver.submit(records.TrainUntil(self.settings.versions))
        self.driver.run(self.settings.versions, self.settings.max_time or inf)
        for number, device in self.devices.items():
            device.flush()
            self.driver.measures.devices[number] = device.busy
        for name, station in self.stations.items():
            if self.members[name].up:
                station.flush()
            else:
                self._count_down(self.members[name])

    def start(self, member: Member) -> None:
        member.incarnation += 1
        member.up = True
        station = self.incarnation(member)
        station.places = tuple((self.devices[number], member.group.occupies) for number in member.devices)
        station.leases = self._leases(member)
        self.stations[member.name] = station
        if isinstance(station, VirtualSimulator):
            self.driver.simulators[member.name] = station
        station.join()
        if member.group.mean_life > 0:
            life = self._rng.expovariate(1 / member.group.mean_life)
            fault = FaultPlan(station=member.name, at=self.driver.clock.now + life)
            self.driver.clock.at(fault.at, self.fail, fault)

    def _leases(self, member: Member) -> dict[int, VirtualLease]:
        """Leases of a station that has just been started, off all of its devices."""
        rules = self.settings.scheduler.lease
        numbers = () if rules is None else rules.devices.get(member.name, ())
        seconds = member.group.resident_gb / self.settings.lease.host_gb_per_s
        size = round(member.group.resident_gb * 1e9)
        return {number: VirtualLease(self.devices[number], seconds, size) for number in numbers}

    def incarnation(self, member: Member) -> VirtualStation:
        name, incarnation, group = member.name, member.incarnation, member.group
        if isinstance(group, SimulatorGroup):
            return VirtualSimulator(name, incarnation, self.driver, group)
        if isinstance(group, GeneratorGroup):
            if self.settings.scheduler.batching == "streams":
                resumes = self.settings.scheduler.on_update == "abort"
                return VirtualStreamGenerator(name, incarnation, self.driver, group, resumes=resumes)
            return VirtualGenerator(name, incarnation, self.driver, group)
        if isinstance(group, ScorerGroup):
            hung = FaultPlan(station=name, at=0.0, kind="hangs", detected=0.0)
            return VirtualScorer(name, incarnation, self.driver, group, lambda: self.fail(hung))
        assert isinstance(group, TrainerSettings)
        receivers = sum(each.count for each in self.settings.generators)
        return VirtualTrainer(name, incarnation, self.driver, group, self.checkpoint, receivers=receivers)

    def fail(self, fault: FaultPlan) -> None:
        """Fail the station, unless it is down already. Its latest messages may be lost."""
        member, driver = self.members[fault.station], self.driver
        if not member.up:
            return
        station = self.stations[member.name]
        if fault.after_reply and isinstance(station, VirtualTrainer) and station.fail_unheard is None:
            station.fail_unheard = lambda: self.fail(fault)
            return
        member.up = False
        now = driver.clock.now
        member.failed_at = now
        if fault.after_reply:
            station.answer_and_fall_silent()
        station.cut = now - self._rng.random() * 2 * self.settings.message_delay.mean()
        station.close()
        driver.measures.lost += 1
        detected = member.group.detected if fault.detected is None else fault.detected
        driver.clock.after(detected, self._detect, (member, fault))

    def _detect(self, failure: tuple[Member, FaultPlan]) -> None:
        member, fault = failure
        station = self.stations[member.name]
        station.lost()
        self.driver.report(station, StationLost(member.name, member.incarnation, fault.kind))
        restart = member.group.restart if fault.restart is None else fault.restart
        self.driver.clock.after(restart, self._restart, member)

    def _restart(self, member: Member) -> None:
        self._count_down(member)
        self.start(member)

    def _count_down(self, member: Member) -> None:
        now = self.driver.clock.now
        down, kind = self.driver.measures.down, member.group.kind
        down[kind] = down.get(kind, 0.0) + now - member.failed_at
        member.failed_at = now

    def _on_event(self, event: Event) -> None:
        """Track joins, which select who gets commands, and checkpoints, from which a trainer restarts."""
        if type(event) in JOINED:
            station = self.stations[sender_name(event)]
            if station.name not in self.driver.stations or station.incarnation == event.incarnation:  # type: ignore[union-attr]
                self.driver.stations[station.name] = station
        elif type(event) is Checkpointed:
            self.checkpoint = event.updates


def summarise(
    driver: VirtualDriver, ledger: dict[str, Any], gpus: float = 0.0, groups: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Summary of the run so far. ledger: the conductor's; groups: its `RolloutScheduler.summary`."""
    now, measures = driver.clock.now, driver.measures
    return {
        "virtual_s": now,
        "versions": driver.reached,
        "halted": driver.halted,
        "gpus": gpus,
        "events": driver.events,
        "throughput": _throughput(measures, now),
        "utilisation": {
            kind: busy.meter.value(now) for kind, busy in measures.busy.items() if driver.scored or kind != "scorer"
        },
        "time": {name: _shares(seconds) for name, seconds in measures.states.items()},
        "devices": {str(number): seconds / (now or 1.0) for number, seconds in measures.devices.items()},
        "switches": {"count": measures.switches, "s": measures.switching, "bytes": measures.switched_bytes},
        "publishing_s": measures.publishing,
        "down_s": dict(measures.down),
        "stations_lost": measures.lost,
        "requests": _requests(measures, now),
        "lag": _lag(measures),
        **({"links": driver.network.summary()} if driver.network else {}),
        **({"conductor": driver.cpu.summary()} if driver.cpu else {}),
        **({"scoring": {"scored": measures.scored, "failed": measures.scoring_failed}} if driver.scored else {}),
        "evaluations": {"episodes": measures.evaluated, "dropped": measures.evaluations_dropped},
        "ledger": ledger,
        "groups": groups or {},
    }


def _throughput(measures: Measures, now: float) -> dict[str, float]:
    """transitions: primitive env steps of active rows; trained_transitions: of completed updates. tokens: in answers
    that reached their slots; tokens_aborted: of aborted streams."""
    seconds = now or 1.0
    return {
        "transitions": measures.transitions,
        "transitions_per_s": measures.transitions / seconds,
        "chunk_steps": measures.chunk_steps,
        "chunk_steps_per_s": measures.chunk_steps / seconds,
        "tokens": measures.tokens,
        "tokens_per_s": measures.tokens / seconds,
        "tokens_aborted": measures.tokens_aborted,
        "samples": measures.samples,
        "trained_samples": measures.trained_samples,
        "trained_samples_per_s": measures.trained_samples / seconds,
        "trained_transitions": measures.trained_transitions,
        "trained_transitions_per_s": measures.trained_transitions / seconds,
        "updates": measures.updates,
    }


def _shares(states: Mapping[str, float]) -> dict[str, dict[str, float]]:
    total = sum(states.values()) or 1.0
    return {state: {"s": seconds, "share": seconds / total} for state, seconds in states.items()}


def _requests(measures: Measures, now: float) -> dict[str, float]:
    """waiting_mean: mean number in the queue; wait_s: mean time from arrival to the batch. Little's law ties them.
    local: share of the rows that were served on their host."""
    return {
        "arrived": measures.requests,
        "served": measures.requests_served,
        "batches": measures.batches,
        "rows_per_batch": measures.rows_served / max(1, measures.batches),
        "waiting_mean": measures.waiting.integral(now) / (now or 1.0),
        "local": measures.rows_local / max(1, measures.rows_served),
        "wait_s": measures.waited / max(1, measures.requests_served),
    }


def _lag(measures: Measures) -> dict[str, Any]:
    """histogram: lag → samples trained on; updates_mean, updates_max: lag in updates."""
    count = sum(measures.lags.values())
    since = measures.updates_since
    return {
        "histogram": {str(lag): samples for lag, samples in sorted(measures.lags.items())},
        "mean": sum(lag * samples for lag, samples in measures.lags.items()) / max(1, count),
        "max": max(measures.lags, default=0),
        "updates_mean": sum(lag * samples for lag, samples in since.items()) / max(1, count),
        "updates_max": max(since, default=0),
    }
