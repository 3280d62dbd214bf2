"""Images of a dataset: PNG in a parquet column, or the frames of an mp4."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyrhythm.errors import MissingError, RunFolderError, pip_install


def as_images(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Images [T,H,W,C] of an array whose channels may come first or be absent."""
    if array.shape[1:] == shape or array.ndim == 3:
        return array.reshape(len(array), *shape)
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1))


def png(image: NDArray[np.uint8]) -> bytes:
    """An image [H,W,C] as PNG, without loss."""
    stream = BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def decoded(data: bytes) -> NDArray[np.uint8]:
    """The image [H,W,C] of a PNG or JPEG; C is 1 for grey, else 3."""
    with Image.open(BytesIO(data)) as image:
        found = np.asarray(image if image.mode == "L" else image.convert("RGB"))
    return found.reshape(*found.shape[:2], -1)


def as_array(images: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Images [T,H,W,C] as an environment shows them: its array's shape, with channels last, first or absent."""
    if images.shape[1:] == shape or len(shape) == 2:
        return images.reshape(len(images), *shape)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def require_video(path: Path) -> None:
    """Raise MissingError if this machine cannot read videos."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise MissingError(
            f"{path} holds videos, and the package imageio-ffmpeg is not installed; run: "
            f"{pip_install(repr('polyrhythm[video]'))}"
        )


def video_frames(file: Path, wanted: set[int], size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """The wanted frames [H,W,3] of an mp4, in order. size: H, W. RunFolderError: it has fewer, or is damaged.

    Waits for: the decoder's next frame. Unblocked by: that frame, or the end of the decoder, which reads a file only.
    """
    import imageio_ffmpeg

    height, width = size
    nbytes, number, last = height * width * 3, 0, max(wanted)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(file), "-fps_mode", "passthrough"]
    command += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    with subprocess.Popen(  # noqa: S603 - no shell; ffmpeg of the package, a file of the dataset
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as decoder:
        assert decoder.stdout is not None
        try:
            while number <= last:
                frame = decoder.stdout.read(nbytes)
                if len(frame) < nbytes:
                    raise RunFolderError(
                        f"{file} has {number} frames of {height}x{width} and should have {last + 1}; copy it again"
                    )
                if number in wanted:
                    yield np.frombuffer(frame, np.uint8).reshape(height, width, 3)
                number += 1
        finally:
            decoder.kill()
