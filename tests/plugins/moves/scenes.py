"""Clusters whose costs change, what a fixed operation achieves in them, and judges that need no simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.moves.conductor import MovingConductor
from polyrhythm.plugins.moves.operation import Operation
from polyrhythm.plugins.moves.search import MoveForecast
from polyrhythm.plugins.moves.timing import MeasuredTimes
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.conductor import Conductor
from polyrhythm.scheduler.records import Command, Event, MoveChosen, Published
from polyrhythm.scheduler.settings import BatchLimits, MoveRules, SchedulerSettings

#: The second generator of `scene` is off.
OFF = ("generator-1",)
#: Samples per second of an operation, as a judge of the tests forecasts them.
Rates = Callable[[Operation], float]


def scene(**changes: Any) -> ClusterSettings:
    """One generator on a device of its own, one on the trainer's. As long as nothing changes, training takes longest,
    so that it is faster without the second: 30 samples/s instead of 24."""
    plain: dict[str, Any] = {
        "versions": 60,
        "scheduler": {"batch_size": 32, "max_lag": 2.0, "max_rows": 16, "max_wait_s": 0.0, "max_attempts": 60},
        "simulators": [{"env_batches": 4, "slots": 2, "rows": 4, "step": "lognormal:100ms:0.3", "steps": 8}],
        "generators": [{"serve": "4ms+2ms", "devices": "0"}, {"serve": "4ms+2ms", "devices": "1"}],
        "trainer": {"update": "1000ms", "devices": "1"},
    }
    return ClusterSettings.model_validate({**plain, **changes})


def moving(settings: ClusterSettings) -> ClusterSettings:
    """The cluster with moves."""
    rules = MoveRules({name: own for name, _, own in settings.seats() if own})
    return settings.model_copy(update={"scheduler": replace(settings.scheduler, moves=rules)})


@dataclass(slots=True)
class TableSimulation:
    """A forecast that takes three slices. events: simulated so far."""

    rate: float
    lag: float
    events: int = 0

    def advance(self, _seconds: float) -> MoveForecast | None:
        self.events += 10
        return MoveForecast(self.rate, self.lag) if self.events >= 30 else None


def judged(settings: SchedulerSettings, rates: Rates) -> MovingConductor:
    """A conductor whose forecasts are given."""

    def judge(_times: MeasuredTimes, operation: Operation, _limits: BatchLimits) -> TableSimulation:
        return TableSimulation(rates(operation), operation.max_lag)

    inner = Conductor(settings)
    return MovingConductor(inner, inner, judge)


def lying(true: float) -> MovingConductor:
    """A conductor that believes every other operation to be half as fast again."""
    rules = MoveRules({"generator-0": (0,), "generator-1": (1,), "trainer": (1,)})
    settings = replace(scene().scheduler, moves=rules)
    return judged(settings, lambda one: true if one == Operation((), 2.0) else 1.5 * true)


class WatchedRun:
    """A run. published: time of each version; chosen: moves, each with the version after which it came. off: generators
    that are switched off from the first version on."""

    def __init__(
        self,
        settings: ClusterSettings,
        off: tuple[str, ...] = (),
        *,
        conductor: MovingConductor | None = None,
        record: bool = False,
    ) -> None:
        self.conductor = conductor or build_conductor(settings.scheduler)
        self.published: dict[int, float] = {}
        self.chosen: list[tuple[int, MoveChosen]] = []
        self._off = off
        self.cluster = VirtualCluster(settings, self.conductor, record=record)
        self.cluster.driver.observer = self._observe
        self.cluster.run()

    def _observe(self, now: float, event: Event, commands: list[Command]) -> None:
        if isinstance(event, Published):
            self.published[event.version] = now
            if self._off and event.version == 0:
                assert isinstance(self.conductor, Conductor)
                self.conductor.operate(self._off, self.conductor.settings.max_lag)
        latest = max(self.published, default=0)
        self.chosen += [(latest, command) for command in commands if isinstance(command, MoveChosen)]

    def at(self, seconds: float) -> int:
        """The first version that was published then or later."""
        return min(version for version, time in self.published.items() if time >= seconds)

    def rate(self, first: int, last: int) -> float:
        """Samples per second between two versions."""
        samples = (last - first) * self.conductor.settings.version_samples
        return samples / (self.published[last] - self.published[first])
