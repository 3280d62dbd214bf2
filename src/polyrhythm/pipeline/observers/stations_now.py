"""What the stations and the ledger say now, by station and host, for a Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from polyrhythm.observe import Activity
from polyrhythm.observe.prometheus import PrometheusEndpoint, StationSample
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.plugins.cluster.observers import JOINS, StationPlaces
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler import records

#: Seconds between two looks; Prometheus asks every 15 s by default.
_LOOK_S = 1.0
#: The counters that a dashboard is made of; all of them are in summary.json.
_COUNTERS = ("busy_s", "env_s", "env_steps", "chunk_steps", "passes", "rows", "tokens", "updates", "scored")


class StationsNow(Observer):
    """Gives the endpoint each station's host, utilisation, counters and faults once a second."""

    hears: ClassVar[tuple[type, ...]] = (*JOINS, records.StationLost)
    tick_s: ClassVar[float] = _LOOK_S

    def __init__(self, endpoint: PrometheusEndpoint, launcher: Launcher) -> None:
        self._endpoint, self._launcher, self._places = endpoint, launcher, StationPlaces(launcher)
        self._activity, self._faults = Activity(), Counter[str]()

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        self._places.note(event)
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
                self._places.of(name),
                shares.get(name),
                {
                    **{each: counters[name][each] for each in _COUNTERS if each in counters.get(name, {})},
                    "faults": float(self._faults[name]),
                },
            )
            for name in names
        )
