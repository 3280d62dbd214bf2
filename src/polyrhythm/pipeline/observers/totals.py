"""Observers that count: totals of a run over all its parts, recent activity of its stations, both by host, and
transfers of weights."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polyrhythm.errors import RunHalted
from polyrhythm.observe.activity import Activity
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.hosting import dropped_messages, station_hosts
from polyrhythm.runtime.hosts import MAIN
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.memory.published import (
    APPLY,
    ONE_PROCESS,
    OVER_HOSTS,
    PUBLISHED,
    SHARDS,
    Choice,
    Ends,
    Moved,
    choose_way,
    read_traffic,
)
from polyrhythm.runtime.messages import sender_of
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: Suffix of the names of stations that serve evaluations alone.
EVALUATION = "-evaluation"
#: Seconds between two readings of the stations' counters, which arrive twice a second.
_LOOK_S = 0.5
#: Versions after which the rate of a generator's weights is logged: the first transfer alone includes page faults.
_FIRST = 3


class RunTotals(Observer):
    """Counts that continue over an interruption.

    transitions: of all finished training samples; faults: lost stations, each {station, reason, transitions: count at
    that moment}, with `host` if the run has several; moves: stations that were ended to restart on a node that has room
    for them.
    """

    hears: ClassVar[tuple[type, ...]] = (records.SampleFinished, records.StationLost)

    def __init__(self, counts: Mapping[str, Any] | None = None, hosts: StationHosts | None = None) -> None:
        """counts: `as_dict` of an earlier part of the run. hosts: of the stations."""
        self.hosts = hosts
        self.transitions: int = counts["transitions"] if counts else 0
        self.faults: list[dict[str, Any]] = list(counts["faults"]) if counts else []
        self.moves: int = counts.get("moves", 0) if counts else 0  # runs saved by earlier versions have none

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        match event:
            case records.SampleFinished(ticket=ticket, env_steps=env_steps) if ticket >= 0:
                self.transitions += env_steps
            case records.StationLost(moves=True):
                self.moves += 1
            case records.StationLost(station=station, reason=reason):
                self._note_fault(station, reason)

    def note_lost_host(self, host: str, stations: Sequence[str]) -> None:
        """Record a fault for each of these stations: the run ends because their host is lost."""
        for station in stations:
            self._note_fault(station, f"is on host {host}, which is lost")

    def _note_fault(self, station: str, reason: str) -> None:
        fault = {"station": station, "reason": reason, "transitions": self.transitions}
        if self.hosts is not None and self.hosts.several:
            fault["host"] = self.hosts.of(station)
        self.faults.append(fault)

    def recall(self, faults: Sequence[dict[str, Any]]) -> None:
        """Add faults of an earlier part of the run that occurred after its last save."""
        self.faults += [fault for fault in faults if fault not in self.faults]

    def faults_by_host(self) -> Counter[str]:
        return Counter(fault.get("host", MAIN) for fault in self.faults)

    @property
    def undisturbed(self) -> bool:
        """Whether no station was lost or moved."""
        return not self.faults and not self.moves

    def refuse_faults(self) -> None:
        """Raise RunHalted if a station was lost, since a measurement with faults is invalid."""
        if self.faults:
            fault = self.faults[0]
            raise RunHalted(f"{fault['station']} was lost while it was measured ({fault['reason']}); measure again")

    def as_dict(self) -> dict[str, Any]:
        return {"transitions": self.transitions, "faults": list(self.faults), "moves": self.moves}


class StationActivity(Observer):
    """Polls the stations' counters; `activity` has their work of the last seconds."""

    tick_s: ClassVar[float] = _LOOK_S

    def __init__(self, launcher: Launcher, now: float = 0.0) -> None:
        """now: start of training."""
        self.activity = Activity()
        self._launcher = launcher
        counters = launcher.hosting.statistics()
        self._seconds, self._told = self._totals(counters), self._token_counts(counters)
        self._told_at = now

    def on_tick(self, now: float) -> None:
        """Evaluation rows have no transitions of training."""
        self.activity.take(
            now,
            {
                name: {"busy_s": counts.get("busy_s", 0.0)} if name.endswith(EVALUATION) else counts
                for name, counts in self._launcher.hosting.statistics().items()
            },
        )

    def seconds(self) -> dict[str, float]:
        """`time/env/step` and `time/rollout/forward` since the last call, from the counters received so far."""
        before, self._seconds = self._seconds, self._totals(self._launcher.hosting.statistics())
        return {name: max(0.0, value - before[name]) for name, value in self._seconds.items()}

    def token_rates(self, now: float) -> dict[str, float]:
        """`throughput/tokens_per_s` and `throughput/prompt_tokens_per_s` since the last call that returned them.

        The first rates count from the start of training. Empty if no generator counts tokens, or if counters of one
        have not changed and a newer value may arrive soon.
        """
        before, told = self._told, self._token_counts(self._launcher.hosting.statistics())
        seconds = now - self._told_at
        idle = any(counts == before.get(name) for name, counts in told.items())
        if not told or seconds <= 0.0 or (idle and seconds < 2 * _LOOK_S):
            return {}
        self._told, self._told_at = told, now
        names = [name for name in ("tokens", "prompt_tokens") if any(name in counts for counts in told.values())]
        gained = {name: _sum(told, name) - _sum(before, name) for name in names}
        return {f"throughput/{name}_per_s": max(0.0, count) / seconds for name, count in gained.items()}

    def dropped(self) -> int:
        return sum(dropped_messages(self._launcher.hosting).values())

    @staticmethod
    def _totals(counters: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        stations = [counts for name, counts in counters.items() if not name.endswith(EVALUATION)]
        return {
            "time/env/step": sum(counts.get("env_s", 0.0) for counts in stations),
            "time/rollout/forward": sum(counts.get("busy_s", 0.0) for counts in stations if "passes" in counts),
        }

    @staticmethod
    def _token_counts(counters: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
        return {
            name: counts for name, counts in counters.items() if "tokens" in counts and not name.endswith(EVALUATION)
        }


def _sum(told: Mapping[str, Mapping[str, float]], name: str) -> float:
    return sum(counts.get(name, 0.0) for counts in told.values())


class WeightsTraffic(Observer):
    """Polls the weights that generators received, and logs a line for each after its first versions, and one for a
    trainer whose ranks publish together.

    ends: devices where weights are published and used; devices: by station.
    """

    tick_s: ClassVar[float] = _LOOK_S

    def __init__(self, launcher: Launcher, ends: Ends, devices: Mapping[str, str]) -> None:
        self._launcher, self._ends, self._devices = launcher, ends, devices
        self._silent = {name for name in devices if name.startswith("generator") or name == "trainer"}

    def on_tick(self, now: float) -> None:  # noqa: ARG002
        if self._silent:
            self._say(self._launcher.hosting.statistics(), _FIRST)

    def _say(self, counters: Mapping[str, Mapping[str, float]], versions: int) -> None:
        for name in sorted(self._silent & counters.keys()):
            moved = read_traffic(counters[name])
            if max(moved.get(kind, Moved()).versions for kind in (APPLY, SHARDS, PUBLISHED)) >= versions:
                self._silent.discard(name)
                for way in sorted(moved.keys() - {APPLY, PUBLISHED}):
                    one, how = moved[way], "are published by all ranks, each its own rows"
                    if way != SHARDS:
                        how = f"come by {way}{_senders(one)}, because {self._why(name, way)}"
                    words = "%s: weights %s; %.3g MB in %.3g ms, %.2g GB/s (mean of %d)"
                    log.info(words, name, how, one.mb, one.ms, one.gb_per_s, one.versions)

    def _why(self, name: str, way: str) -> str:
        if way == ONE_PROCESS.way:
            return ONE_PROCESS.why
        if way in OVER_HOSTS:
            return OVER_HOSTS[way]
        choice: Choice = choose_way(self._ends, self._devices[name], lambda *_: way == "peer")
        return choice.why if choice.way == way else f"{choice.way} could not serve at once (its log says why)"

    def summary(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By station and kind (a way, published, shards, apply): versions, mb of one, mean ms of one, gb_per_s, and of
        what came over hosts from, the bytes that each host sent. Logs the stations that were not logged yet."""
        found, statistics = {}, self._launcher.hosting.statistics(fresh=True)
        self._say(statistics, 1)
        for name, counts in statistics.items():
            if moved := read_traffic(counts):
                found[name] = {
                    kind: {"versions": one.versions, "mb": one.mb, "ms": one.ms, "gb_per_s": one.gb_per_s}
                    | ({"from": one.sources} if one.sources else {})
                    for kind, one in moved.items()
                    if one.versions
                }
        return found


def _senders(moved: Moved) -> str:
    """The hosts that sent it, by bytes, with their shares where there are several."""
    total = sum(moved.sources.values())
    by_bytes = sorted(moved.sources.items(), key=lambda item: -item[1])
    shares = [host if count == total else f"{host} ({count / total:.0%})" for host, count in by_bytes]
    return f" from {', '.join(shares)}" if shares else ""


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
