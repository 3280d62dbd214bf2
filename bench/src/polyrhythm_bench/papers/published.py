"""What two papers publish, as numbers: RL-VLA3, tables 1 to 5 and what is printed of figure 8; ROLL Flash, figure 9.

`published.json` has the rows in the order of the papers. What it adds to them:
- Table 3 prints `Train Async` of the columns 349.32 and 454.63 the wrong way round (its text and the released
  configurations say so): the first is rollout-only, the second full.
- Columns (a) and (b) of table 1 print no settings. LIBERO's hybrid placement is that of the paper's A.2: devices for
  rollout and for training apart, here 1:1. Four env batches a device, the best of table 4, and what the baseline and
  rollout-only rows fit to (two do not). 32 environments a device, steps and batch size are those of table 4.
  Each of their GPU counts is a setup of its own.
- Columns (c) and (d) of table 1, and figure 8, are rows of tables 3 and 5 printed `again`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

#: A training step is made of so many episodes of each environment, and trains so many times on each.
EPISODES, PASSES = 4, 2


@dataclass(frozen=True, slots=True)
class Setup:
    """What the rows of a table have in common.

    chunk: env steps per chunk step; global_batch: chunk steps per gradient step; simulates_on_gpu: else on CPU cores.
    """

    key: str
    name: str
    chunk: int
    episode_steps: int
    global_batch: int
    simulates_on_gpu: bool = False

    @property
    def chunk_steps(self) -> int:
        """Of an episode."""
        return self.episode_steps // self.chunk


@dataclass(frozen=True, slots=True)
class PaperRow:
    """One published throughput, in transitions per second.

    placement: `colocated` (everything on all devices), `hybrid` (three of four devices simulate, one generates, all
    train) or `separate` (half simulate and generate, half train). batches: env batches per simulating device;
    max_batches: how many a generator serves in a pass, or fewer after wait_ms. held_out: no row to fit although it
    could be; again: printed before.
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
    held_out: bool = False
    again: bool = False

    @property
    def fitted(self) -> bool:
        """Whether cost models may see it: baselines and rollout-only rows."""
        return self.mode != "full" and not self.held_out

    @property
    def simulating(self) -> tuple[int, ...]:
        """Devices of the simulators."""
        return tuple(
            range({"colocated": self.gpus, "hybrid": self.gpus * 3 // 4, "separate": self.gpus // 2}[self.placement])
        )

    @property
    def generating(self) -> tuple[int, ...]:
        """Devices of the generators."""
        if self.placement == "hybrid":
            return tuple(range(len(self.simulating), self.gpus))
        return self.simulating

    @property
    def training(self) -> tuple[int, ...]:
        """Devices of the trainer's ranks."""
        return tuple(range(self.gpus // 2 if self.placement == "separate" else 0, self.gpus))

    @property
    def name(self) -> str:
        """`Meta-World, pi0, PPO: hybrid, 2 batches, full`."""
        batching = f", up to {self.max_batches} in {self.wait_ms:g} ms" if self.wait_ms else ""
        plural = "es" if self.batches > 1 else ""
        return f"{self.setup.name}: {self.placement}, {self.batches} batch{plural}{batching}, {self.mode}"

    def gradient_steps(self, chunk_steps: int) -> int:
        """Of an update on one episode of `chunk_steps` from each environment."""
        return max(1, round(PASSES * self.envs * chunk_steps / self.setup.global_batch))


@dataclass(frozen=True, slots=True)
class Latency:
    """A point of figure 9: environment latency normal(mean_s, deviation_s); speedup of stepping each for itself over
    the whole batch together; seconds of both, where they are printed."""

    mean_s: float
    deviation_s: float
    speedup: float
    batch_s: float = 0.0
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PaperData:
    """rows: of RL-VLA3; latencies: of ROLL Flash, for `batch` environments and so many turns each."""

    rows: tuple[PaperRow, ...]
    latencies: tuple[Latency, ...]
    batch: int
    turns: int

    def fitted(self, setup: Setup) -> list[PaperRow]:
        """What the cost model of `setup` is fitted to."""
        return [row for row in self.rows if row.setup == setup and row.fitted and not row.again]

    @property
    def setups(self) -> list[Setup]:
        return list(dict.fromkeys(row.setup for row in self.rows))


def published() -> PaperData:
    """The figures beside this module."""
    data: dict[str, Any] = json.loads(resources.files(__package__).joinpath("published.json").read_text("utf-8"))
    setups = {key: Setup(key, **setup) for key, setup in data["setups"].items()}
    rows = tuple(PaperRow(**{**row, "setup": setups[row["setup"]]}) for row in data["rows"])
    turns = data["turns"]
    return PaperData(rows, tuple(Latency(**point) for point in turns["rows"]), turns["batch"], turns["turns"])
