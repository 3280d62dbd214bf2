"""Guarantees 1-4, 6 and 10 over random clusters of any episode lengths, stations, delays, groups, K, α and faults, with
background evaluations, evaluations during a pause of training, or none.

`GuaranteeChecker` raises at the event that breaks a guarantee; the driver raises `Deadlock` when nothing can happen.
A failing cluster is printed by hypothesis as a seed for `arbitrary_cluster`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_cluster
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached
from tests.oracles.replay import first_difference

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import FREE
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings, SimulatorGroup
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import (
    Command,
    Episode,
    Evaluate,
    EvaluationDone,
    Event,
    PayloadsLost,
    ReleasePayloads,
    SampleEvaluated,
    SampleFinished,
    Serve,
    StartRows,
    StartUpdate,
    Wake,
)
from polyrhythm.scheduler.samples.groups import SampleState

randoms = st.randoms(use_true_random=False)
examples = settings(max_examples=tries(50, 150), deadline=None, suppress_health_check=list(HealthCheck))
few_examples = settings(examples, max_examples=tries(13, 40))


def watched(cluster_settings: ClusterSettings) -> tuple[VirtualCluster, AnyConductor, GuaranteeChecker]:
    conductor = build_conductor(cluster_settings.scheduler)
    cluster = VirtualCluster(cluster_settings, conductor, record=True)
    return cluster, conductor, GuaranteeChecker(cluster, conductor)


@examples
@given(randoms)
def test_every_target_is_reached_and_no_guarantee_is_broken_on_the_way(rng: random.Random) -> None:
    _reaches_its_target(arbitrary_cluster(rng))


@pytest.mark.slow
@settings(examples, max_examples=tries(20, 60))
@given(randoms)
def test_so_is_it_with_more_groups_and_members_than_are_needed(rng: random.Random) -> None:
    cluster_settings = arbitrary_cluster(rng, redundant=True)
    conductor = _reaches_its_target(cluster_settings)
    selection = conductor.rollout.selection
    surplus = selection.released.samples + selection.cancelled.samples + selection.waiting
    assert conductor.ledger.dropped.get("surplus", 0) == surplus
    assert selection.trained.samples == conductor.ledger.trained + conductor.ledger.rolled_back
    if all(fault.station != "trainer" for fault in cluster_settings.faults):  # a rollback leaves groups that are late
        assert conductor.rollout.admission.spare == [], "nobody's place is left to take"


@settings(examples, max_examples=tries(13, 40))
@given(randoms)
def test_samples_of_lost_hosts_run_again_under_their_numbers(rng: random.Random) -> None:
    """At random times some of the finished samples that wait are lost."""
    cluster, conductor, watch = watched(arbitrary_cluster(rng, redundant=rng.random() < 0.3))

    def lose(_: object) -> None:
        waiting = [s.payload_id for s in conductor.rollout.samples.values() if s.state is SampleState.BUFFERED]
        cluster.driver.submit(PayloadsLost("far", tuple(rng.sample(waiting, rng.randint(0, len(waiting))))))

    for _ in range(rng.randint(1, 6)):
        cluster.driver.clock.at(rng.uniform(0.0, 0.5), lose, None)
    check_target_reached(cluster, conductor, watch)
    lost, granted, finished = set[int](), Counter[int](), dict[str, int]()
    for step in cluster.driver.steps:
        if isinstance(step.event, SampleFinished):
            finished[step.event.payload_id] = step.event.ticket
        released = {p for command in step.commands if isinstance(command, ReleasePayloads) for p in command.payload_ids}
        if isinstance(step.event, PayloadsLost):
            lost |= {finished[payload_id] for payload_id in released.intersection(step.event.payload_ids)}
        starts = [command for command in step.commands if isinstance(command, StartRows)]
        granted.update(grant.ticket.number for command in starts for grant in command.grants)
    waiting = {n for n, s in conductor.rollout.samples.items() if s.state is SampleState.REISSUING}
    if not conductor.ledger.dropped_total:
        assert all(granted[number] > 1 for number in lost - waiting)


def _reaches_its_target(cluster_settings: ClusterSettings) -> AnyConductor:
    cluster, conductor, watch = watched(cluster_settings)
    check_target_reached(cluster, conductor, watch)
    return conductor


@few_examples
@given(randoms)
def test_an_evaluation_in_the_middle_gets_every_episode_and_holds_one_version(rng: random.Random) -> None:
    cluster_settings = arbitrary_cluster(rng, redundant=rng.random() < 0.5)
    cluster, _, watch = watched(cluster_settings)
    wanted = rng.randint(1, 12)
    episodes = tuple(Episode(task=0, instruction=0, seed=seed, greedy=True) for seed in range(wanted))
    evaluation = Evaluate("first", episodes)
    cluster.driver.clock.at(rng.choice((0.0, 0.03, 0.08, 0.15)), cluster.driver.submit, evaluation)
    cluster.run()
    watch.finish()
    commands = [command for step in cluster.driver.steps for command in step.commands]
    assume(any(step.event == evaluation for step in cluster.driver.steps))
    (done,) = [command for command in commands if isinstance(command, EvaluationDone) and command.name == "first"]
    results = [command for command in commands if isinstance(command, SampleEvaluated) and command.name == "first"]
    assert done.finished + done.dropped == wanted
    assert len(results) == done.finished
    assert len({result.version for result in results}) <= 1


@settings(examples, max_examples=tries(13, 40))
@given(randoms)
def test_training_in_lockstep_takes_the_same_course_with_and_without_background_evaluations(rng: random.Random) -> None:
    with_them = _lockstep(arbitrary_cluster(rng))
    assume(with_them.evaluations and with_them.scheduler.evaluator_only)
    assert _course(with_them) == _course(with_them.model_copy(update={"evaluations": ()}))


def _lockstep(base: ClusterSettings) -> ClusterSettings:
    """The cluster without faults, at lag 0, with background evaluations alone, in simulators of their own.

    A second copy of the weights delays its generator by the passes that it gives to evaluations, so what happens at the
    same time otherwise may not: the shadow conductor of `watched` holds for that case what can be held.
    """
    scheduler = replace(base.scheduler, batching="lockstep", parts=False, max_lag=0.0, on_update="drain")
    return base.model_copy(
        update={
            "scheduler": scheduler,
            "simulators": tuple(part for group in base.simulators for part in _parted(group)),
            "evaluations": tuple(asked for asked in base.evaluations if asked.background),
            "faults": (),
            "message_delay": FREE,
        }
    )


def _parted(group: SimulatorGroup) -> list[SimulatorGroup]:
    """Its simulators without the reserved env batches, and one with these: stations draw what their work costs."""
    sizes = ((group.count, group.env_batches - group.reserved, 0), (1, group.reserved, group.reserved))
    return [
        group.model_copy(update={"count": count, "env_batches": batches, "reserved": reserved})
        for count, batches, reserved in sizes
        if batches
    ]


def _course(cluster_settings: ClusterSettings) -> tuple[list[object], list[object], list[object]]:
    """Training's tickets with their places, its batches with their requests in order, and its updates."""
    cluster, _, watch = watched(cluster_settings)
    cluster.run()
    watch.finish()
    tickets: list[object] = []
    batches: list[object] = []
    updates: list[object] = []
    for command in (command for step in cluster.driver.steps for command in step.commands):
        if isinstance(command, StartRows):
            granted = [grant for grant in command.grants if not grant.ticket.evaluation]
            tickets += [(command.slot, grant.row, grant.ticket) for grant in granted]
        elif isinstance(command, Serve) and not command.batch.pinned:
            asked = [(request.slot, request.sequence, request.rows) for request in command.batch.requests]
            batches.append((command.generator, asked))
        elif isinstance(command, StartUpdate):
            updates.append((command.update, command.version, command.tickets))
    return tickets, batches, updates


class Settled:
    """Asserts after every event that a second look at the same moment finds nothing to do, unless a timer is due."""

    def __init__(self, conductor: AnyConductor) -> None:
        self._conductor, self.deadline = conductor, conductor.deadline

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = self._conductor.handle(event, now)
        if self.deadline() > now:
            left = self._conductor.handle(Wake(), now)
            assert not left, f"after {event} at {now} only another event starts {left}"
        return commands


@settings(examples, max_examples=tries(40, 120))
@given(randoms)
def test_nothing_that_can_start_waits_for_another_event(rng: random.Random) -> None:
    """Evaluations come at any time, several at once, and some of their episodes are set aside by then."""
    base = arbitrary_cluster(rng, redundant=rng.random() < 0.3)
    broken = rng.choice((0.0, 0.3, 0.6))
    cluster_settings = base.model_copy(
        update={
            "scheduler": replace(base.scheduler, quarantine_after=rng.choice((0, 1, 2))),
            "simulators": tuple(group.model_copy(update={"broken": broken}) for group in base.simulators),
        }
    )
    cluster = VirtualCluster(cluster_settings, Settled(build_conductor(cluster_settings.scheduler)), record=True)
    asked = []
    for number in range(rng.randint(2, 6)):
        seeds = [rng.randint(0, 3) for _ in range(rng.randint(0, 4))]
        asked.append(Evaluate(f"asked {number}", tuple(Episode(0, 0, seed, greedy=True) for seed in seeds)))
        cluster.driver.clock.at(rng.choice((0.0, 0.03, 0.03, 0.15)), cluster.driver.submit, asked[-1])
    cluster.run()
    heard = [step.event for step in cluster.driver.steps]
    commands = [command for step in cluster.driver.steps for command in step.commands]
    done = [command.name for command in commands if isinstance(command, EvaluationDone)]
    assert all(done.count(each.name) == 1 for each in asked if each in heard)


class Resumed:
    """A conductor that is saved and restored, through JSON, before its n-th event."""

    def __init__(self, conductor: AnyConductor, before: int) -> None:
        self.conductor = conductor
        self.left = before

    def handle(self, event: Event, now: float) -> list[Command]:
        self.left -= 1
        if self.left == 0:
            saved = json.loads(json.dumps(self.conductor.save()))
            self.conductor = restore_conductor(self.conductor.settings, saved)
        return self.conductor.handle(event, now)

    def deadline(self) -> float | None:
        return self.conductor.deadline()


def check_restored(cluster_settings: ClusterSettings, rng: random.Random) -> None:
    """A conductor that is saved and restored at any event of a run decides as the one that was not."""
    cluster = VirtualCluster(cluster_settings, record=True)
    cluster.run()
    before = rng.randint(1, len(cluster.driver.steps))
    resumed = Resumed(build_conductor(cluster_settings.scheduler), before)
    assert first_difference(resumed, cluster.driver.steps) is None


@few_examples
@given(randoms)
def test_a_restored_conductor_decides_as_the_saved_one_would_have(rng: random.Random) -> None:
    check_restored(arbitrary_cluster(rng, redundant=rng.random() < 0.5), rng)


@pytest.mark.slow
@few_examples
@given(randoms)
def test_the_same_seed_gives_the_same_run_and_another_conductor_the_same_commands(rng: random.Random) -> None:
    cluster_settings = arbitrary_cluster(rng, redundant=rng.random() < 0.5)
    first, second = VirtualCluster(cluster_settings, record=True), VirtualCluster(cluster_settings, record=True)
    first.run()
    second.run()
    assert first.driver.steps == second.driver.steps
    assert first_difference(build_conductor(cluster_settings.scheduler), first.driver.steps) is None


@settings(examples, max_examples=tries(8, 20))
@given(randoms, st.floats(0, 4), st.integers(1, 4))
def test_pacing_keeps_the_mean_lag_within_any_real_alpha(rng: random.Random, max_lag: float, interval: int) -> None:
    base = arbitrary_cluster(rng)
    scheduler = replace(base.scheduler, max_lag=max_lag, sync_interval=interval, bound="mean", max_attempts=1_000)
    cluster, _, watch = watched(base.model_copy(update={"scheduler": scheduler, "faults": ()}))
    cluster.run()
    watch.finish()
