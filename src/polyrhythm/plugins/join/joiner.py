"""State machine of a simulator that joins a run: events and the time in, actions out, no I/O.

    outside    connecting: the run proves that it knows the token, then answers the greeting
    member     the station sends events, the run sends commands and replies; both send heartbeats
    broken     the connection is lost: reconnect, and continue the session where both ends stood
    leaving    the session has ended: the station must end before another session begins

A session that the run has given up is followed by a new one. A reset longer than `park_s` parks the simulator: it
leaves the run, whose tickets go to others, and joins again after the reset.

Invariants: at most one session; frames of another session are dropped and counted; the station's events are sent in
order, and the run receives each once. `plugins.join.joining` has the sockets, the clock and the environment.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from numpy import dtype

from polyrhythm.errors import RunHalted, StartError
from polyrhythm.plugins.cluster.line import State
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.reception import BEAT_S
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Seconds between attempts to connect; between attempts while all ports are taken; for the last message.
_RETRY_S, _TAKEN_S, LEAVE_S = 0.5, 2.0, 1.0
#: Seconds of connections closed at once by the other side, after which that counts as a refusal of the token.
_CLOSED_S = 3.0
#: Factor on the allowed silence of a run once it is connected: it may be in a long update.
_BUSY = 15
#: Reason of a simulator that the user stops.
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class StationStatus:
    """State of the station. ready: its environment is built. doing, since: the environment call under way and its
    start; units: units of work done; over: the station has ended, by `error` unless that is None."""

    ready: bool
    doing: str
    since: float
    units: int
    statistics: Mapping[str, float]
    over: bool = False
    error: BaseException | None = None


class TimePassed(NamedTuple):
    """Timer event. status: of the session's station, if any. ending: the station of an earlier session has not ended
    yet; leaving: the user wants to leave the run."""

    status: StationStatus | None = None
    ending: bool = False
    leaving: bool = False


class LineIs(NamedTuple):
    state: State


class FrameCame(NamedTuple):
    frame: memoryview


class StationEvent(NamedTuple):
    """An event of the station, encoded by `wire`, with its arrays."""

    event: bytes
    pieces: Sequence[memoryview] = ()


class OpenLine(NamedTuple):
    address: str


class CloseLine(NamedTuple):
    pass


class SendFrame(NamedTuple):
    """Send a frame. linger_s: seconds for which a closed connection still tries to send it."""

    frame: bytes
    linger_s: float = 0.0


class MakeStation(NamedTuple):
    """Create the session's station."""

    welcome: m.Welcome


class HandOver(NamedTuple):
    """Pass a command or reply of the run to the station. content: the encoded message."""

    message: object
    content: memoryview


class StopStation(NamedTuple):
    """Stop the session's station after its current unit of work."""


class LeaveRun(NamedTuple):
    reason: str


JoinEvent = TimePassed | LineIs | FrameCame | StationEvent
JoinAction = OpenLine | CloseLine | SendFrame | MakeStation | HandOver | StopStation | LeaveRun


@dataclass(slots=True)
class _Membership:
    """A session. answers: dtype of the run's answers; reconnect_s: seconds that the session
    survives a lost connection."""

    session: str
    station: str
    answers: dtype[Any]
    reconnect_s: float
    numbering: m.Numbering = field(default_factory=m.Numbering)


class Joiner:
    """Joins the run at `address` (tcp://HOST:PORT). spec: of the environment; env: its description; version: of this
    program.

    patience_s: seconds to wait for a run that does not answer; park_s: seconds of a reset after which the simulator
    parks, infinite for never. StartError: the address is invalid, or the environment's spec is too large to send.
    """

    def __init__(
        self,
        address: str,
        spec: EnvSpec,
        env: str,
        version: str,
        now: float,
        *,
        patience_s: float = 60.0,
        park_s: float = float("inf"),
    ) -> None:
        self._host, port = _parse(address)
        self._env, self._version, self._patience_s, self._park_s = env, version, patience_s, park_s
        self._encoded = msgspec.msgpack.encode(spec)
        if len(self._encoded) > m.LARGEST_SPEC:
            raise StartError(
                f"env: its spec takes {len(self._encoded):,} bytes, a run hears at most {m.LARGEST_SPEC:,}; shorten "
                "its tasks or instructions"
            )
        self.drops = DropCounter("join")
        self._ports, self._at = [port], 0  # known ports of the run, and the index of the current one
        self._is_open = self._proven = False  # the connection is open; the run has proven its keys
        self.attached = False  # the session uses this connection
        self._member: _Membership | None = None
        self._heard, self._next, self._beat_at = now, 0.0, 0.0
        self._closed_since: float | None = None  # start of a series of connections closed at once
        self._full_since, self._said_full = float("inf"), False
        self._leave_by = float("inf")
        self._actions: list[JoinAction] = []

    def handle(self, event: JoinEvent, now: float) -> list[JoinAction]:
        """The actions to execute, in order. StartError: the run refuses this simulator or does not answer. RunHalted:
        the environment failed, or the run rejected the simulator."""
        self._actions = []
        match event:
            case FrameCame(frame):
                self._on_frame(frame, now)
            case StationEvent() if self._member is not None:
                self._on_event(self._member, event)
            case LineIs(state):
                self._on_line(state, now)
            case TimePassed():
                self._on_turn(event, now)
        return self._actions

    def farewell(self, reason: str, *, blame: bool) -> list[JoinAction]:
        """Tell the run, if connected, that this simulator leaves. blame: its tickets count an attempt."""
        if self._member is None or not self.attached:
            return []
        return [SendFrame(m.pack(m.Leave(self._member.session, reason[:300], blame)), LEAVE_S)]

    # ------------------------------------------------------------ time passes

    def _on_turn(self, turn: TimePassed, now: float) -> None:
        if turn.ending:
            self._heard = now  # it waits for its own environment, not for the run
        if turn.status is not None:
            if self._parks(turn.status, now):
                return  # its station ends
            self._beat(turn.status, now)
        if now >= self._heard + self._patience_s * (_BUSY if self._proven else 1):
            raise StartError(
                f"no run answers at {self._address} for {self._patience_s:g} s; it is over, or has not begun, or its "
                "port (join.port) cannot be reached from here"
            )
        if turn.leaving and self._may_leave(now):
            self._actions += [*self.farewell(INTERRUPTED, blame=False), LeaveRun("left the run, which goes on")]
        elif not self._is_open and now >= self._next and not turn.ending:
            self._connect()

    def _beat(self, status: StationStatus, now: float) -> None:
        member = self._member
        if member is None or not self.attached or now < self._beat_at + BEAT_S:
            return
        self._beat_at = now
        for_s = max(0.0, now - status.since) if status.doing else 0.0
        said = member.session, member.numbering.received, status.ready, status.doing, for_s
        self._send(m.Beat(*said, status.units, status.statistics))

    def _parks(self, status: StationStatus, now: float) -> bool:
        """Leave the run during a long reset. RunHalted: the environment failed."""
        if status.over:
            error = status.error
            raise RunHalted(f"the environment cannot go on: {type(error).__name__}: {error}") from error
        if status.doing != "reset" or now < status.since + self._park_s:
            return False
        log.warning("parked: a reset takes longer than %g s; joining again once it is done", self._park_s)
        self._actions += self.farewell(f"parked, its reset takes longer than {self._park_s:g} s", blame=False)
        self._give_up_session(now)
        return True

    def _may_leave(self, now: float) -> bool:
        """Whether leaving is safe: the run can be told, or it has no session of this simulator. Otherwise the run would
        take the silence for a failure, and its tickets would count an attempt."""
        if self._member is None or self.attached:
            return True
        if self._leave_by == float("inf"):
            seconds = min(self._member.reconnect_s, self._patience_s)
            self._leave_by = now + seconds
            log.warning("leaving once the connection is back, in %g s at most; Ctrl-C again leaves at once", seconds)
        return now >= self._leave_by

    # ------------------------------------------------------------ the connection

    @property
    def _address(self) -> str:
        return f"tcp://{self._host}:{self._ports[self._at]}"

    def _connect(self) -> None:
        self._is_open, member = True, self._member
        session, received = (member.session, member.numbering.received) if member is not None else ("", 0)
        self._actions.append(OpenLine(self._address))
        self._send(m.JoinHello(self._version, m.protocol_digest(), self._encoded, session, received))

    def _disconnect(self, retry_s: float, now: float) -> None:
        if self._is_open:
            self._actions.append(CloseLine())
        self._is_open = self.attached = self._proven = False
        self._next = now + retry_s

    def _on_line(self, state: State, now: float) -> None:
        self._proven = state == "proven"
        if self._proven:
            self._closed_since = None
        if state in ("opening", "proven"):
            return
        if state == "refused" and self._member is None:  # in a session it is a broken link, such as a tunnel's
            self._closed_since = now if self._closed_since is None else self._closed_since
            if now >= self._closed_since + min(_CLOSED_S, self._patience_s):
                raise StartError(
                    f"{self._address} does not accept this token; copy the token file of the run that is there now (a "
                    "tunnel with no run behind it looks the same)"
                )
        if self._member is not None and self.attached:
            words = (
                "the connection to %s is broken; trying again for %g s (--patience); the session goes on if it is back "
                "within the run's join.reconnect_s = %g"
            )
            log.warning(words, self._address, self._patience_s, self._member.reconnect_s)
        self._disconnect(_RETRY_S, now)

    def _send(self, message: m.FromSimulator) -> None:
        self._actions.append(SendFrame(m.pack(message)))

    # ------------------------------------------------------------ messages of the run

    def _on_frame(self, frame: memoryview, now: float) -> None:
        """Frames that the run cannot have sent are dropped and counted."""
        try:
            message, pieces = m.unpack(frame, "run")
            self._heard = now
            match message:
                case m.Welcome() if self._member is None:
                    answers = message.layout.answer_dtype
                    self._member = _Membership(message.session, message.station, answers, message.reconnect_s)
                    self.attached, self._beat_at = True, 0.0
                    self._full_since, self._said_full = float("inf"), False
                    self._actions.append(MakeStation(message))
                    log.info("joined %s as %s; building the environment", self._address, message.station)
                case m.JoinRefused():
                    self._on_refused(message, now)
                case m.Over() if self._member is not None and message.session == self._member.session:
                    if message.fault:
                        raise RunHalted(f"the run sends this simulator away: {message.reason}")
                    self._actions.append(LeaveRun(message.reason))
                case m.Resumed() | m.RunMessage() | m.Alive() if self._member is not None:
                    self._go_on(self._member, message, pieces)
        except UnfitMessage as unfit:
            self.drops.drop(unfit.kind, str(unfit))

    def _on_refused(self, refused: m.JoinRefused, now: float) -> None:
        """StartError: the refusal is permanent."""
        if refused.kind == "session":
            log.warning("the run has given up this simulator's session; joining anew")
            self._give_up_session(now)
        elif refused.kind == "taken":
            self._ports = list(dict.fromkeys([*self._ports, *refused.ports]))
            self._at = (self._at + 1) % len(self._ports)
            self._full_since = min(self._full_since, now)
            if now >= self._full_since + self._patience_s:
                raise StartError(f"the run has no room for this simulator: {refused.reason}; raise join.simulators")
            if self._at == 0 and not self._said_full:
                self._said_full = True
                count = 1 + len(refused.ports)
                taken = f"all {count} places of the run are" if count > 1 else "the only place of the run is"
                words = "%s: %s taken; %s waits for one to be free, %g s at most (--patience)"
                log.warning(words, self._address, taken, self._env, self._patience_s)
            self._disconnect(_TAKEN_S if self._at == 0 else 0.0, now)
            self._heard = self._next  # until then silence means a full run
        else:
            raise StartError(f"the run does not let this simulator in: {refused.reason}")

    def _go_on(
        self, member: _Membership, message: m.Resumed | m.RunMessage | m.Alive, pieces: list[memoryview]
    ) -> None:
        if message.session != member.session:
            raise UnfitMessage("unknown_station", "a frame of another session")
        decoded: object = None
        if isinstance(message, m.RunMessage):
            if len(pieces) != 1:
                raise UnfitMessage("impossible", f"a message in {len(pieces)} pieces")
            decoded = wire.decode(pieces[0], member.answers, m.LARGEST_MESSAGE)
        member.numbering.acknowledge(message.received)
        if isinstance(message, m.Resumed):  # messages that the run lacks are sent again
            self._actions += [SendFrame(frame) for frame in member.numbering.kept()]
            self.attached = True
            log.info("%s: the session goes on", member.station)
        elif isinstance(message, m.RunMessage) and member.numbering.take(message.number):
            self._actions.append(HandOver(decoded, pieces[0]))

    def _give_up_session(self, now: float) -> None:
        if self._member is not None:
            self._actions.append(StopStation())
        self._member = None
        self._disconnect(0.0, now)

    # ------------------------------------------------------------ events of the station

    def _on_event(self, member: _Membership, event: StationEvent) -> None:
        numbering = member.numbering
        message = m.SimulatorMessage(member.session, numbering.next(), numbering.received, event.event)
        frame = m.pack(message, event.pieces)
        numbering.keep(frame)
        if self.attached:
            self._actions.append(SendFrame(frame))


def _parse(address: str) -> tuple[str, int]:
    """Host and port. StartError: the address is invalid."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:
        parts, host, port = urlsplit(""), "", 0
    if parts.scheme != "tcp" or not host or not port or parts.path:
        raise StartError(f"{address}: not an address of a run; write tcp://HOST:PORT, as the run has printed it")
    return host, port
