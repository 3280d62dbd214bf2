"""The contract of whoever hosts stations: starts them, watches them, carries messages to and from them, ends them.

`runtime.inline` hosts them in this thread, `runtime.local` in processes of this machine. Another way, such as Ray
actors or processes that somebody else has started, needs an implementation of `Hosting` and nothing else: it has to
pass `tests/runtime/test_hosting_conformance.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from polyrhythm.runtime.clocks import ClockOffset
from polyrhythm.runtime.messages import Event, Joined, Order, Report, Spans


class Hosting(Protocol):
    """Hosts the stations of one run, in the order in which it was given their factories.

    Invariants: commands reach a station in the order in which they were sent, and its events come in the order in which
    it emitted them. A command reaches only the incarnation whose announcement `receive` has returned. After
    `StationLost` no event of that incarnation comes, and what ran it can no longer write to the run's memory; until
    then, what it had sent before is still received. The next incarnation's announcement comes after `StationLost`.
    """

    def start(self) -> list[Joined]:
        """Start all stations and wait until each is ready; their announcements, in order. RunHalted: one cannot be."""
        ...

    def reaches(self, station: str) -> bool:
        """Whether a command sent now would reach the station: it is not being replaced."""
        ...

    def send(self, station: str, command: Order, slot: str = "") -> None:
        """Send a command to the station, or to its part that has the slot. Where the station is being replaced nothing
        is sent: what it was to do comes back with its `StationLost`."""
        ...

    def receive(self, timeout: float) -> Event | None:
        """The next event, or None after `timeout` seconds; with 0, None only if nothing that has come is an event.

        Never waits for a station that is being ended. RunHalted: failures of stations end the run.
        """
        ...

    def reports(self) -> list[Report]:
        """The reports since the last call, oldest first."""
        ...

    def measure_spans(self, on: bool) -> None:
        """Whether stations, later ones included, measure what they do."""
        ...

    def take_spans(self) -> list[Spans]:
        """What they measured since the last call; all until now if `statistics` was called before."""
        ...

    def clocks(self) -> Mapping[str, ClockOffset]:
        """How far the clock of each other host is ahead, by which the spans of its stations were shifted."""
        ...

    def hosts(self) -> Mapping[str, str]:
        """The host where each station works; empty if the run has one host."""
        ...

    def work_done(self) -> int:
        """Rises while a station does its work or is being started."""
        ...

    def pending_work(self) -> list[str]:
        """What stations have not finished, in words, for a stall report."""
        ...

    def current_call(self, station: str) -> str:
        """What the station is doing, and for how long, in words; "" between two units of work."""
        ...

    def statistics(self) -> dict[str, dict[str, float]]:
        """Each station's counters with `busy_s`, over all its incarnations, as fresh as possible: may ask and wait."""
        ...

    def latest(self) -> dict[str, dict[str, float]]:
        """The same as last heard: cheap, asks nobody."""
        ...

    def dropped(self) -> dict[str, int]:
        """Messages that were dropped so far, by kind, here and in all stations as last heard."""
        ...

    def processes(self) -> dict[str, int]:
        """The process id of each station that has a process of its own on this machine."""
        ...

    def close(self) -> None:
        """End all stations; nothing of them is left. A second call does nothing."""
        ...
