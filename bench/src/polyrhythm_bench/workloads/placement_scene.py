"""A published row, scaled down in time, devices and episodes: as real processes that sleep, and as a simulated cluster.

| | published | scaled |
|---|---|---|
| devices | 8 | 4, in the same shares |
| env batches of a simulating device, environments of each | | the same; one live row stands for a whole env batch |
| seconds | | times `scale` |
| chunk steps of an episode, episodes of a version | 16 to 32, 4 | 4, 1 |
| gradient steps of an update | 10 to 51 | 4, together as long |

No disaggregated row is published for these setups. Ours has the env batches of the colocated row on half of the
devices, and the trainer on the others. `papers.published` calls it `separate`, and the modes `baseline` and `full`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.virtual.clustersim.costs import Cost
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.specs.distributions import Constant, Lognormal
from polyrhythm_bench.papers.published import PaperData, PaperRow
from polyrhythm_bench.papers.stages import FIXED_ROWS, SPREAD, Times, step_s

Placement = Literal["colocated", "hybrid", "disaggregated"]
Mode = Literal["lockstep", "asynchronous"]
PLACEMENTS: tuple[Placement, ...] = ("colocated", "hybrid", "disaggregated")
MODES: tuple[Mode, ...] = ("lockstep", "asynchronous")
#: Setups of the paper with rows of two placements.
SETUPS = ("maniskill", "robocasa", "metaworld")
#: Env batches of a simulating device, in the rows that are taken; versions by which rollout may be ahead.
_BATCHES, MAX_LAG = 2, 2
_DEVICES = 4
_NAMES: Mapping[str, Any] = {"disaggregated": "separate", "lockstep": "baseline", "asynchronous": "full"}


@dataclass(frozen=True, slots=True)
class PlacementScene:
    """A published row and its stage times, and how they are scaled. chunk_steps: of an episode; episodes: of each
    environment in a version, with an update for each; gradient_steps: of an update."""

    row: PaperRow
    times: Times
    scale: float
    chunk_steps: int = 4
    episodes: int = 1
    gradient_steps: int = 4
    seed: int = 0

    @property
    def small(self) -> PaperRow:
        """The row on fewer devices."""
        return replace(self.row, gpus=_DEVICES, envs=self.row.envs * _DEVICES // self.row.gpus)

    @property
    def env_batches(self) -> int:
        """Env batches of all simulators, and samples of an update."""
        return len(self.small.simulating) * self.row.batches

    @property
    def devices(self) -> set[int]:
        """Devices that stations hold in turn."""
        small = self.small
        return {*small.generating, *small.training, *(small.simulating if small.setup.simulates_on_gpu else ())}

    @property
    def step_s(self) -> float:
        """Scaled seconds of a chunk step of an env batch: on a device alone, on cores beside the others of its
        simulator."""
        together = 1.0 if self.row.setup.simulates_on_gpu else self.row.batches**self.times.contention
        return self.scale * step_s(self.small, self.times) * together

    @property
    def serve(self) -> Cost:
        """Cost of a pass in scaled seconds, by its env batches."""
        one = self.scale * self.times.generate
        return Cost(Constant(FIXED_ROWS * one), self.small.envs / self.env_batches * one)

    @property
    def update(self) -> Cost:
        """Cost of an update in scaled seconds, by a rank's chunk steps of env batches."""
        return Cost(Constant(0.0), self.scale * self.times.train * self.small.envs / self.env_batches)

    def rate(self, updates: int, seconds: float) -> float:
        """Transitions per second at the published size, from so many updates in so many scaled seconds."""
        row = self.row
        return updates * row.envs * self.chunk_steps * row.setup.chunk * self.scale / seconds


def find_row(data: PaperData, setup: str, placement: Placement, mode: Mode) -> tuple[PaperRow, float | None]:
    """The row with two env batches a device, and its published transitions per second, if any are."""
    wanted = (setup, _NAMES.get(placement, placement), _NAMES[mode], _BATCHES, 0.0, False)
    for row in data.rows:
        if (row.setup.key, row.placement, row.mode, row.batches, row.wait_ms, row.again) == wanted:
            return row, row.published
    if placement == "disaggregated":
        colocated, _ = find_row(data, setup, "colocated", mode)
        return replace(colocated, placement="separate", batches=2 * _BATCHES, published=0.0), None
    other, _ = find_row(data, setup, placement, "lockstep")
    return replace(other, mode=_NAMES[mode], published=0.0), None


def cluster(scene: PlacementScene, versions: int) -> ClusterSettings:
    """The scene as a simulated cluster whose devices are held in turn, in the order of asking."""
    small = scene.small
    full = small.mode == "full"
    return ClusterSettings.model_validate(
        {
            "seed": scene.seed,
            "sharing": "exclusive",
            "versions": versions,
            "scheduler": {
                "batch_size": scene.env_batches,
                "sync_interval": scene.episodes,
                "max_lag": MAX_LAG if full else 0,
                "on_update": "continue" if full else "drain",
                "streaming": full,
                "batching": "dynamic" if full else "lockstep",
                "max_requests": 1,
                "max_wait_s": 0.0,
                "fire_when_all_wait": False,
            },
            "simulators": [
                {
                    "count": len(small.simulating),
                    "devices": small.simulating if small.setup.simulates_on_gpu else (),
                    "env_batches": small.batches,
                    "steps": scene.chunk_steps,
                    "step": Cost(Lognormal(scene.step_s, SPREAD)),
                }
            ],
            "generators": [{"count": len(small.generating), "devices": small.generating, "serve": scene.serve}],
            "trainer": {
                "devices": small.training,
                "update": scene.update,
                "gradient_steps": scene.gradient_steps,
            },
        }
    )


def live(scene: PlacementScene, versions: int, folder: Path) -> RunConfig:
    """The scene as a run of real processes that sleep while they hold the devices in `folder`."""
    here, small = "polyrhythm_bench.workloads", scene.small
    simulated = cluster(scene, versions)
    serve = scene.serve
    transitions = scene.env_batches * scene.chunk_steps
    update_s = simulated.trainer.update.mean(-(-transitions // simulated.trainer.size))
    full = small.mode == "full"
    env: dict[str, Any] = {
        "type": "latency",
        "episode_steps": scene.chunk_steps,
        "step_time": f"lognormal:{1000 * scene.step_s:.4f}ms:{SPREAD}",
    }
    if small.setup.simulates_on_gpu:
        where = {"folder": str(folder), "devices": small.simulating}
        env = {"type": f"{here}.device_env:DeviceEnvSettings", "env": env, **where}
    return validate(
        {
            "name": "placement",
            "seed": scene.seed,
            "env": env,
            "policy": {
                "type": f"{here}.device_policy:DevicePolicySettings",
                "policy": {
                    "type": f"{here}.slow_policy:SlowPolicySettings",
                    "policy": {"type": "gaussian"},
                    "act": f"{1000 * serve.base.mean:.4f}ms+{1000 * serve.per_unit:.4f}ms",
                },
                "folder": str(folder),
                "generators": small.generating,
                "trainer": small.training,
                "evaluate_ms": 1000 * update_s / scene.gradient_steps,
            },
            "rollout": {
                "simulators": len(small.simulating),
                "env_batches": small.batches,
                "rows": 1,
                "generators": len(small.generating),
            },
            "batching": {"type": "dynamic", "max_requests": 1, "max_wait_ms": 0.0} if full else {"type": "lockstep"},
            "freshness": {
                "max_lag": float(MAX_LAG if full else 0),
                "on_update": "continue" if full else "drain",
                "sync_interval": scene.episodes,
            },
            # An evaluation for each gradient step, of all samples at once, and none before them.
            "training": {
                "versions": versions,
                "mini_batch_samples": scene.env_batches,
                "epochs": scene.gradient_steps,
                "minibatch_steps": 0,
                "streaming": full,
            },
            "algorithm": {"proximal": "behavior"},
            "checkpoint": {"every_versions": versions},
        }
    )
