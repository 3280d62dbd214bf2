"""Steps that wait for calls: all are begun before the first is done, and slots wait for their own calls alone."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from tests.stations.counting import Bench, Counting, ticket

from polyrhythm.envs.base import StepResult
from polyrhythm.scheduler.records import CancelRow, Event, RequestArrived, SampleFailed
from polyrhythm.stations.simulator.slot import StepSettings


class Calling(Counting):
    """Each step of a row begins a call, which `end` ends. begun: rows, in order; steps: rows of each step, and whether
    it had to wait."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.spec = replace(self.spec, chunk=1)
        self.begun: list[int] = []
        self.running: set[int] = set()
        self.steps: list[tuple[list[int], bool]] = []
        self.refuses = False
        self._read, self._write = os.pipe()

    def begin_step(self, rows: Sequence[int], actions: NDArray[np.generic]) -> None:
        if self.refuses:
            raise OSError("no more descriptors")
        assert actions.shape == (len(rows), 1, 1)
        self.begun += map(int, rows)
        self.running |= set(map(int, rows))

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
    number = bench.simulator.wait_beside()
    assert number is not None
    for slot in ("e/2", "e/0"):
        bench.answer(asked[slot])
    assert bench.run() == []
    assert env.begun == [4, 5, 0, 1]
    what, since = bench.simulator.current_call()
    assert what == "step"
    env.end(0, 4)
    assert select.select([number], [], [], 0)[0]
    assert bench.run() == [], "each has a row whose call runs"
    assert not select.select([number], [], [], 0)[0], "which it was woken for once"
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


def test_slots_that_step_together_wait_for_each_others_calls() -> None:
    bench, env, asked = bench_of(2, join=True)
    bench.simulator.wait_beside()
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


def test_a_cancelled_row_is_not_waited_for() -> None:
    bench, env, asked = bench_of(2)
    bench.simulator.wait_beside()
    for event in asked.values():
        bench.answer(event)
    assert bench.run() == []
    for slot in range(2):
        bench.simulator.handle(CancelRow("s", f"e/{slot}", slot, 1))
    assert [type(event) for event in bench.events] == [SampleFailed] * 2
    assert bench.run() == []
    assert bench.simulator.current_call() == ("", 0.0)
    bench.start((0, ticket(7, 5)), slot="e/0")
    (again,) = bench.run()
    bench.answer(again)
    assert bench.run() == []
    assert env.begun == [0, 1, 0]
    env.end(0)
    assert requests(bench.run()) == ["e/0"]
    bench.simulator.close()


def test_a_step_that_cannot_begin_fails_its_samples() -> None:
    bench, env, asked = bench_of(2)
    bench.simulator.wait_beside()
    env.refuses = True
    bench.answer(asked["e/0"])
    (failed,) = bench.run()
    assert isinstance(failed, SampleFailed)
    assert "no more descriptors" in failed.error
    env.refuses = False
    bench.answer(asked["e/1"])
    env.end()
    bench.run()
    env.end(1)
    assert requests(bench.run()) == ["e/1"]
    bench.simulator.close()


def test_environments_that_wait_for_nothing_have_nothing_to_wait_beside() -> None:
    assert Bench(2).simulator.wait_beside() is None


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Any:
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before
