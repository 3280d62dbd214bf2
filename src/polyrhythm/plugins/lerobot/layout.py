"""The LeRobotDataset v3.0 layout: paths, features, and the names of an environment's arrays.

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
from collections.abc import Mapping
from typing import Any

from polyrhythm.errors import MissingError, install_command
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
