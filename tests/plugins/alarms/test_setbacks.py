"""What says that training goes wrong: an evaluation far below the best, updates without advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyrhythm.observe.intervals import wilson
from polyrhythm.plugins.alarms.setbacks import ZERO_ADVANTAGE, SetbackWatch, setbacks


def evaluated(version: int, successes: int, way: str = "greedy") -> Mapping[str, Any]:
    found = wilson(successes, 100)
    return {"step": version} | {f"evaluation/{way}/{part}": getattr(found, part) for part in ("rate", "low", "high")}


def update(step: int, share: float | None) -> Mapping[str, Any]:
    return {"step": step} | ({} if share is None else {ZERO_ADVANTAGE: share})


def sentences(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [alarm.text for alarm in setbacks(lines)]


def told(watch: SetbackWatch, *lines: Mapping[str, Any]) -> list[int]:
    """How many sentences each line has."""
    return [len(watch.take(line)) for line in lines]


def test_an_interval_below_that_before_training_is_told() -> None:
    (sentence,) = sentences([evaluated(0, 60), evaluated(5, 30)])
    assert sentence.startswith(
        "evaluation/greedy/rate = 0.30 [0.22, 0.40] at version 5: all of the interval is below that of version 0, "
        "0.60 [0.50, 0.69]"
    )
    assert "training.optimizer.lr" in sentence


def test_intervals_that_overlap_are_no_collapse() -> None:
    assert sentences([evaluated(0, 60), evaluated(5, 50), evaluated(10, 47)]) == []


def test_the_best_earlier_one_counts_and_a_collapse_is_told_once() -> None:
    lines = [evaluated(version, count) for version, count in enumerate((20, 80, 50, 10, 75, 30))]
    assert told(SetbackWatch(), *lines) == [0, 0, 1, 0, 0, 1], "again once it had recovered"
    assert "that of version 1" in sentences(lines)[0]


def test_ways_of_acting_are_compared_with_themselves() -> None:
    assert sentences([evaluated(0, 90), evaluated(0, 30, "sampled"), evaluated(1, 90)]) == []
    assert len(sentences([evaluated(0, 90), evaluated(0, 90, "sampled"), evaluated(1, 10, "sampled")])) == 1


def test_without_success_there_is_no_collapse() -> None:
    assert sentences([evaluated(0, 0), evaluated(1, 0)]) == []


def test_an_update_without_advantages_is_told_once_until_one_has_some() -> None:
    lines = [update(step, share) for step, share in enumerate((0.5, 1.0, 1.0, None, 1.0, 0.9))]
    assert told(SetbackWatch(), *lines) == [0, 1, 0, 0, 0, 0]
    (sentence,) = sentences(lines)
    assert sentence.startswith(f"{ZERO_ADVANTAGE} = 1 in update 2: in every group all samples have earned the same")


def test_the_tenth_time_is_told_again() -> None:
    lines = [update(step, float(step % 2)) for step in range(30)]
    found = sentences(lines)
    assert [line.partition(":")[0] for line in found] == [
        f"{ZERO_ADVANTAGE} = 1 in update 2",
        f"{ZERO_ADVANTAGE} = 1 in update 20 (10 times so far)",
    ]


def test_what_a_resumed_run_has_written_already_is_not_told_again() -> None:
    lines = [evaluated(0, 60), evaluated(5, 30), update(4, 1.0)]
    assert told(SetbackWatch(lines), evaluated(6, 20), update(5, 1.0)) == [0, 0]


def test_an_update_with_one_episode_does_not_hide_that_a_run_has_learned() -> None:
    """The newest ten updates have 146 successes in 147 episodes; their plain mean is 0.9."""
    rates = [(0.45, 10.0)] * 5 + [(1.0, 16.2)] * 9 + [(0.0, 1.0)]
    lines: list[dict[str, Any]] = [
        {"step": step, "env/success_once": rate, "env/episodes": count}
        | {"train/actor/entropy_loss": 0.5, "train/critic/explained_variance": -2.0}
        for step, (rate, count) in enumerate(rates)
    ]
    assert sentences(lines) == []
    lines[-1]["env/episodes"] = 100.0
    assert any("values predict returns worse" in line for line in sentences(lines)), "one bad update of many episodes"


def test_the_conclusion_weighs_updates_by_their_episodes_too() -> None:
    rates = [(0.2, 50.0)] * 5 + [(0.2, 50.0)] * 9 + [(1.0, 1.0)]
    lines = [
        {"step": step, "env/success_once": rate, "env/episodes": count} for step, (rate, count) in enumerate(rates)
    ]
    watch = SetbackWatch()
    for line in lines:
        watch.take(line | {"train/actor/entropy_loss": 0.5})
    assert watch.conclusion().startswith("env/success_once = 0.202 in the last 10 updates, 0.2 in the first")
