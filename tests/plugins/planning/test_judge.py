"""The judge against cases worked out by hand: what limits, what costs, what memory, what lag."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plugins.planning.profiles import GB, demand, nodes, profile, work

from polyrhythm.plugins.planning.arrangement import Arrangement, devices_text, memory_by_device, why_not
from polyrhythm.plugins.planning.judge import predict

#: Eight rows on the hosts, a generator on device 0, the trainer on device 1.
APART = Arrangement(4, 1, 1, 2, generator_devices=(0,), trainer_devices=(1,))
FEW = demand(rows=8, batch_size=8)


def test_an_update_that_limits_gives_its_own_rate() -> None:
    """160 chunk steps of 12.5 ms and a step of 0.1 s: 2.1 s for 8 samples."""
    fast = profile(step=((1, 1e-4),), passes=((1, 1e-4),))
    found = predict(fast, FEW, nodes(2), replace(APART, micro_batch=32))
    assert found.version_s == pytest.approx(2.1, rel=0.01)
    assert found.samples_per_s == pytest.approx(8 / 2.1, rel=0.01)
    assert found.busy["trainer"] > 0.9
    assert not found.halted


def test_two_ranks_take_half_the_passes() -> None:
    fast = profile(step=((1, 1e-4),), passes=((1, 1e-4),))
    both = replace(APART, trainer_devices=(1, 2), micro_batch=32)
    found = predict(fast, FEW, nodes(3), both)
    exchange = 2 * 6 * GB / 200e9
    assert found.version_s == pytest.approx(2.0 / 2 + 0.1 + exchange, rel=0.02)


def test_rollout_that_limits_gives_a_cycle_of_step_and_pass() -> None:
    """Two rows: four times 20 chunk steps of step and pass and a reset; and weights are loaded between two passes."""
    fast = profile(micro_batch=((8, 1e-4),), passes=((1, 0.05),), step=((1, 0.05),))
    found = predict(fast, FEW, nodes(2), replace(APART, simulators=1))
    rounds = 8 / 2 * (20 * (0.05 + 0.05) + 0.1) + 0.3
    assert found.version_s == pytest.approx(rounds, rel=0.05)


@pytest.mark.parametrize("max_lag", [0.0, 1.0, 2.0])
def test_no_sample_is_older_than_the_lag_allows(max_lag: float) -> None:
    found = predict(profile(), demand(rows=8, batch_size=8, max_lag=max_lag), nodes(2), APART)
    assert found.lag_max <= max_lag
    assert found.lag_mean <= max_lag


def test_a_shared_device_is_slower_than_two() -> None:
    together = replace(APART, trainer_devices=(0,))
    alone = predict(profile(), FEW, nodes(2), APART)
    shared = predict(profile(), FEW, nodes(1), together)
    leased = predict(profile(), FEW, nodes(1), replace(together, sharing="lease"))
    assert alone.samples_per_s > shared.samples_per_s > 0
    assert leased.samples_per_s > 0
    assert shared.memory["0"] > leased.memory["0"]
    assert leased.memory["host"] > shared.memory["host"]


def test_more_steps_than_cores_slow_each_other_down() -> None:
    slow = profile(step=((1, 0.5),), passes=((1, 1e-4),), micro_batch=((8, 1e-4),))
    wide = replace(APART, simulators=64, rows=1)
    asked = demand(rows=64, batch_size=64)
    many = predict(slow, asked, nodes(2), wide)
    cores = predict(slow, asked, replace(nodes(2), cores=64), wide)
    assert many.version_s / cores.version_s == pytest.approx(4, rel=0.15)
    two_hosts = predict(slow, asked, nodes(2, 0), wide)
    assert many.version_s / two_hosts.version_s == pytest.approx(2, rel=0.15)


def test_long_runs_are_joined_without_changing_the_rate() -> None:
    long, asked = profile(chunk_steps=96), demand(rows=8, batch_size=16, minibatch_steps=0)
    each = predict(long, asked, nodes(2), APART)
    joined = predict(long, asked, nodes(2), APART, requests=1000)
    assert joined.version_s == pytest.approx(each.version_s, rel=0.06)


def test_memory_is_of_the_amounts_that_are_held() -> None:
    found = memory_by_device(profile(), FEW, nodes(2), replace(APART, micro_batch=8))
    assert found["0"] == pytest.approx(7 * GB + 4 * GB + 0.5 * GB)
    assert found["1"] == pytest.approx(40 * GB + 8 * GB + 0.5 * GB)
    assert why_not(profile(), FEW, nodes(2), replace(APART, micro_batch=8)) == ""
    assert "device 1 would hold" in why_not(profile(), FEW, nodes(2), APART)  # passes of 160 chunk steps
    grown = profile(passes=((1, 0.06, GB), (64, 0.4, 33 * GB)))
    half = memory_by_device(grown, FEW, nodes(2), replace(APART, max_rows=32, micro_batch=8))
    assert half["0"] == pytest.approx(7.5 * GB + 17 * GB, rel=0.02)


def test_the_recipe_of_an_arrangement() -> None:
    sections = replace(APART, slots=2, sharing="lease").recipe()
    assert sections["placement"]["simulators"] == {"devices": "cpu"}
    assert sections["rollout"]["sharding"] == "even:2"
    assert [devices_text(ids) for ids in ((), (3,), (0, 1, 2, 6), (1, 3))] == ["cpu", "3", "0-2,6", "1,3"]


def test_scores_are_waited_for() -> None:
    scored = profile().model_copy(update={"stations": profile().stations | {"scorer": _scorer(2.0)}})
    found = predict(scored, replace(FEW, scorers=1), nodes(2), APART)
    assert found.version_s == pytest.approx(16.0, rel=0.1)
    assert found.busy["scorer"] > 0.9


def _scorer(seconds: float) -> object:
    from polyrhythm.plugins.planning.profile import StationProfile

    return StationProfile(works={"score": work((1, seconds))})
