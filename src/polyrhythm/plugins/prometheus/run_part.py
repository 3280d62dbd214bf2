"""The endpoint's part in a run: it gets each line of metrics, and once a second the numbers of the stations."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar

from polyrhythm.config.schema import RunConfig
from polyrhythm.observe.activity import Activity
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.hosts import StationHosts
from polyrhythm.plugins.prometheus.endpoint import PrometheusEndpoint, StationSample
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: Seconds between two readings of the stations' counters: Prometheus scrapes every 15 s by default.
_SCRAPE_S = 1.0
#: Counters that are exported; summary.json has all of them.
_COUNTERS = ("busy_s", "env_s", "env_steps", "chunk_steps", "passes", "rows", "tokens", "updates", "scored")


class StationsNow(Observer):
    """Passes each station's host, utilisation, counters and faults to the Prometheus endpoint once a second."""

    hears: ClassVar[tuple[type, ...]] = (records.StationLost,)
    tick_s: ClassVar[float] = _SCRAPE_S

    def __init__(self, endpoint: PrometheusEndpoint, launcher: Launcher, hosts: StationHosts) -> None:
        self._endpoint, self._launcher, self._hosts = endpoint, launcher, hosts
        self._activity, self._faults = Activity(), Counter[str]()

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.StationLost) and not event.moves:
            self._faults[event.station] += 1

    def on_tick(self, now: float) -> None:
        counters = self._launcher.hosting.statistics()
        self._activity.take(now, counters)
        shares = self._activity.utilisation()
        names = sorted({*counters, *self._faults})
        self._endpoint.take_stations(
            StationSample(
                name,
                self._hosts.of(name),
                shares.get(name),
                {
                    **{each: counters[name][each] for each in _COUNTERS if each in counters.get(name, {})},
                    "faults": float(self._faults[name]),
                },
            )
            for name in names
        )


class EndpointPart(RunPart):
    """An open endpoint."""

    def __init__(self, endpoint: PrometheusEndpoint) -> None:
        self._endpoint = endpoint

    def on_metrics(self, step: int, numbers: Mapping[str, float]) -> None:
        self._endpoint.take(step, numbers)

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:
        return [StationsNow(self._endpoint, pipeline.launcher, pipeline.hosts)]

    def close(self) -> None:
        self._endpoint.close()


class EndpointHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart | None:
        settings = config.prometheus
        if settings.port is None:
            return None
        endpoint = PrometheusEndpoint(settings.address, settings.port, settings.tls)
        scheme = "https" if settings.tls else "http"
        log.info("metrics for Prometheus: %s://%s:%d/metrics", scheme, settings.address, endpoint.port)
        return EndpointPart(endpoint)


HOOKS = EndpointHooks()
