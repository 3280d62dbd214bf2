"""When a station is given up, and when a run is: tables of what was heard and when."""

from __future__ import annotations

import math

import pytest

from polyrhythm.config.sections.running import SupervisionSettings
from polyrhythm.runtime.processes.incarnation import (
    AWAITING,
    MAX_SAME_WORDS,
    Failure,
    FailureTracker,
    Rank,
)

LIMITS = SupervisionSettings(
    heartbeat_s=20, start_s=300, reset_s=180, step_s=60, pass_s=100, update_s=900, max_failures=5
)


def present(doing: str = "", for_s: float = 0.0) -> Rank:
    """Began at 0 s, was ready, and was last heard at 1000 s."""
    monitor = Rank(0, 1, 0.0, present=True)
    monitor.on_heartbeat(1000.0, doing, for_s)
    return monitor


@pytest.mark.parametrize(
    ("doing", "for_s", "deadline"),
    [
        ("", 0.0, 1020.0),
        ("step", 0.0, 1020.0),  # silence is noticed before a slow step is
        ("step", 45.0, 1015.0),
        ("observe", 50.0, 1010.0),
        ("reset", 45.0, 1020.0),
        ("reset", 170.0, 1010.0),
        ("pass", 95.0, 1005.0),
        ("update", 899.0, 1001.0),
        ("publish", 890.0, 1010.0),
        ("save", 890.0, 1010.0),
        ("weights", 890.0, 1010.0),
        ("reconnect", 5000.0, 1020.0),  # join.reconnect_s limits it
        ("step", 70.0, 990.0),
    ],
)
def test_a_station_is_given_up_when_it_is_silent_or_too_long_at_one_thing(
    doing: str, for_s: float, deadline: float
) -> None:
    monitor = present(doing, for_s)
    assert monitor.deadline(LIMITS) == deadline
    assert monitor.failure_reason(math.nextafter(deadline, 0.0), LIMITS) == ""
    assert monitor.failure_reason(deadline, LIMITS) != ""


def test_a_start_has_its_own_limit_and_heartbeats_do_not_extend_it() -> None:
    monitor = Rank(0, 1, 100.0)
    monitor.on_heartbeat(390.0, "reset", 1.0)
    assert monitor.deadline(LIMITS) == 400.0
    assert monitor.failure_reason(399.9, LIMITS) == ""
    assert monitor.failure_reason(400.0, LIMITS) == "was not ready within 300 s (supervision.start_s)"


@pytest.mark.parametrize(
    ("monitor", "now", "words"),
    [
        (present(), 1020.0, "sent no heartbeat for 20 s (supervision.heartbeat_s)"),
        (present("step", 50.0), 1012.5, "has been in one step for 62.5 s (supervision.step_s)"),
        (present("observe", 50.0), 1012.5, "has been in one observe for 62.5 s (supervision.step_s)"),
        (present("reset", 170.0), 1011.0, "has been in one reset for 181.0 s (supervision.reset_s)"),
        (present("pass", 99.0), 1001.0, "has been in one pass for 100.0 s (supervision.pass_s)"),
        (present("publish", 899.0), 1001.0, "has been in one publish for 900.0 s (supervision.update_s)"),
    ],
)
def test_the_complaint_names_the_setting_that_was_exceeded(monitor: Rank, now: float, words: str) -> None:
    assert monitor.failure_reason(now, LIMITS) == words


def test_the_complaint_says_where_in_user_code_the_call_was_last() -> None:
    monitor = Rank(0, 1, 0.0, present=True)
    monitor.on_heartbeat(1000.0, "step", 50.0, ", in reply (own.py, line 12)")
    said = "has been in one step for 62.5 s, in reply (own.py, line 12) (supervision.step_s)"
    assert monitor.failure_reason(1012.5, LIMITS) == said
    monitor.on_heartbeat(1013.0, "step", 62.5)
    assert monitor.failure_reason(1013.0, LIMITS) == "has been in one step for 62.5 s (supervision.step_s)"


def test_a_station_that_somebody_has_yet_to_join_waits_without_limit_while_it_is_heard() -> None:
    """Its heartbeats are watched; once somebody has joined, it is a station like any other."""
    monitor = Rank(0, 1, 0.0)
    monitor.on_heartbeat(1000.0, AWAITING, 990.0)
    assert monitor.awaits
    assert monitor.failure_reason(1019.0, LIMITS) == ""
    assert monitor.failure_reason(1020.0, LIMITS) == "sent no heartbeat for 20 s (supervision.heartbeat_s)"
    assert monitor.current_call(1000.0) == "open to a simulator that joins for 990.0 s"
    monitor.present = True
    monitor.on_heartbeat(1000.0, "step", 60.0)
    assert not monitor.awaits
    assert "has been in one step" in monitor.failure_reason(1000.0, LIMITS)


def test_a_unit_that_ends_is_forgotten() -> None:
    monitor = present("step", 59.0)
    monitor.on_heartbeat(1000.5, "", 0.0)
    assert monitor.deadline(LIMITS) == 1020.5
    monitor.on_heartbeat(1001.0, "step", 0.25)
    assert monitor.failure_reason(1019.0, LIMITS) == ""


STARTS = "a failed 3 times in a row before it was ready, 2 are allowed (supervision.max_start_failures)"


@pytest.mark.parametrize(
    ("story", "verdict"),
    [
        (["a+"] * 5, ""),
        (["a+"] * 6, "6 failures, 5 are allowed (supervision.max_failures)"),
        (["a+", "b+", "c+", "a+", "b+", "c+"], "6 failures, 5 are allowed (supervision.max_failures)"),
        (["a-"] * 2, ""),
        (["a-"] * 3, STARTS),
        (["a-", "b-", "a-", "b-"], ""),
        (["a-", "a-", "a+", "a-", "a-"], ""),
        (["a+", "a-", "a-", "a-"], STARTS),
        (["ak"] * 5, ""),
        (["ak"] * 6, "6 failures, 5 are allowed (supervision.max_failures)"),
        (["a-", "ak", "a-", "ak"], ""),
        (["a-", "ak", "a-", "ak", "a-"], STARTS),
    ],
)
def test_when_failures_end_a_run(story: list[str], verdict: str) -> None:
    """`a+`: station a failed after it had been ready; `a-`: before; `ak`: somebody killed it before."""
    failures = FailureTracker()
    said = ""
    for station, how in story:
        assert said == "", "the run had ended"
        failure = Failure(station, began=0.0, was_present=how == "+", killed=how == "k")
        failures.count(failure, 1.0, LIMITS)
        said = failures.verdict(station, LIMITS)
    assert said == verdict


def test_no_failure_at_all_can_be_asked_for() -> None:
    for was_present, setting in ((True, "max_failures"), (False, "max_start_failures")):
        failures, limits = FailureTracker(), LIMITS.model_copy(update={setting: 0})
        failures.count(Failure("a", 0.0, was_present), 1.0, limits)
        assert failures.verdict("a", limits).endswith(f"0 are allowed (supervision.{setting})")


@pytest.mark.parametrize(
    ("story", "recent", "starts"),
    [
        ([(0, 0, "+", 0), (599, 599, "+", 1)], 2, 0),
        ([(0, 0, "+", 0), (600, 600, "+", 1)], 1, 0),
        ([(0, 0, "+", 0), (600, 600, "+", 0)], 2, 0),  # no update: it was stuck, not quiet
        ([(0, 0, "+", 0), (500, 500, "+", 1), (1000, 1000, "+", 2)], 3, 0),
        ([(0, 0, "-", 0), (0, 900, "-", 1)], 2, 2),  # it was starting all the time
        ([(0, 0, "-", 0), (700, 710, "-", 1)], 1, 1),
        ([(0, 0, "-", 0), (700, 710, "k", 1)], 1, 0),
    ],
)
def test_failures_are_forgiven_after_a_quiet_time_with_an_update(
    story: list[tuple[float, float, str, int]], recent: int, starts: int
) -> None:
    """When the incarnation began and failed, how (as above), and the updates of the run by then."""
    failures = FailureTracker()
    for began, now, how, updates in story:
        failures.count(Failure("a", began, how == "+", how == "k", updates=updates), now, LIMITS)
    assert (failures.recent, failures.starts.get("a", 0), failures.total) == (recent, starts, len(story))


ANEW = "a failed 5 times in a row in the same way, and no update was done meanwhile"
GENEROUS = LIMITS.model_copy(update={"max_failures": 100})


@pytest.mark.parametrize(
    ("story", "verdict"),
    [
        ([("hole", 3)] * (MAX_SAME_WORDS - 1), ""),
        ([("hole", 3)] * MAX_SAME_WORDS, ANEW),
        ([("hole", update) for update in range(20)], ""),
        ([("", 3)] * 20, ""),
        ([("hole", 3), ("", 3)] * 10, ""),
        ([("hole", 3), ("nan", 3)] * 10, ""),
        ([("nan", 3), *[("hole", 3)] * MAX_SAME_WORDS], ANEW),
    ],
)
def test_a_station_that_raises_the_same_again_and_again_ends_the_run(
    story: list[tuple[str, int]], verdict: str
) -> None:
    """Words that its program raised with ("": it was killed or hung), and updates of the run by then."""
    failures, said = FailureTracker(), ""
    for words, updates in story:
        assert said == "", "the run had ended"
        failures.count(Failure("a", 0.0, was_present=True, error=words, updates=updates), 0.0, GENEROUS)
        failures.count(Failure("b", 0.0, was_present=True), 0.0, GENEROUS)
        said = failures.verdict("a", GENEROUS)
    assert said == verdict
