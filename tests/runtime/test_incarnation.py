"""One incarnation of a station: its states, what leads from one to the next, and for which rank it is replaced."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from tests.process.runs import config

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.hosts import Departure
from polyrhythm.runtime.processes.incarnation import AWAITING, Incarnation, Rank, State, Step
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage

LIMITS = config(supervision={"heartbeat_s": 4.0, "update_s": 100.0, "start_s": 60.0}).supervision


def ready(count: int = 1, *, far: bool = False) -> Incarnation:
    """Started at -1 s, and all its ranks were ready and heard at 0 s."""
    found = Incarnation("t", 0, [Rank(number, 100 + number, -1.0) for number in range(count)], far)
    for rank in found.ranks:
        found.announce(rank.number)
        rank.on_heartbeat(0.0, "", 0.0)
    return found


def hang(one: Incarnation, now: float = 1.0) -> None:
    """It is in an update for too long, by a heartbeat."""
    one.ranks[0].on_heartbeat(now, "update", 100.0)


def end(one: Incarnation, status: int = 1) -> None:
    for rank in one.ranks:
        rank.status = status


def refuse(one: Incarnation) -> None:
    one.ranks[0].refusal = "refused StartUpdate: why"


def leave(one: Incarnation) -> None:
    one.leaves = Departure("is on host b, which is lost")


def recover(one: Incarnation) -> None:
    one.ranks[0].on_heartbeat(1.0, "", 0.0)


def look(one: Incarnation, now: float, *, empty: bool = True) -> Step:
    """A look at the inbox, in which nothing was left if it is empty."""
    return one.advance(now, now if empty else now - 1000.0, LIMITS)


def looks(one: Incarnation, begin: float, until: float, *, empty: bool = True) -> Step:
    """Looks every 20 ms until a step is due."""
    for number in range(round((until - begin) / 0.02) + 1):
        if step := look(one, begin + 0.02 * number, empty=empty):
            return step
    return ""


Act = Callable[[Incarnation], None]


@pytest.mark.parametrize(
    ("before", "act", "empty", "after", "step"),
    [
        ("ready", None, True, "ready", ""),
        ("ready", hang, False, "suspect", ""),
        ("ready", refuse, False, "suspect", ""),
        ("ready", leave, False, "suspect", ""),
        ("ready", end, True, "suspect", ""),  # its last words may be on their way
        ("ready", hang, True, "dying", "kill"),
        ("ready", refuse, True, "dying", "kill"),
        ("ready", leave, True, "dying", "kill"),
        ("suspect", recover, True, "ready", ""),
        ("suspect", None, False, "suspect", ""),
        ("suspect", None, True, "dying", "kill"),
        ("dying", None, True, "dying", ""),
        ("dying", end, False, "dying", ""),
        ("dying", recover, True, "dying", ""),
        ("gone", end, True, "gone", ""),
    ],
)
def test_what_leads_from_one_state_to_the_next(
    before: State, act: Act | None, empty: bool, after: State, step: Step
) -> None:
    one = ready()
    if before != "ready":
        hang(one)
        assert look(one, 1.0, empty=False) == ""
    if before in ("dying", "gone"):
        assert look(one, 1.0) == "kill"
    if before == "gone":
        end(one, -9)
        assert (look(one, 1.0), looks(one, 1.02, 1.3)) == ("", "lost")
    if act is not None:
        act(one)
    assert (look(one, 1.32, empty=empty), one.state) == (step, after)


def test_it_is_ready_once_all_ranks_are_and_starts_until_then() -> None:
    one = Incarnation("t", 0, [Rank(0, 100, 0.0), Rank(1, 101, 0.0)])
    assert (one.state, one.is_starting, one.announced) == ("starting", True, False)
    one.announce(1)
    one.ranks[0].on_heartbeat(1.0, "", 0.0)
    assert (one.state, one.is_starting) == ("starting", True), "a heartbeat does not say that it is ready"
    one.ranks[0].on_heartbeat(2.0, AWAITING, 0.0)
    assert (one.is_starting, one.awaits) == (False, True)
    one.announce(0)
    assert (one.state, one.awaits) == ("ready", False)


def test_a_start_that_takes_too_long_is_given_up() -> None:
    one = Incarnation("t", 0, [Rank(0, 100, 0.0)])
    assert (looks(one, 59.0, 59.98), one.state) == ("", "starting")
    assert look(one, 60.0) == "kill"
    assert one.reason == "was not ready within 60 s (supervision.start_s)"
    assert not one.failure(0).was_present


def test_stations_of_one_process_have_the_time_of_all_since_they_are_made_one_after_another() -> None:
    one = Incarnation("t", 0, [Rank(0, 100, 0.0, turns=2)])
    assert looks(one, 59.0, 61.0) == looks(one, 119.0, 119.98) == ""
    assert look(one, 120.0) == "kill"
    each = "supervision.start_s for each of the 2 stations of its process"
    assert one.reason == f"was not ready within 120 s ({each})"


def test_it_is_lost_once_it_has_been_reaped_and_its_last_messages_have_been_received() -> None:
    one = ready()
    hang(one)
    assert look(one, 1.02) == "kill"
    assert looks(one, 1.04, 2.0) == "", "it has not been reaped"
    end(one, -9)
    assert looks(one, 2.02, 2.26) == "", "its last message may still be on its way"
    assert look(one, 2.28) == "lost"
    assert one.reason.startswith("has been in one update for 100.0 s")
    assert not one.failure(0).killed, "main killed it"


def test_what_comes_from_another_host_may_take_some_retransmissions() -> None:
    one = ready(far=True)
    end(one, -9)
    assert looks(one, 1.0, 2.48) == ""
    assert (look(one, 2.52), look(one, 2.52)) == ("kill", "lost")
    assert one.failure(0).killed, "somebody else killed it"


def test_a_silent_station_may_speak_for_one_heartbeat_more() -> None:
    """Main and it may have been stopped together just before."""
    one = ready()
    assert (looks(one, 4.0, 4.48), one.state) == ("", "suspect")
    assert look(one, 4.52) == "kill"


def test_a_suspect_that_is_heard_of_is_left_alone() -> None:
    """Main was late: the heartbeats had come, but had not been looked at."""
    one = ready()
    assert look(one, 4.0, empty=False) == ""
    recover(one)
    assert (looks(one, 4.02, 4.6), one.state) == ("", "ready")


def test_nobody_is_given_up_before_the_inbox_was_empty() -> None:
    one = ready()
    assert looks(one, 4.0, 24.0, empty=False) == ""
    assert look(one, 24.02) == "kill"


def test_time_in_which_main_did_not_listen_counts_for_no_limit() -> None:
    one = Incarnation("t", 0, [Rank(0, 100, 0.0)])
    one.pause(50.0)
    assert one.ranks[0].deadline(LIMITS) == 50.0 + LIMITS.start_s
    one.announce(0)
    one.ranks[0].on_heartbeat(100.0, "update", 98.0)
    one.pause(30.0)
    assert looks(one, 130.0, 131.9) == ""
    assert look(one, 132.0) == "kill"
    one.pause(100.0)
    assert looks(one, 232.0, 261.9) == "", "nor for the time in which it has to end"
    with pytest.raises(RunHalted, match="t: its process 100 has not ended 30 s after SIGKILL"):
        looks(one, 261.92, 262.4)


# ------------------------------------------------------------ several ranks


def fail(one: Incarnation, number: int, error: str, *, at: float = 1.0, fatal: bool = False) -> None:
    rank = one.rank(number)
    rank.failure, rank.status = wire.Failed("t", 0, error, fatal, number, at), 1


def reason(one: Incarnation, now: float = 1.0) -> str:
    """For which it is killed."""
    assert looks(one, now, now + 0.6) == "kill"
    return one.reason


def test_a_rank_that_ended_without_a_word_comes_before_those_that_noticed_it() -> None:
    one = ready(3)
    fail(one, 0, "a connection is broken")
    one.rank(2).status = -signal.SIGKILL
    assert reason(one) == "rank 2: was ended by SIGKILL"
    failure = one.failure(5)
    assert (failure.killed, failure.error, failure.was_present, failure.updates) == (True, "", True, 5)


@pytest.mark.parametrize(
    ("status", "words"), [(None, "rank 0: was ended by SIGABRT"), (-11, "rank 2: was ended by SIGSEGV")]
)
def test_a_rank_that_aborted_comes_between_the_killed_one_and_those_that_said_why(
    status: int | None, words: str
) -> None:
    one = ready(3)
    one.rank(0).status = -signal.SIGABRT
    fail(one, 1, "a connection is broken", at=0.5)
    one.rank(2).status = status
    assert reason(one) == words


def test_of_ranks_that_say_why_they_end_the_first_that_failed_counts_whichever_was_heard_first() -> None:
    one = ready(3)
    fail(one, 0, "a connection is broken", at=1.001)
    fail(one, 1, "the disk is full", at=1.0, fatal=True)
    fail(one, 2, "a connection is broken", at=1.002)
    assert reason(one) == "rank 1: the disk is full"
    assert one.fatal
    assert one.failure(5).error == "the disk is full"


def test_a_refusal_comes_before_silence_and_one_rank_is_not_named() -> None:
    one = ready(3)
    one.rank(1).on_heartbeat(5.0, "", 0.0)
    one.rank(1).refusal = "refused StartUpdate: why"
    assert reason(one, 5.0) == "rank 1: refused StartUpdate: why"
    assert reason(ready(3), 5.0) == "rank 0: sent no heartbeat for 4 s (supervision.heartbeat_s)"
    assert reason(ready(1), 5.0) == "sent no heartbeat for 4 s (supervision.heartbeat_s)"


def test_one_that_leaves_has_no_culprit_and_moves_only_if_nothing_else_is_wrong() -> None:
    one, other = ready(), ready()
    for each in (one, other):
        each.leaves = Departure("moves to b, which has room", moves=True)
    assert (reason(one), one.moves, one.culprit) == ("moves to b, which has room", True, None)
    refuse(other)
    assert (reason(other), other.moves) == ("refused StartUpdate: why", False)


@pytest.mark.parametrize("number", [-1, 3])
def test_a_rank_that_is_not_there_can_say_nothing(number: int) -> None:
    with pytest.raises(UnfitMessage, match=f"signed by rank {number} of t"):
        ready(3).rank(number)


def test_ranks_do_the_same_work_and_their_busy_time_is_the_mean() -> None:
    one = ready(2)
    for rank, busy_s in zip(one.ranks, (3.0, 5.0), strict=True):
        counts = {"updates": 4.0, "busy_s": busy_s, "dropped/impossible": 1.0}
        rank.heartbeat = wire.Heartbeat("t", 0, "", 0.0, 1, None, counts, rank.number)
    assert dict(one.statistics()) == {"updates": 4.0, "busy_s": 4.0, "dropped/impossible": 2.0}
    one.rank(1).heartbeat = None
    assert one.statistics()["updates"] == 4.0


def test_the_call_that_takes_longest_is_the_stations() -> None:
    one = ready(2)
    one.rank(0).on_heartbeat(10.0, "publish", 1.0)
    one.rank(1).on_heartbeat(10.0, "update", 6.0)
    assert one.current_call(10.0) == "in one update for 6.0 s"


# ------------------------------------------------------------ stations of one process


def complain(one: Incarnation) -> None:
    fail(one, 0, "KeyError: 'x'")


def pair() -> tuple[Incarnation, Incarnation]:
    """Two ready stations of one process; the first is looked at first."""
    first, second = ready(), ready()
    first.station, second.station = "generator", "trainer"
    first.beside, second.beside = [second], [first]
    return first, second


@pytest.mark.parametrize(
    ("first_does", "second_does", "follower"),
    [
        (None, complain, 0),
        (complain, None, 1),
        (None, None, 1),  # a signal: the first that is looked at
        (complain, complain, None),
        (refuse, None, 1),
        (None, refuse, 0),
    ],
)
def test_a_process_of_two_stations_has_one_cause(
    first_does: Act | None, second_does: Act | None, follower: int | None
) -> None:
    both = pair()
    for one, act in zip(both, (first_does, second_does), strict=True):
        end(one)
        if act is not None:
            act(one)
    for one in both:
        assert looks(one, 1.0, 2.0) == "kill"
    follows = [one.follows for one in both]
    expected = ["", ""]
    if follower is not None:
        expected[follower] = both[1 - follower].station
        assert both[follower].reason == f"works in one process with {expected[follower]}, which failed"
        assert not both[follower].fatal
    assert follows == expected


def test_a_station_follows_one_of_its_process_that_hung() -> None:
    first, second = pair()
    hang(second)
    assert look(first, 1.0) == ""
    assert look(second, 1.0) == "kill"
    end(first, -signal.SIGKILL)
    assert looks(first, 1.1, 2.0) == "kill"
    assert (first.follows, second.follows) == ("trainer", "")
