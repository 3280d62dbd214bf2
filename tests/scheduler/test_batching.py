"""The batching rule, case by case: what is due, when, and how lock-step shares work out."""

import math
from dataclasses import replace

import pytest
from tests.scheduler.test_conductor import Script, slots_of

from polyrhythm.scheduler import records as r
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


# ------------------------------------------------------------ the third trigger, per generator


def begun(said: list[r.Command]) -> list[tuple[str, list[str]]]:
    return [(command.generator, slots_of(command)) for command in said if isinstance(command, r.Serve)]


def two_generators(routing: str, **more: object) -> Script:
    """Slots s0 and s2 belong to g0, s1 and s3 to g1."""
    script = Script(slots=4, batch_size=4, generators=2, max_lag=9, routing=routing, **more)
    if routing == "affinity":  # bound one after the other, evenly
        for slot in range(4):
            script.ask(f"s{slot}")
        script.now = 1.0
        script.say(r.Wake())
        script.batch_done(generator="g0")
        script.batch_done(generator="g1")
    return script


@pytest.mark.parametrize("routing", ["fixed", "affinity"])
def test_a_generator_starts_once_all_its_own_slots_wait(routing: str) -> None:
    script = two_generators(routing)
    assert begun(script.ask("s0", 2)) == []
    assert begun(script.ask("s1", 2)) == []
    assert begun(script.ask("s2", 2)) == [("g0", ["s0", "s2"])], "s1 and s3 never ask g0"
    assert begun(script.ask("s3", 2)) == [("g1", ["s1", "s3"])]


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin"])
def test_where_any_slot_may_come_all_of_them_are_awaited(routing: str) -> None:
    script = Script(slots=4, batch_size=4, generators=2, max_lag=9, routing=routing)
    assert [begun(script.ask(f"s{slot}")) for slot in range(3)] == [[], [], []]
    assert sorted(slot for _, slots in begun(script.ask("s3")) for slot in slots) == ["s0", "s1", "s2", "s3"]


def test_a_slot_without_tickets_is_not_awaited() -> None:
    script = Script(slots=4, generators=2, routing="fixed", target=1, max_lag=0)  # it takes two samples
    live = sorted(name for name, slot in script.conductor.serving.slots.slots.items() if slot.live)
    assert live == ["s0", "s1"]
    assert begun(script.ask("s0")) == [("g0", ["s0"])]


def test_slots_of_a_lost_generator_are_awaited_by_the_other() -> None:
    script = two_generators("fixed")
    script.ask("s0")
    assert begun(script.say(r.StationLost("g1", 0, "gone"))) == []
    assert begun(script.ask("s2")) == [], "s1 and s3 ask g0 now"
    script.ask("s1")
    assert begun(script.ask("s3")) == [("g0", ["s0", "s2", "s1", "s3"])]


def test_switched_off_the_oldest_request_waits_its_time() -> None:
    script = two_generators("fixed", fire_when_all_wait=False)
    assert [begun(script.ask(f"s{slot}")) for slot in range(4)] == [[]] * 4
    assert script.conductor.deadline() == 1.0
    script.now = 1.0
    assert begun(script.say(r.Wake())) == [("g0", ["s0", "s2"]), ("g1", ["s1", "s3"])]
