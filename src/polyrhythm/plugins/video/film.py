"""Films an evaluation's first episodes: a grid of them, each marked at its end, as GIF or MP4."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, install_command
from polyrhythm.files import atomic_write
from polyrhythm.observe.run_folder import take_file
from polyrhythm.pipeline.array_specs import step_settings
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.evaluation.standalone import Video
from polyrhythm.plugins.video.playback import EDGE, PlayedEpisode, play, reduced
from polyrhythm.policies.base import Policy
from polyrhythm.scheduler.records import Episode
from polyrhythm.specs import EnvSpec, Task

#: Maximum number of pictures of an episode, not counting the last.
_PICTURES = 200
#: Maximum and minimum frames per second; target length of the video; time that the last frame stays.
_MOST_RATE, _LEAST_RATE, _SECONDS, _HOLD_S = 10, 4, 4.0, 1.5
#: Border of an episode's picture, and the height of a text line below it, in pixels.
_FRAME, _LINE = 4, 15
_BACKGROUND, _INK, _RUNNING = (24, 24, 27), (228, 228, 231), (82, 82, 91)
_MARKS = {True: (34, 197, 94), False: (239, 68, 68), None: (96, 165, 250)}
_FAILED = (245, 158, 11)


class Clip(NamedTuple):
    """An episode of a video.

    pictures: uint8 [H,W,3], one or more; caption: the task; outcome: the result as text; success: None if not measured;
    failed: it ended by a failure.
    """

    pictures: Sequence[NDArray[np.uint8]]
    caption: str
    outcome: str
    success: bool | None
    failed: bool = False


def check(video: Video) -> None:
    """Raise ConfigError unless this machine can write a video with this suffix, RunFolderError if the file exists."""
    path = video.file
    if path.suffix not in (".gif", ".mp4"):
        raise ConfigError(f"video = {path}: its name must end with .gif or .mp4; rename it")
    if path.suffix == ".mp4" and importlib.util.find_spec("av") is None:
        install = install_command("video")
        raise ConfigError(f"video = {path}: mp4 needs the package av; run {install}, or name a .gif")
    take_file(path)


def film(
    config: RunConfig, policy: Policy, spec: EnvSpec, episodes: Sequence[Episode], video: Video
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Play the first episodes, before they are evaluated, so that a drawing failure surfaces early.

    The result takes the evaluation's, writes the file and returns its entry there, with the file by its name in
    `files`. Errors: see `playback.play`.
    """
    file, played = video.file, list(play_episodes(config, policy, episodes[: video.episodes]))

    def write(result: Mapping[str, Any]) -> dict[str, Any]:
        measured = result["rate"] is not None
        write_video(file, _clips(played, spec.tasks, measured=measured))
        found: dict[str, Any] = {"file": str(file), "episodes": len(played), "files": {video.name: file}}
        if failed := sum(bool(one.failure) for one in played):
            found["failed"] = failed
        if measured:
            found["successes"] = sum(bool(one.success) and not one.failure for one in played)
        return found

    return write


def play_episodes(config: RunConfig, policy: Policy, episodes: Sequence[Episode]) -> Iterator[PlayedEpisode]:
    """`playback.play` with the settings of a run, and as many pictures as a video shows."""
    step = step_settings(config, policy.chunk)
    return play(env_settings(config), policy, episodes, step, _PICTURES, config.rollout.rows)


def _clips(played: Sequence[PlayedEpisode], tasks: Sequence[Task], *, measured: bool) -> list[Clip]:
    blank = next((np.zeros_like(one.pictures[0]) for one in played if one.pictures), np.zeros((64, 64, 3), np.uint8))
    clips = []
    for one in played:
        ended = f"return {one.episode_return:.4g}"
        if one.failure:
            ended = f"failed: {one.failure}"
        elif measured:
            ended = f"success, {one.env_steps} steps" if one.success else "no success"
        success = bool(one.success) if measured else None
        caption = tasks[one.episode.instruction].instruction
        clips.append(Clip(one.pictures or [blank], caption, ended, success, bool(one.failure)))
    return clips


def write_video(path: Path, clips: Sequence[Clip]) -> None:
    """Write the clips side by side, in the format of the suffix."""
    with atomic_write(path) as unfinished:
        if path.suffix == ".mp4":
            rate = frame_rate(max(len(clip.pictures) for clip in clips))
            write_mp4(unfinished, _with_hold(grids(clips), round(rate * _HOLD_S)), rate)
            return
        first, *rest = (grid.quantize(255, dither=Image.Dither.NONE) for grid in grids(clips))
        pause = 1000 // frame_rate(max(len(clip.pictures) for clip in clips))
        durations = [pause] * len(rest) + [pause + round(1000 * _HOLD_S)]
        first.save(unfinished, "GIF", save_all=True, append_images=rest, duration=durations, loop=0)


def grids(clips: Sequence[Clip]) -> Iterator[Image.Image]:
    """Frames of the video, nearly square grids of tiles; an ended episode keeps its last picture and its mark."""
    columns = math.ceil(math.sqrt(len(clips)))
    rows = math.ceil(len(clips) / columns)
    longest = max(len(clip.pictures) for clip in clips)
    width, height = _tile(clips[0], 0).size
    for moment in range(longest):
        grid = Image.new("RGB", (columns * width, rows * height), _BACKGROUND)
        for place, clip in enumerate(clips):
            grid.paste(_tile(clip, moment), (place % columns * width, place // columns * height))
        yield grid


def frame_rate(longest: int) -> int:
    """Frames per second of a video with so many pictures in its longest episode."""
    return min(_MOST_RATE, max(_LEAST_RATE, round(longest / _SECONDS)))


def _tile(clip: Clip, moment: int) -> Image.Image:
    last = len(clip.pictures) - 1
    picture = enlarged(clip.pictures[min(moment, last)])
    ended = moment >= last
    colour = (_FAILED if clip.failed else _MARKS[clip.success]) if ended else _RUNNING
    # Video codecs need even sizes.
    width = 2 * math.ceil((picture.width + 2 * _FRAME + 2) / 2)
    height = 2 * math.ceil((picture.height + 2 * _FRAME + 2 * _LINE + 4) / 2)
    tile = Image.new("RGB", (width, height), _BACKGROUND)
    draw = ImageDraw.Draw(tile)
    draw.rectangle((0, 0, picture.width + 2 * _FRAME - 1, picture.height + 2 * _FRAME - 1), fill=colour)
    tile.paste(picture, (_FRAME, _FRAME))
    top, font = picture.height + 2 * _FRAME + 1, ImageFont.load_default(11)
    outcome = clip.outcome if ended else ""
    draw.text((_FRAME, top), _fitting(clip.caption, font, width - 2 * _FRAME), fill=_INK, font=font)
    draw.text((_FRAME, top + _LINE), _fitting(outcome, font, width - 2 * _FRAME), fill=colour, font=font)
    return tile


def enlarged(picture: NDArray[np.uint8]) -> Image.Image:
    """The picture at about a tile's size."""
    found = Image.fromarray(reduced(picture))
    factor = EDGE // max(found.size)  # an integer, so that small pictures stay sharp
    return found.resize((factor * found.width, factor * found.height), Image.Resampling.NEAREST)


def _fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text.rstrip()}..."


def write_mp4(path: Path, frames: Iterator[Image.Image], rate: int) -> None:
    """H.264 in pixels that every browser plays. frames: of one size, even in both directions; rate: per second."""
    import av

    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream: Any = container.add_stream("libx264", rate=rate)
        stream.pix_fmt = "yuv420p"
        for number, picture in enumerate(frames):
            if number == 0:
                stream.width, stream.height = picture.size
            frame = av.VideoFrame.from_image(picture)
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _with_hold(grids: Iterator[Image.Image], held: int) -> Iterator[Image.Image]:
    for grid in grids:
        yield grid
    yield from repeat(grid, held)
