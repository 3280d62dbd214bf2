"""Who may join, and how a session outlasts its connection: decided without a socket, on a virtual clock."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long import tries

from polyrhythm.errors import StartError
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.messages import read_token, write_token
from polyrhythm.plugins.join.reception import Reception, Terms, difference, refusal
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import Departed
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.scheduler import records
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.stations.simulator.slot import StepSettings

SPEC = EnvSpec({"state": ArraySpec((4,), "float32")}, ActionSpec("discrete", 1, choices=2), (Task("a", "do"),), 40)
INFO = records.EnvBatchInfo("s.0", (records.SlotInfo("s.0/0", 0, 2),))
LAYOUT = ArenaLayout(4, 10, 1, {"state": ArraySpec((4,), "float32")}, {}, {"s.0/0": 2})
HELLO = m.JoinHello("1.2", m.protocol_digest(), msgspec.msgpack.encode(SPEC))
A, B = b"a", b"b"


def beat(session: str, *, ready: bool = True, received: int = 0, doing: str = "", for_s: float = 0.0) -> m.Beat:
    return m.Beat(session, received, ready, doing, for_s, 0, {})


class Door:
    """A reception, what it has answered, and the time."""

    def __init__(self, **limits: Any) -> None:
        self.drops, self.now, names = DropCounter("test"), 100.0, iter("0123456789")
        self.reception = Reception(
            Terms("1.2", SPEC),
            lambda name: m.Welcome(name, "s", 3, "s.3.0", INFO, StepSettings(1), LAYOUT, 20.0),
            self.drops,
            **{"reconnect_s": 20.0, "start_s": 60.0, "ports": (7711,), "name_session": lambda: next(names), **limits},
        )

    def hear(self, who: bytes, message: m.FromSimulator) -> list[Any]:
        """What is answered to it, with to whom."""
        self.heard = self.reception.receive(who, m.pack(message), self.now)
        return self.out()

    def out(self) -> list[Any]:
        found = [(who, m.unpack(frame, "run")[0]) for who, frame in self.reception.out]
        self.reception.out.clear()
        return found

    def join(self, who: bytes = A) -> str:
        """Somebody joins and is ready; the session's name."""
        ((to, welcome),) = self.hear(who, HELLO)
        assert to == who
        self.hear(who, beat(welcome.session))
        assert self.reception.present
        return str(welcome.session)


# ---------------------------------------------------------------- the token


def test_a_token_opens_join_ports_and_no_more_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    keys, path = make_keys(), tmp_path / "token"
    path.write_text("an earlier one")
    path.chmod(0o644)
    write_token(path, keys)
    assert path.stat().st_mode & 0o777 == 0o600
    found = read_token(path)
    assert (found.inbox.public, found.inbox.secret, found.outbox) == (keys.inbox.public, b"", keys.outbox)
    assert keys.inbox.secret not in path.read_bytes()
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (None, 0o600, "No such file or directory; copy the file that the run names"),
        (b"x", 0o644, "others can read it (mode 644); run: chmod 600"),
        (b"", 0o600, "not a token of a run"),
        (b"polyrhythm-join-1 a b c", 0o600, "not a token of a run"),
        (b"polyrhythm-join-2 " + b" ".join([b"k" * 40] * 3), 0o600, "not a token of a run"),
        (b"\xff" * 9999, 0o600, "not a token of a run"),
    ],
)
def test_what_is_no_token_is_refused_in_one_sentence(
    content: bytes | None, mode: int, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(StartError) as raised:
        read_token(path)
    assert str(raised.value).startswith(f"--token-file = {path}: ")
    assert says in str(raised.value)


# ---------------------------------------------------------------- terms


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"polyrhythm": "1.3"}, "version", "polyrhythm 1.3 wants to join, the run has 1.2; install polyrhythm==1.2"),
        ({"messages": "0" * 16}, "messages", "its messages (0000000000000000) are not those of the run"),
        ({"spec": b"\xc1"}, "spec", "its environment's spec cannot be read"),
        ({"spec": msgspec.msgpack.encode({"observation": {}})}, "spec", "its environment's spec cannot be read"),
        (
            {"spec": msgspec.msgpack.encode(replace(SPEC, max_steps=50))},
            "spec",
            "its environment is another: max_steps is 50, the run has 40; name the run's with --env",
        ),
    ],
)
def test_another_program_or_environment_is_refused_before_anything_starts(
    change: dict[str, Any], kind: str, says: str
) -> None:
    door = Door()
    ((_, refused),) = door.hear(A, msgspec.structs.replace(HELLO, **change))
    assert (refused.kind, door.drops.counts()) == (kind, {"refused": 1})
    assert says in refused.reason
    assert door.join(B), "the place is still open"


def test_the_terms_are_met() -> None:
    assert refusal(HELLO, Terms("1.2", SPEC)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"observation": {}}, "observation state is missing"),
        ({"observation": {**SPEC.observation, "b": ArraySpec((1,), "bool")}}, "observation b is new"),
        ({"observation": {"state": ArraySpec((5,), "float32")}}, "observation state is ArraySpec(shape=(5,)"),
        ({"action": ActionSpec("discrete", 1, choices=3)}, "action is ActionSpec("),
        ({"tasks": (Task("a", "do it"),)}, "tasks is (Task(name='a', instruction='do it'"),
        ({"reset_rows": False}, "reset_rows is False, the run has True"),
    ],
)
def test_the_first_difference_between_specs_is_named(change: dict[str, Any], says: str) -> None:
    assert says in difference(replace(SPEC, **change), SPEC)


def test_the_digest_of_messages_knows_every_type_and_field() -> None:
    """It is the same in another process, and other for other fields (msgspec's schema has them all)."""
    assert len(m.protocol_digest()) == 16
    _, components = msgspec.json.schema_components((*wire.TYPES, m.JoinHello, m.SimulatorMessage))
    assert {"Ticket", "Grant", "StartRows", "SlotInfo", "SimulatorMessage"} <= components.keys()
    assert components["SimulatorMessage"]["properties"].keys() == {"type", *m.SimulatorMessage.__struct_fields__}


# ---------------------------------------------------------------- who is let in


def test_one_is_let_in_and_the_next_is_told_of_other_places() -> None:
    door = Door()
    door.join()
    ((to, refused),) = door.hear(B, HELLO)
    assert (to, refused.kind, refused.ports) == (B, "taken", (7711,))
    assert refused.reason == "a simulator has joined here already; other places of this run are at ports 7711"
    assert door.reception.refused == 1
    assert not door.drops.counts(), "it goes on to the other place: nothing is wrong"


def test_a_simulator_that_goes_while_it_builds_leaves_the_place_open() -> None:
    for go in ("leave", "silence", "slow"):
        door = Door()
        ((_, welcome),) = door.hear(A, HELLO)
        if go == "leave":
            door.hear(A, m.Leave(welcome.session, "no display"))
        elif go == "silence":
            door.now += 20
            door.reception.check(door.now)
        else:
            for _ in range(60):
                door.now += 1
                door.hear(A, beat(welcome.session, ready=False))
            door.reception.check(door.now)
            ((_, over),) = [said for said in door.out() if isinstance(said[1], m.Over)]
            assert "was not built within 60 s (supervision.start_s)" in over.reason
        assert not door.reception.present
        assert door.join(B)


def test_silence_loses_it_with_blame_and_leaving_without() -> None:
    door = Door()
    door.join()
    door.now += 19.9
    door.reception.check(door.now)
    door.now += 0.2
    with pytest.raises(Departed, match=r"was not heard for 20 s \(join.reconnect_s\)") as raised:
        door.reception.check(door.now)
    assert raised.value.blame
    door = Door()
    session = door.join()
    with pytest.raises(Departed, match="left: parked") as raised:
        door.hear(A, m.Leave(session, "parked"))
    assert not raised.value.blame


def test_a_broken_connection_comes_back_and_nothing_is_lost_or_taken_twice() -> None:
    door = Door()
    session = door.join()
    door.hear(A, m.SimulatorMessage(session, 1, 0, b"one"))
    assert door.heard is not None
    assert door.heard.event == b"one"
    for content in (b"x", b"y", b"z"):
        door.reception.send(content)
    assert len(door.out()) == 3
    door.now += 15  # longer than beats are missed, shorter than it is lost
    resumed, *again = door.hear(B, msgspec.structs.replace(HELLO, session=session, received=1))
    assert resumed == (B, m.Resumed(session, 1))
    assert [(to, told.number) for to, told in again] == [(B, 2), (B, 3)]
    door.hear(B, m.SimulatorMessage(session, 1, 1, b"one"))
    assert door.heard is None, "it was taken before"
    door.hear(B, m.SimulatorMessage(session, 2, 3, b"two"))
    assert door.heard is not None
    assert door.heard.event == b"two"
    door.hear(A, m.SimulatorMessage(session, 3, 3, b"three"))
    assert door.heard is None, "the connection was replaced"
    assert door.drops.counts() == {"earlier_incarnation": 1}
    assert door.reception.reconnects == 1


def test_who_claims_a_session_that_is_not_his_is_refused_and_counted() -> None:
    """A replayed or invented session takes nothing over."""
    door = Door()
    session = door.join()
    ((_, refused),) = door.hear(B, msgspec.structs.replace(HELLO, session="guess"))
    assert refused.kind == "session"
    assert door.hear(B, m.SimulatorMessage("guess", 1, 0, b"")) == []
    assert door.hear(B, m.SimulatorMessage(session, 1, 0, b"")) == [], "the right name by another connection"
    assert door.hear(B, msgspec.structs.replace(HELLO, session=session, received=7)) == []
    assert door.drops.counts() == {"refused": 1, "unknown_station": 1, "earlier_incarnation": 1, "impossible": 1}
    door.hear(A, m.SimulatorMessage(session, 1, 0, b"still here"))
    assert door.heard is not None


@pytest.mark.parametrize(
    "message",
    [
        m.SimulatorMessage("0", 2, 0, b"one is missing"),
        m.SimulatorMessage("0", 1, 9, b"nine were never told"),
        beat("0", ready=False),
        beat("0", for_s=1e9),
        beat("0", for_s=float("nan")),
        beat("0", doing="update"),
    ],
)
def test_who_says_what_cannot_be_is_sent_away(message: Any) -> None:
    door = Door()
    door.join()
    with pytest.raises(Departed, match="was sent away") as raised:
        door.hear(A, message)
    assert raised.value.blame
    assert isinstance(door.out()[-1][1], m.Over)


def test_statistics_have_known_names_and_finite_values_others_are_refused_and_counted() -> None:
    door = Door()
    name, kept = door.join(), {"env_steps": 7.0, "busy_s": 2.5}
    door.hear(A, msgspec.structs.replace(beat(name), statistics=kept))
    assert door.drops.counts() == {}
    wrong = {"weights/tcp/bytes": 1e9, "dropped/stranger": 5.0, "env_s": float("nan"), "chunk_steps": 1e300}
    door.hear(A, msgspec.structs.replace(beat(name), statistics={**kept, **wrong, "resets_ready": -1.0}))
    assert door.reception.present, "it is not sent away"
    assert door.reception.beat is not None
    assert door.reception.beat.statistics == kept
    assert door.drops.counts() == {"impossible": 1}


def test_signs_of_life_go_out_twice_a_second_while_the_connection_is_heard() -> None:
    door = Door()
    door.join()
    door.out()
    sent = 0
    for _ in range(100):
        door.now += 0.1
        door.reception.check(door.now)
        sent += len(door.out())
    assert 5 <= sent <= 7, "for three of ten seconds"


def test_the_call_under_way_is_that_of_the_environment() -> None:
    door = Door()
    session = door.join()
    door.now += 5
    door.hear(A, beat(session, doing="reset", for_s=4.0))
    assert door.reception.current_call(door.now) == ("reset", 101.0)
    door.now += 10
    assert door.reception.current_call(door.now) == ("reconnect", 105.0)


# ---------------------------------------------------------------- numbers


@given(st.lists(st.sampled_from(["say", "arrive", "break", "know"]), max_size=60))
@settings(max_examples=tries(67, 200), deadline=None)
def test_every_message_arrives_once_and_in_order_over_any_breaks(events: list[str]) -> None:
    ours, theirs, said, arrived = m.Numbering(), m.Numbering(), 0, list[int]()
    line: deque[tuple[int, bytes]] = deque()

    def arrive() -> None:
        number, content = line.popleft()
        if theirs.take(number):
            arrived.append(int(content))

    def resume() -> None:
        line.clear()
        ours.acknowledge(theirs.received)
        line.extend((int(content), content) for content in ours.kept())

    for event in events:
        if event == "say":
            said += 1
            content = str(ours.next()).encode()
            ours.keep(content)
            line.append((said, content))
        elif event == "arrive" and line:
            arrive()
        elif event == "break":
            resume()
        elif event == "know":
            ours.acknowledge(theirs.received)
            assert len(ours) == said - theirs.received
    resume()
    while line:
        arrive()
    assert arrived == list(range(1, said + 1))


def test_a_gap_and_an_acknowledgement_of_the_future_are_unfit() -> None:
    numbering = m.Numbering()
    with pytest.raises(UnfitMessage):
        numbering.take(2)
    with pytest.raises(UnfitMessage):
        numbering.acknowledge(1)


# ---------------------------------------------------------------- frames


def test_a_frame_carries_its_pieces() -> None:
    frame = m.pack(m.SimulatorMessage("s", 1, 0, b"e"), [b"abc", b"", bytes(1000)])
    message, pieces = m.unpack(frame, "simulator")
    assert message == m.SimulatorMessage("s", 1, 0, b"e")
    assert [bytes(piece) for piece in pieces] == [b"abc", b"", bytes(1000)]
    assert len(frame) % 64 == 0


@pytest.mark.parametrize(
    "spoil", [lambda f: f[:-1], lambda f: f + bytes(64), lambda f: f[:3], lambda f: b"\xff" * 4 + f]
)
def test_a_damaged_frame_is_undecodable(spoil: Any) -> None:
    with pytest.raises(UnfitMessage) as raised:
        m.unpack(spoil(m.pack(m.SimulatorMessage("s", 1, 0, b"e"), [b"abc"])), "simulator")
    assert raised.value.kind == "undecodable"


def test_who_speaks_for_the_other_side_is_undecodable() -> None:
    with pytest.raises(UnfitMessage):
        m.unpack(m.pack(m.Alive("s", 0)), "simulator")
