"""Episodes as a moving picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.evaluation.standalone import Video
from polyrhythm.plugins.video.film import Clip, check, grids, write_video
from polyrhythm.plugins.video.playback import reduced

GREEN, RED, BLUE, GREY = (34, 197, 94), (239, 68, 68), (96, 165, 250), (82, 82, 91)
ORANGE = (245, 158, 11)


def _clip(pictures: int, success: bool | None, shade: int = 200) -> Clip:
    shown = [np.full((12, 16, 3), shade + index, np.uint8) for index in range(pictures)]
    return Clip(shown, "push the button of the coffee machine, then close the door", "return 3", success)


def _marks(grid: Image.Image) -> list[object]:
    width, height = grid.size[0] // 2, grid.size[1] // 2
    return [grid.getpixel((x * width + 1, y * height + 1)) for y in range(2) for x in range(2)]


def test_an_episode_stays_with_its_mark_when_it_has_ended() -> None:
    shown = list(grids([_clip(1, True), _clip(3, False), _clip(2, None)]))
    assert len(shown) == 3
    assert [_marks(grid)[:3] for grid in shown] == [[GREEN, GREY, GREY], [GREEN, GREY, BLUE], [GREEN, RED, BLUE]]
    assert shown[-1].getpixel((20, 20)) == (200, 200, 200)
    assert all(size % 2 == 0 for size in shown[0].size), "video codecs want even sizes"


def test_an_episode_that_failed_has_a_mark_of_its_own() -> None:
    shown = list(grids([_clip(1, True), _clip(2, True)._replace(failed=True)]))
    width = shown[0].size[0] // 2
    assert [grid.getpixel((width + 1, 1)) for grid in shown] == [GREY, ORANGE]


def test_large_pictures_are_made_smaller_and_small_ones_stay() -> None:
    assert reduced(np.zeros((400, 600, 3), np.uint8)).shape == (128, 192, 3)
    small = np.zeros((64, 64, 3), np.uint8)
    assert reduced(small) is small


def test_a_gif_has_every_picture(tmp_path: Path) -> None:
    file = tmp_path / "shown.gif"
    write_video(file, [_clip(5, True), _clip(3, False)])
    with Image.open(file) as found:
        assert found.n_frames == 5
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="the video extra is not installed")
def test_an_mp4_is_written_where_the_package_is_there(tmp_path: Path) -> None:
    file = tmp_path / "shown.mp4"
    write_video(file, [_clip(5, True)])
    import av

    with av.open(str(file)) as found:
        times = [frame.time for frame in found.decode(video=0)]
    assert len(times) == 5 + 6, "the last picture stays for 1.5 s"
    assert np.allclose(np.diff(times), 1 / 4)


def test_what_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end with \.gif or \.mp4"):
        check(Video(tmp_path / "shown.avi"))
    if importlib.util.find_spec("av") is None:
        with pytest.raises(ConfigError, match=r"-m pip install .*'polyrhythm\[video\]', or name a \.gif"):
            check(Video(tmp_path / "shown.mp4"))
