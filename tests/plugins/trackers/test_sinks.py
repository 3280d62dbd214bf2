"""What every sink must keep: one suite for all trackers; those that are not installed are skipped.

tools/test_all.sh trackers runs it with all of them, without a network.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image
from tests.plugins.trackers import readers
from tests.plugins.trackers.own_sinks import MODULE

from polyrhythm.config.registry import resolve
from polyrhythm.plugins.trackers.delivery import Delivery, DirectDelivery, Patience, QueuedDelivery
from polyrhythm.plugins.trackers.process import SinkProcess
from polyrhythm.plugins.trackers.sink import TrackedRun, TrackerSettings
from polyrhythm.plugins.trackers.sinks.mlflow import MlflowSettings
from polyrhythm.plugins.video.film import write_mp4


class Case(NamedTuple):
    """A tracker that stores on this machine. options: for a folder; read: from that folder and the run's."""

    package: str
    options: Callable[[Path], dict[str, str]]
    read: Callable[[Path, Path], readers.Stored]


CASES = {
    "tensorboard": Case("tensorboard", lambda _: {}, lambda _, run: readers.read_tensorboard(run)),
    f"{MODULE}:LinesSettings": Case(
        "polyrhythm",
        lambda folder: {"file": str(folder / "lines")},
        lambda folder, _: readers.read_lines(folder / "lines"),
    ),
    "wandb": Case("wandb", lambda _: {"mode": "offline"}, lambda _, run: readers.read_wandb(run)),
    "mlflow": Case(
        "mlflow",
        lambda folder: {"uri": f"sqlite:///{folder}/mlflow.db"},
        lambda folder, _: readers.read_mlflow(f"sqlite:///{folder}/mlflow.db"),
    ),
    "trackio": Case("trackio", lambda _: {}, lambda folder, _: readers.read_trackio(folder / "trackio")),
    "swanlab": Case("swanlab", lambda _: {"mode": "offline"}, lambda _, run: readers.read_swanlab(run)),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the trackers' packages, with which the tests read
#: Trackers whose numbers are not read back here: only their names are.
NAMES_ONLY = ("swanlab",)
CONFIG = {"name": "cartpole", "seed": 7, "policy": {"type": "categorical", "hidden": [8, 8]}, "note": "größer | \n x"}
HELLO = "Grüße <b>| 2\nnew line"


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a tracker, which stores in a temporary folder. The working folder is another."""
    name = str(request.param)
    package = CASES[name].package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; tools/test_all.sh trackers installs it and runs this")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return name


def settings_of(name: str, folder: Path) -> TrackerSettings:
    found = resolve("tracking", {"type": name, **CASES[name].options(folder)})
    assert isinstance(found, TrackerSettings)
    return found


def deliver(settings: TrackerSettings, run: TrackedRun, opened: list[str]) -> Delivery:
    if settings.in_run:
        return DirectDelivery(settings, run)
    process = SinkProcess(settings, run.folder / "logs" / "tracker.log")
    patience = Patience(retry_s=(0.1, 0.1), reply_s=120.0, close_s=300.0)  # on a busy machine a store is slow
    return QueuedDelivery(settings, run, process, opened.append, patience)


def small_videos(folder: Path) -> list[Path]:
    """A GIF and, with the extra `video`, an MP4."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    frames[0].save(folder / "film.gif", save_all=True, append_images=frames[1:], duration=100, loop=0)
    if importlib.util.find_spec("av") is None:
        return [folder / "film.gif"]
    write_mp4(folder / "clip.mp4", iter(frames), 10)
    return [folder / "film.gif", folder / "clip.mp4"]


def deliver_first_part(settings: TrackerSettings, run: TrackedRun, opened: list[str]) -> None:
    delivery = deliver(settings, run, opened)
    delivery.send(
        "metrics", 0, {"env/return": 1.0, "env/metrics/odd name/@2": 2.0, "train/critic/value_loss": math.nan}
    )
    delivery.send("metrics", 1, {"env/return": 2.0, "train/critic/value_loss": math.inf})
    delivery.send("metrics", 4, {"evaluation/greedy/rate": 0.5, "evaluation/greedy/low": 0.25})
    delivery.send("table", "evaluation/before", 4, ["task", "rate"], [["all", 0.5]])
    columns, rows = ["index", "text", "success", "return"], [[0, HELLO, None, 1.5], [1, "", True, -2]]
    delivery.send("table", "conversations/before", 4, columns, rows)
    delivery.end(False)
    delivery.close()


def deliver_second_part(settings: TrackerSettings, run: TrackedRun, opened: list[str], folder: Path) -> None:
    delivery, report = deliver(settings, run, opened), run.folder / "report.html"
    delivery.send("metrics", 1, {"env/return": 3.0})  # repeated since the last save
    delivery.send("metrics", 2, {"env/return": 4.0})
    for file in small_videos(folder):
        delivery.send("video", f"video/eval/greedy/{file.stem}-0", 4, str(file))
    report.write_text("<!doctype html><p>report</p>")
    delivery.send("artifact", "report", str(report))
    delivery.end(True)
    delivery.close()


def test_all_is_recorded_and_a_later_part_continues_the_run(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, opened = settings_of(case, tmp_path), list[str]()
    run = TrackedRun("cartpole-20261128", tmp_path / "run", CONFIG)
    run.folder.mkdir()
    with caplog.at_level(logging.WARNING, "polyrhythm"):
        deliver_first_part(settings, run, opened)
        again = TrackedRun(run.name, run.folder, {**CONFIG, "seed": 8}, opened[-1] if opened else "")
        deliver_second_part(settings, again, opened, tmp_path)
    assert caplog.messages == []
    found = CASES[case].read(tmp_path, run.folder)
    assert len(found.runs) == 1, "the second part continued the run of the first"
    assert len(set(opened)) <= 1
    assert "categorical" in found.config
    texts = "".join(found.tables.values())
    assert len(found.tables) == 2
    assert "Grüße" in texts
    assert "-2" in texts
    assert found.videos == len(small_videos(tmp_path))
    assert found.artifacts in (1, None)
    assert found.finished in (True, None)
    if case in NAMES_ONLY:
        assert {name for name, _, _ in found.points} >= {"env/return", "evaluation/greedy/low"}
        return
    points = {name: [(step, value) for own, step, value in found.points if own == name] for name, _, _ in found.points}
    assert [*dict.fromkeys(points["env/return"])] == [(0, 1.0), (1, 2.0), (1, 3.0), (2, 4.0)]
    assert points["evaluation/greedy/low"] == [(4, 0.25)]
    odd = next(name for name in points if name.startswith("env/metrics/odd name/"))
    assert points[odd] == [(0, 2.0)]


def test_many_records_arrive_in_order(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, opened = settings_of(case, tmp_path), list[str]()
    run = TrackedRun("many", tmp_path / "run", CONFIG)
    run.folder.mkdir()
    with caplog.at_level(logging.WARNING, "polyrhythm"):
        delivery = deliver(settings, run, opened)
        for step in range(300):
            delivery.send("metrics", step, {"env/return": float(step), "env/episodes": 1.0})
        delivery.end(True)
        delivery.close()
    assert caplog.messages == []
    found = CASES[case].read(tmp_path, run.folder)
    if case not in NAMES_ONLY:
        own = [(step, value) for name, step, value in found.points if name == "env/return"]
        assert own == [(step, float(step)) for step in range(300)]


def test_the_settings_survive_the_way_through_a_recipe(case: str, tmp_path: Path) -> None:
    settings = settings_of(case, tmp_path)
    assert resolve("tracking", json.loads(settings.model_dump_json())) == settings


def test_an_opening_that_failed_half_way_is_continued(case: str, tmp_path: Path) -> None:
    settings = settings_of(case, tmp_path)
    if settings.in_run:
        pytest.skip("it has no run in a service")
    run, found = TrackedRun("half", tmp_path / "run", CONFIG, key="0123456789abcdef"), set()
    run.folder.mkdir()
    for again in (run, replace(run, config={**CONFIG, "seed": 8})):  # the id of the first try was lost
        process = SinkProcess(settings, run.folder / "logs" / "tracker.log")
        found.add(process.start(again, 120.0))
        process.call({"call": "metrics", "arguments": (0, {"env/return": 1.0})}, 120.0)
        process.call({"call": "close", "arguments": (True,)}, 120.0)
        process.finish(30.0)
    assert len(found) == 1
    assert len(CASES[case].read(tmp_path, run.folder).runs) == 1


@pytest.mark.parametrize(
    "uri", ["https://me:secret@host", "http://token@host:5000/x", "postgresql://me:secret@host/runs"]
)
def test_a_password_in_an_address_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"):
        MlflowSettings(uri=uri)


@pytest.mark.parametrize("uri", ["", "https://host/a@b", "sqlite:////data/a@b/x.db", "databricks://profile"])
def test_other_addresses_are_taken(uri: str) -> None:
    assert MlflowSettings(uri=uri).uri == uri
