"""Where stations go when hosts are lost and nodes come."""

from __future__ import annotations

import time

import pytest

from polyrhythm.errors import RunHalted, StartError
from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.agent import Found
from polyrhythm.runtime.hosts.client import HostSilent
from polyrhythm.runtime.hosts.directory import HostDirectory, Needs
from polyrhythm.runtime.hosts.nodes import LocalNode
from polyrhythm.runtime.hosts.questions import Changes
from polyrhythm.runtime.hosts.survey import Place, Sight, Survey
from polyrhythm.runtime.hosts.watch import MainWatch

NOW = 100.0


class Silent:
    def ask(self, question: q.Question) -> list[memoryview]:
        raise HostSilent("no")


class Answers:
    def ask(self, question: q.Question) -> list[memoryview]:
        return []

    def close(self) -> None: ...


class Node(LocalNode):
    """One of a cluster that says which nodes are there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.leaves = True


class Seen:
    """A survey that has seen what a test says, and offers what it says."""

    def __init__(self, free: dict[str, float], reserved: dict[str, str]) -> None:
        self.sight, self.usable = Sight(free, reserved), frozenset[str]()
        self.found: list[tuple[Place, str]] = []
        self.withdrawn: list[str] = []

    def take(self) -> list[tuple[Place, str]]:
        found, self.found = self.found, []
        return found

    def withdraw(self, name: str) -> None:
        self.withdrawn.append(name)


A, B, C = (Place(Node(name), name, f"/{name}") for name in "abc")


def directory(survey: Seen | None = None, least: int = 2, **clients: object) -> HostDirectory:
    """The trainer and s on host a, t and u on host b. least: of t and u, if there is a survey."""
    needs = Needs(dict.fromkeys("stu", 1.0), [(frozenset("tu"), least)])
    found = HostDirectory(
        {"trainer": A, "s": A, "t": B, "u": B},
        {"s": ["s.0"], "t": ["t.0"]},
        {"main": "m", "a": "x", "b": "y"},
        ("a", "main"),
        survey,  # type: ignore[arg-type]
        needs if survey is not None else Needs(),
    )
    found.clients = clients  # type: ignore[assignment]
    return found


def advanced(hosts: HostDirectory, *sought: str) -> Changes:
    """What has happened once all hosts have been asked after the end of these stations."""
    for station in sought:
        hosts.seek(station)
    found = Changes([], {}, [])
    until = time.monotonic() + 10
    while not {*found.placed, *hosts.waiting} >= {*sought} and time.monotonic() < until:
        new = hosts.advance(NOW)
        found = Changes([*found.hosts, *new.hosts], {**found.leaving, **new.leaving}, [*found.placed, *new.placed])
        time.sleep(0.001)
    return found


def test_stations_of_a_lost_host_go_to_what_is_left() -> None:
    hosts = directory(a=Answers(), b=Silent())
    assert hosts.view("s").slots == {"s.0": "a", "t.0": "b"}
    why = "is on host b, which is lost"
    assert advanced(hosts, "s") == ([], {"t": why, "u": why}, ["s"])
    assert (hosts.lost, hosts.host_of("s"), hosts.host_of("t")) == ({"b"}, "a", "b")
    assert advanced(hosts, "t") == ([], {}, ["t"])
    view = hosts.view("t")
    assert (view.own, view.folder, dict(view.servers)) == ("a", "/a", {"main": "m", "a": "x"})
    assert view.slots == {"s.0": "a", "t.0": "a"}


def test_the_loss_of_the_trainers_host_ends_the_run() -> None:
    with pytest.raises(RunHalted, match="host a is lost, and the trainer with it; start again with resume"):
        advanced(directory(a=Silent(), b=Answers()), "t")


RESERVED = {"trainer": "a", "s": "a", "t": "b", "u": "b"}


def test_a_run_goes_on_with_less_where_no_node_has_room_and_uses_one_that_comes() -> None:
    """Of t and u one has to work, even where it shares CPUs."""
    seen = Seen({C.node.name: 0.0, "a": 0.0}, {"trainer": "a", "s": "a"})
    hosts = directory(seen, least=1, a=Answers(), b=Silent())
    assert advanced(hosts, "t", "u").placed == ["t"]
    assert (hosts.host_of("t"), list(hosts.waiting), seen.withdrawn) == ("a", ["u"], ["b"])
    assert not any(hosts.advance(NOW))
    seen.found, seen.sight = [(C, "tcp://c")], Sight({"a": 0.0, "c": 2.0}, seen.sight.reserved)
    assert hosts.advance(NOW) == ([("c", "tcp://c")], {}, ["u"])
    assert hosts.advance(NOW + 20.0) == ([], {"t": "moves to c, which has room"}, [])
    assert (hosts.host_of("u"), hosts.view("u").servers["c"], seen.usable) == ("c", "tcp://c", {"a", "c"})
    assert advanced(hosts, "t").placed == ["t"]
    assert hosts.host_of("t") == "c"
    assert not any(hosts.advance(NOW)), "it has what it needs"


def test_room_is_what_nobody_has_reserved_and_none_of_ours_has_taken() -> None:
    """One free CPU takes one of the two."""
    hosts = directory(Seen({"a": 1.0}, {"trainer": "a", "s": "a"}), least=1, a=Answers(), b=Silent())
    assert advanced(hosts, "t", "u").placed == ["t"]
    assert (hosts.host_of("t"), list(hosts.waiting)) == ("a", ["u"])


def test_a_station_goes_where_the_cluster_has_reserved_cpus_for_it() -> None:
    seen = Seen({"a": 5.0, "c": 0.0}, RESERVED | {"t": "c"})
    hosts = directory(seen, a=Answers(), b=Silent())
    seen.found = [(C, "tcp://c")]
    assert advanced(hosts, "t")[::2] == ([("c", "tcp://c")], ["t"])
    assert hosts.host_of("t") == "c"


def test_a_host_with_a_process_that_cannot_be_ended_is_lost_though_it_answers() -> None:
    """What it still writes is read by nobody."""
    stuck = Place(Node("b"), "b", "/b")
    stuck.node.abandoned = True  # type: ignore[misc]
    hosts = HostDirectory({"trainer": A, "t": stuck}, {}, {"main": "m", "a": "x", "b": "y"}, ("a", "main"))
    hosts.clients = {"a": Answers(), "b": Answers()}  # type: ignore[dict-item]
    assert advanced(hosts, "t").placed == ["t"]
    assert (hosts.lost, hosts.host_of("t")) == ({"b"}, "a")


def test_a_node_that_comes_back_is_a_new_host() -> None:
    """Station t was there; its link was cut, so its host was lost."""
    seen = Seen({"a": 0.0, "b": 0.0}, RESERVED)
    hosts = directory(seen, least=0, a=Answers(), b=Silent())
    assert advanced(hosts, "t").leaving.keys() == {"u"}
    assert list(hosts.waiting) == ["t"]
    seen.found = [(Place(B.node, "host-4", "/again"), "tcp://b")]
    assert hosts.advance(NOW) == ([("host-4", "tcp://b")], {}, ["t"])
    assert (hosts.host_of("t"), hosts.view("t").folder) == ("host-4", "/again")


class Cluster:
    """Nodes that a test brings and takes."""

    def __init__(self, *nodes: LocalNode) -> None:
        self.nodes = {node.name: node for node in nodes}

    def look(self) -> tuple[dict[str, LocalNode], Sight]:
        return self.nodes, Sight(dict.fromkeys(self.nodes, 1.0), {})


def test_a_survey_opens_each_new_node_once_and_again_after_its_host_was_lost() -> None:
    opened: list[str] = []

    def open_host(node: LocalNode) -> Found:
        opened.append(node.name)
        if opened.count("broken") == 1 and node.name == "broken":
            raise StartError("no memory")
        return Found(f"host-{len(opened)}", "/f", "t", "tcp://x")

    cluster = Cluster(LocalNode("old"), LocalNode("new"), LocalNode("broken"))
    survey = Survey(cluster, open_host, look_s=0.01)  # type: ignore[arg-type]
    survey.usable = frozenset({"old"})
    survey.start()
    try:
        found = _taken(survey, 1)
        assert [place.node.name for place, _ in found] == ["new"]
        survey.usable = frozenset({"old", "new"})
        time.sleep(0.05)
        survey.withdraw("old")
        assert [place.node.name for place, _ in _taken(survey, 1)] == ["old"]
    finally:
        survey.close()
    assert opened == ["new", "broken", "old"], "what failed is tried again, but not at once"


def _taken(survey: Survey, count: int) -> list[tuple[Place, str]]:
    taken: list[tuple[Place, str]] = []
    until = time.monotonic() + 10
    while len(taken) < count and time.monotonic() < until:
        taken += survey.take()
        time.sleep(0.001)
    return taken


def test_who_cannot_reach_mains_host_for_long_enough_knows_it() -> None:
    class Client:
        def ask(self, question: q.Question) -> list[memoryview]:
            raise HostSilent("no")

        def close(self) -> None: ...

    watch = MainWatch(Client(), 1e-9)  # type: ignore[arg-type]
    until = time.monotonic() + 10
    while not watch.silent and time.monotonic() < until:
        time.sleep(0.001)
    assert watch.silent
    watch.close()
    other = MainWatch(Answers(), 1e-9)  # type: ignore[arg-type]
    time.sleep(0.02)
    assert not other.silent
    other.close()
