"""Is `batching: auto` as fast as the best fixed setting? A simulated closed loop, scene by scene.

A scene says how many slots of how many rows ask how many generators, how long a step and a pass take, and, in some,
what these change to in mid-run. Training takes no time and admission never waits, so that batching alone decides. The
real conductor drives every run; the virtual clock makes the figures the same on any machine.

Per scene, `dynamic` is tried with every pair of a grid of max_rows and max_wait; the best ones are then measured again
as long as `auto` and over as many seeds. The clock of `auto` runs for a warm-up first, and where something changes for
the same time once more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any

from polyrhythm.clustersim.clock import Clock
from polyrhythm.clustersim.cluster import Cluster
from polyrhythm.clustersim.costs import FREE, Cost, parse_cost
from polyrhythm.clustersim.settings import ClusterSettings
from polyrhythm.flow.buckets import powers
from polyrhythm.flow.conductor import Conductor
from polyrhythm.flow.records import BatchingChosen, Command, Event, TrainUntil
from polyrhythm.flow.settings import FlowSettings

#: Seconds of virtual time that `auto` learns before it is measured, and again after a change.
WARM_UP_S = 20.0
#: The part that `auto` must reach of the best fixed setting, in every scene.
TO_REACH = 0.97
#: Waits of the grid, ms; with the last one only a full batch, or all slots waiting, starts a pass.
WAITS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 1e9)
_SETTLING_CYCLES = 15
_CYCLES = {"short": 15, "long": 40}
_REQUESTS = {"short": 1500, "long": 6000}
_FINALISTS = 4
_FOREVER = 10**9

STEPS = (
    "constant:10ms",
    "lognormal:10ms:0.8",
    "mixture:0.9*lognormal:8ms:0.5+0.1*constant:30ms",
    "normal:10ms:0.3ms",  # lumpy: those that were served together come back within a millisecond
)
PASSES = ("10ms+0.1ms", "2ms+1ms", "1ms+0.05ms", "30ms+0.01ms")


@dataclass(frozen=True, slots=True)
class Scene:
    """step: law of a slot's chunk step; serve: of a pass, by rows; later_step, later_serve: what they change to.

    padded: passes are padded to powers of two, and take as long as these.
    """

    slots: int
    rows: int
    generators: int
    step: str
    serve: str
    later_step: str = ""
    later_serve: str = ""
    episode_steps: str = "lognormal:50steps:0.4"
    padded: bool = False

    @property
    def changes(self) -> bool:
        return bool(self.later_step or self.later_serve)

    @property
    def total_rows(self) -> int:
        return self.slots * self.rows

    def name(self) -> str:
        def change(now: str, later: str) -> str:
            return f"{now} → {later}" if later else now

        loop = f"{self.slots}x{self.rows} rows, {self.generators} generators"
        serve = change(self.serve, self.later_serve) + " (padded)" * self.padded
        return f"{loop}, step {change(self.step, self.later_step)}, pass {serve}"


def scenes() -> list[Scene]:
    """Every pair of a step's and a pass's law with 1, 2 and 4 generators; slots and rows go round; then the changes."""
    found = []
    sizes = ((4, 1), (16, 4), (64, 1), (16, 1), (64, 4), (4, 16), (16, 16), (256, 1), (64, 16), (4, 4), (16, 1))
    for index, (generators, step, serve) in enumerate(product((1, 2, 4), STEPS, PASSES)):
        slots, rows = sizes[index % len(sizes)]
        found.append(Scene(slots, rows, generators, step, serve))
    first, noisy = STEPS[0], STEPS[1]
    found += [
        Scene(16, 1, 1, noisy, "30ms+0.01ms", later_serve="2ms+1ms"),
        Scene(16, 1, 1, noisy, "2ms+1ms", later_serve="30ms+0.01ms"),
        Scene(64, 1, 4, noisy, "10ms+0.1ms", later_step="lognormal:40ms:0.8"),
        Scene(64, 1, 4, "lognormal:40ms:0.8", "10ms+0.1ms", later_step=noisy),
        Scene(16, 1, 2, first, "1ms+0.05ms", later_serve="30ms+0.01ms"),
        Scene(16, 4, 2, first, "30ms+0.01ms", later_step="constant:100ms", later_serve="10ms+0.1ms"),
        Scene(64, 1, 2, first, "10ms+0.1ms", episode_steps="mixture:0.9*constant:20steps+0.1*constant:200steps"),
        Scene(16, 1, 1, noisy, "2ms+1ms", padded=True),
        Scene(24, 1, 2, noisy, "2ms+1ms", padded=True),
        Scene(20, 1, 1, first, "2ms+1ms", padded=True),
        Scene(48, 1, 2, noisy, "10ms+0.1ms", padded=True),
    ]
    return found


@dataclass(slots=True)
class Hour:
    """The time, once there is a clock."""

    clock: Clock | None = None

    @property
    def now(self) -> float:
        return self.clock.now if self.clock is not None else 0.0


@dataclass(frozen=True, slots=True)
class ChangingCost(Cost):
    """A cost that is `later` from the end of the first warm-up on."""

    later: Cost = FREE
    hour: Hour = field(default_factory=Hour)

    def draw(self, rng: random.Random, units: int = 1) -> float:
        if self.hour.now < WARM_UP_S:
            return Cost.draw(self, rng, units)
        return self.later.draw(rng, units)


@dataclass(frozen=True, slots=True)
class PaddedCost(Cost):
    """A cost for the next power of two of the units."""

    def draw(self, rng: random.Random, units: int = 1) -> float:
        return Cost.draw(self, rng, powers(units)[-1])


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


def compare(scene: Scene, seeds: int = 3) -> dict[str, Any]:
    """`auto` against the best of the grid in one scene; where something changes, in the time after the change."""
    # What was before a change does not matter to a fixed setting, so these begin with what it changes to.
    step, serve = scene.later_step or scene.step, scene.later_serve or scene.serve
    end = replace(scene, step=step, serve=serve, later_step="", later_serve="")
    rough = {limits: rate(end, _fixed(*limits), 0, "short") for limits in _grid(scene)}
    finalists = sorted(rough, key=lambda limits: -rough[limits])[:_FINALISTS]
    fixed = {limits: _mean(end, _fixed(*limits), seeds) for limits in finalists}
    best = max(fixed, key=lambda limits: fixed[limits])
    heard: list[BatchingChosen] = []
    buckets = powers(scene.total_rows) if scene.padded else ()
    flow = FlowSettings(**_LIMITLESS, batching="auto", max_rows=_FOREVER, buckets=buckets)
    auto = _mean(scene, flow, seeds, heard)
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


def _fixed(max_rows: int, max_wait_ms: float) -> FlowSettings:
    return FlowSettings(**_LIMITLESS, max_rows=max_rows, max_wait_s=1e-3 * max_wait_ms)


def _grid(scene: Scene) -> Iterator[tuple[int, float]]:
    total = scene.total_rows
    sizes = {total, total // 2, total // 4, *(1 << power for power in range(2, 10, 2))}
    sizes = {size for size in sizes if scene.rows <= size <= total}
    yield from product(sorted(sizes), WAITS_MS)


def _mean(scene: Scene, flow: FlowSettings, seeds: int, heard: list[BatchingChosen] | None = None) -> float:
    return fmean(rate(scene, flow, seed, "long", heard) for seed in range(seeds))


def rate(scene: Scene, flow: FlowSettings, seed: int, length: str, heard: list[BatchingChosen] | None = None) -> float:
    """Rows per second of virtual time, after the warm-up. heard: gets what `auto` said."""
    learns = flow.batching == "auto"
    cluster = cluster_of(scene, flow, seed)
    if heard is not None:
        heard.clear()

        def listen(_now: float, _event: Event, commands: list[Command]) -> None:
            heard.extend(command for command in commands if isinstance(command, BatchingChosen))

        cluster.driver.observer = listen
    cycle = _cycle(scene)
    begin = _SETTLING_CYCLES * cycle
    if learns:
        begin = WARM_UP_S * (2 if scene.changes else 1)
    end = begin + max(_CYCLES[length] * cycle, _REQUESTS[length] * cycle / scene.slots)
    driver = cluster.driver
    driver.tell(TrainUntil(_FOREVER))
    driver.run(_FOREVER, begin)
    before = driver.measures.transitions
    driver.run(_FOREVER, end)
    return (driver.measures.transitions - before) / (end - begin)


def _cycle(scene: Scene) -> float:
    """About how long a slot takes from one request to the next, seconds."""
    step, serve = scene.later_step or scene.step, scene.later_serve or scene.serve
    rows = scene.total_rows / scene.generators
    return parse_cost(step).mean(0) + parse_cost(serve).mean(math.ceil(rows))


def cluster_of(scene: Scene, flow: FlowSettings, seed: int, *, record: bool = False) -> Cluster:
    """The scene on the virtual clock. record: keep the decisions in `driver.steps`."""
    hour = Hour()
    simulators = {
        "env_batches": scene.slots,
        "rows": scene.rows,
        "step": _cost(scene.step, scene.later_step, hour),
        "steps": scene.episode_steps,
    }
    serve = _cost(scene.serve, scene.later_serve, hour)
    if scene.padded:
        serve = PaddedCost(serve.base, serve.per_unit)
    generators = {"count": scene.generators, "serve": serve}
    settings = ClusterSettings.model_validate(
        {"seed": seed, "versions": _FOREVER, "flow": flow, "simulators": [simulators], "generators": [generators]}
    )
    cluster = Cluster(settings, Conductor(flow), record)
    hour.clock = cluster.driver.clock
    return cluster


def _cost(before: str, later: str, hour: Hour) -> Cost:
    cost = parse_cost(before)
    return ChangingCost(cost.base, cost.per_unit, parse_cost(later), hour) if later else cost
