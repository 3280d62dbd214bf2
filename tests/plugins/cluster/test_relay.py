"""Versions over a tree of hosts: real agents, sealed connections, and a publisher that can be held up at a part."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.conformance.weights import over_hosts
from tests.long import long
from tests.plugins.cluster.served import blank_arena, served
from tests.process.networks import memory
from tests.process.runs import PATIENCE_S, children

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, LocalNode
from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.plugins.cluster.hosts.memory import HostMemory
from polyrhythm.plugins.cluster.hosts.relay import FANOUT, Relay, decode_progress, route
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.published import PublishedMemory, shared_nbytes
from polyrhythm.runtime.memory.tensors import tensors_over
from polyrhythm.runtime.memory.weights import Fetched, SharedWeights, Weights
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import WeightSpec

LAYOUT = WeightsLayout.of({f"w{index}": WeightSpec((1_000_003,), "float32") for index in range(3)})
PUBLISHER = "host-0"
ARENA = blank_arena().layout


class Gate:
    """Holds up the first question for a part from `at` on, once, until `open`. reached: it has come."""

    def __init__(self, at: int) -> None:
        self._at, self._turn, self._open = at, threading.Lock(), threading.Event()
        self.reached = threading.Event()

    def wait(self, begin: int) -> None:
        with self._turn:
            first = begin >= self._at and not self.reached.is_set()
            if first:
                self.reached.set()
        if first:
            assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


class Published(PublishedMemory):
    """asked: bytes of the parts that were asked for."""

    gate: Gate | None = None
    asked = 0

    def find_part(self, version: int, number: int, part: slice) -> memoryview | None:
        if self.gate is not None:
            self.gate.wait(part.start)
        self.asked += part.stop - part.start
        return super().find_part(version, number, part)


class Hosts:
    """A publisher in this process, and the agents of `count` hosts that read, each with memory of its own."""

    def __init__(self, count: int, folder: Path, stack: ExitStack) -> None:
        own, keys = folder / PUBLISHER, make_keys()
        own.mkdir()
        content = bytearray(shared_nbytes(LAYOUT))
        self.published, self.writer = Published(LAYOUT, content, own), SharedWeights(LAYOUT, content, own)
        self._client = served(own, blank_arena(), self.published, PUBLISHER, keys=keys)
        self.names = [f"host-{number}" for number in range(1, count + 1)]
        servers, folders = {PUBLISHER: self._client.endpoint}, {}
        begun = {}
        for name in self.names:
            node = LocalNode(name, environment=memory(folder, name))
            stack.callback(node.close)
            begun[name] = node.start_agent(AgentSpec(name, (), "", ARENA, LAYOUT, (PUBLISHER,), LOOPBACK, keys))
        for name, wait in begun.items():
            found = wait()
            servers[name], folders[name] = found.endpoint, Path(found.folder)
        self.weights: dict[str, Weights] = {}
        for name, its in folders.items():
            sockets = Sockets("tcp", str(its), keys, lambda: None, q.LARGEST_QUESTION)
            stack.callback(sockets.close)
            view = HostView(name, str(its), LOOPBACK, servers, publishers=(PUBLISHER,))
            host = HostMemory(ARENA, LAYOUT, its, view, sockets)
            stack.callback(host.close)
            self.weights[name] = host.weights("cpu", None)
        self._pool = stack.enter_context(ThreadPoolExecutor(count))

    def publish(self, version: int, value: float) -> None:
        self.writer.publish(version, {name: torch.full(spec.shape, value) for name, spec in LAYOUT.published.items()})

    def fetching(self, name: str, version: int) -> Future[tuple[Fetched, set[float]]]:
        """What a process of the host gets, and the values that it has then."""

        def fetch() -> tuple[Fetched, set[float]]:
            into = tensors_over(LAYOUT, memoryview(bytearray(LAYOUT.nbytes)))
            found = self.weights[name].fetch(version, into)
            return found, {float(x) for tensor in into.values() for x in tensor.unique()}

        return self._pool.submit(fetch)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    with ExitStack() as stack:
        yield lambda count: Hosts(count, tmp_path, stack)
    assert not children()


@pytest.mark.parametrize(
    ("own", "expected"),
    [("a", "p"), ("b", "p"), ("c", "a p"), ("d", "a p"), ("e", "b p"), ("g", "c a p"), ("unknown", "p")],
)
def test_each_host_copies_from_the_one_above_it_and_the_publisher_is_the_last(own: str, expected: str) -> None:
    assert route(own, ["p", *"abcdefg"]) == expected.split()


def test_a_version_leaves_its_publisher_as_often_as_the_tree_says_and_crosses_to_a_host_once(
    hosts: Callable[[int], Hosts],
) -> None:
    these = hosts(5)
    for version in range(2):
        these.published.asked = 0
        these.publish(version, 10.0 + version)
        answers = {name: [these.fetching(name, version) for _ in range(2)] for name in these.names}
        for name, both in answers.items():
            found = [answer.result(PATIENCE_S) for answer in both]
            assert [values for _, values in found] == [{10.0 + version}] * 2
            assert sorted(str(one.way) for one, _ in found) == ["host", "tcp"], "two processes of one host"
            (above, *_) = route(name, [PUBLISHER, *these.names])
            assert next(one.sources for one, _ in found if one.way == "tcp") == {above: LAYOUT.nbytes}
        assert these.published.asked == FANOUT * LAYOUT.nbytes
    into = tensors_over(LAYOUT, memoryview(bytearray(LAYOUT.nbytes)))
    found = these.weights["host-5"].fetch(1, into)
    assert these.weights["host-5"].fetch(1, into, found.publication).way is None


@pytest.mark.parametrize("fault", ["killed", pytest.param("slow", marks=long(4, "a host that is slow"))])
def test_a_host_goes_on_past_one_above_it_that_is_lost_or_slow_in_the_middle(
    fault: str, hosts: Callable[[int], Hosts]
) -> None:
    these = hosts(3)
    these.published.gate = gate = Gate(2 * q.PART_BYTES)
    these.publish(0, 1.0)
    below = these.fetching("host-3", 0)
    assert gate.reached.wait(PATIENCE_S), "host-1 has two of the three parts"
    if fault == "killed":
        (agent,) = [process for process in children() if process.cmdline()[-1:] == ["host-1"]]
        os.kill(agent.pid, signal.SIGKILL)
    found, values = below.result(PATIENCE_S)
    gate.open()
    assert (found.way, values) == ("tcp", {1.0})
    assert sum(found.sources.values()) == LAYOUT.nbytes
    assert found.sources[PUBLISHER] >= LAYOUT.nbytes - 2 * q.PART_BYTES
    these.publish(1, 2.0)
    found, values = these.fetching("host-3", 1).result(PATIENCE_S)
    assert (found.sources, values) == ({PUBLISHER: LAYOUT.nbytes}, {2.0}), "host-1 is not asked for a while"
    if fault == "slow":
        assert these.fetching("host-1", 1).result(PATIENCE_S)[1] == {2.0}


@pytest.mark.parametrize("version", [0, 2])
def test_a_publication_that_is_replaced_in_the_middle_is_not_mixed_with_its_successor(
    version: int, hosts: Callable[[int], Hosts]
) -> None:
    """By the same version, which a dead trainer's successor publishes anew, or by two later ones."""
    these = hosts(3)
    these.published.gate = gate = Gate(q.PART_BYTES)
    these.publish(0, 1.0)
    asked = [these.fetching(name, 0) for name in ("host-1", "host-3")]
    assert gate.reached.wait(PATIENCE_S)
    for other in range(max(version - 1, 0), version + 1):
        these.publish(other, 50.0 + other)
    gate.open()
    for answer in asked:
        found, values = answer.result(PATIENCE_S)
        assert (found.publication.version, values) == (version, {50.0 + version})


@long(12, "versions that are overwritten while hosts read them")
def test_hosts_that_read_while_versions_are_overwritten_have_each_one_whole(hosts: Callable[[int], Hosts]) -> None:
    these = hosts(4)
    these.publish(0, 0.0)
    seen = dict.fromkeys(these.names, 0)
    for version in range(1, 13):
        asked = {name: these.fetching(name, version - 1) for name in these.names}
        these.publish(version, float(version))
        for name, answer in asked.items():
            found, values = answer.result(PATIENCE_S)
            assert values == {float(found.publication.version)}
            assert found.publication.version >= seen[name], "versions only rise"
            seen[name] = found.publication.version
    assert min(seen.values()) >= 11


class Overwritten(PublishedMemory):
    """The publisher publishes the next version while the last part of this one is read."""

    def find_part(self, version: int, number: int, part: slice) -> memoryview | None:
        found = super().find_part(version, number, part)
        self.numbers[0] += part.stop == len(self.buffers[0])
        return found


def relayed(folder: Path, published: PublishedMemory) -> DataClient:
    """A client of a host in this process whose relay copies from that publisher."""
    publisher = served(folder, blank_arena(), published, PUBLISHER)
    other = folder / "other"
    other.mkdir()
    (other / "mirror").write_bytes(bytes(shared_nbytes(LAYOUT)))
    relay = Relay(LAYOUT, other, lambda host, _: DataClient(host, publisher.connect))
    return served(other, blank_arena(), relay=relay)


def test_a_version_whose_last_part_was_overwritten_as_it_was_read_is_gone(tmp_path: Path) -> None:
    published = Overwritten(LAYOUT, bytearray(shared_nbytes(LAYOUT)), tmp_path)
    published.stored[0], published.numbers[0] = 6, 3
    here = relayed(tmp_path, published)
    for number in (3, 9):
        (answer,) = here.ask(q.Bring(q.Relayed(5, number, [(PUBLISHER, "")])))
        assert decode_progress(answer).gone


def test_an_older_publication_is_not_brought_for_another_host(tmp_path: Path) -> None:
    """What this host has of a newer one would go."""
    published = PublishedMemory(LAYOUT, bytearray(shared_nbytes(LAYOUT)), tmp_path)
    published.stored[:], published.numbers[:] = (1, 2), (1, 2)
    here = relayed(tmp_path, published)
    sources = [q.Relayed(version, version + 1, [(PUBLISHER, "")]) for version in range(2)]
    for source in reversed(sources):
        answer = here.ask(q.RelayedPart(source, 0, 64))
        assert len(answer) == (2 if source.version else 0)
    for begin, length in ((-1, 64), (0, 0), (0, q.PART_BYTES + 1)):
        with pytest.raises(LookupError, match="there are no bytes"):
            here.ask(q.RelayedPart(sources[1], begin, length))
    with pytest.raises(LookupError, match="without a host"):
        here.ask(q.RelayedPart(q.Relayed(1, 2, []), 0, 64))
    with pytest.raises(LookupError, match="without a host"):
        here.ask(q.Bring(q.Relayed(1, 2, [])))
    beyond = LAYOUT.nbytes
    with pytest.raises(LookupError, match="have not come here"):
        here.ask(q.RelayedPart(sources[1], beyond, 64))


def test_why_a_version_cannot_be_had_is_said(tmp_path: Path) -> None:
    (writer, _), _, reader = over_hosts(LAYOUT, tmp_path)
    (tmp_path / "other" / "mirror").unlink()
    writer.publish(0, {name: torch.zeros(spec.shape) for name, spec in LAYOUT.published.items()})
    with pytest.raises(LookupError, match="this host has no memory for what others publish"):
        reader.fetch(0, tensors_over(LAYOUT, memoryview(bytearray(LAYOUT.nbytes))))
