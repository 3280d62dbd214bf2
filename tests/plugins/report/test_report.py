"""The data of a page on a run: what is read, and which sections and parts there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.errors import RunFolderError
from polyrhythm.observe.intervals import success_rate, wilson
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.observe.run_folder import note_changes
from polyrhythm.plugins.report.page import write_comparison, write_report
from polyrhythm.plugins.report.parts import Part
from polyrhythm.plugins.report.read import curve, pace_points, read_run, run_marks, training_points
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


class Page:
    """The data in a page. sections: parts by id; words: all cells of tables, tiles and texts."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.data = json.loads(text.partition(' id="data">')[2].partition("</script>")[0])
        self.title = self.data["title"]
        self.sections: dict[str, list[Part]] = {one["id"]: one["parts"] for one in self.data["sections"]}

    def rows(self, section: str) -> list[list[str]]:
        return [row for part in self.sections[section] if part["kind"] == "table" for row in part["rows"]]

    def charts(self) -> dict[str, Part]:
        return {part["id"]: part for parts in self.sections.values() for part in parts if "id" in part}

    def texts(self, section: str) -> str:
        return "\n".join(part["text"] for part in self.sections.get(section, ()) if part["kind"] == "text")


def page_of(*folders: Path) -> Page:
    if len(folders) == 1:
        return Page(write_report(folders[0]))
    return Page(write_comparison([read_run(folder) for folder in folders]))


def test_one_run_has_every_figure_and_every_table(run: Callable[..., Path]) -> None:
    folder = run("one")
    assert write_report(folder) == folder / "report.html"
    page = page_of(folder)
    assert page.title == "recipe/one"
    assert list(page.sections) == [
        *("overview", "results", "success", "return", "tasks", "updates", "throughput", "timeline", "waits"),
        *("batches", "utilisation", "lag", "wall-time", "ledger", "faults", "weights", "configuration"),
    ]
    assert page.rows("weights") == [["generator-0", "host", "9", "43.5", "12", "3.6"]]
    assert ["after, greedy", "75%", "60% to 86%", "30", "40", "0.5"] in page.rows("results")
    assert any(row[0] == "a<b>" for row in page.rows("results"))
    assert "note: <b>&" in page.sections["configuration"][0]["text"]
    assert ["dropped", "2 (too many attempts 2)"] in page.rows("ledger")
    assert page.rows("faults") == [["generator-0", "was killed by SIGKILL", "5,000"]]
    charts = page.charts()
    assert charts["metric-train/actor/behav_approx_kl"]["title"] == "KL from behaviour, 10⁻³ nats"
    (explained,) = charts["metric-train/critic/explained_variance"]["series"]
    assert min(explained["y"]) == -1, "a value far below -1 is drawn at -1"
    assert [len(one["y"]) for one in charts["success"]["series"]] == [4, 2]
    assert charts["success"]["series"][1]["low"] == [pytest.approx(tally(n)["low"], rel=1e-5) for n in (8, 30)]
    assert set(charts["success"]["x"]) == {"transitions", "time"}
    assert [row["label"] for row in charts["tasks-evaluated"]["rows"]] == ["a<b>", "door"]
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
    page = page_of(folder)
    ids = list(page.sections)
    assert ids[ids.index("utilisation") + 1] == "hosts"
    assert page.rows("hosts") == [["main", "simulator-0, trainer", "25%", "0"], ["host-1", "–", "50%", "2"]]
    assert page.charts()["hosts-bars"]["groups"] == ["main", "host-1"]
    assert page.rows("faults")[0][1] == "host-1"
    (folder / "summary.json").unlink()
    assert page_of(folder).rows("hosts") == [["main", "–", "20%", "0"], ["host-1", "–", "0%", "2"]], "so far"


def test_several_runs_share_their_figures(run: Callable[..., Path], tmp_path: Path) -> None:
    folders = [run("one"), run("two")]
    runs = [read_run(folder) for folder in folders]
    assert write_comparison(runs) == tmp_path / "recipe" / "comparison.html"
    page = page_of(*folders)
    assert page.title == "2 runs compared"
    assert [one["label"] for one in page.data["runs"]] == ["recipe/one", "recipe/two"]
    charts = page.charts()
    assert len(charts["throughput"]["series"]) == len(charts["metric-train/actor/behav_approx_kl"]["series"]) == 2
    assert "timeline" not in charts, "each run's own report has it"
    after = next(row for row in page.rows("results") if row[0] == "after, greedy")
    assert [cell.replace("\u00a0", " ") for cell in after[1:]] == ["75% [60, 86], 30 of 40"] * 2
    assert write_comparison(runs, tmp_path / "x.html") == tmp_path / "x.html"


def test_without_a_report_of_success_the_return_is_drawn(run: Callable[..., Path]) -> None:
    page = page_of(run("one", success=False))
    assert "return" in page.sections
    assert not {"success", "tasks"} & set(page.sections)
    assert len(page.rows("results")[0]) == 3, "name, episodes, mean return"


def test_an_unfinished_run_shows_what_there_is(run: Callable[..., Path], tmp_path: Path) -> None:
    folder = run("cut", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "ti')
    with (folder / "trace.json").open("r+") as file:
        file.truncate((folder / "trace.json").stat().st_size - 30)
    page = page_of(folder)
    assert "not finished" in page.texts("overview")
    assert not page.data["runs"][0]["finished"]
    assert {"results", "throughput", "timeline", "wall-time"} <= set(page.sections)
    for name in ("metrics.jsonl", "progress.json", "trace.json"):
        (folder / name).unlink()
    assert list(page_of(folder).sections) == ["overview", "configuration"]


def test_what_is_no_run_is_refused(run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no config\.yaml"):
        write_report(tmp_path)
    folder = run("one")
    with pytest.raises(RunFolderError, match="cannot be written"):
        write_report(folder, tmp_path / "nowhere" / "x.html")
    (folder / "summary.json").write_text("{")
    with pytest.raises(RunFolderError, match="cannot be read"):
        write_report(folder)


def test_settings_that_were_changed_are_marked_and_listed(run: Callable[..., Path]) -> None:
    folder = run("1")
    note_changes(folder, 5, {"training.versions": (8, 9)}, datetime(2030, 1, 2, tzinfo=UTC))
    note_changes(folder, 0, {}, datetime(2030, 1, 2, tzinfo=UTC))
    fault = {"kind": "fault", "x": {"transitions": 6000.0, "time": 70.0}}
    marks = [{"kind": mark["tone"], "x": mark["x"]} for mark in run_marks(read_run(folder))]
    assert marks == [fault], "before the first update there is nothing to mark"
    (folder / "settings_changes.jsonl").unlink()
    note_changes(folder, 5, {"training.versions": (8, 9)}, datetime(2030, 1, 2, tzinfo=UTC))
    change = {"label": "training.versions: 8 → 9", "tone": "change", "x": {"transitions": 5000.0, "time": 60.0}}
    page = page_of(folder)
    marked = [name for name, part in page.charts().items() if change in part.get("marks", ())]
    assert {"success", "return", "throughput", "timeline", "metric-train/critic/explained_variance"} <= set(marked)
    assert page.rows("changes")[0][:4] == ["training.versions", "8", "9", "5"]


def test_moves_are_marked_where_they_took_effect(run: Callable[..., Path]) -> None:
    folder = run("one")
    with MetricsWriter(folder) as metrics:
        for update, off in enumerate((0, 0, 1, 1), UPDATES):
            values = {"throughput/transitions": 1000.0 * (update + 1), "throughput/transitions_per_s": 9.0}
            metrics.log(
                update, values | {"stations/generators_off": float(off), "staleness/max_lag": 2.0 - off}, 100.0 + update
            )
    moves = [mark for mark in run_marks(read_run(folder)) if mark["tone"] == "change"]
    assert [mark["label"] for mark in moves] == ["generators_off: 0 → 1; max_lag: 2 → 1"]
    assert moves[0]["x"] == {"transitions": 1000.0 * (UPDATES + 3), "time": 102.0 + UPDATES}


def test_alarms_are_marked_where_they_were_raised(run: Callable[..., Path]) -> None:
    """Here: an update of which every group has earned the same."""
    folder = run("one")
    with MetricsWriter(folder) as metrics:
        for update in range(UPDATES, UPDATES + 3):
            values = {"throughput/transitions": 1000.0 * (update + 1), "throughput/transitions_per_s": 9.0}
            metrics.log(update, values | {"train/actor/zero_advantage_fraction": float(update == 9)}, 100.0 + update)
    alarms = [mark for mark in run_marks(read_run(folder)) if mark["tone"] == "alarm"]
    assert [mark["x"] for mark in alarms] == [{"transitions": 10000.0, "time": 109.0}]
    assert "zero_advantage_fraction = 1 in update 10" in alarms[0]["label"]
    assert alarms[0]["label"] in page_of(folder).texts("advice") or (folder / "summary.json").is_file()


def test_a_summary_of_something_else_is_one_sentence(run: Callable[..., Path]) -> None:
    folder = run("1")
    for content in ("[]", "3", '{"lag": 3}', '{"before": {"rate": "x"}}'):
        (folder / "summary.json").write_text(content)
        with pytest.raises(RunFolderError, match=r"cannot be read|has invalid content"):
            write_report(folder)
    (folder / "summary.json").write_text("{")
    with pytest.raises(
        RunFolderError, match=rf"^{folder / 'summary.json'} cannot be read .*; repair it, or move it away$"
    ):
        write_report(folder)
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    assert not page_of(folder).data["runs"][0]["finished"], "as without the file"


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b"3", b"", b"{}", b"[" * 100_000, b'{"step": 1.5}'])
def test_damaged_lines_of_metrics_are_skipped_and_named(run: Callable[..., Path], damage: bytes) -> None:
    folder = run("1")
    whole, path = read_run(folder), folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], damage, *lines[2:], b'{"step": 9, "ti']))
    damaged = read_run(folder)
    assert (damaged.updates, damaged.evaluations) == (whole.updates, whole.evaluations)
    assert damaged.setbacks[0] == "metrics.jsonl has damaged lines, which are left out here: 3."
    assert damaged.setbacks[0] in page_of(folder).texts("advice")
    path.write_bytes((damage + b"\n") * 12 + b"\n".join(lines))
    assert read_run(folder).setbacks[0].endswith(": 1, 2, 3, 4, 5, 6, 7, 8, 9, and 3 more.")


def test_points_of_the_curves(run: Callable[..., Path]) -> None:
    read = read_run(run("one"))
    points = training_points(read)  # 32 episodes are two updates
    assert [point.transitions for point in points] == [2000.0, 4000.0, 6000.0, 8000.0]
    assert points[1].success == wilson(10, 32)[2:]
    assert [point.mean_return for point in points] == [0.5, 2.5, 4.5, 6.5]
    paced = [(25.0 + 10 * update, 1500.0 + 1000 * update, 100.0) for update in range(UPDATES - 1)]
    assert pace_points(read) == paced
    resumed = replace(read, updates=[*read.updates, *({**x, "time_s": x["time_s"] + 900.0} for x in read.updates)])
    again = pace_points(resumed)
    assert [point[2] for point in again] == [*[100.0] * 7, None, *[100.0] * 7], "no line over the pause"
    found = curve(read, "train/actor/behav_approx_kl")
    assert (found.x["transitions"][3], found.x["time"][3], found.y[3]) == (4000.0, 50.0, 0.03)
    assert curve(read, "train/actor/entropy_loss").y == []
    unknown = replace(read, updates=[{**line, "env/return": None} for line in read.updates])
    assert {point.mean_return for point in training_points(unknown)} == {None}, "a return that is null is no zero"
    longer = curve(replace(read, updates=read.updates * 8), "train/actor/behav_approx_kl", most=32)
    assert len(longer.y) == 32, "64 updates are two to a point"
    assert (longer.x["transitions"][1], longer.y[1]) == (4000.0, pytest.approx(0.025))
    assert [(e.way, e.transitions) for e in read.evaluations] == [("greedy", 0.0), ("greedy", 8000.0)]


def test_the_environments_own_metrics_are_drawn_and_listed(run: Callable[..., Path]) -> None:
    folder = run("one")
    with MetricsWriter(folder) as metrics:
        for update in range(UPDATES, UPDATES + 4):
            own = {"env/metrics/push": float(update)} | ({"env/metrics/slip": 0.5} if update % 2 else {})
            values = {"throughput/transitions": 1000.0 * (update + 1), "throughput/transitions_per_s": 9.0, **own}
            metrics.log(update, values, 100.0 + update)
    summary = {**SUMMARY, "before": {**tally(8), "metrics": {"push": 3.25}}, "after": {**tally(9), "metrics": {}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = page_of(folder)
    assert [part["title"] for part in page.sections["metrics"] if part["kind"] == "chart"] == ["push", "slip"]
    (table,) = [part for part in page.sections["results"] if part["caption"].startswith("Means of the environment")]
    assert (table["head"], table["rows"]) == (["metric", "before, greedy", "after, greedy"], [["push", "3.25", "–"]])


def test_episodes_that_an_evaluation_lacks_are_shown(run: Callable[..., Path]) -> None:
    folders = [run("one"), run("two")]
    summary = {**SUMMARY, "before": {**tally(8), "dropped": 3}}
    (folders[0] / "summary.json").write_text(json.dumps(summary))
    said = f"{tally(8)['episodes']} (3 dropped)"
    for chosen in (folders[:1], folders):
        assert sum(said in cell for row in page_of(*chosen).rows("results") for cell in row) == 1


def test_several_runs_show_the_settings_that_differ(run: Callable[..., Path]) -> None:
    first, second = run("first"), run("second")
    for folder, seed in ((first, 1), (second, 2)):
        (folder / "config.yaml").write_text(f"seed: {seed}\ntraining: {{versions: 3, optimizer: {{lr: 0.{seed}}}}}\n")
    assert page_of(first, second).rows("settings") == [["training.optimizer.lr", "0.1", "0.2"]]
    assert "settings" not in page_of(first).sections


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
