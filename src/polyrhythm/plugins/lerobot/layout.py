"""The LeRobotDataset v3.0 layout: paths, features, the names of an environment's arrays, and their images: PNG or JPEG
in a parquet column, or video frames by time, decoded with PyAV (extra `video`).

    meta/info.json                                version, totals, fps, features, path patterns
    meta/stats.json                               statistics by feature
    meta/tasks.parquet                            task_index by sentence
    meta/episodes/chunk-000/file-000.parquet      a row per episode: length, tasks, location of its frames
    data/chunk-000/file-000.parquet               a row per frame; images as PNG
    videos/KEY/chunk-000/file-000.mp4             or cameras as video (read, never written here)
    meta/polyrhythm.json                          our description of the recording, ignored by other readers

A frame is one primitive action. Arrays that do not have one dimension are stored flat, images as [H,W,3] or [H,W,1].
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyrhythm.errors import MissingError, RunFolderError, install_command
from polyrhythm.specs import ArraySpec, EnvSpec

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
#: Our own file; also the mark of a dataset that was recorded here.
OURS = "meta/polyrhythm.json"
#: Files in a folder chunk-NNN.
CHUNK_FILES = 1000

ACTION, STATE, CAMERA, OTHER = "action", "observation.state", "observation.images.", "observation."
DONE, SUCCESS = "next.done", "next.success"
#: Columns that every dataset has besides its features, one number a frame.
INDICES = {"timestamp": "float32"} | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")


def require_pyarrow() -> None:
    """MissingError: pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingError(
            "a folder of demonstrations needs the package pyarrow, which is not installed; run: "
            f"{install_command('lerobot')}, or use a FILE.npz"
        )


def file_place(number: int) -> dict[str, int]:
    """Folder and file number of the n-th file."""
    return {"chunk_index": number // CHUNK_FILES, "file_index": number % CHUNK_FILES}


def image_shape(array: ArraySpec) -> tuple[int, int, int] | None:
    """[H,W,C] of an image with 1 or 3 channels, which may come first or, if 1, be absent; None for other arrays."""
    shape = array.shape
    if array.dtype != "uint8" or len(shape) not in (2, 3) or min(sorted(shape)[-2:]) < 8:
        return None
    if len(shape) == 2:
        return (shape[0], shape[1], 1)
    if shape[2] in (1, 3):
        return (shape[0], shape[1], shape[2])
    return (shape[1], shape[2], shape[0]) if shape[0] in (1, 3) else None


def keys_of(spec: EnvSpec, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Feature key of each of the environment's arrays. given: keys that a user chose.

    Images are observation.images.NAME. The array named state, or the only array that is not an image, is
    observation.state; others are observation.NAME.
    """
    arrays = [name for name, array in spec.observation.items() if image_shape(array) is None]
    state = "state" if "state" in arrays else arrays[0] if len(arrays) == 1 else None
    keys = {}
    for name in spec.observation:
        plain = name.replace("/", "_")
        keys[name] = STATE if name == state else (OTHER if name in arrays else CAMERA) + plain
    return keys | dict(given or {})


def features_of(spec: EnvSpec) -> dict[str, dict[str, Any]]:
    """The features of info.json, including index columns."""
    found: dict[str, dict[str, Any]] = {}
    for name, key in keys_of(spec).items():
        array = spec.observation[name]
        image = image_shape(array)
        if image is not None:
            found[key] = {"dtype": "image", "shape": list(image), "names": ["height", "width", "channels"]}
        else:
            found[key] = {"dtype": array.dtype, "shape": [math.prod(array.shape)], "names": None}
    found[ACTION] = {"dtype": spec.action.dtype, "shape": [spec.action.dim], "names": None}
    for key in (DONE, SUCCESS):
        found[key] = {"dtype": "bool", "shape": [1], "names": None}
    return found | {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in INDICES.items()}


def sentences_of(spec: EnvSpec) -> list[str]:
    """The sentence of each task in a dataset: its instruction, or its name if several tasks share the instruction."""
    count = Counter(task.instruction for task in spec.tasks)
    return [task.instruction if count[task.instruction] == 1 else task.name for task in spec.tasks]


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
