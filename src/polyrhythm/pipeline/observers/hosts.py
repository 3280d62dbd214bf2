"""Observers of the hosts of a run: utilisation of their stations, and the number of lost stations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.hosting import station_hosts
from polyrhythm.runtime.hosts import MAIN
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.messages import sender_of
from polyrhythm.scheduler import records


class StationHosts(Observer):
    """Host of each station when it joined last; "main" in runs of one host. Attach it before the observers that read
    it."""

    hears: ClassVar[tuple[type, ...]] = tuple(records.JOINED)

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._host_of = dict(station_hosts(launcher.hosting))

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if type(event) in records.JOINED:
            name, _ = sender_of(event) or ("", 0)
            self._host_of[name] = getattr(event, "host", "") or station_hosts(self._launcher.hosting).get(name, MAIN)

    def of(self, station: str) -> str:
        return self._host_of.get(station, MAIN)

    @property
    def several(self) -> bool:
        """Whether a station is on another host than the main process."""
        return any(host != MAIN for host in self._host_of.values())

    def mean_of(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Mean of the stations' shares by host, sorted by host."""
        found: dict[str, list[float]] = {}
        for station, share in shares.items():
            found.setdefault(self.of(station), []).append(share)
        return {host: sum(found[host]) / len(found[host]) for host in in_order(found)}


class HostTotals:
    """Busy seconds and presence seconds of the stations of each host, over all parts of the run.

    A station counts for the host where it joined last, also while it is being replaced; so without moves a host's
    utilisation is the mean of its stations'.
    """

    def __init__(
        self,
        hosts: StationHosts,
        now: float,
        statistics: Mapping[str, Mapping[str, float]],
        counts: Mapping[str, Any] | None = None,
    ) -> None:
        """statistics: current ones of the stations; counts: `as_dict` of an earlier part of the run."""
        self._hosts, self._now = hosts, now
        self._busy_s: dict[str, float] = dict(counts["busy_s"]) if counts else {}
        self._station_s: dict[str, float] = dict(counts["station_s"]) if counts else {}
        self._before = {name: own.get("busy_s", 0.0) for name, own in statistics.items()}

    def start(self, now: float) -> None:
        """Begin to count at `now`."""
        self._now = now

    def advance(self, now: float, statistics: Mapping[str, Mapping[str, float]]) -> None:
        """Count the stations' work since the last call."""
        elapsed, self._now = now - self._now, now
        for name, own in statistics.items():
            host, busy = self._hosts.of(name), own.get("busy_s", 0.0)
            self._busy_s[host] = self._busy_s.get(host, 0.0) + busy - self._before.get(name, 0.0)
            self._station_s[host] = self._station_s.get(host, 0.0) + elapsed
            self._before[name] = busy

    def as_dict(self) -> dict[str, dict[str, float]]:
        return {"busy_s": dict(self._busy_s), "station_s": dict(self._station_s)}

    def summary(self, faults: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Utilisation, faults and current stations by host; empty if the run has one host."""
        names = in_order({*self._station_s, *faults})
        if all(name == MAIN for name in names):
            return {}
        stations = {name: [s for s in self._before if self._hosts.of(s) == name] for name in names}
        return {
            name: {
                "utilisation": self._busy_s.get(name, 0.0) / max(self._station_s.get(name, 0.0), 1e-9),
                "faults": faults.get(name, 0),
                "stations": stations[name],
            }
            for name in names
        }


def in_order(hosts: Mapping[str, Any] | set[str]) -> list[str]:
    """Sort host names: main first, then by number."""
    return sorted(hosts, key=lambda host: (host != MAIN, len(host), host))
