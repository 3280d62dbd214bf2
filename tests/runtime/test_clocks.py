"""How far other hosts' clocks are ahead: what is estimated holds within the bound that is said with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from tests.process.runs import PATIENCE_S, wait_until
from tests.runtime.served import blank_arena, served

from polyrhythm.plugins.cluster.hosts.client import HostSilent
from polyrhythm.runtime import questions as q
from polyrhythm.runtime.clocks import SAME, Estimate, HostClocks, SpanAlignment, measure
from polyrhythm.runtime.messages import Spans
from polyrhythm.runtime.spans import Span

SECOND = 10**9
SPANS = Spans("generator-1", 0, (Span("generator-1", "pass", 40.0, 41.0, 2),), 3)


class Agent:
    """The agent of a host whose clock is ahead, on a network without noise: a question takes `before` on its way, the
    answer `after`, each by our clock, in turn of `waits`."""

    def __init__(self, ahead_s: float, *waits: tuple[float, float]) -> None:
        self.ahead_s, self.silent, self.asked, self.closed = ahead_s, False, 0, False
        self.now = 1000 * SECOND
        self._waits = waits or ((0.0, 0.0),)

    def clock(self) -> int:
        """Ours."""
        return self.now

    def ask(self, question: q.Question) -> list[memoryview]:
        assert isinstance(question, q.Clock)
        before, after = self._waits[self.asked % len(self._waits)]
        self.asked += 1
        if self.silent:
            raise HostSilent("host far has not answered for 1 s")
        self.now += round(before * SECOND)
        answer = msgspec.msgpack.encode((self.now + round(self.ahead_s * SECOND), time.time_ns()))
        self.now += round(after * SECOND)
        return [memoryview(answer)]

    def close(self) -> None:
        self.closed = True


class RealTime(Agent):
    """The same with the time as it is."""

    def ask(self, question: q.Question) -> list[memoryview]:
        self.now = time.monotonic_ns()
        return super().ask(question)


def watching(agents: Mapping[str, Agent], lost: Collection[str] = (), every_s: float = 0.01) -> HostClocks:
    clocks = HostClocks(lost, every_s)
    for host, agent in agents.items():
        clocks.add(host, agent)  # type: ignore[arg-type]
    clocks.start()
    return clocks


@pytest.mark.parametrize("waits", [(0.01, 0.01), (0.02, 0.0), (0.0, 0.02)], ids=["even", "late", "early"])
@pytest.mark.parametrize("ahead_s", [30.0, -86_400.5, 0.0])
def test_the_bound_holds_however_uneven_the_way_is(ahead_s: float, waits: tuple[float, float]) -> None:
    agent = Agent(ahead_s, waits)
    found = measure(agent, 2, agent.clock)  # type: ignore[arg-type]
    assert found.half_ns == 0.01 * SECOND
    assert abs(found.clock_ns - ahead_s * SECOND) <= found.half_ns
    assert waits != (0.01, 0.01) or found.clock_ns == ahead_s * SECOND


def test_the_shortest_of_several_round_trips_counts() -> None:
    agent = Agent(7.0, (0.1, 0.0), (0.001, 0.001), (0.0, 0.1))
    found = measure(agent, 3, agent.clock)  # type: ignore[arg-type]
    assert (found.clock_ns, found.half_ns) == (7 * SECOND, 0.001 * SECOND)


def test_the_server_of_a_host_says_what_its_clocks_show(tmp_path: Path) -> None:
    client = served(tmp_path, blank_arena())
    found = measure(client)
    assert abs(found.clock_ns) <= found.half_ns + 1
    client.close()


def test_a_better_estimate_stays_until_the_clocks_may_have_drifted_further() -> None:
    clocks, now = HostClocks(), time.monotonic_ns()
    good, poor = Estimate(5 * SECOND, 0, 10**6, now), Estimate(6 * SECOND, 0, 2 * 10**6, now)
    for found, ahead_s in (
        (good, 5.0),
        (poor._replace(at_ns=now + 9 * SECOND), 5.0),  # 100 parts in a million: after 10 s another millisecond
        (poor._replace(at_ns=now + 11 * SECOND), 6.0),
        (good._replace(at_ns=now + 12 * SECOND), 5.0),
    ):
        clocks.note("far", found)
        offset = clocks.offset_of("far")
        assert offset is not None
        assert offset.ahead_s == ahead_s
    clocks.note("new", good)
    assert (clocks.offset_of("new") or SAME).uncertainty_s >= 0.001


def test_spans_are_shifted_to_mains_clock_and_those_of_a_host_without_an_estimate_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = RealTime(30.0)
    agent.silent = True
    with closing(watching({"far": agent})) as clocks, caplog.at_level(logging.WARNING):
        alignment = SpanAlignment(clocks)
        assert alignment.align(SPANS, q.MAIN) == (SPANS, 0.0)
        wait_until(lambda: agent.asked > 1)
        for _ in range(3):
            assert alignment.align(SPANS, "far") == (Spans("generator-1", 0, (), 0), 0.0)
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "host far has not said what its clock shows"
        ]
        assert alignment.used == {}
        agent.silent = False
        wait_until(lambda: clocks.offset_of("far") is not None)
        shifted, uncertainty_s = alignment.align(SPANS, "far")
        (span,) = shifted.spans
        assert (shifted.lost, span.number) == (3, 2)
        assert abs(span.begin - 10.0) <= uncertainty_s
        assert span.end - span.begin == pytest.approx(1.0)
        assert alignment.used["far"].uncertainty_s == uncertainty_s
    assert agent.closed


def test_in_a_run_of_one_host_nothing_is_shifted() -> None:
    assert SpanAlignment(None).align(SPANS, "") == (SPANS, 0.0)
    assert HostClocks().offset_of(q.MAIN) == SAME


def test_wall_clocks_that_are_apart_are_warned_of_once_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    clocks = HostClocks()
    for _ in range(2):
        for host, wall_s, half_s in (
            ("a", 90.0, 0.001),
            ("b", -3600.0, 0.001),
            ("near", 1.9, 0.001),
            ("far", 2.5, 0.6),
        ):
            clocks.note(host, Estimate(0, round(wall_s * SECOND), round(half_s * SECOND), 0))
    said = caplog.messages
    assert len(said) == 2, "who may be near is not accused"
    assert said[0].startswith("the wall clock of host a is 90.0 s ahead of main's")
    assert said[1].startswith("the wall clock of host b is 3600.0 s behind main's")
    assert all("set the clocks by NTP" in line for line in said)


def test_a_host_that_is_lost_is_asked_no_more_and_a_new_one_at_once() -> None:
    agents, lost = {"gone": RealTime(0.0), "here": RealTime(0.0)}, set[str]()
    with closing(watching(agents, lost)) as clocks:
        wait_until(lambda: clocks.offset_of("gone"))
        lost.add("gone")
        here = agents["here"].asked
        wait_until(lambda: agents["here"].asked > here + 6)  # an exchange that was under way is over
        here, gone = agents["here"].asked, agents["gone"].asked
        wait_until(lambda: agents["here"].asked > here + 6)
        assert agents["gone"].asked == gone
    later = RealTime(0.0)
    with closing(watching({}, every_s=PATIENCE_S)) as clocks:
        clocks.add("new", later)  # type: ignore[arg-type]
        wait_until(lambda: clocks.offset_of("new"))
