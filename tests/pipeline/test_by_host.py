"""Utilisation and faults by host, from what observers hear: in the metrics, the summary, and on the terminal."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polyrhythm.conductors import build_conductor
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.pipeline.observers.idle import IdleMeter, PassMeter
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, UpdateMetrics
from polyrhythm.pipeline.observers.totals import HostTotals, RunTotals, StationActivity, StationHosts, in_order
from polyrhythm.plugins.terminal.block import Terminal
from polyrhythm.plugins.terminal.display import LiveDisplay
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler.records import GeneratorJoined, SimulatorJoined, StationLost, TrainerJoined
from polyrhythm.scheduler.samples.groups import SampleLedger
from polyrhythm.scheduler.settings import SchedulerSettings

HOSTS = {"simulator-0": "main", "simulator-1": "host-2", "generator-0": "host-2", "trainer": "host-1"}


class Cluster:
    """A launcher of stations on these hosts. busy: seconds of each so far."""

    def __init__(self, hosts: dict[str, str], names: tuple[str, ...] = tuple(HOSTS)) -> None:
        self.places, self.busy = hosts, dict.fromkeys(names, 0.0)

    @property
    def hosting(self) -> Any:
        return self

    @property
    def names(self) -> list[str]:
        return list(self.places)

    def station(self, name: str) -> Any:
        return SimpleNamespace(host=self.places[name])

    def statistics(self) -> dict[str, dict[str, float]]:
        return {name: {"busy_s": busy} for name, busy in self.busy.items()}

    drops: Mapping[str, int] = {}


def launcher(hosts: dict[str, str] = HOSTS) -> Any:
    return cast("Launcher", Cluster(dict(hosts)))


def test_a_station_is_where_it_was_announced_until_it_is_announced_elsewhere() -> None:
    cluster = launcher()
    places = StationHosts(cluster)
    assert (places.of("trainer"), places.of("nobody"), places.several) == ("host-1", "main", True)
    cluster.places["trainer"] = cluster.places["simulator-1"] = "host-3"  # being replaced
    assert places.of("simulator-1") == "host-2", "it was lost on its old host"
    places.on_decision(0.0, SimulatorJoined("simulator-1", 1, (), "host-3"), [])
    places.on_decision(0.0, TrainerJoined("trainer", 1, 0), [])
    assert (places.of("simulator-1"), places.of("trainer")) == ("host-3", "host-3"), "a trainer does not say it itself"
    assert places.mean_of({"simulator-0": 0.5, "simulator-1": 0.1, "trainer": 0.3}) == {"main": 0.5, "host-3": 0.2}


def test_a_run_on_one_host_has_nothing_by_host() -> None:
    places = StationHosts(launcher({}))
    places.on_decision(0.0, GeneratorJoined("generator-0", 0), [])
    totals = RunTotals(hosts=places)
    totals.on_decision(0.0, StationLost("generator-0", 0, "died"), [])
    assert not places.several
    assert totals.faults == [{"station": "generator-0", "reason": "died", "transitions": 0}]
    hosts = HostTotals(places, 0.0, {})
    hosts.advance(1.0, launcher({}).statistics())
    assert hosts.summary(totals.faults_by_host()) == {}


def test_host_names_are_in_the_order_of_their_numbers() -> None:
    assert in_order({"host-10", "host-2", "main"}) == ["main", "host-2", "host-10"]


def test_utilisation_by_host_follows_a_station_that_moves_and_goes_on_after_an_interruption() -> None:
    cluster = launcher()
    places = StationHosts(cluster)
    first = HostTotals(places, 100.0, cluster.statistics())
    cluster.busy |= {"simulator-0": 5.0, "simulator-1": 4.0, "trainer": 10.0}
    first.advance(110.0, cluster.statistics())
    places.on_decision(0.0, SimulatorJoined("simulator-1", 1, (), "main"), [])
    cluster.busy["simulator-1"] += 9.0
    first.advance(120.0, cluster.statistics())
    found = first.summary({"host-2": 1})
    assert {host: own["utilisation"] for host, own in found.items()} == {
        "main": pytest.approx((5 + 9) / 30),
        "host-1": pytest.approx(0.5),
        "host-2": pytest.approx(4 / 30),
    }
    assert found["host-2"] == {"utilisation": pytest.approx(4 / 30), "faults": 1, "stations": ["generator-0"]}
    second = HostTotals(places, 0.0, {}, json.loads(json.dumps(first.as_dict())))
    second.start(50.0)
    second.advance(60.0, {"trainer": {"busy_s": 10.0}})
    assert second.summary({})["host-1"]["utilisation"] == pytest.approx(20 / 30)


def test_metrics_of_an_update_have_each_host(tmp_path: Path) -> None:
    cluster = launcher()
    places = StationHosts(cluster)
    totals, stations = RunTotals(hosts=places), StationActivity(cluster)
    totals.on_decision(0.0, StationLost("simulator-1", 0, "died"), [])
    totals.on_decision(0.0, StationLost("simulator-1", 1, "died"), [])
    stations.on_tick(0.0)
    cluster.busy |= {"simulator-1": 1.0, "generator-0": 5.0, "trainer": 4.0}
    stations.on_tick(10.0)
    idle = IdleMeter(build_conductor(SchedulerSettings(batch_size=1)), 0.0)
    with MetricsWriter(tmp_path) as writer:
        sources = (SampleLedger(), EpisodeTracker(1), totals, stations, (idle, PassMeter(())))
        UpdateMetrics(writer, *sources, began=0.0, now=0.0).on_report(10.0, Report("trainer", 0, "update", 0, {}))
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {name: value for name, value in line.items() if name.startswith("hosts/")} == {
        "hosts/utilisation/main": 0.0,
        "hosts/utilisation/host-1": pytest.approx(0.4),
        "hosts/utilisation/host-2": pytest.approx(0.3),
        "hosts/faults/main": 0.0,
        "hosts/faults/host-1": 0.0,
        "hosts/faults/host-2": 2.0,
    }


def test_the_terminal_shows_each_host() -> None:
    class Pipeline:
        """What the display asks of one."""

        def __init__(self) -> None:
            self.launcher, self.loop = launcher(), self
            self.hosts = StationHosts(self.launcher)

        def add_observers(self, *_: object) -> None:
            """Nobody decides here."""

    pipeline = Pipeline()
    screen = io.StringIO()
    live = LiveDisplay(Terminal(screen, lambda: 100))
    live.phase("rl", 0.0)
    live.watch(cast("Any", pipeline))
    live.on_decision(1.0, StationLost("trainer", 0, "died"), [])
    live.on_decision(1.0, StationLost("generator-0", 0, "gives way", blame=False, moves=True), [])
    live.on_tick(0.0)
    pipeline.launcher.busy["trainer"] = 8.0
    live.on_tick(10.0)
    live.draw()
    found = screen.getvalue()
    for told in (
        "main ..........   0%, no faults",
        "host-1 ########..  80%, 1 fault",
        "host-2 ..........   0%, no faults",
    ):
        assert told in found
    assert re.search(r"^1 fault$|\| 1 fault$", found, re.MULTILINE), found
