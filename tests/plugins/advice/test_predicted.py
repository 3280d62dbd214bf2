"""Predicted effects: ratios of two simulations, if the simulation of the run as it was agrees with the measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.planning.profiles import recipe, work

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.advice.findings import Change, Effect, Finding, at_most, in_short, worthwhile
from polyrhythm.plugins.advice.predicted import Predictor
from polyrhythm.plugins.planning.from_run import HOOKS, profile_of

STEPS = 20
#: Seconds of an update's training, and of a step of a slot: rollout takes 20 · 0.05 s, training 1 s.
TRAINS, STEP = 1.0, 0.05


def lines(rows: int = 8, updates: int = 20) -> list[dict[str, Any]]:
    """Updates of 8 samples of 20 steps, as one without lag: rollout, then training."""
    found = []
    for step in range(updates):
        transitions = 8.0 * STEPS * (step + 1)
        requests = 8 * STEPS / rows
        line = {"step": step, "time_s": 2.0 * (step + 1), "throughput/transitions": transitions}
        line |= {"time/env/step": STEP * requests, "time/rollout/forward": 0.0005 * requests}
        line |= {"time/actor/update": TRAINS, "time/actor/passes": TRAINS, "time/actor/step": 0.0}
        line |= {"env/sample_env_steps": STEPS, "env/sample_chunk_steps": STEPS, "env/episode_len": STEPS}
        line |= {"rollouter/batch_rows": float(rows), "train/actor/optimizer_steps": 1.0}
        line |= {"rollouter/idle_ratio": 0.5, "trainer/idle_ratio": 0.5}
        found.append(line)
    return found


def lockstep(*overrides: str) -> RunConfig:
    alone = ("rollout.simulators=1", "rollout.rows=8", "launcher=local")
    return recipe("freshness.max_lag=0", "freshness.on_update=drain", *alone, *overrides)


BUSY = {"utilisation": {"simulator-0": 0.5, "trainer": 0.5}}
LAG = Change("freshness.max_lag", 0, 1, "samples one version old", at_most(2.0), unstable=True)
FINDING = Finding("throughput", "in-turn", "measured", (LAG,))


def predicted(
    finding: Finding = FINDING, rate: float = 80.0, seconds: float = 60.0, config: RunConfig | None = None
) -> Finding:
    """rate: measured transitions per second; 80 is what two seconds per version are."""
    predictor = Predictor(config or lockstep(), {"transitions_per_s": rate, **BUSY}, lines(), seconds)
    return predictor.predict([finding])[0]


@pytest.mark.parametrize("rate", [80.0, 70.0, 90.0])
def test_overlap_of_equal_stages_is_predicted_to_nearly_double_the_throughput(rate: float) -> None:
    found = predicted(rate=rate)
    (lag,) = [change for change in found.changes if change.setting == "freshness.max_lag"]
    assert lag.effect.basis == "predicted"
    assert lag.effect.factor == pytest.approx(2.0, rel=0.1)
    assert found.note == ""


@pytest.mark.parametrize("rate", [40.0, 55.0, 200.0])
def test_a_simulation_that_does_not_agree_with_the_run_predicts_nothing(rate: float) -> None:
    found = predicted(rate=rate)
    assert found.changes == FINDING.changes
    assert f"samples/s, measured were {rate / STEPS:.3g}" in found.note


def test_one_thread_is_not_simulated() -> None:
    found = predicted(config=load_config("latency", ["launcher=inline"]))
    assert found.note == "bounds, no predictions: the simulated cluster has a process for each station"


def test_without_time_the_bounds_stay() -> None:
    assert predicted(seconds=0.0).changes == FINDING.changes


def test_lines_without_times_predict_nothing() -> None:
    bare = [{"time_s": 1.0, "rollouter/idle_ratio": 0.5, "trainer/idle_ratio": 0.5}]
    (found,) = Predictor(lockstep(), {"transitions_per_s": 1.0}, bare, 60.0).predict([FINDING])
    assert found.changes == FINDING.changes
    assert found.note.startswith("bounds, no predictions: ")


@pytest.mark.parametrize("summary", [{}, {"transitions_per_s": 0.0}, {"transitions_per_s": 0}])
def test_a_summary_without_a_throughput_predicts_nothing(summary: dict[str, float]) -> None:
    (found,) = Predictor(lockstep(), summary, lines(), 60.0).predict([FINDING])
    assert found.changes == FINDING.changes
    assert found.note.startswith("bounds, no predictions: the run's measurements have gaps (")


@pytest.mark.parametrize(
    ("setting", "to"), [("training.optimizer.lr", 0.1), ("algorithm.proximal", "interpolate"), ("launcher", "inline")]
)
def test_what_is_not_simulated_keeps_its_bound(setting: str, to: Any) -> None:
    finding = Finding("throughput", "x", "measured", (Change(setting, 0, to, "", at_most(1.3)),))
    assert predicted(finding).changes[0].effect == at_most(1.3)


@pytest.mark.parametrize(
    ("change", "basis"),
    [
        (Change("training.micro_batch_steps", 20, 40, "memory", at_most(1.5)), "at most"),
        (Change("training.mini_batch_samples", 8, 16, "longer updates", at_most(1.5)), "at most"),
        (Change("rollout.simulators", 1, 2, "cores", at_most(1.5)), "at most"),
        (Change("freshness.max_lag", 0, 1, "", at_most(1.5)), "predicted"),
        (Change("training.epochs", 2, 1, "", at_most(1.5)), "predicted"),
        (Change("batching.max_wait_ms", 2, 1, "", at_most(1.5)), "at most"),
    ],
)
def test_what_a_run_has_not_measured_makes_a_bound(change: Change, basis: str) -> None:
    """A run has measured one amount of each work; twice as much is simulated to take as long. And it has means, without
    the spread that passes wait for."""
    found = predicted(Finding("stability", "x", "m", (change,)), config=lockstep("training.micro_batch_steps=20"))
    (own,) = [one for one in found.changes if one.setting == change.setting]
    assert own.effect.basis == basis
    assert own.effect != change.effect


def test_less_work_at_once_keeps_its_bound() -> None:
    change = Change("training.micro_batch_steps", 20, 10, "", at_most(1.5))
    found = predicted(Finding("throughput", "x", "m", (change,)), config=lockstep("training.micro_batch_steps=20"))
    assert change in found.changes


def test_a_value_that_does_not_fit_keeps_its_bound() -> None:
    finding = Finding("throughput", "x", "measured", (Change("rollout.simulators", 1, 0, "", at_most(1.3)),))
    assert finding.changes[0] in predicted(finding).changes


def test_what_gains_nothing_is_left_out_and_what_gains_much_is_added() -> None:
    """Rows wait half of the time as long as nothing overlaps, so more of them gain nothing; a lag does."""
    more = Change("rollout.generators", 1, 2, "memory", at_most(2.0))
    found = predicted(Finding("throughput", "inference", "measured", (more,)))
    settings = [change.setting for change in found.changes]
    assert settings[0] == "freshness.max_lag"
    assert "rollout.generators" not in settings


@pytest.mark.parametrize("basis", ["predicted", "at most"])
@pytest.mark.parametrize(("factor", "named"), [(0.5, False), (1.0, False), (1.049, False), (1.05, True), (None, True)])
def test_only_a_change_that_may_gain_something_is_named(basis: Any, factor: float | None, named: bool) -> None:
    change = Change("rollout.rows", 8, 16, "", Effect(basis, factor))
    finding = Finding("throughput", "balanced", "measured", (change,), remedy="nothing to set")
    assert worthwhile(finding).changes == (change,) * named
    stability = replace(finding, kind="stability")
    assert worthwhile(stability) == stability
    assert ("rollout.rows" in in_short(worthwhile(finding))) == named


def test_nothing_older_is_added_while_the_policy_drifts() -> None:
    drifting = Finding("stability", "large-updates", "measured", (Change("training.epochs", 1, 1, ""),))
    limit = Finding("throughput", "inference", "measured")
    stability, throughput = Predictor(lockstep(), {"transitions_per_s": 80.0, **BUSY}, lines(), 60.0).predict(
        [drifting, limit]
    )
    assert "freshness.max_lag" not in [change.setting for change in throughput.changes]
    assert stability.changes[0].effect.factor == pytest.approx(1.0)


@pytest.mark.parametrize("change", [{"cores": 3}, {"device": "another", "devices": 1}, {"memory": 1}])
def test_a_runs_profile_is_of_the_machine_that_the_summary_names(change: dict[str, Any]) -> None:
    here = HOOKS.summarise(lockstep(), {}, [])["machine"]
    assert profile_of(lockstep(), {}, lines()).machine.model_dump() == here
    other = here | change
    assert profile_of(lockstep(), {"machine": other}, lines()).machine.model_dump() == other


def test_a_profile_of_the_recipe_tells_what_more_rows_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself a run knows one number of rows only, at which twice the rows take as long."""
    config, more = lockstep(), Finding("stability", "inference", "m", (Change("rollout.rows", 8, 16, ""),))
    monkeypatch.chdir(tmp_path)
    alone = predicted(more).changes
    assert {change.effect.basis for change in alone if change.setting == "rollout.rows"} == {"at most"}
    own = profile_of(config, {}, lines())
    steps = {"step": work((8, 2 * STEP), (16, 4 * STEP)), "reset": work((1, 0.0))}
    passes = {"pass": work((8, 0.0005), (16, 0.001))}
    measured = {
        **own.stations,
        "simulator": own.stations["simulator"].model_copy(update={"works": steps}),
        "generator": own.stations["generator"].model_copy(update={"works": passes}),
    }
    own.model_copy(update={"stations": measured}).save(tmp_path / f"{config.name}.profile.json")
    both = [change.effect for change in predicted(more).changes if change.setting == "rollout.rows"]
    assert [effect.basis for effect in both] == ["predicted"]
    assert both[0].factor == pytest.approx(1.0, abs=0.05)
    (tmp_path / f"{config.name}.profile.json").write_text("{")
    assert predicted(more).changes == alone


def test_stations_that_sleep_take_less_of_the_cores() -> None:
    """So twice the simulators gain no less than where each fills a core."""
    factors = []
    for own in (1.0, 0.01):
        some = [line | {"cpu/own": own} for line in lines()]
        finding = Finding("stability", "x", "m", (Change("rollout.simulators", 1, 2, ""),))
        predictor = Predictor(lockstep("freshness.max_lag=1"), {"transitions_per_s": 150.0, **BUSY}, some, 60.0)
        (found,) = predictor.predict([finding])
        assert found.note == ""
        factors += [change.effect.factor or 0.0 for change in found.changes if change.setting == "rollout.simulators"]
    full, asleep = factors
    assert 0.5 < full <= asleep + 0.02
