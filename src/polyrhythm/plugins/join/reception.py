"""Session of one join port: accepts a simulator, receives its frames, keeps the session across reconnections. No I/O.

    open       no simulator; the next one that meets the terms is accepted
    building   it builds its environment; if it leaves, the port is open again
    present    the run uses it; a lost connection may come back within `reconnect_s`

A frame that cannot be decoded, or that comes from an unknown or an outdated connection, is dropped and counted. A
simulator whose messages contradict the run's record is rejected.

The terms are the same program, messages and environment.

Invariants: at most one session; its messages come by its latest connection, once and in order; a reception that raised
`Departed` is over, and its successor accepts the next simulator.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgspec

from polyrhythm.plugins.join import messages as m
from polyrhythm.runtime.messages import Departed
from polyrhythm.runtime.processes.incarnation import RECONNECTING
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.specs import EnvSpec

#: Seconds between two heartbeats; silence after which a connection is no longer used for sending.
BEAT_S, _SILENT_S = 0.5, 3.0
#: The calls of an environment that a simulator may be in; "" between them.
_CALLS = ("", "reset", "step", "observe", "discard", "texts")


#: Counters of a simulator (`stations.simulator`), and the largest count: beyond it float64 skips integers.
COUNTERS = frozenset(
    {"busy_s", "env_s", "env_steps", "chunk_steps", "resets_ready", "resets_waited", "resets_in_place"}
)
LARGEST_COUNT = 2.0**53
#: Characters of a value in a refusal.
_SHOWN = 120


class ReceivedEvent(NamedTuple):
    """An event of the simulator, encoded by `wire`, with its arrays."""

    event: bytes
    pieces: list[memoryview]


@dataclass(slots=True)
class _Session:
    """who: its connection; began: when it was accepted; heard: time of its last frame; at:
    start of its current call."""

    name: str
    who: bytes
    began: float
    heard: float
    numbering: m.Numbering = field(default_factory=m.Numbering)
    beat: m.Beat | None = None
    at: float = 0.0

    @property
    def ready(self) -> bool:
        return self.beat is not None and self.beat.ready


class Reception:
    """welcome: makes the `Welcome` of a session by name. reconnect_s: seconds that a session survives a lost
    connection.

    start_s: limit for building the environment; ports: the run's other join ports; out: frames to send, each with its
    connection.
    """

    def __init__(
        self,
        terms: Terms,
        welcome: Callable[[str], m.Welcome],
        drops: DropCounter,
        *,
        reconnect_s: float,
        start_s: float,
        ports: tuple[int, ...] = (),
        name_session: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self.out: deque[tuple[bytes, bytes]] = deque()
        self.refused = self.reconnects = 0
        self._terms, self._welcome, self._drops = terms, welcome, drops
        self._reconnect_s, self._start_s, self._ports = reconnect_s, start_s, ports
        self._name_session = name_session
        self._session: _Session | None = None
        self._beat_at = 0.0

    @property
    def present(self) -> bool:
        """Whether the run can use the simulator: its environment is built."""
        return self._session is not None and self._session.ready

    @property
    def beat(self) -> m.Beat | None:
        return self._session.beat if self._session is not None else None

    def current_call(self, now: float) -> tuple[str, float]:
        """The simulator's current call and its start; `reconnect` while its connection is silent."""
        session = self._session
        if session is None or session.beat is None:
            return "", 0.0
        if now >= session.heard + _SILENT_S:
            return RECONNECTING, session.heard
        return (session.beat.doing, session.at) if session.beat.doing else ("", 0.0)

    # ------------------------------------------------------------ incoming

    def receive(self, who: bytes, frame: bytes, now: float) -> ReceivedEvent | None:
        """Handle one frame; returns its event, if any. Departed: the simulator leaves or is rejected."""
        try:
            message, pieces = m.unpack(frame, "simulator")
            if isinstance(message, m.JoinHello):
                self._on_hello(who, message, now)
                return None
            session = self._session
            if session is None or session.name != message.session:
                raise UnfitMessage("unknown_station", "a frame of nobody who has joined")
            if session.who != who:
                raise UnfitMessage("earlier_incarnation", "a frame by a connection that was replaced")
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))
            return None
        session.heard = now
        try:
            return self._take(session, message, pieces, now)
        except UnfitMessage as unfit:
            self.reject(str(unfit))
            return None

    def _on_hello(self, who: bytes, hello: m.JoinHello, now: float) -> None:
        if hello.session:
            self._resume(who, hello, now)
            return
        refused = refusal(hello, self._terms)
        if refused is None and self._session is not None:
            ports = ", ".join(map(str, self._ports))
            others = f"; other places of this run are at ports {ports}" if ports else ""
            refused = m.JoinRefused("taken", f"a simulator has joined here already{others}", self._ports)
            if self._ports:  # it tries another port: not worth a log line
                self.refused += 1
                self._send(who, refused)
                return
        if refused is not None:
            self._refuse(who, refused)
            return
        self._session = _Session(self._name_session(), who, now, now)
        self._send(who, self._welcome(self._session.name))

    def _resume(self, who: bytes, hello: m.JoinHello, now: float) -> None:
        """Continue a session by another connection. UnfitMessage: messages that it lacks are no longer kept."""
        session = self._session
        if session is None or session.name != hello.session:
            self._refuse(who, m.JoinRefused("session", "its session is over: the run has done without it since"))
            return
        session.numbering.acknowledge(hello.received)
        session.who, session.heard = who, now
        self.reconnects += 1
        self._send(who, m.Resumed(session.name, session.numbering.received))
        self.out.extend((who, content) for content in session.numbering.kept())

    def _refuse(self, who: bytes, refused: m.JoinRefused) -> None:
        self.refused += 1
        self._drops.drop("refused", refused.reason)
        self._send(who, refused)

    def _take(self, session: _Session, message: object, pieces: list[memoryview], now: float) -> ReceivedEvent | None:
        """UnfitMessage: the message contradicts the session."""
        match message:
            case m.SimulatorMessage():
                if not session.ready:
                    raise UnfitMessage("impossible", "it says something before it is ready")
                session.numbering.acknowledge(message.received)
                return ReceivedEvent(message.event, pieces) if session.numbering.take(message.number) else None
            case m.Beat():
                session.numbering.acknowledge(message.received)
                possible = message.doing in _CALLS and 0 <= message.for_s <= now - session.began + 1.0
                if not possible or (session.ready and not message.ready):
                    said = f"{message.doing[:40]!r} for {message.for_s} s, ready {message.ready}"
                    raise UnfitMessage("impossible", f"a sign of life that says {said}")
                counts = {
                    name: count
                    for name, count in message.statistics.items()
                    if name in COUNTERS and 0 <= count <= LARGEST_COUNT
                }
                if len(counts) < len(message.statistics):
                    wrong = [name[:40] for name in message.statistics if name not in counts][:3]
                    self._drops.drop("impossible", f"statistics that no simulator has, or of no number: {wrong}")
                session.beat = msgspec.structs.replace(message, statistics=counts)
                session.at = now - message.for_s
            case m.Leave():
                self._end(f"left: {message.reason[:200]}", blame=message.blame)
        return None

    # ------------------------------------------------------------ outgoing

    def send(self, content: bytes) -> None:
        """Send a message to the present simulator, once and in order."""
        session = self._session
        assert session is not None, "nobody has joined"
        message = m.RunMessage(session.name, session.numbering.next(), session.numbering.received)
        frame = m.pack(message, [content])
        session.numbering.keep(frame)
        self.out.append((session.who, frame))

    def check(self, now: float) -> None:
        """Send a heartbeat if one is due. Departed: the connection has been silent for too long."""
        session = self._session
        if session is None:
            return
        if now >= session.heard + self._reconnect_s:
            self._end(f"was not heard for {self._reconnect_s:g} s (join.reconnect_s)", blame=True)
        elif not session.ready and now >= session.began + self._start_s:
            self.reject(f"its environment was not built within {self._start_s:g} s (supervision.start_s)")
        elif now >= self._beat_at + BEAT_S and now < session.heard + _SILENT_S:
            self._beat_at = now
            self._send(session.who, m.Alive(session.name, session.numbering.received))

    def reject(self, reason: str) -> None:
        """Reject the simulator. Departed, if it was present."""
        assert self._session is not None, "nobody has joined"
        self._send(self._session.who, m.Over(self._session.name, reason, fault=True))
        self._end(f"was sent away: {reason}", blame=True)

    def close(self, reason: str) -> None:
        if self._session is not None:
            self._send(self._session.who, m.Over(self._session.name, reason, fault=False))
            self._session = None

    def _end(self, reason: str, *, blame: bool) -> None:
        """End the session. Departed, if the simulator was present; else the port is open again."""
        session, self._session = self._session, None
        if session is not None and session.ready:
            raise Departed(reason, blame=blame)

    def _send(self, who: bytes, message: m.FromRun) -> None:
        self.out.append((who, m.pack(message)))


@dataclass(frozen=True, slots=True)
class Terms:
    """Requirements for a simulator. polyrhythm: the version; spec: of the run's environments."""

    polyrhythm: str
    spec: EnvSpec


def refusal(hello: m.JoinHello, terms: Terms) -> m.JoinRefused | None:
    """Why the simulator is refused; None if it is accepted."""
    if hello.polyrhythm != terms.polyrhythm:
        return m.JoinRefused(
            "version",
            f"polyrhythm {hello.polyrhythm[:_SHOWN]} wants to join, the run has {terms.polyrhythm}; install "
            f"polyrhythm=={terms.polyrhythm} there",
        )
    if hello.messages != m.protocol_digest():
        return m.JoinRefused(
            "messages",
            f"its messages ({hello.messages[:_SHOWN]}) are not those of the run ({m.protocol_digest()}), although both "
            f"are polyrhythm {terms.polyrhythm}; install the same source on both machines",
        )
    try:
        spec = msgspec.msgpack.decode(hello.spec, type=EnvSpec)
    except (ValueError, RecursionError) as error:
        return m.JoinRefused("spec", f"its environment's spec cannot be read ({error}); name another with --env"[:400])
    if different := difference(spec, terms.spec):
        return m.JoinRefused("spec", f"its environment is another: {different}; name the run's with --env")
    return None


def difference(spec: EnvSpec, wanted: EnvSpec) -> str:
    """Description of the first field in which two specs differ; "" if they are equal."""
    for part in fields(EnvSpec):
        found, expected = getattr(spec, part.name), getattr(wanted, part.name)
        if found != expected and isinstance(found, Mapping):
            name = next(name for name in (*expected, *found) if found.get(name) != expected.get(name))
            if name not in found or name not in expected:
                return f"{part.name} {_short(name)} is {'new' if name in found else 'missing'}"
            return f"{part.name} {_short(name)} is {_short(found[name])}, the run has {_short(expected[name])}"
        if found != expected:
            return f"{part.name} is {_short(found)}, the run has {_short(expected)}"
    return ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
