"""Lock-step and asynchrony beside each other: the arithmetic, what makes things slow, and small runs of all of it."""

from __future__ import annotations

import json
import runpy
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from tests.long import long
from tests.process.runs import children, orphaned_folders

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm.plugins.virtual.clustersim.costs import parse_cost
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.scheduler.records import SampleEnd, SampleFinished, UpdateDone
from polyrhythm_bench.cases import learning, learning_page, wall_clock
from polyrhythm_bench.cases.learning import CARTPOLE, LIMITS, MODES, TASKS, summarise
from polyrhythm_bench.cli.bench import PARTS, words
from polyrhythm_bench.harness.curves import EpisodeOutcomes, Goal, curve, ratio_of_means
from polyrhythm_bench.harness.kept import KeptResults
from polyrhythm_bench.harness.trainings import TrainingTask, train
from polyrhythm_bench.workloads.slow_env import SlowBatch, SlowEnvSettings
from polyrhythm_bench.workloads.slow_policy import SlowPolicy, SlowPolicySettings

# ---------------------------------------------------------------- arithmetic


def ended(ticket, episode_return, *, payload_id="0", success=False, end=SampleEnd.TERMINATED):
    return SampleFinished("simulator-0", 0, ticket, 1, payload_id, end, 4, 4, 0, 0, success, episode_return)


def test_a_kept_result_of_an_older_version_is_absent(tmp_path):
    kept = KeptResults(tmp_path, {"device": "cpu"})
    (tmp_path / "a.json").write_text(json.dumps({"settings": {"device": "cpu"}, "result": {"value": 1}}))
    assert kept.read("a") is None
    assert kept.get("a", lambda: {"value": 2}) == kept.read("a") == {"value": 2}
    with pytest.raises(ConfigError, match="name another folder"):
        KeptResults(tmp_path, {"device": "cuda"}).read("a")


def test_a_curve_is_the_mean_of_each_window():
    assert curve([1, 3, 5, 5, 9], 2) == [2, 5, 9]
    assert curve([1, 3, 5, 5], 2) == [2, 5]


def test_episodes_are_kept_by_ticket_whatever_ended_first():
    training = EpisodeOutcomes()
    for event in (ended(2, 5.0), ended(0, 1.0, success=True), UpdateDone("trainer", 0, 0), ended(1, 3.0)):
        training.on_decision(0.0, event, ())
    training.on_decision(0.0, ended(3, 7.0, payload_id=""), ())  # an evaluation's
    assert training.in_order == [(1.0, True), (3.0, False), (5.0, False)]
    with pytest.raises(AssertionError, match="whole episode"):
        training.on_decision(0.0, ended(4, 1.0, end=SampleEnd.SEGMENT), ())


def test_the_goal_is_a_mean_over_the_last_episodes_that_ended():
    goal = Goal(6.0, episodes=2)
    for at, value in enumerate((9.0, 2.0, 7.0, 5.0, 0.0), start=10):
        goal.on_decision(float(at), ended(at, value), ())
        goal.on_decision(at + 0.5, UpdateDone("trainer", 0, 0), ())
        goal.on_decision(at + 0.5, ended(99, 100.0, payload_id=""), ())
    assert goal.reached
    assert (goal.at, goal.ended) == (13.0, 4), "5.5 of two, then 4.5, then 6; nine alone is not yet two"


def test_without_spread_the_interval_is_the_ratio():
    assert ratio_of_means([2.0, 2.0, 2.0], [4.0, 4.0, 4.0]) == {"ratio": 0.5, "low": 0.5, "high": 0.5}


def test_the_bootstrap_is_paired():
    """Seeds differ tenfold, both ways of one seed alike: taken apart the interval would be far wider."""
    others = [10.0, 20.0, 50.0, 100.0]
    same = ratio_of_means([9.0, 18.0, 45.0, 90.0], others)
    assert all(value == pytest.approx(0.9) for value in same.values())
    crossed = ratio_of_means([90.0, 45.0, 18.0, 9.0], others)
    assert crossed["ratio"] == pytest.approx(0.9)
    assert crossed["high"] / crossed["low"] > 10


def test_the_interval_of_two_seeds_by_hand():
    """Resamples are both 1/1, both 3/1, or one of each (half of them): quantiles 0.025 and 0.975 are 1 and 3."""
    assert ratio_of_means([1.0, 3.0], [1.0, 1.0]) == {"ratio": 2.0, "low": 1.0, "high": 3.0}


def test_the_interval_is_that_of_a_normal_mean():
    own = np.random.default_rng(1).normal(1.0, 0.1, 400).tolist()
    found = ratio_of_means(own, [1.0] * 400)
    assert found["low"] == pytest.approx(fmean(own) - 1.96 * 0.005, abs=0.001)
    assert found["high"] == pytest.approx(fmean(own) + 1.96 * 0.005, abs=0.001)
    assert found == ratio_of_means(own, [1.0] * 400), "seeded"
    assert found != ratio_of_means(own, [1.0] * 400, seed=1)


def a_run(*returns, lag=0.0, success=0.0):
    return {"returns": list(returns), "successes": [success] * len(returns), "lag_mean": lag, "seconds": 2.0}


def test_figures_of_a_task():
    runs = {
        "lockstep": [a_run(1, 3, 8, 8), a_run(3, 3, 7, 7)],
        "async_1": [a_run(1, 3, 6, 10, lag=0.5, success=1.0), a_run(1, 1, 8, 6, lag=1.0)],
    }
    found = summarise(runs, 2)
    assert (found["samples"], found["window"]) == (4, 2)
    assert found["modes"]["lockstep"]["curves"] == [[2, 8], [3, 7]]
    assert found["modes"]["lockstep"]["areas"] == [5, 5]
    own = found["modes"]["async_1"]
    assert (own["areas"], own["area"], own["ratio"]) == ([5, 4], 4.5, 0.9)
    assert (own["low"], own["high"]) == (0.8, 1.0)
    assert (own["last"], own["lag_mean"], own["success"]) == (7.5, 0.75, 0.5)
    assert own["success_curves"] == [[1, 1], [0, 0]]
    assert not found["within_limits"]


@pytest.mark.parametrize(
    ("areas", "within"), [((9.8, 9.7), True), ((9.8, 9.5), False), ((12.0, 8.9), False)], ids=["yes", "point", "low"]
)
def test_a_bar_is_for_the_point_and_for_the_lower_end(areas, within):
    assert LIMITS == {"ratio": 0.97, "low": 0.9}
    runs = {"lockstep": [a_run(10.0), a_run(10.0)], "async_2": [a_run(area) for area in areas]}
    assert summarise(runs, 1)["within_limits"] is within


# ---------------------------------------------------------------- what makes things slow

CARTPOLE_ENV = {"type": "gymnasium", "id": "CartPole-v1"}


def test_an_environment_sleeps_before_each_step_and_is_itself_otherwise():
    settings = SlowEnvSettings(type="x", env=CARTPOLE_ENV, step_ms=10)
    bare, slept = settings.env.build(2), []
    slow = SlowBatch(settings.env.build(2), 0.01, slept.append)
    assert settings.spec() == slow.spec == bare.spec
    seen = [{"state": np.zeros((2, 4), np.float32)} for _ in range(2)]
    for batch, out in zip((bare, slow), seen, strict=True):
        batch.reset([0, 1], [0, 0], [7, 8])
        results = [batch.step([0, 1], np.array([[0], [1]])), batch.step([1], np.array([[1]]))]
        assert [list(result.reward) for result in results] == [[1, 1], [1]]
        batch.observe([0, 1], out)
        batch.close()
    np.testing.assert_array_equal(seen[0]["state"], seen[1]["state"])
    assert slept == [0.01, 0.01], "a call, not a row"


def test_a_policy_sleeps_by_forward_pass_and_by_evaluated_step():
    spec = SlowEnvSettings(type="x", env=CARTPOLE_ENV, step_ms=0).spec()
    settings = SlowPolicySettings(type="x", policy={"type": "categorical"}, act="10ms", evaluate="0ms+0.5ms")
    bare, slow_one = (one.build(spec, seed=3, device="cpu", role="train") for one in (CategoricalSettings(), settings))
    slept = []
    costs = parse_cost(settings.act), parse_cost(settings.evaluate)
    slow = SlowPolicy(slow_one.inner, *costs, slept.append, lambda: 5.0)
    obs = {"state": torch.rand(4, 4)}
    greedy, keys = torch.zeros(4, dtype=torch.bool), torch.arange(4)
    act, wanted = slow.act(obs, greedy, keys), bare.act(obs, greedy, keys)
    assert slept == pytest.approx([0.01])
    torch.testing.assert_close(act.actions, wanted.actions)
    torch.testing.assert_close(slow.value(obs), bare.value(obs))
    assert slept == pytest.approx([0.01])
    torch.testing.assert_close(slow.evaluate(obs, act.forward_inputs), bare.evaluate(obs, wanted.forward_inputs))
    assert slept == pytest.approx([0.01, 0.002])
    assert {name.removeprefix("inner.") for name in slow.state_dict()} == set(bare.state_dict())


def test_what_is_slow_is_the_same_run_otherwise():
    config = load_config("cartpole", ["rollout.rows=4", "training.versions=1"])
    slow = wall_clock.slowed(config, 0.25)
    assert (slow.env.env, slow.env.step_ms) == (config.env, 10.0)
    assert slow.policy.policy == config.policy
    assert parse_cost(slow.policy.act).mean(5) == pytest.approx(0.01)
    assert parse_cost(slow.policy.evaluate).mean(4) == pytest.approx(0.001)
    unlike = {"env", "policy"}
    assert slow.model_dump(exclude=unlike) == config.model_dump(exclude=unlike)


def test_training_sleeps_for_three_tenths_of_the_rollout():
    """100 passes of 20 ms are 2 s, of which 600 ms; 50 chunk steps are evaluated 4 + 1 times."""
    stages = wall_clock.StageTotals()
    stages.passes, stages.chunk_steps = 100, 50
    assert wall_clock.training_ms(stages, epochs=4) == pytest.approx(600 / 250)


def test_figures_of_the_time_to_success():
    def runs(*seconds):
        return [{"seconds": s, "versions": 4, "ended": 40, "lag_mean": 0.5, "training_s": 0.25 * s} for s in seconds]

    found = wall_clock.summarise({"lockstep": runs(12.0, 8.0, 10.0), "async_1": runs(6.0, 4.0, 8.0)})
    own = found["modes"]["async_1"]
    assert (own["seconds"], own["speedup"]) == (6.0, pytest.approx(10 / 6))
    assert own["speedup_by_seed"] == [2.0, 2.0, 1.25]
    assert found["training_over_rollout"] == pytest.approx(1 / 3)
    assert found["within_limit"]
    assert not wall_clock.summarise({"lockstep": runs(12.0), "async_1": runs(9.3)})["within_limit"]


# ---------------------------------------------------------------- runs

SMALL = ("rollout.rows=12", "training.versions=3", "training.mini_batch_samples=4", "training.epochs=1")
TINY = replace(CARTPOLE, settings=(*CARTPOLE.settings, *SMALL, "env.max_steps=20"), window=4)


@pytest.mark.parametrize("mode", learning.MODES)
@pytest.mark.parametrize("name", TASKS)
def test_modes_of_a_task_differ_by_freshness_and_batching_alone(name, mode):
    config, first = (TASKS[name].config(MODES[wanted], 5) for wanted in (mode, "lockstep"))
    assert config.freshness.max_lag == {"lockstep": 0, "async_1": 1, "async_2": 2}[mode]
    assert config.freshness.on_update == ("drain" if mode == "lockstep" else "continue")
    assert config.batching.type == ("lockstep" if mode == "lockstep" else "dynamic")
    alike = {"training": {"streaming", "order"}, "rollout": {"sharding", "routing"}}
    unlike = {"freshness": True, "batching": True, **alike}
    assert config.model_dump(exclude=unlike) == first.model_dump(exclude=unlike)
    assert (config.launcher, config.seed, config.rollout.segment_steps) == ("inline", 5, 0)
    assert config.rollout.rows == 3 * config.training.batch_size, "as many as α = 2 lets work"


@pytest.mark.parametrize(("mode", "lags"), [("lockstep", (0.0, 0.0)), ("async_2", (0.9, 2.0))])
def test_asynchrony_in_one_process_is_real(mode, lags):
    """Twelve versions of short episodes: the lag is near its bound, since its first versions cannot be behind."""
    found = train(replace(TINY, settings=(*TINY.settings, "training.versions=12")).config(MODES[mode], 1))
    assert len(found["returns"]) == len(found["successes"]) == 12 * 4
    assert all(1 <= value <= 20 for value in found["returns"])
    assert lags[0] <= found["lag_mean"] <= lags[1]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def measured(kept):
    """Two seeds of a tiny task, in processes side by side."""
    return learning.run({"tiny": TINY}, seeds=2, folder=kept)


@long(10, "bench learning, begun again")
def test_finished_trainings_are_not_repeated_unless_settings_changed(measured, kept):
    files = sorted(kept.iterdir())
    assert len(files) == 3 * 2
    assert learning.run({"tiny": TINY}, seeds=2, folder=kept) == measured
    one = next(path for path in files if path.name == "tiny-seed-1-async_1.json")
    one.write_text(one.read_text().replace('"seconds": ', '"seconds": 1000'))
    again = learning.run({"tiny": TINY}, seeds=2, folder=kept)["tiny"]["modes"]
    assert again["async_1"]["seconds"] > 1000 > again["async_2"]["seconds"], "it was read"
    one.write_text(one.read_text().replace('"seed": 1', '"seed": 2'))
    learning.run({"tiny": TINY}, seeds=2, folder=kept)
    assert '"seconds": 1000' not in one.read_text(), "another seed's result does not count"


def test_all_modes_and_seeds_have_the_same_axis(measured):
    found = measured["tiny"]
    assert not children()
    assert list(found["modes"]) == ["lockstep", "async_1", "async_2"]
    assert (found["samples"], found["seeds"]) == (12, [0, 1])
    for own in found["modes"].values():
        assert [len(points) for points in own["curves"]] == [3, 3]
        assert own["areas"] == pytest.approx([fmean(points) for points in own["curves"]])
    lockstep, behind = found["modes"]["lockstep"], found["modes"]["async_2"]
    assert lockstep["lags"] == [0, 0]
    assert all(0 < lag <= 2 for lag in behind["lags"])
    assert lockstep["areas"][0] != lockstep["areas"][1], "seeds differ"
    alone = train(TINY.config(MODES["lockstep"], 1))
    assert fmean(alone["returns"]) == lockstep["areas"][1], "lock-step is the same wherever it runs"


def test_the_page_has_every_seed_and_the_figure_every_curve(measured, tmp_path):
    runs = [{"seconds": s, "versions": 4, "ended": 40, "lag_mean": 0.5, "training_s": 1.0} for s in (8.0, 4.0)]
    how = {"settings": ["a=1"], "seeds": [0, 1], "goal": 80.0, "episodes": 64, "step_ms": 10.0, "act_ms": 10.0}
    clock = {**how, **wall_clock.summarise({"lockstep": runs, "async_1": runs[::-1]})}
    page, drawn = learning_page.write({"wall_clock": clock, **measured}, tmp_path)
    text = page.read_text()
    found = measured["tiny"]["modes"]
    for seed in (0, 1):
        first, behind = found["lockstep"]["areas"][seed], found["async_1"]["areas"][seed]
        assert f"| {seed} | {first:.2f} | {behind:.2f} ({behind / first:.3f}) |" in text
    assert f"{found['async_2']['ratio']:.3f} [{found['async_2']['low']:.3f}" in text
    assert "| 0 | 8.00 | 4.00 (2.000) |" in text
    assert "training took 20% of the lock-step rollout" in text
    assert f"]({drawn.name})" in text
    lines = [
        element.get("class", "")
        for element in ET.fromstring(drawn.read_text()).iter("{http://www.w3.org/2000/svg}path")
    ]
    assert sum(kind.endswith("one") for kind in lines) == 3 * 2
    assert sum(kind in ("line s0 d0", "line s1 d1", "line s2 d2") for kind in lines) == 3


def slow_cartpole(mode, ms):
    settings = [*CARTPOLE.settings, *SMALL, "env.max_steps=20", *wall_clock.MODES[mode], "rollout.rows=4"]
    return wall_clock.slowed(load_config("cartpole", settings), ms / 10, step_ms=ms, act_ms=ms)


@long(5, "bench learning, in processes")
def test_time_to_a_goal_in_processes():
    """Slow by a millisecond here and there, and a goal that the first eight episodes reach."""
    found = wall_clock.time_to_goal(slow_cartpole("async_1", 1.0), Goal(1.0, 8))
    assert not children()
    assert not orphaned_folders()
    assert found["ended"] == 8
    assert found["versions"] <= 2
    assert found["seconds"] > 2 * 8 * 0.001


def test_a_goal_that_is_never_reached_is_an_error():
    with pytest.raises(RunHalted, match="no mean return of 1000 in 3 versions"):
        wall_clock.fast(slow_cartpole("lockstep", 0.0), Goal(1000.0, 8))


def test_a_slow_run_in_lockstep_does_what_the_fast_one_did():
    """So how long training is to sleep can be told from the fast one."""
    slow = slow_cartpole("lockstep", 0.1)
    fast = slow.model_copy(update={"env": slow.env.env, "policy": slow.policy.policy})
    found = [wall_clock.fast(config, Goal(1.0, 8)) for config in (fast, slow)]
    assert (found[0].passes, found[0].chunk_steps) == (found[1].passes, found[1].chunk_steps)
    assert found[0].updates == found[1].updates == 1
    assert found[1].training_s > 0


# ---------------------------------------------------------------- the command


def test_an_unknown_part_is_refused(capsys):
    assert main(["bench", "learning", "--tasks", "cartpole,drawr"]) == 2
    assert "--tasks drawr: it is not one of wall_clock, cartpole, drawer, reach, quickstart" in capsys.readouterr().err


@long(7, "bench learning, short")
def test_the_command_measures_the_parts_that_it_is_told(monkeypatch, capsys):
    assert set(PARTS) == {"wall_clock", *TASKS}
    monkeypatch.setitem(TASKS, "cartpole", TINY)
    assert main(["bench", "learning", "--tasks", "cartpole", "--seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["parts"]
    assert list(found) == ["cartpole"]
    assert found["cartpole"]["samples"] == 12


def test_parts_in_words_leave_the_curves_out(measured):
    said = words({"parts": measured})
    assert said.startswith("tiny\n\n")
    assert "lockstep, areas: " in said
    assert "curves" not in said


@pytest.mark.sim
def test_the_drawer_is_learned_from_as_the_others_are(simulator):
    small = ("rollout.rows=6", "training.mini_batch_samples=2", "training.versions=3", "training.epochs=1")
    drawer = TASKS["drawer"]
    found = train(TrainingTask(drawer.recipe, (*drawer.settings, *small), 2).config(MODES["async_1"], 0))
    assert len(found["returns"]) == 6
    assert all(value > 0 for value in found["returns"])


@long(4, "a small quickstart")
@pytest.mark.sim
def test_the_quickstart_begins_with_a_warm_start_of_the_seed(simulator):
    small = (
        *("env.tasks=[coffee-button-v3, handle-press-v3]", "rollout.rows=4", "rollout.sharding=even:2"),
        *("training.versions=2", "training.mini_batch_samples=2", "training.epochs=1"),
        *("training.critic_warmup_updates=0", "demonstrations.episodes_per_task=1"),
        *("supervised.steps=2", "supervised.batch_size=16", "supervised.warmup_steps=1"),
    )
    config = TrainingTask("quickstart", small, 2).config(MODES["lockstep"], 3)
    assert config.demonstrations.seed == config.seed == 3
    assert len(train(config)["successes"]) == 4


def test_the_script_writes_what_it_was_given(measured, tmp_path, monkeypatch):
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"parts": measured}))
    script = Path(__file__).parents[1] / "scripts" / "learning_table.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(results), "--out", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "learning.md").is_file()
    assert (tmp_path / "learning_tiny.svg").is_file()
