"""Episodes of an evaluation that are kept in the run's folder."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.config.load import save_config
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.validation.check import validate_run


def _run(folder: Path, **env: Any) -> Path:
    """A run's folder with the first weights."""
    run = config(
        env=LampSettings(**env).model_dump(),
        policy={"type": "gaussian", "hidden": 8},
        launcher="inline",
        rollout={"rows": 3},
    )
    checked = validate_run(run, trainer=False)
    folder.mkdir()
    save_config(run, folder / "config.yaml")
    save_policy(checked.policy.state_dict(), run, folder / "policy.pt", 7, checked.spec)
    return folder


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gallery" / "episodes.jsonl").read_text().splitlines()]


def _frames(file: Path) -> tuple[int, tuple[int, int]]:
    if file.suffix == ".webp":
        with Image.open(file) as shown:
            return getattr(shown, "n_frames", 1), shown.size
    import av

    with av.open(str(file)) as found:
        pictures = [frame.to_image() for frame in found.decode(video=0)]
    return len(pictures), pictures[0].size


@pytest.mark.parametrize("mp4", [True, False])
def test_every_episode_has_a_line_and_a_video(
    mp4: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    if mp4 and found("av") is None:
        pytest.skip("the video extra is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "av" else found(name, *more))
    if mp4:
        monkeypatch.undo()
    run = _run(tmp_path / "run")
    assert main(["eval", str(run), "--episodes", "4", "--gallery", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gallery"] == {"folder": str(run / "gallery"), "episodes": 4, "videos": 4}
    lines = _lines(run)
    for line, counted in zip(lines, told["per_episode"], strict=True):
        assert [line[name] for name in ("index", "sample", "seed", "task", "success", "return", "length")] == [
            counted[name] for name in ("index", "sample", "seed", "task", "success", "return", "steps")
        ]
        assert (line["evaluation"], line["version"], line["mode"], line["failure"]) == ("eval", 7, "greedy", "")
        assert line["instruction"].startswith("push to the right")
        assert re.fullmatch(r"[A-Za-z0-9._-]+\.(mp4|webp)", line["video"])
        frames, size = _frames(run / "gallery" / line["video"])
        assert 1 <= frames <= 13
        assert size == (192, 192)
    assert {path.name for path in (run / "gallery").iterdir()} == {"episodes.jsonl", *(one["video"] for one in lines)}


def test_a_second_evaluation_is_appended_and_the_same_one_has_the_same_key(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    for words in (["--seed", "1"], ["--seed", "2"], ["--seed", "2"], ["--seed", "2", "--sampled"]):
        assert main(["eval", str(run / "policy.pt"), "--episodes", "2", "--gallery", *words]) == 0
    lines = _lines(run)
    keys = [tuple(line[name] for name in ("evaluation", "version", "mode", "seed", "sample", "task")) for line in lines]
    assert len(lines) == 8
    assert keys[2:4] == keys[4:6]
    assert len(set(keys)) == len({line["video"] for line in lines}) == 6
    assert {line["mode"] for line in lines} == {"greedy", "sampled"}


def test_only_the_first_episodes_have_a_video_where_that_is_asked(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    words = ["--episodes", "3", "--gallery", "--video-episodes", "1", "--swap-instructions"]
    assert main(["eval", str(run), *words]) == 0
    assert [bool(line["video"]) for line in _lines(run)] == [True, False, False]
    assert {line["mode"] for line in _lines(run)} == {"swapped"}


def test_an_episode_that_fails_keeps_its_reason_and_the_others_their_videos(tmp_path: Path) -> None:
    from polyrhythm.pipeline.evaluation.episodes import held_out

    bad = held_out(3, 0, 2, greedy=True)[1].seed
    run = _run(tmp_path / "run", bad_seed=bad)
    assert main(["eval", str(run), "--episodes", "3", "--seed", "0", "--gallery"]) == 0
    assert [line["index"] for line in _lines(run)] == [0, 2], "the failed one is missing, as in the result"
    assert all(line["video"] for line in _lines(run))


def test_a_policy_outside_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path / "run")
    alone = tmp_path / "alone" / "policy.pt"
    alone.parent.mkdir()
    (run / "policy.pt").rename(alone)
    assert main(["eval", str(alone), "--gallery"]) == 2
    assert "is not in the folder of a run, which keeps the episodes; name a run, or" in capsys.readouterr().err
