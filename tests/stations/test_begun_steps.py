"""Steps that wait for calls: all are begun before the first is done, and slots wait for their own calls alone."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from tests.stations.counting import Bench, Counting, ticket
from tests.stations.test_reset_ahead import settle

from polyrhythm.envs.base import EnvTraits, StepResult, batch_traits
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.joiner import HandOver
from polyrhythm.plugins.join.joining import EnvThread, JoinedStation, KeptEnv
from polyrhythm.runtime.messages import Reply
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.scheduler.records import CancelRow, Event, Grant, RequestArrived, SampleFailed, StartRows
from polyrhythm.stations.simulator.reset_ahead import ResetAhead
from polyrhythm.stations.simulator.slot import StepSettings


class Calling(Counting):
    """Each step of a row begins a call, which `end` ends; those of `instant` rows end at once. begun, dropped: rows, in
    order; steps: rows of each step, and whether it had to wait; refused: rows whose calls cannot begin."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.spec = replace(self.spec, chunk=1)
        self.begun: list[int] = []
        self.running: set[int] = set()
        self.instant: set[int] = set()
        self.dropped: list[int] = []
        self.steps: list[tuple[list[int], bool]] = []
        self.refused: set[int] = set()
        self._read, self._write = os.pipe()

    def begin_step(self, rows: Sequence[int], actions: NDArray[np.generic]) -> None:
        assert actions.shape == (len(rows), 1, 1)
        for row in map(int, rows):
            if row in self.refused:
                raise OSError("no more descriptors")
            self.begun.append(row)
            self.running |= {row} - self.instant

    def drop_step(self, rows: Sequence[int]) -> None:
        self.dropped += map(int, rows)
        self.running -= set(map(int, rows))

    def end(self, *rows: int) -> None:
        self.running -= set(rows)
        os.write(self._write, b"!")

    def waits(self, rows: Sequence[int]) -> bool:
        if select.select([self._read], [], [], 0)[0]:
            os.read(self._read, 99)
        return bool(self.running & set(map(int, rows)))

    def fileno(self) -> int:
        return self._read

    def step(self, rows: Sequence[int], actions: NDArray[Any]) -> StepResult:
        self.steps.append((list(map(int, rows)), bool(self.running & set(map(int, rows)))))
        self.running -= set(map(int, rows))
        return super().step(rows, actions[:, 0])._replace(executed=np.ones((len(rows), 1), bool))

    def close(self) -> None:
        super().close()
        os.close(self._read)
        os.close(self._write)


def bench_of(slots: int, rows: int = 1, *, join: bool = False) -> tuple[Bench, Calling, dict[str, Event]]:
    """A simulator whose slots have all been answered, and what each had requested."""
    env = Calling(slots * rows)
    bench = Bench(slots * rows, sharding=f"even:{slots}", settings=StepSettings(1, whole=True, join=join), env=env)
    for slot in range(slots):
        own = range(slot * rows, (slot + 1) * rows)
        bench.start(*((row, ticket(row, 5)) for row in own), slot=f"e/{slot}")
    asked = {event.slot: event for event in bench.run() if isinstance(event, RequestArrived)}
    assert len(asked) == slots
    return bench, env, asked  # type: ignore[return-value]


def readable(number: int | None) -> bool:
    assert number is not None
    return bool(select.select([number], [], [], 0)[0])


def requests(events: list[Event]) -> list[str]:
    return [event.slot for event in events if isinstance(event, RequestArrived)]


def test_calls_of_all_slots_have_begun_before_the_first_is_waited_for() -> None:
    bench, env, asked = bench_of(3)
    for event in asked.values():
        bench.answer(event)
    assert requests(bench.run()) == ["e/0", "e/1", "e/2"]
    assert env.begun == [0, 1, 2]
    assert env.steps == [([0], True), ([1], True), ([2], True)], "nobody else waits beside messages here"
    bench.simulator.close()


def test_a_slot_is_stepped_when_its_own_calls_have_ended() -> None:
    bench, env, asked = bench_of(3, rows=2)
    number = bench.simulator.traits.wait_beside()
    for slot in ("e/2", "e/0"):
        bench.answer(asked[slot])
    assert bench.run() == []
    assert env.begun == [4, 5, 0, 1]
    what, since = bench.simulator.current_call()
    assert what == "step"
    env.end(0, 4)
    assert readable(number)
    assert bench.run() == [], "each has a row whose call runs"
    assert not readable(number), "which it was woken for once"
    assert bench.simulator.current_call() == (what, since), "supervision sees how long they have been waited for"
    env.end(5)
    bench.answer(asked["e/1"])
    assert requests(bench.run()) == ["e/2"]
    env.end(1, 2, 3)
    assert requests(bench.run()) == ["e/0", "e/1"]
    assert [waited for _, waited in env.steps] == [False] * 3
    assert env.begun == [4, 5, 0, 1, 2, 3], "each once"
    assert bench.simulator.current_call() == ("", 0.0)
    bench.simulator.close()


def lines_of(work: Callable[[], object], file: str) -> int:
    """How many lines of a file it executes."""
    found = 0

    def trace(frame: Any, event: str, what: Any) -> Any:
        nonlocal found
        found += event == "line"
        return trace

    def enter(frame: Any, event: str, what: Any) -> Any:
        return trace if frame.f_code.co_filename.endswith(file) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("waits_beside", [True, False])
def test_what_slots_take_grows_with_their_number_and_not_with_its_square(waits_beside: bool) -> None:
    def lines(slots: int) -> int:
        bench, env, asked = bench_of(slots)
        if waits_beside:
            bench.simulator.traits.wait_beside()
        for event in asked.values():
            bench.answer(event)
        if waits_beside:
            assert bench.run() == []
        env.end(*range(slots))
        found = lines_of(bench.run, "simulator/station.py")
        assert len(env.steps) == slots
        bench.simulator.close()
        return found

    assert lines(80) < 5 * lines(20)


def test_slots_that_step_together_wait_for_each_others_calls() -> None:
    bench, env, asked = bench_of(2, join=True)
    bench.simulator.traits.wait_beside()
    for event in asked.values():
        bench.answer(event)
    env.end()
    assert bench.run() == []
    env.end(0)
    assert bench.run() == []
    env.end(1)
    assert sorted(requests(bench.run())) == ["e/0", "e/1"]
    assert [(sorted(rows), waited) for rows, waited in env.steps] == [([0, 1], False)]
    bench.simulator.close()


def test_a_call_that_ends_before_another_slot_is_answered_wakes_once() -> None:
    bench, env, asked = bench_of(2, join=True)
    number = bench.simulator.traits.wait_beside()
    bench.answer(asked["e/0"])
    assert bench.run() == []
    env.end(0)
    assert readable(number)
    assert bench.run() == [], "e/1 has no answer"
    assert not readable(number)
    bench.answer(asked["e/1"])
    assert bench.run() == []
    env.end(1)
    assert sorted(requests(bench.run())) == ["e/0", "e/1"]
    bench.simulator.close()


def test_a_cancelled_row_is_not_waited_for() -> None:
    bench, env, asked = bench_of(2)
    number = bench.simulator.traits.wait_beside()
    for event in asked.values():
        bench.answer(event)
    assert bench.run() == []
    for slot in range(2):
        bench.simulator.handle(CancelRow("s", f"e/{slot}", slot, 1))
    assert [type(event) for event in bench.events] == [SampleFailed] * 2
    assert env.dropped == [0, 1]
    env.end(0, 1)
    assert readable(number)
    assert bench.run() == []
    assert not readable(number), "though no slot is about to be stepped"
    assert bench.simulator.current_call() == ("", 0.0)
    bench.start((0, ticket(7, 5)), slot="e/0")
    (again,) = bench.run()
    bench.answer(again)
    assert bench.run() == []
    assert env.begun == [0, 1, 0]
    env.end(0)
    assert requests(bench.run()) == ["e/0"]
    bench.simulator.close()


@pytest.mark.parametrize("waits_beside", [True, False])
def test_only_a_step_that_was_begun_is_dropped(waits_beside: bool) -> None:
    bench, env, asked = bench_of(3, rows=2)
    if waits_beside:
        bench.simulator.traits.wait_beside()
        bench.answer(asked["e/2"])
        assert bench.run() == []
    for row in (5, 0, 5):
        bench.simulator.handle(CancelRow("s", f"e/{row // 2}", row, 1))
    assert env.dropped == ([5] if waits_beside else [])
    bench.simulator.close()


def test_a_step_that_cannot_begin_fails_its_samples() -> None:
    bench, env, asked = bench_of(2)
    bench.simulator.traits.wait_beside()
    env.refused = {0}
    bench.answer(asked["e/0"])
    (failed,) = bench.run()
    assert isinstance(failed, SampleFailed)
    assert "no more descriptors" in failed.error
    env.refused = set()
    bench.answer(asked["e/1"])
    env.end()
    bench.run()
    env.end(1)
    assert requests(bench.run()) == ["e/1"]
    bench.simulator.close()


def test_a_slot_whose_step_cannot_begin_is_not_waited_for_by_others() -> None:
    bench, env, asked = bench_of(2, rows=2, join=True)
    bench.simulator.traits.wait_beside()
    env.refused, env.instant = {3}, {0, 1}
    bench.answer(asked["e/0"])
    assert bench.run() == []
    bench.answer(asked["e/1"])
    events = bench.run()
    assert [type(event) for event in events[:2]] == [SampleFailed] * 2
    assert requests(events) == ["e/0"], "it is stepped without the other one"
    assert env.begun[:3] == [0, 1, 2]
    assert env.dropped == [2, 3], "one of which was begun"
    bench.simulator.close()


def test_calls_of_rows_that_have_changed_places_with_spares_overlap() -> None:
    env, coming = Calling(4), (ticket(5, 9), ticket(6, 9))
    ahead = ResetAhead(env, 2)
    bench = Bench(2, sharding="even:2", settings=StepSettings(1, whole=True), env=ahead)  # type: ignore[arg-type]
    starts = [(0, one.seed) for one in coming]
    ahead.prepare(starts, [])
    settle(ahead, *starts)
    for slot, one in enumerate(coming):
        bench.start((slot, one), slot=f"e/{slot}")
    asked = bench.run()
    number = bench.simulator.traits.wait_beside()
    for event in asked:
        bench.answer(event)
    assert bench.run() == []
    places = list(env.begun)
    assert sorted(places) == [2, 3], "the spare rows"
    env.end(places[1])
    assert readable(number)
    assert requests(bench.run()) == ["e/1"]
    assert not readable(number)
    bench.simulator.handle(CancelRow("s", "e/0", coming[0].number, 1))
    assert env.dropped == places[:1]
    assert env.steps == [(places[1:], False)]
    bench.simulator.close()


def test_what_a_failed_step_has_begun_ends_before_its_row_is_a_spare() -> None:
    env = Calling(2)
    ahead = ResetAhead(env, 1)
    action = np.ones((1, 1, 1), np.float32)
    ahead.reset([0], [0], [7])
    env.broken.add(7)
    for _ in range(2):
        assert env.dropped == []
        assert ahead.traits.async_steps
        ahead.begin_step([0], action)
        if env.state[0, 1]:
            with pytest.raises(RuntimeError, match="fell over"):
                ahead.step([0], action)
        else:
            ahead.step([0], action)
    ahead.prepare([(0, 9)], [])
    settle(ahead, (0, 9))
    ahead.reset([0], [0], [9])
    assert env.dropped == [0]
    ahead.close()


def test_spare_rows_begin_no_steps_that_the_environment_does_not_begin() -> None:
    with contextlib.closing(ResetAhead(Counting(2), 1)) as ahead:
        assert not ahead.traits.async_steps


def test_slots_of_a_simulator_that_joined_are_put_off_too() -> None:
    env, settings = Calling(2), StepSettings(1, whole=True)
    bench = Bench(2, sharding="even:2", settings=settings, env=env)
    layout, info = bench.arena.layout, bench.simulator.info
    spoken = threading.Semaphore(0)
    thread = EnvThread(SimpleNamespace(build=lambda _: env), env.spec)  # type: ignore[arg-type]
    welcome = m.Welcome("0", "s", 0, "s.0.0", info, settings, layout, 20.0)
    station = JoinedStation(welcome, thread.batch, spoken.release, DropCounter("test"))
    thread.work(station)
    said: list[Event] = []

    def heard(count: int) -> list[str]:
        """Slots that have asked for actions; waits until there are so many."""
        while len(requests(said)) < count:
            assert spoken.acquire(timeout=60)
            while station.events:
                said.append(wire.decode(station.events.popleft().event, layout.answer_dtype))  # type: ignore[arg-type]
        return requests(said)

    env.instant = {1}
    for row in range(2):
        start = StartRows("s", f"e/{row}", (Grant(row, ticket(row, 5), block=row),))
        station.take(HandOver(start, memoryview(wire.encode(start))))
    assert sorted(heard(2)) == ["e/0", "e/1"]
    for row in range(2):
        reply = Reply("s.0.0", f"e/{row}", 0, np.zeros(1, layout.answer_dtype))
        station.take(HandOver(reply, memoryview(wire.encode_reply(reply))))
    assert heard(3)[2:] == ["e/1"]
    assert env.steps == [([1], False)]
    station.stop()
    assert station.part.over.wait(60)
    assert station.part.error is None
    thread.close()


def test_environments_that_wait_for_nothing_have_nothing_to_wait_beside() -> None:
    assert Bench(2).simulator.traits.wait_beside() is None


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Any:
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before


def test_a_joined_environment_keeps_its_traits() -> None:
    env = Calling(2)
    kept = KeptEnv(env)
    assert batch_traits(kept) == batch_traits(env) == EnvTraits(async_steps=True, expert=True)
    kept.close()
    assert env.fileno() >= 0, "it outlasts the session"
    env.close()
