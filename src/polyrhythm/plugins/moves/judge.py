"""A forecast of an operation: the simulated cluster, driven by a conductor of the run's settings, with measured times.

The conductor gets it from outside (`MovingConductor.judge`): itself it needs no more than the scheduler does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import fmean
from typing import Any

from polyrhythm.plugins.moves.operation import Operation, starting
from polyrhythm.plugins.moves.search import MoveForecast
from polyrhythm.plugins.moves.timing import TRAINER, MeasuredTimes
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import Cost, Count
from polyrhythm.plugins.virtual.clustersim.driver import Deadlock, ProtocolError
from polyrhythm.plugins.virtual.clustersim.settings import (
    ClusterSettings,
    GeneratorGroup,
    LeaseCosts,
    SimulatorGroup,
    TrainerSettings,
)
from polyrhythm.plugins.virtual.clustersim.station import LeaseError
from polyrhythm.scheduler.records import Command, Event, Published, TrainUntil
from polyrhythm.scheduler.settings import BatchLimits, MoveRules, SchedulerSettings
from polyrhythm.specs.distributions import Constant

#: Versions that are simulated before counting begins, beside those that may lag, and versions that are counted.
WARM_UP, COUNTED = 1, 8
#: Admission ends before the last version that is asked for, so none is.
ENDLESS = 10**9
#: An operation is not followed further once it has taken this multiple of the present time for all its versions.
PATIENCE = 4.0


@dataclass(frozen=True, slots=True)
class MeasuredValues:
    """A distribution: one of the measured values."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    def sample(self, rng: random.Random) -> float:
        return self.values[int(rng.random() * len(self.values))]


class OperationJudge:
    """Begins forecasts (`MoveJudge`). ValueError: the simulated cluster refuses these settings."""

    def __init__(self, settings: SchedulerSettings, rules: MoveRules) -> None:
        self._settings, self._rules = settings, rules
        one = {"simulator-0": (1, 1, 1)}
        absences: dict[str, tuple[float, ...]] = {"simulator-0": (1.0,)}
        passes, updates, size = (1.0, 1.0), {rules.micro_batch: 1.0}, rules.micro_batch
        times = MeasuredTimes(one, absences, (1.0,), {"generator-0": 1}, *passes, 1.0, updates, 1.0, {}, size)
        self._cluster(times, starting(settings, rules), settings.limits, 1)

    def __call__(self, times: MeasuredTimes, operation: Operation, limits: BatchLimits) -> OperationSimulation:
        warm_up = WARM_UP + min(4, ceil(operation.max_lag))
        cluster = VirtualCluster(self._cluster(times, operation, limits, warm_up + COUNTED))
        limit = PATIENCE * (warm_up + COUNTED) * times.version_s
        return OperationSimulation(cluster, warm_up, self._settings.version_samples, limit)

    def _cluster(
        self, times: MeasuredTimes, operation: Operation, limits: BatchLimits, versions: int
    ) -> ClusterSettings:
        rules, leases = self._rules, self._settings.lease
        lease = None if operation.together else leases
        present = sorted(times.generators)
        on = [name for name in present if name not in operation.off] or present  # as `Conductor.operate`
        serve, apply = Cost(Constant(times.base_s), times.per_row_s), Cost(Constant(times.apply_s))
        host: dict[str, Any] = {}
        if lease is not None:  # resident_gb at 1 GB/s are the seconds of a switch
            devices = sorted({number + 1 for own in lease.devices.values() for number in own})
            host = {"devices": devices, "min_hold": float(lease.min_hold_s), "host_gb_per_s": 1.0}
            host["switch_order"] = lease.switch_order
        leased = {} if leases is None else leases.devices

        def seat(name: str) -> dict[str, Any]:
            own = rules.devices.get(name) or leased.get(name, ())
            devices = tuple(number + 1 for number in own)  # that of the host is -1
            return {"devices": devices, "resident_gb": times.switches.get(name, 0.0)}

        return ClusterSettings(
            versions=versions,
            scheduler=self._scheduler(operation, limits),
            simulators=tuple(
                SimulatorGroup(
                    env_batches=max(1, slots // per_batch),
                    slots=per_batch,
                    rows=rows,
                    step=Cost(MeasuredValues(times.absences[name])),
                    steps=Count(MeasuredValues(times.steps)),
                )
                for name, (slots, rows, per_batch) in sorted(times.simulators.items())
            ),
            generators=tuple(
                GeneratorGroup(serve=serve, apply=apply, depth=times.generators[name], **seat(name)) for name in on
            ),
            trainer=TrainerSettings(
                update=Cost(Constant(times.update_with(operation.micro_batch))),
                publish=Cost(Constant(times.publish_s)),
                **seat(TRAINER),
            ),
            sharing="shared" if lease is None else "lease",
            lease=LeaseCosts(**host),
        )

    def _scheduler(self, operation: Operation, limits: BatchLimits) -> SchedulerSettings:
        """The run's settings under this operation, without what does not belong to its rate."""
        settings = self._settings
        if settings.batching == "auto":
            settings = replace(
                settings,
                batching="dynamic",
                max_rows=limits.max_rows,
                max_requests=limits.max_requests,
                max_wait_s=limits.max_wait_s,
            )
        return replace(
            settings,
            max_lag=operation.max_lag,
            parts=False,
            segments=False,
            queue_key="",
            episode_deadline_s=inf,
            quarantine_after=0,
            min_return=-inf,
            max_return=inf,
            evaluator="",
            evaluator_only=False,
            evaluation_priority="turns",
            scoring=None,
            lease=None,
            moves=None,
        )


class OperationSimulation:
    """A forecast under way (`MoveSimulation`)."""

    def __init__(self, cluster: VirtualCluster, warm_up: int, version_samples: int, limit: float) -> None:
        self._cluster, self._warm_up, self._limit = cluster, warm_up, limit
        self._samples = version_samples
        self._published: dict[int, float] = {}
        cluster.driver.observer = self._observe
        cluster.driver.submit(TrainUntil(ENDLESS))

    @property
    def events(self) -> int:
        return self._cluster.driver.events

    def _observe(self, now: float, event: Event, _commands: Sequence[Command]) -> None:
        if isinstance(event, Published):
            self._published[event.version] = now

    def advance(self, seconds: float) -> MoveForecast | None:
        driver, last = self._cluster.driver, self._warm_up + COUNTED
        try:
            driver.run(ENDLESS, driver.clock.now + seconds)
        except (Deadlock, ProtocolError, LeaseError):  # what cannot be forecast is not tried, and the run goes on
            return MoveForecast(0.0, 0.0)
        now = driver.clock.now
        if last not in self._published and not driver.halted and now < self._limit:
            return None
        begin, end = self._published.get(self._warm_up, now), self._published.get(last, now)
        versions = sum(self._warm_up < version <= last for version in self._published)
        lags = driver.measures.lags
        lag = sum(lag * count for lag, count in lags.items()) / max(1, lags.total())
        return MoveForecast(versions * self._samples / max(end - begin, 1e-9) if versions else 0.0, lag)
