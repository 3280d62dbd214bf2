"""The search for a placement against all placements: random problems, each judged by the same simulated cluster.

A problem is a recipe and a profile with random costs: simulators on the hosts or on devices, fast or slow passes and
updates, 1 to 4 devices (2 with simulators on them), with and without room for all stations on one. Every placement: all
ways to divide equal devices among the kinds, times sharing, env batches, slots and rows of a pass.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import median
from typing import Any

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.planning.arrangement import Arrangement, reshaped
from polyrhythm.plugins.planning.judge import FULL, Length
from polyrhythm.plugins.planning.problem import PlacementProblem, problem_of
from polyrhythm.plugins.planning.profile import (
    Episodes,
    Machine,
    Profile,
    StationProfile,
    Timing,
    Work,
    settings_digest,
)
from polyrhythm.plugins.planning.search import Choices
from polyrhythm.runtime.devices import Devices

log = logging.getLogger(__name__)

_GB = 10**9
#: Of a simulation: problems are small, so that all placements can be judged.
_FULL = Length(counted=2, requests=600)
#: Largest regrets that the design allows: median and worst.
LIMITS = (0.03, 0.10)


@dataclass(frozen=True)
class RandomProblem(PlacementProblem):
    """A problem with few choices, so that all can be tried."""

    @property
    def choices(self) -> Choices:
        sharing = ("share", "lease")
        return Choices(
            sharing=sharing, simulators=(self.simulators,), env_batches=(1, 2), slots=(1, 2), max_rows=(4, 16)
        )

    @property
    def simulators(self) -> int:
        return 1 if self.profile.stations["simulator"].device == "cuda" else 2

    def everything(self) -> Iterator[Arrangement]:
        """Every placement."""
        choices, on_devices = self.choices, self.profile.stations["simulator"].device == "cuda"
        for simulates, generates, trains in divisions(self.devices.count, simulators=on_devices):
            values = product(choices.sharing, choices.env_batches, choices.slots, choices.max_rows)
            for sharing, env_batches, slots, max_rows in values:
                one = reshaped(
                    self.base,
                    simulators=max(1, len(simulates)) * self.simulators,
                    generators=len(generates),
                    env_batches=env_batches,
                    slots=slots,
                    max_rows=max_rows,
                    sharing=sharing,
                    simulator_devices=simulates,
                    generator_devices=generates,
                    trainer_devices=trains,
                )
                if one is not None:
                    yield one


def divisions(devices: int, *, simulators: bool) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """All ways to give equal devices to simulators (if these need one), generators and trainer, each at least one."""
    kinds = (0, 1, 2) if simulators else (1, 2)
    sets = [own for own in product((False, True), repeat=len(kinds)) if any(own)]

    def counts(left: int, regions: int) -> Iterator[tuple[int, ...]]:
        if not regions:
            yield ()
            return
        for own in range(left + 1):
            for rest in counts(left - own, regions - 1):
                yield (own, *rest)

    for sizes in counts(devices, len(sets)):
        found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        first = 0
        for size, members in zip(sizes, sets, strict=True):
            for kind, member in zip(kinds, members, strict=True):
                found[kind] += range(first, first + size) if member else ()
            first += size
        if all(found[kind] for kind in kinds):
            yield tuple(found[0]), tuple(found[1]), tuple(found[2])


@cache
def _recipe(rows: int, samples: int, max_lag: float) -> RunConfig:
    return load_config(
        "latency",
        [
            "rollout.simulators=1",
            "rollout.env_batches=1",
            f"rollout.rows={rows}",
            "rollout.generators=1",
            f"freshness.max_lag={max_lag}",
            f"training.mini_batch_samples={samples}",
            f"training.minibatch_steps={128 if samples >= 256 else 0}",
            "training.epochs=1",
        ],
    )


def problem(seed: int, times: int = 1) -> RandomProblem:
    """Random costs, sizes and devices. times: factor of the samples of a version; from 256 samples on the search judges
    briefly first (`PlacementProblem.short`)."""
    rng = random.Random(seed)
    config = _recipe(rng.choice((8, 12, 16)), times * rng.choice((8, 12, 16)), rng.choice((0.0, 1.0, 1.0, 2.0)))
    on_device = rng.random() < 1 / 3
    chunk_steps, devices = rng.choice((4, 6, 8)), rng.randint(1, 2 if on_device else 4)

    def near(mean: float) -> float:
        return float(mean * rng.lognormvariate(0, 0.8))

    step, serve, train = near(0.05), near(0.06), near(0.02)
    generator, trainer = rng.choice((8, 20, 40)), rng.choice((20, 40, 60))
    switch = near(1.0)
    profile = Profile(
        recipe=config.name,
        settings=settings_digest(config),
        date="2026-11-28T00:00:00+00:00",
        machine=Machine(cores=16, memory=1000 * _GB, devices=devices, device="random", device_memory=80 * _GB),
        episodes=Episodes(mean=chunk_steps, longest=chunk_steps),
        weights=_GB,
        stations={
            "simulator": StationProfile(
                device="cuda" if on_device else "cpu",
                resident=2 * _GB if on_device else 0,
                works={"step": work((1, step), (16, step * rng.uniform(1, 6))), "reset": work((1, near(0.05)))},
                beside={"generator": 1.24, "trainer": 1.24} if on_device else {},
            ),
            "generator": StationProfile(
                device="cuda",
                resident=generator * _GB,
                works={
                    "pass": work((1, serve), (16, serve * rng.uniform(1.2, 8), 4 * _GB)),
                    "apply": work((_GB, near(0.05))),
                    "offload": work((generator * _GB, switch * generator / 40)),
                },
            ),
            "trainer": StationProfile(
                device="cuda",
                resident=trainer * _GB,
                works={
                    "micro_batch": work((8, 8 * train, 8 * _GB), (128, 128 * train, 8 * _GB)),
                    "optimizer_step": work((0, near(0.05))),
                    "stage": work((_GB, near(0.05))),
                    "offload": work((trainer * _GB, switch * trainer / 40)),
                },
            ),
        },
    )
    base = problem_of(profile, config, Devices((("", devices),)), env_settings(config).spec())
    return RandomProblem(base.profile, base.config, base.devices, base.spec, full=_FULL if times == 1 else FULL)


def work(*points: tuple[float, ...]) -> Work:
    """Points are amount, seconds and bytes (0 if left out), without spread."""
    return Work(
        timings=tuple(
            Timing(amount=int(n), count=1, mean_s=s, median_s=s, p90_s=s, p99_s=s, memory=int(sum(memory)))
            for n, s, *memory in points
        )
    )


def run(problems: int = 60, first: int = 0, times: int = 1) -> dict[str, Any]:
    """The search's regret, the share of the best placement's throughput that it misses, and its seconds."""
    rows: list[dict[str, Any]] = []
    for seed in range(first, first + problems):
        one = problem(seed, times)
        begin, cpu = time.perf_counter(), time.process_time()
        found = one.solve()[0]
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        others = list(dict.fromkeys(one.everything()))
        known = zip(others, one.judge(others), strict=True)
        rates = {other: prediction.samples_per_s for other, prediction in known if prediction is not None}
        rate = found.prediction.samples_per_s
        best = max([*rates.values(), rate])
        row = {
            "seed": seed,
            "devices": one.devices.count,
            "placements": len(rates),
            "regret": 1 - rate / best,
            "found": found.arrangement,
            "best": max(rates, key=rates.__getitem__, default=found.arrangement),
            "seconds": seconds,
            "cpu_s": cpu_s,
        }
        log.info("problem %(seed)d: %(placements)d placements, regret %(regret).3f, search %(cpu_s).2f s", row)
        rows.append(row)
    return summary(rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of several problems."""
    regrets = [row["regret"] for row in rows]
    return {
        "problems": rows,
        "median": median(regrets),
        "worst": max(regrets),
        "seconds": sum(row["seconds"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "within_limits": median(regrets) <= LIMITS[0] and max(regrets) <= LIMITS[1],
    }
