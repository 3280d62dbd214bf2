"""Generators that are switched off and on, an α below the setting's, other micro-batches, and leased devices that are
shared and leased again, at any time: every guarantee holds."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_cluster, arbitrary_scored, arbitrary_streams
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached
from tests.plugins.lease.test_simulated import leased
from tests.plugins.virtual.clustersim.clusters import settings as small
from tests.scheduler.test_conductor import Script

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.lease.conductor import LeasedConductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.conductor import SERVING_EVENTS, AnyConductor, Conductor
from polyrhythm.scheduler.records import (
    ApplyWeights,
    Command,
    Event,
    RequestArrived,
    Serve,
    StartRows,
    StationLost,
    TrainUntil,
    Wake,
)

examples = settings(max_examples=tries(10, 30), deadline=None, suppress_health_check=list(HealthCheck))


class OperatedAtRandom:
    """A conductor whose operation changes before a share of its events outside `SERVING_EVENTS`; the oracles take a
    change to be in force at once."""

    def __init__(self, outer: AnyConductor, names: list[str], rng: random.Random, share: float) -> None:
        self.outer, self._names, self._rng, self._share = outer, names, rng, share
        self._inner = outer.inner if isinstance(outer, LeasedConductor) else outer
        self.changes = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        rng, most = self._rng, self.outer.settings.max_lag
        if type(event) not in SERVING_EVENTS and rng.random() < self._share:
            off = sorted(name for name in self._names if rng.random() < 0.5)
            assert isinstance(self._inner, Conductor)
            self._inner.operate(tuple(off), rng.choice((0.0, 0.3, 1.0, 9.0)) * most, rng.choice((0, 3)))
            self.outer.share_devices(together=rng.random() < 0.5)
            self.changes += 1
        return self.outer.handle(event, now)

    def deadline(self) -> float:
        return self.outer.deadline()


def without_evaluator(base: ClusterSettings) -> ClusterSettings:
    """The cluster without background evaluations, whose shadow (`oracles/shadow`) knows no changes."""
    scheduler = replace(base.scheduler, evaluator="", evaluator_only=False, evaluation_priority="turns")
    groups = tuple(group.model_copy(update={"reserved": 0}) for group in base.simulators)
    evaluations = tuple(asked for asked in base.evaluations if not asked.background)
    return base.model_copy(update={"scheduler": scheduler, "simulators": groups, "evaluations": evaluations})


@examples
@given(st.randoms(use_true_random=False))
def test_changes_at_any_time_lose_nothing_and_break_no_guarantee(rng: random.Random) -> None:
    kind = rng.choice((arbitrary_cluster, arbitrary_cluster, arbitrary_streams, arbitrary_scored, None))
    base = leased(rng, arbitrary_cluster(rng)) if kind is None else kind(rng)
    base = without_evaluator(base)
    conductor = build_conductor(base.scheduler)
    names = [name for name in base.station_names() if name.startswith("generator-")]
    operated = OperatedAtRandom(conductor, names, rng, rng.choice((0.02, 0.2, 1.0)))
    cluster = VirtualCluster(base, operated)
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))


def test_fifty_faults_during_changes_lose_nothing() -> None:
    stations = ("simulator-0", "simulator-1", "generator-0", "generator-1", "generator-2")
    rng = random.Random(0)
    base = small(
        scheduler={"batch_size": 8, "max_lag": 2.0, "on_update": "continue", "max_dropped": 0, "max_attempts": 60},
        simulators={"count": 2, "env_batches": 2, "slots": 2, "rows": 2, "detected": "20ms", "restart": "60ms"},
        generators={"count": 3, "detected": "20ms", "restart": "60ms"},
        versions=80,
        faults=[
            {"station": rng.choice(stations), "at": 0.2 * turn, "kind": rng.choice(("dies", "hangs"))}
            for turn in range(1, 51)
        ],
    )
    conductor = build_conductor(base.scheduler)
    operated = OperatedAtRandom(conductor, ["generator-0", "generator-1", "generator-2"], rng, 0.1)
    cluster = VirtualCluster(base, operated)
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))
    assert operated.changes > 100
    assert cluster.driver.measures.lost == 50
    assert conductor.ledger.dropped_total == 0


def test_a_request_of_a_generator_that_is_about_to_go_off_is_served_by_another() -> None:
    """Slot 1 belongs to g1, which is live until an event changes more than requests."""
    script = Script(generators=2, slots=4, max_lag=9, routing="fixed")
    assert isinstance(script.conductor, Conductor)
    script.conductor.operate(("g1",), 9.0)
    assert script.ask("s1") == []
    script.finish(0)
    script.now = 2.0
    (serve,) = script.say(Wake())
    assert isinstance(serve, Serve)
    assert (serve.generator, [request.slot for request in serve.batch.requests]) == ("g0", ["s1"])


@pytest.mark.parametrize("routing", ["fixed", "affinity"])
@pytest.mark.parametrize("before", range(10, 34, 4))
def test_a_change_between_two_requests_leaves_none_behind(routing: str, before: int) -> None:
    base = small(
        scheduler={"batch_size": 4, "routing": routing, "on_update": "continue", "max_lag": 1.0},
        simulators={"env_batches": 4, "step": "lognormal:10ms:0.3", "steps": 8},
        generators={"count": 2},
    )
    conductor = build_conductor(base.scheduler)
    assert isinstance(conductor, Conductor)
    left = [before]

    class Operated(OperatedAtRandom):
        def handle(self, event: Event, now: float) -> list[Command]:
            left[0] -= isinstance(event, RequestArrived)
            if isinstance(event, RequestArrived) and not left[0]:
                conductor.operate(("generator-1",), 1.0)
            return conductor.handle(event, now)

    cluster = VirtualCluster(base, Operated(conductor, [], random.Random(0), 0.0))
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))


def test_a_lower_bound_holds_while_a_lost_ticket_waits_for_another_suspect() -> None:
    script = Script(slots=2, max_lag=2, max_attempts=2, target=9)
    assert isinstance(script.conductor, Conductor)
    script.conductor.operate((), 0.0)
    assert sorted(script.tickets) == [0, 1]
    script.say(StationLost("sim", 0, "dies"))
    started = script.join_simulator(8, 1, incarnation=1)
    numbers = [grant.ticket.number for command in started for grant in getattr(command, "grants", ())]
    assert numbers == [0], "ticket 1 waits until ticket 0 has run, and so do new ones"


def test_a_resumed_run_has_the_bound_of_its_settings() -> None:
    script = Script(slots=2, max_lag=2)
    assert isinstance(script.conductor, Conductor)
    script.conductor.operate((), 0.0)
    script.conductor.detach()
    assert script.conductor.rollout.max_lag == math.inf


def operate(base: ClusterSettings, off: tuple[str, ...], max_lag: float) -> list[Command]:
    """Commands of a whole run under this operation."""
    conductor = build_conductor(base.scheduler)
    assert isinstance(conductor, Conductor)
    cluster = VirtualCluster(base, conductor, record=True)
    cluster.driver.clock.at(0.0, lambda _: conductor.operate(off, max_lag), None)
    cluster.run()
    return [command for step in cluster.driver.steps for command in step.commands]


def test_a_generator_that_is_off_gets_neither_batches_nor_weights() -> None:
    commands = operate(small(generators={"count": 2}, versions=4), ("generator-1",), 0.0)
    later = commands[len(commands) // 4 :]
    served = [command.generator for command in later if isinstance(command, Serve | ApplyWeights)]
    assert set(served) == {"generator-0"}


@pytest.mark.parametrize("off", [("generator-0", "generator-1"), ("generator-7", "generator-0", "generator-1")])
def test_all_off_is_all_on(off: tuple[str, ...]) -> None:
    commands = operate(small(generators={"count": 2}, versions=4), off, 0.0)
    assert {command.generator for command in commands if isinstance(command, Serve)} == {"generator-0", "generator-1"}


@pytest.mark.parametrize(("max_lag", "ahead"), [(0.0, 4), (1.0, 8), (2.0, 12), (5.0, 12)])
def test_a_lower_bound_starts_fewer_samples_and_a_higher_one_no_more(max_lag: float, ahead: int) -> None:
    base = small(
        scheduler={"batch_size": 4, "max_lag": 2.0, "on_update": "continue"},
        simulators={"env_batches": 16},
        trainer={"update": "100s"},
    )
    conductor = build_conductor(base.scheduler)
    assert isinstance(conductor, Conductor)
    conductor.operate((), max_lag)
    cluster = VirtualCluster(base, conductor, record=True)
    cluster.driver.submit(TrainUntil(10))
    cluster.driver.run(2, 50.0)
    rows = [c for step in cluster.driver.steps for c in step.commands if isinstance(c, StartRows)]
    assert sum(len(command.grants) for command in rows) == ahead
