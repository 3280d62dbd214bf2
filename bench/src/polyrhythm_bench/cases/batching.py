"""`batching: auto` beside the best fixed setting, in simulated closed loops.

A scene is a number of slots, rows and generators, the time of a step and of a pass, and in some scenes a change of
these times in mid-run. Training takes no time and admission never waits, so that batching alone decides. The
real conductor drives every run; the virtual clock makes the numbers the same on any machine.

Per scene, `dynamic` is tried with every pair of a grid of max_rows and max_wait; the best ones are then measured again
as long as `auto` and over as many seeds. The clock of `auto` runs for a warm-up first, and where something changes for
the same time once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from polyrhythm.scheduler.inference.batching import powers
from polyrhythm.scheduler.records import BatchingChosen
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm_bench.workloads.batching_scenario import FOREVER, BatchingScenario, rate

#: Least throughput of `auto` in every scene, as a fraction of the best fixed setting's.
TO_REACH = 0.97
#: Waits of the grid, ms; with the last one only a full batch, or all slots waiting, starts a pass.
WAITS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 1e9)
_FINALISTS = 4

STEPS = (
    "constant:10ms",
    "lognormal:10ms:0.8",
    "mixture:0.9*lognormal:8ms:0.5+0.1*constant:30ms",
    "normal:10ms:0.3ms",  # lumpy: those that were served together come back within a millisecond
)
PASSES = ("10ms+0.1ms", "2ms+1ms", "1ms+0.05ms", "30ms+0.01ms")


def scenes() -> list[BatchingScenario]:
    """Each pair of step time and pass time with 1, 2 and 4 generators, slots and rows in turns; then changing ones."""
    found = []
    sizes = ((4, 1), (16, 4), (64, 1), (16, 1), (64, 4), (4, 16), (16, 16), (256, 1), (64, 16), (4, 4), (16, 1))
    for index, (generators, step, serve) in enumerate(product((1, 2, 4), STEPS, PASSES)):
        slots, rows = sizes[index % len(sizes)]
        found.append(BatchingScenario(slots, rows, generators, step, serve))
    first, noisy = STEPS[0], STEPS[1]
    found += [
        BatchingScenario(16, 1, 1, noisy, "30ms+0.01ms", later_serve="2ms+1ms"),
        BatchingScenario(16, 1, 1, noisy, "2ms+1ms", later_serve="30ms+0.01ms"),
        BatchingScenario(64, 1, 4, noisy, "10ms+0.1ms", later_step="lognormal:40ms:0.8"),
        BatchingScenario(64, 1, 4, "lognormal:40ms:0.8", "10ms+0.1ms", later_step=noisy),
        BatchingScenario(16, 1, 2, first, "1ms+0.05ms", later_serve="30ms+0.01ms"),
        BatchingScenario(16, 4, 2, first, "30ms+0.01ms", later_step="constant:100ms", later_serve="10ms+0.1ms"),
        BatchingScenario(
            64, 1, 2, first, "10ms+0.1ms", episode_steps="mixture:0.9*constant:20steps+0.1*constant:200steps"
        ),
        BatchingScenario(16, 1, 1, noisy, "2ms+1ms", padded=True),
        BatchingScenario(24, 1, 2, noisy, "2ms+1ms", padded=True),
        BatchingScenario(20, 1, 1, first, "2ms+1ms", padded=True),
        BatchingScenario(48, 1, 2, noisy, "10ms+0.1ms", padded=True),
    ]
    return found


def run(seeds: int = 3, only: Sequence[int] = ()) -> dict[str, Any]:
    """Measure every scene, or those numbered `only`.

    Returns `scenes` (per scene: auto and best in rows per second of virtual time, `ratio`, the best fixed setting, what
    auto chose), the worst `ratio` over all, and whether it is `reached`.
    """
    chosen = [(number, scene) for number, scene in enumerate(scenes()) if not only or number in only]
    results = [{"number": number, **compare(scene, seeds)} for number, scene in chosen]
    worst = min(result["ratio"] for result in results)
    ratios = [result["ratio"] for result in results]
    return {"ratio": worst, "mean_ratio": fmean(ratios), "reached": worst >= TO_REACH, "scenes": results}


def compare(scene: BatchingScenario, seeds: int = 3) -> dict[str, Any]:
    """`auto` against the best of the grid in one scene; where something changes, in the time after the change."""
    # A fixed setting has no memory, so its runs begin after the change.
    step, serve = scene.later_step or scene.step, scene.later_serve or scene.serve
    end = replace(scene, step=step, serve=serve, later_step="", later_serve="")
    rough = {limits: rate(end, _fixed(*limits), 0, "short") for limits in _grid(scene)}
    finalists = sorted(rough, key=lambda limits: -rough[limits])[:_FINALISTS]
    fixed = {limits: _mean(end, _fixed(*limits), seeds) for limits in finalists}
    best = max(fixed, key=lambda limits: fixed[limits])
    heard: list[BatchingChosen] = []
    buckets = powers(scene.total_rows) if scene.padded else ()
    scheduler = SchedulerSettings(**_LIMITLESS, batching="auto", max_rows=FOREVER, buckets=buckets)
    auto = _mean(scene, scheduler, seeds, heard)
    return {
        "scene": scene.name(),
        "auto": auto,
        "best": fixed[best],
        "ratio": auto / fixed[best],
        "best_max_rows": best[0],
        "best_max_wait_ms": best[1],
        "served_at_once": rough[scene.total_rows, 0.0],
        "auto_max_rows": heard[-1].max_rows if heard else None,
        "auto_max_wait_ms": 1e3 * heard[-1].max_wait_s if heard else None,
        "auto_choices": len(heard),
    }


_LIMITLESS: dict[str, Any] = {"batch_size": 64, "max_lag": 1e6, "bound": "mean"}


def _fixed(max_rows: int, max_wait_ms: float) -> SchedulerSettings:
    return SchedulerSettings(**_LIMITLESS, max_rows=max_rows, max_wait_s=1e-3 * max_wait_ms)


def _grid(scene: BatchingScenario) -> Iterator[tuple[int, float]]:
    total = scene.total_rows
    sizes = {total, total // 2, total // 4, *(1 << power for power in range(2, 10, 2))}
    sizes = {size for size in sizes if scene.rows <= size <= total}
    yield from product(sorted(sizes), WAITS_MS)


def _mean(
    scene: BatchingScenario, scheduler: SchedulerSettings, seeds: int, heard: list[BatchingChosen] | None = None
) -> float:
    return fmean(rate(scene, scheduler, seed, "long", heard) for seed in range(seeds))
