"""All answers at once, of a case worked out by hand."""

from __future__ import annotations

import json

import pytest

from polyrhythm.plugins.planning.theory import Workload, advise

WORK = Workload(samples=8, workers=4, rollout_s=10.0, longest_s=20.0, train_s=6.0)


def test_each_answer() -> None:
    found = advise(WORK, max_lag=1.0, pool_longest_s=24.0, reached_s=20.0)
    # g = 20, t = 12 on all workers; the longest is 20 s of 8 samples and 24 s of 16.
    assert (found["t_sync_s"], found["t_sync_floor_s"], found["t_async_s"]) == (52.0, 32.0, 44.0)
    assert found["share"] == pytest.approx(12 / 44)
    assert found["speed_up"] == pytest.approx(52 / 44)
    assert found["speed_up_limit"] == pytest.approx(52 / 32)
    # One trains: floor 48, (9) 48; two: floor 40, (9) 64, paced 40 + (24 + 24)/2.
    assert found["splits"]["best_share"] == pytest.approx(
        {
            "training": 1,
            "generating": 3,
            "t_async_floor_s": 48.0,
            "t_async_s": 48.0,
            "paced_s": 20 / 0.75 + 36,
            "speed_up_least": 32 / 48,
            "speed_up_most": 52 / 48,
        }
    )
    assert found["splits"]["equal_pace"] == pytest.approx(
        {
            "training": 2,
            "generating": 2,
            "t_async_floor_s": 40.0,
            "t_async_s": 64.0,
            "paced_s": 64.0,
            "speed_up_least": 0.5,
            "speed_up_most": 1.3,
        }
    )
    assert json.loads(json.dumps(found)) == found


def test_below_one_version_of_lag_the_least_speed_up_is_that_of_the_paced_bound() -> None:
    split = advise(WORK, max_lag=0.0, pool_longest_s=20.0)["splits"]["equal_pace"]
    assert split["paced_s"] == 40.0 + 24.0 + 20.0
    assert split["speed_up_least"] == pytest.approx(32 / 84)
