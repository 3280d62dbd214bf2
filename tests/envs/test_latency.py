"""The synthetic environment: one sleep per batch step, drawn from the law by the seeds."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from pydantic import ValidationError

from polyrhythm.envs.latency import LatencyBatch, LatencySettings

NO_ACTIONS = np.zeros((4, 7), np.float32)


def sleeps(
    seeds: list[int],
    steps: int = 6,
    times_by: Literal["history", "seed", "chance"] = "history",
    before: tuple[int, ...] = (),
) -> list[float]:
    """before: seeds of episodes that came first, whose time is left out."""
    slept: list[float] = []
    settings = LatencySettings(step_time="lognormal:10ms:0.8", reset_time="constant:3ms", times_by=times_by)
    batch = LatencyBatch(settings, 4, slept.append)
    if before:
        batch.reset(range(4), [0] * 4, before)
        slept.clear()
    batch.reset(range(4), [0] * 4, seeds)
    for _ in range(steps):
        batch.step(range(4), NO_ACTIONS)
    return slept


def test_sleeps_once_per_reset_and_once_per_batch_step():
    slept = sleeps([1, 2, 3, 4])
    assert len(slept) == 7
    assert slept[0] == 0.003
    assert len(set(slept[1:])) == 6


def test_equal_calls_sleep_equally_and_others_do_not():
    assert sleeps([1, 2, 3, 4]) == sleeps([1, 2, 3, 4])
    assert sleeps([1, 2, 3, 4])[1:] != sleeps([1, 2, 3, 5])[1:]


def test_a_seed_that_two_batches_share_is_equally_slow_only_by_seed():
    """Members of a group share their seed: by default one of them is a straggler."""
    assert sleeps([1, 2, 3, 4])[1:] != sleeps([1, 2, 3, 4], before=(5, 6, 7, 8))[1:]
    own = sleeps([1, 2, 3, 4], times_by="seed")
    assert own == sleeps([1, 2, 3, 4], times_by="seed", before=(5, 6, 7, 8))
    assert own[1:] != sleeps([1, 2, 3, 5], times_by="seed")[1:]


def test_a_machine_is_slow_by_itself_whatever_its_seeds():
    assert sleeps([1, 2, 3, 4], times_by="chance") != sleeps([1, 2, 3, 4], times_by="chance")


def test_rows_step_as_one():
    batch = LatencyBatch(LatencySettings(), 4, lambda seconds: None)
    assert not batch.spec.step_rows
    with pytest.raises(AssertionError, match="steps all 4 rows as one"):
        batch.step([0, 1], NO_ACTIONS[:2])


def test_a_bad_law_is_refused_before_anything_starts():
    with pytest.raises(ValidationError, match="unknown type 'weibull'"):
        LatencySettings(step_time="weibull:10ms:1")
