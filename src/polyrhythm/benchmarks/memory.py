"""Memory of a local run with sixteen environments in as many simulator processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from polyrhythm.benchmarks import resources
from polyrhythm.benchmarks.worker import Answer, Worker

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
    from polyrhythm.pipeline.build import build_pipeline
    from polyrhythm.pipeline.check import check

    checked = check(
        validate(
            {
                "name": "memory",
                "env": "gymnasium:CartPole-v1",
                "policy": {"type": "categorical"},
                "rollout": {"simulators": SIMULATORS, "rows": 1},
                "training": {"versions": _UPDATES, "mini_batch_samples": SIMULATORS},
            }
        )
    )
    with (
        tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder,
        closing(build_pipeline(checked.config, checked.policy, Path(folder))) as pipeline,
    ):

        def answer() -> float:
            pipeline.loop.train_until(_UPDATES)
            return resources.pss_mb()

        yield answer
