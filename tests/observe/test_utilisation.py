from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.observe.activity import Utilisation


def test_one_slot() -> None:
    station = Utilisation(0.0)
    station.begin(0.0)
    station.end(3.0)
    assert station.value(4.0) == pytest.approx(0.75)


def test_waiting_work_does_not_count_above_the_slots() -> None:
    station = Utilisation(0.0, slots=2)
    station.begin(1.0, pieces=5)
    station.end(2.0, pieces=4)
    assert station.busy_s(3.0) == pytest.approx(2 + 1)
    assert station.value(3.0) == pytest.approx(3 / 6)
    assert station.active == 1


def test_a_lost_station_offers_nothing() -> None:
    station = Utilisation(0.0)
    station.begin(0.0)
    station.offer(1.0, 0)
    assert station.value(9.0) == 1.0
    station.offer(9.0, 1)
    assert station.value(10.0) == pytest.approx(0.5)


def test_no_time_no_utilisation() -> None:
    assert Utilisation(5.0).value(5.0) == 0.0


def test_time_backwards_and_too_many_ends_are_our_bugs() -> None:
    station = Utilisation(5.0)
    with pytest.raises(AssertionError, match="backwards"):
        station.begin(4.0)
    with pytest.raises(AssertionError, match="0 were active"):
        station.end(6.0)


steps = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["begin", "end", "slots"]), st.integers(0, 3)))


@given(steps)
def test_equals_the_sum_over_unit_intervals(changes: list[tuple[int, str, int]]) -> None:
    station, now, active, slots = Utilisation(0.0), 0, 0, 1
    busy = offered = 0
    for wait, what, number in changes:
        busy += wait * min(active, slots)
        offered += wait * slots
        now += wait
        if what == "slots":
            station.offer(now, number)
            slots = number
            active = active if number else 0
        elif what == "begin":
            station.begin(now, number)
            active += number
        else:
            ended = min(active, number)
            station.end(now, ended)
            active -= ended
    assert station.busy_s(now) == busy
    assert station.value(now) == pytest.approx(busy / offered if offered else 0.0)
