"""What limits a run: one finding from measured shares of time, with the settings in order, three neighbours of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.pipeline.runs import config

from polyrhythm.config.load import merge, validate
from polyrhythm.plugins.advice.findings import in_words
from polyrhythm.plugins.advice.measures import Shares, shares_of, time_means
from polyrhythm.plugins.advice.speed import limit

#: Two simulators in processes, half of the time busy, whose rows always have tickets.
USUAL = Shares(
    busy={"simulator": 0.5, "generator": 0.3, "trainer": 0.4},
    count={"simulator": 2, "generator": 1, "trainer": 1},
    rows_idle=0.02,
    trainer_idle=0.55,
)
RECIPE: dict[str, Any] = {
    "launcher": "local",
    "rollout": {"simulators": 2, "routing": "least_loaded"},
    "batching": {"type": "dynamic", "max_rows": 12, "max_wait_ms": 20.0},
    "freshness": {"max_lag": 1, "on_update": "continue"},
    "training": {"order": "arrival"},
}
ALONE = {"rollout": {"simulators": 1, "sharding": "whole"}}
PATIENT = {"batching": {"fire_when_all_wait": False, "max_rows": 64}}
INLINE = {"launcher": "inline"}
#: Shares and settings that differ → name of the finding, what limits, and its changes in order.
TABLE: list[tuple[dict[str, Any], dict[str, Any], str, str, list[str]]] = [
    ({}, INLINE, "one-thread", "simulator", ["launcher=local"]),
    ({"busy": {"trainer": 0.7, "simulator": 0.2}}, INLINE, "one-thread", "trainer", ["launcher=local"]),
    ({"cores": 0.95}, INLINE, "one-thread", "simulator", []),
    ({"busy": {"simulator": 0.9, "trainer": 0.4}}, {}, "simulation", "simulator", ["rollout.simulators=4"]),
    ({"busy": {"simulator": 0.6, "trainer": 0.4}}, {}, "simulation", "simulator", ["rollout.simulators=4"]),
    ({"busy": {"simulator": 0.9, "trainer": 0.4}, "cores": 0.95}, {}, "simulation", "simulator", []),
    (
        {"busy": {"simulator": 0.4, "generator": 0.95}},
        {},
        *("inference", "generator", ["rollout.generators=2", "rollout.rows=12"]),
    ),
    (
        {"busy": {"simulator": 0.4, "scorer": 0.95}, "count": {"scorer": 3}},
        {},
        *("scoring", "scorer", ["scoring.processes=6"]),
    ),
    ({"cores": 0.95}, {}, "alternating", "simulator", []),
    ({"busy": {"simulator": 0.59}}, {}, "alternating", "simulator", ["rollout.rows=12"]),
    ({}, ALONE, "alternating", "simulator", ["rollout.sharding=even:2", "rollout.rows=12"]),
    ({"busy": {"simulator": 0.2, "generator": 0.1}}, ALONE, "alternating", "simulator", ["rollout.rows=12"]),
    (
        {"rows_idle": 0.6, "trainer_idle": 0.05},
        {},
        *("training", "trainer", ["placement.trainer.ranks=2", "training.epochs=1"]),
    ),
    ({"rows_idle": 0.6, "trainer_idle": 0.05, "cores": 0.9}, {}, "training", "trainer", ["training.epochs=1"]),
    (
        {"rows_idle": 0.15, "trainer_idle": 0.14, "proximal": 0.2, "cores": 1.0},
        {"algorithm": {"proximal": "recompute"}},
        *("training", "trainer", ["training.epochs=1", "algorithm.proximal=interpolate"]),
    ),
    ({"rows_idle": 0.4}, {"freshness": {"max_lag": 0}}, "in-turn", "", ["freshness.max_lag=1"]),
    ({"rows_idle": 0.4}, {"freshness": {"max_lag": 0.5}}, "in-turn", "", ["freshness.max_lag=1"]),
    ({"rows_idle": 0.15}, {}, "in-turn", "", ["freshness.max_lag=2", "training.mini_batch_samples=20"]),
    ({"batch_wait": 0.9}, {}, "batch-wait", "generator", ["batching.max_wait_ms=5"]),
    ({"batch_wait": 0.15, "rows_idle": 0.4}, {}, "batch-wait", "generator", ["batching.max_wait_ms=5"]),
    (
        {"batch_wait": 0.9},
        PATIENT,
        *("batch-wait", "generator"),
        ["batching.fire_when_all_wait=true", "batching.max_rows=12", "batching.max_wait_ms=5"],
    ),
    ({"batch_wait": 0.9, "busy": {"simulator": 0.9}}, {}, "simulation", "simulator", ["rollout.simulators=4"]),
    ({"batch_wait": 0.14}, {}, "alternating", "simulator", ["rollout.rows=12"]),
    ({"trainer_idle": 0.14}, {}, "balanced", "", []),
    ({"trainer_idle": 0.1, "rows_idle": 0.14}, {}, "balanced", "", []),
]


def recipe(**changes: Any) -> Any:
    return config(**merge(RECIPE, changes))


@pytest.mark.parametrize(("shares", "settings", "name", "limits", "overrides"), TABLE)
def test_what_limits_and_what_to_set(
    shares: dict[str, Any], settings: dict[str, Any], name: str, limits: str, overrides: list[str]
) -> None:
    present = recipe(**settings)
    found = limit(replace(USUAL, **shares), present)
    assert (found.name, found.limits) == (name, limits)
    assert [change.override for change in found.changes] == overrides
    assert all(change.effect.basis == "at most" for change in found.changes)
    words = "\n".join(in_words([found]))
    assert words.startswith(f"1. throughput: {found.measured} [docs/tuning.md#{name}]")
    assert ("nothing to set" in words) == (name == "balanced")
    full = shares.get("cores", 0.0) >= 0.9 and found.limits != "trainer"
    assert ("more stations only share them" in words) == full


@pytest.mark.parametrize(("shares", "settings"), [(row[0], row[1]) for row in TABLE if row[2] != "scoring"])
def test_every_proposal_is_a_valid_setting(shares: dict[str, Any], settings: dict[str, Any]) -> None:
    present = recipe(**settings)
    for change in limit(replace(USUAL, **shares), present).changes:
        section: dict[str, Any] = present.model_dump(mode="json")
        assert validate(with_setting(section, change.setting, change.to))


def with_setting(sections: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return sections | {first: with_setting(sections[first], rest, value) if rest else value}


@pytest.mark.parametrize(("idle", "factor"), [(0.5, 2.0), (0.2, 1.25), (0.4, 1 / 0.6), (1.0, 2.0)])
def test_twice_the_simulators_gain_at_most_twice_and_what_the_trainer_waits(idle: float, factor: float) -> None:
    (change,) = limit(replace(USUAL, busy={"simulator": 0.9}, trainer_idle=idle), recipe()).changes
    assert change.effect.factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("micro", "mini", "proposed"), [(40, 64, [64]), (32, 64, [64]), (64, 64, []), (16, 64, [32]), (40, 0, [80])]
)
def test_micro_batches_grow_to_the_mini_batch_at_most(micro: int, mini: int, proposed: list[int]) -> None:
    shares = replace(USUAL, rows_idle=0.6, trainer_idle=0.05)
    changes = limit(shares, recipe(training={"micro_batch_steps": micro, "minibatch_steps": mini})).changes
    own = [change for change in changes if change.setting == "training.micro_batch_steps"]
    assert [change.to for change in own] == proposed
    assert all((change.effect.factor or 0.0) <= change.to / micro for change in own)


def test_shares_are_means_over_time() -> None:
    lines = [
        {"time_s": 5.0, "evaluation/greedy/rate": 0.5},
        {"time_s": 6.0, "rollouter/idle_ratio": 1.0, "trainer/idle_ratio": 0.0, "cpu/own": 0.5},
        {"time_s": 9.0, "rollouter/idle_ratio": 0.2, "trainer/idle_ratio": 0.4, "rollouter/batch_wait_ratio": 0.8},
        {"step": 2},
    ]
    means = {"rows_idle": 0.4, "trainer_idle": 0.3, "batch_wait": 0.6, "cores": 0.5}
    assert time_means(lines) == pytest.approx(means)
    assert time_means(lines[:1]) == {}
    assert shares_of({"trainer": 0.5}, lines[:1]) is None
    assert shares_of({}, lines) is None
    found = shares_of({"simulator-0": 0.2, "simulator-1": 0.4, "simulator-evaluation": 0.9, "trainer": 0.5}, lines)
    assert found is not None
    assert found.busy == pytest.approx({"simulator": 0.3, "trainer": 0.5})
    assert found.count == {"simulator": 2, "generator": 0, "scorer": 0, "trainer": 1}
