"""What the slots of an env batch say of each unit of work, and of the waits between."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
from tests.stations.counting import Bench, Counting, ticket

from polyrhythm.runtime.spans import GENERATOR, RESETTING, STEPPING, THREAD, TICKETS, Span
from polyrhythm.scheduler.records import CancelRow, Event, RefuseRequest
from polyrhythm.stations.simulator.slot import StepSettings

JOIN = StepSettings(1, join=True)
#: How slots step: settings, and what the environment can do only with all rows at once.
HOW = {
    "own": (StepSettings(1), {}),
    "joined": (JOIN, {}),
    "whole": (JOIN, {"step_rows": False}),
    "together": (JOIN, {"step_rows": False, "reset_rows": False}),
}


class Measured(Bench):
    """A simulator whose units of work are measured as a launcher does it."""

    def __init__(self, rows: int, **how: object) -> None:
        super().__init__(rows, **how)  # type: ignore[arg-type]
        self.spans: list[Span] = []
        self.busy_s = 0.0

    def run(self) -> list[Event]:
        self.events.clear()
        while True:
            begin = time.monotonic()
            if not self.simulator.work():
                return list(self.events)
            end = time.monotonic()
            self.busy_s += end - begin
            self.spans += self.simulator.spans(begin, end)

    def kinds(self, lane: str) -> list[str]:
        return [span.kind for span in self.spans if span.lane == lane]


@pytest.mark.parametrize("how", HOW)
def test_stepping_and_resetting_of_all_lanes_add_up_to_the_busy_time(how: str) -> None:
    settings, can = HOW[how]
    bench = Measured(4, sharding=(2, 2), settings=settings, env=Counting(4, **can), blocks=99)
    number = 4
    for slot, rows in (("e/0", (0, 1)), ("e/1", (2, 3))):
        bench.start(*((row, ticket(row, 2 + row)) for row in rows), slot=slot)
    events = bench.run()
    for _ in range(12):
        for event in events:
            if type(event).__name__ == "RequestArrived":
                bench.answer(event)
        events = bench.run()
        for event in events:  # each row begins another episode at once
            if type(event).__name__ == "SampleFinished":
                row = event.ticket % 4
                bench.start((row, ticket(number + row, 3)), slot=f"e/{row // 2}")
                number += 4
        events += bench.run()
    worked = [span for span in bench.spans if span.kind in (STEPPING, RESETTING)]
    assert {span.kind for span in worked} == {STEPPING, RESETTING}
    assert sum((span.end - span.begin) / span.slots for span in worked) == pytest.approx(bench.busy_s, rel=1e-6)
    assert {span.slots for span in worked} == ({1} if how == "own" else {1, 2})
    lanes = defaultdict(list)
    for span in bench.spans:
        lanes[span.lane].append(span)
    for spans in lanes.values():
        assert [one.end for one in spans[:-1]] == [other.begin for other in spans[1:]], "no holes and no overlaps"


def test_a_slot_waits_for_an_answer_for_its_thread_or_for_a_ticket() -> None:
    bench = Measured(2)
    bench.start((0, ticket(0, 1)), (1, ticket(1, 2)))
    (request,) = bench.run()
    assert bench.kinds("e/0") == [RESETTING], "the request belongs to it"
    bench.answer(request)
    _, request = bench.run()
    assert bench.kinds("e/0")[1:] == [GENERATOR, STEPPING, THREAD, STEPPING], "a row ended; then it asks for the other"
    assert bench.spans[1].number == 0
    bench.answer(request)
    bench.run()
    bench.start((0, ticket(2, 1)))
    bench.run()
    assert bench.kinds("e/0")[5:] == [GENERATOR, STEPPING, TICKETS, RESETTING]
    assert bench.spans[5].number == 1


@pytest.mark.parametrize("end", ["cancelled", "refused"])
def test_a_request_that_comes_to_nothing_is_waited_for_no_longer(end: str) -> None:
    bench = Measured(1)
    bench.start((0, ticket(0, 3)))
    bench.run()
    order = CancelRow("s", "e/0", 0, 1) if end == "cancelled" else RefuseRequest("s", "e/0", 0, "nobody can")
    bench.simulator.handle(order)
    bench.start((0, ticket(1, 3)))
    bench.run()
    assert bench.kinds("e/0") == [RESETTING, GENERATOR, TICKETS, RESETTING]


def test_an_answer_that_nobody_waits_for_any_more_was_waited_for_until_the_next_unit() -> None:
    bench = Measured(2)
    bench.start((0, ticket(0, 3)))
    (request,) = bench.run()
    bench.answer(request)
    bench.simulator.handle(CancelRow("s", "e/0", 0, 1))
    bench.start((1, ticket(1, 3)))
    bench.run()
    assert bench.kinds("e/0") == [RESETTING, GENERATOR, RESETTING]
    assert all(one.end <= other.begin for one, other in zip(bench.spans, bench.spans[1:], strict=False))


def test_what_nobody_asks_for_is_not_kept() -> None:
    bench = Measured(2)
    bench.start((0, ticket(0, 3)), (1, ticket(1, 3)))
    bench.run()
    for number in range(0, 100, 2):
        bench.simulator.handle(CancelRow("s", "e/0", number, 1))
        bench.simulator.handle(CancelRow("s", "e/0", number + 1, 1))
        bench.start((0, ticket(number + 2, 3)), (1, ticket(number + 3, 3)))
        assert bench.simulator.work()  # by a launcher that measures no more
    bench.spans.clear()
    bench.simulator.handle(CancelRow("s", "e/0", 100, 1))
    bench.start((0, ticket(102, 3)))
    bench.run()
    assert bench.kinds("e/0") == [RESETTING]
