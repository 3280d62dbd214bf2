"""Opening the hosts of a run: agents that start at once, and memory that several nodes share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.cluster.served import blank_arena
from tests.process.networks import apart_by_setting
from tests.runtime.scripted import ScriptedFactory
from tests.runtime.test_hosting_conformance import LAYOUT, NO_WEIGHTS, STATIONS, limits_of

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, Found, LocalNode
from polyrhythm.plugins.cluster.hosts.build import (
    HostOpener,
    StationNodes,
    build_hosts_launcher,
    in_rounds,
    next_number,
    open_hosts,
)
from polyrhythm.plugins.cluster.hosts.questions import Known, find_shared, write_identity
from polyrhythm.plugins.cluster.hosts.server import DataServer
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import station_hosts
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.sockets import LOOPBACK


class Machine:
    """A node without processes, in whose memory an agent makes a folder. said: what happened to all nodes; broken: its
    agent does not start."""

    def __init__(self, said: list[str], name: str, memory: Path, *, broken: bool = False) -> None:
        self.name, self.address, self.memory = name, f"address of {name}", memory
        self._said, self._broken = said, broken
        self.spec: AgentSpec | None = None
        memory.mkdir(exist_ok=True)

    def start_agent(self, spec: AgentSpec) -> Callable[[], Found]:
        self._said.append(f"start {self.name}")
        self.spec = spec

        def found() -> Found:
            self._said.append(f"wait {self.name}")
            if self._broken:
                raise StartError("no room")
            if shared := find_shared(spec.known, self.memory):
                return Found(shared[0].host, str(shared[1]), shared[0].token)
            folder = self.memory / f"run-{self.name}"
            folder.mkdir()
            return Found(spec.host, str(folder), write_identity(folder), f"tcp://{self.name}")

        return found

    def close(self) -> None:
        self._said.append(f"close {self.name}")


class Server:
    """The server of an agent, which looks into its machine's memory."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory

    def ask(self, question: q.Sees) -> list[memoryview]:
        shared = find_shared(question.known, self._memory)
        return [] if shared is None else [memoryview(part.encode()) for part in (shared[0].host, str(shared[1]))]

    def close(self) -> None: ...


def opener() -> HostOpener:
    return HostOpener(LAYOUT, NO_WEIGHTS, make_keys(), 15.0)


def test_agents_start_at_once_and_nodes_that_share_memory_are_one_host(tmp_path: Path) -> None:
    said: list[str] = []
    places = {"a": "one", "b": "two", "c": "three", "d": "two"}
    nodes: list[Any] = [Machine(said, name, tmp_path / memory) for name, memory in places.items()]
    hosts = opener()
    assert hosts.open(nodes[0], publishes=True).host == "host-1"
    servers = {f"tcp://{node.name}": node.memory for node in nodes}
    found = hosts.open_together(nodes[1:], lambda _, endpoint: Server(servers[endpoint]))  # type: ignore[arg-type, return-value]
    assert said == [*["start a", "wait a", "start b", "start c", "start d"], *["wait b", "wait c", "wait d", "close d"]]
    assert [each.host for each in found] == ["host-2", "host-3", "host-2"]
    assert (found[2].folder, found[2].endpoint) == (found[0].folder, "")
    assert hosts.servers.keys() == {"host-1", "host-2", "host-3"} == {known.host for known in hosts.known}
    assert all(node.spec.publishers == ("host-1", "main") for node in nodes)
    later: Any = Machine(said, "e", tmp_path / "three")
    assert hosts.open(later).host == "host-3"


def test_a_later_part_of_a_run_gives_its_hosts_names_that_no_earlier_one_had(tmp_path: Path) -> None:
    """Or logs, faults and utilisation of two machines would be mixed under one name."""
    logs, found = tmp_path / "logs", []
    for part in ("first", "second"):
        nodes = dict(zip(STATIONS, apart_by_setting(tmp_path / part, 2), strict=True))
        stations = [(ScriptedFactory(name), Resources()) for name in STATIONS]
        places = StationNodes(LOOPBACK, nodes, {})
        with closing(build_hosts_launcher(open_hosts(stations, LAYOUT, NO_WEIGHTS, limits_of(), logs, places))) as run:
            run.start()
            found.append(list(station_hosts(run.hosting).values()))
    assert found == [["host-1", "host-2"], ["host-3", "host-4"]]
    assert {path.name for path in logs.iterdir()} == {name for names in found for name in names}


def test_only_hosts_count_among_logs(tmp_path: Path) -> None:
    assert next_number(tmp_path / "none") == 1
    for name in ("host-2", "host-10", "host-x", "host-", "main", "other-11"):
        (tmp_path / name).mkdir()
    assert next_number(tmp_path) == 11


def test_a_node_that_cannot_start_is_named(tmp_path: Path) -> None:
    nodes: list[Any] = [Machine([], name, tmp_path / name, broken=name == "b") for name in "ab"]
    with pytest.raises(StartError, match="b: no room"):
        opener().open_together(nodes, lambda *_: Server(tmp_path))  # type: ignore[arg-type, return-value]


def test_nodes_of_one_address_are_not_opened_together() -> None:
    """They share memory as a rule, and only one that starts later finds that out before it reserves its own."""
    nodes = [LocalNode(str(index), address) for index, address in enumerate("xyxxz")]
    assert [[node.name for node in together] for together in in_rounds(nodes)] == [["0", "1", "4"], ["2"], ["3"]]


def test_a_host_says_whose_memory_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYRHYTHM_SHARED_MEMORY", str(tmp_path))
    (tmp_path / "run").mkdir()
    token = write_identity(tmp_path / "run")
    server = DataServer(blank_arena(), None)
    for folder, told, seen in (("run", token, True), ("run", "other", False), ("../run", token, False)):
        answer = server.answer(q.encode(q.Sees([Known("host-1", folder, told)])))
        assert answer == [b"", *([b"host-1", str(tmp_path / "run").encode()] if seen else [])]
