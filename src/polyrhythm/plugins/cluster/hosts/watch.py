"""Whether a host can be reached, and what its clocks show: its agent is asked again and again, in a thread of its own.

Main asks the agents of all other hosts, and gives up one that is silent. The processes and agents of other hosts ask
main's: one that cannot reach it has been given up, or will be; it must not live on for ever, and whoever started it may
not be able to end it. Agents answer and not main, so a main that is busy or stopped is not silent.

The agent reads its clocks between the sending of the question and the receiving of the answer, so half the round trip
bounds the error of their offset, however uneven the two ways are. Until a better estimate comes the bound grows by what
two clocks may drift apart. Wall clocks decide nothing in a run: where they are apart, the times in the logs of that
host are, which is warned of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.runtime.hosts import ClockOffset

log = logging.getLogger(__name__)

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
