"""Renders a frame of a Meta-World task as a run does: `python -m` this module and the task.

It runs in a separate process, because a broken driver can hang or crash it. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.simulators.metaworld.env import MetaWorldSettings


def probe(task: str) -> dict[str, float]:
    """first_s: seconds until the first frame; frame_ms: time of the second; shades: distinct values in it."""
    batch = MetaWorldSettings(tasks=(task,)).build(1)
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    began = time.perf_counter()
    try:
        batch.reset([0], [0], [0])
        batch.observe([0], out)
        first = time.perf_counter()
        batch.observe([0], out)
        frame = time.perf_counter() - first
    finally:
        batch.close()
    return {"first_s": first - began, "frame_ms": 1000 * frame, "shades": len(np.unique(out["image"]))}


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(probe(sys.argv[1])) + "\n")
    except (PolyrhythmError, ImportError) as error:
        sys.exit(str(error))
