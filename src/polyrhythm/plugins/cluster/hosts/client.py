"""Asks the server of another host, and whether it can be reached and what its clocks show.

One connection for each process and host; threads take turns. Main asks the agents of all other hosts again and again,
in a thread for each, and gives up one that is silent. The processes and agents of other hosts ask main's: one that
cannot reach it has been given up, or will be; it must not live on for ever, and its parent may not be able to end it.
Agents answer and not main, so a main that is busy or stopped is not silent.

The agent reads its clocks between the sending of the question and the receiving of the answer, so half the round trip
bounds the error of their offset, however uneven the two ways are. Until a better estimate comes the bound grows by what
two clocks may drift apart. Wall clocks decide nothing in a run: where they are apart, the times in the logs of that
host are, which is warned of.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.sealed import ConnectionTicket, Place, SealedConnection, anywhere, connect
from polyrhythm.runtime.hosts import ClockOffset
from polyrhythm.runtime.transport.sockets import Sockets

log = logging.getLogger(__name__)

#: Seconds of a limit that are not worth waiting for.
_LEAST_S = 1e-3
_decode_ticket = msgspec.msgpack.Decoder(ConnectionTicket).decode


class HostSilent(ConnectionError, LookupError):
    """A host did not answer in time, or its connection has ended."""


class DataClient:
    """Questions to the server of `host`. connect: opens a connection to it, within so many seconds. answer_s: that an
    answer may take, the first one with the connection that it needs."""

    def __init__(self, host: str, connect: Callable[[float], SealedConnection], answer_s: float = q.ANSWER_S) -> None:
        self.host, self.connect = host, connect
        self._answer_s = answer_s
        self._connection: SealedConnection | None = None
        self._turn = threading.Lock()

    def ask(self, question: msgspec.Struct) -> list[memoryview]:
        """The pieces of the answer. LookupError: there is none. HostSilent: none came in time."""
        (answer,) = self.ask_all([question])
        return answer

    def ask_all(
        self, questions: Iterable[msgspec.Struct | None], ahead: int = 1, place: Place = anywhere
    ) -> Iterator[list[memoryview]]:
        """The answers in order; up to `ahead` questions are on their way at a time. questions: None where the next one
        depends on an answer that is still to come; place: of the answers' pieces."""
        with self._turn:
            by = time.monotonic() + self._answer_s
            connection, waiting = self._usable(by), 0
            try:
                for question in questions:
                    if waiting == ahead or question is None:
                        answer = self._receive(connection, place, by)
                        waiting, by = waiting - 1, math.inf
                        yield self._pieces_of(answer)
                    if question is None:
                        continue
                    waiting += 1
                    with self._silence():
                        connection.send([q.encode(question)], self._left(by))
                while waiting:
                    answer = self._receive(connection, place, by)
                    waiting, by = waiting - 1, math.inf
                    yield self._pieces_of(answer)
            finally:
                if waiting:  # answers that are on their way would be taken for later ones'
                    self._drop()

    def _left(self, by: float) -> float:
        """Seconds that are left of an answer's limit, which ends `by` then, or begins now. TimeoutError: none are."""
        left = min(by - time.monotonic(), self._answer_s)
        if left < _LEAST_S:
            raise TimeoutError
        return left

    def _usable(self, by: float) -> SealedConnection:
        """The connection, or a new one where it has ended meanwhile."""
        if self._connection is not None and not self._connection.is_usable:
            self._drop()
        if self._connection is None:
            with self._silence():
                self._connection = self.connect(self._left(by))
        return self._connection

    def _receive(self, connection: SealedConnection, place: Place, by: float) -> list[memoryview]:
        with self._silence():
            return connection.receive(self._left(by), lambda before, size: place(before[1:], size) if before else None)

    def _pieces_of(self, answer: list[memoryview]) -> list[memoryview]:
        """LookupError: it is a reason why there is none."""
        refused, *pieces = answer
        if refused:
            raise LookupError(f"host {self.host}: {bytes(refused).decode(errors='replace')}")
        return pieces

    @contextmanager
    def _silence(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise HostSilent(f"host {self.host} has not answered for {self._answer_s:g} s") from error
        except OSError as error:
            raise HostSilent(f"host {self.host} cannot be asked: {error}") from error

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        with self._turn:
            self._drop()


def client_of(
    sockets: Sockets, host: str, endpoint: str, answer_s: float = q.ANSWER_S, largest: int = q.HEAD_BYTES
) -> DataClient:
    """A client of the server at `endpoint`. answer_s: that an answer may take; largest: bytes of its largest piece, by
    default that of an answer without arrays."""

    def open_connection(seconds: float) -> SealedConnection:
        by = time.monotonic() + seconds
        answer = sockets.ask(endpoint, [b""], seconds, q.TICKET_BYTES)
        left = by - time.monotonic()
        if answer is None or left < _LEAST_S:
            raise TimeoutError(f"no ticket has come for {seconds:g} s")
        if len(answer) != 2 or answer[0]:
            raise ConnectionError(answer[0].decode(errors="replace"))
        address = urlsplit(endpoint).hostname
        assert address is not None, "an endpoint has an address"
        try:
            return connect(address, _decode_ticket(answer[1]), largest, left)
        except ValueError as error:
            raise ConnectionError(f"no ticket came: {error}") from error

    return DataClient(host, open_connection, answer_s)


#: Seconds between an answer and the next question, and between a question without an answer and the next.
_EVERY_S, _AGAIN_S = 2.0, 0.1
#: The most that one question counts as silence, however long this process was stopped.
_MOST_S = q.ANSWER_S + _EVERY_S + 1.0
#: Questions in a row without an answer that make a host silent: one may have been lost with its connection.
_MISSES = 2
#: Seconds a second by which two monotonic clocks drift apart at most: that of quartz, where nothing disciplines them.
_DRIFT = 100e-6
#: Seconds by which wall clocks may be apart unmentioned: lines of logs have whole seconds.
_APART_S = 2.0
_decode = msgspec.msgpack.Decoder(tuple[int, int]).decode


class Estimate(NamedTuple):
    """Of one round trip. clock_ns, wall_ns: how far the two clocks are ahead of this host's; half_ns: the bound of
    both; at_ns: when, by this host's monotonic clock."""

    clock_ns: int
    wall_ns: int
    half_ns: int
    at_ns: int

    def bound_ns(self, now_ns: int) -> float:
        return self.half_ns + _DRIFT * (now_ns - self.at_ns)


def measure(client: DataClient, clock: Callable[[], int] = time.monotonic_ns) -> Estimate:
    """The estimate of a round trip. LookupError: no answer in time; ValueError: it is none."""
    wall_before, before = time.time_ns(), clock()
    (content,) = client.ask(q.ReadClocks())
    after = clock()
    theirs, wall = _decode(content)
    half = (after - before + 1) // 2
    return Estimate(theirs - before - half, wall - wall_before - half, half, after)


class HostWatch:
    """client: of the host, for this alone, so that no other answer delays its own. answered: when the last question was
    asked that it has answered."""

    def __init__(self, client: DataClient) -> None:
        self.host, self.answered = client.host, float("-inf")
        self._estimate: Estimate | None = None
        self._warned = False
        self._client, self._misses, self._silent_s = client, 0, 0.0
        self._over, self._ask_now = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{client.host}", daemon=True)
        self._thread.start()

    def is_silent_for(self, seconds: float) -> bool:
        """Whether it has answered none of several questions for so long."""
        return self._misses >= _MISSES and self._silent_s >= seconds

    def offset(self) -> ClockOffset | None:
        """How far the host's monotonic clock is ahead of this one's; None before its first answer."""
        estimate = self._estimate
        if estimate is None:
            return None
        return ClockOffset(estimate.clock_ns / 1e9, estimate.bound_ns(time.monotonic_ns()) / 1e9)

    def update(self, found: Estimate) -> None:
        """Keep the better of this estimate and the one before; warn once of a wall clock that is apart."""
        if self._estimate is None or found.half_ns <= self._estimate.bound_ns(found.at_ns):
            self._estimate = found
        if abs(found.wall_ns) - found.half_ns > _APART_S * 1e9 and not self._warned:
            self._warned = True
            log.warning(
                "the wall clock of host %s is %.1f s %s main's (± %.1f s): the times in its logs are, nothing else "
                "depends on it; set the clocks by NTP",
                *(self.host, abs(found.wall_ns) / 1e9, "ahead of" if found.wall_ns > 0 else "behind"),
                found.half_ns / 1e9,
            )

    def ask(self) -> None:
        """Ask at once, once more if a question is under way."""
        self._ask_now.set()

    def _run(self) -> None:
        """Consumes: answers of the host. Waits for: these, and time. Unblocked by: both, `ask` or `stop`. Produces:
        `answered`, how long it has been silent, and estimates of its clocks."""
        before = time.monotonic()
        while True:
            self._ask_now.clear()
            if self._over:
                return
            begin = time.monotonic()
            try:
                self.update(measure(self._client))
                self.answered, self._misses, self._silent_s = begin, 0, 0.0
            except (LookupError, ValueError):  # HostSilent, or an answer that is none
                self._silent_s += min(time.monotonic() - before, _MOST_S)
                self._misses += 1
                log.warning("host %s has not answered for %.0f s", self._client.host, self._silent_s)
            except zmq.ZMQError:
                return  # this process ends
            before = time.monotonic()
            self._ask_now.wait(_AGAIN_S if self._misses else _EVERY_S)

    def stop(self) -> None:
        """Ask no more; an answer that is waited for still is, or its limit."""
        self._over = True
        self._ask_now.set()

    def close(self) -> None:
        self.stop()
        self._thread.join()
        self._client.close()
