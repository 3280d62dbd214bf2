"""Gain from overlapping: one scene in four modes, in real processes, beside the limit of the simulated cluster.

lockstep: every env batch waits for every other at each step, the batch is sharded evenly over the generators, training
waits for rollout and rollout for training. rollout_async: env batches no longer wait for each other (batching auto).
train_async: training no longer waits. full_async: both.

The limit is what the same conductor reaches on a virtual clock, where messages and the work beside sleeping take no
time, with the best fixed batching of a grid, fully asynchronous. A mode's own simulation, with that batching or in
lock-step, stands beside it. `bare` is the throughput of the same sleeping stages with the same
sockets and nothing else (`workloads.transport_only`): the most that processes and their transport allow here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from polyrhythm_bench.harness.version_cost import VersionCost, measure
from polyrhythm_bench.workloads import scene as scenes
from polyrhythm_bench.workloads import transport_only
from polyrhythm_bench.workloads.scene import MODES, Mode, StageScenario

log = logging.getLogger(__name__)

#: Least throughput of full asynchrony: as a fraction of the limit, and as a multiple of lock-step.
LIMIT, SPEEDUP = 0.95, 2.0
#: CPU milliseconds of all processes per transition, at most, in the usual scene.
CPU_MS_LIMIT = 0.5
_LOCKSTEP = {"type": "lockstep"}


def run(scene: StageScenario, versions: int = 12, repeats: int = 3) -> dict[str, Any]:
    """Every mode, `versions` versions at a time, in interleaved turns.

    Returns the settled scene; `limit`, `bound` and `bare` in transitions per second; `best_batching` of the grid; by
    mode what `summarise` returns; `within_limits`.
    """
    scene = scene.settled()
    auto = {"type": "auto", "max_rows": scene.samples}
    runs = {mode: scenes.live(scene, mode, batching(mode, auto), versions) for mode in MODES}
    best, limit = best_batching(scene)
    turns: dict[Mode, list[VersionCost]] = {mode: [] for mode in MODES}
    bare: list[float] = []
    for turn in range(repeats):
        for mode, costs in turns.items():
            costs.append(measure(runs[mode], versions))
            rate = scene.transitions / costs[-1].seconds_per_version
            log.info("turn %d, %s: %.0f transitions/s, limit %.0f", turn + 1, mode, rate, limit)
        bare.append(transport_only.rate(scene.of_turn(turn), max(1, best["max_rows"] // scene.rows)))
        log.info("turn %d, bare stages: %.0f transitions/s", turn + 1, bare[-1])
    expected = {mode: scenes.simulated(scene, mode, batching(mode, best)) for mode in MODES}
    return {
        "scene": scene.model_dump(),
        "versions": versions,
        "repeats": repeats,
        "best_batching": best,
        "limit": limit,
        **summarise(scene, turns, bare, expected, limit),
    }


def batching(mode: Mode, free: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mode's: `free` where env batches do not wait for each other."""
    return free if mode in ("rollout_async", "full_async") else _LOCKSTEP


def best_batching(scene: StageScenario) -> tuple[dict[str, Any], float]:
    """The fastest fixed batching of the grid under full asynchrony, and transitions per second with it: the limit."""
    rates = [(scenes.simulated(scene, "full_async", cell), cell) for cell in scenes.batchings(scene)]
    limit, best = max(rates, key=lambda found: found[0])
    return best, limit


def summarise(
    scene: StageScenario,
    turns: Mapping[Mode, list[VersionCost]],
    bare: Sequence[float],
    expected: Mapping[Mode, float],
    limit: float,
) -> dict[str, Any]:
    """Medians over the turns, by mode and of `bare`; `fraction_of_bare` is full asynchrony's, in the same turn.

    transitions_per_s; simulated (the mode's own, on the virtual clock); fraction_of_simulated, fraction_of_limit,
    fraction_of_bound; speedup over lock-step in the same turn; lag_mean; cores_busy; others_cores (of everything else
    on the machine meanwhile); cpu_ms_per_transition of all processes; main_us_per_chunk_step, CPU of the main process
    (a chunk here is one action); rates_by_turn. `within_cpu_limit`: full asynchrony's CPU is at most `CPU_MS_LIMIT`.
    """
    most = scenes.bound(scene)
    rates = {mode: [scene.transitions / cost.seconds_per_version for cost in own] for mode, own in turns.items()}
    modes: dict[str, dict[str, Any]] = {}
    for mode, own in rates.items():
        rate = median(own)
        modes[mode] = {
            "transitions_per_s": rate,
            "simulated": expected[mode],
            "fraction_of_simulated": rate / expected[mode],
            "fraction_of_limit": rate / limit,
            "fraction_of_bound": rate / most,
            "speedup": median(mine / first for mine, first in zip(own, rates["lockstep"], strict=True)),
            "lag_mean": median(cost.lag_mean for cost in turns[mode]),
            "cores_busy": median(cost.cores_busy for cost in turns[mode]),
            "others_cores": median(cost.others_cores for cost in turns[mode]),
            "cpu_ms_per_transition": median(cost.cpu_ms_per_transition for cost in turns[mode]),
            "main_us_per_chunk_step": median(cost.main_us_per_transition for cost in turns[mode]),
            "rates_by_turn": own,
        }
    full = modes["full_async"]
    reached = full["fraction_of_limit"] >= LIMIT and full["speedup"] >= SPEEDUP
    return {
        "bound": most,
        "bare": median(bare),
        "bare_by_turn": list(bare),
        "bare_fraction_of_limit": median(bare) / limit,
        "fraction_of_bare": median(own / other for own, other in zip(rates["full_async"], bare, strict=True)),
        "within_limits": reached,
        "within_cpu_limit": full["cpu_ms_per_transition"] <= CPU_MS_LIMIT,
        "modes": modes,
    }
