"""ROLL Flash's mechanisms, live with engines that sleep beside the same conductor on the virtual clock.

Each mode has one mechanism more than the one before (`workloads.answers.MODES`), from lock-step batch rollout on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from polyrhythm_bench.harness.version_cost import VersionCost, measure
from polyrhythm_bench.workloads.answers import MODES, AnswerMode, AnswerScene, SimulatedRates, live, simulated

log = logging.getLogger(__name__)

#: Least trained samples per second of the best asynchronous mode, as a multiple of lock-step's.
SPEEDUP = 2.0


def run(scene: AnswerScene, versions: int = 6, repeats: int = 3, modes: Sequence[str] = tuple(MODES)) -> dict[str, Any]:
    """These modes, lock-step among them, `versions` versions at a time, in interleaved turns: what `summarise`
    returns."""
    turns: dict[str, list[VersionCost]] = {name: [] for name in modes}
    for turn in range(repeats):
        for name in modes:
            mode = MODES[name]
            seeded = scene.model_copy(update={"seed": scene.seed + turn})
            turns[name].append(measure(live(seeded, mode, versions), versions, validated=False))
            rate = scene.samples / turns[name][-1].seconds_per_version
            log.info("turn %d, %s: %.1f trained samples/s", turn + 1, name, rate)
    expected = {name: simulated(scene, MODES[name]) for name in modes}
    return {"scene": scene.model_dump(), "versions": versions, "repeats": repeats, **summarise(scene, turns, expected)}


def summarise(
    scene: AnswerScene, turns: Mapping[str, Sequence[VersionCost]], expected: Mapping[str, SimulatedRates]
) -> dict[str, Any]:
    """By mode medians over the turns.

    samples_per_s, trained; simulated, and the fraction of it; speedup over lock-step in the same turn, and the
    simulated one; tokens_per_s of answers that ended (in lock-step their number times the mean length); generators,
    trainer: shares of the time in which they work; devices: of the pool; lag_mean; main_cores: CPU of the main process.
    """
    first = "lockstep"
    modes: dict[str, dict[str, Any]] = {}
    rates = {name: [scene.samples / cost.seconds_per_version for cost in costs] for name, costs in turns.items()}
    for name, costs in turns.items():
        mode, own = MODES[name], expected[name]
        generators = median(_generators(cost) for cost in costs)
        trainer = median(cost.busy["trainer"] for cost in costs)
        rate = median(rates[name])
        modes[name] = {
            "samples_per_s": rate,
            "simulated": own.samples_per_s,
            "fraction_of_simulated": rate / own.samples_per_s,
            "speedup": median(mine / other for mine, other in zip(rates[name], rates[first], strict=True)),
            "simulated_speedup": own.samples_per_s / expected[first].samples_per_s,
            "tokens_per_s": median(_tokens(scene, cost) for cost in costs),
            "generators": generators,
            "simulated_generators": own.generators,
            "trainer": trainer,
            "devices": _devices(scene, mode, generators, trainer),
            "lag_mean": median(cost.lag_mean for cost in costs),
            "rates_by_turn": rates[name],
        }
    best = max(found["speedup"] for name, found in modes.items() if MODES[name].overlaps)
    return {"best_speedup": best, "within_limits": best >= SPEEDUP, "modes": modes}


def _generators(cost: VersionCost) -> float:
    return fmean(busy for name, busy in cost.busy.items() if name.startswith("generator-"))


def _tokens(scene: AnswerScene, cost: VersionCost) -> float:
    """Tokens of answers that ended; one answer is one transition."""
    return cost.tokens_per_s or cost.transitions_per_s * scene.mean_tokens


def _devices(scene: AnswerScene, mode: AnswerMode, generators: float, trainer: float) -> float:
    """Share of the pool's device time in which something works."""
    if not mode.overlaps:
        return generators + trainer
    training = scene.training_devices / scene.devices
    return generators * (1 - training) + trainer * training
