"""Simulates the cluster of a published row with four fitted costs (`fit`): for `bench placement` and `bench streamer`.

`bench papers` has stage times instead (`stages`), and uses `measured` alone.

| mode | settings |
|---|---|
| baseline | `lockstep` batches, max_lag 0, `drain`, a version's first update waits for all its samples |
| rollout | `dynamic` batches of one env batch (or as published), the rest as in the baseline |
| full | `dynamic`, max_lag 2, `continue`, `streaming`: an update begins with its own samples |

`dynamic` is by the paper's rule: size or oldest wait alone (`fire_when_all_wait: false`).

A version is a training step of the paper: four episodes of every environment, an update on each of the four. A slot
stands for an env batch. Rows of one step and end together, so one simulated row stands for all of them.

Costs and the sources of their form (RLinf's profile, its section 2.2, unless noted):
- A chunk step of an env batch takes `step` seconds however many environments it has, times a lognormal noise.
- Generation is linear in its rows; so is training, each rank doing its share, with as many gradient steps as published.
- A pass of the simulator occupies 0.24 of a GPU (if it needs one), one of the generator 0.7, one of the trainer all.
- Loading weights, publishing and messages are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import Cost
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import Command, Event, UpdateDone
from polyrhythm.specs.distributions import Constant, Lognormal
from polyrhythm_bench.papers.published import EPISODES, PaperRow

SIMULATOR_OCCUPIES, GENERATOR_OCCUPIES, TRAINER_OCCUPIES = 0.24, 0.7, 1.0
MAX_LAG = 2
#: How passes share a device (`plugins.virtual.clustersim.settings.ClusterSettings.sharing`).
Sharing = Literal["shared", "exclusive"]
#: Versions left out at the start, counted, left out at the end. Rollout runs ahead of training by the lag: it must be
#: that far ahead before the first counted version, and still run at the last. With max_lag 0 all versions are equal.
_VERSIONS = {"baseline": (0, 2, 0), "rollout": (0, 2, 0), "full": (MAX_LAG + 1, 4, MAX_LAG)}


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a setup in seconds. step: a chunk step of an env batch, with noise `spread` (standard deviation of
    the logarithm); generate: a row; train: a transition, all passes; synchronise: a gradient step, per rank."""

    step: float
    spread: float
    generate: float
    train: float
    synchronise: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated row. throughput: transitions per second; cluster: after the run, with its measures."""

    throughput: float
    cluster: VirtualCluster


def cluster_settings(
    row: PaperRow, costs: Costs, chunk_steps: int, seed: int = 0, sharing: Sharing = "shared"
) -> ClusterSettings:
    """The cluster of `row`, with episodes of `chunk_steps`."""
    setup = row.setup
    simulators, slots = len(row.simulating), len(row.simulating) * row.batches
    rows = row.envs / slots
    placed = {"devices": row.simulating, "occupies": SIMULATOR_OCCUPIES} if setup.simulates_on_gpu else {}
    return ClusterSettings.model_validate(
        {
            "seed": seed,
            "sharing": sharing,
            "versions": sum(_VERSIONS[row.mode]),
            "scheduler": _scheduler(row, slots),
            "simulators": [
                {
                    **placed,
                    "count": simulators,
                    "env_batches": row.batches,
                    "steps": chunk_steps,
                    "step": Cost(Lognormal(costs.step, costs.spread)),
                }
            ],
            "generators": [
                {
                    "count": len(row.generating),
                    "devices": row.generating,
                    "occupies": GENERATOR_OCCUPIES,
                    "serve": Cost(Constant(0.0), costs.generate * rows),
                }
            ],
            "trainer": {
                "devices": row.training,
                "occupies": TRAINER_OCCUPIES,
                "update": Cost(Constant(0.0), costs.train * rows * setup.chunk),
                "gradient_steps": row.gradient_steps(chunk_steps),
                "synchronise": Cost(Constant(0.0), costs.synchronise),
            },
        }
    )


def _scheduler(row: PaperRow, slots: int) -> dict[str, Any]:
    full = row.mode == "full"
    return {
        "batch_size": slots,
        "sync_interval": EPISODES,
        "max_lag": MAX_LAG if full else 0,
        "on_update": "continue" if full else "drain",
        "streaming": full,
        "batching": "lockstep" if row.mode == "baseline" else "dynamic",
        "max_requests": row.max_batches,
        "max_wait_s": row.wait_ms / 1000,
        "fire_when_all_wait": False,
    }


def simulate(
    row: PaperRow, costs: Costs, chunk_steps: int = 0, seed: int = 0, sharing: Sharing = "shared"
) -> Simulated:
    """Simulate the row's cluster. chunk_steps: of an episode, by default as published (fewer are faster to simulate and
    change only the weight of a version's start and end)."""
    chunk_steps = chunk_steps or row.setup.chunk_steps
    return measured(row, cluster_settings(row, costs, chunk_steps, seed, sharing), chunk_steps)


def measured(
    row: PaperRow, settings: ClusterSettings, chunk_steps: int, versions: tuple[int, int, int] | None = None
) -> Simulated:
    """Simulate a cluster for the row, such as `cluster_settings` gives for episodes of `chunk_steps`. versions: left
    out at the start, counted, left out at the end; by default those of the row's mode."""
    cluster = VirtualCluster(settings)
    ends = [0.0]

    def note(now: float, event: Event, commands: list[Command]) -> None:  # noqa: ARG001 (the driver's)
        if isinstance(event, UpdateDone):
            ends.append(now)

    cluster.driver.observer = note
    cluster.run()
    first, counted, _ = (number * EPISODES for number in versions or _VERSIONS[row.mode])
    transitions = counted * row.envs * chunk_steps * row.setup.chunk
    return Simulated(transitions / (ends[first + counted] - ends[first]), cluster)
