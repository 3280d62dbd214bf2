"""Images of a dataset: PNG in a parquet column, or the frames of an mp4."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyrhythm.errors import MissingError, RunFolderError, install_command


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
            f"{install_command('video')}"
        )


def ffmpeg(file: Path) -> list[str]:
    """The command that writes the frames of an mp4 as raw RGB."""
    import imageio_ffmpeg

    decode = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(file), "-fps_mode", "passthrough"]
    return [*decode, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]


@dataclass(slots=True)
class _Decoder:
    """A decoder of a file that has given the frames before `number`."""

    file: Path
    process: subprocess.Popen[bytes]
    number: int = 0

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class VideoFrames:
    """Frames of a dataset's videos by number. A camera's decoder goes on where the episode before ended, so that a file
    of many episodes is decoded once; only frames before that start it again. command: of the decoder of a file.

    Invariant: a camera has one decoder at most, and `close` ends all. decoded: frames decoded so far.
    """

    def __init__(self, command: Callable[[Path], list[str]] = ffmpeg) -> None:
        self._command = command
        self._decoders: dict[str, _Decoder] = {}
        self.decoded = 0

    def take(self, camera: str, file: Path, wanted: Sequence[int], size: tuple[int, int]) -> NDArray[np.uint8]:
        """The wanted frames [n,H,W,3], whose numbers ascend. size: H, W. RunFolderError: it has fewer, or is damaged.

        Waits for: the decoder's next frame. Unblocked by: that frame, or the end of the decoder, which reads a file
        only.
        """
        decoder = self._at(camera, file, wanted[0])
        assert decoder.process.stdout is not None
        frames, (height, width) = np.empty((len(wanted), *size, 3), np.uint8), size
        for place, number in enumerate(wanted):
            while decoder.number <= number:
                frame = decoder.process.stdout.read(height * width * 3)
                if len(frame) < height * width * 3:
                    raise RunFolderError(
                        f"{file} has {decoder.number} frames of {height}x{width} and should have {wanted[-1] + 1}; "
                        "copy it again"
                    )
                decoder.number += 1
                self.decoded += 1
            frames[place] = np.frombuffer(frame, np.uint8).reshape(height, width, 3)
        return frames

    def _at(self, camera: str, file: Path, first: int) -> _Decoder:
        """The camera's decoder, of this file and not beyond its frame `first`."""
        found = self._decoders.get(camera)
        if found is not None and (found.file != file or found.number > first):
            self._decoders.pop(camera).close()
            found = None
        if found is None:
            process = subprocess.Popen(  # noqa: S603 - no shell; ffmpeg of the package, a file of the dataset
                self._command(file), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            found = self._decoders[camera] = _Decoder(file, process)
        return found

    def close(self) -> None:
        """End all decoders."""
        for decoder in self._decoders.values():
            decoder.close()
        self._decoders.clear()
