"""The gallery of evaluation episodes: what is read, and the videos that a self-contained page holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.plugins.report.gallery import draw, embed_videos, read_episodes, video_path
from polyrhythm.plugins.report.read import Run

EPISODE: dict[str, Any] = {
    "evaluation": "eval",
    "version": 3,
    "mode": "greedy",
    "index": 0,
    "sample": 0,
    "seed": 2**62 + 1,
    "task": "push",
    "instruction": "",
    "success": True,
    "return": 0.5,
    "length": 7,
    "failure": "",
    "video": None,
}


def write(folder: Path, *episodes: Any) -> Run:
    (folder / "gallery").mkdir(exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in episodes]
    (folder / "gallery" / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    return Run(folder, "a/b", "", [], [], {}, finished=True)


def test_the_last_line_of_an_episode_counts(tmp_path: Path) -> None:
    write(tmp_path, EPISODE, {**EPISODE, "seed": 2}, {**EPISODE, "success": False}, {**EPISODE, "version": 4})
    found = read_episodes(tmp_path)
    assert [(one["seed"], one["version"], one["success"]) for one in found] == [
        ("2", 3, True),
        (str(2**62 + 1), 3, False),
        (str(2**62 + 1), 4, True),
    ]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    damaged = ["{", "[]", "3", "null", '"x"', "[" * 100_000, {"version": 1}, {**EPISODE, "seed": 1.5}]
    damaged += [{**EPISODE, name: value} for name, value in (("version", "x"), ("length", None), ("metrics", [1]))]
    write(tmp_path, *damaged, EPISODE, '{"evaluation": "ev')
    assert len(read_episodes(tmp_path)) == 1
    assert read_episodes(tmp_path / "none") == []


def test_values_of_other_types_are_not_shown(tmp_path: Path) -> None:
    odd = {"success": 1, "return": float("nan"), "video": 3, "task": ["a"], "metrics": {"x": float("inf"), "y": 2}}
    write(tmp_path, {**EPISODE, **odd})
    (found,) = read_episodes(tmp_path)
    assert (found["success"], found["return"], found["video"]) == (None, None, None)
    assert (found["task"], found["metrics"]) == ("['a']", {"y": 2.0})


@pytest.mark.parametrize(
    "name", ["../a.mp4", "/etc/a.mp4", "a.txt", "a", ".mp4", "", "b.mp4", "a b.mp4", None, 3, "x" * 300]
)
def test_a_video_is_a_file_of_the_gallery(tmp_path: Path, name: object) -> None:
    write(tmp_path)
    for made in ("a.mp4", "../a.mp4", "gallery/a.txt", "gallery/a b.mp4"):
        (tmp_path / made).write_bytes(b"x")
    assert video_path(tmp_path, name) is None
    (tmp_path / "gallery" / "a.mp4").write_bytes(b"x")
    assert video_path(tmp_path, "a.mp4") == tmp_path / "gallery" / "a.mp4"


def test_a_gallery_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
    made = write(other, EPISODE)
    (other / "gallery" / "a.mp4").write_bytes(b"x")
    assert (len(read_episodes(other)), video_path(other, "a.mp4")) == (1, other / "gallery" / "a.mp4")
    (tmp_path / "named").symlink_to(other)
    assert video_path(tmp_path / "named", "a.mp4") is not None, "the run itself may be named by a link"
    (run / "gallery").symlink_to(other / "gallery")
    assert (read_episodes(run), video_path(run, "a.mp4")) == ([], None)
    (run / "gallery").unlink()
    (run / "gallery").mkdir()
    (run / "gallery" / "episodes.jsonl").symlink_to(other / "gallery" / "episodes.jsonl")
    assert read_episodes(run) == []
    assert draw([made]) != []


def test_a_page_holds_the_smallest_videos(tmp_path: Path) -> None:
    episodes = [{**EPISODE, "index": i, "seed": i, "video": f"{i}.webp"} for i in range(4)]
    run = write(tmp_path, *episodes)
    for i, size in enumerate((50, 10, 20)):  # the last one has no file
        (tmp_path / "gallery" / f"{i}.webp").write_bytes(b"x" * size)
    data = {"sections": [{"id": "other", "parts": []}, {"id": "gallery", "parts": draw([run])}]}
    note, part = embed_videos(data, tmp_path, budget=30)["sections"][1]["parts"]
    assert "1 video" in note["text"]
    assert "polyrhythm watch" in note["text"]
    urls = [one["video"]["url"] if one["video"] else "" for one in part["entries"]]
    assert urls == [None, "data:image/webp;base64,eHh4eHh4eHh4eA==", f"data:image/webp;base64,{'eHh4' * 6}eHg=", ""]
    (part,) = embed_videos(data, tmp_path, budget=80)["sections"][1]["parts"]
    assert all(one["video"]["url"] for one in part["entries"][:3])
    assert "url" not in draw([run])[0]["entries"][0]["video"], "watch serves them"


def test_only_one_run_has_a_gallery(tmp_path: Path) -> None:
    run = write(tmp_path, EPISODE)
    assert draw([run, run]) == []
    assert draw([write(tmp_path)]) == []


def test_the_newest_version_is_first(tmp_path: Path) -> None:
    run = write(tmp_path, {**EPISODE, "seed": 1}, {**EPISODE, "version": 9}, {**EPISODE, "seed": 2, "index": 1})
    (part,) = draw([run])
    assert [(one["version"], one["index"]) for one in part["entries"]] == [(9, 0), (3, 0), (3, 1)]
