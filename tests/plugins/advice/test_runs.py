"""Advice in a run: in its summary, its log, its live display, its report, and by `plan RUN`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.pipeline.runs import config
from tests.plugins.advice.test_speed import recipe
from tests.plugins.advice.test_stability import KL, WAITING, lines
from tests.plugins.alarms.test_alarms import ONE_STEP, run

from polyrhythm.cli.main import main
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.advice import hooks
from polyrhythm.plugins.advice.hooks import HOOKS
from polyrhythm.plugins.report.data import page_data
from polyrhythm.plugins.report.read import read_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("advice") / "run"
    folder.mkdir()
    train(validate_run(config()), folder)
    return folder


def advice_parts(folder: Path) -> list[dict[str, Any]]:
    sections = {one["id"]: one["parts"] for one in page_data([read_run(folder)])["sections"]}
    return list(sections["advice"])


def test_summary_report_and_plan_say_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert [finding["name"] for finding in summary["advice"]] == ["one-thread"]
    assert "bottleneck" not in summary
    assert main(["plan", str(folder), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["advice"]
    assert [one | {"note": ""} for one in planned] == summary["advice"], "a run this short predicts nothing"
    assert main(["plan", str(folder)]) == 0
    measured = summary["advice"][0]["measured"]
    out = capsys.readouterr().out
    assert out.startswith(f"1. throughput: {measured} [docs/tuning.md#one-thread]\n   ")
    parts = advice_parts(folder)
    assert parts[0]["text"].startswith(f"1. Throughput: {measured}")
    rows = [row for part in parts[1:] for row in part["rows"]]
    assert [row[0] for row in rows] == ["launcher=local"] * len(summary["advice"][0]["changes"])
    assert all(f"   {row[0]} (now {row[2]}): transitions/s {row[1]}; cost: {row[3]}" in out for row in rows)


def test_a_run_of_an_earlier_version_has_advice_too(folder: Path, tmp_path: Path) -> None:
    """Its summary has none."""
    older = tmp_path / "run"
    older.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "summary.json"):
        (older / name).write_bytes((folder / name).read_bytes())
    summary = json.loads((older / "summary.json").read_text())
    del summary["advice"]
    (older / "summary.json").write_text(json.dumps(summary | {"bottleneck": "a sentence"}))
    assert advice_parts(older) == advice_parts(folder)
    (older / "summary.json").unlink()
    newest = json.loads((older / "metrics.jsonl").read_text().splitlines()[-1])
    with (older / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(newest | {"step": newest["step"] + 1, "stations/utilisation/trainer": 0.5}) + "\n")
    assert advice_parts(older), "an unfinished run, by its newest utilisation"


@pytest.mark.parametrize("spoil", ["name: x\n", "env: {type: unknown_env}\n", "rollout: 3\n"])
def test_settings_that_this_version_does_not_know_leave_the_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: str
) -> None:
    (tmp_path / "config.yaml").write_text(spoil)
    (tmp_path / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    assert "advice" not in [section["id"] for section in page_data([read_run(tmp_path)])["sections"]]
    assert main(["plan", str(tmp_path)]) == 2
    assert "has no advice: the run trained nothing, or this version does not know its settings; name a run that" in (
        capsys.readouterr().err
    )


def test_a_finding_takes_the_place_of_the_alarm_that_it_explains(tmp_path: Path) -> None:
    others = {"throughput/transitions_per_s": 1.0, "stations/utilisation/trainer": 0.5}
    some = [line | WAITING | others | {"time_s": 1.0 + line["step"]} for line in run(**ONE_STEP)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    (tmp_path / "config.yaml").write_text(json.dumps(recipe().model_dump(mode="json")))
    texts = [part["text"] for part in advice_parts(tmp_path) if part["kind"] == "text"]
    assert [text.partition(":")[0] for text in texts] == ["1. Stability", "2. Stability", "3. Throughput"]
    assert sum("optimizer_steps = 1" in text for text in texts) == 1


def test_the_log_has_the_list(caplog: pytest.LogCaptureFixture) -> None:
    utilisation = {"utilisation": {"simulator-0": 0.9, "trainer": 0.4}}
    with caplog.at_level(logging.INFO):
        HOOKS.summarise(recipe(), utilisation, [line | {KL: 0.5} for line in lines()])
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        "advice 1, stability",
        "advice 2, throughput",
    ]
    assert HOOKS.summarise(recipe(), {}, []) == {}


def live(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a part is told of a line of metrics: without its step and time."""
    own = {name: value for name, value in line.items() if name not in ("step", "time_s")}
    return {"stations/utilisation/simulator-0": 0.9, **own}


@pytest.mark.parametrize("first", [3, 6, 30])
def test_live_advice_is_of_the_newest_updates(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has run for long, the first updates count no more than the others, and old ones not at all."""
    clock = iter(range(10**6, 10**7, 10))
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    part = HOOKS.begin(recipe())
    for number, line in enumerate(lines(first + 60)):
        warm_up = {"rollouter/idle_ratio": 0.0, "trainer/idle_ratio": 0.0} if number < first else {}
        part.on_metrics(number, live(line) | warm_up)
    (status,) = part.status()
    assert "rows without a ticket 40% and the trainer idle 50% of the time" in status


def test_the_live_display_gets_the_first_step() -> None:
    part = HOOKS.begin(recipe())
    assert part.status() == ()
    for line in lines(8):
        part.on_metrics(line["step"], live(line))
    (status,) = part.status()
    assert status.startswith("throughput: rollout and training wait for each other: rows without a ticket 40%")
    assert status.endswith("the time: freshness.max_lag=2 (transitions/s at most ×1.67)")
    part.on_metrics(9, {"evaluation/greedy/rate": 0.5})
    assert part.status() == (status,)
