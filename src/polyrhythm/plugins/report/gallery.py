"""Reads the gallery of a run: the episodes of evaluations, one per line, and their videos.

    RUN/gallery/episodes.jsonl   one episode per line
    RUN/gallery/NAME.mp4         a video that a line names

    {"evaluation": "eval", "version": 120, "mode": "greedy", "index": 3, "sample": 0, "seed": 1234, "task": "push",
     "instruction": "push the block", "success": true, "return": 0.93, "length": 57, "failure": "",
     "video": "v000120-greedy-0003-0.mp4", "metrics": {"distance": 0.02}}

`polyrhythm eval RUN --gallery` writes them. The last line of an episode counts; damaged lines are skipped.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrhythm.observe.run_folder import EPISODES_FILE, GALLERY_FOLDER
from polyrhythm.plugins.report.parts import Part, text
from polyrhythm.plugins.report.read import ReportSection, Run
from polyrhythm.readable import counted

#: Suffixes of videos and their types; the page shows video/ in a player and image/ as an animation.
MEDIA_TYPES = {
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".png": "image/png",
}
#: Bytes of videos that a self-contained page holds; most episodes that it lists, newest version first.
_BUDGET, _LISTED = 16 << 20, 2000
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_TEXTS = ("evaluation", "mode", "task", "instruction", "failure")


def video_path(folder: Path, name: object) -> Path | None:
    """Path of a video of the run in `folder`; None if it is not the name of one, or not a file."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return None
    path = folder / GALLERY_FOLDER / name
    return path if path.suffix in MEDIA_TYPES and _is_own(path) else None


def _is_own(path: Path) -> bool:
    """Whether it is a file of the gallery itself: a link, of it or of the folder, could lead out of the run."""
    return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()


def read_episodes(folder: Path) -> list[dict[str, Any]]:
    """Episodes of the gallery of the run in `folder`, in order of writing."""
    path, found = folder / GALLERY_FOLDER / EPISODES_FILE, dict[tuple[Any, ...], dict[str, Any]]()
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if _is_own(path) else ():
        try:
            episode = _episode(json.loads(line))
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
            continue
        key = tuple(episode[name] for name in ("evaluation", "version", "mode", "task", "seed", "sample"))
        found.pop(key, None)
        found[key] = episode
    return list(found.values())


def _episode(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line's fields, in the types that a page relies on; the rest is left out."""
    episode: dict[str, Any] = {name: str(line.get(name, "")) for name in _TEXTS}
    episode |= {name: _whole(line.get(name, 0)) for name in ("version", "index", "sample", "length")}
    # As text: JavaScript rounds integers of more than 53 bits.
    episode["seed"] = str(_whole(line["seed"]))
    success, video = line.get("success"), line.get("video")
    episode["success"] = success if isinstance(success, bool) else None
    episode["return"] = finite(line.get("return"))
    episode["video"] = video if isinstance(video, str) else None
    episode["metrics"] = finite_metrics(line.get("metrics") or {})
    return episode


def finite_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {str(name): number for name, value in metrics.items() if (number := finite(value)) is not None}


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value


def finite(value: Any) -> float | None:
    """The number; None if it is none, or not finite: JSON has no other."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


# ------------------------------------------------------------ in the page


def draw(runs: Sequence[Run]) -> list[Part]:
    """The gallery of one run; none without episodes."""
    episodes = read_episodes(runs[0].folder) if len(runs) == 1 else []
    if not episodes:
        return []
    episodes.sort(key=lambda one: (-one["version"], one["evaluation"], one["mode"], one["index"], one["sample"]))
    parts = []
    if left_out := episodes[_LISTED:]:
        parts.append(
            text(f"{counted(len(left_out), 'episode')} of the oldest versions are left out: {EPISODES_FILE} has them.")
        )
    shown = [{**one, "video": _video(runs[0].folder, one["video"])} for one in episodes[:_LISTED]]
    return [*parts, {"kind": "episodes", "id": "gallery", "entries": shown}]


def _video(folder: Path, name: str | None) -> dict[str, Any] | None:
    path = video_path(folder, name)
    if path is None:
        return None
    return {"name": path.name, "type": MEDIA_TYPES[path.suffix], "bytes": path.stat().st_size}


SECTION = ReportSection("gallery", "Episodes", draw, after="results")


def embed_videos(data: Mapping[str, Any], folder: Path, budget: int = _BUDGET) -> dict[str, Any]:
    """The page's data with its videos as data: URLs, the smallest first, up to `budget` bytes in all; a sentence says
    how many are left out."""
    return {**data, "sections": [_embedded(section, folder, budget) for section in data["sections"]]}


def _embedded(section: Mapping[str, Any], folder: Path, budget: int) -> Mapping[str, Any]:
    if section["id"] != SECTION.id:
        return section
    parts = []
    for part in section["parts"]:
        if part["kind"] != "episodes":
            parts.append(part)
            continue
        urls, left_out = _urls(part["entries"], folder, budget)
        if left_out:
            parts.append(
                text(
                    f"{counted(len(left_out), 'video')} of {sum(left_out) / 1e6:.0f} MB, the largest, are left out of "
                    "this file; to see them: polyrhythm watch RUN",
                    "notice",
                )
            )
        entries = [
            {**one, "video": {**one["video"], "url": urls.get(one["video"]["name"])} if one["video"] else None}
            for one in part["entries"]
        ]
        parts.append({**part, "entries": entries})
    return {**section, "parts": parts}


def _urls(entries: Sequence[Mapping[str, Any]], folder: Path, budget: int) -> tuple[dict[str, str], list[int]]:
    """data: URLs by name of the smallest videos that fit, and the sizes of the others."""
    sizes = {one["video"]["name"]: one["video"]["bytes"] for one in entries if one["video"]}
    urls: dict[str, str] = {}
    left_out: list[int] = []
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if size > budget or (path := video_path(folder, name)) is None:
            left_out.append(size)
            continue
        budget -= size
        content = base64.b64encode(path.read_bytes()).decode("ascii")
        urls[name] = f"data:{MEDIA_TYPES[path.suffix]};base64,{content}"
    return urls, left_out
