"""The page as a file: texts of a run cannot leave the data, nothing comes from elsewhere, assets are what they were."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.plugins import report
from polyrhythm.plugins.report.page import html
from polyrhythm.plugins.report.read import read_run
from polyrhythm.plugins.report.timeline import packed, read_trace, time_before, timeline
from polyrhythm.plugins.timeline.trace import TraceWriter

ASSETS = files(report) / "assets"
#: What would end an element, a text of JavaScript or JSON, or an attribute, each with neighbours.
HOSTILE = [
    *("</script><script>alert(1)</script>", "</SCRIPT >", "<!--<script>", "]]>"),
    *('" onload="alert(1)', "'; alert(1); //", "\\", "`${alert(1)}`"),
    *("\u2028alert(1)\u2029", "\x00\x1b", "\ud800", "&lt;b&gt;&amp;"),
]


def data(texts: Sequence[str]) -> dict[str, Any]:
    parts = [{"kind": "text", "text": text, "tone": text} for text in texts]
    return {"format": 1, "title": texts[0], "runs": [], "sections": [{"id": "a", "heading": texts[0], "parts": parts}]}


class Elements(HTMLParser):
    """Tags with their attributes, and the texts of scripts and styles, as a browser's parser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.texts:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.texts:
            self.texts[self._open][-1] += data


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_run_leaves_the_data(text: str) -> None:
    plain, hostile = Elements(html(data(["x"]))), Elements(html(data([text])))
    assert hostile.tags == plain.tags
    assert hostile.texts["script"][1:] == plain.texts["script"][1:], "the first is the data"
    assert json.loads(hostile.texts["script"][0]) == data([text])
    assert not set("<>\u2028\u2029") & set(hostile.texts["script"][0])


def test_the_page_needs_nothing_from_elsewhere_and_runs_its_own_scripts_alone() -> None:
    found = Elements(html(data(["x"])))
    loaded = [attributes for _, attributes in found.tags if attributes.keys() & {"src", "href", "style", "onload"}]
    assert loaded == [{"rel": "icon", "href": "data:,"}], "an empty icon, so that none is requested"
    (policy,) = [own["content"] or "" for tag, own in found.tags if tag == "meta" and "http-equiv" in own]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    for tag, skipped in (("script", 1), ("style", 0)):
        digests = [hashlib.sha256(text.encode()).digest() for text in found.texts[tag][skipped:]]
        listed = re.findall(r"'sha256-([^']+)'", policy.partition(f"{tag}-src")[2].partition(";")[0])
        assert listed == [base64.b64encode(digest).decode() for digest in digests]
    own = [text for text in found.texts["script"][1:] if not text.startswith("/*! https://github.com/leeoniya/uPlot")]
    assert len(own) == len(found.texts["script"]) - 2
    assert not re.search(r"https?:|import\(|@import|url\(", "".join(own + found.texts["style"]))


def test_scripts_put_no_text_into_the_page_as_html() -> None:
    for asset in ASSETS.iterdir():
        if asset.name.endswith(".js"):
            text = asset.read_text(encoding="utf-8")
            banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|</script"
            assert not re.search(banned, text), asset.name


def test_the_library_is_the_one_that_its_note_names() -> None:
    folder = ASSETS / "uplot"
    note = (folder / "VENDORED.md").read_text(encoding="utf-8")
    sums = dict(re.findall(r"\| (\S+) \| ([0-9a-f]{64}) \|", note))
    assert set(sums) == {path.name for path in folder.iterdir()} - {"VENDORED.md"}
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


@pytest.fixture
def traced(tmp_path: Path) -> Callable[[], Path]:
    """A run that was resumed once; its two traces have clocks of their own."""

    def make() -> Path:
        folder = tmp_path / "run"
        with MetricsWriter(folder) as metrics:
            for update in range(6):
                values = {"throughput/transitions": 10.0 * update, "throughput/transitions_per_s": 1.0}
                metrics.log(update, values, 10.0 + update + 30.0 * (update >= 3))
        (folder / "config.yaml").write_text("name: x\n")
        for part, name in enumerate(("trace.json", "trace-2.json")):
            with TraceWriter(folder / name) as trace:
                for number in range(3):
                    trace.complete("trainer", "trainer", f"update {3 * part + number}", number + 0.5, number + 1)
                    trace.complete("generators", "generator-0", "4 requests", number + 0.1, number + 0.2)
                    trace.complete("slots", "simulator-0.0/10", "stepping", number, number + 0.25, {"slots": 2})
                    trace.complete("slots", "simulator-0.0/2", "tickets", number, number + 0.75)
                trace.instant("run", "clocks", "a mark", 2.0)
        return folder

    return make


def test_a_trace_is_shifted_to_the_runs_clock_in_each_of_its_parts(traced: Callable[[], Path]) -> None:
    trace = read_trace(read_run(traced()))
    assert trace is not None
    assert [(lane.process, lane.name) for lane in trace.lanes] == [
        *(("slots", "simulator-0.0/2"), ("slots", "simulator-0.0/10"), ("generators", "generator-0")),
        ("trainer", "trainer"),
    ]
    assert trace.lanes[3].end.tolist() == pytest.approx([10, 11, 12, 43, 44, 45])
    assert trace.lanes[3].number.tolist() == [0, 1, 2, 3, 4, 5]
    assert trace.lanes[2].number.tolist() == [4] * 6
    assert trace.lanes[1].number.tolist() == [2] * 6, "slots that stepped together"
    assert [mark.time for mark in trace.marks] == pytest.approx([11, 44])


def test_the_bars_of_a_timeline_are_those_of_the_trace(traced: Callable[[], Path]) -> None:
    _, part = timeline(read_run(traced()), "t")
    found: dict[str, list[list[float]]] = {lane["name"]: [] for lane in part["lanes"]}
    for index, block in enumerate(part["blocks"]):
        starts, lengths = (unpacked(block[name], np.dtype("<i4")) for name in ("start", "length"))
        kinds, at = unpacked(block["kind_of"], np.dtype("u1")), 0
        for lane, count in zip(part["lanes"], block["counts"], strict=True):
            own = slice(at, at := at + count)
            begins = part["first"] + (index * part["window"] + np.cumsum(starts[own])) * part["unit"]
            rows = zip(begins.tolist(), (lengths[own] * part["unit"]).tolist(), kinds[own].tolist(), strict=True)
            found[lane["name"]] += [list(row) for row in rows]
    names = [{part["kinds"][int(kind)]["name"] for _, _, kind in bars} for bars in found.values()]
    assert names == [{"tickets"}, {"stepping"}, {"forward"}, {"update"}]
    assert [begin for begin, _, _ in found["trainer"]] == pytest.approx([9.5, 10.5, 11.5, 42.5, 43.5, 44.5])
    assert [length for _, length, _ in found["trainer"]] == pytest.approx([0.5] * 6)


def unpacked(text: str, kind: np.dtype[Any]) -> np.ndarray:
    """The inverse of `packed`, as assets/numbers.js has it."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8).reshape(kind.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(kind)[:, 0]


@pytest.mark.parametrize("values", [[0, -1, 2**31 - 1, -(2**31)], [], [7]])
def test_packed_numbers_come_back(values: list[int]) -> None:
    assert unpacked(packed(np.array(values, dtype=np.int32)), np.dtype("<i4")).tolist() == values


def test_time_before_an_edge_counts_bars_as_far_as_they_reach() -> None:
    start, end = np.array([0.0, 2.0]), np.array([1.0, 4.0])
    assert time_before(start, end, np.array([0.0, 0.5, 1.5, 3.0, 9.0])).tolist() == [0, 0.5, 1, 2, 3]


@pytest.mark.parametrize("damage", ["", "[", "[\n{", '[\n{"ph":"X"', "[\n]\n"])
def test_a_trace_without_bars_is_no_timeline(traced: Callable[[], Path], damage: str) -> None:
    folder = traced()
    for path in folder.glob("trace*.json"):
        path.write_text(damage)
    assert timeline(read_run(folder), "t") == []
