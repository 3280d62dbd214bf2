"""What stations and launchers say to each other beside the conductor's records, and what a station is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from polyrhythm.flow import records

#: Names in `Reply.arrays`; each of the policy's forward inputs is there as `FORWARD_INPUTS + name`.
ACTIONS = "actions"
LOGPROB = "logprob"
VALUE = "value"
FORWARD_INPUTS = "forward_inputs."


@dataclass(frozen=True, slots=True)
class Reply:
    """A generator's answer to one request: arrays [n, ...] for the request's n active rows, in row order.

    sequence: the request's, so that a late answer is recognised; version: the weights that computed it.
    The arrays may be overwritten after `deliver` returns.
    """

    slot: str
    sequence: int
    version: int
    arrays: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers for the observers, past the conductor: `topic` says of what, `step` which one."""

    station: str
    topic: str
    step: int
    values: Mapping[str, float]


class Station(Protocol):
    """A worker that obeys commands, one unit of work at a time. `name` is what commands address."""

    name: str

    def handle(self, command: records.Command) -> None:
        """Accept a command; cheap, never blocks."""
        ...

    def work(self) -> bool:
        """Do one unit of work; False if there was none."""
        ...

    def outstanding(self) -> list[str]:
        """What it has not finished, in words, for a stall report."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counters since the start, for the run's summary."""
        ...

    def close(self) -> None:
        """Free everything; called once."""
        ...
