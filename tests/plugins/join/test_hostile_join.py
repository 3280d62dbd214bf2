"""Mutated frames against both ends of a join, and mutated questions and answers between hosts: dropped, refused or
answered; never an error of another kind, a hang, or memory that grows."""

from __future__ import annotations

import dataclasses
import logging
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.long import long
from tests.plugins.join.test_reception import HELLO, SPEC, Door, beat
from tests.runtime.links import free_port
from tests.runtime.mutations import mutated_frames, mutations
from tests.stations.counting import ticket

from polyrhythm.config.load import load_env
from polyrhythm.errors import PolyrhythmError, StartError
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.pieces import (
    pieces_of_request,
    pieces_of_rest,
    pieces_of_sample,
    request_of,
    write_part,
    write_rest,
)
from polyrhythm.plugins.cluster.hosts.server import DataServer
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.joined import JoinedSimulator, JoinedSimulatorFactory
from polyrhythm.plugins.join.joiner import FrameCame, HandOver, Joiner
from polyrhythm.plugins.join.joining import JoinedStation
from polyrhythm.runtime.memory.arena import ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.messages import Departed, Reply
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records as r
from polyrhythm.specs import ArraySpec, Task
from polyrhythm.specs.hashing import mix_array
from polyrhythm.stations.simulator.slot import StepSettings

#: Frames of a default run, and of a long one.
COUNTS = [1_000, pytest.param(100_000, marks=long(70, "100,000 mutated frames"))]
#: Bytes by which a long run may grow: what is counted and logged once.
GROWTH = 2 * 2**20

INFO = r.EnvBatchInfo("s.0", (r.SlotInfo("s.0/0", 0, 2),))
LAYOUT = ArenaLayout(
    blocks=4,
    steps=3,
    chunk=1,
    obs={"state": ArraySpec((4,), "float32")},
    answers={
        "actions": ArraySpec((1, 1), "int64"),
        "logprob": ArraySpec((1, 1), "float32"),
        "value": ArraySpec((), "float32"),
    },
    slots={"s.0/0": 2},
)
START = r.StartRows("s", "s.0/0", (r.Grant(0, ticket(0, 3), block=2), r.Grant(1, ticket(1, 3), block=3)))
REPLY = Reply("s.0.0", "s.0/0", 0, np.zeros(2, LAYOUT.answer_dtype))
POSTED = r.RequestArrived("s", 0, "s.0/0", 0, 2, 0, "s.0.0")
FINISHED = r.SampleFinished("s", 0, 0, 1, "2", r.SampleEnd.TERMINATED, 1, 1, 0, 0, True, 1.0, ())
FAILED = r.SampleFailed("s", 0, 1, 1, r.DropReason.CANCELLED, "", "")


@contextmanager
def steady() -> Iterator[None]:
    """What is allocated in the test does not stay. Nothing is logged: pytest would keep it."""
    logging.disable(logging.CRITICAL)
    tracemalloc.start()
    yield
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    logging.disable(logging.NOTSET)
    assert grown < GROWTH


def finished_arena() -> Any:
    """An arena whose slot has posted the first request of `START`, with a finished sample in block 2."""
    arena = in_memory(LAYOUT)
    noise = np.array([grant.ticket.noise for grant in START.grants])
    arena.post("s.0/0", RequestView(np.array([2, 3]), mix_array(noise, 0), np.zeros(2, bool)))
    arena.finish(2, steps=1, terminated=1, success=1, env_steps=1, ticket=0, group=0, task=0)
    return arena


def bytes_of(pieces: Any) -> list[bytes]:
    return [np.ascontiguousarray(piece).tobytes() for piece in pieces]


def said(number: int, event: Any) -> bytes:
    arena = finished_arena()
    pieces: list[bytes] = []
    if isinstance(event, r.RequestArrived):
        pieces = [np.array([2, 3]).tobytes(), *bytes_of(pieces_of_request(arena, "s.0/0", 2))]
    elif isinstance(event, r.SampleFinished):
        arena.rewards[2], arena.valid[2] = 1.0, True
        pieces = bytes_of(pieces_of_rest(arena, 2))
    return m.pack(m.SimulatorMessage("0", number, 0, wire.encode(event)), pieces)


# ---------------------------------------------------------------- the run's end


@pytest.mark.parametrize("count", COUNTS)
def test_whatever_comes_to_a_port_is_dropped_or_ends_one_session(count: int) -> None:
    frames = [m.pack(message) for message in (HELLO, msgspec.structs.replace(HELLO, session="0"), m.Leave("0", "x"))]
    frames += [m.pack(beat("0")), m.pack(beat("0", ready=False)), m.pack(m.SimulatorMessage("0", 1, 0, b"e"), [b"abc"])]
    door, departed, kinds = Door(name_session=lambda: "0"), 0, Counter[str]()
    door.join()
    with steady():
        for number, frame in enumerate(mutated_frames(frames, count, 1)):
            door.now += 0.01
            try:
                door.reception.receive(b"ab"[number % 2 :][:1], frame, door.now)
                door.reception.check(door.now)
            except Departed:
                departed += 1
            assert len(door.reception.out) <= 3
            door.reception.out.clear()
            if not door.reception.present:
                kinds.update(door.drops.counts())
                door = Door(name_session=lambda: "0")
                door.join()
    assert departed > count / 100
    assert kinds.keys() >= {"undecodable", "refused", "unknown_station", "impossible"}


@pytest.mark.parametrize("count", COUNTS)
def test_what_a_simulator_says_changes_only_its_own_blocks_or_sends_it_away(count: int) -> None:
    """Its messages decode, and what lies in them is mutated: numbers, names, arrays."""
    plan = JoinedSimulatorFactory(
        "s", SPEC, INFO, StepSettings(1), "127.0.0.1", free_port(), make_keys(), "1.2", 20, 60
    )
    arena, said_events = in_memory(LAYOUT), 0
    arena.obs["state"][:] = 7.0
    contents = list(map(wire.encode, (POSTED, FINISHED, FAILED)))
    pieces = {0: said(1, POSTED), 1: said(1, FINISHED), 2: said(1, FAILED)}
    own = {number: m.unpack(frame, "simulator")[1] for number, frame in pieces.items()}
    names = {"simulator": ["s"], "slot": ["s.0/0"], "ticket": [0, 1], "payload_id": ["2", "3"], "rows": [1, 2, 3]}
    with steady():
        for number, content in enumerate(mutations(contents, count, 2, names)):
            link = Link()
            emitted: list[Any] = []
            station = JoinedSimulator(plan, 0, "s.0.0", arena, emitted.append, sockets=lambda *_, link=link, **__: link)
            session = join(station, link)
            given = [bytes(piece) for piece in own[number % 3]]
            if number % 2:
                given = spoiled(given, number)
            before = number % 3 == 1
            if before:  # the sample ends after a step
                link.came(m.pack(m.SimulatorMessage(session, 1, 0, wire.encode(POSTED)), list(map(bytes, own[0]))))
                station.work()
                station.deliver(REPLY)
            link.came(m.pack(m.SimulatorMessage(session, 1 + before, 0, content), given))
            with suppress(Departed):
                station.work()
            said_events += len(emitted) - before
            station.close()
    assert (arena.obs["state"].reshape(4, 4, 4)[:, :2] == 7.0).all(), "blocks 0 and 1 are others'"
    assert 0 < said_events < count


class Link:
    """Sockets without a network, and the one end that they open."""

    socket = None

    def __init__(self) -> None:
        self.arrived: deque[bytes] = deque()
        self.answered: list[bytes] = []

    def answering(self, largest: int, port: int) -> Link:
        return self

    def came(self, frame: bytes) -> None:
        self.arrived.append(frame)

    def receive(self, seconds: float) -> tuple[bytes, list[bytes]] | None:
        return (b"a", [self.arrived.popleft()]) if self.arrived else None

    def answer(self, who: bytes, parts: list[bytes]) -> None:
        self.answered += parts

    def close(self, linger_s: float = 0.0, *, unsent: bool = False) -> None: ...


def join(station: JoinedSimulator, link: Link) -> str:
    """A simulator joins, and has two rows to step; the session's name."""
    link.came(m.pack(HELLO))
    station.attend(0.0)
    welcome: Any = m.unpack(link.answered.pop(), "run")[0]
    link.came(m.pack(beat(welcome.session)))
    assert station.attend(0.0)
    station.handle(START)
    return str(welcome.session)


def spoiled(pieces: list[bytes], seed: int) -> list[bytes]:
    """One of the pieces is shorter, longer, gone, or full of large numbers."""
    if not pieces:
        return [b"x"]
    at = seed // 2 % len(pieces)
    ways: list[Callable[[bytes], bytes]] = [lambda b: b[:-1], lambda b: b + b"\0" * 8, lambda b: b"\xff" * len(b)]
    found = [*pieces]
    if seed % 8 == 7:
        del found[at]
    else:
        found[at] = ways[seed // 2 % 3](found[at])
    return found


# ---------------------------------------------------------------- the simulator's end


@pytest.mark.parametrize("count", COUNTS)
def test_whatever_a_run_sends_is_dropped_or_ends_the_join_with_a_sentence(count: int) -> None:
    welcome = m.Welcome("0", "s", 0, "s.0.0", INFO, StepSettings(1), LAYOUT, 20.0)
    frames = [m.pack(message) for message in (m.Resumed("0", 0), m.Alive("0", 0), m.Over("0", "x", True))]
    frames += [m.pack(m.JoinRefused(kind, "x", (7711,))) for kind in ("taken", "session", "spec")]  # type: ignore[arg-type]
    frames += [
        m.pack(m.RunMessage("0", 1, 0), [wire.encode(START)]),
        m.pack(m.RunMessage("0", 1, 0), [wire.encode_reply(REPLY)]),
    ]
    frames += [m.pack(welcome)]
    env: Any = None  # frames are tried, not an environment
    ended = 0
    with steady():
        dropped = Counter[str]()
        for number, frame in enumerate(mutated_frames(frames, count, 3)):
            joiner = Joiner("tcp://127.0.0.1:9", SPEC, "an environment", "1.2", 0.0)
            station = JoinedStation(welcome, lambda _: env, lambda: None, joiner.drops)
            if number % 3:
                joiner.handle(FrameCame(memoryview(m.pack(welcome))), 0.0)
            try:
                for action in joiner.handle(FrameCame(memoryview(frame)), 1.0):
                    if isinstance(action, HandOver):
                        station.take(action)
            except PolyrhythmError:
                ended += 1
            dropped.update(joiner.drops.counts())
    assert ended > 0
    assert dropped["undecodable"] > count / 10


def test_a_spec_that_no_run_would_hear_is_refused_at_once() -> None:
    env = load_env("gymnasium:CartPole-v1")
    spec = dataclasses.replace(env.spec(), tasks=tuple(Task(f"task {i}", "go") for i in range(20_000)))
    with pytest.raises(StartError, match=r"its spec takes [\d,]+ bytes, a run hears at most 61,440"):
        Joiner("tcp://127.0.0.1:9", spec, "large", "1.2", 0.0)


# ---------------------------------------------------------------- hosts


@pytest.mark.parametrize("count", COUNTS)
def test_every_question_of_another_host_is_answered_or_refused(count: int) -> None:
    asked: tuple[q.Question, ...] = (q.Posted([("s.0/0", 2)]), q.SampleEntries(2, 0, 2), q.Held(), q.Part(1, 1, 0, 100))
    server = DataServer(finished_arena(), None)
    contents, refused = [b"\0" + q.encode(question) for question in asked], 0
    with steady():
        for content in mutations(contents, count, 4, {}):
            first, *pieces = server.answer(content[1:])
            refused += bool(first)
            assert isinstance(first, bytes)
            assert sum(np.asarray(piece).nbytes for piece in pieces) < 2 * LAYOUT.nbytes
    assert count / 4 < refused < count


@pytest.mark.parametrize("count", COUNTS)
def test_arrays_that_do_not_fit_are_not_written(count: int) -> None:
    arena = finished_arena()
    request, sample, rest = (
        bytes_of(pieces)
        for pieces in (
            pieces_of_request(arena, "s.0/0", 2),
            pieces_of_sample(arena, 2, 0, 2),
            [*pieces_of_rest(arena, 2)],
        )
    )
    into, refused = in_memory(LAYOUT), 0
    for number in range(count):
        for take, pieces in (
            (lambda given: request_of(LAYOUT, 2, given), request),
            (lambda given: write_part(into, 2, 0, given), sample),
            (lambda given: write_rest(into, 2, 1, given), rest),
        ):
            try:
                take(spoiled(pieces, 2 * number + 1))
            except (ValueError, LookupError):
                refused += 1
    assert refused > count
    for array in into.obs.values():
        assert not array.reshape(4, 4, -1)[:, [0, 1, 3]].any(), "only block 2 was written"


def test_a_token_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    from polyrhythm.errors import StartError
    from polyrhythm.plugins.join.messages import read_token

    path = tmp_path / "token"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)
    path.chmod(0o600)
    with pytest.raises(StartError, match="not a token of a run"):
        read_token(path)


def test_a_request_for_too_many_rows_is_unfit() -> None:
    with pytest.raises(UnfitMessage):
        m.unpack(b"\xff\xff\xff\x7f" + bytes(60), "simulator")
