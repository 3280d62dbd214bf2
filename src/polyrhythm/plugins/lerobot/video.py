"""Images of a dataset: PNG or JPEG in a parquet column, or video frames by time, decoded with PyAV (extra `video`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
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
    """An image [H,W,C] as lossless PNG."""
    stream = BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def decoded(data: bytes, size: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """The image [H,W,C] of a PNG or JPEG; C is 1 for grey, else 3. size: required [H,W,C]; grey is then expanded to
    colour. ValueError: it is damaged, has another size, or more than 8 bits."""
    try:
        with Image.open(BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"its pixels have more than 8 bits (mode {image.mode})")
            colour = size is not None and size[2] == 3
            found = np.asarray(image if image.mode == "L" and not colour else image.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"it cannot be decoded: {error}") from error
    found = found.reshape(*found.shape[:2], -1)
    if size is not None and list(found.shape) != list(size):
        raise ValueError(f"it is {list(found.shape)}, and info.json says {list(size)}")
    return found


def as_array(images: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Images [T,H,W,C] in the environment's shape, with channels last, first or absent."""
    if images.shape[1:] == shape or len(shape) == 2:
        return images.reshape(len(images), *shape)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def require_video(path: Path) -> None:
    """MissingError: PyAV is not installed."""
    if importlib.util.find_spec("av") is None:
        raise MissingError(f"{path} holds videos, and the package av is not installed; run: {install_command('video')}")


#: A frame shows a time if it is within this many seconds of it. Containers round times to 1/90,000 s or finer and
#: timestamps are float32; LeRobot's reader allows 0.0001.
TOLERANCE_S = 0.001
#: Seconds forward that are decoded rather than skipped by seeking.
_DECODED_S = 10.0


class _Stream:
    """An open video and the last decoded frame. Decoder errors become RunFolderError."""

    def __init__(self, file: Path) -> None:
        import av

        self.file = file
        self._damaged = (av.FFmpegError, OSError, ValueError)
        try:
            self._container: Any = av.open(str(file), format="mp4")  # a playlist may name other files
        except self._damaged as error:
            raise RunFolderError(f"{file} cannot be read as a video ({error}); copy it again") from error
        if not self._container.streams.video:
            self._container.close()
            raise RunFolderError(f"{file} has no video stream; copy it again")
        self._stream = self._container.streams.video[0]
        self._frames: Iterator[Any] = self._container.decode(self._stream)
        self.frame: Any = None

    @property
    def size(self) -> tuple[int, int]:
        return self._stream.height, self._stream.width

    @property
    def time(self) -> float:
        """Time of the last frame in seconds; minus infinity before the first one."""
        return float("-inf") if self.frame is None else float(self.frame.time)

    def decode(self) -> bool:
        try:
            found = next((frame for frame in self._frames if frame.time is not None), None)
        except self._damaged as error:
            raise RunFolderError(f"{self.file} is damaged after {self.time:.3f} s ({error}); copy it again") from error
        if found is not None:
            self.frame = found
        return found is not None

    def seek(self, time: float) -> None:
        """Seek to the last key frame at or before this time."""
        try:
            self._container.seek(int(time / self._stream.time_base), stream=self._stream)
        except self._damaged as error:
            raise RunFolderError(f"{self.file} has no frame at {time:.3f} s ({error}); copy it again") from error
        self._frames, self.frame = self._container.decode(self._stream), None

    def close(self) -> None:
        self._container.close()


def check_size(file: Path, size: tuple[int, int]) -> None:
    """RunFolderError: the file is not a video with frames of this H, W."""
    stream = _Stream(file)
    stream.close()
    _refuse_other_size(file, stream.size, size)


def _refuse_other_size(file: Path, found: tuple[int, int], size: tuple[int, int]) -> None:
    if found != size:
        raise RunFolderError(
            f"{file} has frames of {found[0]}x{found[1]}, and info.json says {size[0]}x{size[1]}; correct one of them"
        )


class VideoFrames:
    """Reads video frames by camera. A camera's video stays open at the end of the previous episode, so a file with many
    episodes is decoded once.

    Invariant: a camera has at most one open video, and `close` closes all. decoded: number of decoded frames.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self.decoded = 0

    def take(self, camera: str, file: Path, times: Sequence[float], size: tuple[int, int]) -> NDArray[np.uint8]:
        """The frames [n,H,W,3] at these ascending times in seconds. size: H, W.

        RunFolderError: no frame within `TOLERANCE_S` of a time, a frame of another size, or a damaged file.
        """
        stream = self._at(camera, file, times[0])
        frames = np.empty((len(times), *size, 3), np.uint8)
        for place, time in enumerate(times):
            while stream.time < time - TOLERANCE_S and stream.decode():
                self.decoded += 1
            frame = stream.frame
            if frame is None or abs(stream.time - time) > TOLERANCE_S:
                nearest = "none" if frame is None else f"{stream.time:.3f} s"
                raise RunFolderError(
                    f"{file} has no frame at {time:.3f} s (the next one: {nearest}), the time of a frame by timestamp "
                    "and from_timestamp; correct these, or convert the video to the dataset's fps"
                )
            _refuse_other_size(file, (frame.height, frame.width), size)
            frames[place] = frame.to_ndarray(format="rgb24")
        return frames

    def _at(self, camera: str, file: Path, first_s: float) -> _Stream:
        """The camera's stream of this file, positioned at or before this time."""
        stream = self._streams.get(camera)
        if stream is not None and stream.file != file:
            self._streams.pop(camera).close()
            stream = None
        if stream is None:
            stream = self._streams[camera] = _Stream(file)
        ahead = first_s - stream.time
        if stream.frame is not None and not -TOLERANCE_S <= ahead <= _DECODED_S:
            stream.seek(first_s)
        return stream

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
