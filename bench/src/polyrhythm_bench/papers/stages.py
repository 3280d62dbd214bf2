"""Stage times of RL-VLA3's workloads, printed or measured, and the simulated cluster of a row.

| mode | the cluster |
|---|---|
| baseline | `lockstep`, max_lag 0; a device's env batches step in turn; an update waits for a version's samples |
| rollout | `dynamic`, passes of one env batch (or as published); env batches step at once; the rest as above |
| full | as rollout, and an update begins with its own samples (`streaming`); a version still waits for the one before |

So do the released workers (Haoran0301/RL-VLA3 0dad3d4: one process steps the batches of a device, one after another or
in threads; a training step ends when rollout and training have both ended). A version is a training step of the paper.

One number per workload is fitted, to one row; the rest is given:

| part | value | source |
|---|---|---|
| a row of a pass | 9 s / 640 for π0.5, the same for π0; by work for the others (`POLICIES`) | RL-VLA3, introduction |
| fixed part of a pass | as long as 7.2 rows | an H200: 88.8 ms for 8 rows, 415.6 ms for 64 |
| training on a row | 3.85 rows of a pass each time, twice | an H200: 200 ms for 8 rows, 6.5 ms a row of 64; table 2 |
| two processes on a device | each takes 2.09 times as long | an H200: a pass 2.18, an update 2.0 times |
| most rows of a pass | 512, by the device's memory | the released configurations |
| a chunk step | linear in its rows; ManiSkill's 22 s for a device's 256 | RL-VLA3, introduction; tables 2 and 5 |
| exchange of gradients | a ring over one 100 Gb/s port per host | assumed, as in `links` |

Rows of one device (or of three that simulate and one that generates) behave like those of the others, so one such part
of the cluster is simulated for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from polyrhythm.plugins.virtual.clustersim.costs import Cost
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.specs.distributions import Constant, Lognormal
from polyrhythm_bench.papers.model import Simulated, measured
from polyrhythm_bench.papers.published import EPISODES, PASSES, PaperData, PaperRow

#: Seconds of a row of a pass (π0.5), and of a chunk step of one of ManiSkill's environments.
GENERATE_S, MANISKILL_S = 9 / 640, 22 / 256
#: Fixed part of a pass, and one training pass over a row, in rows of a pass; cost of switching between processes.
FIXED_ROWS, TRAIN_ROWS, SWITCHING = 7.2, 3.85, 0.09
#: Steps at once of a simulator on cores, or that draws: k of them take k to this power as long. Chosen, not fitted.
CONTENTION = 0.65
#: Most rows of a pass.
MOST_ROWS = 512
#: Standard deviation of the logarithm of a step's time; gigabytes per second of a host's port; GPUs of a host.
SPREAD, GB_PER_S, GPUS_PER_HOST = 0.05, 12.5, 8
#: A row of a pass relative to π0.5, and gigabytes of gradients. GR00T runs 1.5 of 2.7 billion parameters; the work of
#: a row of OpenVLA-OFT is that of π0.5 within 5%, by which its training is scaled (its generation is fitted).
POLICIES: Mapping[str, tuple[float, float]] = {
    "pi0.5": (1.0, 6.6),
    "pi0": (1.0, 6.6),
    "gr00t": (0.54, 5.4),
    "openvla-oft": (1.05, 15.0),
}
#: Chunk steps of the simulated episodes, and halvings of the interval of a fit.
CHUNK_STEPS, HALVINGS = 8, 12
#: Versions that are simulated: each begins when the one before has ended.
_VERSIONS = 2


@dataclass(frozen=True, slots=True)
class Times:
    """Stage times of a workload in seconds. step: a chunk step of one environment; contention: of env batches that step
    at once on a device; generate: a row of a pass; train: a row, all passes."""

    step: float
    contention: float
    generate: float
    train: float


#: What is fitted to the one row of a workload, with its bounds.
Unknown = Literal["step", "contention", "train", "generate"]
_UNKNOWN: Mapping[str, Unknown] = {"maniskill": "contention", "a": "train", "b": "generate"}
_BOUNDS: Mapping[Unknown, tuple[float, float]] = {
    "step": (0.01, 1.0),
    "contention": (0.5, 2.5),
    "train": (0.003, 0.5),
    "generate": (0.003, 0.3),
}


def unknown(workload: str) -> Unknown:
    """The number that is fitted for this workload."""
    return _UNKNOWN.get(workload, "step")


def given(workload: str, policy: str, known: Mapping[str, Times]) -> Times:
    """Stage times without the fitted number, which is 1. known: of workloads whose numbers carry over."""
    share = POLICIES[policy][0]
    generate = share * GENERATE_S
    times = Times(1.0, CONTENTION, generate, PASSES * TRAIN_ROWS * generate)
    if workload == "maniskill":
        return replace(times, step=MANISKILL_S, contention=1.0)
    if workload in ("a", "b"):  # LIBERO: stepped as in table 4; (b) trains as (a) does, by the work of a row
        train = known["a"].train * share if workload == "b" else 1.0
        return replace(times, step=known["libero"].step, train=train)
    return times


def fit(data: PaperData) -> dict[str, Times]:
    """Stage times by workload: what is given, and one number by halving an interval until its row is met."""
    rows = {row.setup.workload: row for row in data.rows if row.fitted}
    found: dict[str, Times] = {}
    for workload in ("maniskill", "robocasa", "libero", "metaworld", "a", "b"):
        row, name = rows[workload], unknown(workload)
        times, (low, high) = given(workload, row.setup.policy, found), _BOUNDS[name]
        for _ in range(HALVINGS):
            middle = sqrt(low * high)
            slower = simulate(row, replace(times, **{name: middle})).throughput < row.published
            low, high = (low, middle) if slower else (middle, high)
        found[workload] = replace(times, **{name: sqrt(low * high)})
    return found


def exchange_s(gpus: int, gigabytes: float) -> float:
    """Seconds in which the hosts of so many GPUs sum their gradients, by a ring of their ports."""
    hosts = max(1.0, gpus / GPUS_PER_HOST)
    return 2 * (hosts - 1) / hosts * gigabytes / GB_PER_S


def publish_s(gpus: int, gigabytes: float) -> float:
    """Seconds in which the trainer's host sends a version to the other hosts, one after another."""
    return max(0.0, gpus / GPUS_PER_HOST - 1) * gigabytes / GB_PER_S


def part(row: PaperRow) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Devices that simulate, generate and train in the smallest part of the row's cluster, and the number of parts."""
    if row.placement == "hybrid":
        return (0, 1, 2), (3,), (0, 1, 2, 3), row.gpus // 4
    if row.placement == "colocated":
        return (0,), (0,), (0,), row.gpus
    if row.rollout_gpus not in (0, row.gpus // 2):
        return row.simulating, row.generating, row.training, 1
    return (0,), (0,), (1,), row.gpus // 2


def cluster_settings(row: PaperRow, times: Times, chunk_steps: int, seed: int = 0) -> ClusterSettings:
    """The cluster of a part of the row, with episodes of `chunk_steps`. A simulated row stands for an env batch."""
    simulating, generating, training, parts = part(row)
    slots = len(simulating) * row.batches
    rows = row.envs / parts / slots
    # Cores of a host are divided among the devices that simulate.
    share = len(simulating) * parts / row.gpus if row.setup.on_cores else 1.0
    in_turn, full = row.mode == "baseline", row.mode == "full"
    shorter, gigabytes = chunk_steps / row.setup.chunk_steps, POLICIES[row.setup.policy][1]
    exchange = exchange_s(row.gpus, gigabytes) * row.gradient_steps(row.setup.chunk_steps) * shorter
    publish = publish_s(row.gpus, gigabytes) * shorter
    return ClusterSettings.model_validate(
        {
            "seed": seed,
            "switching": SWITCHING,
            "versions": _VERSIONS,
            "scheduler": {
                "batch_size": slots,
                "sync_interval": EPISODES,
                "max_lag": 0,
                "on_update": "continue" if full else "drain",
                "streaming": full,
                "batching": "lockstep" if row.mode == "baseline" else "dynamic",
                # The released collector takes what else has come within the threshold: with none, one env batch.
                "max_requests": row.max_batches if row.wait_ms else 1,
                "max_wait_s": row.wait_ms / 1000,
                "fire_when_all_wait": False,
            },
            "simulators": [
                {
                    "count": len(simulating),
                    "env_batches": 1 if in_turn else row.batches,
                    "slots": row.batches if in_turn else 1,
                    "shared_thread": in_turn,
                    "steps": chunk_steps,
                    "step": Cost(Lognormal(times.step * share * rows, SPREAD)),
                    "contention": times.contention,
                }
            ],
            "generators": [
                {
                    "count": len(generating),
                    "devices": generating,
                    "serve": Cost(Constant(FIXED_ROWS * times.generate), times.generate * rows),
                    "most_rows": max(1, int(MOST_ROWS // rows)),
                }
            ],
            "trainer": {
                "devices": training,
                "update": Cost(Constant(0.0), times.train * rows),
                "synchronise": Cost(Constant(exchange)),
                "publish": Cost(Constant(publish)),
            },
        }
    )


def simulate(row: PaperRow, times: Times, chunk_steps: int = CHUNK_STEPS, seed: int = 0) -> Simulated:
    """Simulate a part of the row's cluster; the throughput is that of all parts together."""
    return measured(row, cluster_settings(row, times, chunk_steps, seed), chunk_steps, (0, _VERSIONS, 0))
