"""The page on a run: what is read, what is drawn, and that it needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from polyrhythm.errors import RunFolderError
from polyrhythm.observe.intervals import success_rate, wilson
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.observe.run_folder import note_changes
from polyrhythm.plugins.report import svg
from polyrhythm.plugins.report.bars import timeline_window
from polyrhythm.plugins.report.page import write_report
from polyrhythm.plugins.report.read import (
    change_places,
    fault_times,
    lag_points,
    mean_points,
    pace_points,
    read_run,
    training_points,
)
from polyrhythm.plugins.timeline.trace import TraceWriter

UPDATES = 8


def tally(successes: int | None) -> dict[str, Any]:
    one = {**success_rate([None if successes is None else i < successes for i in range(40)]), "mean_return": 0.5}
    return {**one, "tasks": {"a<b>": one, "door": one}}


SUMMARY: dict[str, Any] = {
    "before": tally(8),
    "after": tally(30),
    "swapped": tally(5),
    "transitions_per_s": 800.0,
    "utilisation": {"simulator-0": 0.9, "generator-0": 0.4, "trainer": 0.7},
    "faults": [{"station": "generator-0", "reason": "was killed by SIGKILL", "transitions": 5000}],
    "lag": {"mean": 0.9, "max": 1, "counts": {"0": 16, "1": 112}},
    "ledger": {
        **dict.fromkeys(("lent", "buffered", "running", "reissuing", "rolled_back"), 0),
        "started": 130,
        "trained": 128,
        "dropped": {"too many attempts": 2},
    },
    "weights": {"generator-0": {"host": {"versions": 9, "mb": 43.5, "ms": 12.0, "gb_per_s": 3.62}}},
    "wall_s": {"start": 5.0, "evaluation_before": 2.0, "rl": 80.0, "evaluation_after": 3.0, "total": 91.0},
}


def evaluation(way: str, result: dict[str, Any]) -> dict[str, float]:
    return {f"evaluation/{way}/{part}": result[part] for part in ("rate", "low", "high", "mean_return")}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Make a run's folder by its name; success false: an environment that reports none."""

    def make(name: str, *, success: bool = True, finished: bool = True) -> Path:
        folder = tmp_path / "recipe" / name
        summary = SUMMARY if success else {**SUMMARY, **dict.fromkeys(("before", "after", "swapped"), tally(None))}
        with MetricsWriter(folder) as metrics:
            metrics.log(0, evaluation("greedy", summary["before"]), 5.0)
            for update in range(UPDATES):
                values = {
                    "env/episodes": 16.0,
                    "env/success_once": update / UPDATES if success else None,
                    "env/return": float(update),
                    "staleness/lag_mean": 0.5,
                    "staleness/lag_max": 1.0,
                    "train/actor/behav_approx_kl": 0.01 * update,
                    "train/critic/explained_variance": update / 2 - 2.5,
                    "throughput/transitions": 1000.0 * (update + 1),
                    "throughput/transitions_per_s": 100.0,
                    "stations/utilisation/trainer": 0.5,
                    "stations/faults": float(update >= 5),
                }
                metrics.log(update, values, 20.0 + 10 * update)
            if finished:
                metrics.log(UPDATES, evaluation("greedy", summary["after"]), 95.0)
        (folder / "config.yaml").write_text("name: recipe\nnote: <b>&\n")
        progress = {"wall_s": {"start": 5.0, "rl": 40.0}, "done": {"evaluation_before": {"before": summary["before"]}}}
        (folder / "progress.json").write_text(json.dumps(progress))
        if finished:
            (folder / "summary.json").write_text(json.dumps(summary))
        with TraceWriter(folder / "trace.json") as trace:
            for update in range(9):
                trace.complete("trainer", "trainer", f"update {update}", update, update + 0.3)
                trace.complete("trainer", "trainer", f"update {update}", update + 0.4, update + 0.8)
                trace.complete("generators", "generator-0", "4 requests", update + 0.1, update + 0.2)
                trace.complete("slots", "simulator-0.0/10", "stepping", update + 0.2, update + 0.9)
                trace.complete("slots", "simulator-0.0/2", "generator", update + 0.2, update + 0.9)
        return folder

    return make


class Page(HTMLParser):
    """Headings, and that every element which is opened is closed in order."""

    VOID = frozenset({"meta", "path", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID or tag == "rect":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h1", "h2"):
            self.headings.append(data)


def checked(path: Path) -> str:
    """The page's text, after a look at its form: whole, alone, and every picture an XML document with a name."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|src=|@import|url\(", text)
    assert "nan" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL).lower().split()
    for drawn in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        root = ET.fromstring(drawn)
        assert root.get("aria-label") or root.get("aria-hidden") == "true"
    return text


def test_one_run_has_every_figure_and_every_table(run: Callable[..., Path]) -> None:
    folder = run("one")
    assert write_report([folder]) == folder / "report.html"
    text = checked(folder / "report.html")
    assert Page(text).headings == [
        *("recipe/one", "Results", "Success over transitions", "Mean return over transitions", "Updates"),
        *("Throughput", "Utilisation", "Lag", "Timeline of the stations", "Wall time by phase"),
        *("Ledger", "Faults", "Weights", "Configuration"),
    ]
    assert '<th scope="row">generator-0</th><td>host</td><td>9</td><td>43.5</td><td>12</td><td>3.6</td>' in text
    assert "<td>75%</td><td>60% to 86%</td><td>30</td><td>40</td>" in text
    assert "a&lt;b&gt;" in text
    assert "&lt;b&gt;&amp;" in text
    assert "2 (too many attempts 2)" in text
    assert "was killed by SIGKILL" in text
    assert "slot 10" in text
    labels = re.findall(r'aria-label="([^"]* over transitions)"', text)
    assert labels[2:4] == ["KL from behaviour, 10⁻³ nats over transitions", "explained variance over transitions"]
    assert ">-1<" in text
    assert ">-2<" not in text, "a value far below -1 is drawn at -1"
    assert list(folder.glob("*.part")) == []


def test_a_run_on_several_hosts_shows_each(run: Callable[..., Path]) -> None:
    """One whose host is gone has faults and no stations."""
    hosts = {
        "main": {"utilisation": 0.25, "faults": 0, "stations": ["simulator-0", "trainer"]},
        "host-1": {"utilisation": 0.5, "faults": 2, "stations": []},
    }
    folder = run("hosts")
    summary = json.loads((folder / "summary.json").read_text())
    summary["faults"] = [{**fault, "host": "host-1"} for fault in summary["faults"]]
    (folder / "summary.json").write_text(json.dumps({**summary, "hosts": hosts}))
    with MetricsWriter(folder) as metrics:
        for update in range(UPDATES, UPDATES + 3):
            values = {"hosts/utilisation/main": 0.2, "hosts/faults/host-1": 2.0, "throughput/transitions_per_s": 1.0}
            metrics.log(update, values, 20.0 + 10 * update)
    text = checked(write_report([folder]))
    headings = Page(text).headings
    assert headings[headings.index("Utilisation") + 1] == "Hosts"
    assert '<th scope="row">main</th><td>simulator-0, trainer</td><td>25%</td><td>0</td>' in text
    assert '<th scope="row">host-1</th><td>–</td><td>50%</td><td>2</td>' in text
    assert 'aria-label="Utilisation of each host"' in text
    assert '<th scope="col">on host</th>' in text
    (folder / "summary.json").unlink()
    text = checked(write_report([folder]))
    assert '<th scope="row">main</th><td>–</td><td>20%</td><td>0</td>' in text, "so far, by its updates"
    assert '<th scope="row">host-1</th><td>–</td><td>0%</td><td>2</td>' in text


def test_several_runs_share_their_figures(run: Callable[..., Path], tmp_path: Path) -> None:
    folders = [run("one"), run("two")]
    assert write_report(folders) == tmp_path / "recipe" / "comparison.html"
    text = checked(tmp_path / "recipe" / "comparison.html")
    headings = Page(text).headings
    assert headings[0] == "2 runs compared"
    assert headings.count("Success over transitions") == headings.count("Updates") == 1
    assert {f"Timeline of the stations: recipe/{name}" for name in ("one", "two")} <= set(headings)
    assert text.replace("\u00a0", " ").count("75% [60, 86], 30 of 40") == 2
    assert write_report(folders, tmp_path / "x.html") == tmp_path / "x.html"


def test_without_a_report_of_success_the_return_is_drawn(run: Callable[..., Path]) -> None:
    text = checked(write_report([run("one", success=False)]))
    assert "Mean return over transitions" in Page(text).headings
    assert "0% to" not in text


def test_an_unfinished_run_shows_what_there_is(run: Callable[..., Path], tmp_path: Path) -> None:
    folder = run("cut", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "ti')
    with (folder / "trace.json").open("r+") as file:
        file.truncate((folder / "trace.json").stat().st_size - 30)
    text = checked(write_report([folder]))
    assert "not finished" in text
    assert {"Results", "Throughput", "Timeline of the stations", "Wall time by phase"} <= set(Page(text).headings)
    for name in ("metrics.jsonl", "progress.json", "trace.json"):
        (folder / name).unlink()
    assert Page(checked(write_report([folder]))).headings == ["recipe/cut", "Configuration"]


def test_what_is_no_run_is_refused(run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no config\.yaml"):
        write_report([tmp_path])
    folder = run("one")
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_report([folder], tmp_path / "nowhere" / "x.html")
    (folder / "summary.json").write_text("{")
    with pytest.raises(RunFolderError, match="cannot be read"):
        write_report([folder])


def test_settings_that_were_changed_are_marked_and_listed(run: Callable[..., Path]) -> None:
    folder = run("1")
    note_changes(folder, 5, {"training.versions": (8, 9)}, datetime(2030, 1, 2, tzinfo=UTC))
    note_changes(folder, 0, {}, datetime(2030, 1, 2, tzinfo=UTC))
    assert change_places(read_run(folder)) == [0.0], "before the first update there is nothing to mark"
    assert 'class="change"' not in checked(write_report([folder]))
    (folder / "settings_changes.jsonl").unlink()
    note_changes(folder, 5, {"training.versions": (8, 9)}, datetime(2030, 1, 2, tzinfo=UTC))
    assert change_places(read_run(folder)) == [5000.0]
    assert change_places(read_run(folder), "time_s") == [60.0]
    text = checked(write_report([folder]))
    assert text.count('<path class="change"') == 5, "success, return, throughput and two charts of the updates"
    assert "Settings that were changed" in Page(text).headings
    assert "<td>8</td><td>9</td><td>5</td>" in text


def test_a_summary_of_something_else_is_one_sentence(run: Callable[..., Path]) -> None:
    folder = run("1")
    for content in ("[]", "3", '{"lag": 3}', '{"before": {"rate": "x"}}'):
        (folder / "summary.json").write_text(content)
        with pytest.raises(RunFolderError, match=r"cannot be read|has invalid content"):
            write_report([folder])
    (folder / "summary.json").write_text("{")
    with pytest.raises(
        RunFolderError, match=rf"^{folder / 'summary.json'} cannot be read .*; repair it, or move it away$"
    ):
        write_report([folder])
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFolderError, match=rf"^{folder / 'metrics.jsonl'} cannot be read"):
        write_report([folder])
    (folder / "metrics.jsonl").write_text("{\n{}\n")
    with pytest.raises(RunFolderError, match=rf"^{folder / 'metrics.jsonl'} cannot be read .*; repair line 1, or"):
        write_report([folder])


def test_points_of_the_curves(run: Callable[..., Path]) -> None:
    read = read_run(run("one"))
    points = training_points(read)  # 32 episodes are two updates
    assert [point.transitions for point in points] == [2000.0, 4000.0, 6000.0, 8000.0]
    assert points[1].success == wilson(10, 32)[2:]
    assert [point.mean_return for point in points] == [0.5, 2.5, 4.5, 6.5]
    assert pace_points(read) == [[(25.0 + 10 * update, 100.0) for update in range(UPDATES - 1)]]
    resumed = replace(read, updates=[*read.updates, *({**x, "time_s": x["time_s"] + 900.0} for x in read.updates)])
    assert [len(part) for part in pace_points(resumed)] == [UPDATES - 1] * 2, "no line over the pause"
    assert fault_times(read) == [70.0]
    assert lag_points(read)[0] == (1000.0, 0.5, 1.0)
    assert mean_points(read, "train/actor/behav_approx_kl")[3] == (4000.0, 0.03)
    assert mean_points(read, "train/actor/entropy_loss") == []
    unknown = replace(read, updates=[{**line, "env/return": None} for line in read.updates])
    assert {point.mean_return for point in training_points(unknown)} == {None}, "a return that is null is no zero"
    longer = mean_points(replace(read, updates=read.updates * 8), "train/actor/behav_approx_kl")
    assert len(longer) == 32, "64 updates are two to a point"
    assert longer[1] == (4000.0, pytest.approx(0.025))
    assert [(e.way, e.transitions) for e in read.evaluations] == [("greedy", 0.0), ("greedy", 8000.0)]


def test_the_window_is_three_updates_out_of_the_middle(run: Callable[..., Path]) -> None:
    window = timeline_window(run("one"))
    assert window is not None
    assert window.start == pytest.approx(4 - 0.056)
    assert window.end == pytest.approx(6.8 + 0.056)
    names = [thread for _, thread in window.lanes]
    assert names == ["simulator-0.0/2", "simulator-0.0/10", "generator-0", "trainer"]
    assert [bar.kind for bar in window.bars if bar.lane[0] == "generators"] == ["forward"] * 3
    assert [bar.name for bar in window.bars if bar.kind == "update"] == [
        name for update in (4, 5, 6) for name in 2 * [f"update {update}"]
    ]


def test_the_environments_own_metrics_are_drawn_and_listed(run: Callable[..., Path]) -> None:
    folder = run("one")
    with MetricsWriter(folder) as metrics:
        for update in range(UPDATES, UPDATES + 4):
            own = {"env/metrics/push": float(update)} | ({"env/metrics/slip": 0.5} if update % 2 else {})
            values = {"throughput/transitions": 1000.0 * (update + 1), "throughput/transitions_per_s": 9.0, **own}
            metrics.log(update, values, 100.0 + update)
    summary = {**SUMMARY, "before": {**tally(8), "metrics": {"push": 3.25}}, "after": {**tally(9), "metrics": {}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    text = checked(write_report([folder]))
    assert "The environment's own metrics" in Page(text).headings
    assert {"push over transitions", "slip over transitions"} <= set(re.findall(r'aria-label="([^"]*)"', text))
    table = text.partition("Means of the environment")[2].partition("</table>")[0]
    assert re.findall("<t[dh](?: [^>]*)?>(.*?)</t[dh]>", table) == [
        *("metric", "before, greedy", "after, greedy", "push", "3.25", "–"),
    ]


def test_episodes_that_an_evaluation_lacks_are_shown(run: Callable[..., Path]) -> None:
    folders = [run("one"), run("two")]
    summary = {**SUMMARY, "before": {**tally(8), "dropped": 3}}
    (folders[0] / "summary.json").write_text(json.dumps(summary))
    said = f"{tally(8)['episodes']} (3 dropped)"
    for chosen in (folders[:1], folders):
        assert checked(write_report(chosen)).count(said) == 1


def test_ticks_are_round_and_inside() -> None:
    assert svg.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert svg.ticks(-3, 487_000) == [0, 100_000, 200_000, 300_000, 400_000]
    assert svg.ticks(2, 2) == [2]
    assert [svg.short(value) for value in (0, 0.25, 8.938, 750, 1250, 480_000, 1.2e6)] == [
        *("0", "0.25", "8.94", "750", "1.25k", "480k", "1.2M")
    ]


def test_a_label_takes_the_nearest_free_height_and_the_first_in_the_list_comes_first() -> None:
    def heights(*wanted: tuple[float, float], most: float = 100.0) -> list[float | None]:
        return svg.place_labels([svg.Label(x, y, 30) for x, y in wanted], 15, 0, 100, most)

    assert heights((0, 50), (0, 52), (0, 10)) == [50, 65, 10]
    assert heights((0, 98), (0, 99)) == [98, 83], "above the lower limit"
    assert heights((0, 120), (40, 120)) == [100, 100], "side by side"
    assert heights((0, 50), (29, 50), (58, 50)) == [50, 35, 50]
    assert heights((0, 50), (0, 50), (0, 50), (0, 50), most=20) == [50, 35, 65, None]
    assert heights() == []


def test_labels_of_evaluations_close_together_after_several_resumes_do_not_overlap(run: Callable[..., Path]) -> None:
    folder = run("resumed")
    with (folder / "metrics.jsonl").open("a") as file:
        for number in range(6):
            after = {"step": UPDATES + number, "time_s": 60.0 + number, **evaluation("greedy", tally(20 + number))}
            update = {
                "step": UPDATES + number,
                "time_s": 60.0 + number,
                "throughput/transitions": 8000.0 + 20 * number,
                "throughput/transitions_per_s": 100.0,
            }
            file.write(f"{json.dumps(update)}\n{json.dumps(after)}\n")
    page = checked(write_report([folder]))
    labels = re.findall(r'<text class="value s\d" x="([\d.]+)" y="([\d.]+)">([^<]+)</text>', page)
    figures = page.count('aria-label="Success over transitions"')
    assert figures == 1
    boxes = [(float(x), float(y), 6 * len(text)) for x, y, text in labels if text.endswith("%")]
    assert len(boxes) >= 5, "some may be left out, not most"
    for number, (x, y, width) in enumerate(boxes):
        for other_x, other_y, other_width in boxes[number + 1 :]:
            beside = x + width <= other_x or other_x + other_width <= x
            assert beside or abs(y - other_y) >= 14, (x, y, other_x, other_y)


def test_several_runs_show_the_settings_that_differ(run: Callable[..., Path]) -> None:
    first, second = run("first"), run("second")
    for folder, seed in ((first, 1), (second, 2)):
        (folder / "config.yaml").write_text(f"seed: {seed}\ntraining: {{versions: 3, optimizer: {{lr: 0.{seed}}}}}\n")
    page = write_report([first, second]).read_text()
    table = page.partition("Settings that differ")[2].partition("</table>")[0]
    assert re.findall(r'<th scope="row">(.*?)</th>', table) == ["seed", "training.optimizer.lr"]
    assert re.findall("<td>(.*?)</td>", table) == ["1", "2", "0.1", "0.2"]
    assert "Settings that differ" not in write_report([first]).read_text()


def test_an_evaluation_stands_where_its_version_was_trained_however_late_it_comes(tmp_path: Path) -> None:
    folder = tmp_path / "recipe" / "run"
    with MetricsWriter(folder) as metrics:
        for update in range(8):
            values = {"throughput/transitions": 100.0 * (update + 1), "throughput/transitions_per_s": 1.0}
            metrics.log(update, values, float(update))
            if update == 6:
                metrics.log(2, evaluation("greedy", tally(30)), 6.5)
    (folder / "config.yaml").write_text("freshness: {sync_interval: 2}\n")
    (measured,) = read_run(folder).evaluations
    assert measured.transitions == 400.0, "version 2 has four updates"


def test_counts_over_the_columns_of_many_lags_are_left_out_where_they_would_touch(run: Callable[..., Path]) -> None:
    def counts(lags: int) -> int:
        folder = run(f"lags{lags}")
        lag = {"mean": 1.0, "max": lags - 1, "counts": {str(lag): 54321 for lag in range(lags)}}
        (folder / "summary.json").write_text(json.dumps({**SUMMARY, "lag": lag}))
        return checked(write_report([folder])).count(">54,321</text>")

    assert (counts(4), counts(20)) == (4, 0)
