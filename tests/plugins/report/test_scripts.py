"""The page's scripts that need no browser, run by node: increments and the order of tables."""

from __future__ import annotations

import copy
import json
import random
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

from polyrhythm.plugins import report
from polyrhythm.plugins.report.increments import apply, changes

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, which runs the page's scripts")
ASSETS = files(report) / "assets"


def run(asset: str, code: str, given: Any) -> Any:
    """The value of `code`, an expression of `given`, after the script; what starts the page is left out."""
    script = (ASSETS / asset).read_text(encoding="utf-8").replace("startLive(page.data);", "")
    text = f"{script}\nconst given = {json.dumps(given)}; console.log(JSON.stringify({code}));"
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
