"""What the stations and the ledger say now, by station and host, for a Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from polyrhythm.observe import Activity
from polyrhythm.observe.prometheus import PrometheusEndpoint, StationSample
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler import records

#: Seconds between two looks; Prometheus asks every 15 s by default.
_LOOK_S = 1.0
#: The counters that a dashboard is made of; all of them are in summary.json.
_COUNTERS = ("busy_s", "env_s", "env_steps", "chunk_steps", "passes", "rows", "tokens", "updates", "scored")
#: The host of stations in a run with one.
_MAIN = "main"


class StationsNow(Observer):
    """Gives the endpoint each station's utilisation, counters and faults once a second.

    hosts: station → the host where it works, as it was announced; the trainer's is main's where it said nothing.
    """

    hears: ClassVar[tuple[type, ...]] = (
        *(records.SimulatorJoined, records.GeneratorJoined, records.ScorerJoined, records.StationLost),
    )
    tick_s: ClassVar[float] = _LOOK_S

    def __init__(self, endpoint: PrometheusEndpoint, launcher: Launcher) -> None:
        self.hosts: dict[str, str] = {}
        self._endpoint, self._launcher = endpoint, launcher
        self._activity, self._faults = Activity(), Counter[str]()

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        match event:
            case records.StationLost(station=station):
                self._faults[station] += 1
            case records.SimulatorJoined(simulator=name) | records.GeneratorJoined(generator=name):
                self.hosts[name] = event.host or _MAIN
            case records.ScorerJoined(scorer=name):
                self.hosts[name] = event.host or _MAIN

    def on_tick(self, now: float) -> None:
        counters = self._launcher.latest()
        self._activity.take(now, counters)
        shares = self._activity.utilisation()
        names = sorted({*counters, *self._faults})
        self._endpoint.take_stations(
            StationSample(
                name,
                self.hosts.get(name, _MAIN),
                shares.get(name),
                {
                    **{each: counters[name][each] for each in _COUNTERS if each in counters.get(name, {})},
                    "faults": float(self._faults[name]),
                },
            )
            for name in names
        )
