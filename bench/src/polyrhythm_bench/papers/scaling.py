"""Simulates RL-VLA3's figure 7: LIBERO + GR00T N1.5 from 8 to 256 GPUs; the figure prints no numbers.

Stage times are those of table 4, with as many environments per device at every size. Two things grow with the hosts:
the exchange of sharded weights and gradients (`stages.exchange_s`), and the publication of a version, which the
trainer's host sends to the others one after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from polyrhythm.plugins.virtual.clustersim.measures import EXCHANGE, SERVE, STEP, TRAIN
from polyrhythm_bench.papers.published import PaperData
from polyrhythm_bench.papers.stages import CHUNK_STEPS, Simulated, Times, simulate

GPUS = (8, 16, 24, 32, 64, 128, 256)


def table(
    data: PaperData, times: Times, gpus: Sequence[int] = GPUS, chunk_steps: int = CHUNK_STEPS, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for each number of GPUs and mode: throughput, scaling efficiency, shares of time.

    times: of table 4. `busiest`: simulation, generation, publication or the trainer.
    """
    example = next(row for row in data.rows if row.setup.key == "libero" and row.batches == 4 and row.mode == "rollout")
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
            found = simulate(row, times, chunk_steps, seed)
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
