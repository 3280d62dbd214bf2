"""Simulates our own H200 rows (bench/results/one_h200.md): π0, 64 environments and training on one device.

Stage times are those measured alone: a pass of 64 rows 0.39 s, an update of 640 chunk steps 5.5 s, drawing 64 frames
0.2 s, on the device, one after another. Where frames are drawn on the cores, a chunk step's time is fitted to the
lock-step row. Passes and an update beside each other take as long as `SWITCHING` says, which is the mean of two of
them; the third is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm_bench.papers.stages import SWITCHING

#: Seconds of a pass of 64 rows, of an update, of drawing on the device, of a step with drawing on the cores (fitted).
PASS_S, UPDATE_S, DRAW_S, CORES_S = 0.39, 5.5, 0.20, 0.81
#: Simulators of four rows, chunk steps of a version, transitions of a version.
SIMULATORS, CHUNK_STEPS, TRANSITIONS = 16, 10, 3200
#: Versions simulated, left out at the start, counted: rollout is ahead by the lag, and must still be so at the end.
VERSIONS, WARM_UP, COUNTED = 10, 2, 5


@dataclass(frozen=True, slots=True)
class Row:
    """A measured row. full: asynchronous rollout and training; cores: frames are drawn on the cores; mps: under
    NVIDIA's MPS, which takes the cost of switching away."""

    name: str
    published: float
    rollout: bool = False
    training: bool = False
    cores: bool = False
    mps: bool = False
    fitted: bool = False


ROWS = (
    Row("H200, EGL: lock-step", 272.0),
    Row("H200, EGL: asynchronous rollout", 270.5, rollout=True),
    Row("H200, EGL: asynchronous training", 275.8, training=True),
    Row("H200, EGL: both", 268.1, rollout=True, training=True),
    Row("H200, EGL, MPS: both", 307.0, rollout=True, training=True, mps=True),
    Row("H200, OSMesa: lock-step", 176.0, cores=True, fitted=True),
    Row("H200, OSMesa: both", 312.0, rollout=True, training=True, cores=True),
)


#: A pass or an update beside another on the device: name, seconds alone and beside, whether `SWITCHING` is from it.
BESIDE = (
    ("a pass of 64 rows beside an update, s", 0.39, 0.85, True),
    ("an update beside passes, s", 5.5, 11.0, True),
    ("a pass of 32 rows beside an update, s", 0.20, 0.54, False),
)


def rate(row: Row) -> float:
    """Transitions per second of the simulated device."""
    # A simulator draws its rows' frames one after another; all simulators share the device, or the cores (number 1).
    step_s = (CORES_S if row.cores else DRAW_S) / SIMULATORS
    settings = ClusterSettings.model_validate(
        {
            "switching": 0.0 if row.mps else SWITCHING,
            "versions": VERSIONS,
            "scheduler": {
                "batch_size": SIMULATORS,
                "max_lag": int(row.training),
                "on_update": "continue" if row.training else "drain",
                "batching": "dynamic" if row.rollout else "lockstep",
                "max_requests": SIMULATORS // 2,
                "max_wait_s": 0.05,
            },
            "simulators": [
                {"count": SIMULATORS, "steps": CHUNK_STEPS, "step": f"{step_s}s", "devices": [int(row.cores)]}
            ],
            "generators": [{"devices": [0], "serve": f"0ms+{PASS_S / SIMULATORS}s"}],
            "trainer": {"devices": [0], "update": f"{UPDATE_S}s"},
        }
    )
    cluster = VirtualCluster(settings)
    ends: list[float] = []
    cluster.driver.observer = lambda now, event, _: ends.append(now) if type(event).__name__ == "UpdateDone" else None
    cluster.run()
    return TRANSITIONS * COUNTED / (ends[WARM_UP + COUNTED] - ends[WARM_UP])


def rows() -> Iterator[dict[str, Any]]:
    """A row for each measured rate, and for each pass or update beside another."""
    for row in ROWS:
        mode = "full" if row.rollout and row.training else ""
        yield _row(row.name, mode, row.published, rate(row), fitted=row.fitted)
    yield from beside()


def beside() -> Iterator[dict[str, Any]]:
    """A row for each pass or update beside another, which is not simulated."""
    for name, alone_s, beside_s, fitted in BESIDE:
        yield {**_row(f"H200: {name}", "", beside_s, alone_s * (2 + SWITCHING), fitted=fitted), "computed": True}


def _row(name: str, mode: str, published: float, predicted: float, *, fitted: bool) -> dict[str, Any]:
    return {
        "table": "H200",
        "row": name,
        "mode": mode,
        "fitted": fitted,
        "published": published,
        "predicted": predicted,
        "error": predicted / published - 1,
    }
