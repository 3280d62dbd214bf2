"""The judge against cases worked out by hand: what limits, what it costs, what it takes, how old samples are."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
from tests.plugins.planning.profiles import GB, nodes, profile, recipe, work
from tests.plugins.planning.test_cluster import profile_of

from polyrhythm.config.load import load_config
from polyrhythm.plugins.planning.arrangement import (
    Arrangement,
    arranged,
    arrangement_of,
    changed_lines,
    devices_text,
    reshaped,
)
from polyrhythm.plugins.planning.judge import FULL, Length, Prediction, predict
from polyrhythm.plugins.planning.judging import Case, Judges
from polyrhythm.plugins.planning.problem import problem_of
from polyrhythm.plugins.planning.profile import StationProfile

#: Eight rows on the host, a generator on device 0, the trainer on device 1.
APART = Arrangement(4, 1, 1, 2, generator_devices=(0,), trainer_devices=(1,), micro_batch=32)
CONFIG = recipe()
FREE = ((1, 1e-5),)


def judged(one: Arrangement, devices: int | tuple[int, ...] = 2, *overrides: str, **costs: object) -> Prediction:
    config = recipe(*overrides)
    there = nodes(*((devices,) if isinstance(devices, int) else devices))
    return predict(profile(config, **costs), arranged(config, one), there)  # type: ignore[arg-type]


def test_an_update_that_limits_gives_its_own_rate() -> None:
    """160 chunk steps of 12.5 ms and a step of 0.1 s: 2.1 s for 8 samples."""
    found = judged(APART, step=FREE, passes=FREE)
    assert found.version_s == pytest.approx(2.1, rel=0.01)
    assert found.samples_per_s == pytest.approx(8 / 2.1, rel=0.01)
    assert found.busy["trainer"] > 0.9
    assert not found.halted


def test_two_ranks_take_half_the_passes() -> None:
    found = judged(replace(APART, trainer_devices=(1, 2)), 3, step=FREE, passes=FREE)
    assert found.version_s == pytest.approx(2.0 / 2 + 0.1 + 2 * 6 * GB / 200e9, rel=0.02)


def test_rollout_that_limits_gives_a_cycle_of_step_and_pass() -> None:
    """Two rows: four times 20 chunk steps of step and pass and a reset; and weights are loaded between two passes."""
    found = judged(replace(APART, simulators=1), micro_batch=FREE, passes=((1, 0.05),), step=((1, 0.05),))
    assert found.version_s == pytest.approx(8 / 2 * (20 * (0.05 + 0.05) + 0.1) + 0.1, rel=0.05)


@pytest.mark.parametrize("rows", [4, 6, 8, 16])
@pytest.mark.parametrize("max_lag", [0, 2])
def test_samples_that_come_in_waves_are_counted_in_whole_waves(rows: int, max_lag: int) -> None:
    """All episodes have one length, and versions of 16 samples are no multiple of the rows, or a part of them."""
    config = load_config("latency", [f"rollout.rows={rows}", f"freshness.max_lag={max_lag}"])
    found, longer = (
        predict(profile_of(config), config, nodes(0), length=length).samples_per_s
        for length in (FULL, Length(counted=48, skipped=12))
    )
    assert found == pytest.approx(longer, rel=0.01)


@pytest.mark.parametrize("max_lag", [0.0, 0.5, 1.0, 2.0])
def test_no_sample_is_older_than_the_lag_allows(max_lag: float) -> None:
    found = judged(APART, 2, f"freshness.max_lag={max_lag}")
    assert found.lag_max <= max_lag + 0.5  # a fraction is of the samples
    assert found.lag_mean <= max_lag


def test_a_shared_device_is_slower_than_two() -> None:
    together = replace(APART, trainer_devices=(0,))
    alone, shared, leased = judged(APART), judged(together, 1), judged(replace(together, sharing="lease"), 1)
    assert alone.samples_per_s > shared.samples_per_s > 0
    assert leased.samples_per_s > 0
    assert shared.memory["cuda:0"] > leased.memory["cuda:0"]
    assert "would hold" in shared.over
    assert not leased.over


def test_more_steps_than_cores_slow_each_other_down() -> None:
    wide = replace(APART, simulators=64, rows=1)
    slow = {"step": ((1, 0.5),), "passes": FREE, "micro_batch": FREE, "fixed": 0.0}
    many = judged(wide, 2, "training.mini_batch_samples=64", **slow)
    assert many.version_s == pytest.approx(20 * 0.5 * 64 / 16, rel=0.15)
    hosts = judged(wide, (2, 0), "training.mini_batch_samples=64", **slow)
    assert many.version_s / hosts.version_s == pytest.approx(2, rel=0.15)


def test_long_episodes_are_joined_without_changing_the_rate() -> None:
    config = arranged(recipe("training.mini_batch_samples=16"), APART)
    long = profile(config, chunk_steps=96)
    each = predict(long, config, nodes(2))
    joined = predict(long, config, nodes(2), length=Length(requests=1000))
    assert joined.version_s == pytest.approx(each.version_s, rel=0.06)


def test_memory_is_of_the_amounts_that_are_held() -> None:
    assert judged(replace(APART, micro_batch=8)).over == ""
    assert "cuda:1 would hold 190 of 80 GB" in judged(replace(APART, micro_batch=0)).over
    assert (
        "the host would hold 600 of 500 GB"
        in judged(
            replace(APART, simulators=600, rows=1),
            2,
            "training.mini_batch_samples=600",
            chunk_steps=1,
            micro_batch=FREE,
        ).over
    )


def test_an_arrangement_is_a_recipe_and_back() -> None:
    one = replace(APART, slots=2, sharing="lease")
    assert arrangement_of(arranged(CONFIG, one), nodes(2)) == one
    lines = changed_lines(CONFIG, one)
    assert "placement.sharing=lease" in lines
    assert "rollout.rows=2" not in lines
    assert arrangement_of(load_config("latency", [*_given(), *lines]), nodes(2)) == one
    assert [devices_text(ids) for ids in ((), (3,), (0, 1, 2, 6), (1, 3))] == ["cpu", "3", "0-2,6", "1,3"]


def _given() -> tuple[str, ...]:
    from tests.plugins.planning.profiles import RECIPE

    return RECIPE


def test_rows_stay_the_same_or_there_is_no_such_arrangement() -> None:
    assert reshaped(APART, env_batches=2) == replace(APART, env_batches=2, rows=1)
    assert reshaped(APART, simulators=3) is None
    assert reshaped(APART, slots=4) is None


def test_scores_are_waited_for() -> None:
    config = recipe("scoring={function: builtins:len}")
    scorer = StationProfile(works={"score": work((1, 2.0))})
    own = profile(config)
    scored = own.model_copy(update={"stations": own.stations | {"scorer": scorer}})
    found = predict(scored, arranged(config, APART), nodes(2))
    assert found.version_s == pytest.approx(16.0, rel=0.1)
    assert found.busy["scorer"] > 0.9


def test_what_was_judged_before_a_process_was_killed_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool breaks after one of its two placements."""

    def broken(judges: Judges, _: ProcessPoolExecutor, cases: dict[int, Case], found: dict[int, Prediction]) -> None:
        first = min(cases)
        found[first] = cases[first].predict()
        judges._tell(found[first])
        raise BrokenProcessPool

    monkeypatch.setattr(Judges, "_in_processes", broken)
    those = [APART, replace(APART, env_batches=2, rows=1), replace(APART, slots=2)]
    problem, told = problem_of(profile(CONFIG), CONFIG, nodes(2)), list[Prediction]()
    with Judges(2, told.append, long_s=0.0) as judges:
        assert problem.judge(those, judges=judges) == told


@pytest.mark.filterwarnings("ignore:.*fork")
def test_processes_change_no_prediction() -> None:
    """The first one is judged here; and a process that is killed costs nothing but time."""
    over = replace(APART, trainer_devices=(0,))
    those = [APART, replace(APART, env_batches=2, rows=1), over, replace(APART, slots=2)]
    problem = problem_of(profile(CONFIG), CONFIG, nodes(2))
    alone, told = problem.judge(those), list[Prediction]()
    with Judges(2, told.append, long_s=0.0) as judges:
        assert problem.judge(those, judges=judges) == alone
        pool = multiprocessing.active_children()
        assert len(pool) == 2
        assert len(told) == sum(one is not None for one in alone) == 3
        pool[0].kill()
        assert problem.judge(those, judges=judges) == alone
    assert not multiprocessing.active_children()
