"""Scenes that only take time: what they refuse, what the simulated cluster and the formula make of them, a live one."""

from __future__ import annotations

import pytest
from tests.long import long

from polyrhythm.errors import ConfigError
from polyrhythm_bench.cases import fidelity, overlap
from polyrhythm_bench.cases.fidelity import FidelityCase
from polyrhythm_bench.harness.version_cost import VersionCost
from polyrhythm_bench.workloads import scene, transport_only
from polyrhythm_bench.workloads.scene import MODES, StageOverhead, StageScenario, parse_scene

SMALL = StageScenario(env_batches=4, episode_steps=4, sim_latency="constant:10ms", train_latency="constant:20ms")
AT_ONCE = {"type": "dynamic", "max_rows": 4, "max_wait_ms": 0.0}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("env_batches=7", "env_batches = 7: not a multiple of 2 simulators"),
        ("sim_latency=10ms", "sim_latency = '10ms': .*unknown type.*write constant:10ms"),
        ("infer_latency=fast", "infer_latency = 'fast': .*write for example 10ms"),
        ("train_latency=a third", "train_latency = 'a third': .*write constant:10ms"),
        ("slots=4", "slots = 4: no such key"),
        ("max_lag=-1", "max_lag = -1"),
    ],
)
def test_what_no_scene_can_be_is_refused_in_one_sentence(word, told):
    with pytest.raises(ConfigError, match=told):
        parse_scene([word])


def test_words_make_a_scene():
    made = parse_scene(["env_batches=8", "sim_latency=gamma:10ms:0.5", "max_lag=1.5"])
    assert (made.env_batches, made.sim_latency, made.max_lag, made.rows) == (8, "gamma:10ms:0.5", 1.5, 1)


def test_a_share_of_training_is_one_of_the_lock_step_rollout():
    """Four env batches of constant steps: 4 steps of 10 ms, each with a pass of 10.4 ms, are 81.6 ms."""
    shared = SMALL.model_copy(update={"train_latency": "30%"}).settled()
    assert shared.train_latency == f"constant:{0.3 * 81.6:.3f}ms"
    assert SMALL.settled() is SMALL


def test_the_simulated_lock_step_is_the_sum_of_its_stages():
    assert scene.simulated(SMALL, "lockstep", {"type": "lockstep"}) == pytest.approx(16 / (0.0816 + 0.020))
    slower = scene.simulated(SMALL, "lockstep", {"type": "lockstep"}, StageOverhead(pass_s=0.001, step_s=0.002))
    assert slower == pytest.approx(16 / (0.0816 + 4 * 0.003 + 0.020))


def test_no_simulation_exceeds_the_bound():
    for mode in MODES:
        assert scene.simulated(SMALL, mode, overlap.batching(mode, AT_ONCE)) <= scene.bound(SMALL)
    trains = SMALL.model_copy(update={"train_latency": "constant:800ms"})
    assert scene.bound(trains) == pytest.approx(16 / 0.8), "the trainer is the bottleneck"


def test_a_live_update_sleeps_once():
    config = scene.live(SMALL, "full_async", AT_ONCE, versions=3)
    assert config.training.epochs == 1
    assert config.training.mini_batch_samples == config.training.batch_size == SMALL.samples
    assert not config.algorithm.recomputes, "which would be another evaluation, and sleep again"


def test_figures_are_medians_beside_limit_bound_and_lock_step():
    def cost(seconds):
        cpu_s_by = {"main": seconds / 100, "generator-0": seconds / 25}
        return VersionCost(seconds, 16 / seconds, 16, 0.5, 0.25, 0.0, cpu_s_by, {})

    turns = {mode: [cost(0.2), cost(0.4), cost(0.3)] for mode in MODES}
    turns["full_async"] = [cost(0.1), cost(0.1), cost(0.15)]
    found = overlap.summarise(SMALL, turns, [200.0, 160.0, 150.0], dict.fromkeys(MODES, 100.0), limit=160.0)
    full = found["modes"]["full_async"]
    assert full["transitions_per_s"] == pytest.approx(160.0)
    assert (full["fraction_of_limit"], full["fraction_of_simulated"]) == pytest.approx((1.0, 1.6))
    assert full["speedup"] == pytest.approx(2.0), "2, 4 and 2 in the three turns"
    assert full["fraction_of_bound"] == pytest.approx(160 / scene.bound(SMALL))
    assert found["within_limits"]
    assert full["cpu_ms_per_transition"] == pytest.approx(1e3 * 0.1 / 20 / 16), "0.31 ms in two turns of three"
    assert full["main_us_per_chunk_step"] == pytest.approx(1e6 * 0.1 / 100 / 16)
    assert found["within_cpu_limit"]
    assert found["modes"]["lockstep"]["cpu_ms_per_transition"] > overlap.CPU_MS_LIMIT
    assert (found["bare"], found["bare_fraction_of_limit"]) == (160.0, 1.0)
    assert found["fraction_of_bare"] == pytest.approx(0.8), "0.8, 1.0 and 0.71 in the three turns"


@long(5, "bare stages for two seconds")
def test_bare_stages_go_on_as_fast_as_they_sleep_at_most():
    """A step of 10 ms and a pass of at least 10.2 ms for each of four env batches of two rows; a pass serves one of
    them, so that two generators are wanted at once."""
    pairs = SMALL.model_copy(update={"rows": 2, "generators": 2})
    found = transport_only.rate(pairs, most=1, seconds=2.0)
    alone = 2 / 0.0202
    assert alone < found < 4 * alone, "faster than one env batch could be, never faster than four"


def test_what_a_run_takes_longer_is_found_and_added():
    """A run whose overhead is known stands for a live one: that overhead is measured, and the simulation with it takes
    as long, version by version."""
    case = FidelityCase("small", batching=AT_ONCE)
    added = StageOverhead(0.001, 0.0001, 0.002, 0.003, 0.004, 0.005, 0.006)
    bare, timed = (fidelity.simulated(case, SMALL, 3, overhead) for overhead in (StageOverhead(), added))
    assert timed.overhead(bare) == pytest.approx(added)
    found = fidelity.compare(SMALL, timed, fidelity.simulated(case, SMALL, 3, timed.overhead(bare)), bare, added)
    assert (found["error"], found["standard_error"]) == pytest.approx((0.0, 0.0))
    assert found["bare"] > 0.05
    assert len(timed.seconds) == 3


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="only = fast: not a setting of fidelity; known are lock-step, "):
        fidelity.run(only=["fast", "lock-step"])


@long(10, "bench overlap, one scene live")
def test_a_live_scene_beside_its_simulation():
    small = SMALL.model_copy(update={"simulators": 1, "env_batches": 2})
    found = fidelity.run(versions=2, repeats=1, settings=[FidelityCase("small", small, batching=AT_ONCE)])
    own = found["modes"]["small"]
    assert own["bare"] > 0, "a live stage takes at least as long as it sleeps"
    assert own["error"] < own["bare"], "what a live stage takes longer is added"
    assert min(own["pass_ms"], own["step_ms"]) > 0
    assert own["errors_by_turn"] == [own["error"]]
    assert own["neighbours_by_turn"] == [own["neighbours"]]
    assert found["largest_error"] == abs(own["error"])
