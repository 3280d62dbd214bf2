"""The report in a real browser: it draws all figures without an error, whatever a run's texts are, and obeys keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.plugins.report.page import html, write_report
from polyrhythm.plugins.report.parts import Scale, chart, series
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm_bench.browser import Page, chromium

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\"'`${1}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    with MetricsWriter(folder) as metrics:
        for update in range(20):
            values = {"env/episodes": 32.0, "env/success_once": update / 20, "env/return": 1.0, "stations/faults": 1.0}
            values |= {f"env/metrics/{HOSTILE}": 1.0, "env/success_once/task_0": 0.5, "env/success_once/task_1": 1.0}
            values |= {"staleness/lag_mean": 0.5, "staleness/lag_max": 1.0, "stations/utilisation/trainer": 0.5}
            values |= {"throughput/transitions": 100.0 * (update + 1), "throughput/transitions_per_s": 9.0}
            metrics.log(update, values, 10.0 + update)
    tally = {"successes": 1, "episodes": 2, "rate": 0.5, "low": 0.1, "high": 0.9, "mean_return": 0.5}
    after = {**tally, "tasks": {HOSTILE: tally, "door": tally}}
    lag = {"mean": 0.5, "max": 1, "counts": {"0": 1, "1": 1}}
    summary = {
        "after": after,
        "warnings": [HOSTILE],
        "lag": lag,
        "utilisation": {"trainer": 0.5},
        "wall_s": {"rl": 9.0},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text("name: |\n  </script><script>throw 1</script>\n")
    with TraceWriter(folder / "trace.json") as trace:
        for update in range(20):
            trace.complete("trainer", "trainer", f"update {update}", update + 0.5, update + 1)
            for slot in range(3):
                lane, begin = f"simulator-0.0/{slot}", update + 0.25 * slot
                trace.complete("slots", lane, "stepping", begin, begin + 0.2)
                trace.complete("slots", lane, "generator", begin + 0.2, begin + 0.3)
    return write_report(folder)


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Page]:
    with Page() as page:
        page.open(report.as_uri())
        yield page


def press(page: Page, selector: str, *keys: str) -> None:
    for key in keys:
        event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}})"
        page.evaluate(f"document.querySelector({json.dumps(selector)}).dispatchEvent({event})")


def shown(page: Page) -> str:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found = page.evaluate("document.querySelector('#timeline output').textContent")
    assert isinstance(found, str)
    return found


def test_all_figures_are_drawn_without_an_error_and_texts_stay_texts(page: Page) -> None:
    data = json.loads(page.evaluate("document.getElementById('data').textContent"))
    charts = [part for section in data["sections"] for part in section["parts"] if part["kind"] == "chart"]
    assert page.evaluate("document.querySelectorAll('.plot canvas').length") == len(charts) > 5
    assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert HOSTILE in page.evaluate("document.querySelector('#advice').textContent")
    assert HOSTILE in page.evaluate("document.querySelector('#tasks').textContent")
    assert page.errors == []


def test_the_timeline_zooms_from_the_run_to_an_update_and_a_chunk_step(page: Page) -> None:
    whole = shown(page)
    assert "20 s" in whole
    canvas = "#timeline canvas"
    press(page, canvas, "u")
    assert shown(page).endswith(" 1 s")
    press(page, canvas, "s")
    assert shown(page).endswith(" 1.56 s"), "from one step to the end of the next, 1.2 s, and 15% on both sides"
    press(page, canvas, "0")
    assert shown(page) == whole
    press(page, canvas, "+", "ArrowRight")
    assert "10 s" in shown(page)
    press(page, canvas, "0")
    assert page.errors == []


def test_legends_axis_and_colours_switch(page: Page) -> None:
    first = "document.querySelector('#success .legend button')"
    page.evaluate(f"{first}.click()")
    assert page.evaluate(f"{first}.getAttribute('aria-pressed')") == "false"
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    press(page, "body", "d", "d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(background) != before
    press(page, "body", "x")
    assert page.evaluate("document.querySelector('#axes [aria-pressed=true]').textContent") == "over time"
    assert page.evaluate(f"{first}.getAttribute('aria-pressed')") == "false", "what was hidden stays hidden"
    assert page.errors == []


def test_a_phone_needs_no_scrolling_to_the_side(report: Path) -> None:
    with Page(390, 844, dark=True, touch=True) as page:
        page.open(report.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 25, 30)"
        assert page.errors == []


def test_a_page_that_grows_keeps_what_its_reader_does(tmp_path: Path) -> None:
    """As watch does: the switch of the axes comes with the first charts; order, focus, open details stay."""
    rows = [["a", "2"], ["b", "–"], ["c", "10"]]
    parts: list[dict[str, Any]] = [{"kind": "table", "caption": "t", "head": ["name", "value"], "rows": rows}]
    parts += [{"kind": "details", "summary": "more", "text": "x"}]
    data = {"format": 1, "title": "t", "runs": [], "sections": [{"id": "a", "heading": "A", "parts": parts}]}
    path = tmp_path / "page.html"
    path.write_text(html(data), encoding="utf-8")
    values = "[...document.querySelectorAll('#a tbody tr')].map((row) => row.lastChild.textContent).join(' ')"
    with Page() as page:
        page.open(path.as_uri())
        assert page.evaluate("document.getElementById('axes').hidden") is True
        page.evaluate("const head = document.querySelectorAll('#a th button')[1]; head.focus(); head.click()")
        assert page.evaluate(values) == "2 10 –"
        page.evaluate("document.querySelector('#a details').open = true")
        parts[0]["rows"].append(["d", "5"])
        one = series("one", 0, {"transitions": [1, 2], "time": [3, 4]}, [0.1, 0.2])
        parts.append(chart("c", "C", Scale("y"), [one]))
        page.evaluate(f"showPage({json.dumps(data)}).then(() => null)")
        assert page.evaluate(values) == "2 5 10 –"
        assert page.evaluate("document.activeElement === document.querySelectorAll('#a th button')[1]")
        assert page.evaluate("document.querySelector('#a details').open") is True
        assert page.evaluate("document.getElementById('axes').hidden") is False
        press(page, "body", "x")
        assert page.evaluate("document.querySelector('#axes [aria-pressed=true]').textContent") == "over time"
        assert page.evaluate(values) == "2 5 10 –"
        assert page.errors == []
