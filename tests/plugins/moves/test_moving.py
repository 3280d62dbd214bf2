"""Moves in the simulated cluster follow the costs, and cost little when a forecast is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.long import long
from tests.oracles.guarantees import GuaranteeChecker
from tests.plugins.moves.scenes import OFF, WatchedRun, judged, lying, moving, scene

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.moves.conductor import MovingConductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import (
    MoveChosen,
    TakeDevice,
)
from polyrhythm.scheduler.settings import MoveRules

#: Versions within which moves have followed a change of costs.
FOLLOWED = 20


def phases(settings: ClusterSettings, runs: dict[str, WatchedRun]) -> list[dict[str, float]]:
    """Samples per second of each run in each phase, from 20 versions after its beginning on."""
    times = [0.0, *sorted({change.at for change in settings.changes})]
    found = []
    for index, begin in enumerate(times):
        rates = {}
        for name, run in runs.items():
            last = run.at(times[index + 1]) - 1 if index + 1 < len(times) else settings.versions - 4
            rates[name] = run.rate(run.at(begin) + FOLLOWED, last)
        found.append(rates)
    return found


def check_phases(settings: ClusterSettings) -> list[tuple[int, MoveChosen]]:
    """Each phase is within 5% of the better fixed operation, the whole no worse than the start; returns the moves."""
    fixed = {"start": WatchedRun(settings), "off": WatchedRun(settings, OFF)}
    moved = WatchedRun(moving(settings))
    for rates in phases(settings, {**fixed, "moved": moved}):
        assert rates["moved"] >= 0.95 * max(rates["start"], rates["off"]), rates
    last = settings.versions - 4
    assert moved.rate(0, last) >= 0.97 * fixed["start"].rate(0, last)
    return moved.chosen


def test_moves_follow_passes_that_become_three_times_as_fast() -> None:
    slow = {"serve": "12ms+6ms"}
    generators = [{**slow, "devices": "0"}, {**slow, "devices": "1"}]
    changes = [{"at": "56s", "cost": "serve", "times": 0.333}]
    chosen = check_phases(scene(generators=generators, changes=changes, versions=78))
    begun = [move for _, move in chosen if move.outcome == "begun" and "generator-1" in move.move]
    assert [move.move for move in begun] == ["generator-1 off"]
    assert "a pass takes" in begun[0].reason
    assert begun[0].expected > 1.1


@long(20, "moves follow passes that become three times as slow, and fast again")
def test_moves_follow_passes_that_become_slow_and_fast_again() -> None:
    changes = [{"at": "50s", "cost": "serve", "times": 3.0}, {"at": "120s", "cost": "serve", "times": 1.0}]
    chosen = check_phases(scene(changes=changes, versions=130))
    kept = [move.move for _, move in chosen if move.outcome == "kept" and "generator-1" in move.move]
    assert kept == ["generator-1 off", "generator-1 on", "generator-1 off"]


@long(20, "moves follow updates that become three times as slow, and fast again")
def test_moves_follow_updates_that_become_slow_and_fast_again() -> None:
    changes = [{"at": "60s", "cost": "update", "times": 0.33}, {"at": "100s", "cost": "update", "times": 1.0}]
    check_phases(scene(changes=changes, versions=160))


def test_a_trainer_that_leases_its_device_to_a_generator_gets_it_back_for_good() -> None:
    """Each switch costs 100 ms for the trainer and 50 ms for the generator, which the forecast knows."""
    resident = {"devices": "1", "resident_gb": 1.0}
    settings = scene(
        generators=[{"serve": "4ms+2ms", "devices": "0"}, {"serve": "4ms+2ms", **resident}],
        trainer={"update": "1000ms", **resident, "resident_gb": 2.0},
        sharing="lease",
        lease={"min_hold": "200ms", "host_gb_per_s": 20.0},
        versions=26,
    )
    settings = moving(settings)
    conductor = build_conductor(settings.scheduler)
    assert isinstance(conductor, MovingConductor)
    cluster = VirtualCluster(settings, conductor, record=True)
    watch = GuaranteeChecker(cluster, conductor.outer)
    cluster.run()
    watch.finish()
    assert [(move.outcome, move.move) for move in conductor.chosen[:2]] == [
        ("begun", "generator-1 off"),
        ("kept", "generator-1 off"),
    ]
    last = cluster.driver.steps[-200:]
    assert not any(isinstance(command, TakeDevice) for step in last for command in step.commands)


def leased(sizes: tuple[int, ...] = (), trainer: dict[str, Any] | None = None, **changes: Any) -> ClusterSettings:
    """A generator and the trainer on one device in turn, with dear switches; they may be on it together. sizes: of
    micro-batches; trainer, changes: settings of the trainer and of the cluster."""
    beside = {"devices": "0", "resident_gb": 1.0}
    settings = scene(
        generators=[{"serve": "4ms+2ms", **beside}],
        trainer={"update": "800ms", **beside, "resident_gb": 2.0, **(trainer or {})},
        sharing="lease",
        lease={"min_hold": "300ms", "host_gb_per_s": 5.0},
        **changes,
    )
    devices = {name: own for name, _, own in settings.seats() if own}
    rules = MoveRules(devices, 8 if sizes else 0, sizes, together=True)
    return settings.model_copy(update={"scheduler": replace(settings.scheduler, moves=rules)})


@pytest.mark.parametrize(
    ("update", "by_passes", "best"),
    [
        ("2400ms", -0.5, 2),
        pytest.param("2400ms", 0.5, 64, marks=long(2, "a simulated search")),
        pytest.param("600ms", -0.5, 2, marks=long(2, "a simulated search")),
    ],
)
def test_a_share_and_the_best_micro_batches_are_found_within_20_versions(
    update: str, by_passes: float, best: int
) -> None:
    """The first other size is a guess: kept and then exceeded, or undone after two updates that took longer."""
    trainer = {"update": update, "micro_batch": 8, "by_passes": by_passes}
    run = WatchedRun(leased((2, 4, 8, 16, 32, 64), trainer, versions=23))
    moves = [(move.outcome, move.move) for _, move in run.chosen]
    assert moves[:3] == [
        ("begun", "sharing lease → share"),
        ("kept", "sharing lease → share"),
        ("begun", "micro_batch_steps 8 → 16"),
    ]
    if best > 8:
        assert moves[3:5] == [("kept", "micro_batch_steps 8 → 16"), ("begun", f"micro_batch_steps 16 → {best}")]
        assert run.chosen[3][1].measured == pytest.approx(1.25, abs=0.03)
    else:
        assert moves[3:5] == [("undone", "micro_batch_steps 16 → 8"), ("begun", f"micro_batch_steps 8 → {best}")]
        assert run.chosen[3][0] - run.chosen[2][0] <= 3
    assert run.chosen[4][0] <= FOLLOWED


def test_a_lease_becomes_a_share_where_switches_cost_more() -> None:
    run = WatchedRun(leased(versions=24), record=True)
    first, second = (move for _, move in run.chosen[:2])
    assert (first.outcome, first.move) == ("begun", "sharing lease → share")
    assert second.outcome == "kept"
    assert second.measured > 1.8
    assert not any(isinstance(c, TakeDevice) for step in run.cluster.driver.steps[-200:] for c in step.commands)


@long(2, "a simulated search")
def test_a_share_that_is_slower_than_the_lease_is_given_back_once() -> None:
    """Two passes at once each take five times as long, which no forecast knows."""
    run = WatchedRun(leased(versions=48, switching=3.0), record=True)
    shares = [(move.outcome, move.move) for _, move in run.chosen if "sharing" in move.move]
    assert shares == [("begun", "sharing lease → share"), ("undone", "sharing share → lease")]
    last = [c for step in run.cluster.driver.steps[-400:] for c in step.commands if isinstance(c, TakeDevice)]
    assert last
    assert not any(command.beside for command in last)


def test_wrong_forecasts_cost_little_and_are_undone() -> None:
    generators = [{"serve": "12ms+6ms", "devices": "0"}, {"serve": "12ms+6ms", "devices": "1"}]
    settings = scene(generators=generators)
    start, moved = WatchedRun(settings), WatchedRun(settings, conductor=lying(18.5))
    outcomes = [move.outcome for _, move in moved.chosen]
    assert outcomes[:2] == ["begun", "undone"]
    assert not [move for _, move in moved.chosen if move.outcome == "kept" and "generator-1" in move.move]
    assert moved.rate(0, 56) >= 0.97 * start.rate(0, 56)


@pytest.mark.parametrize("forecast", [0.86, 1.0, 1.1])
def test_a_lower_bound_that_loses_is_undone_however_wrong_the_forecast_is(forecast: float) -> None:
    """The true rates are 29.5, 26.1 and 19.8 samples/s at α 2, 1 and 0.5."""
    simulators = [{"env_batches": 4, "slots": 2, "rows": 4, "step": "lognormal:100ms:0.9", "steps": 8}]
    base = scene(generators=[{"serve": "4ms+2ms"}], trainer={"update": "700ms"}, simulators=simulators, versions=46)
    settings = replace(base.scheduler, moves=MoveRules({}))
    conductor = judged(settings, lambda one: 29.5 * forecast * (1.0 if one.max_lag >= 1.0 else 0.8))
    run = WatchedRun(base, conductor=conductor)
    outcomes = [(move.outcome, move.move) for _, move in run.chosen]
    assert ("undone", "max_lag 1 → 2") in outcomes
    assert "kept" not in [outcome for outcome, _ in outcomes]
    assert all(move.measured < 1.0 for _, move in run.chosen)
