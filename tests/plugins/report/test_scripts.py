"""The page's scripts that need no browser, run by node: increments and the order of tables."""

from __future__ import annotations

import copy
import json
import random
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.plugins import report
from polyrhythm.plugins.report.increments import apply, changes
from polyrhythm.plugins.report.read import Run, read_run
from polyrhythm.plugins.report.timeline import read_trace, timeline
from polyrhythm.plugins.timeline.trace import TraceWriter

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's scripts")
ASSETS = files(report) / "assets"


def run(asset: str, code: str, given: Any) -> Any:
    """The value of `code`, an expression of `given`, after the script; what starts the page is left out."""
    script = (ASSETS / asset).read_text(encoding="utf-8").replace("startLive(page.data);", "")
    text = f"{script}\nconst given = {json.dumps(given)};\n"
    text += f"(async () => console.log(JSON.stringify(await ({code}))))();"
    assert NODE is not None
    done = subprocess.run([NODE, "-"], input=text, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def page(numbers: random.Random) -> dict[str, Any]:
    """Data like a page's: objects, lists of objects that grow, keys that come and go, texts that look like numbers."""
    sections = [
        {"id": str(i), "parts": [{"y": [numbers.randrange(3) for _ in range(numbers.randrange(9))], "0": None}]}
        for i in range(numbers.randrange(1, 4))
    ]
    return {"sections": sections, **{key: numbers.choice([1, "a", [], {}]) for key in "abc" if numbers.random() < 0.5}}


def test_the_script_applies_changes_as_the_server_means_them() -> None:
    numbers = random.Random(0)
    pairs = [(page(numbers), page(numbers)) for _ in range(200)]
    pairs += [({}, {"a": 1}), ({"a": 1}, {}), ({"a": [1]}, {"a": [1, 2]}), ({"a": [1, 2]}, {"a": []}), ({}, {})]
    given: list[Any] = [[before, changes(before, after)] for before, after in pairs]
    wanted = [after for _, after in pairs]
    assert [apply(before, found) for before, found in copy.deepcopy(given)] == wanted
    assert run("live.js", "given.map(([before, found]) => applyChanges(before, found))", given) == wanted


def traced(folder: Path, turns: int) -> Run:
    """A run whose trace has so many turns; the first ones are the same in each."""
    numbers = random.Random(1)
    folder.mkdir()
    (folder / "config.yaml").write_text("name: x\n")
    (folder / "metrics.jsonl").touch()
    with TraceWriter(folder / "trace.json") as trace:
        for turn in range(turns):
            for station in range(3):
                begin, update = turn + numbers.random() / 3, turn + 0.1 * station
                trace.complete("slots", f"simulator-{station}.0/0", "stepping", begin, begin + 0.5, {"slots": 2})
                trace.complete("trainer", "trainer", f"update {turn}", update, update + 0.07)
    return read_run(folder)


@pytest.mark.parametrize("turns", [40, 75, 100])
def test_a_timeline_that_grows_is_sent_in_blocks_and_drawn_whole(turns: int, tmp_path: Path) -> None:
    run_before, run_after = traced(tmp_path / "before", turns), traced(tmp_path / "after", turns + 1)
    before, after = (timeline(one, "t")[1] for one in (run_before, run_after))
    found = changes(before, after)
    assert len(json.dumps(found)) < len(json.dumps(after["blocks"])) / 5
    assert apply(copy.deepcopy(before), found) == after
    trace = read_trace(run_after)
    assert trace is not None
    columns = "[one.start, one.end, one.kind, one.number].map((column) => [...column])"
    code = f"unpackBars(given).then((lanes) => lanes.map((one) => {columns}))"
    for lane, (start, end, kind, number) in zip(trace.lanes, run("numbers.js", code, after), strict=True):
        assert start == pytest.approx(lane.start.tolist(), abs=2e-6)
        assert end == pytest.approx(lane.end.tolist(), abs=2e-6)
        assert (kind, number) == (lane.kind.tolist(), lane.number.tolist())


@pytest.mark.parametrize(
    ("cells", "up", "down"),
    [
        (["2", "–", "10", "1"], ["1", "2", "10", "–"], ["10", "2", "1", "–"]),
        (["b", "a", "3"], ["3", "a", "b"], ["3", "b", "a"]),
        (["1,000", "20%", "-1"], ["-1", "20%", "1,000"], ["1,000", "20%", "-1"]),
        ([], [], []),
    ],
)
def test_cells_without_a_number_are_last_either_way(cells: list[str], up: list[str], down: list[str]) -> None:
    code = "[false, true].map((down) => sortedRows(given, 1, down).map((row) => row[1]))"
    assert run("parts.js", code, [["x", cell] for cell in cells]) == [up, down]
