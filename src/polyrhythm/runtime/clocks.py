"""How far the clocks of other hosts are ahead of main's, from round trips to their agents.

Monotonic clocks begin when a machine is started, so those of two machines differ by any time; what a station of another
host measured is shifted to main's clock. The agent reads its clock between our sending and our receiving, so half the
round trip bounds the error. Of several round trips the shortest counts. Between two exchanges the bound grows by what
two clocks may drift apart.

Wall clocks decide nothing in a run. Where they are apart, the times in the logs of that host are, which is warned of.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import msgspec
import zmq

from polyrhythm.plugins.cluster.hosts.client import DataClient, client_of
from polyrhythm.runtime import questions as q
from polyrhythm.runtime.messages import Spans
from polyrhythm.runtime.transport.sockets import Sockets

log = logging.getLogger(__name__)

#: Seconds between two exchanges with a host; of the exchanges with all hosts, of each at least.
_EVERY_S, _EACH_S = 10.0, 0.1
#: Round trips of an exchange.
_TRIPS = 6
#: Seconds that an answer may take.
_ANSWER_S = 1.0
#: Seconds a second by which two monotonic clocks drift apart at most: that of quartz, where nothing disciplines them.
_DRIFT = 100e-6
#: Seconds by which wall clocks may be apart unmentioned: lines of logs have whole seconds.
_APART_S = 2.0
_decode = msgspec.msgpack.Decoder(tuple[int, int]).decode


class ClockOffset(NamedTuple):
    """A host's monotonic clock is ahead_s ahead of main's (negative: behind), ± uncertainty_s."""

    ahead_s: float
    uncertainty_s: float

    def __str__(self) -> str:
        where = "ahead of" if self.ahead_s >= 0 else "behind"
        return f"{abs(self.ahead_s):.6f} s {where} main's, ± {1000 * self.uncertainty_s:.2g} ms"


SAME = ClockOffset(0.0, 0.0)


class Estimate(NamedTuple):
    """Of one exchange. clock_ns, wall_ns: how far the two clocks are ahead of main's; half_ns: the bound of both;
    at_ns: when, by main's monotonic clock."""

    clock_ns: int
    wall_ns: int
    half_ns: int
    at_ns: int

    def bound_ns(self, now_ns: int) -> float:
        """The bound at another time."""
        return self.half_ns + _DRIFT * (now_ns - self.at_ns)


def measure(client: DataClient, trips: int = _TRIPS, clock: Callable[[], int] = time.monotonic_ns) -> Estimate:
    """The estimate of the shortest of these round trips. LookupError: no answer in time; ValueError: it is none."""
    found = []
    for _ in range(trips):
        wall_before, before = time.time_ns(), clock()
        (content,) = client.ask(q.Clock())
        after = clock()
        theirs, wall = _decode(content)
        half = (after - before + 1) // 2
        found.append(Estimate(theirs - before - half, wall - wall_before - half, half, after))
    return min(found, key=lambda estimate: estimate.half_ns)


def ask_clock(sockets: Sockets, host: str, endpoint: str) -> DataClient:
    """A connection to a host's server that waits for an answer no longer than a clock is worth."""
    return client_of(sockets, host, endpoint, _ANSWER_S)


class HostClocks:
    """Asks all hosts but main's, one after another, in a thread of its own, from `start` to `close`.

    lost: hosts that are asked no more. every_s: between two exchanges.
    """

    def __init__(self, lost: Collection[str] = (), every_s: float = _EVERY_S) -> None:
        self._lost, self._every_s = lost, every_s
        self._clients: dict[str, DataClient] = {}
        self._estimates: dict[str, Estimate] = {}
        self._warned: set[str] = set()
        self._news = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="host-clocks", daemon=True)

    def add(self, host: str, client: DataClient) -> None:
        """Ask this host too. client: for this alone, closed by `close`."""
        self._clients[host] = client
        self._news.set()

    def start(self) -> None:
        self._thread.start()

    def offset_of(self, host: str) -> ClockOffset | None:
        """How far a host's clock is ahead; None while nothing is known of it."""
        if host == q.MAIN:
            return SAME
        estimate = self._estimates.get(host)
        if estimate is None:
            return None
        return ClockOffset(estimate.clock_ns / 1e9, estimate.bound_ns(time.monotonic_ns()) / 1e9)

    def _run(self) -> None:
        """Consumes: answers of the hosts' agents. Waits for: these, and time. Unblocked by: both, another host, or
        `close`. Produces: estimates, and a warning where wall clocks are apart."""
        while not self._over:
            self._news.clear()
            for host, client in list(self._clients.items()):
                if self._over:
                    return
                if host not in self._lost:
                    self._ask(host, client)
            self._news.wait(max(self._every_s, _EACH_S * len(self._clients)))

    def _ask(self, host: str, client: DataClient) -> None:
        """Of a host that is silent the last estimate stays."""
        try:
            found = measure(client)
        except (LookupError, ValueError, zmq.ZMQError) as error:
            log.debug("the clock of host %s: %s", host, error)
        else:
            self.note(host, found)

    def note(self, host: str, found: Estimate) -> None:
        """Keep the better of this estimate and the one before; warn once of a wall clock that is apart."""
        before = self._estimates.get(host)
        if before is None or found.half_ns <= before.bound_ns(found.at_ns):
            self._estimates[host] = found
        if abs(found.wall_ns) - found.half_ns > _APART_S * 1e9 and host not in self._warned:
            self._warned.add(host)
            log.warning(
                "the wall clock of host %s is %.1f s %s main's (± %.1f s): the times in its logs are, nothing else "
                "depends on it; set the clocks by NTP",
                *(host, abs(found.wall_ns) / 1e9, "ahead of" if found.wall_ns > 0 else "behind", found.half_ns / 1e9),
            )

    def close(self) -> None:
        """Ask no more; an answer that is waited for still is, or its limit."""
        self._over = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join()
        for client in self._clients.values():
            client.close()


class SpanAlignment:
    """Shifts what stations measured to main's clock. clocks: of the run's hosts, None if it has one. used: the offset
    of each host by which its last spans were shifted."""

    def __init__(self, clocks: HostClocks | None) -> None:
        self._clocks = clocks
        self.used: dict[str, ClockOffset] = {}
        self._unknown: set[str] = set()

    def align(self, spans: Spans, host: str) -> tuple[Spans, float]:
        """The spans by main's clock, and the bound of the error in seconds; none of them where nothing is known of the
        host's clock, which the log says once."""
        if self._clocks is None or host == q.MAIN:
            return spans, 0.0
        offset = self._clocks.offset_of(host)
        if offset is None:
            if host not in self._unknown:
                self._unknown.add(host)
                log.warning(
                    "host %s has not said what its clock shows: what its stations do is missing in the timeline until "
                    "it has",
                    host,
                )
            return replace(spans, spans=(), lost=0), 0.0
        self.used[host] = offset
        moved = (
            span._replace(begin=span.begin - offset.ahead_s, end=span.end - offset.ahead_s) for span in spans.spans
        )
        return replace(spans, spans=tuple(moved)), offset.uncertainty_s
