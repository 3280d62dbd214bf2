"""Engines that sleep, schedules live and simulated, and what is made of their rates."""

from __future__ import annotations

import random
from contextlib import closing

import numpy as np
import pytest
from tests.long import long

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.plugins.virtual.clustersim.costs import parse_cost, parse_count
from polyrhythm.policies.engine import EngineRequest
from polyrhythm_bench.cases import (
    language,
    language_batches,
    language_engines,
    language_figures,
    language_scaling,
    language_schedules,
)
from polyrhythm_bench.harness.version_cost import VersionCost
from polyrhythm_bench.workloads.answer_scenes import SCENES
from polyrhythm_bench.workloads.answers import MODES, AnswerScene, SimulatedRates, cut_at, live, simulated
from polyrhythm_bench.workloads.answers_env import AnswersEnvSettings
from polyrhythm_bench.workloads.roll_figures import FIGURES, FigureCell, clipped_normal
from polyrhythm_bench.workloads.scaled_scenes import MODELS, TOKENS_A_STEP, scaled
from polyrhythm_bench.workloads.sleeping_engine import DecodingCosts, Sleeper, SleepingEngine
from polyrhythm_bench.workloads.turns_scene import TurnScene

TINY = AnswerScene(
    prompts=2, group=2, devices=3, training_devices=2, places=4, tokens="constant:4steps", decode="0ms", update_ms=1
)


class FakeTime:
    """A clock that sleeping advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def sleeper(self) -> Sleeper:
        return Sleeper(self.sleep, lambda: self.now)


def asked(number: int) -> EngineRequest:
    return EngineRequest(number, np.zeros(1, np.int32), 1000, False, number)


def test_a_step_takes_what_the_rows_cost_and_new_prompts_are_read_first() -> None:
    time = FakeTime()
    costs = DecodingCosts(parse_count(3), parse_cost("10ms"), parse_cost("5ms+1ms"))
    engine = SleepingEngine(costs, 4, time.sleeper())
    engine.weights_changed(7)
    engine.add(asked(1))
    engine.add(asked(2))
    assert engine.step() == []
    assert time.now == pytest.approx(0.017)
    time.now += 0.003  # something else meanwhile
    assert len(engine.abort(2).tokens) == 1
    assert engine.step() == []
    assert time.now == pytest.approx(0.023), "the engine made up for it"
    (found,) = engine.step()
    assert (found.finished, found.versions.tolist()) == (True, [7, 7, 7])


def test_a_resumed_answer_is_as_long_as_it_would_have_been() -> None:
    costs = DecodingCosts(parse_count("lognormal:20steps:1.0"), parse_cost("0ms"), parse_cost("0ms"))
    engine = SleepingEngine(costs, 1, FakeTime().sleeper())
    engine.add(asked(5))
    engine.step()
    engine.add(asked(5)._replace(prefix=engine.abort(5)))
    while not (found := engine.step()):
        pass
    assert len(found[0].tokens) == costs.length(5) > 2


def test_answers_are_cut_alike_live_and_simulated() -> None:
    live_costs = DecodingCosts(parse_count("lognormal:20steps:1.0"), parse_cost("0ms"), parse_cost("0ms"), 25)
    drawn = [live_costs.length(key) for key in range(2000)]
    assert max(drawn) == 25
    assert np.mean(drawn) == pytest.approx(cut_at(25, "lognormal:20steps:1.0").distribution.mean, rel=0.05)


def test_answers_to_a_prompt_all_succeed_all_fail_or_neither() -> None:
    batch = AnswersEnvSettings(type="", solved=0.2, hopeless=0.3).build(400)
    batch.reset(range(400), [0] * 400, range(400))
    assert np.mean(batch.chance == 1.0) == pytest.approx(0.2, abs=0.06)
    assert np.mean(batch.chance == 0.0) == pytest.approx(0.3, abs=0.07)
    found = batch.step(range(400), np.zeros((400, 1), np.float32))
    assert found.terminated.all()
    assert found.reward[batch.chance == 1.0].all()
    assert not found.reward[batch.chance == 0.0].any()


@pytest.mark.parametrize(("name", "per_station"), [("lockstep", 1), ("queue", 1), ("alpha_1_abort", 1), ("queue", 3)])
def test_a_scene_runs_live(name: str, per_station: int) -> None:
    scene = TINY.model_copy(update={"per_station": per_station})
    config = live(scene, MODES[name], 3).model_copy(update={"launcher": "inline"})
    with closing(build_pipeline(RunContext(config))) as pipeline:
        pipeline.loop.train_until(3)
        ledger = pipeline.loop.conductor.ledger
        names = set(pipeline.launcher.hosting.statistics(fresh=True))
    assert (ledger.imbalance, ledger.trained) == (0, 3 * TINY.samples)
    assert {one for one in names if one.startswith("generator-")} == {
        f"generator-{i}" for i in range(scene.generators(MODES[name]))
    }


def test_a_station_for_several_devices_takes_as_long_as_they_would() -> None:
    """Answers of one length, so that no device of a station has more to do than another."""
    each = AnswerScene(
        prompts=8, group=4, devices=8, training_devices=4, places=16, tokens="constant:10steps", decode="5ms+1ms"
    )
    four = each.model_copy(update={"per_station": 4})
    assert (each.generators(MODES["lockstep"]), four.generators(MODES["lockstep"])) == (8, 2)
    assert four.station_places == 64
    for name in ("lockstep", "replicated", "alpha_1_continue"):
        rates = [simulated(scene, MODES[name], counted=3).samples_per_s for scene in (each, four)]
        assert rates[1] == pytest.approx(rates[0], rel=0.02), name


def test_answers_to_a_prompt_may_be_equally_long() -> None:
    """A group of four, one on each of two devices: as long as its one length, or as the longest of four."""
    apart = AnswerScene(prompts=2, group=4, devices=2, decode="10ms", prefill="0ms", update_ms=1)
    same = apart.model_copy(update={"same_tokens": True})
    seconds = [scene.samples / simulated(scene, MODES["lockstep"]).samples_per_s for scene in (apart, same)]
    assert seconds[1] < 0.8 * seconds[0]


@pytest.mark.parametrize("model", MODELS)
def test_lengths_and_costs_of_the_scaled_scenes_are_what_they_are_derived_from(model: str) -> None:
    lengths, scene = MODELS[model], scaled(model, 128, 32)
    rng, tokens = random.Random(1), cut_at(scene.longest, scene.tokens).distribution
    drawn = np.array([tokens.sample(rng) for _ in range(100_000)]) * TOKENS_A_STEP
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert drawn.max() == 30_720
    assert (drawn**2).sum() / drawn.sum() / 2 == pytest.approx(lengths.context, rel=0.02)
    step_ms = 1e3 * parse_cost(scene.decode).mean(0) * lengths.shortened / TOKENS_A_STEP
    assert step_ms == pytest.approx(2 * 8.19e9 / (0.7 * 3.35e12) * 1e3, rel=1e-3), "the weights are read once"
    assert (scene.samples, scaled(model, 16, 8).update_ms) == (4096, pytest.approx(8 * scene.update_ms, rel=1e-2))


def test_the_best_split_counts_and_throughput_is_over_that_of_the_fewest_gpus() -> None:
    found = language_scaling.summarise("base", {16: {0: 400.0, 4: 500.0, 8: 200.0}, 32: {0: 200.0, 8: 50.0, 16: 80.0}})
    assert found["published"] == 2.24
    rows = found["gpus"]
    assert [(row["training"], row["speedup"]) for row in rows.values()] == [(8, 2.0), (8, 4.0)]
    assert [(row["scaling"], row["lockstep_scaling"]) for row in rows.values()] == [(1.0, 1.0), (4.0, 2.0)]


@long(3, "twelve simulations")
def test_each_mechanism_of_the_paper_helps_where_prompts_are_filtered() -> None:
    scenes = [SCENES["filtered"].model_copy(update={"seed": seed}) for seed in range(4)]  # one's gain is 2.4 to 3.4
    lockstep, queue, both = (
        sum(simulated(scene, MODES[name], counted=12).samples_per_s for scene in scenes)
        for name in ("lockstep", "queue", "alpha_2_continue")
    )
    assert queue / lockstep > 2.5, "figure 7 has 3.4 for generation alone"
    assert both / lockstep >= language_schedules.SPEEDUP


@pytest.mark.parametrize("changes", [{"together": True}, {"extra_groups": 1, "extra_members": 1}, {"max_lag": 1.0}])
def test_a_scene_of_turns_runs_live_and_simulated(changes: dict[str, object]) -> None:
    scene = TurnScene(groups=2, group=2, turns=3, tokens="constant:2steps", step="constant:2ms")
    cell = FigureCell("", "", scene.model_copy(update=changes))
    with closing(build_pipeline(RunContext(cell.live(2, 7).model_copy(update={"launcher": "inline"})))) as pipeline:
        pipeline.loop.train_until(2)
        ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.trained) == (0, 2 * scene.samples)
    (seconds,) = language_figures.simulated([cell], 3)
    assert seconds == pytest.approx(0.007, abs=0.0011), "three steps of 2 ms and an update of 1 ms"


def test_a_clipped_normal_has_the_mean_of_one() -> None:
    drawn = np.maximum(0, np.random.default_rng(0).normal(10, 10, 200_000))
    assert parse_cost(clipped_normal(10, 10)).mean() == pytest.approx(drawn.mean() / 1000, rel=0.01)


@long(2, "simulations of a figure")
def test_replication_helps_in_the_simulated_figure_where_places_are_few() -> None:
    few, many = (
        language_figures.simulated([cell for cell in FIGURES["figure_8"]() if cell.row == row], 5)
        for row in ("16×32", "4×16")
    )
    assert few[0] / few[1] > 1.2, "1.95 published"
    assert many[0] / many[1] == pytest.approx(1.0, abs=0.1), "all answers have places"


def test_gains_are_over_the_first_way_of_the_row_in_the_same_turn() -> None:
    cells = [FigureCell(row, way, TINY, published=2.0) for row in "ab" for way in ("one", "two")]
    rows = language_figures.summarise(cells, [[4.0, 6.0], [2.0, 2.0], [1.0, 1.0], [1.0, 0.5]], [4.0, 1.0, 1.0, 1.0])
    assert [row["gain"] for row in rows] == [1.0, 2.5, 1.0, 1.5]
    assert [row["simulated_gain"] for row in rows] == [1.0, 4.0, 1.0, 1.0]
    assert [row["difference"] for row in rows] == pytest.approx([0.25, 1.0, 0.0, -0.25])


def test_rates_are_compared_with_lock_step_in_the_same_turn() -> None:
    def costs(*seconds: float, tokens: float = 0.0) -> list[VersionCost]:
        busy = {"generator-0": 0.5, "generator-1": 0.7, "trainer": 0.2}
        return [VersionCost(s, 4 / s, 4, 0.5, 0.1, 0.0, {"main": 0.01}, busy, tokens) for s in seconds]

    turns = {name: costs(1.0, 2.0, tokens=9.0) for name in MODES} | {"lockstep": costs(2.0, 6.0)}
    expected = dict.fromkeys(MODES, SimulatedRates(4.0, 0.5, 0.2, 4.0))
    found = language_schedules.summarise(TINY, turns, expected)
    assert found["best_speedup"] == pytest.approx(2.5)
    assert found["within_limits"]
    lockstep, queue, overlapped = (found["modes"][name] for name in ("lockstep", "queue", "alpha_1_abort"))
    assert lockstep["tokens_per_s"] == pytest.approx((2.0 + 4 / 6) / 2 * 4), "answers times their mean length"
    assert queue["tokens_per_s"] == 9.0
    assert queue["devices"] == pytest.approx(0.6 + 0.2), "in turn on all of them"
    assert overlapped["devices"] == pytest.approx(0.6 / 3 + 0.2 * 2 / 3)


def test_engines_are_compared_within_a_turn() -> None:
    rates = {"native": {1: [10.0, 30.0]}, "generate": {1: [5.0, 10.0]}, "vllm": {1: [9.0, 20.0]}}
    rates["bare_vllm"] = {1: [10.0, 20.0]}
    found = language_engines.summarise(rates)
    assert found["tokens_per_s"] == [{"sequences": 1, "native": 20.0, "generate": 7.5, "vllm": 14.5, "bare_vllm": 15.0}]
    assert found["ratios"][0]["vllm/bare_vllm"] == pytest.approx(0.95)
    assert found["within_limits"] == {"vllm/bare_vllm": True, "native/generate": True}


def test_the_ablation_of_require_batches_has_equal_samples_and_steps() -> None:
    """What a training gives is `harness.trainings.train`'s, which other tests hold."""
    for batches in language_batches.BATCHES:
        training = (config := load_config("quickstart_lm", language_batches.way(batches, 1))).training
        assert training.batch_size * config.freshness.sync_interval == language_batches.VERSION
        assert (training.step_samples or training.batch_size, training.minibatch_steps) == (64, 0)
    one = {"successes": [0.0] * 18 + [1.0] * 2, "seconds": 30.0, "lag_mean": 1.0}
    (found,) = language_batches.summarise({2: [one, {**one, "seconds": 50.0}]}, versions=10)
    assert (found["success"], found["last"], found["seconds_per_version"]) == (pytest.approx(0.1), 1.0, 4.0)


@long(40, "bench language --tiny: three short runs of five processes")
def test_the_tiny_form_has_lock_step_and_what_overlaps() -> None:
    (found,) = language.run_tiny()["parts"].values()
    assert set(found["modes"]) == {"lockstep", "queue", "alpha_1_continue"}
    assert all(mode["samples_per_s"] > 0 for mode in found["modes"].values())


def test_the_tiny_form_takes_no_parts_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "language", "--only", "plain", "--tiny"]) == 2
    assert "--tiny: bench language then has one scene, once; leave out --only" in capsys.readouterr().err
