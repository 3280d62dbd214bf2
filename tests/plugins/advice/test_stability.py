"""What is unstable comes first: by the alarms and by divergences, three neighbours of each, in RLinf's order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.advice.test_speed import recipe, with_setting
from tests.plugins.alarms.test_alarms import ONE_STEP, run

from polyrhythm.config.load import validate
from polyrhythm.plugins.advice import speed, stability
from polyrhythm.plugins.advice.findings import Effect, Finding, at_most, in_short, in_words, without
from polyrhythm.plugins.advice.order import advice
from polyrhythm.plugins.alarms.setbacks import setbacks

ROOT = Path(__file__).parents[3]
BUSY = {"simulator-0": 0.9, "generator-0": 0.3, "trainer": 0.4}
#: Updates whose rollout and training wait in turn, and which are stable.
WAITING = {"rollouter/idle_ratio": 0.4, "trainer/idle_ratio": 0.5, "staleness/lag_mean": 1.5}
STALE, MASKED = "train/actor/behav_approx_kl", "train/actor/behav_clip_fraction"
KL, CLIP, MISMATCH = "train/actor/proximal_approx_kl", "train/actor/clip_fraction", "train/actor/mismatch_kl"


def lines(count: int = 20, **every: Any) -> list[dict[str, Any]]:
    """Updates of a run whose episodes become better. every: metrics with __ for /."""
    changed = {name.replace("__", "/"): value for name, value in every.items()}
    return [line | {"time_s": float(line["step"]), **WAITING, **changed} for line in run(count, gain=3.0)]


def found(some: list[dict[str, Any]], **settings: Any) -> list[Finding]:
    return advice(recipe(**settings), BUSY, some, setbacks(some))


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({}, []),
        ({STALE: 0.05}, ["stale"]),
        ({STALE: 0.049}, []),
        ({STALE: 0.5, "staleness/lag_mean": 0.0}, []),
        ({MASKED: 0.2}, ["stale"]),
        ({MASKED: 0.19}, []),
        ({KL: 0.1}, ["large-updates"]),
        ({KL: 0.099}, []),
        ({CLIP: 0.5}, ["large-updates"]),
        ({CLIP: 0.49, STALE: 0.06}, ["stale"]),
        ({KL: 0.2, STALE: 0.06}, ["stale", "large-updates"]),
        ({MISMATCH: 0.02}, ["mismatch"]),
        ({MISMATCH: 0.009}, []),
        ({MISMATCH: 4e-5, KL: 1e-9}, []),
        ({MISMATCH: 6e-5, KL: 1e-9}, ["mismatch"]),
    ],
)
def test_what_a_run_that_learns_shows_too(metrics: dict[str, float], names: list[str]) -> None:
    findings = found([line | metrics for line in lines()])
    assert [finding.name for finding in findings] == [*names, "in-turn"]
    assert [finding.kind for finding in findings] == ["stability"] * len(names) + ["throughput"]


def test_nine_updates_are_too_few_for_a_divergence() -> None:
    assert [one.name for one in found([line | {STALE: 1.0} for line in lines(9)])] == ["in-turn"]
    assert [one.name for one in found([line | {STALE: 1.0} for line in lines(10)])] == ["stale", "in-turn"]


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_against_stale_samples_the_order_is_rlinfs(lag: int) -> None:
    loss = {"type": "decoupled_ppo", "behave_weight_threshold": 4.0}
    settings = {"freshness": {"max_lag": lag}, "algorithm": {"loss": loss, "proximal": "recompute"}}
    stale = found([line | {STALE: 0.5} for line in lines()], **settings)[0]
    overrides = [change.override for change in stale.changes]
    lower = [] if lag == 0 else ["freshness.max_lag=1" if lag > 1 else "freshness.max_lag=0"]
    assert overrides == [
        *lower,
        "algorithm.loss.behave_weight_threshold=2",
        *("training.optimizer.lr=0.001", "algorithm.loss.clip_high=0.1", "training.epochs=1"),
    ]


@pytest.mark.parametrize("lag", [0, 0.5, 1, 3])
def test_nothing_makes_samples_older_before_training_is_stable(lag: float) -> None:
    settings = {"freshness": {"max_lag": lag}}
    stable = found(lines(), **settings)[-1]
    assert stable.changes[0].setting == "freshness.max_lag"
    limit = found([line | {KL: 0.5} for line in lines()], **settings)[-1]
    assert "freshness.max_lag" not in [change.setting for change in limit.changes]
    assert limit.remedy == "raise freshness.max_lag once large-updates is over"


#: Metrics from the first update on, and from the tenth, whose returns do not grow → finding and its first change.
ALARMS: dict[str, tuple[dict[str, float], dict[str, float], str]] = {
    "one-step": (ONE_STEP, {}, "training.epochs=4"),
    "still": ({"kl": 0, "clip": 0}, {}, "training.optimizer.lr=0.009"),
    "entropy": ({}, {"entropy": 0.01}, "algorithm.entropy_coef=0.01"),
    "values": ({"explained": -0.3}, {}, "training.optimizer.value_lr=0.009"),
    "stale": ({"behind": 1.5, "clip": 0.49}, {}, ""),
    "equal-returns": ({"earned": -50}, {}, ""),
    "no-progress": ({}, {}, "training.versions=6"),
}


@pytest.mark.parametrize("name", ALARMS)
def test_alarms_become_findings_before_the_throughput(name: str) -> None:
    every, late, change = ALARMS[name]
    some = [line | {**WAITING, "time_s": float(line["step"])} for line in run(late=late, **every)]
    alarms = {alarm.text for alarm in setbacks(some)}
    findings = found(some)
    assert findings[-1].name == "in-turn"
    told = {one.name: one for one in findings[:-1]}
    if name == "stale":
        assert "stale" not in told, "the alarm takes half of the entries"
        return
    assert told[name].alarm in alarms
    assert told[name].alarm.startswith(told[name].measured)
    assert [one.override for one in told[name].changes][:1] == [change] * bool(change)


def test_old_samples_of_an_alarm_are_told_of_once() -> None:
    some = [line | WAITING | {"time_s": 1.0 * line["step"]} for line in run(behind=1.5, clip=0.6)]
    names = [one.name for one in found(some)]
    assert names == ["large-updates", "stale", "no-progress", "in-turn"]
    assert [one.name for one in found([line | {STALE: 1.0} for line in some])].count("stale") == 1


def test_a_collapse_proposes_a_lower_rate_and_less_lag() -> None:
    rates = [(0.5, 0.4, 0.6), (0.1, 0.05, 0.2)]
    evaluations = [
        {"step": step, "evaluation/greedy/rate": rate, "evaluation/greedy/low": low, "evaluation/greedy/high": high}
        for step, (rate, low, high) in enumerate(rates)
    ]
    first = found([*lines(), *evaluations])[0]
    assert first.name == "collapse"
    overrides = [change.override for change in first.changes]
    assert overrides == ["training.optimizer.lr=0.001", "freshness.max_lag=0", "algorithm.kl.coef=0.01"]


@pytest.mark.parametrize(("rows", "most", "proposed"), [(6, 8, []), (6, 12, [12]), (3, 6, [6])])
def test_what_the_settings_refuse_is_not_proposed(rows: int, most: int, proposed: list[int]) -> None:
    """A request is never split, so a slot has at most the rows of a pass."""
    some = [line | {"rollouter/idle_ratio": 0.0} for line in lines()]
    settings = {"rollout": {"rows": rows, "sharding": "whole"}, "batching": {"max_rows": most}}
    busy = {"simulator-0": 0.5, "generator-0": 0.3, "trainer": 0.4}
    finding = advice(recipe(**settings), busy, some, [])[-1]
    assert finding.name == "alternating"
    assert [change.to for change in finding.changes if change.setting == "rollout.rows"] == proposed


def test_without_training_there_is_no_advice() -> None:
    assert advice(recipe(), {}, [], []) == []
    assert advice(recipe(), BUSY, [{"step": 0, "evaluation/greedy/rate": 0.5}], []) == []


@pytest.mark.parametrize("name", [name for name, (_, _, change) in ALARMS.items() if change])
def test_every_proposal_is_a_valid_setting(name: str) -> None:
    every, late, _ = ALARMS[name]
    for finding in found([line | WAITING | {"time_s": 1.0} for line in run(late=late, **every)]):
        for change in finding.changes:
            assert validate(with_setting(recipe().model_dump(mode="json"), change.setting, change.to))


def test_as_json_has_present_and_proposed_values() -> None:
    findings = found([line | {KL: 0.5} for line in lines()], training={"max_kl": None})
    data = json.loads(json.dumps([finding.as_json() for finding in findings]))
    assert data[0]["kind"] == "stability"
    assert data[0]["page"] == "docs/tuning.md#large-updates"
    unknown = {"basis": "unknown", "factor": None}
    assert data[0]["changes"][0] == {
        "setting": "training.max_kl", "now": None, "to": 0.02, "cost": "updates end early", "effect": unknown
    }  # fmt: skip
    assert data[-1]["limits"] == ""
    assert data[-1]["changes"][0]["effect"]["factor"] == pytest.approx(1 / 0.6)


def test_in_words_each_change_has_its_effect_or_says_that_there_is_no_prediction() -> None:
    words = in_words(found([line | {KL: 0.5} for line in lines()], training={"max_kl": None}))
    assert words[0].startswith("1. stability: train/actor/proximal_approx_kl = 0.5 and")
    assert words[1] == "   training.max_kl=0.02 (now null): transitions/s not predicted; cost: updates end early"
    assert words[2].startswith("   then training.optimizer.lr=0.001 (now 0.003)")
    assert in_short(Finding("stability", "x", "measured")) == "stability: measured"


@pytest.mark.parametrize(("shares", "factor"), [((0.5,), 2.0), ((0.5, 0.2), 1.25), ((1.0,), 100.0), ((0.0,), 1.0)])
def test_a_bound_is_the_smallest_gain(shares: tuple[float, ...], factor: float) -> None:
    assert at_most(*map(without, shares)) == Effect("at most", pytest.approx(factor))


def test_every_finding_has_a_row_in_the_table_of_its_page() -> None:
    """Names that rules give, found in their sources, so that none is forgotten."""
    sources = "".join(Path(module.__file__ or "").read_text() for module in (speed, stability))
    named = set(re.findall(r'Finding\(\s*"\w+", "([a-z-]+)"', sources))
    named |= set(re.findall(r'^    "[a-z ]+": \("([a-z-]+)", _', sources, re.MULTILINE))
    named |= {"simulation", "inference", "scoring"}
    rows = re.findall(r'^\| <a id="([a-z-]+)"></a>', (ROOT / "docs/tuning.md").read_text(), re.MULTILINE)
    assert len(named) > 15
    assert named == set(rows)
    assert len(rows) == len(set(rows))
    assert Finding("stability", "x", "y").page == "docs/tuning.md#x"
