"""One sentence from measured shares of time: who limits a run, and the setting to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyrhythm.observe.bottleneck import Load, bottleneck, idle_shares

#: Two simulators in processes, half of the time busy, whose rows always have tickets.
USUAL = Load(
    busy={"simulator": 0.5, "generator": 0.3, "trainer": 0.4},
    count={"simulator": 2, "generator": 1, "trainer": 1},
    rows_idle=0.02,
    trainer_idle=0.55,
    max_lag=1.0,
    rows=8,
)
WAITING = "simulators and generators wait for each other, busy 50% at most"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"one_thread": True}, "The simulator takes 50% of the one thread that all stations share: set launcher=local"),
        ({"one_thread": True, "busy": {"trainer": 0.7, "simulator": 0.2}}, "The trainer takes 70% of"),
        (
            {"busy": {"simulator": 0.9, "trainer": 0.4}},
            "simulators limit the run, busy 90%; raise rollout.simulators",
        ),
        (
            {"busy": {"simulator": 0.4, "generator": 0.95, "trainer": 0.4}},
            "busy 95%; raise rollout.generators (now 1)",
        ),
        (
            {"busy": {"simulator": 0.4, "scorer": 0.95, "trainer": 0.4}, "count": {"scorer": 3}},
            "the scorers limit the run, busy 95%; raise scoring.processes (now 3)",
        ),
        ({"one_slot": True}, f"The trainer waits for samples 55% of the time: {WAITING}; set rollout.sharding=even:2"),
        (
            {"one_slot": True, "busy": {"simulator": 0.2, "generator": 0.1, "trainer": 0.4}},
            "busy 20% at most; raise rollout.rows (now 8), so that a pass serves more of them.",
        ),
        ({}, f"{WAITING}; raise rollout.rows (now 8), so that a pass serves more of them."),
        (
            {"rows_idle": 0.6, "trainer_idle": 0.05},
            "The trainer limits the run (rows wait for it 60% of the time): lower training.epochs, or raise placement.",
        ),
        (
            {"rows_idle": 0.4, "max_lag": 0.0},
            "(rows without a ticket 40% and the trainer idle 55% of the time): raise freshness.max_lag (now 0) to 1.",
        ),
        (
            {"rows_idle": 0.4},
            "of the time): raise freshness.max_lag (now 1) or training.mini_batch_samples, either of which lets more",
        ),
        (
            {"rows_idle": 0.4, "batch_wait": 0.9, "max_wait_ms": 20.0, "max_rows": 64, "all_rows": 64},
            "max_wait_ms 90% of the time, and no kind of station is busy more than 50%: lower batching.max_wait_ms (",
        ),
        (
            {"batch_wait": 0.9, "fire_when_all_wait": False, "max_rows": 64, "all_rows": 16},
            "set batching.fire_when_all_wait=true, or lower batching.max_wait_ms (now 0), or lower batching.max_rows (",
        ),
        ({"batch_wait": 0.9, "rows_idle": 0.6, "trainer_idle": 0.05}, "The trainer limits the run"),
        ({"batch_wait": 0.9, "busy": {"simulator": 0.9, "trainer": 0.4}}, "simulators limit the run"),
        ({"trainer_idle": 0.1}, "Rollout and training keep pace (rows without a ticket 2% and the trainer idle 10%"),
    ],
)
def test_who_limits_and_what_to_set(changes: dict[str, Any], said: str) -> None:
    sentence = bottleneck(replace(USUAL, **changes))
    assert said in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_idle_shares_are_means_over_time() -> None:
    lines = [
        {"time_s": 5.0, "evaluation/greedy/rate": 0.5},
        {"time_s": 6.0, "rollouter/idle_ratio": 1.0, "trainer/idle_ratio": 0.0},
        {"time_s": 9.0, "rollouter/idle_ratio": 0.2, "trainer/idle_ratio": 0.4, "rollouter/batch_wait_ratio": 0.8},
        {"step": 2},
    ]
    means = {"rows_idle": 0.4, "trainer_idle": 0.3, "batch_wait": 0.6}
    assert idle_shares(lines) == pytest.approx(means)
    assert idle_shares(lines[:1]) == {}
