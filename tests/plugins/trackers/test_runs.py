"""Trackers of real runs: what they get, how a resumed run continues them, and what is refused before a start."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config
from tests.plugins.trackers.own_sinks import MODULE, FaultySettings, LinesSettings
from tests.plugins.trackers.readers import read_tensorboard

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.callbacks import Callbacks, StopTraining
from polyrhythm.pipeline.evaluation.standalone import Gallery, Video, evaluate
from polyrhythm.pipeline.persistence.resume_rules import config_to_resume
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.trackers.videos import with_common_format

SMALL = ["launcher=inline", "training.versions=1", "evaluation.episodes=2"]


def small(trackers: list[Any], *overrides: str) -> Any:
    return validate_run(load_config("cartpole", [*SMALL, {"tracking": trackers}, *overrides]))


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def recorded(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_and_its_extension_are_one_run_of_the_tracker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, lines = new_folder(tmp_path / "first"), tmp_path / "lines"
    with caplog.at_level(logging.WARNING, "polyrhythm.plugins.trackers"):
        train(small(["tensorboard", LinesSettings(file=str(lines))]), folder)
        first = recorded(lines)
        lines.unlink()
        train(validate_run(config_to_resume(folder, ["training.versions=2"]), begun=True), folder)
        second = recorded(lines)
    assert caplog.messages == []
    calls = [content[0] for content in first]
    assert calls[0] == "open"
    assert calls[-2:] == ["artifact", "close"]
    opened, own = first[0][1:], [content for content in first if content[0] == "metrics"]
    assert opened[:2] == ["id-of-cartpole-first", "cartpole-first"]
    assert opened[2]["training"]["versions"] == 1
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [{key: value for key, value in line.items() if value is not None} for line in logged]
    assert [{"step": step, **values} for _, step, values in own] == [
        {key: value for key, value in line.items() if key != "time_s"} for line in numbers[: len(own)]
    ]
    tables = {content[1]: content[3:] for content in first if content[0] == "table"}
    assert [*tables] == ["evaluation/before", "evaluation/after"]
    columns, rows = tables["evaluation/after"]
    assert columns == ["task", "rate", "low", "high", "successes", "episodes", "mean_return"]
    assert rows[0][0] == "all"
    assert rows[0][5] == 2
    assert "<!doctype html>" in first[-2][2].lower()
    assert first[-1] == ["close", True]

    assert second[0][1] == opened[0], "the tracker's own run goes on"
    assert second[0][3]["training"]["versions"] == 2
    assert [content[1] for content in second if content[0] == "metrics"] == [1, 2]
    kept = json.loads((folder / "trackers.json").read_text())
    assert len(kept.pop("key")) == 16
    assert kept == {f"{MODULE}:LinesSettings": opened[0]}
    assert len(list((folder / "tensorboard").iterdir())) == 2


def test_a_video_of_the_trained_policy_is_added_to_the_run_of_the_tracker(tmp_path: Path) -> None:
    folder, lines = new_folder(tmp_path / "run"), tmp_path / "lines"
    lamp = config(
        env=LampSettings().model_dump(),
        policy={"type": "gaussian", "hidden": 8, "chunk": 2},
        training={"versions": 1},
        tracking=[LinesSettings(file=str(lines)).model_dump(), "tensorboard"],
    )
    train(validate_run(lamp), folder)
    (opened,) = (content[1] for content in recorded(lines) if content[0] == "open")
    lines.unlink()
    evaluate(folder, 4, 5, video=Video(tmp_path / "film.gif", 2))
    assert [content[0] for content in recorded(lines)] == ["open", "video", "close"]
    assert recorded(lines)[0][1] == opened
    assert recorded(lines)[1][1:3] == ["video/evaluation", 1]
    assert recorded(lines)[2] == ["close", True]
    assert read_tensorboard(folder).videos == 1
    lines.unlink()
    evaluate(folder, 2, 5, video=Gallery(folder))
    assert [content[:3] for content in recorded(lines)[1:-1]] == [
        ["video", f"video/eval/greedy/000{index}-0", 1] for index in range(2)
    ]
    assert read_tensorboard(folder).videos == 3


def test_a_video_that_trackers_do_not_show_is_sent_as_a_gif(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], duration=100)
    (tmp_path / "sent").mkdir()
    sent = with_common_format(tmp_path / "a.webp", tmp_path / "sent")
    with Image.open(sent) as shown:
        assert (shown.format, getattr(shown, "n_frames", 1), shown.size) == ("GIF", 3, (16, 16))
    assert with_common_format(tmp_path / "b.mp4", tmp_path / "sent") == tmp_path / "b.mp4"


def test_an_interrupted_run_is_closed_as_unfinished_and_continued(tmp_path: Path) -> None:
    folder, lines = new_folder(tmp_path / "run"), tmp_path / "lines"

    def stop(metrics: object) -> None:
        raise StopTraining

    with pytest.raises(StopTraining):
        train(small([LinesSettings(file=str(lines))], "training.versions=3"), folder, callbacks=Callbacks(stop))
    assert recorded(lines)[-1] == ["close", False]
    train(validate_run(config_to_resume(folder, []), begun=True), folder)
    opened = [content[1] for content in recorded(lines) if content[0] == "open"]
    assert len(opened) == 2
    assert len(set(opened)) == 1
    assert recorded(lines)[-1] == ["close", True]


def test_a_sink_whose_process_dies_leaves_the_run_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(small([], "preset=lockstep"), new_folder(tmp_path / "without"))
    assert not (tmp_path / "without" / "tensorboard").exists()
    lines = tmp_path / "lines"
    lines.with_suffix(".fault").write_text("metrics:die")
    with caplog.at_level(logging.WARNING, "polyrhythm.plugins.trackers"):
        train(small([FaultySettings(file=str(lines))], "preset=lockstep"), new_folder(tmp_path / "with"))
    assert len(caplog.messages) == 1
    assert [content[0] for content in recorded(lines)].count("metrics") == 3
    same = ("train/actor/policy_loss", "env/return", "evaluation/greedy/mean_return")
    with_it, without = (
        [
            [json.loads(line).get(name) for name in same]
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("with", "without")
    )
    assert with_it == without


@pytest.mark.parametrize(
    ("trackers", "problem"),
    [
        ("[wandbb]", "did you mean wandb? known types are tensorboard, wandb, mlflow, trackio, swanlab"),
        ("[{type: wandb, modus: offline}]", "tracking.0.modus = 'offline': no such key"),
        ("[{type: wandb, mode: off}]", "tracking.0.mode"),
        ("[own_sink:Missing]", "own_sink:Missing cannot be imported"),
        ("wandb", "tracking = 'wandb': it must be a list"),
        ("[tensorboard, tensorboard]", "tensorboard is there twice; name each tracker once"),
        ("[polyrhythm.envs.gymnasium_env:GymnasiumSettings]", "tracking.0"),
        ("['polyrhythm.plugins.trackers.sink:TrackerSettings']", "it is not a tracker's settings"),
    ],
)
def test_wrong_trackers_are_refused_in_one_sentence(
    trackers: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["train", "cartpole", *SMALL, f"tracking={trackers}", "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert status == 2
    assert problem in said
    assert len(said.strip().splitlines()) <= 2
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ConfigError) as refused:
        small([{"type": name}])
    said = str(refused.value)
    assert said.startswith(f"tracking.type = {name}: the package {name} is not installed; run: ")
    assert said.endswith(f"'polyrhythm[{name}]'")


def test_an_online_tracker_without_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyrhythm.plugins.trackers.sinks.swanlab import SwanlabSettings
    from polyrhythm.plugins.trackers.sinks.wandb import WandbSettings

    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "SWANLAB_API_KEY", "SWANLAB_ROOT", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path))
    for settings, service in ((WandbSettings(), "wandb login"), (SwanlabSettings(), "swanlab login")):
        with pytest.raises(ConfigError, match=service):
            settings.check()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    WandbSettings().check()
    WandbSettings(mode="offline").check()
    SwanlabSettings(mode="offline").check()
