"""Interface that starts, watches and stops stations, and carries messages to and from them.

`runtime.inline` hosts them in this thread, `runtime.local` in processes of this machine. Another hosting, such as Ray
actors, needs an implementation of `Hosting` and nothing else: it has to pass
`tests/runtime/test_hosting_conformance.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from polyrhythm.runtime.hosts import ClockOffset
from polyrhythm.runtime.messages import Event, Joined, Order, Report, Spans
from polyrhythm.runtime.transport.drops import DROPPED


class StationView(Protocol):
    """A station as it is at the moment of each question; it may be asked by other threads. reachable: a command sent
    now would reach it, as it is not being replaced; host: where it works, "" if the run has one host; clock: the offset
    by which its last spans were shifted, if its host is another; processes: the id of each of its processes on this
    machine, by `rank_name`, empty if it has none of its own."""

    @property
    def reachable(self) -> bool: ...
    @property
    def host(self) -> str: ...
    @property
    def clock(self) -> ClockOffset | None: ...
    @property
    def processes(self) -> Mapping[str, int]: ...

    def current_call(self) -> str:
        """The call under way and its duration, in words; "" between two units of work."""

    def pending_work(self) -> Sequence[str]:
        """Unfinished work in words, as of the last `statistics` with it."""


class Hosting(Protocol):
    """Hosts the stations of one run, in the order in which it was given their factories. names: of the stations, in
    this order; work_done: rises while a station works or is being started; drops: messages dropped here, by kind.

    Invariants: commands reach a station in the order in which they were sent, and its events come in the order in which
    it emitted them. A command reaches only the incarnation whose announcement `receive` has returned. After
    `StationLost` no event of that incarnation comes, and what ran it can no longer write to the run's memory; until
    then, what it had sent before is still received. The next incarnation's announcement comes after `StationLost`.
    """

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def work_done(self) -> int: ...
    @property
    def drops(self) -> Mapping[str, int]: ...

    def start(self) -> list[Joined]:
        """Start all stations and wait until each is ready; their announcements, in order. RunHalted: one cannot be."""

    def station(self, name: str) -> StationView: ...

    def send(self, station: str, command: Order, slot: str = "") -> None:
        """Send a command to the station, or to its part that has the slot. Nothing is sent to a station that is being
        replaced: its work comes back with its `StationLost`."""

    def receive(self, timeout: float) -> Event | None:
        """The next event, or None after `timeout` seconds; with 0, None only if nothing that has come is an event.

        Never waits for a station that is being ended. RunHalted: failures of stations end the run.
        """

    def reports(self) -> list[Report]:
        """The reports since the last call, oldest first."""

    def set_tracing(self, on: bool) -> None:
        """Whether stations, later ones included, measure spans."""

    def spans(self) -> list[Spans]:
        """The spans measured since the last call; all until now after a fresh `statistics`."""

    def statistics(self, *, fresh: bool = False, pending_work: bool = False) -> dict[str, dict[str, float]]:
        """Each station's counters with `busy_s`, over all its incarnations, as last heard. fresh: asks all stations for
        them, and for their pending work if that is wanted, and waits for the answers, for a few seconds at most."""

    def close(self) -> None:
        """End all stations; nothing of them is left. A second call does nothing."""


def process_ids(hosting: Hosting) -> dict[str, int]:
    """The process id of each station, and of each further rank of one by `rank_name`, on this machine."""
    return {process: pid for name in hosting.names for process, pid in hosting.station(name).processes.items()}


def station_hosts(hosting: Hosting) -> dict[str, str]:
    """The host where each station works; empty if the run has one host."""
    return {name: host for name in hosting.names if (host := hosting.station(name).host)}


def pending_work(hosting: Hosting) -> list[str]:
    """Unfinished work of all stations, in words, for a stall report: asks them and waits. What several ranks say alike
    is there once."""
    hosting.statistics(fresh=True, pending_work=True)
    return list(dict.fromkeys(line for name in hosting.names for line in hosting.station(name).pending_work()))


def dropped_messages(hosting: Hosting) -> dict[str, int]:
    """Messages that were dropped so far, by kind, here and in all stations as last heard."""
    counts = Counter(hosting.drops)
    for station in hosting.statistics().values():
        counts.update({n.removeprefix(DROPPED): int(c) for n, c in station.items() if n.startswith(DROPPED)})
    return dict(counts)
