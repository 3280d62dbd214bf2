import pytest

from polyrhythm.plugins.virtual.clustersim.hardware import VirtualClock
from polyrhythm.plugins.virtual.clustersim.measures import Level


def test_calls_come_by_time_and_at_one_instant_in_the_order_of_planning() -> None:
    clock, heard = VirtualClock(), []
    for time, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        clock.at(time, heard.append, name)
    assert clock.upcoming == 1.0
    while clock.upcoming < float("inf"):
        clock.advance()
    assert heard == ["a", "b", "c", "d"]
    assert clock.now == 2.0


def test_time_never_runs_backwards() -> None:
    clock = VirtualClock()
    clock.at(3.0, lambda _: clock.at(1.0, lambda _: None))
    clock.advance()
    clock.advance()
    assert clock.now == 3.0


def test_a_level_is_integrated_and_time_with_any_is_counted() -> None:
    level = Level()
    level.add(1.0, 2)
    level.add(3.0, -1)
    level.add(4.0, -1)
    assert level.integral(10.0) == pytest.approx(2 * 2 + 1)
    assert level.present(10.0) == pytest.approx(3)
