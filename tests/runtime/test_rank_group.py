"""Several ranks as one station: for which of them it is replaced, and how their counters add up."""

from __future__ import annotations

from typing import Any

import pytest
from tests.process.runs import config

from polyrhythm.runtime.processes.rank_group import RankGroup
from polyrhythm.runtime.processes.supervision import AWAITING, LivenessMonitor
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage

LIMITS = config(supervision={"heartbeat_s": 4.0, "update_s": 100.0}).supervision


class Process:
    """What a group sees of a process that was heard at 0 s; ended: how, in words."""

    def __init__(self, rank: int) -> None:
        self.rank, self.pid = rank, 100 + rank
        self.monitor = LivenessMonitor(began=-1.0, present=True)
        self.monitor.note_heartbeat(0.0, "", 0.0)
        self.heartbeat: Any = None
        self.failure: Any = None
        self.ended = self.refusal = ""
        self.killed = False

    @property
    def aborted(self) -> bool:
        return self.ended == "was ended by SIGABRT"

    @property
    def exited(self) -> bool:
        return bool(self.ended)

    def how_it_ended(self) -> str:
        return self.failure.error if self.ended and self.failure else self.ended


def group(count: int = 3) -> Any:
    found = RankGroup("t", 0)
    found.processes.extend(Process(rank) for rank in range(count))  # type: ignore[arg-type]
    return found


def fail(ranks: Any, rank: int, error: str, *, at: float = 1.0, fatal: bool = False) -> None:
    ranks.note_failure(wire.Failed("t", 0, error, fatal, rank, at))
    ranks.rank(rank).ended = "ended with status 1"


def test_a_rank_that_ended_without_a_word_comes_before_those_that_noticed_it() -> None:
    ranks = group()
    fail(ranks, 0, "a connection is broken")
    ranks.rank(2).ended = "was ended by SIGKILL"
    ranks.rank(2).killed = True
    assert ranks.complaint(1.0, LIMITS) == "rank 2: was ended by SIGKILL"
    failure = ranks.failure(5)
    assert (failure.killed, failure.error, failure.was_present, failure.updates) == (True, "", True, 5)


def test_a_rank_that_aborted_comes_between_the_killed_one_and_those_that_said_why() -> None:
    ranks = group()
    ranks.rank(0).ended = "was ended by SIGABRT"
    fail(ranks, 1, "a connection is broken", at=0.5)
    assert ranks.complaint(1.0, LIMITS) == "rank 0: was ended by SIGABRT"
    ranks.rank(2).ended = "was ended by SIGSEGV"
    assert ranks.complaint(1.0, LIMITS) == "rank 2: was ended by SIGSEGV"


def test_it_starts_until_all_ranks_are_ready_or_wait_for_somebody_to_join() -> None:
    ranks = group()
    assert not ranks.is_starting
    late = ranks.rank(1).monitor = LivenessMonitor(began=0.0)
    late.note_heartbeat(1.0, "", 0.0)
    assert ranks.is_starting, "a heartbeat does not say that it is ready"
    late.note_heartbeat(2.0, AWAITING, 0.0)
    assert not ranks.is_starting


def test_of_ranks_that_say_why_they_end_the_first_that_failed_counts_whichever_was_heard_first() -> None:
    ranks = group()
    fail(ranks, 0, "a connection is broken", at=1.001)
    fail(ranks, 1, "the disk is full", at=1.0, fatal=True)
    fail(ranks, 2, "a connection is broken", at=1.002)
    assert ranks.complaint(1.0, LIMITS) == "rank 1: the disk is full"
    assert ranks.fatal
    assert ranks.failure(5).error == "the disk is full"


def test_a_refusal_comes_before_silence_and_one_rank_is_not_named() -> None:
    ranks = group()
    ranks.rank(1).monitor.note_heartbeat(5.0, "", 0.0)
    ranks.rank(1).refusal = "refused StartUpdate: why"
    assert ranks.is_suspect(5.0, LIMITS)
    assert ranks.complaint(5.0, LIMITS) == "rank 1: refused StartUpdate: why"
    ranks.rank(1).refusal = ""
    assert ranks.complaint(5.0, LIMITS) == "rank 0: sent no heartbeat for 4 s (supervision.heartbeat_s)"
    assert group(1).complaint(5.0, LIMITS) == "sent no heartbeat for 4 s (supervision.heartbeat_s)"


def test_nothing_is_wrong_with_ranks_that_are_heard() -> None:
    ranks = group()
    assert not ranks.is_suspect(3.9, LIMITS)
    assert ranks.complaint(3.9, LIMITS) == ""
    assert ranks.culprit is None


@pytest.mark.parametrize("number", [-1, 3])
def test_a_rank_that_is_not_there_can_say_nothing(number: int) -> None:
    with pytest.raises(UnfitMessage, match=f"signed by rank {number} of t"):
        group().note_failure(wire.Failed("t", 0, "", True, number))


def test_ranks_do_the_same_work_and_their_busy_time_is_the_mean() -> None:
    ranks = group(2)
    for process, busy_s in zip(ranks, (3.0, 5.0), strict=True):
        counts = {"updates": 4.0, "busy_s": busy_s, "dropped/impossible": 1.0}
        process.heartbeat = wire.Heartbeat("t", 0, "", 0.0, 1, None, counts, process.rank)
    assert dict(ranks.statistics()) == {"updates": 4.0, "busy_s": 4.0, "dropped/impossible": 2.0}
    ranks.rank(1).heartbeat = None
    assert ranks.statistics()["updates"] == 4.0


def test_the_call_that_takes_longest_is_the_stations() -> None:
    ranks = group(2)
    ranks.rank(0).monitor.note_heartbeat(10.0, "publish", 1.0)
    ranks.rank(1).monitor.note_heartbeat(10.0, "update", 6.0)
    assert ranks.current_call(10.0) == "in one update for 6.0 s"
