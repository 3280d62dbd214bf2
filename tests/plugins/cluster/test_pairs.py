"""Versions over process groups of two between the processes of two hosts: real agents, gloo in NCCL's place, an end
that is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.conformance.weights import over_hosts
from tests.long import long
from tests.plugins.cluster.served import blank_arena
from tests.process.networks import memory
from tests.process.runs import PATIENCE_S, children

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, LocalNode
from polyrhythm.plugins.cluster.hosts.client import DataClient, client_of
from polyrhythm.plugins.cluster.hosts.memory import HostMemory
from polyrhythm.plugins.cluster.hosts.pair_weights import PairWeights
from polyrhythm.plugins.cluster.hosts.pairs import Join, PairBroken, PairSender, Send, Sent
from polyrhythm.plugins.cluster.hosts.server import HostServer
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.published import Ends, PublishedMemory
from polyrhythm.runtime.memory.tensors import State, copy_into, tensors_over
from polyrhythm.runtime.memory.weights import Fetched, Weights
from polyrhythm.runtime.messages import TRAINER
from polyrhythm.runtime.transport.authentication import KeyPair, RunKeys, make_keys
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import WeightSpec

#: Two buckets; the second begins in the middle of a tensor.
LAYOUT = WeightsLayout.of({f"w{index}": WeightSpec((3_000_001,), "float32") for index in range(4)})
ARENA = blank_arena().layout
TRAINERS, GENERATORS = "host-1", "host-2"
ENDS = Ends("sim:0", ())

PROCESS = """
import json, os, sys
from contextlib import ExitStack
from tests.plugins.cluster.test_pairs import ENDS, open_end, publish, room
from polyrhythm.runtime.memory.tensors import copy_into

def ends_in_the_middle(into, state):
    copy_into(into, {"w0": state["w0"]})
    os._exit(9)

with ExitStack() as stack:
    weights = open_end(stack, **json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    for line in sys.stdin:
        word, version, value = line.split()
        if word == "publish":
            publish(weights, int(version), float(value))
        else:
            weights.fetch(int(version), room(), copy=ends_in_the_middle)
        print("done", flush=True)
"""


def open_end(
    stack: ExitStack, host: str, device: str, servers: dict[str, str], folder: str, keys: list[str], process: str
) -> Weights:
    """A process's end of the channel."""
    pairs = [KeyPair(*(key.encode() for key in keys[first : first + 2])) for first in (0, 2)]
    sockets = Sockets("tcp", folder, RunKeys(*pairs), lambda: None, q.LARGEST_QUESTION)
    stack.callback(sockets.close)
    view = HostView(host, folder, LOOPBACK, servers, publishers=(TRAINERS,), process=process)
    own = HostMemory(ARENA, LAYOUT, Path(folder), view, sockets)
    stack.callback(own.close)
    return own.weights(device, ENDS, "cpu")


def publish(weights: Weights, version: int, value: float) -> None:
    weights.publish(version, {name: torch.full(spec.shape, value) for name, spec in LAYOUT.published.items()})


def room() -> dict[str, torch.Tensor]:
    return tensors_over(LAYOUT, memoryview(bytearray(LAYOUT.nbytes)))


def fetched(weights: Weights, version: int) -> tuple[Fetched, set[float]]:
    into = room()
    found = weights.fetch(version, into)
    return found, {float(x) for tensor in into.values() for x in tensor.unique()}


class Process:
    """A process on a host, which does what it is told."""

    def __init__(self, words: Mapping[str, object], stack: ExitStack) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", PROCESS]
        self.process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
        stack.callback(self.process.kill)
        self._tell(json.dumps(words))
        assert self.answer() == "ready"

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, word: str, version: int, value: float = 0.0) -> str:
        self._tell(f"{word} {version} {value}")
        return self.answer()


class Two:
    """The agents of two hosts."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        keys = make_keys()
        self._stack = stack
        self._keys = [key.decode() for pair in (keys.inbox, keys.outbox) for key in (pair.public, pair.secret)]
        self._servers, self._folders = dict[str, str](), dict[str, str]()
        for host in (TRAINERS, GENERATORS):
            node = LocalNode(host, environment=memory(folder, host))
            stack.callback(node.close)
            found = node.start_agent(AgentSpec(host, (), "", ARENA, LAYOUT, (TRAINERS,), LOOPBACK, keys))()
            self._servers[host], self._folders[host] = found.endpoint, found.folder

    def _words(self, host: str, device: str, process: str = "generator-0") -> dict[str, object]:
        return {
            "host": host,
            "device": device,
            "servers": self._servers,
            "folder": self._folders[host],
            "keys": self._keys,
            "process": process,
        }

    def trainer(self) -> Process:
        return Process(self._words(TRAINERS, "sim:0", TRAINER), self._stack)

    def beside_the_trainer(self, process: str) -> Path:
        """A process on the trainer's device, and the file that names who serves pairs there."""
        open_end(self._stack, **self._words(TRAINERS, "sim:0", process))  # type: ignore[arg-type]
        return Path(self._folders[TRAINERS]) / q.PAIR_FILE

    def generator(self) -> Weights:
        """In this process."""
        return open_end(self._stack, **self._words(GENERATORS, "sim:1"))  # type: ignore[arg-type]

    def other_generator(self) -> Process:
        return Process(self._words(GENERATORS, "sim:1"), self._stack)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        yield Two(tmp_path, stack)
    assert not children()


def test_versions_come_by_a_pair_until_the_trainer_is_killed_and_then_at_once_over_tcp(hosts: Two) -> None:
    trainer, weights = hosts.trainer(), hosts.generator()
    assert isinstance(weights, PairWeights)
    for version in range(2):
        assert trainer.do("publish", version, 5.0 + version) == "done"
        found, values = fetched(weights, version)
        assert (found.way, found.sources, values) == ("pair", {TRAINERS: LAYOUT.nbytes}, {5.0 + version})
    assert trainer.do("publish", 2, 7.0) == "done"
    with ThreadPoolExecutor(1) as pool:
        reached = threading.Event()

        def stops_in_the_middle(into: State, state: State) -> None:
            copy_into(into, {"w0": state["w0"]})
            if not reached.is_set():
                trainer.process.send_signal(signal.SIGSTOP)
                reached.set()
            copy_into(into, state)

        into = room()
        asked = pool.submit(weights.fetch, 2, into, copy=stops_in_the_middle)
        assert reached.wait(PATIENCE_S)
        time.sleep(0.3)
        assert not asked.done(), "the second bucket has not come"
        trainer.process.kill()
        found = asked.result(PATIENCE_S)
    assert (found.way, {float(x) for tensor in into.values() for x in tensor.unique()}) == ("tcp", {7.0})
    successor = hosts.trainer()
    assert successor.do("publish", 3, 8.0) == "done"
    assert fetched(weights, 3)[0].way == "tcp", "no pair is tried for a while"
    with closing(hosts.generator()) as other:  # type: ignore[type-var]
        found, values = fetched(other, 3)
        assert (found.way, values) == ("pair", {8.0})


@long(5, "a generator that dies while it has a pair")
def test_a_generator_that_dies_in_the_middle_breaks_its_own_pair_alone(hosts: Two) -> None:
    trainer, weights, other = hosts.trainer(), hosts.generator(), hosts.other_generator()
    assert trainer.do("publish", 0, 5.0) == "done"
    assert other.do("fetch", 0) == ""
    assert other.process.wait(PATIENCE_S) == 9
    for version in range(1, 3):
        assert trainer.do("publish", version, 5.0 + version) == "done", "the trainer waits for nobody"
        found, values = fetched(weights, version)
        assert (found.way, values) == ("pair", {5.0 + version})


@long(4, "who serves pairs")
@pytest.mark.parametrize("process", ["trainer-rank1", "generator-0"])
def test_only_the_trainers_first_rank_serves_pairs(process: str, hosts: Two) -> None:
    assert not hosts.beside_the_trainer(process).exists()
    trainer, weights = hosts.trainer(), hosts.generator()
    serving = hosts.beside_the_trainer(process).read_text()
    assert trainer.do("publish", 0, 5.0) == "done"
    assert fetched(weights, 0)[0].way == "pair"
    assert hosts.beside_the_trainer(process).read_text() == serving


class Overwritten(PublishedMemory):
    """What is published is replaced while the last bucket is read."""

    replace: Callable[[], None] = staticmethod(lambda: None)

    def find_part(self, version: int, number: int, part: slice) -> memoryview | None:
        if part.stop == len(self.buffers[0]):
            replace, self.replace = self.replace, lambda: None
            replace()
        return super().find_part(version, number, part)


class InOneProcess(NamedTuple):
    """Both ends of a pair. client: makes one of the sender."""

    writer: Weights
    published: Overwritten
    weights: PairWeights
    sender: PairSender
    client: Callable[[], DataClient]


@contextmanager
def in_one_process(folder: Path, idle_s: float = 600.0) -> Iterator[InOneProcess]:
    (writer, _), published, reader = over_hosts(LAYOUT, folder, Overwritten)
    assert isinstance(published, Overwritten)
    keys = make_keys()
    with ExitStack() as stack:
        sockets = [Sockets("tcp", str(folder), keys, lambda: None, q.LARGEST_QUESTION) for _ in range(2)]
        for own in sockets:
            stack.callback(own.close)
        sender = PairSender(published, folder, torch.device("cpu"), sockets[0], idle_s)
        stack.callback(sender.close)

        def client() -> DataClient:
            return client_of(sockets[1], "far", (folder / q.PAIR_FILE).read_text())

        weights = PairWeights(reader, "far", torch.device("cpu"), lambda: (client(), LOOPBACK), LOOPBACK)
        stack.callback(weights.close)
        yield InOneProcess(writer, published, weights, sender, client)


def test_threads_of_a_generator_take_turns(tmp_path: Path) -> None:
    with in_one_process(tmp_path) as (writer, _, weights, *_), ThreadPoolExecutor(2) as pool:
        for version in range(2):
            publish(writer, version, 5.0 + version)
        for (found, values), version in zip(pool.map(partial(fetched, weights), (0, 1)), (0, 1), strict=True):
            assert (found.way, found.publication.version, values) == ("pair", version, {5.0 + version})


def test_what_a_broken_pair_has_overwritten_is_fetched_anew(tmp_path: Path) -> None:
    """The trainer's successor has emptied the version meanwhile, so the one before it is the newest again."""
    with in_one_process(tmp_path) as (writer, published, weights, *_):
        publish(writer, 0, 5.0)
        into = room()
        before = weights.fetch(0, into).publication
        publish(writer, 1, 6.0)

        def breaks(into: State, state: State) -> None:
            if published.versions()[1] == 1:
                copy_into(into, {"w0": state["w0"]})
                published.stored[1] = 0
                raise PairBroken("the trainer is dead")
            copy_into(into, state)

        found = weights.fetch(1, into, before, breaks)
        assert (found.publication, found.way) == (before, "tcp")
        assert {float(x) for tensor in into.values() for x in tensor.unique()} == {5.0}


def wait_until(happened: Callable[[], bool]) -> None:
    by = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < by
        time.sleep(0.02)


@long(5, "pairs that end unused")
def test_a_pair_that_has_ended_unused_is_made_anew_at_once(tmp_path: Path) -> None:
    with in_one_process(tmp_path, idle_s=2.0) as (writer, _, weights, *_):
        for version in range(2):
            publish(writer, version, 5.0 + version)
            found, values = fetched(weights, version)
            assert (found.way, values) == ("pair", {5.0 + version})
            wait_until(lambda: all(thread.name != "pair" for thread in threading.enumerate()))


def test_a_sender_without_a_port_makes_no_more_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(server: HostServer, seconds: float) -> None:
        if threading.current_thread().name == "pairs":
            raise RuntimeError("the thread that accepts connections has ended")
        serves(server, seconds)

    serves = HostServer.serve

    monkeypatch.setattr(HostServer, "serve", serve)
    with in_one_process(tmp_path):
        wait_until(lambda: not (tmp_path / q.PAIR_FILE).exists())


def test_a_publication_that_is_replaced_as_it_is_sent_is_not_taken(tmp_path: Path) -> None:
    with in_one_process(tmp_path) as (writer, published, weights, sender, client):
        publish(writer, 4, 1.0)
        published.replace = lambda: publish(writer, 4, 2.0)
        found, values = fetched(weights, 4)
        assert (found.way, values) == ("tcp", {2.0})
        publish(writer, 5, 3.0)
        found, values = fetched(weights, 5)
        assert (found.way, values) == ("pair", {3.0}), "nothing was wrong with the pair"
        with closing(client()) as asking:
            for question in (Send(99, 5, 1), Send(-1, 5, 1), Sent(99), q.ReadClocks()):
                with pytest.raises(LookupError):
                    asking.ask(question)
            (content,) = asking.ask(Join())
            assert content, "one that nobody joins ends by itself"
        assert sender.answer(b"damaged")[0]
