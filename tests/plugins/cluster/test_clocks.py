"""How far other hosts' clocks are ahead: what is estimated holds within the bound that is said with it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
import pytest
from tests.plugins.cluster.served import blank_arena, served
from tests.process.runs import wait_until

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import Estimate, HostSilent, HostWatch, measure
from polyrhythm.runtime.hosts import SAME, ClockOffset, SpanAlignment
from polyrhythm.runtime.messages import Spans
from polyrhythm.runtime.spans import Span

SECOND = 10**9
SPANS = Spans("generator-1", 0, (Span("generator-1", "pass", 40.0, 41.0, 2),), 3)


class Agent:
    """The agent of a host whose clock is ahead, on a network without noise: a question takes `before` on its way, the
    answer `after`, each by our clock."""

    host = "far"

    def __init__(self, ahead_s: float, before: float = 0.0, after: float = 0.0) -> None:
        self.ahead_s, self.silent, self.asked, self.closed = ahead_s, False, 0, False
        self.now = 1000 * SECOND
        self._before, self._after = before, after

    def clock(self) -> int:
        """Ours."""
        return self.now

    def ask(self, question: q.Question) -> list[memoryview]:
        assert isinstance(question, q.ReadClocks)
        self.asked += 1
        if self.silent:
            raise HostSilent("host far has not answered for 1 s")
        self.now += round(self._before * SECOND)
        answer = msgspec.msgpack.encode((self.now + round(self.ahead_s * SECOND), time.time_ns()))
        self.now += round(self._after * SECOND)
        return [memoryview(answer)]

    def close(self) -> None:
        self.closed = True


class RealTime(Agent):
    """The same with the time as it is."""

    def ask(self, question: q.Question) -> list[memoryview]:
        self.now = time.monotonic_ns()
        return super().ask(question)


@pytest.fixture
def watch() -> HostWatch:
    """Of a host that answers nothing."""
    agent = Agent(0.0)
    agent.silent = True
    watch = HostWatch(agent)  # type: ignore[arg-type]
    watch.close()
    return watch


@pytest.mark.parametrize("way", [(0.01, 0.01), (0.02, 0.0), (0.0, 0.02)], ids=["even", "late", "early"])
@pytest.mark.parametrize("ahead_s", [30.0, -86_400.5, 0.0])
def test_the_bound_holds_however_uneven_the_way_is(ahead_s: float, way: tuple[float, float]) -> None:
    agent = Agent(ahead_s, *way)
    found = measure(agent, agent.clock)  # type: ignore[arg-type]
    assert found.half_ns == 0.01 * SECOND
    assert abs(found.clock_ns - ahead_s * SECOND) <= found.half_ns
    assert way != (0.01, 0.01) or found.clock_ns == ahead_s * SECOND


def test_the_server_of_a_host_says_what_its_clocks_show(tmp_path: Path) -> None:
    client = served(tmp_path, blank_arena())
    found = measure(client)
    assert abs(found.clock_ns) <= found.half_ns + 1
    client.close()


def test_a_better_estimate_stays_until_the_clocks_may_have_drifted_further(watch: HostWatch) -> None:
    now = time.monotonic_ns()
    good, poor = Estimate(5 * SECOND, 0, 10**6, now), Estimate(6 * SECOND, 0, 2 * 10**6, now)
    for found, ahead_s in (
        (good, 5.0),
        (poor._replace(at_ns=now + 9 * SECOND), 5.0),  # 100 parts in a million: after 10 s another millisecond
        (poor._replace(at_ns=now + 11 * SECOND), 6.0),
        (good._replace(at_ns=now + 12 * SECOND), 5.0),
    ):
        watch.update(found)
        assert (watch.offset() or SAME).ahead_s == ahead_s


def test_spans_are_shifted_to_mains_clock_and_those_of_a_host_without_an_estimate_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = RealTime(30.0)
    agent.silent = True
    watch = HostWatch(agent)  # type: ignore[arg-type]
    alignment = SpanAlignment(lambda _: watch.offset())
    wait_until(lambda: agent.asked > 1)
    with caplog.at_level(logging.WARNING, "polyrhythm.runtime.hosts"):
        for _ in range(3):
            assert alignment.align(SPANS, "far") == (Spans("generator-1", 0, (), 0), 0.0)
    own = [record.getMessage() for record in caplog.records if record.name == "polyrhythm.runtime.hosts"]
    assert [line.partition(":")[0] for line in own] == ["host far has not said what its clock shows"]
    assert alignment.used == {}
    agent.silent = False
    wait_until(lambda: watch.offset() is not None)
    shifted, uncertainty_s = alignment.align(SPANS, "far")
    (span,) = shifted.spans
    assert (shifted.lost, span.number) == (3, 2)
    assert abs(span.begin - 10.0) <= uncertainty_s
    assert span.end - span.begin == pytest.approx(1.0)
    assert alignment.used["far"].uncertainty_s == uncertainty_s
    watch.close()
    assert agent.closed


def test_on_mains_host_nothing_is_shifted() -> None:
    alignment = SpanAlignment(lambda _: SAME)
    assert (alignment.align(SPANS, ""), alignment.used) == ((SPANS, 0.0), {})
    assert str(ClockOffset(-1.5, 0.0002)) == "1.500000 s behind main's, ± 0.2 ms"


@pytest.mark.parametrize(
    ("wall_s", "half_s", "warns"),
    [
        (90.0, 0.001, "is 90.0 s ahead of main's"),
        (-3600.0, 0.001, "is 3600.0 s behind main's"),
        (1.9, 0.001, ""),
        (2.5, 0.6, ""),
    ],
)
def test_wall_clocks_that_are_apart_are_warned_of_once(
    watch: HostWatch, caplog: pytest.LogCaptureFixture, wall_s: float, half_s: float, warns: str
) -> None:
    caplog.clear()
    for _ in range(2):
        watch.update(Estimate(0, round(wall_s * SECOND), round(half_s * SECOND), 0))
    if not warns:
        assert caplog.messages == [], "a clock that may be near is not accused"
        return
    (line,) = caplog.messages
    assert line.startswith(f"the wall clock of host far {warns}")
    assert "set the clocks by NTP" in line
