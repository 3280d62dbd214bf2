"""The main results of a run in the terminal."""

from __future__ import annotations

import pytest

from polyrhythm.cli.show import lines as result_lines
from polyrhythm.cli.show import result
from polyrhythm.cli.show import run_lines as lines


def test_the_best_policy_is_named_with_its_bias() -> None:
    tally = {"rate": 0.5, "low": 0.3, "high": 0.7, "successes": 8, "episodes": 16, "mean_return": 0.5}
    shown = lines({"wall_s": {"total": 1.0}, "best": {"version": 40, "greedy": tally}})
    assert "best.pt  version 40: 50% [30, 70], 8 of 16 episodes, mean return 0.5; chosen by this result" in shown
    assert "biased upward" in shown


@pytest.mark.parametrize("rate", [0.5, None])
@pytest.mark.parametrize(
    ("dropped", "said"), [(0, ""), (1, "; 1 more episode failed"), (3, "; 3 more episodes failed")]
)
def test_episodes_that_failed_are_counted_with_the_result(rate: float | None, dropped: int, said: str) -> None:
    tally = {"rate": rate, "low": 0.3, "high": 0.7, "successes": 8, "episodes": 16, "mean_return": 0.5}
    found = {**tally, "dropped": dropped}
    assert said in result(found)
    assert ("failed" in result(found)) is bool(dropped)
    assert said in result_lines(found)
    assert "dropped" not in result_lines(found)


def test_stations_that_leased_a_device_are_named_with_their_switches() -> None:
    summary = {
        "wall_s": {"total": 1.0, "rl": 1.0},
        "transitions_per_s": 1.0,
        "utilisation": {},
        "lag": {"mean": 0.0, "max": 0},
        "ledger": {"started": 1, "trained": 1, "dropped": {}},
        "faults": [],
        "stations": {"simulator-0": {"env_s": 1.0}, "trainer": {"switches": 4.0, "switch_s": 1.5}},
    }
    assert "leases      trainer 4 switches in 1.5 s" in lines(summary)
    del summary["stations"]["trainer"]
    assert "leases" not in lines(summary)
