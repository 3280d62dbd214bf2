"""Memory of a local run with sixteen environments in as many simulator processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.worker import Answer, Worker

SIMULATORS = 16
#: Most memory in MB that the design allows.
LIMIT_MB = 1200.0
_UPDATES = 3


def run() -> dict[str, Any]:
    """CartPole by gymnasium, one row in each simulator, one generator, one trainer, after a few updates.

    Returns `memory_16_mb`: proportional set size of all processes, the main one included; the limit; if it is kept.
    """
    with Worker(f"{__name__}:sixteen") as worker:
        found = float(worker.ask())
    return {"memory_16_mb": found, "memory_16_limit_mb": LIMIT_MB, "memory_16_within_limit": found <= LIMIT_MB}


@contextmanager
def sixteen() -> Iterator[Answer]:
    from polyrhythm.config.load import validate
    from polyrhythm_bench.harness.running import running

    config = validate(
        {
            "name": "memory",
            "env": "gymnasium:CartPole-v1",
            "policy": {"type": "categorical"},
            "rollout": {"simulators": SIMULATORS, "rows": 1},
            "training": {"versions": _UPDATES, "mini_batch_samples": SIMULATORS, "epochs": 1, "minibatch_steps": 0},
        }
    )
    with running(config) as pipeline:

        def answer() -> float:
            pipeline.loop.train_until(_UPDATES)
            return resources.pss_mb()

        yield answer
