"""Stage times of RL-VLA3's workloads, printed or measured, and the simulated cluster of a row.

| mode | the cluster |
|---|---|
| baseline | a device's env batches step in turn, a pass serves one of each; an update waits for a version's samples |
| rollout | `dynamic`, passes of one env batch (or as published); env batches step at once; the rest as above |
| full | as rollout, and an update begins with its own samples (`streaming`); a version still waits for the one before |

So do the released workers (Haoran0301/RL-VLA3 0dad3d4): env workers step the batches of a device, one after another or
in threads; a training step ends when rollout and training have both ended. So with two or more env batches a lock-step
pass overlaps with another batch's step, unless both need the device. A version is a training step of the paper.

One number per workload is fitted, to one row; the rest is given:

| part | value | source |
|---|---|---|
| a row of a pass | 9 s / 640 for π0.5; by work for the others (`POLICIES`) | RL-VLA3, introduction |
| fixed part of a pass | as long as 7.2 rows | an H200: 88.8 ms for 8 rows, 415.6 ms for 64 |
| training on a row | 1.41 rows of a pass each time, twice | an H200, prefix frozen as released: 5.5 s for 640 rows |
| the same, ManiSkill | 3.85 rows | an H200, all weights: 200 ms for 8 rows; released: four denoise steps |
| two processes on a device | each takes 2.09 times as long | an H200: a pass 2.18, an update 2.0 times |
| most rows of a pass | 512, by the device's memory | the released configurations |
| a chunk step | linear in its rows; ManiSkill's 22 s for a device's 256 | RL-VLA3, introduction; tables 2, 5 |
| a reset | by simulator, before each episode of an env batch | measured; robocasa issue 63 |
| handing over | 5.1 ms a megabyte into a channel, as much out of it | an actor's call: 786 KB in 3 to 5 ms |
| sharded weights and gradients | gathered for each micro-batch, summed each step | released; 400 Gb/s a host chosen |

Samples are handed over by each generator for its rows: where training waits for rollout, it waits for all of it; else
for that of the last episode. Observations wait for the second half before their pass, in lock-step; otherwise they are
received during the pass before.

Rows of one device (or of three that simulate and one that generates) behave like those of the others, so one such part
of the cluster is simulated for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import Cost
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import Command, Event, UpdateDone
from polyrhythm.specs.distributions import Constant, Lognormal
from polyrhythm_bench.papers.published import EPISODES, PASSES, PaperData, PaperRow

#: Seconds of a row of a pass (π0.5), and of a chunk step of one of ManiSkill's environments.
GENERATE_S, MANISKILL_S = 9 / 640, 22 / 256
#: Fixed part of a pass in its rows; cost of switching between processes.
FIXED_ROWS, SWITCHING = 7.2, 0.09
#: One training pass over a row, in rows of a pass: with the prefix frozen; where all of four denoise steps are trained.
TRAIN_ROWS, JOINT_TRAIN_ROWS = (5.5 / 640) / (0.39 / 64), 3.85
#: Steps at once of a simulator on cores: k of them take k to this power as long. Chosen, not fitted.
CONTENTION = 0.65
#: Most rows of a pass.
MOST_ROWS = 512
#: Seconds in which a megabyte goes into a channel, or out of it.
CHANNEL_S_PER_MB = 4e-3 / 0.786
#: Standard deviation of the logarithm of a step's time; gigabytes per second of a host's network; GPUs of a host.
SPREAD, GB_PER_S, GPUS_PER_HOST = 0.05, 50.0, 8
#: Rows of a micro-batch, LIBERO's (table 4).
MICRO_BATCH = 32
#: A row of a pass relative to π0.5; gigabytes of weights, and of those that are trained. π0 has 816 tokens instead of
#: 968 (three images each); GR00T runs 1.5 of 2.7 billion parameters; the work of a row of OpenVLA-OFT is that of π0.5
#: within 5%, by which its training is scaled (its generation is fitted). Of π0 and π0.5 the expert is trained, of GR00T
#: the action head.
POLICIES: Mapping[str, tuple[float, float, float]] = {
    "pi0.5": (1.0, 6.6, 0.9),
    "pi0": (816 / 968, 6.6, 0.6),
    "gr00t": (0.54, 5.4, 2.1),
    "openvla-oft": (1.05, 15.0, 15.0),
}
#: Chunk steps of the simulated episodes, and halvings of the interval of a fit.
CHUNK_STEPS, HALVINGS = 8, 12
#: Versions that are simulated: each begins when the one before has ended.
_VERSIONS = 2
#: No batch waits so long.
_FOREVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Times:
    """Stage times of a workload in seconds. step: a chunk step of one environment; contention: of env batches that step
    at once on a device; generate: a row of a pass; train: a row, all passes."""

    step: float
    contention: float
    generate: float
    train: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated row. throughput: transitions per second; cluster: after the run, with its measures."""

    throughput: float
    cluster: VirtualCluster


#: What is fitted to the one row of a workload, with its bounds.
Unknown = Literal["step", "contention", "generate"]
_UNKNOWN: Mapping[str, Unknown] = {"maniskill": "contention", "b": "generate"}
_BOUNDS: Mapping[Unknown, tuple[float, float]] = {
    "step": (0.01, 1.0),
    "contention": (0.5, 2.5),
    "generate": (0.003, 0.3),
}


def unknown(workload: str) -> Unknown:
    """The number that is fitted for this workload."""
    return _UNKNOWN.get(workload, "step")


def given(row: PaperRow, known: Mapping[str, Times]) -> Times:
    """Stage times without the fitted number, which is 1. known: of workloads whose numbers carry over."""
    setup = row.setup
    generate = POLICIES[setup.policy][0] * GENERATE_S
    joint = setup.workload == "maniskill"
    train = PASSES * (JOINT_TRAIN_ROWS if joint else TRAIN_ROWS) * generate
    step = {"maniskill": MANISKILL_S, "b": known["libero"].step if "libero" in known else 1.0}.get(setup.workload, 1.0)
    return Times(step, 1.0 if setup.simulates_on_gpu else CONTENTION, generate, train)


def fit(data: PaperData) -> dict[str, Times]:
    """Stage times by workload: what is given, and one number by halving an interval until its row is met."""
    rows = {row.setup.workload: row for row in data.rows if row.fitted}
    found: dict[str, Times] = {}
    for workload in ("maniskill", "robocasa", "libero", "metaworld", "a", "b"):
        row, name = rows[workload], unknown(workload)
        times, (low, high) = given(row, found), _BOUNDS[name]
        for _ in range(HALVINGS):
            middle = sqrt(low * high)
            slower = simulate(row, replace(times, **{name: middle})).throughput < row.published
            low, high = (low, middle) if slower else (middle, high)
        found[workload] = replace(times, **{name: sqrt(low * high)})
    return found


def exchange_s(row: PaperRow) -> float:
    """Seconds that a gradient step takes longer on several hosts. Weights are sharded over all ranks, as released: each
    micro-batch gathers all of them for its forward pass and those trained for its backward pass; then the gradients are
    summed."""
    hosts, (_, weights, trained) = max(1.0, row.gpus / GPUS_PER_HOST), POLICIES[row.setup.policy]
    micro_batches = max(1, row.setup.global_batch // len(row.training) // MICRO_BATCH)
    return (hosts - 1) / hosts * (micro_batches * (weights + trained) + trained) / GB_PER_S


def publish_s(gpus: int, gigabytes: float) -> float:
    """Seconds in which the trainer's host sends a version to the other hosts, one after another."""
    return max(0.0, gpus / GPUS_PER_HOST - 1) * gigabytes / GB_PER_S


def hand_over_s(row: PaperRow) -> float:
    """Seconds that training waits for the samples of a chunk step of all environments after an episode."""
    seconds = 2 * CHANNEL_S_PER_MB * row.setup.sample_mb * row.envs / len(row.generating)
    return seconds / EPISODES if row.mode == "full" else seconds


#: Devices that simulate, generate and train, and how many such parts the row's cluster has.
Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def part(row: PaperRow) -> Part:
    """The smallest part of the row's cluster."""
    if row.placement == "hybrid":
        return (0, 1, 2), (3,), (0, 1, 2, 3), row.gpus // 4
    if row.placement == "colocated":
        return (0,), (0,), (0,), row.gpus
    if row.rollout_gpus not in (0, row.gpus // 2):
        return whole(row)
    return (0,), (0,), (1,), row.gpus // 2


def whole(row: PaperRow) -> Part:
    """The row's cluster as one part."""
    return row.simulating, row.generating, row.training, 1


def overlaps(row: PaperRow) -> bool:
    """Whether a lock-step pass runs while other env batches step: with two or more, unless both need the device."""
    return row.batches > 1 and not (row.setup.simulates_on_gpu and row.generating == row.simulating)


def contention(row: PaperRow, times: Times) -> float:
    """How steps at once slow each other down. What is worse than taking turns comes from passes on the same device."""
    return times.contention if row.generating == row.simulating else min(1.0, times.contention)


def step_s(row: PaperRow, times: Times) -> float:
    """Seconds of a chunk step of an env batch that steps alone on its device."""
    # Cores of a host are divided among the devices that simulate.
    share = len(row.simulating) / row.gpus if row.setup.on_cores else 1.0
    return times.step * share * row.envs / len(row.simulating) / row.batches


def cluster_settings(
    row: PaperRow, times: Times, chunk_steps: int, seed: int = 0, devices: Part | None = None
) -> ClusterSettings:
    """The cluster of a part of the row, with episodes of `chunk_steps`. A simulated row stands for an env batch.
    devices: the part, by default the smallest."""
    simulating, generating, training, parts = devices or part(row)
    setup, slots = row.setup, len(simulating) * row.batches
    rows = row.envs / parts / slots
    in_turn, full = row.mode == "baseline", row.mode == "full"
    overlapped = in_turn and overlaps(row)
    shorter = chunk_steps / setup.chunk_steps
    exchange = exchange_s(row) * row.gradient_steps(setup.chunk_steps) * shorter
    publish = publish_s(row.gpus, POLICIES[setup.policy][1]) * shorter
    # The released collector takes what else has come within the threshold: with none, one env batch.
    most, wait_s = (row.max_batches if row.wait_ms else 1), row.wait_ms / 1000
    if overlapped:
        most, wait_s = len(simulating) // len(generating), _FOREVER_S
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
                "batching": "lockstep" if in_turn and not overlapped else "dynamic",
                "max_requests": most,
                "max_wait_s": wait_s,
                "fire_when_all_wait": overlapped,
            },
            "simulators": [
                {
                    "count": len(simulating),
                    "env_batches": 1 if in_turn else row.batches,
                    "slots": row.batches if in_turn else 1,
                    "shared_thread": in_turn,
                    "steps": chunk_steps,
                    "step": Cost(Lognormal(step_s(row, times), SPREAD)),
                    "reset": Cost(Constant(setup.reset_s * shorter)),
                    "contention": contention(row, times),
                }
            ],
            "generators": [
                {
                    "count": len(generating),
                    "devices": generating,
                    "gather": Cost(Constant(0.0), CHANNEL_S_PER_MB * setup.observation_mb * rows),
                    "depth": 1 if in_turn else 2,
                    "serve": Cost(Constant(FIXED_ROWS * times.generate), times.generate * rows),
                    "most_rows": max(1, int(MOST_ROWS // rows)),
                }
            ],
            "trainer": {
                "devices": training,
                "update": Cost(Constant(0.0), times.train * rows),
                "synchronise": Cost(Constant(exchange + hand_over_s(row) * chunk_steps)),
                "publish": Cost(Constant(publish)),
            },
        }
    )


def simulate(row: PaperRow, times: Times, chunk_steps: int = CHUNK_STEPS, seed: int = 0) -> Simulated:
    """Simulate a part of the row's cluster; the throughput is that of all parts together."""
    return measured(row, cluster_settings(row, times, chunk_steps, seed), chunk_steps)


def measured(
    row: PaperRow, settings: ClusterSettings, chunk_steps: int, before: int = 0, counted: int = _VERSIONS
) -> Simulated:
    """Simulate a cluster for the row, such as `cluster_settings` gives for episodes of `chunk_steps`. before, counted:
    versions that are left out at the start, and that are counted."""
    cluster = VirtualCluster(settings)
    ends = [0.0]

    def note(now: float, event: Event, commands: list[Command]) -> None:  # noqa: ARG001 (the driver's)
        if isinstance(event, UpdateDone):
            ends.append(now)

    cluster.driver.observer = note
    cluster.run()
    transitions = counted * EPISODES * row.envs * chunk_steps * row.setup.chunk
    return Simulated(transitions / (ends[(before + counted) * EPISODES] - ends[before * EPISODES]), cluster)
