"""`polyrhythm join`: brings an environment of this machine, in this Python, to a run that waits for simulators.

One thread has the connection; another makes the environment and steps it, so that signs of life go on while a reset
waits for a person. A connection that breaks is opened again, and the session goes on; a session that the run has given
up is followed by a new one. A reset that takes longer than `park_s` parks the simulator: it leaves the run, whose
tickets go elsewhere, and joins again once the reset is done.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import cast
from urllib.parse import urlsplit

from polyrhythm.envs.base import EnvBatch, EnvSettings
from polyrhythm.errors import RunHalted, StartError
from polyrhythm.plugins.cluster.transport.line import JoinLine, Lines
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.joining import Session
from polyrhythm.plugins.join.reception import BEAT_S
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import wait_for
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator_factory import refuse_other

log = logging.getLogger(__name__)

#: Seconds between two attempts to connect; to be let in where all places are taken; for the last words.
_RETRY_S, _TAKEN_S, _LEAVE_S = 0.5, 2.0, 1.0
#: Seconds in which whoever answers may close every connection at once, before that counts as a refusal of the token.
_CLOSED_S = 3.0
#: A run that is connected may be silent for so many times as long as one that is not: it may be in a long update.
_BUSY = 15
#: Seconds that an environment has to close.
_CLOSE_S = 5.0
#: Why a simulator leaves that somebody ends.
_LEFT = "interrupted"


class Joiner:
    """Joins the run at `address` (tcp://HOST:PORT) with the token's `keys`. settings: of the environment; version: of
    this program. patience_s: how long a run that does not answer is waited for; park_s: seconds of a reset after which
    the simulator parks, infinite for never.

    StartError: the address cannot be one, or the environment's spec is too large to be told.
    """

    def __init__(
        self,
        address: str,
        keys: RunKeys,
        settings: EnvSettings,
        version: str,
        *,
        patience_s: float = 60.0,
        park_s: float = float("inf"),
    ) -> None:
        self.host, port = _parse(address)
        self._version = version
        self._patience_s, self._park_s = patience_s, park_s
        self._env_name = " ".join(filter(None, (getattr(settings, "type", ""), getattr(settings, "id", ""))))
        self.spec: EnvSpec = settings.spec()
        self._encoded = m.encode_settings(self.spec)
        if len(self._encoded) > m.LARGEST_SPEC:
            raise StartError(
                f"env: its spec takes {len(self._encoded):,} bytes, a run hears at most {m.LARGEST_SPEC:,}; shorten "
                "its tasks or instructions"
            )
        self._ports, self._at = [port], 0  # places of the run that are known, and the one that is tried
        self._drops = DropCounter("join")
        self._lines = Lines(keys, m.LARGEST_TOLD)
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        self._line: JoinLine | None = None
        self._attached = False  # the session goes by this line
        self._proven = False  # the run is there and has proven its keys
        self._session: Session | None = None
        self._ending: Session | None = None  # its station has still to end
        self._env = _EnvThread(settings, self.spec)
        self._outcome = ""
        self._heard = time.monotonic()
        self._next, self._beat_at = 0.0, 0.0
        self._closed_since: float | None = None  # connections have been closed at once, all of them
        self._full_since, self._said_full = float("inf"), False
        self._leaving = False
        self._leave_by: float | None = None

    # ------------------------------------------------------------ the loop

    def run(self) -> str:
        """Take part until the run is over; what ended it, in words.

        Consumes: frames of the run, what the station says. Waits for: either, or the next sign of life. Unblocked by:
        these. Produces: frames. StartError: the run does not let it in, or does not answer. RunHalted: the environment
        failed, or the run sent it away.
        """
        try:
            while not self._outcome:
                self._turn(time.monotonic())
        except KeyboardInterrupt:
            self._leave(_LEFT, blame=False)
            raise
        except BaseException as error:
            self._leave(str(error) or type(error).__name__, blame=True)
            raise
        finally:
            self.close()
        return self._outcome

    def close(self) -> None:
        """Let the environment and the connection go; a second call does nothing."""
        for session in (self._session, self._ending):
            if session is not None:
                session.stop()
        self._session = self._ending = None
        self._env.close()
        self._drop_line(0.0)
        self._lines.close(_LEAVE_S)
        for end in (self._woken, self._waking):
            if end >= 0:
                os.close(end)
        self._woken = self._waking = -1

    def wake(self) -> None:
        """There is something to send, or the station's thread has news; any thread may call it."""
        with suppress(OSError):  # the pipe is full, which wakes as well, or closed
            os.write(self._waking, b"\0")

    def leave(self) -> None:
        """Leave the run, which goes on without this simulator; any thread may call it."""
        self._leaving = True
        self.wake()

    def _turn(self, now: float) -> None:
        if self._leaving and self._may_leave(now):
            self._leave(_LEFT, blame=False)
            self._outcome = "left the run, which goes on"
            return
        if self._ending is not None and self._ending.part.over.is_set():
            self._ending = None
        if self._line is None and now >= self._next and self._ending is None:
            self._connect()
        line = self._line
        wait_for([self._woken, *([line.socket, line.monitor] if line is not None else [])], BEAT_S / 2)
        self._drain()
        now = time.monotonic()
        if line is not None:
            self._look_at(line, now)
        self._see_to_station(now)
        self._send(now)
        if now >= self._heard + self._patience_s * (_BUSY if self._proven else 1):
            raise StartError(
                f"no run answers at {self._address} for {self._patience_s:g} s; it is over, or has not begun, or its "
                "port (join.port) cannot be reached from here"
            )

    def _may_leave(self, now: float) -> bool:
        """Whether nothing is left to wait for: the run can be told, or has no session of this simulator any more.

        A run that is not told would take the silence for a failure, and its tickets would count an attempt."""
        session = self._session
        if session is None or (self._line is not None and self._attached):
            return True
        if self._leave_by is None:
            seconds = min(session.reconnect_s, self._patience_s)
            self._leave_by = now + seconds
            log.warning("leaving once the connection is back, in %g s at most; Ctrl-C again leaves at once", seconds)
        return now >= self._leave_by

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)

    @property
    def _address(self) -> str:
        return f"tcp://{self.host}:{self._ports[self._at]}"

    def _connect(self) -> None:
        session = self._session
        self._line, self._attached = self._lines.open(self._address), False
        name, received = (session.name, session.numbering.received) if session is not None else ("", 0)
        self._line.send(m.pack(m.Hello(self._version, m.protocol_digest(), self._encoded, name, received)))

    def _drop_line(self, retry_s: float) -> None:
        if self._line is not None:
            self._line.close()
        self._line, self._attached, self._next = None, False, time.monotonic() + retry_s

    # ------------------------------------------------------------ what comes in

    def _look_at(self, line: JoinLine, now: float) -> None:
        state = line.note()
        self._proven = state == "proven"
        if self._proven:
            self._closed_since = None
        while self._line is line and (frame := line.receive()) is not None:
            self._hear(frame)
        if self._outcome or self._line is not line or state in ("opening", "proven"):
            return
        if state == "refused" and self._session is None:  # with one it is a broken link, such as a tunnel's
            self._closed_since = now if self._closed_since is None else self._closed_since
            if now >= self._closed_since + min(_CLOSED_S, self._patience_s):
                raise StartError(
                    f"{self._address} does not accept this token; copy the token file of the run that is there now (a "
                    "tunnel with no run behind it looks the same)"
                )
        if self._attached and self._session is not None:
            words = (
                "the connection to %s is broken; trying again for %g s (--patience); the session goes on if it is back "
            )
            words += "within the run's join.reconnect_s = %g"
            log.warning(words, self._address, self._patience_s, self._session.reconnect_s)
        self._drop_line(_RETRY_S)

    def _hear(self, frame: memoryview) -> None:
        """One frame of the run; what cannot be its is dropped and counted."""
        try:
            message, pieces = m.unpack(frame, "run")
            self._heard = time.monotonic()
            match message:
                case m.Welcome() if self._session is None:
                    self._begin(message)
                case m.Refused():
                    self._refused(message)
                case m.Over() if self._session is not None and message.session == self._session.name:
                    if message.fault:
                        raise RunHalted(f"the run sends this simulator away: {message.reason}")
                    self._outcome = message.reason
                case m.Resumed() | m.Told() | m.Alive() if self._session is not None:
                    self._go_on(self._session, message, pieces)
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))

    def _go_on(self, session: Session, message: m.Resumed | m.Told | m.Alive, pieces: list[memoryview]) -> None:
        if message.session != session.name:
            raise UnfitMessage("unknown_station", "a frame of another session")
        match message:
            case m.Resumed():
                session.resume(message.received)
                self._attached = True
                log.info("%s: the session goes on", session.station)
            case m.Told():
                if len(pieces) != 1:
                    raise UnfitMessage("impossible", f"a message in {len(pieces)} pieces")
                session.hear(message, pieces[0])
            case m.Alive():
                session.note(message.received)

    def _begin(self, welcome: m.Welcome) -> None:
        session = self._session = Session(welcome, self._env.batch, self.wake, self._drops)
        self._attached, self._beat_at = True, 0.0
        self._full_since, self._said_full = float("inf"), False
        self._env.work(session)
        log.info("joined %s as %s; building the environment", self._address, session.station)

    def _refused(self, refused: m.Refused) -> None:
        """StartError: it can never join here."""
        if refused.kind == "session":
            log.warning("the run has given up this simulator's session; joining anew")
            self._give_up_session()
            self._drop_line(0.0)
        elif refused.kind == "taken":
            self._ports = list(dict.fromkeys([*self._ports, *refused.ports]))
            self._at = (self._at + 1) % len(self._ports)
            self._full_since = min(self._full_since, time.monotonic())
            if time.monotonic() >= self._full_since + self._patience_s:
                raise StartError(f"the run has no room for this simulator: {refused.reason}; raise join.simulators")
            if self._at == 0 and not self._said_full:
                self._said_full = True
                count = 1 + len(refused.ports)
                taken = f"all {count} places of the run are" if count > 1 else "the only place of the run is"
                words = "%s: %s taken; %s waits for one to be free, %g s at most (--patience)"
                log.warning(words, self._address, taken, self._env_name, self._patience_s)
            self._drop_line(_TAKEN_S if self._at == 0 else 0.0)
            self._heard = self._next  # until then it is not silent, only full
        else:
            raise StartError(f"the run does not let this simulator in: {refused.reason}")

    def _give_up_session(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._ending, self._session = self._session, None

    # ------------------------------------------------------------ what goes out

    def _see_to_station(self, now: float) -> None:
        """Park in a reset that takes long. RunHalted: the environment failed."""
        session = self._session
        if self._ending is not None:
            self._heard = now  # it waits for its own environment, not for the run
        if session is None:
            return
        if session.part.over.is_set():
            error = session.part.error
            raise RunHalted(f"the environment cannot go on: {type(error).__name__}: {error}") from error
        station = session.part.station
        doing, since = station.current_call() if station is not None else ("", 0.0)
        if doing == "reset" and now >= since + self._park_s:
            log.warning("parked: a reset takes longer than %g s; joining again once it is done", self._park_s)
            self._leave(f"parked, its reset takes longer than {self._park_s:g} s", blame=False)
            self._give_up_session()
            self._drop_line(0.0)

    def _send(self, now: float) -> None:
        session, line = self._session, self._line
        if session is None or line is None or not self._attached:
            return
        while session.out:
            line.send(session.out.popleft())
        if now >= self._beat_at + BEAT_S:
            self._beat_at = now
            line.send(m.pack(session.sign_of_life()))

    def _leave(self, reason: str, *, blame: bool) -> None:
        if self._session is not None and self._line is not None and self._attached:
            self._line.send(m.pack(m.Leave(self._session.name, reason[:300], blame)), _LEAVE_S)


class _EnvThread:
    """The thread that makes the environment once, and steps it in one session after another."""

    def __init__(self, settings: EnvSettings, spec: EnvSpec) -> None:
        self._settings, self._spec = settings, spec
        self._env: EnvBatch | None = None
        self._sessions: SimpleQueue[Session | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def work(self, session: Session) -> None:
        """Have the thread do this session, once it is done with the one before."""
        self._sessions.put(session)

    def batch(self, rows: int) -> EnvBatch:
        """The environment, for a session: it outlasts it."""
        if self._env is None or self._env.rows != rows:
            if self._env is not None:
                self._env.close()
            self._env = self._settings.build(rows)
            refuse_other(self._env, self._spec, rows)
        return cast(EnvBatch, _Kept(self._env))

    def _run(self) -> None:
        """Consumes: sessions. Waits for: one. Unblocked by: one, or `close`. Produces: what their stations say."""
        while (session := self._sessions.get()) is not None:
            session.part.run()
        if self._env is not None:
            try:
                self._env.close()
            except Exception:
                log.exception("the environment raised while it was closed")

    def close(self) -> None:
        """End the thread; one that hangs in the environment is left to the process's end."""
        self._sessions.put(None)
        self._thread.join(_CLOSE_S)


class _Kept:
    """An environment that its station cannot close."""

    def __init__(self, env: EnvBatch) -> None:
        self._env = env

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def close(self) -> None:
        """Nothing: it outlasts the session."""


def _parse(address: str) -> tuple[str, int]:
    """Host and port. StartError: it is no address."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:
        parts, host, port = urlsplit(""), "", 0
    if parts.scheme != "tcp" or not host or not port or parts.path:
        raise StartError(f"{address}: not an address of a run; write tcp://HOST:PORT, as the run has printed it")
    return host, port
