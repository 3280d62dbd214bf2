"""Session of one join port: accepts a simulator, receives its frames, keeps the session across reconnections. No I/O.

    open       no simulator; the next one that meets the terms is accepted
    building   it builds its environment; if it leaves, the port is open again
    present    the run uses it; a lost connection may come back within `reconnect_s`

A frame that cannot be decoded, or that comes from an unknown or an outdated connection, is dropped and counted. A
simulator whose messages contradict the run's record is rejected.

Invariants: at most one session; its messages come by its latest connection, once and in order; a reception that raised
`Departed` is over, and its successor accepts the next simulator.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.terms import Terms, known_counts, refusal
from polyrhythm.runtime.messages import Departed
from polyrhythm.runtime.processes.incarnation import RECONNECTING
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage

#: Seconds between two heartbeats; silence after which a connection is no longer used for sending.
BEAT_S, _SILENT_S = 0.5, 3.0
#: The calls of an environment that a simulator may be in; "" between them.
_CALLS = ("", "reset", "step", "observe", "discard", "texts")


class Heard(NamedTuple):
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

    def hear(self, who: bytes, frame: bytes, now: float) -> Heard | None:
        """Handle one frame; returns its event, if any. Departed: the simulator leaves or is rejected."""
        try:
            message, pieces = m.unpack(frame, "simulator")
            if isinstance(message, m.JoinHello):
                self._greet(who, message, now)
                return None
            session = self._session_of(who, message.session)
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))
            return None
        session.heard = now
        try:
            return self._take(session, message, pieces, now)
        except UnfitMessage as unfit:
            self.send_away(str(unfit))
            return None

    def _greet(self, who: bytes, hello: m.JoinHello, now: float) -> None:
        if hello.session:
            self._resume(who, hello, now)
            return
        refused = refusal(hello, self._terms)
        if refused is None and self._session is not None:
            others = f"; other places of this run are at ports {', '.join(map(str, self._ports))}" * bool(self._ports)
            refused = m.JoinRefused("taken", f"a simulator has joined here already{others}", self._ports)
            if self._ports:  # it tries another port: not worth a log line
                self.refused += 1
                self._say(who, refused)
                return
        if refused is not None:
            self._refuse(who, refused)
            return
        self._session = _Session(self._name_session(), who, now, now)
        self._say(who, self._welcome(self._session.name))

    def _resume(self, who: bytes, hello: m.JoinHello, now: float) -> None:
        """Continue a session by another connection. UnfitMessage: messages that it lacks are no longer kept."""
        session = self._session
        if session is None or session.name != hello.session:
            self._refuse(who, m.JoinRefused("session", "its session is over: the run has done without it since"))
            return
        session.numbering.note(hello.received)
        session.who, session.heard = who, now
        self.reconnects += 1
        self._say(who, m.Resumed(session.name, session.numbering.received))
        self.out.extend((who, content) for content in session.numbering.kept())

    def _refuse(self, who: bytes, refused: m.JoinRefused) -> None:
        self.refused += 1
        self._drops.drop("refused", refused.reason)
        self._say(who, refused)

    def _session_of(self, who: bytes, name: str) -> _Session:
        """The session of a frame. UnfitMessage: it has none, or came by an outdated connection."""
        session = self._session
        if session is None or session.name != name:
            raise UnfitMessage("unknown_station", "a frame of nobody who has joined")
        if session.who != who:
            raise UnfitMessage("earlier_incarnation", "a frame by a connection that was replaced")
        return session

    def _take(self, session: _Session, message: object, pieces: list[memoryview], now: float) -> Heard | None:
        """UnfitMessage: the message contradicts the session."""
        match message:
            case m.SimulatorSaid():
                if not session.ready:
                    raise UnfitMessage("impossible", "it says something before it is ready")
                session.numbering.note(message.received)
                return Heard(message.event, pieces) if session.numbering.take(message.number) else None
            case m.Beat():
                session.numbering.note(message.received)
                possible = message.doing in _CALLS and 0 <= message.for_s <= now - session.began + 1.0
                if not possible or (session.ready and not message.ready):
                    said = f"{message.doing[:40]!r} for {message.for_s} s, ready {message.ready}"
                    raise UnfitMessage("impossible", f"a sign of life that says {said}")
                counts = known_counts(message.statistics)
                if len(counts) < len(message.statistics):
                    wrong = [name[:40] for name in message.statistics if name not in counts][:3]
                    self._drops.drop("impossible", f"statistics that no simulator has, or of no number: {wrong}")
                session.beat = msgspec.structs.replace(message, statistics=counts)
                session.at = now - message.for_s
            case m.Leave():
                self._end(f"left: {message.reason[:200]}", blame=message.blame)
        return None

    # ------------------------------------------------------------ outgoing

    def tell(self, content: bytes) -> None:
        """Send a message to the present simulator, once and in order."""
        session = self._session
        assert session is not None, "nobody has joined"
        told = m.Told(session.name, session.numbering.next(), session.numbering.received)
        frame = m.pack(told, [content])
        session.numbering.keep(frame)
        self.out.append((session.who, frame))

    def look(self, now: float) -> None:
        """Send a heartbeat if one is due. Departed: the connection has been silent for too long."""
        session = self._session
        if session is None:
            return
        if now >= session.heard + self._reconnect_s:
            self._end(f"was not heard for {self._reconnect_s:g} s (join.reconnect_s)", blame=True)
        elif not session.ready and now >= session.began + self._start_s:
            self.send_away(f"its environment was not built within {self._start_s:g} s (supervision.start_s)")
        elif now >= self._beat_at + BEAT_S and now < session.heard + _SILENT_S:
            self._beat_at = now
            self._say(session.who, m.Alive(session.name, session.numbering.received))

    def send_away(self, reason: str) -> None:
        """Reject the simulator. Departed, if it was present."""
        assert self._session is not None, "nobody has joined"
        self._say(self._session.who, m.Over(self._session.name, reason, fault=True))
        self._end(f"was sent away: {reason}", blame=True)

    def close(self, reason: str) -> None:
        if self._session is not None:
            self._say(self._session.who, m.Over(self._session.name, reason, fault=False))
            self._session = None

    def _end(self, reason: str, *, blame: bool) -> None:
        """End the session. Departed, if the simulator was present; else the port is open again."""
        session, self._session = self._session, None
        if session is not None and session.ready:
            raise Departed(reason, blame=blame)

    def _say(self, who: bytes, message: m.FromRun) -> None:
        self.out.append((who, m.pack(message)))
