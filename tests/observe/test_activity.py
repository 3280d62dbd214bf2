from __future__ import annotations

import pytest

from polyrhythm.observe.activity import Activity


def look(busy: float, steps: float) -> dict[str, dict[str, float]]:
    return {"simulator": {"busy_s": busy, "env_steps": steps}, "trainer": {}}


def test_nothing_is_said_before_the_second_look() -> None:
    activity = Activity()
    assert (activity.utilisation(), activity.per_s("env_steps")) == ({}, 0.0)
    activity.take(5.0, look(3.0, 100))
    assert (activity.utilisation(), activity.per_s("env_steps")) == ({}, 0.0)
    activity.take(5.0, look(3.0, 100))
    assert activity.utilisation() == {}


def test_the_window_slides() -> None:
    activity = Activity(window_s=4.0)
    for second in range(11):  # busy throughout the first six seconds, then idle
        activity.take(float(second), look(min(second, 6), 50 * second))
    assert activity.utilisation() == {"simulator": 0.0, "trainer": 0.0}
    activity.take(11.0, look(7.0, 550))
    assert activity.utilisation()["simulator"] == pytest.approx(0.25)
    assert activity.per_s("env_steps") == 50.0


def test_a_long_unit_is_cut_and_a_counter_that_fell_counts_as_nothing() -> None:
    activity = Activity(window_s=1.0)
    activity.take(0.0, look(1.0, 9))
    activity.take(1.0, look(9.0, 0))
    assert activity.utilisation()["simulator"] == 1.0
    assert activity.per_s("env_steps") == 0.0
