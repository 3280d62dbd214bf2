from __future__ import annotations

import random

import pytest

from polyrhythm.scheduler.autobatch.timing import ServiceTime, SlotPace
from polyrhythm.scheduler.padding import padded


def told(*passes: tuple[int, float]) -> ServiceTime:
    service = ServiceTime()
    for rows, seconds in passes:
        service.note(rows, seconds)
    return service


def test_passes_of_several_sizes_give_base_and_slope() -> None:
    service = told(*[(rows, 0.010 + 0.002 * rows) for rows in (1, 16, 4, 8) * 10])
    for rows in (1, 8, 32):
        assert service.of(rows) == pytest.approx(0.010 + 0.002 * rows, rel=0.05)


def test_noise_moves_it_little() -> None:
    rng = random.Random(0)
    sizes = [rng.choice((4, 8, 16)) for _ in range(300)]
    service = told(*[(rows, (0.010 + 0.001 * rows) * rng.lognormvariate(-0.02, 0.2)) for rows in sizes])
    assert service.of(16) == pytest.approx(0.026, rel=0.15)
    assert service.of(4) == pytest.approx(0.014, rel=0.25)


def test_passes_of_one_size_leave_the_slope_as_it_was_known() -> None:
    service = told(*[(rows, 0.010 + 0.002 * rows) for rows in (1, 16, 4, 8) * 10])
    slope = service.share
    for _ in range(500):
        service.note(8, 0.026)
    assert service.of(8) == pytest.approx(0.026)
    assert service.share == pytest.approx(slope, rel=0.2)
    assert told(*[(8, 0.026)] * 50).of(4) == pytest.approx(0.75 * 0.026), "nothing is known: half of it"


def test_a_change_is_learned_and_one_pass_that_hangs_is_not() -> None:
    service = told(*[(8, 0.010)] * 100)
    service.note(8, 30.0)
    assert service.of(8) < 0.012
    for _ in range(100):
        service.note(8, 0.040)
    assert service.of(8) == pytest.approx(0.040, rel=0.02)


def test_passes_that_take_no_time_divide_by_nothing() -> None:
    assert told(*[(8, 0.0)] * 20).of(4) == 0.0


def test_absences_are_from_the_answer_to_the_next_request_and_the_oldest_goes() -> None:
    pace = SlotPace()
    pace.asked(2, 0.0, kept=3)
    assert pace.absences() == [], "nobody had answered it"
    for turn in range(5):
        pace.answered(float(turn))
        pace.asked(1, turn + 0.125 * turn, kept=3)
    assert pace.absences() == [0.25, 0.375, 0.5]
    assert (pace.rows, pace.most) == (1, 2)
    pace.asked(1, 9.0, kept=3)
    assert pace.absences() == [0.25, 0.375, 0.5], "asked again after a fault, without an answer"


def test_passes_are_padded_to_the_next_bucket_and_beyond_the_last_not_at_all() -> None:
    assert [padded(rows, (4, 16)) for rows in (1, 4, 5, 16, 17)] == [4, 4, 16, 16, 17]
    assert padded(5, ()) == 5
