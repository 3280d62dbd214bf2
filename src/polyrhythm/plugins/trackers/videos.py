"""Videos in formats that trackers show: animated GIF, for all of them, and MP4."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image, ImageSequence


def with_common_format(file: Path, folder: Path) -> Path:
    """The file if it is a .gif or .mp4; a .webp as a .gif in `folder`."""
    if file.suffix != ".webp":
        return file
    copy = folder / f"{file.stem}.gif"
    with Image.open(file) as image:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
        copy.write_bytes(_gif(frames, image.info.get("duration", 100)))
    return copy


def as_gif(file: Path) -> tuple[bytes, int, int]:
    """The content of a GIF, or an MP4 converted to one; its width and height in pixels."""
    if file.suffix == ".gif":
        with Image.open(file) as image:
            return file.read_bytes(), image.width, image.height
    import av

    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 10)
        frames = [frame.to_image() for frame in container.decode(stream)]
    return _gif(frames, round(1000 / rate)), frames[0].width, frames[0].height


def _gif(frames: list[Image.Image], pause_ms: int) -> bytes:
    data = BytesIO()
    frames[0].save(data, "gif", save_all=True, append_images=frames[1:], duration=pause_ms, loop=0)
    return data.getvalue()
