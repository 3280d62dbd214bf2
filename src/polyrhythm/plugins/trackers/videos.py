"""Videos as animated images, for trackers that show no MP4."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image


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
    data = BytesIO()
    frames[0].save(data, "gif", save_all=True, append_images=frames[1:], duration=round(1000 / rate), loop=0)
    return data.getvalue(), frames[0].width, frames[0].height
