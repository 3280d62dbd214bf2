"""Stage times of a run: each figure by hand, and what cannot be used is refused."""

from __future__ import annotations

from typing import Any

import pytest

from polyrhythm.plugins.planning.theory import Layout, stage_times

#: Two simulators of two env batches in processes, one generator, one trainer: 6 workers, 24 rows.
LAYOUT = Layout(version_samples=16, versions=10, simulators=2, parts=2, mean_over=2, generators=1, rows=24)
SUMMARY: dict[str, Any] = {
    "wall_s": {"start": 3.0, "rl": 80.0, "total": 90.0},
    "ledger": {"trained": 160},
    "utilisation": {"simulator-0": 0.9, "simulator-1": 0.7, "generator-0": 0.4, "trainer": 0.5},
}
UPDATES: list[dict[str, Any]] = [
    {"step": 0, "evaluation/greedy/rate": 0.5},
    {"step": 0, "env/sample_chunk_steps": 6.0, "env/sample_env_steps": 58.0},
    {"step": 1, "env/sample_chunk_steps": 8.0, "env/sample_env_steps": 78.0},
    {"step": 2, "env/sample_chunk_steps": 7.0, "env/sample_env_steps": 68.0},
    {"step": 3, "env/sample_chunk_steps": None, "env/sample_env_steps": None},
]


def test_each_figure_by_hand() -> None:
    found = stage_times(LAYOUT, SUMMARY, UPDATES)
    assert (found.samples, found.workers) == (16, 6)
    # Two threads of each simulator: (2·0.9 + 2·0.7 + 0.4) · 80 s of 160 samples; the trainer 0.5 · 80 s.
    assert found.rollout_s == pytest.approx(1.8)
    assert found.train_s == pytest.approx(0.25)
    assert found.version_s == 8.0
    # No limit is known: the longest update mean over the mean, 8/7, and 24 rows take turns on 6 workers.
    assert found.limit == "metrics"
    assert found.longest_s == pytest.approx(8 / 7 * 24 / 6 * 1.8)


def test_in_one_thread_the_utilisation_of_a_simulator_is_the_sum_of_its_parts() -> None:
    found = stage_times(Layout(16, 10, 2, 2, 1, 1, 24), SUMMARY, UPDATES)
    assert found.rollout_s == pytest.approx((0.9 + 0.7 + 0.4) * 80 / 160)
    assert found.workers == 6


def test_where_a_limit_is_known_it_is_taken_segments_first() -> None:
    cut = stage_times(Layout(16, 10, 2, 2, 2, 1, 24, segment_steps=14, max_steps=100), SUMMARY, UPDATES)
    assert (cut.limit, cut.longest_s) == ("segment_steps", pytest.approx(2 * 4 * 1.8))
    limited = stage_times(Layout(16, 10, 2, 2, 2, 1, 24, max_steps=102), SUMMARY, UPDATES)
    assert (limited.limit, limited.longest_s) == ("max_steps", pytest.approx(1.5 * 4 * 1.8))


def test_given_workers_share_the_rows() -> None:
    assert stage_times(LAYOUT, SUMMARY, UPDATES, workers=2).longest_s == pytest.approx(8 / 7 * 24 / 2 * 1.8)
    crowd = stage_times(LAYOUT, SUMMARY, UPDATES, workers=100)  # more workers than rows shorten no episode
    assert crowd.longest_s == crowd.rollout_s


@pytest.mark.parametrize(
    ("summary", "updates", "said"),
    [
        ({"wall_s": {"total": 1.0}, "ledger": {"trained": 1}}, UPDATES, "summary.json has no rl; "),
        ({}, UPDATES, "summary.json has no ledger; name a run that trained to its end"),
        ({**SUMMARY, "ledger": {"trained": 0}}, UPDATES, "ledger.trained is 0"),
        (SUMMARY, UPDATES[:1], "metrics.jsonl has no env/sample_chunk_steps"),
    ],
)
def test_a_run_that_trained_nothing_is_refused(
    summary: dict[str, Any], updates: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        stage_times(LAYOUT, summary, updates)
