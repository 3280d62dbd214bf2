"""Candidates and measured rates of `batching: auto`, by hand."""

from __future__ import annotations

import pytest

from polyrhythm.plugins.autobatch.forecast import ClosedLoop, select_group
from polyrhythm.plugins.autobatch.search import WAIT_CYCLES, Candidate, OperatingPoint, RateMeter, Search, build_grid
from polyrhythm.plugins.autobatch.timing import SlotTiming
from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings

POINT = OperatingPoint(0.030, 0.010, 8.0)
ALONE, ALL, HALF = Candidate(1, 0), Candidate(8, 7), Candidate(4, 7)


def search(began: float, point: OperatingPoint = POINT) -> Search:
    return Search(ClosedLoop([1], [[0.1]], 1, 0.03, 0.0), began, {}, [], 0.01, point)


def test_the_grid_has_shares_of_slots_and_of_generators_and_every_wait() -> None:
    grid = build_grid([2] * 8, 2, SchedulerSettings(64, max_rows=10), cycle_s=0.040)
    # All 8, 3/4, 1/2 and 1/4 of the slots; 8 / (2 + 1) rounded up; and the 5 full slots that max_rows holds.
    assert {candidate.requests for candidate in grid} == {8, 6, 4, 2, 3, 5}
    assert len(grid) == 6 * len(WAIT_CYCLES)
    assert grid[Candidate(8, 7)] == BatchLimits(10, 8, pytest.approx(1.25 * 0.040))
    assert grid[Candidate(2, 0)] == BatchLimits(4, 2, 0.0)


def test_a_measured_rate_scales_all_forecasts_and_replaces_one_that_differs() -> None:
    meter = RateMeter()
    meter.begin(POINT, 10.0)
    meter.rows = 900
    meter.measure(ALONE, search(19.0), 20.0)  # 90 rows/s where 100 were forecast
    assert meter.correct({ALONE: 100.0, ALL: 200.0}, ALONE) == {ALONE: pytest.approx(90.0), ALL: pytest.approx(180.0)}
    meter.rows = 1500
    meter.measure(ALL, search(29.0), 30.0)  # 150 rows/s: then `ALONE` is as measured, not 0.75 of its forecast
    expected = meter.correct({ALONE: 100.0, ALL: 200.0, HALF: 160.0}, ALL)
    assert expected == {ALONE: pytest.approx(90.0), ALL: pytest.approx(150.0), HALF: pytest.approx(120.0)}


def test_a_second_measurement_counts_half() -> None:
    meter = RateMeter()
    meter.begin(POINT, 10.0)
    for rows, end in ((900, 20.0), (1100, 30.0)):
        meter.rows = rows
        meter.measure(ALONE, search(end - 1.0), end)
    assert meter.rates[ALONE].rows_per_s == pytest.approx(100.0)


def test_measurements_end_with_their_conditions_and_with_time() -> None:
    meter = RateMeter()
    meter.begin(POINT, 10.0)
    meter.rows = 900
    meter.measure(ALONE, search(19.0), 20.0)
    meter.measure(ALL, search(60.5), 61.0)  # a search of 0.5 s: measurements live 20 s
    assert set(meter.rates) == {ALL}
    slower = OperatingPoint(1.3 * POINT.pass_s, POINT.short_absence_s, POINT.share_rows)
    meter.measure(ALL, search(70.0, slower), 71.0)
    assert (meter.rates, meter.point) == ({}, slower)


def test_the_busiest_generator_is_forecast_with_its_slots_and_its_share_of_the_others() -> None:
    slots = {f"free{index}": SlotTiming(max_rows=1) for index in range(4)}
    slots |= {"a": SlotTiming("g0", max_rows=4), "b": SlotTiming("g1", max_rows=2), "c": SlotTiming("g1", max_rows=3)}
    own, generators = select_group(slots, 2, shared=True)
    assert (list(own), generators) == (["free0", "free2", "b", "c"], 1)
    free = {name: slot for name, slot in slots.items() if not slot.generator}
    assert select_group(free, 2, shared=True)[1] == 2
    assert list(select_group(free, 2, shared=False)[0]) == ["free0", "free2"]
