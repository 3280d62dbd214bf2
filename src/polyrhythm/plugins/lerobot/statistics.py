"""Statistics of features for normalisation, as in stats.json: mean, std, min, max, quantiles and count.

Of an array they are over all frames, entry by entry; of an image by channel, over its pixels divided by 255, with the
shape [C,1,1]. std is the population's. Quantiles are linearly interpolated (`numpy.quantile`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def array_statistics(values: NDArray[Any]) -> dict[str, Any]:
    """Statistics of an array [N,D], over the N frames; lists of D numbers, and count [1]."""
    exact = np.asarray(values, np.float64).reshape(len(values), -1)
    return _statistics(exact, len(values), (exact.shape[1],))


def image_statistics(images: NDArray[np.uint8]) -> dict[str, Any]:
    """Statistics by channel of images [N,H,W,C], in 0..1; nested lists [C,1,1], and count [1] of images."""
    channels = images.shape[-1]
    return _statistics(images.reshape(-1, channels) / 255.0, len(images), (channels, 1, 1))


def _statistics(values: NDArray[np.float64], count: int, shape: tuple[int, ...]) -> dict[str, Any]:
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    found = {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }
    return {name: x.reshape(shape).tolist() for name, x in found.items()} | {"count": [count]}
