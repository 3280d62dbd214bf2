"""Simulates RL-VLA3's figure 7: LIBERO + GR00T N1.5 from 8 to 256 GPUs; the figure prints no numbers.

The growth with the ranks is estimated from table 1's baseline and rollout-only rows: device seconds per transition at
8, 16 and 32 GPUs, relative to those at 8, as (1 + k·GPUs) / (1 + 8·k). The rows do not separate gradient from weight
exchange, so each gets half: `synchronise` per rank in every gradient step, `publish` per generator. Everything else is
the cost model of table 4, with as many environments per device at every size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from polyrhythm.plugins.virtual.clustersim.measures import EXCHANGE, SERVE, STEP, TRAIN
from polyrhythm_bench.papers.model import Costs, Simulated, simulate
from polyrhythm_bench.papers.published import EPISODES, PaperData, PaperRow

GPUS = (8, 16, 24, 32, 64, 128, 256)
_SMALLEST = 8
#: Chunk steps of the simulated episodes.
CHUNK_STEPS = 8


def growth(data: PaperData) -> float:
    """k: growth of a version's time with each rank, as a share of the time without ranks."""
    rows = [row for row in data.rows if row.placement == "separate" and row.fitted]
    first = {(_column(row), row.mode): row for row in rows if row.gpus == _SMALLEST}
    pairs = [(row.gpus - _SMALLEST, _device_s(row) / _device_s(first[_column(row), row.mode]) - 1) for row in rows]
    slope = sum(ranks * rise for ranks, rise in pairs) / sum(ranks**2 for ranks, _ in pairs)
    return slope / (1 - _SMALLEST * slope)


def version_s(example: PaperRow, costs: Costs, chunk_steps: int = CHUNK_STEPS) -> float:
    """Seconds of a version of this row."""
    transitions = example.envs * EPISODES * chunk_steps * example.setup.chunk
    return transitions / simulate(example, costs, chunk_steps).throughput


def _column(row: PaperRow) -> str:
    return row.setup.name.rpartition(",")[0]


def _device_s(row: PaperRow) -> float:
    return row.gpus / row.published


def table(
    data: PaperData, costs: Costs, gpus: Sequence[int] = GPUS, chunk_steps: int = CHUNK_STEPS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for each number of GPUs and mode: throughput, scaling efficiency, shares of time.

    costs: of table 4. `busiest`: simulation, generation, publication or the trainer.
    """
    example = next(row for row in data.rows if row.setup.key == "libero" and row.batches == 4 and row.mode == "rollout")
    share = growth(data) / 2 * version_s(example, costs, chunk_steps)
    for mode in ("baseline", "full"):
        one = 0.0
        for count in gpus:
            row = replace(
                example,
                mode=mode,
                gpus=count,
                envs=example.envs * count // example.gpus,
                setup=replace(example.setup, global_batch=example.setup.global_batch * count // example.gpus),
            )
            steps = row.gradient_steps(chunk_steps) * EPISODES
            grown = replace(costs, synchronise=share / steps, publish=share)
            found = simulate(row, grown, chunk_steps, seed)
            one = one or found.throughput / count
            yield {
                "gpus": count,
                "mode": mode,
                "throughput": found.throughput,
                "efficiency": found.throughput / count / one,
                **_shares(found),
            }


def _shares(found: Simulated) -> dict[str, Any]:
    """Busy share of each kind of station, and the name of the `busiest`.

    training and synchronisation are the trainer's; publication overlaps with them.
    """
    measures, seconds = found.cluster.driver.measures, found.cluster.driver.clock.now

    def share(kind: str, state: str) -> float:
        return measures.states[kind][state] / sum(measures.states[kind].values())

    trainer = {
        "training": share("trainer", TRAIN),
        "synchronisation": share("trainer", EXCHANGE),
    }
    others = {
        "simulation": share("slots", STEP),
        "generation": share("generators", SERVE),
        "publication": measures.publishing / seconds,
    }
    stations = {**others, "trainer": sum(trainer.values())}
    busiest = max(stations, key=lambda name: stations[name])
    devices = sum(measures.devices.values()) / len(measures.devices) / seconds
    return {**others, **trainer, "devices": devices, "busiest": busiest}
