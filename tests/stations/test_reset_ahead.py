"""Spare rows: the episode is the same, its reset happens elsewhere, and what it raised is raised where it begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.stations.counting import Bench, Counting, ticket

from polyrhythm.envs.base import RowsFailed, StepResult
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records as r
from polyrhythm.stations.simulator.reset_ahead import ResetAhead

DEADLINE_S = 20.0


class Gated(Counting):
    """Resets outside the main thread wait for `gate`, which `waits` says; `threads` names the thread of each reset.
    falls: the first row of each step fails."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.gate, self.threads = threading.Event(), list[str]()
        self.gate.set()
        self.waits, self.falls = threading.Event(), False

    def reset(self, rows: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.waits.set()
            assert self.gate.wait(DEADLINE_S)
        assert [type(given) for given in (rows, tasks, seeds)] == [list] * 3, "what the station gives, too"
        super().reset(rows, tasks, seeds)
        self.threads += [threading.current_thread().name] * len(rows)

    def step(self, rows: Sequence[int], actions: np.ndarray) -> StepResult:
        if self.falls:
            raise RowsFailed({int(rows[0]): RuntimeError("fell")})
        return super().step(rows, actions)


@pytest.fixture
def inner() -> Gated:
    return Gated(5)


@pytest.fixture
def ahead(inner: Gated) -> Iterator[ResetAhead]:
    """Three rows and two spares."""
    batch = ResetAhead(inner, 2)
    yield batch
    inner.gate.set()
    batch.close()
    assert inner.closed


def settle(ahead: ResetAhead, *starts: tuple[int, int]) -> None:
    """Wait until spare rows have these episodes."""
    with ahead.changed:
        assert ahead.changed.wait_for(
            lambda: all(any(s.start == start and s.ready for s in ahead.spares) for start in starts), DEADLINE_S
        )


def under_way(ahead: ResetAhead, inner: Gated, start: tuple[int, int]) -> None:
    """Let a spare row's reset for this episode begin; it ends once the gate is open."""
    inner.gate.clear()
    inner.waits.clear()
    ahead.prepare([start], [])
    assert inner.waits.wait(DEADLINE_S)
    assert any(spare.start == start and not spare.ready for spare in ahead.spares)


def open_when_waited_for(ahead: ResetAhead, inner: Gated) -> None:
    """Open the gate once the main thread waits for the reset behind it."""
    until = time.monotonic() + DEADLINE_S
    while not ahead.changed._waiters and time.monotonic() < until:  # type: ignore[attr-defined]
        time.sleep(0.001)
    inner.gate.set()


def await_idle(ahead: ResetAhead) -> None:
    """Wait until the thread that resets spare rows has found nothing to do."""
    until = time.monotonic() + DEADLINE_S
    while True:
        with ahead.changed:
            if ahead.changed._waiters:  # type: ignore[attr-defined]
                return
        assert time.monotonic() < until, "it resets a spare row"
        time.sleep(0.001)


def seen(ahead: ResetAhead, rows: Sequence[int]) -> list[list[float]]:
    out = {"x": np.full((len(rows), 3), np.nan, np.float32)}
    ahead.observe(tuple(rows), out)  # rows come as arrays or as sequences
    return [list(map(float, row)) for row in out["x"]]


def test_a_ready_row_changes_places_and_the_others_go_on(ahead: ResetAhead, inner: Gated) -> None:
    ahead.reset(range(3), [0] * 3, [5, 6, 7])
    ahead.prepare([(1, 8), (0, 9)], [])
    settle(ahead, (1, 8), (0, 9))
    ahead.step(np.arange(3), np.ones((3, 1), np.float32))
    ahead.reset([1], [1], [8])
    assert seen(ahead, [0, 1, 2]) == [[5, 1, 1], [8, 0, 0], [7, 1, 1]]
    ahead.step(np.array([1]), np.full((1, 1), 4, np.float32))
    assert seen(ahead, [2, 1]) == [[7, 1, 1], [8, 1, 4]]
    assert inner.threads == ["MainThread"] * 3 + ["reset ahead"] * 2
    assert (ahead.ready, ahead.waited, ahead.in_place) == (1, 0, 3)


def test_the_row_that_was_left_is_the_next_spare(ahead: ResetAhead, inner: Gated) -> None:
    for seed in range(10, 40):
        ahead.prepare([(0, seed)], [])
        settle(ahead, (0, seed))
        ahead.reset([seed % 3], [0], [seed])
        assert seen(ahead, [seed % 3]) == [[seed, 0, 0]]
    assert seen(ahead, [0, 1, 2]) == [[39, 0, 0], [37, 0, 0], [38, 0, 0]]
    assert ahead.ready == 30


def test_equal_episodes_of_a_group_take_a_row_each(ahead: ResetAhead) -> None:
    ahead.prepare([(0, 8), (0, 8)], [])
    with ahead.changed:
        assert ahead.changed.wait_for(lambda: all(s.start == (0, 8) and s.ready for s in ahead.spares), DEADLINE_S)
    ahead.reset([0, 1, 2], [0] * 3, [8] * 3)
    assert (ahead.ready, ahead.in_place) == (2, 1)
    assert seen(ahead, [0, 1, 2]) == [[8, 0, 0]] * 3


def test_a_reset_under_way_is_waited_for(ahead: ResetAhead, inner: Gated) -> None:
    under_way(ahead, inner, (0, 8))
    timer = threading.Timer(0.05, inner.gate.set)
    timer.start()
    ahead.reset([0], [0], [8])
    timer.join(DEADLINE_S)
    assert seen(ahead, [0]) == [[8, 0, 0]]
    assert (ahead.ready, ahead.waited, ahead.in_place) == (0, 1, 0)


@pytest.mark.parametrize("spares", [1, 2])
def test_a_reset_under_way_that_no_forecast_wants_any_more_is_still_taken(spares: int) -> None:
    """The thread may not use the spare for another episode between the end of its reset and the change of places."""
    inner, coming = Gated(3 + spares), [(0, 109), (0, 110)][:spares]
    ahead = ResetAhead(inner, spares)
    for seed in range(8, 18):
        under_way(ahead, inner, (0, seed))
        # another env batch took the ticket that this forecast was made for, and this episode is granted here after all
        ahead.prepare(coming, [])
        opening = threading.Thread(target=open_when_waited_for, args=(ahead, inner))
        opening.start()
        ahead.reset([0], [0], [seed])
        opening.join(DEADLINE_S)
        assert seen(ahead, [0]) == [[seed, 0, 0]]
        settle(ahead, *coming)  # the row that was left is a spare again
    assert (ahead.ready, ahead.waited, ahead.in_place) == (0, 10, 0)
    ahead.close()


def test_what_is_about_to_begin_is_kept(ahead: ResetAhead, inner: Gated) -> None:
    ahead.prepare([(0, 8), (0, 9)], [])
    settle(ahead, (0, 8), (0, 9))
    ahead.prepare([(0, 10), (0, 11)], [(0, 8)])
    settle(ahead, (0, 10), (0, 8))
    ahead.reset([0], [0], [8])
    settle(ahead, (0, 10), (0, 11))
    assert ahead.ready == 1


def test_an_episode_that_has_begun_is_not_reset_again(ahead: ResetAhead, inner: Gated) -> None:
    ahead.prepare([(0, 8), (0, 9), (0, 10)], [])
    settle(ahead, (0, 8), (0, 9))
    ahead.reset([0, 1], [0] * 2, [8, 10])  # one by a spare row, one in place
    await_idle(ahead)
    assert inner.threads == ["reset ahead"] * 2 + ["MainThread"]


def test_a_failed_reset_fails_its_row_alone_and_once(ahead: ResetAhead, inner: Gated) -> None:
    inner.unborn.add(8)
    ahead.prepare([(0, 8), (0, 9)], [])
    settle(ahead, (0, 8), (0, 9))
    with pytest.raises(RowsFailed, match="row 2: RuntimeError: no state for seed 8") as raised:
        ahead.reset([1, 2, 0], [0] * 3, [9, 8, 30])
    assert list(raised.value.errors) == [2]
    assert seen(ahead, [0, 1]) == [[30, 0, 0], [9, 0, 0]]
    inner.unborn.clear()
    ahead.prepare([(0, 8)], [])
    settle(ahead, (0, 8))
    ahead.reset([2], [0], [8])
    assert seen(ahead, [2]) == [[8, 0, 0]]


def test_a_row_that_fails_has_its_own_number(ahead: ResetAhead, inner: Gated) -> None:
    ahead.prepare([(0, 8)], [])
    settle(ahead, (0, 8))
    ahead.reset([0], [0], [8])
    inner.falls = True
    with pytest.raises(RowsFailed) as raised:
        ahead.step(np.array([0, 1]), np.ones((2, 1), np.float32))
    assert list(raised.value.errors) == [0]
    assert isinstance(raised.value.__cause__, RowsFailed)
    assert min(raised.value.__cause__.errors) >= 3, "it is a spare row's place"


class Speaking(Counting):
    def texts(self, row: int) -> list[str]:
        return [str(int(self.state[row, 0]))]


def test_texts_are_those_of_the_row_that_changed_places() -> None:
    ahead = ResetAhead(Speaking(3), 1)
    ahead.reset([0, 1], [0, 0], [5, 6])
    ahead.prepare([(0, 8)], [])
    settle(ahead, (0, 8))
    ahead.reset([1], [0], [8])
    assert ahead.traits.texts
    assert [ahead.texts(row) for row in range(2)] == [["5"], ["8"]]
    ahead.close()


class AheadBench(Bench):
    """A station of two rows and two spares."""

    def __init__(self) -> None:
        self.inner = Counting(4)
        self.ahead = ResetAhead(self.inner, 2)
        super().__init__(2, env=self.ahead)  # type: ignore[arg-type]

    def prepare(self, *starts: tuple[int, int]) -> None:
        self.simulator.handle(r.PrepareEpisodes("s", "e/0", starts))


@pytest.fixture
def bench() -> Iterator[AheadBench]:
    bench = AheadBench()
    yield bench
    bench.simulator.close()


def test_the_station_takes_episodes_that_were_foretold(bench: AheadBench) -> None:
    first, second = ticket(1, 3), ticket(2, 3)
    bench.prepare((0, first.seed), (0, second.seed))
    settle(bench.ahead, (0, first.seed), (0, second.seed))
    bench.start((0, first), (1, second))
    bench.prepare((0, 999))  # the grants are not in the new forecast, but their rows are kept
    (request,) = bench.run()
    assert isinstance(request, r.RequestArrived)
    counts = bench.simulator.statistics()
    assert (counts["resets_ready"], counts["resets_waited"], counts["resets_in_place"]) == (2, 0, 0)


def test_a_failure_ahead_is_the_failure_of_a_reset(bench: AheadBench) -> None:
    """Reason, error and detail are those of the same failure in place."""
    bad, good = ticket(1, 3), ticket(2, 3)
    bench.inner.unborn.add(bad.seed)
    plain = Bench(2)
    plain.env.unborn.add(bad.seed)
    plain.start((0, bad))
    bench.prepare((0, bad.seed), (0, good.seed))
    settle(bench.ahead, (0, bad.seed), (0, good.seed))
    bench.start((0, bad), (1, good))
    failed, request = bench.run()
    (wanted,) = plain.run()
    assert isinstance(failed, r.SampleFailed)
    assert isinstance(wanted, r.SampleFailed)
    assert (failed.ticket, failed.reason, failed.error) == (wanted.ticket, wanted.reason, wanted.error)
    assert failed.detail.startswith(f"task a, seed {bad.seed}")
    assert isinstance(request, r.RequestArrived)
    assert request.rows == 1


def test_what_cannot_be_prepared_is_unfit(bench: AheadBench) -> None:
    for starts in ([(2, 5)], [(-1, 5)], [(0, -1)], [(0, 2**63)]):
        with pytest.raises(UnfitMessage, match="cannot prepare"):
            bench.prepare(*starts)
    with pytest.raises(UnfitMessage, match="no spare rows"):
        Bench(2).simulator.handle(r.PrepareEpisodes("s", "e/0", ((0, 5),)))
