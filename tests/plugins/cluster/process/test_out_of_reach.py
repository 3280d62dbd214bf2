"""Stations that were given up on a host out of reach, and live on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest
from tests.long import long
from tests.process.networks import apart_by_setting, behind_a_link
from tests.process.runs import PATIENCE_S, ROOT, children, config, orphaned_folders, wait_until
from tests.runtime.scripted import ScriptedFactory

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, Found, LocalNode
from polyrhythm.plugins.cluster.hosts.build import StationNodes, build_hosts_launcher, open_hosts
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import dropped_messages, process_ids
from polyrhythm.runtime.hosts import Changes, Departure, HostView
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.local import LocalHosting, RunMemory
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.messages import Event, sender_of
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import ProcessHandle, start_child
from polyrhythm.runtime.transport.sockets import LOOPBACK
from polyrhythm.scheduler.records import Published, PublishWeights, StationLost, TrainerJoined
from polyrhythm.specs import WeightsLayout

LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
NO_WEIGHTS = WeightsLayout.of({})


class OutOfReach:
    """A process that whoever started it cannot end: after `kill` it counts as ended, and lives."""

    def __init__(self, process: ProcessHandle) -> None:
        self._process, self.pid, self.abandoned = process, process.pid, False

    def poll(self) -> int | None:
        return -signal.SIGKILL if self.abandoned else self._process.poll()

    def wait(self, timeout: float) -> int:
        if not self.abandoned:
            return self._process.wait(timeout)
        return -signal.SIGKILL

    def kill(self) -> None:
        self.abandoned = True

    def reap(self) -> None:
        self._process.wait(PATIENCE_S)


class FarNode:
    """A node whose processes cannot be ended, as of a cluster whose link is cut."""

    def __init__(self, node: LocalNode) -> None:
        self._node, self.name, self.address = node, node.name, node.address
        self.started: list[OutOfReach] = []
        self.leaves, self.agent_failure = False, ""

    @property
    def abandoned(self) -> bool:
        return any(process.abandoned for process in self.started)

    def start_agent(self, spec: AgentSpec) -> Callable[[], Found]:
        return self._node.start_agent(spec)

    def spawn(self, spec: ChildSpec, log: IO[bytes]) -> ProcessHandle:
        self.started.append(OutOfReach(self._node.spawn(spec, log)))
        return self.started[-1]

    def give_up(self) -> None: ...

    def close(self) -> None:
        self._node.close()


@contextmanager
def running(folder: Path, near: LocalNode, far: FarNode) -> Iterator[tuple[Launcher, psutil.Process]]:
    """Station a on the near node, b on the far one; and b's process."""
    limits = config(supervision={"heartbeat_s": 5.0}).supervision
    stations = [(ScriptedFactory(name), Resources()) for name in "ab"]
    places = StationNodes(near.address, {"a": near, "b": far}, {})
    with closing(build_hosts_launcher(open_hosts(stations, LAYOUT, NO_WEIGHTS, limits, folder, places))) as launcher:
        launcher.hosting.start()
        yield launcher, psutil.Process(process_ids(launcher.hosting)["b"])
    for process in far.started:
        process.reap()
    assert not children()
    assert not orphaned_folders()


def hear(launcher: Launcher, over: Callable[[Sequence[object]], bool]) -> list[object]:
    """The events of station b until this is true of them."""
    found: list[object] = []
    until = time.monotonic() + PATIENCE_S
    while not over(found) and time.monotonic() < until:
        event = launcher.hosting.receive(0.1)
        found += [event] if "b" in (sender_of(event) or ()) else []
    return found


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@long(8, "an agent that speaks again")
def test_one_that_speaks_again_is_refused_and_told_to_leave(tmp_path: Path) -> None:
    """It was stopped for longer than its heartbeat may be late. Its host is lost: it may still write there."""
    near, there = apart_by_setting(tmp_path / "memory", 2)
    far = FarNode(there)
    with running(tmp_path, near, far) as (launcher, process):
        process.suspend()
        lost, joined = hear(launcher, lambda events: len(events) == 2)
        assert isinstance(lost, StationLost)
        assert joined == TrainerJoined("b", 1, 0)
        assert len(far.started) == 1, "the successor is on the near node"
        assert not gone(process)
        process.resume()
        assert hear(launcher, lambda _: gone(process)) == [], "what it said is not passed on"
        assert dropped_messages(launcher.hosting)["earlier_incarnation"] >= 1
        launcher.hosting.send("b", PublishWeights("b", 1))
        assert hear(launcher, bool) == [Published("b", 1, 1)]


class NoRoom:
    """Hosts of a run of one station, which has to leave when it is told to, for this reason; none has room for it."""

    def __init__(self, folder: str, leaving: Departure) -> None:
        memory = "polyrhythm.plugins.cluster.hosts.memory:HostMemory"
        self._view, self._leaving = HostView("far", folder, LOOPBACK, memory=memory), leaving
        self.lost = False

    @property
    def waiting(self) -> Sequence[str]:
        return ["b"] * self.lost

    def view(self, station: str) -> HostView:
        return self._view

    def host_of(self, station: str) -> str:
        return self._view.own

    def offset_of(self, host: str) -> None: ...

    def on_station_ended(self, station: str, now: float) -> None: ...

    def advance(self, now: float, heard: Collection[str], *, starting: bool = False) -> Changes:
        return Changes([], {"b": self._leaving} if self.lost else {}, [])


@long(3, "a station without room, told to leave")
@pytest.mark.parametrize("moves", [False, True])
def test_one_that_speaks_while_its_station_waits_for_room_is_refused_too(moves: bool, tmp_path: Path) -> None:
    """No successor is there yet, and what it says, its pool and the conductor no longer know."""
    started: list[OutOfReach] = []

    def spawn(spec: ChildSpec, log: IO[bytes]) -> OutOfReach:
        started.append(OutOfReach(start_child(spec, log)))
        return started[-1]

    memory = SharedRunFolder({"arena": LAYOUT.nbytes, "weights": 64})
    hosts, limits = NoRoom(str(memory.folder), Departure("a reason", moves)), config().supervision
    stations = [(ScriptedFactory("b"), Resources())]
    hosting = LocalHosting(
        stations, RunMemory(InFlight(LAYOUT), NO_WEIGHTS, memory.folder), limits, tmp_path, spawn=spawn, hosts=hosts
    )
    with closing(hosting):
        hosting.start()
        hosting.send("b", PublishWeights("b", 1))
        process, events = psutil.Process(started[0].pid), list[Event]()
        hosts.lost = True
        until = time.monotonic() + PATIENCE_S
        while not gone(process) and time.monotonic() < until:
            event = hosting.receive(0.1)
            events += [event] if event is not None else []
        assert gone(process), "it is told to leave"
        assert events == [Published("b", 0, 1), StationLost("b", 0, "a reason", blame=False, moves=moves)]
        assert dropped_messages(hosting)["earlier_incarnation"] >= 1
    started[0].reap()
    memory.remove()


@pytest.mark.slow
@long(8, "the end of an agent")
def test_the_run_ends_with_the_agent_of_its_own_host(tmp_path: Path) -> None:
    """Nobody else can read what lies there."""
    near, there = apart_by_setting(tmp_path / "memory", 2)
    limits = config().supervision
    stations = [(ScriptedFactory(name), Resources()) for name in "ab"]
    places = StationNodes(near.address, {"a": near, "b": there}, {})
    with closing(build_hosts_launcher(open_hosts(stations, LAYOUT, NO_WEIGHTS, limits, tmp_path, places))) as launcher:
        launcher.hosting.start()
        (agent,) = [p for p in children() if p.cmdline()[-2:] == ["polyrhythm.plugins.cluster.hosts.agent", "main"]]
        agent.kill()
        with pytest.raises(RunHalted, match=r"host main is lost \(its agent has ended with status -9\)"):
            hear(launcher, bool)
    assert not children()


#: A main process with a station on each of two hosts, until it is killed.
MAIN = """
import sys, time
from pathlib import Path
from tests.runtime.test_hosting_conformance import hosts
launcher = hosts()(Path(sys.argv[1]))
launcher.hosting.start()
print(launcher.folder, flush=True)
time.sleep(3600)
"""


def is_agent(process: psutil.Process, host: str) -> bool:
    try:
        return process.cmdline()[-2:] == ["polyrhythm.plugins.cluster.hosts.agent", host]
    except psutil.Error:
        return False


def test_a_killed_main_leaves_no_memory_on_any_host(tmp_path: Path) -> None:
    """Nor does an agent that is killed too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    words = [sys.executable, "-c", MAIN, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as main:
        assert main.stdout is not None
        own = Path(main.stdout.readline().strip())
        there = [folder for memory in tmp_path.glob("memory/*") for folder in memory.iterdir()]
        assert len(there) == 2
        assert all((folder / "arena").exists() for folder in (own, *there))
        (agent,) = [process for process in children() if is_agent(process, "host-2")]
        agent.kill()  # as Ray does it
        main.kill()
    wait_until(lambda: not any(folder.exists() for folder in (own, *there)))


@long(10, "an agent that waits until it ends itself")
@pytest.mark.slow
def test_one_that_cannot_reach_main_ends_itself(tmp_path: Path) -> None:
    """And its host's agent, with its folder."""
    with behind_a_link(tmp_path) as (near, there):
        far = FarNode(there)
        with running(tmp_path, near, far) as (launcher, process):
            subprocess.run(["ip", "link", "set", f"pa{os.getpid()}", "down"], check=True)
            lost, joined = hear(launcher, lambda events: len(events) == 2)
            assert isinstance(lost, StationLost)
            assert joined == TrainerJoined("b", 1, 0)
            hear(launcher, lambda _: gone(process) and not list((tmp_path / "memory-there").iterdir()))
            assert gone(process)
            assert not list((tmp_path / "memory-there").iterdir())
