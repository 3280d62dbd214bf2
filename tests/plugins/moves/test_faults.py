"""Faults during the mover's own moves: nothing is lost, nothing is trained twice, and the run ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.long import long
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached
from tests.plugins.moves.scenes import scene

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.moves.conductor import MovingConductor
from polyrhythm.plugins.moves.operation import starting
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings, FaultPlan
from polyrhythm.scheduler.records import Command, Event, MoveChosen, StartUpdate
from polyrhythm.scheduler.settings import MoveRules


def drifting(sharing: str, versions: int) -> ClusterSettings:
    """A cluster in which every kind of move is tried, and costs change every 40 s. Faults may be injected anywhere."""
    fault = {"detected": "100ms", "restart": "300ms"}
    beside, alone = {"devices": "1", "resident_gb": 1.0}, sharing != "lease"
    changes = [{"at": f"{40 * turn}s", "cost": "serve", "times": (1.0, 3.0)[turn % 2]} for turn in range(1, 10)]
    found = scene(
        simulators=[
            {"count": 2, "env_batches": 2, "slots": 2, "rows": 4, "step": "lognormal:100ms:0.3", "steps": 8, **fault}
        ],
        generators=[{"serve": "4ms+2ms", **own, **fault} for own in ([{"devices": "0"}] * alone + [beside])],
        trainer={"update": "1000ms", "checkpoint_every": 1, "micro_batch": 8, "by_passes": 0.4, **beside, **fault},
        sharing=sharing,
        lease={"min_hold": "200ms", "host_gb_per_s": 4.0},
        changes=changes,
        versions=versions,
    )
    devices = {name: own for name, _, own in found.seats() if own}
    rules = MoveRules(devices, 8, (4, 8, 16, 32), together=sharing == "lease")
    return found.model_copy(update={"scheduler": replace(found.scheduler, moves=rules, max_dropped=0)})


Observer = Callable[[float, Event, list[Command]], None]


def watched(settings: ClusterSettings) -> tuple[VirtualCluster, MovingConductor, GuaranteeChecker, Observer]:
    """A run with the real judge, what checks its guarantees, and the observer by which that hears of decisions."""
    conductor = build_conductor(settings.scheduler)
    assert isinstance(conductor, MovingConductor)
    cluster = VirtualCluster(settings, conductor)
    watch = GuaranteeChecker(cluster, conductor.outer)
    checked = cluster.driver.observer
    assert checked is not None
    return cluster, conductor, watch, checked


def faults_at_moves(sharing: str, seed: int, versions: int, each: int) -> tuple[VirtualCluster, MovingConductor]:
    """A run with the real judge in which after each move stations fail, at once and during the next versions."""
    settings, rng = drifting(sharing, versions), random.Random(seed)
    stations = settings.station_names()
    cluster, conductor, watch, checked = watched(settings)

    def observe(now: float, event: Event, commands: list[Command]) -> None:
        checked(now, event, commands)
        for _ in range(each * sum(isinstance(command, MoveChosen) for command in commands)):
            at = now + rng.choice((0.0, 0.05, 8.0, 8.0)) * rng.random()
            kind = rng.choice(("dies", "hangs"))
            fault = FaultPlan(station=rng.choice(stations), at=at, kind=kind, after_reply=rng.random() < 0.2)
            cluster.driver.clock.at(at, cluster.fail, fault)

    cluster.driver.observer = observe
    check_target_reached(cluster, conductor.inner, watch)
    return cluster, conductor


@pytest.mark.parametrize(
    ("kind", "kept", "versions"),
    [
        pytest.param("micro_batch", False, 60, marks=long(3, "larger micro-batches that fail at once")),
        ("micro_batch", True, 64),
        ("sharing", False, 40),
        pytest.param("sharing", True, 40, marks=long(2, "a shared device that fails later")),
    ],
)
def test_what_needs_too_much_memory_is_undone_and_never_repeated(kind: str, kept: bool, versions: int) -> None:
    """The trainer is lost in each update that has more than 8 chunk steps per pass, or a device with a generator: from
    the first on, or from the time on at which the move was kept, and then twice, as nothing names memory."""
    settings = drifting("lease" if kind == "sharing" else "shared", versions)
    assert settings.scheduler.moves is not None
    rules = replace(settings.scheduler.moves, micro_batches=(4, 8, 16, 32) if kind == "micro_batch" else ())
    rules = rules if kind == "micro_batch" else replace(rules, micro_batch=0)
    settings = settings.model_copy(update={"scheduler": replace(settings.scheduler, moves=rules)})
    cluster, conductor, watch, checked = watched(settings)
    losses = 0

    def observe(now: float, event: Event, commands: list[Command]) -> None:
        nonlocal losses
        checked(now, event, commands)
        updates = [command for command in commands if isinstance(command, StartUpdate)]
        too_much = any(command.micro_batch > 8 or conductor.mover.operation.together for command in updates)
        fails = not kept or any(move.outcome == "kept" and kind in move.move for move in conductor.chosen)
        if too_much and fails and losses < 5:  # a run that repeats it ends, too
            losses += 1
            cluster.driver.clock.at(now + 0.1, cluster.fail, FaultPlan(station="trainer", at=now + 0.1))

    cluster.driver.observer = observe
    check_target_reached(cluster, conductor.inner, watch)
    moves = [(move.outcome, move.move) for move in conductor.chosen if kind in move.move]
    larger = [move for outcome, move in moves if outcome == "begun" and ("→ share" in move or "8 → 16" in move)]
    assert losses == 1 + kept
    assert len(larger) == 1
    assert not conductor.mover.operation.needs_more(starting(settings.scheduler, rules))
    assert any("not tried again" in move.reason for move in conductor.chosen if move.outcome == "undone")
    assert conductor.ledger.dropped_total == 0
    assert conductor.ledger.trained == settings.versions * 32


@pytest.mark.parametrize(
    ("sharing", "versions", "each", "moved"),
    [
        pytest.param("shared", 70, 20, {"generator-1"}, marks=long(4, "where stations share a device")),
        ("lease", 60, 30, {"sharing"}),
    ],
)
def test_fifty_faults_at_the_movers_own_moves_lose_nothing(
    sharing: str, versions: int, each: int, moved: set[str]
) -> None:
    cluster, conductor = faults_at_moves(sharing, 0, versions, each)
    assert cluster.driver.measures.lost >= 50
    assert conductor.ledger.trained == versions * 32
    assert conductor.ledger.dropped_total == 0
    assert {move.move.split()[0] for move in conductor.chosen} >= moved
