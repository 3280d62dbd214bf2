"""Where stations go when hosts are lost and nodes come."""

from __future__ import annotations

import math
import threading
import time

import pytest
from tests.process.runs import wait_until

from polyrhythm.errors import HostLost, RunHalted, StartError
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import Found, LocalNode
from polyrhythm.plugins.cluster.hosts.client import HostSilent, HostWatch
from polyrhythm.plugins.cluster.hosts.directory import HostDirectory, Needs, by_station
from polyrhythm.plugins.cluster.hosts.survey import ClusterLost, HostedNode, Sight, Survey
from polyrhythm.runtime.hosts import Changes, Departure

NOW = 100.0


class Watched:
    """A host that has answered nothing for so many seconds."""

    def __init__(self, silent_s: float = 0.0) -> None:
        self.answered, self.silent_s = -math.inf if silent_s else math.inf, silent_s
        self.asked = 0
        self.stopped = False

    def is_silent_for(self, seconds: float) -> bool:
        return self.silent_s >= seconds

    def ask(self) -> None:
        self.asked += 1

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None: ...


class Node(LocalNode):
    """One of a cluster that says which nodes are there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.leaves = True


class Seen:
    """A survey that has seen what a test says, and offers what it says."""

    failure = ""

    def __init__(self, free: dict[str, float], reserved: dict[str, str]) -> None:
        self.sight, self.usable = Sight(free, reserved), frozenset[str]()
        self.found: list[tuple[HostedNode, str]] = []
        self.withdrawn: list[str] = []

    def take(self) -> list[tuple[HostedNode, str]]:
        found, self.found = self.found, []
        return found

    def withdraw(self, name: str) -> None:
        self.withdrawn.append(name)


A, B, C = (HostedNode(Node(name), name, f"/{name}") for name in "abc")


def directory(survey: Seen | None = None, least: int = 2, **watches: Watched) -> HostDirectory:
    """The trainer and s on host a, t and u on host b. least: of t and u, if there is a survey; watches: of the hosts;
    those that come answer."""
    needs = Needs(dict.fromkeys("stu", 1.0), [(frozenset("tu"), least)])
    found = HostDirectory(
        {"trainer": A, "s": A, "t": B, "u": B},
        {"s": ["s.0"], "t": ["t.0"]},
        {"main": "m", "a": "x", "b": "y"},
        ("a", "main"),
        survey,  # type: ignore[arg-type]
        needs if survey is not None else Needs(),
        heartbeat_s=20.0,
    )
    found.watch_hosts(lambda host, _: watches.get(host, Watched()))  # type: ignore[arg-type, return-value]
    return found


def advanced(hosts: HostDirectory, *sought: str) -> Changes:
    """What has happened after the end of these stations."""
    for station in sought:
        hosts.on_station_ended(station, NOW)
    return hosts.advance(NOW, ())


SILENT_S = 20.0


def test_stations_of_a_lost_host_go_to_what_is_left() -> None:
    hosts = directory(a=Watched(), b=Watched(SILENT_S))
    assert hosts.view("s").slots == {"s.0": "a", "t.0": "b"}
    assert hosts.view("s").answer_s == 20.0, "a link may be cut for less than heartbeat_s"
    why = Departure("is on host b, which is lost")
    assert advanced(hosts, "s") == ([], {"t": why, "u": why}, ["s"])
    assert (hosts.lost, hosts.host_of("s"), hosts.host_of("t")) == ({"b"}, "a", "b")
    assert advanced(hosts, "t") == ([], {}, ["t"])
    view = hosts.view("t")
    assert (view.own, view.folder, dict(view.servers)) == ("a", "/a", {"main": "m", "a": "x"})
    assert view.slots == {"s.0": "a", "t.0": "a"}


def test_the_loss_of_the_trainers_host_ends_the_run() -> None:
    with pytest.raises(
        HostLost,
        match=r"host a is lost \(it does not answer\), and the run needs it; start again with resume, without its",
    ) as lost:
        advanced(directory(a=Watched(SILENT_S), b=Watched()), "t")
    assert (lost.value.host, lost.value.stations) == ("a", ["trainer", "s"])


RESERVED = {"trainer": "a", "s": "a", "t": "b", "u": "b"}


def test_a_run_goes_on_with_less_where_no_node_has_room_and_uses_one_that_comes() -> None:
    """Of t and u one has to work, even where it shares CPUs."""
    seen = Seen({C.node.name: 0.0, "a": 0.0}, {"trainer": "a", "s": "a"})
    hosts = directory(seen, least=1, a=Watched(), b=Watched(SILENT_S))
    assert advanced(hosts, "t", "u").placed == ["t"]
    assert (hosts.host_of("t"), list(hosts.waiting), seen.withdrawn) == ("a", ["u"], ["b"])
    assert not any(hosts.advance(NOW, ()))
    seen.found, seen.sight = [(C, "tcp://c")], Sight({"a": 0.0, "c": 2.0}, seen.sight.reserved)
    assert hosts.advance(NOW, ()) == ([("c", "tcp://c")], {}, ["u"])
    assert not any(hosts.advance(NOW + 20.0, (), starting=True)), "u is not ready yet"
    moving = {"t": Departure("moves to c, which has room", moves=True)}
    assert hosts.advance(NOW + 20.0, ()) == ([], moving, [])
    assert (hosts.host_of("u"), hosts.view("u").servers["c"], seen.usable) == ("c", "tcp://c", {"a", "c"})
    assert advanced(hosts, "t").placed == ["t"]
    assert hosts.host_of("t") == "c"
    assert not any(hosts.advance(NOW + 40.0, ())), "it has what it needs"


def test_room_is_what_nobody_has_reserved_and_none_of_ours_has_taken() -> None:
    """One free CPU takes one of the two."""
    hosts = directory(Seen({"a": 1.0}, {"trainer": "a", "s": "a"}), least=1, a=Watched(), b=Watched(SILENT_S))
    assert advanced(hosts, "t", "u").placed == ["t"]
    assert (hosts.host_of("t"), list(hosts.waiting)) == ("a", ["u"])


def test_a_station_goes_where_the_cluster_has_reserved_cpus_for_it() -> None:
    seen = Seen({"a": 5.0, "c": 0.0}, RESERVED | {"t": "c"})
    hosts = directory(seen, a=Watched(), b=Watched(SILENT_S))
    seen.found = [(C, "tcp://c")]
    assert advanced(hosts, "t")[::2] == ([("c", "tcp://c")], ["t"])
    assert hosts.host_of("t") == "c"


def test_a_host_with_a_process_that_cannot_be_ended_is_lost_though_it_answers() -> None:
    """What it still writes is read by nobody."""
    stuck = HostedNode(Node("b"), "b", "/b")
    stuck.node.abandoned = True  # type: ignore[misc]
    hosts = HostDirectory({"trainer": A, "t": stuck}, {}, {"main": "m", "a": "x", "b": "y"}, ("a", "main"))
    assert advanced(hosts, "t").placed == ["t"]
    assert (hosts.lost, hosts.host_of("t")) == ({"b"}, "a")


def test_a_node_that_comes_back_is_a_new_host() -> None:
    """Station t was there; its link was cut, so its host was lost."""
    seen = Seen({"a": 0.0, "b": 0.0}, RESERVED)
    hosts = directory(seen, least=0, a=Watched(), b=Watched(SILENT_S))
    assert advanced(hosts, "t").leaving.keys() == {"u"}
    assert list(hosts.waiting) == ["t"]
    seen.found = [(HostedNode(B.node, "host-4", "/again"), "tcp://b")]
    assert hosts.advance(NOW, ()) == ([("host-4", "tcp://b")], {}, ["t"])
    assert (hosts.host_of("t"), hosts.view("t").folder) == ("host-4", "/again")


def ranked(survey: Seen | None = None, **watches: Watched) -> HostDirectory:
    """Ranks 0 and 3 of the trainer on host a, 1 on b, 2 on c."""
    at = {"trainer": A, "trainer-rank1": B, "trainer-rank2": C, "trainer-rank3": A, "s": B}
    servers = {"main": "m", "a": "x", "b": "y", "c": "z"}
    cpus = Needs(dict.fromkeys(at, 1.0), [(frozenset("s"), 0)])
    found = HostDirectory(at, {}, servers, ("a", "main"), survey, cpus)  # type: ignore[arg-type]
    found.watch_hosts(lambda host, _: watches.get(host, Watched()))  # type: ignore[arg-type, return-value]
    return found


def hosts_of_ranks(hosts: HostDirectory) -> str:
    return "".join(host for host, _ in hosts.view("trainer-rank3").ranks)


def test_losing_the_host_of_one_rank_is_losing_the_trainer_which_starts_with_that_rank_elsewhere() -> None:
    hosts = ranked(b=Watched(SILENT_S))
    assert hosts.view("trainer-rank1").own == "b"
    assert hosts_of_ranks(hosts) == "abca"
    why = Departure("has trainer-rank1 on host b, which is lost")
    assert hosts.advance(NOW, ()).leaving == {"trainer": why, "s": Departure("is on host b, which is lost")}
    assert advanced(hosts, "trainer").placed == ["trainer"]
    assert (hosts.host_of("trainer"), hosts_of_ranks(hosts)) == ("a", "acca")


def test_ranks_whose_hosts_are_heard_keep_a_host_and_that_of_a_silent_one_is_lost() -> None:
    hosts = ranked(b=Watched(SILENT_S), c=Watched(SILENT_S))
    assert hosts.advance(NOW, ["trainer", "trainer-rank1"]).leaving.keys() == {"trainer"}
    assert hosts.lost == {"c"}


def test_a_trainer_starts_with_a_rank_that_shares_cpus_and_moves_when_a_node_has_room() -> None:
    """A simulator that may be missed waits instead. The other ranks do not count as crowded."""
    seen = Seen({"a": 0.0, "c": 0.0}, {"trainer": "a", "trainer-rank2": "c", "trainer-rank3": "a"})
    hosts = ranked(seen, b=Watched(SILENT_S))
    assert advanced(hosts, "trainer", "s").placed == ["trainer"]
    assert (hosts_of_ranks(hosts), list(hosts.waiting)) == ("acca", ["s"])
    new = HostedNode(Node("d"), "d", "/d")
    seen.found, seen.sight = [(new, "tcp://d")], Sight({"d": 2.0}, seen.sight.reserved)
    assert hosts.advance(NOW, ()).placed == ["s"]
    seen.sight = Sight({"d": 1.0, "a": 0.0, "c": 0.0}, seen.sight.reserved | {"s": "d"})
    moving = {"trainer": Departure("moves to d, which has room", moves=True)}
    assert hosts.advance(NOW + 20.0, ()).leaving == moving
    assert advanced(hosts, "trainer").placed == ["trainer"]
    assert hosts_of_ranks(hosts) == "adca"


def test_a_name_that_looks_like_a_rank_is_a_station_of_its_own() -> None:
    names = ["x-rank1", "x", "x-rank2", "y", "y-rank1", "y-rank2", "z-rank-1"]
    assert by_station(names) == {
        "x-rank1": ["x-rank1"],
        "x": ["x"],
        "x-rank2": ["x-rank2"],
        "y": ["y", "y-rank1", "y-rank2"],
        "z-rank-1": ["z-rank-1"],
    }


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


def _taken(survey: Survey, count: int) -> list[tuple[HostedNode, str]]:
    taken: list[tuple[HostedNode, str]] = []

    def enough() -> bool:
        taken.extend(survey.take())
        return len(taken) >= count

    wait_until(enough)
    return taken


def test_one_host_alone_is_not_lost_by_silence_while_its_stations_are_heard() -> None:
    """Its agent may be slow. A station that has ended waits for it for `heartbeat_s`, the others of the run do not."""
    agent = Watched(59.0)
    hosts = directory(a=Watched(), b=agent)
    hosts.on_station_ended("s", NOW)
    assert agent.asked == 1
    assert not any(hosts.advance(NOW, ["trainer", "t"]))
    assert not any(hosts.advance(NOW + 19.0, ["trainer", "t"]))
    assert hosts.advance(NOW + 20.0, ["trainer", "t"]).placed == ["s"]
    assert (hosts.lost, agent.stopped) == (set(), False)
    agent.silent_s = 60.0
    assert hosts.advance(NOW, ["trainer", "t"]).leaving.keys() == {"t", "u"}
    assert (hosts.lost, agent.stopped) == ({"b"}, True)


def test_a_host_that_is_silent_for_less_than_heartbeat_s_is_not_lost() -> None:
    """Though nothing is heard of its stations either, and it is the trainer's."""
    hosts = directory(a=Watched(19.0), b=Watched())
    assert not any(advanced(hosts, "t"))
    hosts.watch_hosts(lambda _host, _endpoint: Watched())  # type: ignore[arg-type, return-value]
    assert hosts.advance(NOW, ()).placed == ["t"]


def test_a_host_is_lost_with_its_agent_and_main_with_its_own() -> None:
    class Ended(Node):
        agent_failure = "its agent has ended with status -9"  # type: ignore[assignment]

    gone = HostedNode(Ended("b"), "b", "/b")
    hosts = HostDirectory({"trainer": A, "t": gone}, {}, {"main": "m", "a": "x", "b": "y"}, ("a", "main"))
    assert hosts.advance(NOW, ["trainer", "t"]).leaving == {"t": Departure("is on host b, which is lost")}
    own = HostedNode(Ended("main"), "main", "/m")
    hosts = HostDirectory({"trainer": A}, {}, {"main": "m", "a": "x"}, ("a", "main"), own=own)
    with pytest.raises(RunHalted, match=r"host main is lost \(its agent has ended with status -9\), .* with resume$"):
        hosts.advance(NOW, ["trainer"])


def test_a_process_on_the_trainers_host_that_cannot_be_ended_ends_the_run() -> None:
    """It may write into the block of another sample, which the trainer reads."""
    stuck = HostedNode(Node("a"), "a", "/a")
    stuck.node.abandoned = True  # type: ignore[misc]
    hosts = HostDirectory({"trainer": stuck, "s": stuck}, {}, {"main": "m", "a": "x"}, ("a", "main"))
    with pytest.raises(RunHalted, match=r"host a is lost \(a process there cannot be ended\)"):
        hosts.advance(NOW, ["trainer"])


def test_a_survey_goes_on_after_a_look_that_fails_for_any_reason(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Cluster):
        looks = 0

        def look(self) -> tuple[dict[str, LocalNode], Sight]:
            self.looks += 1
            if self.looks == 1:
                raise IndexError("a text without a line")
            return super().look()

    survey = Survey(Faulty(LocalNode("new")), lambda _: Found("host-1", "/f", "t", ""), look_s=0.01)  # type: ignore[arg-type]
    survey.start()
    try:
        assert [place.node.name for place, _ in _taken(survey, 1)] == ["new"]
    finally:
        survey.close()
    assert "IndexError" in caplog.text


def test_a_cluster_that_is_lost_ends_the_run_at_once_and_nobody_waits_for_its_processes() -> None:
    class Lost(Cluster):
        def look(self) -> tuple[dict[str, LocalNode], Sight]:
            raise ClusterLost("the cluster is lost: its raylet has ended")

    class Left(Node):
        given_up = False

        def give_up(self) -> None:
            self.given_up = True

    survey = Survey(Lost(), lambda _: Found("host-1", "/f", "t", ""), look_s=0.01)  # type: ignore[arg-type]
    node = Left("a")
    hosts = HostDirectory({"trainer": HostedNode(node, "a", "/a")}, {}, {"main": "m", "a": "x"}, ("a", "main"), survey)
    survey.start()
    try:
        wait_until(lambda: survey.failure)
        with pytest.raises(RunHalted, match=r"its raylet has ended; start again with resume$"):
            hosts.advance(NOW, ["trainer"])
    finally:
        survey.close()
    assert node.given_up


class Client:
    """Answers, or does not, once it may."""

    host = "main"

    def __init__(self) -> None:
        self.answers, self.asked, self.may = False, 0, threading.Semaphore(0)

    def ask(self, question: q.Question) -> list[memoryview]:
        self.asked += 1
        self.may.acquire()
        if not self.answers:
            raise HostSilent("no")
        return [memoryview(q.encode((time.monotonic_ns(), time.time_ns())))]

    def close(self) -> None: ...


def test_a_host_is_silent_after_several_questions_and_not_once_it_answers() -> None:
    client = Client()
    watch = HostWatch(client)  # type: ignore[arg-type]
    client.may.release()
    wait_until(lambda: client.asked == 2)
    assert not watch.is_silent_for(0.0), "one question may be lost with its connection"
    client.may.release()
    wait_until(lambda: client.asked == 3)
    assert watch.is_silent_for(0.0)
    assert not watch.is_silent_for(3600.0)
    now, client.answers = time.monotonic(), True
    watch.ask()
    client.may.release()
    wait_until(lambda: client.asked == 4)
    assert not watch.is_silent_for(0.0)
    assert watch.answered <= now, "this question was asked before"
    client.may.release(100)
    wait_until(lambda: watch.answered > now)
    watch.close()


def test_a_process_on_a_device_goes_where_one_is_reserved_else_shares_one() -> None:
    """Free CPUs alone are no room for it, and a node without devices none to share."""
    survey = Seen({"a": 1.0, "c": 8.0}, {})
    survey.sight = Sight(survey.sight.free, {}, frozenset("a"))

    def directory(least: int) -> HostDirectory:
        """At least so many of `t` are needed."""
        return HostDirectory(
            {"trainer": A, "s": A, "t": B, "c": C},
            {},
            {"main": "m", "a": "x", "b": "y", "c": "z"},
            ("a", "main"),
            survey,  # type: ignore[arg-type]
            Needs(dict.fromkeys("stc", 1.0), [(frozenset("t"), least)], frozenset("t")),
        )

    found = directory(0)
    found.on_station_ended("t", NOW)
    assert not found.advance(NOW, ()).placed, "it may wait"
    survey.sight = Sight(survey.sight.free, {"t": "c"}, frozenset("ac"))
    assert found.advance(NOW, ()).placed == ["t"]
    assert found.host_of("t") == "c"

    needed = directory(1)
    survey.sight = Sight(survey.sight.free, {}, frozenset("a"))
    needed.on_station_ended("t", NOW)
    assert needed.advance(NOW, ()).placed == ["t"]
    assert needed.host_of("t") == "a", "it shares a device there, though c has more CPUs"
    survey.sight = Sight(survey.sight.free, {"t": "c"}, frozenset("ac"))
    (moves,) = needed.advance(NOW + 60.0, ()).leaving.values()
    assert moves.moves


@pytest.mark.parametrize("lacking", ["trainer", "trainer-rank1", "g"])
def test_a_needed_process_without_a_device_waits_for_one_and_then_ends_the_run(
    lacking: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The run does not count as complete meanwhile, so it is no stall, and nothing else of it ends."""
    station = lacking.removesuffix("-rank1")

    def lost() -> tuple[HostDirectory, Seen]:
        survey = Seen({"a": 8.0}, {})
        at = dict.fromkeys(("trainer", "trainer-rank1", "g", "h", "s"), A) | {lacking: B, "h": B}
        needs = Needs(dict.fromkeys(at, 1.0), [(frozenset("gh"), 1)], frozenset((lacking, "h")))
        hosts = HostDirectory(at, {}, {"main": "m", "a": "x", "b": "y"}, ("a", "main"), survey, needs)  # type: ignore[arg-type]
        hosts.watch_hosts(lambda host, _: Watched(SILENT_S if host == "b" else 0.0))  # type: ignore[arg-type, return-value]
        assert not advanced(hosts, station, "h").placed
        return hosts, survey

    hosts, survey = lost()
    assert not any(hosts.advance(NOW + 299.0, ()))
    assert (hosts.waiting, caplog.text.count(f"{lacking} waits for a device")) == (["h"] * (station != "g"), 1)
    survey.sight = Sight({"a": 8.0}, {}, frozenset("a"))
    assert hosts.advance(NOW + 300.0, ()).placed == [station]

    hosts, survey = lost()
    with pytest.raises(RunHalted, match=f"^{lacking}: no node has had a device for it for 300 s; start again with re"):
        hosts.advance(NOW + 300.0, ())
