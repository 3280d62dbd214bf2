"""Measured times: the line of a pass's seconds by its rows, and the ring of a slot's absences."""

from __future__ import annotations

import random

import pytest

from polyrhythm.plugins.autobatch.timing import PassTimeModel, SlotTiming
from polyrhythm.scheduler.inference.batching import padded


def fit(*passes: tuple[int, float]) -> PassTimeModel:
    model = PassTimeModel()
    for rows, seconds in passes:
        model.record(rows, seconds)
    return model


def test_passes_of_several_sizes_give_base_and_slope() -> None:
    model = fit(*[(rows, 0.010 + 0.002 * rows) for rows in (1, 16, 4, 8) * 10])
    for rows in (1, 8, 32):
        assert model.predict(rows) == pytest.approx(0.010 + 0.002 * rows, rel=0.05)


def test_noise_moves_it_little() -> None:
    rng = random.Random(0)
    sizes = [rng.choice((4, 8, 16)) for _ in range(300)]
    model = fit(*[(rows, (0.010 + 0.001 * rows) * rng.lognormvariate(-0.02, 0.2)) for rows in sizes])
    assert model.predict(16) == pytest.approx(0.026, rel=0.15)
    assert model.predict(4) == pytest.approx(0.014, rel=0.25)


def test_passes_of_one_size_leave_the_slope_as_it_was_known() -> None:
    model = fit(*[(rows, 0.010 + 0.002 * rows) for rows in (1, 16, 4, 8) * 10])
    slope = model.row_share
    for _ in range(500):
        model.record(8, 0.026)
    assert model.predict(8) == pytest.approx(0.026)
    assert model.row_share == pytest.approx(slope, rel=0.2)
    assert fit(*[(8, 0.026)] * 50).predict(4) == pytest.approx(0.75 * 0.026), "nothing is known: half of it"


def test_a_change_is_learned_and_one_pass_that_hangs_is_not() -> None:
    model = fit(*[(8, 0.010)] * 100)
    model.record(8, 30.0)
    assert model.predict(8) < 0.012
    for _ in range(100):
        model.record(8, 0.040)
    assert model.predict(8) == pytest.approx(0.040, rel=0.02)


def test_passes_that_take_no_time_divide_by_nothing() -> None:
    assert fit(*[(8, 0.0)] * 20).predict(4) == 0.0


def test_absences_are_from_the_answer_to_the_next_request_and_the_oldest_goes() -> None:
    slot = SlotTiming()
    slot.record_request(2, 0.0, capacity=3)
    assert slot.list_absences() == [], "nobody had answered it"
    for turn in range(5):
        slot.record_answer(float(turn))
        slot.record_request(1, turn + 0.125 * turn, capacity=3)
    assert slot.list_absences() == [0.25, 0.375, 0.5]
    assert (slot.rows, slot.max_rows) == (1, 2)
    slot.record_request(1, 9.0, capacity=3)
    assert slot.list_absences() == [0.25, 0.375, 0.5], "asked again after a fault, without an answer"


def test_passes_are_padded_to_the_next_bucket_and_beyond_the_last_not_at_all() -> None:
    assert [padded(rows, (4, 16)) for rows in (1, 4, 5, 16, 17)] == [4, 4, 16, 16, 17]
    assert padded(5, ()) == 5
