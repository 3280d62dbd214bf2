"""`polyrhythm compare`: which runs are taken, the table, the JSON and the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.observe.intervals import success_rate
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.plugins.report.compare import run_folders


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Write a run of one seed and setting."""

    def write(name: str, seed: int, lr: float, *, finished: bool = True) -> Path:
        folder = tmp_path / "runs" / name
        with MetricsWriter(folder) as metrics:
            for update in range(4):
                values = {
                    "env/episodes": 40.0,
                    "env/success_once": 0.1 * update + 10 * (lr - 0.1),
                    "throughput/transitions": 100.0 * (update + 1),
                    "throughput/transitions_per_s": 10.0,
                }
                metrics.log(update, values, 5.0 * (update + 1))
        (folder / "config.yaml").write_text(f"seed: {seed}\ntraining:\n  lr: {lr}\n  note: <script>\n")
        after = {**success_rate([i < 20 + seed for i in range(40)]), "mean_return": 0.5}
        if finished:
            (folder / "summary.json").write_text(json.dumps({"after": after, "wall_s": {"total": 90.0}}))
        return folder

    return write


def test_runs_are_compared_over_their_seeds(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        make(f"a{seed}", seed, 0.1)
    make("b", 0, 0.11, finished=False)
    assert main(["compare", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "training.lr 0.1  " in shown
    assert "0, 1, 2" in shown
    assert "52% [" in shown
    assert f"not finished: {tmp_path / 'runs' / 'b'}" in shown
    page = tmp_path / "runs" / "comparison.html"
    assert str(page) in shown
    text = page.read_text()
    assert "training.lr 0.11" in text
    assert "note: <script>" not in text

    assert main(["compare", str(tmp_path / "runs"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["seeds"] for group in found["groups"]] == [["0", "1", "2"], ["0"]]
    assert found["groups"][0]["results"]["after"]["success"]["each"] == [0.5, 0.525, 0.55]
    assert found["settings"] == {"training.lr": ["0.1", "0.11"]}


@pytest.mark.parametrize(
    ("envs", "names"),
    [
        (("type: cartpole", "type: push"), "env.type cartpole, push"),
        (("type: gymnasium\n  id: One-v0", "type: gymnasium\n  id: Two-v0"), "env.id One-v0, Two-v0"),
        (("type: sim\n  tasks: [reach]", "type: sim\n  tasks: [push]"), "env.tasks ['reach'], ['push']"),
    ],
)
def test_runs_of_different_environments_are_noted(
    envs: tuple[str, str], names: str, make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, env in zip("ab", envs, strict=True):
        with (make(name, 0, 0.1) / "config.yaml").open("a") as file:
            file.write(f"env:\n  {env}\n")
    words = f"Different environments ({names}): their results cannot be compared."
    assert main(["compare", str(tmp_path / "runs")]) == 0
    assert words in capsys.readouterr().out
    assert words in (tmp_path / "runs" / "comparison.html").read_text()


def test_a_page_is_written_where_it_is_named(make: Callable[..., Path], tmp_path: Path) -> None:
    folders = [str(make("a", 0, 0.1)), str(make("b", 1, 0.1))]
    assert main(["compare", *folders, "--json", "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").is_file()
    assert not (tmp_path / "runs" / "comparison.html").exists()


def test_a_folder_of_runs_is_all_of_its_runs_once(make: Callable[..., Path], tmp_path: Path) -> None:
    one, two = make("a", 0, 0.1), make("b", 1, 0.1)
    assert run_folders([one, tmp_path / "runs"]) == [one, two]
    assert run_folders([tmp_path, one / ".." / "a"]) == [one, two]
    assert run_folders([one, two, tmp_path / "runs" / "comparison.html"]) == [one, two]
    for single in ([one], [one, one], [tmp_path / "x.html"]):
        with pytest.raises(ConfigError, match="name two or more"):
            run_folders(single)
    (tmp_path / "empty").mkdir()
    for named, words in (("none", "is not there; name"), ("empty", "is not a run's folder")):
        for paths in ([tmp_path / named], [one, tmp_path / named]):
            with pytest.raises(RunFolderError, match=words):
                run_folders(paths)


def test_several_runs_have_no_report(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(make("a", 0, 0.1)), str(make("b", 1, 0.1))]
    assert main(["report", *folders]) == 2
    assert f"polyrhythm compare {folders[0]} {folders[1]}" in capsys.readouterr().err
