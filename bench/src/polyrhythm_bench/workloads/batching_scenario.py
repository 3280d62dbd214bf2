"""Simulates a batching scenario on the virtual clock, with slots that step and generators that serve only.

Training takes no time and admission never waits, so that batching alone decides the rate. The real conductor drives
every run; the virtual clock makes the numbers the same on any machine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import FREE, Cost, parse_cost
from polyrhythm.plugins.virtual.clustersim.hardware import VirtualClock
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.inference.batching import powers
from polyrhythm.scheduler.records import BatchingChosen, Command, Event, TrainUntil
from polyrhythm.scheduler.settings import SchedulerSettings

#: Seconds of virtual time that `auto` learns before it is measured, and again after a change.
WARM_UP_S = 20.0
_SETTLING_CYCLES = 15
_CYCLES = {"short": 15, "long": 40}
_REQUESTS = {"short": 1500, "long": 6000}
FOREVER = 10**9


@dataclass(frozen=True, slots=True)
class BatchingScenario:
    """A batching scenario. step: distribution of a slot's chunk-step time; serve: cost of a pass, by rows; later_step,
    later_serve: their values after a change.

    padded: passes are padded to powers of two, and cost as much.
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


@dataclass(slots=True)
class ClockReference:
    """A holder of the clock, which exists later than the costs that read it."""

    clock: VirtualClock | None = None

    @property
    def now(self) -> float:
        return self.clock.now if self.clock is not None else 0.0


@dataclass(frozen=True, slots=True)
class ChangingCost(Cost):
    """A cost that changes to `later` at the end of the first warm-up."""

    later: Cost = FREE
    clock: ClockReference = field(default_factory=ClockReference)

    def draw(self, rng: random.Random, units: int = 1) -> float:
        if self.clock.now < WARM_UP_S:
            return Cost.draw(self, rng, units)
        return self.later.draw(rng, units)


@dataclass(frozen=True, slots=True)
class PaddedCost(Cost):
    """A cost for the next power of two of the units."""

    def draw(self, rng: random.Random, units: int = 1) -> float:
        return Cost.draw(self, rng, powers(units)[-1])


def rate(
    scene: BatchingScenario,
    scheduler: SchedulerSettings,
    seed: int,
    length: str,
    heard: list[BatchingChosen] | None = None,
) -> float:
    """Rows per second of virtual time after the warm-up. heard: receives the choices of `auto`."""
    learns = scheduler.batching == "auto"
    cluster = cluster_of(scene, scheduler, seed)
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
    driver.submit(TrainUntil(FOREVER))
    driver.run(FOREVER, begin)
    before = driver.measures.transitions
    driver.run(FOREVER, end)
    return (driver.measures.transitions - before) / (end - begin)


def _cycle(scene: BatchingScenario) -> float:
    """Approximate seconds of a slot from one request to the next."""
    step, serve = scene.later_step or scene.step, scene.later_serve or scene.serve
    rows = scene.total_rows / scene.generators
    return parse_cost(step).mean(0) + parse_cost(serve).mean(math.ceil(rows))


def cluster_of(
    scene: BatchingScenario, scheduler: SchedulerSettings, seed: int, *, record: bool = False
) -> VirtualCluster:
    """The scene on the virtual clock. record: keep the decisions in `driver.steps`."""
    reference = ClockReference()
    simulators = {
        "env_batches": scene.slots,
        "rows": scene.rows,
        "step": _cost(scene.step, scene.later_step, reference),
        "steps": scene.episode_steps,
    }
    serve = _cost(scene.serve, scene.later_serve, reference)
    if scene.padded:
        serve = PaddedCost(serve.base, serve.per_unit)
    generators = {"count": scene.generators, "serve": serve}
    settings = ClusterSettings.model_validate(
        {
            "seed": seed,
            "versions": FOREVER,
            "scheduler": scheduler,
            "simulators": [simulators],
            "generators": [generators],
        }
    )
    cluster = VirtualCluster(settings, record=record)
    reference.clock = cluster.driver.clock
    return cluster


def _cost(before: str, later: str, clock: ClockReference) -> Cost:
    cost = parse_cost(before)
    return ChangingCost(cost.base, cost.per_unit, parse_cost(later), clock) if later else cost
