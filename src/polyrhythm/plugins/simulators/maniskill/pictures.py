"""Pictures of cameras that draw at their own size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def resized(pictures: NDArray[Any], size: tuple[int, int]) -> NDArray[np.uint8]:
    """[B,H,W,3] as uint8 of this height and width; bilinear, as Pillow does it, where they differ."""
    if pictures.shape[1:3] == size:
        return pictures.astype(np.uint8, copy=False)
    height, width = size
    small = [
        Image.fromarray(one.astype(np.uint8)).resize((width, height), Image.Resampling.BILINEAR) for one in pictures
    ]
    return np.stack([np.asarray(one) for one in small])
