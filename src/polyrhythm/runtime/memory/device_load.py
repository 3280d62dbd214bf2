"""A process that keeps a device busy, and says how fast: `python -m polyrhythm.runtime.memory.device_load cuda:0`.

It writes `ready` after its first product of two matrices, multiplies on, and answers each line `[began, ended]`, a
window of the monotonic clock that may end later, with the products per second in it. It ends with its standard input.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import deque
from typing import IO

import torch

#: Edge of the matrices: a product takes a GPU about as long as a layer of a pass.
_EDGE, _EDGE_ON_CPU = 4096, 128


def multiply(line: IO[bytes], device: str) -> None:
    """Multiply until standard input ends. line: where answers go."""
    on_device = torch.device(device).type != "cpu"
    edge, dtype = (_EDGE, torch.bfloat16) if on_device else (_EDGE_ON_CPU, torch.float32)
    factor = torch.full((edge, edge), 1.0 / edge, device=device, dtype=dtype)
    ends: deque[float] = deque(maxlen=1_000_000)
    asked: tuple[float, float] | None = None
    while True:
        product = factor @ factor
        if on_device:
            torch.cuda.synchronize(product.device)
        if not ends:
            line.write(b"ready\n")
        ends.append(time.monotonic())
        if asked is None and select.select([sys.stdin.buffer], [], [], 0)[0]:
            if not (content := sys.stdin.buffer.readline()):
                return  # who asked is gone
            asked = json.loads(content)
        if asked is not None and ends[-1] >= asked[1]:
            began, ended = asked
            count = sum(began <= end < ended for end in ends)
            line.write(json.dumps(count / max(ended - began, 1e-9)).encode() + b"\n")
            asked = None


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # for what a driver may print
    multiply(answers, sys.argv[1])
