"""Loads the published numbers: RL-VLA3, tables 1 to 5 and the printed part of figure 8; ROLL Flash, figure 9.

`published.json` has the rows in the order of the papers. Its corrections and additions:
- Table 3 prints `Train Async` of the columns 349.32 and 454.63 the wrong way round (its text and the released
  configurations say so): the first is rollout-only, the second full.
- Columns (a) and (b) of table 1 print no settings. LIBERO's hybrid placement is that of the paper's A.2: devices for
  rollout and for training apart, here 1:1. Four env batches a device where rollout is asynchronous, the best of
  table 4; one in the baseline, which does not gain from more. 32 environments a device, steps and batch size are those
  of table 4. Each of their GPU counts is a setup of its own.
- Table 5 says π0, table 1 π0.5 for the same rows; the released configurations run π0.5.
- Columns (c) and (d) of table 1, and figure 8, are rows of tables 3 and 5 printed `again`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

#: Episodes of each environment in a training step, and training passes over each.
EPISODES, PASSES = 4, 2


@dataclass(frozen=True, slots=True)
class Setup:
    """The common properties of a table's rows.

    chunk: env steps per chunk step; global_batch: chunk steps per gradient step; workload: the same at several numbers
    of GPUs, by default `key`; policy: its model, a key of `stages.POLICIES`. simulates_on_gpu: physics or drawing on
    the device is what takes a step's time; on_cores: the host's cores are. reset_s: seconds of a reset; observation_mb,
    sample_mb: megabytes of the images of a row that go to the generator, and of its sample to the trainer (0: the
    same), by the released configurations.
    """

    key: str
    name: str
    chunk: int
    episode_steps: int
    global_batch: int
    simulates_on_gpu: bool = False
    workload: str = ""
    policy: str = ""
    on_cores: bool = False
    reset_s: float = 0.0
    observation_mb: float = 0.0
    sample_mb: float = 0.0

    @property
    def chunk_steps(self) -> int:
        """Chunk steps of an episode."""
        return self.episode_steps // self.chunk


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One published throughput, in transitions per second.

    placement: `colocated` (everything on all devices), `hybrid` (three of four devices simulate, one generates, all
    train) or `separate` (half, or rollout_gpus, simulate and generate; the others train). batches: env batches per
    simulating device; max_batches: most that a generator serves in a pass, or fewer after wait_ms. fitted: the one row
    of its workload to which a number is fitted (`stages`); again: printed before.
    """

    table: str
    setup: Setup
    placement: Literal["colocated", "hybrid", "separate"]
    gpus: int
    envs: int
    batches: int
    mode: Literal["baseline", "rollout", "full"]
    published: float
    max_batches: int = 1
    wait_ms: float = 0.0
    fitted: bool = False
    again: bool = False
    rollout_gpus: int = 0

    @property
    def simulating(self) -> tuple[int, ...]:
        """Devices of the simulators."""
        apart = self.rollout_gpus or self.gpus // 2
        return tuple(range({"colocated": self.gpus, "hybrid": self.gpus * 3 // 4, "separate": apart}[self.placement]))

    @property
    def generating(self) -> tuple[int, ...]:
        """Devices of the generators."""
        if self.placement == "hybrid":
            return tuple(range(len(self.simulating), self.gpus))
        return self.simulating

    @property
    def training(self) -> tuple[int, ...]:
        """Devices of the trainer's ranks."""
        return tuple(range(len(self.simulating) if self.placement == "separate" else 0, self.gpus))

    @property
    def name(self) -> str:
        """`Meta-World, pi0, PPO: hybrid, 2 batches, full`."""
        batching = f", up to {self.max_batches} in {self.wait_ms:g} ms" if self.wait_ms else ""
        plural = "es" if self.batches > 1 else ""
        return f"{self.setup.name}: {self.placement}, {self.batches} batch{plural}{batching}, {self.mode}"

    def gradient_steps(self, chunk_steps: int) -> int:
        """Gradient steps of an update on one episode of `chunk_steps` from each environment."""
        return max(1, round(PASSES * self.envs * chunk_steps / self.setup.global_batch))


@dataclass(frozen=True, slots=True)
class Latency:
    """A point of figure 9: environment latency normal(mean_s, deviation_s); speedup of stepping each environment
    independently over stepping the batch together; seconds of both if printed."""

    mean_s: float
    deviation_s: float
    speedup: float
    batch_s: float = 0.0
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PaperData:
    """The published numbers. rows: RL-VLA3's; latencies: ROLL Flash's, for `batch` environments of `turns` turns."""

    rows: tuple[PaperRow, ...]
    latencies: tuple[Latency, ...]
    batch: int
    turns: int

    @property
    def setups(self) -> list[Setup]:
        return list(dict.fromkeys(row.setup for row in self.rows))


def published() -> PaperData:
    """Load `published.json`."""
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath("published.json").read_text("utf-8"))
    setups = {
        key: Setup(key, **{"workload": key, "sample_mb": setup["observation_mb"], **setup})
        for key, setup in data["setups"].items()
    }
    rows = tuple(PaperRow(**{**row, "setup": setups[row["setup"]]}) for row in data["rows"])
    turns = data["turns"]
    return PaperData(rows, tuple(Latency(**point) for point in turns["rows"]), turns["batch"], turns["turns"])
