"""What one host serves to another, and to whom."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from select import select

import numpy as np
import pytest
from tests.plugins.cluster.served import blank_arena, served
from tests.process.runs import wait_until

from polyrhythm.plugins.cluster.hosts import agent
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, LocalNode
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostSilent, client_of
from polyrhythm.plugins.cluster.hosts.memory import HostMemory, OtherHosts
from polyrhythm.plugins.cluster.hosts.pieces import write_part
from polyrhythm.plugins.cluster.hosts.questions import Known, find_shared, write_identity
from polyrhythm.plugins.cluster.hosts.server import DataServer, HostServer
from polyrhythm.plugins.cluster.sealed import SealedConnection
from polyrhythm.plugins.cluster.sealed_port import SealedPort
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm.specs import ArraySpec, WeightsLayout

LAYOUT = ArenaLayout(
    blocks=2,
    steps=2,
    chunk=1,
    obs={"image": ArraySpec((2, 2), "uint8"), "state": ArraySpec((3,), "float32")},
    answers={},
    slots={"near": 2, "far": 2},
)


def filled() -> Arena:
    arena = in_memory(LAYOUT)
    for name, array in arena.obs.items():
        array[:] = np.arange(array.size).reshape(array.shape) % 100
        assert array.any(), name
    return arena


def test_a_request_of_another_host_comes_with_its_observations(tmp_path: Path) -> None:
    far, here = filled(), in_memory(LAYOUT)
    far.post("far", RequestView(np.array([3, 1]), np.array([7, 8]), np.array([True, False])))
    arena = Arena(LAYOUT, bytearray(LAYOUT.nbytes), OtherHosts(LAYOUT, "a", {"far": "b"}, {"b": served(tmp_path, far)}))
    here.post("near", RequestView(np.array([0]), np.array([1]), np.array([False])))
    arena.fetch_requests([("far", 2), ("near", 1)])
    view = arena.view("far", 2)
    assert view.obs is not None
    assert (view.noise_key.tolist(), view.greedy.tolist()) == ([7, 8], [True, False])
    for name, array in far.obs.items():
        np.testing.assert_array_equal(view.obs[name], array[[3, 1]])
    assert arena.view("near", 1).obs is None
    arena.fetch_requests([("near", 1)])
    assert arena.view("far", 2).obs is None, "what was fetched is for one batch"


@pytest.mark.parametrize(
    ("question", "why"),
    [
        (q.Posted([("nobody", 1)]), "slot nobody has no request of 1 rows"),
        (q.Posted([("far", 3)]), "slot far has no request of 3 rows"),
        (q.SampleEntries(2, 0, 1), "there is no block 2"),
        (q.SampleEntries(-1, 0, 1), "there is no block -1"),
        (q.SampleEntries(0, 0, 1), "block 0 holds no finished sample"),
        (q.SampleEntries(1, 3, 1), "there are no 1 entries from 3 on of a sample of 2 steps"),
        (q.SampleEntries(1, -1, 1), "there are no 1 entries from -1 on"),
        (q.SampleEntries(1, 0, 0), "there are no 0 entries"),
        (q.SampleEntries(1, 0, 2**40), "there are no 1099511627776 entries"),
        (q.Part(0, 1, 0, 2**40), "there are no bytes"),
        (q.Part(0, 1, -1, 8), "there are no bytes"),
    ],
)
def test_a_question_that_cannot_be_answered_gets_the_reason(question: q.Question, why: str, tmp_path: Path) -> None:
    far = filled()
    far.head[1, 0] = 2
    with pytest.raises(LookupError, match=why):
        served(tmp_path, far).ask(question)


def test_mutated_questions_are_answered_and_harm_nothing() -> None:
    rng, arena = random.Random(0), filled()
    before = {name: array.copy() for name, array in arena.obs.items()}
    asked = [q.Posted([("far", 2)]), q.SampleEntries(0, 0, 1), q.Held(), q.Part(0, 1, 0, 8), q.ReadClocks()]
    asked.append(q.Sees([Known("host-1", "run", "token")]))
    server = DataServer(arena, None)
    for _ in range(3000):
        content = bytearray(q.encode(rng.choice(asked)))
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        answer = server.answer(bytes(content[: rng.randint(0, len(content))]))
        assert answer[0] == b"" or len(answer) == 1
    for name, array in arena.obs.items():
        np.testing.assert_array_equal(array, before[name])


def test_who_lacks_the_runs_keys_gets_no_answer(tmp_path: Path) -> None:
    with (
        closing(Sockets("tcp", str(tmp_path), make_keys(), lambda: None, q.LARGEST_QUESTION)) as ours,
        closing(Sockets("tcp", str(tmp_path), make_keys(), lambda: None, q.LARGEST_QUESTION)) as theirs,
        closing(HostServer(ours, DataServer(blank_arena(), None), DropCounter("test"))) as server,
        closing(client_of(theirs, "b", server.endpoint, 0.3)) as client,
    ):
        serving = threading.Thread(target=server.serve, args=(1.0,))
        serving.start()
        with pytest.raises(HostSilent, match=r"host b has not answered for 0.3 s"):
            client.ask(q.Held())
        serving.join()


def test_a_first_answer_has_one_limit_with_the_connection_that_it_needs(tmp_path: Path) -> None:
    """The ticket comes late, and then no answer."""
    keys, over, limit_s = make_keys(), threading.Event(), 2.0

    def admit_late() -> None:
        """Consumes: a wish for a ticket. Waits for: it, and most of the limit. Unblocked by: both. Produces: one."""
        asked = end.receive(10.0)
        assert asked is not None
        time.sleep(0.8 * limit_s)
        end.answer(asked[0], [b"", q.encode(port.admit())])

    def ignore(_: SealedConnection) -> None:
        over.wait(10.0)

    with (
        closing(Sockets("tcp", str(tmp_path), keys, lambda: None, q.LARGEST_QUESTION)) as sockets,
        closing(sockets.answering(q.TICKET_BYTES)) as end,
        closing(SealedPort(LOOPBACK, ignore, q.LARGEST_QUESTION, DropCounter("test"))) as port,
        closing(client_of(sockets, "b", end.endpoint, limit_s)) as client,
    ):
        late = threading.Thread(target=admit_late)
        late.start()
        begin = time.monotonic()
        with pytest.raises(HostSilent, match=r"host b has not answered for 2 s"):
            client.ask(q.Held())
        lasted_s = time.monotonic() - begin
        late.join()
        over.set()
    assert lasted_s < 1.7 * limit_s, "with a limit of its own the answer would end after 1.8 times as long"


def test_a_connection_that_has_ended_meanwhile_is_replaced_and_a_refusal_ends_none(tmp_path: Path) -> None:
    client = served(tmp_path, filled())
    opened, connect = [], client.connect

    def opening(seconds: float) -> SealedConnection:
        opened.append(connect(seconds))
        return opened[-1]

    client.connect = opening
    assert client.ask(q.ReadClocks())
    with pytest.raises(LookupError, match="there is no block 9"):
        client.ask(q.SampleEntries(9, 0, 1))
    assert client.ask(q.ReadClocks())
    (first,) = opened
    assert isinstance(first, SealedConnection)
    first.end()
    assert client.ask(q.ReadClocks())
    assert len(opened) == 2


def test_requests_of_thousands_of_slots_come_in_several_answers(tmp_path: Path) -> None:
    slots = [f"s{number}" for number in range(3000)]
    layout = ArenaLayout(1, 1, 1, {"x": ArraySpec((1,), "float32")}, {}, dict.fromkeys(slots, 1))
    far = in_memory(layout)
    far.obs["x"][1] = 5.0
    for number, slot in enumerate(slots):
        far.post(slot, RequestView(np.array([1]), np.array([number]), np.array([False])))
    others = OtherHosts(layout, "a", dict.fromkeys(slots, "b"), {"b": served(tmp_path, far)})
    found = others.requests([(slot, 1) for slot in slots])
    assert [int(view.noise_key[0]) for view in found.values()] == list(range(3000))
    assert all(view.obs is not None and view.obs["x"][0, 0] == 5.0 for view in found.values())


def test_a_second_piece_of_a_question_is_refused_before_it_comes(tmp_path: Path) -> None:
    client = served(tmp_path, filled())
    with closing(client.connect(5.0)) as connection:
        assert isinstance(connection, SealedConnection)
        connection._out.add(memoryview(np.array([5, q.LARGEST_QUESTION])).cast("B"))
        connection._out.add(memoryview(b"first"))
        connection._out.flush()
        with pytest.raises(ConnectionResetError):
            connection.receive(5)


def test_answers_that_were_on_their_way_are_not_taken_for_later_ones() -> None:
    link = SlowLink(filled(), 1e6)
    client = DataClient("b", lambda _: link)
    with pytest.raises(LookupError, match="there is no block 9"):
        list(client.ask_all([q.SampleEntries(9, 0, 1), q.ReadClocks(), q.ReadClocks()], ahead=3))
    (answer,) = client.ask(q.Held())
    assert bytes(answer) == q.encode({})


def test_a_cleaner_keeps_nobody_waiting_who_reads_what_its_process_prints(tmp_path: Path) -> None:
    """Such as `tee`: who starts one may have ended long before it."""
    folder = tmp_path / "memory"
    folder.mkdir()
    start = "import sys, time; from pathlib import Path\n"
    start += "from polyrhythm.plugins.cluster.hosts.memory import start_cleaner\n"
    start += "print(start_cleaner(Path(sys.argv[1])).pid, flush=True); time.sleep(3600)"
    words = [sys.executable, "-c", start, str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        cleaner = int(process.stdout.readline())
        os.kill(cleaner, signal.SIGSTOP)
        process.kill()
        try:
            assert select([process.stdout], [], [], 10.0)[0], "the end of the output"
            assert process.stdout.read() == ""
            assert folder.exists()
        finally:
            os.kill(cleaner, signal.SIGCONT)
    wait_until(lambda: not folder.exists())


def test_an_agent_that_cannot_begin_leaves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(f"no process for {folder}")

    monkeypatch.setenv("POLYRHYTHM_SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(agent, "start_cleaner", fail)
    agent.serve(AgentSpec("host-1", (), "", LAYOUT, WeightsLayout.of({}), ("main",), LOOPBACK, make_keys()))
    assert b"no process for" in capsysbinary.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_agent_ends_at_once_and_its_connections_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYRHYTHM_SHARED_MEMORY", str(tmp_path))
    keys = make_keys()
    with (
        closing(LocalNode("there", prefix=["/bin/sh", "-c", 'ulimit -Sn 32; exec "$@"', "sh"])) as node,
        closing(Sockets("tcp", str(tmp_path), keys, lambda: None, q.LARGEST_QUESTION)) as sockets,
        ExitStack() as others,
    ):
        spec = AgentSpec("host-1", (), "", LAYOUT, WeightsLayout.of({}), ("main",), LOOPBACK, keys)
        found = node.start_agent(spec)()
        with closing(client_of(sockets, "host-1", found.endpoint, 2.0)) as client:
            assert client.ask(q.ReadClocks())
            for _ in range(12):
                other = others.enter_context(closing(client_of(sockets, "host-1", found.endpoint)))
                assert other.ask(q.ReadClocks()), "there may be more of them than files by default"
            begin = time.monotonic()
            node.close()
            assert time.monotonic() - begin < 3
            assert not list(tmp_path.iterdir()), "nothing of the run's memory is left there"
            with pytest.raises(HostSilent):
                client.ask(q.ReadClocks())


def test_a_process_waits_for_another_host_as_long_as_it_was_told(tmp_path: Path) -> None:
    with closing(Sockets("tcp", str(tmp_path), make_keys(), lambda: None, q.LARGEST_QUESTION)) as sockets:
        end = sockets.answering(q.LARGEST_QUESTION)  # nobody answers there
        view = HostView("here", str(tmp_path), LOOPBACK, {"far": end.endpoint}, answer_s=0.2)
        memory = HostMemory(LAYOUT, WeightsLayout.of({}), tmp_path, view, sockets)
        memory.add_host("new", end.endpoint)
        for client in memory.clients.values():
            with pytest.raises(HostSilent, match=r"has not answered for 0.2 s"):
                client.ask(q.Held())
        memory.close()
        end.close()


@pytest.mark.parametrize(
    "damage",
    [lambda p: p[:-1], lambda p: [p[0][:-8], *p[1:]], lambda p: [p[0], p[1][:-1], *p[2:]]],
    ids=["piece missing", "head too short", "answers too short"],
)
def test_a_damaged_sample_is_refused_and_changes_nothing(damage: object) -> None:
    arena = in_memory(LAYOUT)
    pieces = [np.array([1, 0, 0, 1, 5, 0, 0]).tobytes(), bytes(8), bytes(4), bytes(1), bytes([9] * 8), bytes([9] * 24)]
    with pytest.raises(ValueError, match=r"."):
        write_part(arena, 1, 0, damage(pieces))  # type: ignore[operator]
    assert not any(array.any() for array in (arena.head, *arena.obs.values()))
    arena.head[1] = write_part(arena, 1, 0, pieces)
    assert arena.holds("1", 5)


def test_memory_is_shared_if_it_can_be_opened_and_has_the_token(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    tokens = [write_identity(folder) for folder in folders]
    known = [Known("gone", "none", "x"), Known("wrong", "one", tokens[1]), Known("right", "two", tokens[1])]
    assert find_shared(known, tmp_path) == (known[2], folders[1])
    assert find_shared(known[:2], tmp_path) is None
    assert find_shared(known, tmp_path / "elsewhere") is None


def test_a_slot_that_moved_is_asked_for_where_it_is_now(tmp_path: Path) -> None:
    others = OtherHosts(LAYOUT, "a", {"far": "b"}, {"b": served(tmp_path, filled())})
    others.move_slots("a", ["far"])
    assert others.requests([("far", 1)]) == {}
    others.move_slots("b", ["far"])
    assert others.requests([("far", 1)]).keys() == {"far"}
    with pytest.raises(UnfitMessage, match="there is no host c"):
        others.move_slots("c", ["far"])


class SlowLink:
    """A connection to a server, on a clock of its own: `rate` bytes arrive in a second, in order. on_answer: called
    with every answer that arrives."""

    is_usable = True

    def __init__(self, arena: Arena, rate: float) -> None:
        self.now, self._free, self._rate = 0.0, 0.0, rate
        self._coming = list[tuple[float, list[memoryview]]]()
        self._server = DataServer(arena, None)
        self.on_answer: Callable[[], object] = lambda: None

    def send(self, pieces: Sequence[bytes], seconds: float) -> None:
        (question,) = pieces
        found = self._server.answer(question)
        answer = [memoryview(piece if isinstance(piece, bytes) else np.asarray(piece).tobytes()) for piece in found]
        self._free = max(self.now, self._free) + sum(piece.nbytes for piece in answer) / self._rate
        self._coming.append((self._free, answer))

    def receive(self, seconds: float, place: object = None) -> list[memoryview]:
        at, pieces = self._coming[0]
        if at > self.now + seconds:
            self.now += seconds
            raise TimeoutError
        self.now = max(self.now, at)
        del self._coming[0]
        self.on_answer()
        return pieces

    def close(self) -> None:
        self._coming.clear()


LARGE = ArenaLayout(blocks=2, steps=9, chunk=1, obs={"image": ArraySpec((2**20,), "uint8")}, answers={}, slots={"s": 1})


def test_a_sample_comes_in_parts_each_with_the_limit_of_an_answer() -> None:
    """20 MB at 1 MB/s, where an answer may take 5 s."""
    far = in_memory(LARGE)
    for block, steps in enumerate((9, 8)):
        places = LARGE.block(block, steps)
        far.rewards[places, 0] = np.arange(steps) + block
        for entry in range(steps + 1):
            far.obs["image"][block + entry * LARGE.blocks] = 10 * block + entry
        far.finish(block, steps=steps, terminated=1, success=0, env_steps=steps, ticket=5 + block, group=0, task=0)
    link = SlowLink(far, 1e6)
    arena = Arena(LARGE, bytearray(LARGE.nbytes), OtherHosts(LARGE, "a", {}, {"b": DataClient("b", lambda _: link)}))
    assert not arena.has("b/0", 5)
    arena.fetch(["b/0", "b/1"])
    nbytes = (10 + 9) * 2**20
    assert nbytes / 1e6 < link.now < 1.01 * nbytes / 1e6, "the link had always something to carry"
    for block, steps in enumerate((9, 8)):
        assert arena.has(f"b/{block}", 5 + block)
        part, shown = LARGE.block(block, steps), LARGE.block(block, steps + 1)
        np.testing.assert_array_equal(arena.obs["image"][shown], far.obs["image"][shown])
        np.testing.assert_array_equal(arena.rewards[part], far.rewards[part])
    np.testing.assert_array_equal(arena.head, far.head)


def test_a_sample_that_is_replaced_while_it_is_fetched_is_not_here() -> None:
    far = in_memory(LARGE)
    head = {"steps": 9, "terminated": 1, "success": 0, "env_steps": 9, "group": 0, "task": 0}
    far.finish(0, **head, ticket=5)
    link = SlowLink(far, 1e6)
    link.on_answer = lambda: far.finish(0, **head, ticket=6)
    arena = Arena(LARGE, bytearray(LARGE.nbytes), OtherHosts(LARGE, "a", {}, {"b": DataClient("b", lambda _: link)}))
    with pytest.raises(LookupError, match="the sample in block 0 of host b was replaced while it was fetched"):
        arena.fetch(["b/0"])
    assert not arena.has("b/0", 5)
    assert not arena.head.any()


def test_a_connection_that_brings_no_first_question_is_ended(tmp_path: Path) -> None:
    client = served(tmp_path, blank_arena(), first_s=0.2)
    silent = client.connect(5.0)
    assert isinstance(silent, SealedConnection)
    wait_until(lambda: not silent.is_usable)
    assert list(client.ask(q.Held())), "others are answered"
