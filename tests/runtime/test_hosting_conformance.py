"""What every implementation of `Hosting` must do; a new one is added to `HOSTINGS` and has to pass."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.long import long
from tests.process.networks import apart_by_setting
from tests.process.runs import PATIENCE_S, children, config, orphaned_folders
from tests.runtime.scripted import (
    AT_ONCE,
    DIES,
    HANGS,
    LAST_DIES,
    LAST_RAISES,
    RAISES,
    REFUSES,
    ScriptedFactory,
)

from polyrhythm.config.sections.running import SupervisionSettings
from polyrhythm.pipeline.context import LaunchPlan
from polyrhythm.plugins.cluster.hosts.build import StationNodes, build_hosts_launcher, open_hosts
from polyrhythm.plugins.cluster.launching import launch_on_ray
from polyrhythm.runtime.factories import Resources, StationList
from polyrhythm.runtime.hosting import Hosting, dropped_messages, pending_work, process_ids
from polyrhythm.runtime.launcher import Launcher, build_inline_launcher, build_local_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import rank_name
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import LOOPBACK
from polyrhythm.scheduler.records import (
    Event,
    Published,
    PublishWeights,
    StartUpdate,
    StationLost,
    TrainerJoined,
    UpdateDone,
)
from polyrhythm.specs import WeightsLayout

LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
NO_WEIGHTS = WeightsLayout.of({})
STATIONS = ("a", "b")


def stations_with(ranks: int) -> StationList:
    """ranks: of the first station."""
    first, *others = [ScriptedFactory(name) for name in STATIONS]
    return [(first, *[Resources()] * ranks), *[(other, Resources()) for other in others]]  # type: ignore[list-item]


def local(transport: str, ranks: int = 1, **supervision: float) -> Callable[[Path], Launcher]:
    limits = limits_of(**supervision)
    return lambda folder: build_local_launcher(stations_with(ranks), LAYOUT, NO_WEIGHTS, limits, folder, transport)


def limits_of(**supervision: float) -> SupervisionSettings:
    return config(supervision={"update_s": 3.0, **supervision}).supervision


def hosts(ranks: int = 1, **supervision: float) -> Callable[[Path], Launcher]:
    """Each process on a host of its own."""

    def launch(folder: Path) -> Launcher:
        stations = stations_with(ranks)
        names = [rank_name(factory.name, rank) for factory, *seats in stations for rank in range(len(seats))]
        nodes = dict(zip(names, apart_by_setting(folder / "memory", len(names)), strict=True))
        limits, places = limits_of(**supervision), StationNodes(LOOPBACK, nodes, {})
        return build_hosts_launcher(open_hosts(stations, LAYOUT, NO_WEIGHTS, limits, folder, places))

    return launch


def ray(folder: Path, ranks: int = 1) -> Launcher:
    pytest.importorskip("ray", reason="the ray extra is not installed")
    asked = config(launcher="ray", supervision={"update_s": 3.0})
    plan = LaunchPlan(asked, stations_with(ranks), LAYOUT, NO_WEIGHTS, folder / "logs", check_report=lambda _: None)
    return launch_on_ray(plan)


def inline(folder: Path) -> Launcher:
    return build_inline_launcher([(ScriptedFactory(name), Resources()) for name in STATIONS], LAYOUT, NO_WEIGHTS)


HOSTINGS = {
    "inline": inline,
    "local-ipc": local("ipc"),
    "local-tcp": local("tcp"),
    "local-ranks": local("ipc", ranks=2),
    "watchful-ranks": local("ipc", ranks=2, heartbeat_s=5.0),
    "hosts": hosts(),
    "hosts-ranks": hosts(ranks=2),
    "watchful-hosts-ranks": hosts(ranks=2, heartbeat_s=5.0),
    "ray": ray,
    "ray-ranks": partial(ray, ranks=2),
}
#: Those whose stations can die without main.
LOCAL = ["local-ipc", "local-tcp", "local-ranks"]
OTHERS = [
    pytest.param("hosts", marks=long(4, "with a host for each station")),
    pytest.param("hosts-ranks", marks=long(10, "with a rank on each of two hosts")),
    pytest.param("ray", marks=long(15, "with a Ray of its own")),
    pytest.param("ray-ranks", marks=long(15, "with a Ray of its own")),
]
ISOLATED = [*LOCAL, *OTHERS]


@pytest.fixture
def launcher(request: Any, tmp_path: Path) -> Iterator[Launcher]:
    with closing(HOSTINGS[request.param](tmp_path)) as launcher:
        assert launcher.hosting.start() == [TrainerJoined(name, 0, 0) for name in STATIONS]
        yield launcher
    assert not children()
    assert not orphaned_folders()
    assert launcher.folder is None or not launcher.folder.exists()


@pytest.fixture
def hosting(launcher: Launcher) -> Hosting:
    return launcher.hosting


every = pytest.mark.parametrize("launcher", ["inline", *ISOLATED], indirect=True)
#: Also with hosts in the usual tests.
with_hosts = pytest.mark.parametrize("launcher", [*LOCAL, "hosts", *OTHERS[1:]], indirect=True)


def received(hosting: Hosting, count: int, seconds: float = PATIENCE_S) -> list[Event]:
    found, until = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        event = hosting.receive(0.2)
        if event is not None:
            found.append(event)
    return found


@every
def test_commands_and_events_keep_their_order(hosting: Hosting) -> None:
    for version in range(1, 201):
        for name in STATIONS:
            hosting.send(name, PublishWeights(name, version))
    events = received(hosting, 400)
    for name in STATIONS:
        own = [event for event in events if isinstance(event, Published) and event.trainer == name]
        assert [event.version for event in own] == list(range(1, 201))


@every
def test_what_a_station_says_while_it_hears_a_command_comes_without_a_unit_of_work(hosting: Hosting) -> None:
    """As the failed sample of a cancelled row, after which its slot has nothing to do."""
    hosting.send("a", PublishWeights("a", AT_ONCE))
    assert received(hosting, 1) == [Published("a", 0, AT_ONCE)]


@every
def test_nothing_comes_from_stations_that_have_nothing_to_do_and_a_wait_ends(hosting: Hosting) -> None:
    begin = time.monotonic()
    assert hosting.receive(0.05) is None
    assert 0.05 <= time.monotonic() - begin < 60.0
    assert hosting.receive(0.0) is None


@every
def test_reports_counters_and_progress_are_known(hosting: Hosting) -> None:
    before = hosting.work_done
    hosting.send("a", StartUpdate("a", 0, 0, (0,), ("0",)))
    assert received(hosting, 1) == [UpdateDone("a", 0, 0)]
    assert [(report.station, report.step) for report in hosting.reports()] == [("a", 0)]
    assert hosting.reports() == []
    until = time.monotonic() + PATIENCE_S
    while "busy_s" not in (statistics := hosting.statistics(fresh=True))["a"] or pending_work(hosting):
        # The unit's event is sent just before its end is counted.
        assert time.monotonic() < until, (statistics, pending_work(hosting))
    assert list(statistics) == list(STATIONS)
    assert (statistics["a"]["units"], statistics["b"].get("units", 0.0)) == (1.0, 0.0)
    assert statistics["a"]["busy_s"] > 0.0 == statistics["b"].get("busy_s", 0.0)
    assert hosting.statistics().keys() == statistics.keys()
    assert hosting.work_done > before
    assert (pending_work(hosting), hosting.station("a").current_call(), dropped_messages(hosting)) == ([], "", {})


@every
def test_closing_twice_is_closing_once(hosting: Hosting) -> None:
    hosting.close()
    hosting.close()


def until_joined(hosting: Hosting) -> list[Event]:
    """All events up to the first announcement."""
    found: list[Event] = []
    while not found or not isinstance(found[-1], TrainerJoined):
        found += received(hosting, 1) or [TrainerJoined("nobody", 0, 0)]
    return found


def lost_and_back(hosting: Hosting, heard_versions: list[int], name: str = "a") -> str:
    """The reason of a loss, before which these publications are heard (of a killed station, the first of them), and
    after which the next incarnation has joined and obeys; the other station goes on."""
    *heard, lost, joined = until_joined(hosting)
    assert heard == [Published(name, 0, version) for version in heard_versions[: len(heard)]]
    assert isinstance(lost, StationLost)
    assert (lost.station, lost.incarnation) == (name, 0)
    assert joined == TrainerJoined(name, 1, 0)
    assert all(hosting.station(name).reachable for name in STATIONS)
    for station in STATIONS:
        hosting.send(station, PublishWeights(station, 7))
    assert {(e.trainer, e.incarnation, e.version) for e in received(hosting, 2)} == {("a", 1, 7), ("b", 0, 7)}  # type: ignore[union-attr]
    return lost.reason


@pytest.mark.parametrize("launcher", ["inline"], indirect=True)
def test_a_station_that_raises_ends_a_run_in_one_thread(hosting: Hosting) -> None:
    hosting.send("a", PublishWeights("a", RAISES))
    with pytest.raises(ValueError, match="told to raise"):
        hosting.receive(1.0)
    with pytest.raises(UnfitMessage, match="this version is refused"):
        hosting.send("a", PublishWeights("a", REFUSES))


FAILURES = {
    "raises": (RAISES, "ValueError: told to raise"),
    "hangs": (HANGS, "has been in one publish for "),
    "dies": (DIES, "was ended by SIGKILL"),
    "refuses": (REFUSES, "refused PublishWeights: this version is refused"),
}
FAILING = [
    *[("local-ipc", failure) for failure in FAILURES],
    *[(launcher, "dies") for launcher in LOCAL[1:]],
    *[
        pytest.param(launcher, failure, marks=long(3, "other ways to fail"))
        for launcher in LOCAL[1:]
        for failure in FAILURES
        if failure != "dies"
    ],
    *[pytest.param(*other.values, failure, marks=other.marks) for other in OTHERS for failure in FAILURES],
]


@pytest.mark.parametrize(("launcher", "failure"), FAILING, indirect=["launcher"])
def test_a_station_that_fails_is_replaced_and_what_it_had_said_is_heard(
    failure: str, hosting: Hosting
) -> None:
    version, reason = FAILURES[failure]
    for ordered in (1, 2, version, 3):
        hosting.send("a", PublishWeights("a", ordered))
    sent_before = [1, 2] if version != REFUSES else [1, 2, 3]
    assert reason in lost_and_back(hosting, sent_before)


@with_hosts
def test_a_killed_station_gets_no_command_until_its_successor_has_joined(hosting: Hosting) -> None:
    os.kill(process_ids(hosting)["a"], signal.SIGKILL)
    (lost,) = received(hosting, 1)
    assert isinstance(lost, StationLost)
    assert not hosting.station("a").reachable
    hosting.send("a", PublishWeights("a", 5))
    assert received(hosting, 1) == [TrainerJoined("a", 1, 0)]
    hosting.send("a", PublishWeights("a", 6))
    assert received(hosting, 1) == [Published("a", 1, 6)]


of_ranks = pytest.mark.parametrize("launcher", ["local-ranks", OTHERS[1], OTHERS[3]], indirect=True)


@of_ranks
def test_each_rank_has_a_process_and_a_log_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    processes = process_ids(launcher.hosting)
    assert list(processes) == ["a", "a-rank1", "b"]
    assert len(set(processes.values())) == 3
    launcher.close()
    assert {path.name for path in tmp_path.rglob("*.log")} == {"a.0.log", "a-rank1.0.log", "b.0.log"}


@of_ranks
@pytest.mark.parametrize(
    ("version", "reason"),
    [(LAST_RAISES, "rank 1: ValueError: told to raise"), (LAST_DIES, "rank 1: was ended by SIGKILL")],
    ids=["raises", "dies"],
)
def test_a_rank_that_fails_is_one_loss_of_its_station_whatever_the_others_notice(
    version: int, reason: str, hosting: Hosting, caplog: pytest.LogCaptureFixture
) -> None:
    before = process_ids(hosting)
    hosting.send("a", PublishWeights("a", 1))
    hosting.send("a", PublishWeights("a", version))
    assert lost_and_back(hosting, [1]) == reason
    assert "starting it again (failure 1 of " in caplog.text
    assert "failure 2" not in caplog.text
    after = process_ids(hosting)
    assert [name for name in before if before[name] != after[name]] == ["a", "a-rank1"]
    assert not any(psutil.pid_exists(before[name]) for name in ("a", "a-rank1"))


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("watchful-ranks", marks=long(7, "a stopped rank; tests/process has a stopped station")),
        pytest.param("watchful-hosts-ranks", marks=long(10, "a stopped rank on another host")),
    ],
    indirect=True,
)
def test_a_rank_that_is_stopped_is_found_by_its_heartbeat(hosting: Hosting) -> None:
    os.kill(process_ids(hosting)["a-rank1"], signal.SIGSTOP)
    assert lost_and_back(hosting, []) == "rank 1: sent no heartbeat for 5 s (supervision.heartbeat_s)"
