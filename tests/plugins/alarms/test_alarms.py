"""Training alarms on synthetic metrics: what is told of a run that does not get better, and nothing if it does."""

from __future__ import annotations

from typing import Any

import pytest

from polyrhythm.plugins.alarms.setbacks import SetbackWatch, setbacks

#: Metrics of an update of a healthy run.
HEALTHY = {
    "train/actor/optimizer_steps": 40.0,
    "train/actor/proximal_approx_kl": 0.01,
    "train/actor/clip_fraction": 0.1,
    "train/actor/entropy_loss": 0.6,
    "train/critic/explained_variance": 0.2,
}


def run(updates: int = 30, gain: float = 0.0, late: dict[str, float] | None = None, **every: float) -> list[Any]:
    """Lines of updates whose returns are 1 to 3 and grow by `gain` each. late: metrics from the tenth on."""
    lines = []
    for step in range(updates):
        changed = {**every, **(late or {})} if step >= 10 else every
        line = {"step": step, **HEALTHY, "env/success_once": 0.0, "env/return": 1 + step % 3 + gain * step}
        lines.append(line | {_NAMES[name]: value for name, value in changed.items()})
    return lines


_NAMES = {
    "steps": "train/actor/optimizer_steps",
    "kl": "train/actor/proximal_approx_kl",
    "clip": "train/actor/clip_fraction",
    "entropy": "train/actor/entropy_loss",
    "explained": "train/critic/explained_variance",
    "earned": "env/return",
    "success": "env/success_once",
    "behind": "staleness/updates_mean",
}
ONE_STEP: dict[str, float] = {"steps": 1, "kl": 0, "clip": 0}
TROUBLES = {
    "optimizer_steps = 1": (ONE_STEP, None, "training.epochs"),
    "proximal_approx_kl = 0 at most": ({"kl": 0, "clip": 0}, None, "training.optimizer.lr"),
    "proximal_approx_kl = 1e-06": ({"kl": 1e-6, "clip": 0}, None, "training.optimizer.lr"),
    "entropy_loss = 0.01": ({}, {"entropy": 0.01}, "algorithm.entropy_coef"),
    "entropy_loss = -1.5": ({}, {"entropy": -1.5}, "algorithm.entropy_coef"),
    "explained_variance = -0.3": ({"explained": -0.3}, None, "training.optimizer.value_lr"),
    "updates_mean = 1.5": ({"behind": 1.5, "clip": 0.6}, None, "freshness.sync_interval"),
    "return = -50": ({"earned": -50}, None, "demonstrations"),
}


def told(lines: list[Any]) -> list[str]:
    watch = SetbackWatch()
    return [alarm.text for line in lines for alarm in watch.take(line)]


@pytest.mark.parametrize("what", TROUBLES)
def test_each_trouble_is_told_once_with_what_to_set(what: str) -> None:
    every, late, setting = TROUBLES[what]
    (sentence,) = told(run(late=late, **every))
    assert what in sentence.partition(":")[0]
    assert setting in sentence


@pytest.mark.parametrize("what", TROUBLES)
def test_a_run_that_gets_better_has_no_alarm(what: str) -> None:
    every, late, _ = TROUBLES[what]
    rising = [line | {"env/return": line["step"] + line["step"] % 3} for line in run(late=late, **every)]
    assert setbacks(rising) == []
    succeeding = [line | {"env/success_once": 0.95} for line in run(late=late, **every)]
    assert setbacks(succeeding) == []


def test_healthy_updates_without_progress_are_told_of_at_the_end_alone() -> None:
    lines = run()
    assert told(lines) == []
    (alarm,) = setbacks(lines)
    assert alarm.step is None
    assert alarm.text.startswith(
        "env/return = 2.1 in the last 10 updates, 1.8 in the first: training episodes have not become"
    )
    assert setbacks(run(gain=0.5)) == []


def test_a_short_run_is_not_judged() -> None:
    assert setbacks(run(updates=14, **ONE_STEP)) == []
    assert len(setbacks(run(updates=15, **ONE_STEP))) == 2, "the alarm and the conclusion"


def test_without_ended_episodes_nothing_is_said() -> None:
    cut = [{name: x for name, x in line.items() if not name.startswith("env/")} for line in run(**ONE_STEP)]
    assert setbacks(cut) == []


def test_unknown_success_leaves_returns_to_judge_by() -> None:
    unknown = [line | {"env/success_once": None} for line in run(**ONE_STEP)]
    assert "optimizer_steps = 1" in told(unknown)[0]


def test_an_alarm_is_told_again_after_it_has_ended_the_tenth_time() -> None:
    lines = run(updates=600, kl=0.01, clip=0)
    still = [line | ({_NAMES["kl"]: 0.0} if line["step"] % 24 < 12 else {}) for line in lines]
    found = told(still)
    assert len(found) == 2
    assert "(10 times so far)" in found[1]


def test_updates_of_one_step_are_not_called_still() -> None:
    """Metrics are taken before a step, so a single one always has a divergence of 0."""
    assert [sentence.partition(" =")[0] for sentence in told(run(**ONE_STEP))] == ["train/actor/optimizer_steps"]


def test_what_a_resumed_run_has_written_already_is_not_told_again() -> None:
    lines = run(**ONE_STEP)
    watch = SetbackWatch(lines[:20])
    assert [alarm for line in lines[20:] for alarm in watch.take(line)] == []


def test_alarms_that_a_run_has_overcome_are_told_then_and_not_at_its_end() -> None:
    lines = run(20, explained=-0.3) + [{**line, "step": 20 + line["step"]} for line in run(20, gain=3.0)]
    (alarm,) = told(lines)
    assert "explained_variance = -0.3" in alarm
    assert setbacks(lines) == []
    assert setbacks(lines[:20])[0].text == alarm
    assert setbacks(lines[:20])[0].step == 14, "the first update that has enough before it"


def test_equal_returns_are_told_once_without_the_conclusion() -> None:
    (alarm,) = setbacks(run(earned=0.0))
    assert "no episode earns anything else" in alarm.text


def test_equal_returns_explain_updates_that_change_nothing() -> None:
    lines = run(earned=0.0, kl=0.0, clip=0)
    assert [alarm.name for alarm in setbacks(lines)] == ["same"]
    assert len(told(lines)) == 2, "the log has both"
