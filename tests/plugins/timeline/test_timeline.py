"""The timeline: what several stations measured of one slot becomes one lane, whoever is heard first."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.mutations import mutations

from polyrhythm.plugins.timeline.observer import TraceObserver
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.runtime.hosts import ClockOffset
from polyrhythm.runtime.launcher import build_inline_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.messages import Spans
from polyrhythm.runtime.spans import Span
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records

BEGAN = 10.0
RESET = Span("s.0/0", "resetting", 10.5, 11.0)
WAIT = Span("s.0/0", "generator", 11.0, 14.0, 0)
STEP = Span("s.0/0", "stepping", 14.0, 15.0, slots=2)
SERVED = Span("s.0/0", "in_batch", 12.0, 13.0, 0)
PASS = Span("g", "pass", 12.0, 13.5, 3)


class Telling:
    """A launcher without stations that tells what a test gives it."""

    def __init__(self) -> None:
        self.statistics = build_inline_launcher([], ArenaLayout(1, 1, 1, {}, {}, {}), 0).hosting.statistics
        self.said: list[Spans] = []
        self.offsets: dict[str, ClockOffset] = {}
        self.measuring: list[bool] = []

    @property
    def hosting(self) -> Any:
        return self

    names = ("g", "s")

    def set_tracing(self, on: bool) -> None:
        self.measuring.append(on)

    def station(self, name: str) -> Any:
        host = {"g": "host-1", "s": "main"}[name]
        return SimpleNamespace(host=host, clock=self.offsets.get(host))

    def spans(self) -> list[Spans]:
        said, self.said = self.said, []
        return said


def bars(path: Path, phase: str = "X") -> list[tuple[str, str, float, float]]:
    """Lane, name, begin and end in seconds, by lane and time."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = [event for event in events if event["ph"] == phase]
    times = [(event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6) for event in found]
    named = [(lanes[event["tid"]], event["name"]) for event in found]
    return sorted((*name, *time) for name, time in zip(named, times, strict=True))


def drawn(
    path: Path, told: Sequence[Sequence[Span]], decisions: Sequence[tuple[float, list[records.Command]]] = ()
) -> list[tuple[str, str, float, float]]:
    """The bars of the slot after these messages, one after another, and these decisions before them."""
    launcher = Telling()
    with TraceWriter(path) as trace:
        timeline = TraceObserver(trace, launcher, BEGAN)
        for now, commands in decisions:
            timeline.on_decision(now, records.Wake(), commands)
        for number, spans in enumerate(told):
            launcher.said.append(Spans("a", 0, tuple(spans), 0))
            timeline.on_tick(15.0 + number)
        timeline.finish(20.0 + len(told))
    assert launcher.measuring == [True, False]
    return sorted((bar for bar in bars(path) if bar[0].startswith("s.")), key=lambda bar: bar[2])


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_a_wait_for_an_answer_is_divided_by_the_pass_that_gave_it(tmp_path: Path, order: Sequence[int]) -> None:
    told = [[RESET, WAIT, STEP], [PASS, SERVED]]
    found = drawn(tmp_path / "trace.json", [told[place] for place in order])
    assert found == [
        ("s.0/0", "resetting", 0.5, 1.0),
        ("s.0/0", "generator", 1.0, 2.0),
        ("s.0/0", "in_batch", 2.0, 3.0),
        ("s.0/0", "thread", 3.0, 4.0),
        ("s.0/0", "stepping", 4.0, 5.0),
    ]
    assert ("g", "3 requests", 2.0, 3.5) in bars(tmp_path / "trace.json")
    assert '"args":{"slots":2}' in (tmp_path / "trace.json").read_text()


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_other_rows_may_be_reset_while_a_request_is_out(tmp_path: Path, order: Sequence[int]) -> None:
    other = Span("s.0/0", "resetting", 11.5, 12.5)
    waits = [WAIT._replace(end=11.5), WAIT._replace(begin=12.5)]
    told = [[RESET, waits[0], other, waits[1], STEP], [SERVED]]
    found = drawn(tmp_path / "trace.json", [told[place] for place in order])
    names = ["resetting", "generator", "resetting", "in_batch", "thread", "stepping"]
    assert [name for _, name, *_ in found] == names
    assert [end for *_, end in found] == [1.0, 1.5, 2.5, 3.0, 4.0, 5.0]


def test_a_request_that_nobody_served_was_waited_for_all_the_time(tmp_path: Path) -> None:
    found = drawn(tmp_path / "trace.json", [[RESET, WAIT, STEP], [SERVED._replace(number=7)]])
    assert [name for _, name, *_ in found] == ["resetting", "generator", "stepping"]


def test_a_slot_without_tickets_waits_for_its_thread_from_the_grant_on(tmp_path: Path) -> None:
    def grant(now: float) -> tuple[float, list[records.Command]]:
        return now, [records.StartRows("s", "s.0/0", ())]

    early, wait = STEP._replace(begin=10.5, end=11.0), Span("s.0/0", "tickets", 11.0, 14.0)
    told = [[early, wait, STEP]]
    later = drawn(tmp_path / "later.json", told, [grant(10.2), grant(12.0), grant(13.0)])
    assert [(name, end) for _, name, _, end in later] == [
        *(("stepping", 1.0), ("tickets", 2.0), ("thread", 4.0), ("stepping", 5.0))
    ]
    meanwhile = drawn(tmp_path / "meanwhile.json", told, [grant(10.8)])
    assert [name for _, name, *_ in meanwhile] == ["stepping", "thread", "stepping"], "granted before the unit was over"


def test_a_lost_simulator_numbers_its_requests_anew(tmp_path: Path) -> None:
    launcher = Telling()
    with TraceWriter(tmp_path / "trace.json") as trace:
        timeline = TraceObserver(trace, launcher, BEGAN)
        launcher.said.append(Spans("g", 0, (SERVED,), 0))
        timeline.on_tick(13.5)
        timeline.on_decision(13.6, records.StationLost("s", 0, "ended by SIGKILL"), [])
        launcher.said.append(Spans("s", 1, (WAIT._replace(begin=15.0, end=16.0),), 0))
        timeline.finish(17.0)
    assert bars(tmp_path / "trace.json") == [("s.0/0", "generator", 5.0, 6.0)]


def test_what_is_missing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launcher = Telling()
    with TraceWriter(tmp_path / "trace.json") as trace:
        timeline = TraceObserver(trace, launcher, BEGAN)
        launcher.said.append(Spans("s", 0, (STEP,), 41))
        timeline.on_tick(15.5)
    ((lane, mark, at, _),) = bars(tmp_path / "trace.json", "i")
    assert (lane, mark, at) == ("s", "41 spans of s before this are missing", 5.5)
    assert "41 spans of s are missing" in caplog.text


def test_it_ends_where_viewers_have_enough_and_nothing_is_measured_any_more(tmp_path: Path) -> None:
    launcher = Telling()
    with TraceWriter(tmp_path / "trace.json") as trace:
        timeline = TraceObserver(trace, launcher, BEGAN, limit=3)
        for now in range(11, 16):
            launcher.said.append(Spans("s", 0, 2 * (STEP,), 0))
            timeline.on_tick(float(now))
        timeline.finish(20.0)
    assert launcher.measuring == [True, False]
    assert len(bars(tmp_path / "trace.json")) == 3
    assert [name for _, name, *_ in bars(tmp_path / "trace.json", "i")] == ["the timeline ends here, the run goes on"]


def test_it_marks_a_choice_of_batching(tmp_path: Path) -> None:
    chosen = records.BatchingChosen(32, 4, 0.0025, "because")
    with TraceWriter(tmp_path / "trace.json") as trace:
        TraceObserver(trace, Telling(), BEGAN).on_decision(11.5, records.Wake(), [chosen])
    (mark,) = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["args"]) == ("up to 4 requests, 2.5 ms", 1.5e6, {"reason": "because"})


def test_it_marks_a_move_with_its_reason(tmp_path: Path) -> None:
    chosen = records.MoveChosen("begun", "generator-1 off", "because", 1.2)
    with TraceWriter(tmp_path / "trace.json") as trace:
        TraceObserver(trace, Telling(), BEGAN).on_decision(11.5, records.Wake(), [chosen])
    (mark,) = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "i"]
    assert (mark["name"], mark["args"]) == ("begun: generator-1 off", {"reason": "because"})


def test_it_marks_by_how_much_a_hosts_bars_are_shifted_and_when_that_was_not_true(tmp_path: Path) -> None:
    launcher = Telling()
    with TraceWriter(tmp_path / "trace.json") as trace:
        timeline = TraceObserver(trace, launcher, BEGAN)
        for number, ahead_s in enumerate((30.0, 30.0001, 30.5, -2.0)):
            launcher.offsets["host-1"] = ClockOffset(ahead_s, 0.0002)
            timeline.on_tick(11.0 + number)
    marks = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "i"]
    assert [mark["name"] for mark in marks] == [
        "the clock of host-1 is 30.000000 s ahead of main's, ± 0.2 ms",
        "the clock of host-1 is 30.500000 s ahead of main's, ± 0.2 ms",
        "the clock of host-1 is 2.000000 s behind main's, ± 0.2 ms",
    ]
    assert {mark["args"]["stations"] for mark in marks} == {"g"}


# ---------------------------------------------------------------- what is believed


def expected() -> InFlight:
    """What is known of a simulator s, a generator g, and a trainer t."""
    expected = InFlight(ArenaLayout(1, 1, 1, {}, {}, {"s.0/0": 1, "r.0/0": 1}))
    slots = (records.SlotInfo("s.0/0", 0, 1),)
    expected.join(records.SimulatorJoined("s", 0, (records.EnvBatchInfo("s.0", slots),)), ["s.0.0"])
    expected.join(records.GeneratorJoined("g", 0), ["g"])
    expected.join(records.TrainerJoined("t", 0), ["t"])
    return expected


MEASURED = {"s": (RESET, WAIT, STEP), "g": (SERVED, PASS), "t": (Span("t", "update", 11.0, 12.0, 3),)}


@pytest.mark.parametrize("station", MEASURED)
def test_what_a_station_can_have_measured_is_believed(station: str) -> None:
    expected().check_spans(Spans(station, 0, MEASURED[station], 2), 15.0)


@pytest.mark.parametrize(
    ("station", "span", "lost"),
    [
        *(("s", STEP._replace(begin=begin), 0) for begin in (math.nan, -math.inf, math.inf, 15.5)),
        *(("s", STEP._replace(end=end), 0) for end in (math.nan, 13.5, math.inf, 16.5)),
        *(("s", STEP._replace(**wrong), 0) for wrong in ({"slots": 0}, {"lane": "r.0/0"}, {"lane": "s"})),
        *(("s", STEP._replace(kind=kind), 0) for kind in ("", "pass", "in_batch")),
        *(("g", STEP, 0), ("g", PASS._replace(lane="t"), 0), ("t", PASS, 0), ("x", STEP, 0), ("s", STEP, -1)),
    ],
    ids=str,
)
def test_what_it_cannot_have_measured_is_not(station: str, span: Span, lost: int) -> None:
    with pytest.raises(UnfitMessage):
        expected().check_spans(Spans(station, 0, (span,), lost), 16.0)


def test_a_span_may_end_later_than_now_by_what_is_not_known_of_its_clock() -> None:
    spans = Spans("s", 0, (STEP,), 0)
    expected().check_spans(spans, 14.999, 0.002)
    with pytest.raises(UnfitMessage):
        expected().check_spans(spans, 14.999, 0.0005)


def test_mutated_spans_never_harm_the_timeline(tmp_path: Path) -> None:
    contents = [wire.encode(Spans(station, 0, spans, 2)) for station, spans in MEASURED.items()]
    launcher, known, believed = Telling(), expected(), 0
    with TraceWriter(tmp_path / "trace.json") as trace:
        timeline = TraceObserver(trace, launcher, BEGAN)
        for number, content in enumerate(mutations(contents, 6000, 6, {"station": list(MEASURED)})):
            now = 20.0 + number
            try:
                said = wire.decode(content)
                if not isinstance(said, Spans):
                    continue
                known.check_spans(said, now)
            except UnfitMessage:
                continue
            launcher.said.append(said)
            believed += 1
            timeline.on_tick(now)
        timeline.finish(99999.0)
    assert believed > 100
    assert all(begin <= end for _, _, begin, end in bars(tmp_path / "trace.json"))
