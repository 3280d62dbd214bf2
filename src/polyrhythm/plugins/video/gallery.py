"""Keeps the episodes of an evaluation in a run's folder: a line of JSON and a video for each.

    RUN/gallery/episodes.jsonl          an object per line: evaluation, version, mode, index, sample, seed, task,
                                        instruction, success, return, length, failure, video, metrics
    RUN/gallery/<name>.mp4, or .webp    an episode, 192 pixels wide or high, without text

A second evaluation appends. Of two lines with equal evaluation, version, mode, seed, sample and task the later counts;
their videos have the same name. A video is whole before its line is written.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.files import atomic_write
from polyrhythm.observe.log_file import LogFile
from polyrhythm.observe.run_folder import EPISODES_FILE, GALLERY_FOLDER, find_run, run_of
from polyrhythm.pipeline.evaluation.standalone import Gallery
from polyrhythm.plugins.video.film import enlarged, frame_rate, play_episodes, write_mp4
from polyrhythm.plugins.video.playback import PlayedEpisode
from polyrhythm.policies.base import Policy
from polyrhythm.readable import counted
from polyrhythm.scheduler.records import Episode
from polyrhythm.scheduler.rollout.evaluation import noise_stream
from polyrhythm.specs import EnvSpec

#: Of WebP, 0 to 100.
_QUALITY = 70


def check(gallery: Gallery) -> None:
    """Make the folder. ConfigError: the path is not a run, nor in one; OSError: its folder cannot be written."""
    folder = _folder(gallery.path)
    folder.mkdir(exist_ok=True)
    LogFile(folder / EPISODES_FILE).close()


def _folder(path: Path) -> Path:
    path = find_run(path)
    if (run := run_of(path)) is not None:
        return run / GALLERY_FOLDER
    raise ConfigError(
        f"--gallery: {path} is not in the folder of a run, which keeps the episodes; name a run, or write a video with "
        "--video FILE"
    )


def film(
    config: RunConfig, policy: Policy, spec: EnvSpec, episodes: Sequence[Episode], gallery: Gallery
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Play the episodes that get a video, before they are evaluated, and write their videos.

    The result takes the evaluation's, appends a line for each episode and returns its entry there, with the videos by
    names that other versions repeat in `files`. Errors: see `playback.play`.
    """
    folder, lines = _folder(gallery.path), _numbered(episodes, spec, gallery)
    played: dict[int, PlayedEpisode] = {}
    for one in play_episodes(config, policy, episodes[: gallery.videos]):
        line = lines[stream := noise_stream(one.episode)]
        if one.pictures:
            line["video"] = _file_name(line)
            _write(folder / line["video"], one.pictures)
            one.pictures.clear()
        played[stream] = one

    def write(result: Mapping[str, Any]) -> dict[str, Any]:
        found = {(one["index"], one["sample"]): one for one in result["per_episode"]}
        file = LogFile(folder / EPISODES_FILE, buffered=True)
        ended, files = 0, dict[str, Path]()
        for stream, line in lines.items():
            if (one := found.get((line["index"], line["sample"]))) is None:
                continue
            ended += 1
            if line["video"]:
                files[f"{line['evaluation']}/{line['mode']}/{line['index']:04d}-{line['sample']}"] = (
                    folder / line["video"]
                )
            file.write(json.dumps({**line, **_outcome(one), "failure": _failure(one, played.get(stream))}) + "\n")
        file.close()
        return {"folder": str(folder), "episodes": ended, "videos": len(files), "files": files}

    return write


def _numbered(episodes: Sequence[Episode], spec: EnvSpec, gallery: Gallery) -> dict[int, dict[str, Any]]:
    """The part of each episode's line that is known before it is played, by the stream of its noise."""
    lines, index = {}, -1
    for episode in episodes:
        index += episode.sample == 0
        task, shown = spec.tasks[episode.task], spec.tasks[episode.instruction]
        lines[noise_stream(episode)] = {
            "evaluation": ", ".join(filter(None, (gallery.variant or "eval", gallery.settings))),
            "version": gallery.version,
            "mode": "swapped" if shown is not task else "greedy" if episode.greedy else "sampled",
            "index": index,
            "sample": episode.sample,
            "seed": episode.seed,
            "task": task.name,
            "instruction": "" if shown.instruction == task.name else shown.instruction,
            "video": None,
        }
    return lines


def _outcome(found: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {name: number for name, number in found.get("metrics", {}).items() if math.isfinite(number)}
    earned = found["return"] if math.isfinite(found["return"]) else None
    return {"success": found["success"], "return": earned, "length": found["steps"], "metrics": metrics}


def _failure(found: Mapping[str, Any], played: PlayedEpisode | None) -> str:
    """Why the video shows another course than the counted episode had; "" if it shows that."""
    if played is None:
        return ""
    if not played.failure and (played.success, played.env_steps) != (found["success"], found["steps"]):
        return f"the video shows another course: {counted(played.env_steps, 'step')}, success {played.success}"
    return played.failure


def _file_name(line: Mapping[str, Any]) -> str:
    evaluation = re.sub(r"[^A-Za-z0-9._-]+", "-", line["evaluation"])[:60]
    suffix = ".webp" if importlib.util.find_spec("av") is None else ".mp4"
    number = f"{line['index']:04d}-{line['sample']}-{line['seed']:x}"
    return f"{evaluation}-v{line['version']:06d}-{line['mode']}-{number}{suffix}"


def _write(path: Path, pictures: Sequence[NDArray[np.uint8]]) -> None:
    rate = frame_rate(len(pictures))
    with atomic_write(path) as unfinished:
        if path.suffix == ".mp4":
            write_mp4(unfinished, map(_even, pictures), rate)
            return
        first, *rest = map(enlarged, pictures)
        first.save(
            unfinished, "WEBP", save_all=True, append_images=rest, duration=1000 // rate, quality=_QUALITY, loop=0
        )


def _even(picture: NDArray[np.uint8]) -> Image.Image:
    """The picture at a tile's size, with a last row and column again where a video codec wants even sizes."""
    array = np.asarray(enlarged(picture))
    return Image.fromarray(np.pad(array, ((0, array.shape[0] % 2), (0, array.shape[1] % 2), (0, 0)), mode="edge"))
