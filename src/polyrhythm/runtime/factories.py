"""A station to be made: described as plain data, so that it can be made in this process or in another.

A job's class is named as module:Class and found in the process that does the job; what it imports is imported there
alone. The content is MessagePack of the job itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import Channels, Station

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.weights import Weights


@dataclass(frozen=True, slots=True)
class Resources:
    """Where a station works: device (cpu or cuda:N), threads per operation, variables of its process's environment."""

    device: str = "cpu"
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StationContext:
    """What a process offers to its station. weights: opens this process's end of the weights channel, which imports
    torch; overlap: threads may be used."""

    arena: Arena
    weights: Callable[[], Weights]
    links: Channels
    device: str = "cpu"
    overlap: bool = False


class StationFactory(Protocol):
    """A station to be made."""

    @property
    def name(self) -> str: ...

    def parts(self, host: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        """The station's parts, each with the address of its inbox; a part is made and works in a thread of its own."""
        ...


def pack(job: StationFactory) -> tuple[str, bytes]:
    """The job's class and content."""
    kind = type(job)
    return f"{kind.__module__}:{kind.__qualname__}", msgspec.msgpack.encode(job)


def unpack(kind: str, content: bytes) -> StationFactory:
    """The job that `pack` described."""
    module, _, name = kind.partition(":")
    job: StationFactory = msgspec.msgpack.decode(content, type=getattr(importlib.import_module(module), name))
    return job
