"""The protocol of a simulator that joins: decided without a socket, an environment or a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.plugins.join.test_hostile_join import START
from tests.plugins.join.test_reception import INFO, LAYOUT, SPEC

from polyrhythm.errors import RunHalted, StartError
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.joiner import (
    CloseLine,
    FrameCame,
    HandOver,
    Joiner,
    LeaveRun,
    LineIs,
    MakeStation,
    OpenLine,
    SendFrame,
    StationEvent,
    StationStatus,
    StopStation,
    TimePassed,
)
from polyrhythm.runtime.transport import wire
from polyrhythm.stations.simulator.slot import StepSettings

WELCOME = m.Welcome("session", "s", 0, "s.0.0", INFO, StepSettings(1), LAYOUT, 20.0)


class Run:
    """A joiner, the time, and what it has sent."""

    def __init__(self, **limits: float) -> None:
        self.joiner, self.now = Joiner("tcp://host:77", SPEC, "an environment", "1.2", 100.0, **limits), 100.0
        self.sent: list[Any] = []
        self.status: StationStatus | None = None
        self.ending = self.leaving = False

    def do(self, event: Any) -> list[Any]:
        """The actions, without the frames, which are decoded into `sent`."""
        others = []
        for action in self.joiner.handle(event, self.now):
            if isinstance(action, SendFrame):
                self.sent.append(m.unpack(action.frame, "simulator")[0])
            else:
                others.append(action)
            if isinstance(action, MakeStation):
                self.status = doing()
            if isinstance(action, StopStation):
                self.status, self.ending = None, True
        return others

    def hear(self, message: m.FromRun, pieces: Sequence[bytes] = ()) -> list[Any]:
        return self.do(FrameCame(memoryview(m.pack(message, pieces))))

    def passes(self, seconds: float = 0.0) -> list[Any]:
        self.now += seconds
        return self.do(TimePassed(self.status, self.ending, self.leaving))

    def join(self) -> None:
        self.passes()
        self.do(LineIs("proven"))
        self.hear(WELCOME)
        self.sent.clear()


def doing(call: str = "", since: float = 0.0, **ended: Any) -> StationStatus:
    return StationStatus(True, call, since, 3, {"env_s": 1.0}, **ended)


def test_it_greets_the_run_and_says_what_its_station_says() -> None:
    run = Run()
    assert run.passes() == [OpenLine("tcp://host:77")]
    assert [(hello.polyrhythm, hello.session) for hello in run.sent] == [("1.2", "")]
    run.do(LineIs("proven"))
    assert run.hear(WELCOME) == [MakeStation(WELCOME)]
    run.sent.clear()
    run.do(StationEvent(b"event", [memoryview(b"piece")]))
    assert [(said.number, said.event) for said in run.sent] == [(1, b"event")]
    (hand,) = run.hear(m.RunMessage("session", 1, 1), [wire.encode(START)])
    assert isinstance(hand, HandOver)
    assert hand.message == START
    assert run.hear(m.RunMessage("session", 1, 1), [wire.encode(START)]) == [], "it came before"
    assert run.hear(m.Over("session", "the run is over", fault=False)) == [LeaveRun("the run is over")]


def test_signs_of_life_come_in_their_own_time() -> None:
    run = Run()
    run.join()
    run.status = doing("step", since=99.0)
    for _ in range(8):
        run.passes(0.125)
    beats = [(beat.ready, beat.doing, beat.for_s, beat.units) for beat in run.sent]
    assert [beat[2] for beat in beats] == [1.125, 1.625]
    assert beats[0][:2] + beats[0][3:] == (True, "step", 3)


def test_a_broken_connection_is_replaced_and_what_the_run_lacks_is_sent_again() -> None:
    run = Run()
    run.join()
    for event in (b"1", b"2"):
        run.do(StationEvent(event))
    assert run.do(LineIs("broken")) == [CloseLine()]
    run.do(StationEvent(b"3"))
    assert [said.event for said in run.sent] == [b"1", b"2"], "nothing is sent without a connection"
    assert run.passes(0.1) == []
    assert run.passes(0.5) == [OpenLine("tcp://host:77")]
    hello = run.sent.pop()
    assert (hello.session, hello.received) == ("session", 0)
    run.sent.clear()
    run.hear(m.Resumed("session", 1))
    assert [said.event for said in run.sent] == [b"2", b"3"]


def test_a_session_that_was_given_up_is_followed_by_another_once_its_station_has_ended() -> None:
    run = Run()
    run.join()
    run.do(LineIs("broken"))
    run.passes(1.0)
    assert run.hear(m.JoinRefused("session", "over")) == [StopStation(), CloseLine()]
    assert run.passes(100.0) == [], "its environment takes its time, and the run is not silent meanwhile"
    run.ending = False
    assert run.passes() == [OpenLine("tcp://host:77")]
    assert run.sent[-1].session == ""


def test_taken_places_are_tried_in_turn_until_its_patience_ends() -> None:
    run = Run(patience_s=5.0)
    taken = m.JoinRefused("taken", "somebody is here", (78,))
    opened = [*run.passes()]
    for _ in range(3):
        run.hear(taken)
        opened += run.passes(2.0)
    run.now += 2.0
    with pytest.raises(StartError, match=r"has no room for this simulator: somebody is here; raise join\.simulators"):
        run.hear(taken)
    assert opened == [OpenLine(f"tcp://host:{port}") for port in (77, 78, 77, 78)]


def test_who_cannot_be_told_waits_for_the_connection_before_it_leaves() -> None:
    """So that its tickets count no attempt."""
    run = Run()
    run.join()
    run.do(LineIs("broken"))
    run.leaving = True
    assert run.passes(1.0) == [OpenLine("tcp://host:77")]
    run.hear(m.Resumed("session", 0))
    assert run.passes() == [LeaveRun("left the run, which goes on")]
    assert (run.sent[-1].reason, run.sent[-1].blame) == ("interrupted", False)


def test_who_cannot_be_told_at_all_leaves_in_the_end() -> None:
    run = Run()
    run.join()
    run.do(LineIs("broken"))
    run.leaving = True
    left = LeaveRun("left the run, which goes on")
    assert [left in run.passes(seconds) for seconds in (1.0, 19.9, 0.2)] == [False, False, True], "reconnect_s"


def test_a_long_reset_parks_and_an_environment_that_ends_raises() -> None:
    run = Run(park_s=3.0)
    run.join()
    run.status = doing("reset", since=100.0)
    assert run.passes(2.9) == []
    assert run.passes(0.2) == [StopStation(), CloseLine()]
    assert run.sent[-1].reason == "parked, its reset takes longer than 3 s"
    other = Run()
    other.join()
    other.status = doing(over=True, error=ValueError("its cable is out"))
    with pytest.raises(RunHalted, match="the environment cannot go on: ValueError: its cable is out"):
        other.passes()


@pytest.mark.parametrize(
    ("states", "says"),
    [
        (("refused",), "does not accept this token; copy the token file of the run that is there now"),
        (("opening", "broken"), "no run answers at tcp://host:77 for 60 s; it is over, or has not begun"),
    ],
)
def test_a_run_that_does_not_let_it_in_or_answer_ends_the_join(states: tuple[Any, ...], says: str) -> None:
    run = Run()

    def tries() -> None:
        for _ in range(100):
            run.passes(1.0)
            for state in states:
                run.do(LineIs(state))

    with pytest.raises(StartError, match=says):
        tries()


def test_frames_that_are_not_the_sessions_are_dropped_and_counted() -> None:
    run = Run()
    run.join()
    assert run.hear(m.Alive("another", 0)) == []
    assert run.hear(m.RunMessage("session", 1, 0), [b"", b""]) == []
    assert run.hear(m.Alive("session", 7)) == [], "it has said nothing that could have come"
    assert run.do(FrameCame(memoryview(b"\xc1"))) == []
    assert run.joiner.drops.counts() == {"unknown_station": 1, "impossible": 2, "undecodable": 1}
