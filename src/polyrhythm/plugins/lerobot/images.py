"""Images of a dataset in a parquet column, as PNG or JPEG."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyrhythm.errors import MissingError, install_command


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


def decoded(data: bytes, size: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """The image [H,W,C] of a PNG or JPEG; C is 1 for grey, else 3. size: [H,W,C] that it must have; then grey becomes
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
    """Images [T,H,W,C] as an environment shows them: its array's shape, with channels last, first or absent."""
    if images.shape[1:] == shape or len(shape) == 2:
        return images.reshape(len(images), *shape)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def require_video(path: Path) -> None:
    """Raise MissingError if this machine cannot read videos."""
    if importlib.util.find_spec("av") is None:
        raise MissingError(f"{path} holds videos, and the package av is not installed; run: {install_command('video')}")
