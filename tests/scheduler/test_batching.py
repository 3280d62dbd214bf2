"""The batching rule, case by case: what is due, when, and how lock-step shares work out."""

import math
from dataclasses import replace

import pytest

from polyrhythm.scheduler.inference.batching import Waiting, due_from, is_due, split_evenly
from polyrhythm.scheduler.records import Request
from polyrhythm.scheduler.settings import SchedulerSettings

SETTINGS = SchedulerSettings(batch_size=8, max_rows=8, max_requests=4, max_wait_s=0.010)


def request(slot: str, rows: int) -> Request:
    return Request(slot, "sim", 1, rows, 0, "", 0.0)


@pytest.mark.parametrize(
    ("waiting", "now", "due"),
    [
        (Waiting(0, 0, math.inf, False), 100.0, False),  # nothing waits
        (Waiting(0, 0, math.inf, True), 100.0, False),  # nothing waits, although no slot is missing
        (Waiting(1, 1, 1.000, False), 1.009, False),  # the clock has not run out
        (Waiting(1, 1, 1.000, False), 1.010, True),  # it has, counted from the oldest request
        (Waiting(2, 7, 1.000, False), 1.000, False),  # one row short of max_rows
        (Waiting(2, 8, 1.000, False), 1.000, True),  # max_rows
        (Waiting(3, 3, 1.000, False), 1.000, False),
        (Waiting(4, 4, 1.000, False), 1.000, True),  # max_requests
        (Waiting(1, 1, 1.000, True), 1.000, True),  # every live slot waits: nothing more can come
    ],
)
def test_dynamic_rule(waiting: Waiting, now: float, due: bool) -> None:
    assert is_due(waiting, SETTINGS, now) is due


def test_the_clock_starts_at_the_oldest_request() -> None:
    assert due_from(Waiting(1, 1, 2.5, False), SETTINGS) == pytest.approx(2.51)
    assert due_from(Waiting(0, 0, math.inf, False), SETTINGS) == math.inf


def test_without_the_third_trigger_limits_and_wait_decide() -> None:
    off = replace(SETTINGS, fire_when_all_wait=False)
    assert not is_due(Waiting(1, 1, 1.000, True), off, 1.009)
    assert is_due(Waiting(1, 1, 1.000, True), off, 1.010)
    assert is_due(Waiting(2, 8, 1.000, True), off, 1.000)


@pytest.mark.parametrize(
    ("rows", "parts", "shares"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1, 1], 2, [3, 2]),
        ([4, 1, 1, 1, 1], 2, [4, 4]),
        ([8], 2, [8, 0]),
        ([3, 4, 1], 2, [3, 5]),
        ([2, 2, 2], 3, [2, 2, 2]),
    ],
)
def test_lockstep_shares_have_about_equal_rows(rows: list[int], parts: int, shares: list[int]) -> None:
    requests = [request(str(index), count) for index, count in enumerate(rows)]
    split = split_evenly(requests, parts)
    assert [sum(r.rows for r in share) for share in split] == shares
    assert [r for share in split for r in share] == requests
