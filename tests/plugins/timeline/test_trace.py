from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrhythm.plugins.timeline.trace import TraceWriter


def test_bars_marks_and_counters_by_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    with TraceWriter(path) as trace:
        trace.complete("generator-0", "forward", "batch 1", 0.001, 0.0035, {"rows": 8})
        trace.complete("generator-0", "forward", "batch 2", 0.0035, 0.004)
        trace.complete("simulator-0", "slot-0", "step", 0.0, 0.002)
        trace.instant("generator-0", "weights", "v1", 0.002)
        trace.counter("conductor", "queue", 0.001, {"requests": 3, "rows": 9})
    events = json.loads(path.read_text())
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] in ("thread_name", "process_name")
    }
    bars = [event for event in events if event["ph"] == "X"]
    assert [(names[bar["pid"], bar["tid"]], names[bar["pid"], 0]) for bar in bars] == [
        ("forward", "generator-0"),
        ("forward", "generator-0"),
        ("slot-0", "simulator-0"),
    ]
    assert (bars[0]["ts"], bars[0]["dur"], bars[0]["args"]) == (1000.0, 2500.0, {"rows": 8})
    assert bars[0]["ts"] + bars[0]["dur"] == bars[1]["ts"]
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert (names[mark["pid"], mark["tid"]], mark["ts"]) == ("weights", 2000.0)
    (curve,) = [event for event in events if event["ph"] == "C"]
    assert curve["args"] == {"requests": 3, "rows": 9}
    assert names[curve["pid"], 0] == "conductor"


def test_every_name_is_announced_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.json") as trace:
        for start in range(5):
            trace.complete("a", "x", "work", start, start + 1)
            trace.complete("b", "x", "work", start, start + 1)
    events = json.loads((tmp_path / "t.json").read_text())
    assert sum(event["name"] == "process_name" for event in events) == 2
    assert sum(event["name"] == "thread_name" for event in events) == 2
    assert len({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}) == 2


def test_an_empty_trace_is_valid_and_close_can_be_repeated(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "t.json")
    trace.close()
    trace.close()
    assert json.loads((tmp_path / "t.json").read_text()) == []


def test_a_bar_that_ends_before_it_starts_is_our_bug(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.json") as trace, pytest.raises(AssertionError, match="before it starts"):
        trace.complete("a", "x", "work", 2, 1)
