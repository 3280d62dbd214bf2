"""How a station is made: a factory is plain data, so it can make its station in this process or in another.

A factory travels as the name of its class, module:Class, and its content in MessagePack. The class is imported where
the station is made, and so is what that module imports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from polyrhythm.plugin import import_address
from polyrhythm.runtime.devices import CPU, is_simulated
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.published import Ends
from polyrhythm.runtime.messages import Channels, Joined, Station

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.observed import DeviceSeat
    from polyrhythm.runtime.memory.prefixes import PrefixSeat
    from polyrhythm.runtime.memory.process_memory import ProcessMemory
    from polyrhythm.runtime.memory.weights import Weights


@dataclass(frozen=True, slots=True)
class Resources:
    """What a process gets: device (`runtime.devices`: cpu, cuda:N or sim:N), threads per operation, environment
    variables.

    node: where it has to be, "" for anywhere; local: what the device is called there, "" if it has the same name.
    ends: where published weights come from and go to, if it is one of them. wrapper: the function, `module:name`, that
    makes the station's parts in place of its factory (`make_parts`), "" for none. leases: numbers of the devices that
    it is on in turn with others; offload: folder for what it keeps there meanwhile, on the CPU. process: a station in
    whose process it works beside others of this name, "" for a process of its own.
    """

    device: str = "cpu"
    threads: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    node: str = ""
    local: str = ""
    ends: Ends | None = None
    wrapper: str = ""
    leases: tuple[int, ...] = ()
    offload: str = ""
    process: str = ""

    @property
    def torch_device(self) -> str:
        """The device by the name that torch has for it in this process."""
        return CPU if is_simulated(self.device) else self.local or self.device


@dataclass(frozen=True, slots=True)
class StationContext:
    """What a process offers to its station. weights: opens this process's end of the weights channel, which imports
    torch; overlap: whether the station may use threads of its own; rank, ranks: which of how many processes of the
    station this one is; rendezvous: a file that does not exist yet, by which the ranks of this incarnation meet, all of
    them by the time `ready_by` of the monotonic clock. memory: this process's memory of the run, None where all
    stations share one process. seat: the device's name in the run; device: torch's name. announced: the station leases
    its devices, so it joined before it was made, and does nothing that the conductor has not asked for."""

    arena: Arena
    weights: Callable[[], Weights]
    channels: Channels
    device: str = "cpu"
    overlap: bool = False
    rank: int = 0
    ranks: int = 1
    rendezvous: Path | None = None
    ready_by: float = math.inf
    announced: bool = False
    memory: ProcessMemory | None = None
    seat: str = "cpu"

    @property
    def device_seat(self) -> DeviceSeat | None:
        """Where observations on this process's device are exchanged; None on the CPU, or in the run's own process."""
        if self.memory is None or self.seat == CPU:
            return None
        from polyrhythm.runtime.memory.observed import DeviceSeat  # torch

        return DeviceSeat(self.memory.folder, self.seat, self.device)

    @property
    def prefix_seat(self) -> PrefixSeat:
        """Where generators lend prefixes to a trainer on the same device."""
        from polyrhythm.runtime.memory.prefixes import PrefixSeat  # torch

        if self.memory is None:  # all stations have one arena
            return PrefixSeat(f"process {id(self.arena)}", shared=False, device=self.device, local=self.device)
        return PrefixSeat(str(self.memory.folder), shared=True, device=self.seat, local=self.device)


@dataclass(frozen=True, slots=True)
class Joining:
    """stations: those that somebody has yet to join (`StationTraits.attend`); needed: how many of them must have been
    joined before the run starts."""

    stations: frozenset[str] = frozenset()
    needed: int = 0


NOBODY_JOINS = Joining()


class StationFactory(Protocol):
    """Makes the parts of one station. Plain data: MessagePack can encode it. One whose process takes long to import
    names the modules in an attribute, `preload`: processes that import the same may start from one that has."""

    @property
    def name(self) -> str: ...

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        """The station's parts, each as its address and a function that makes it. In a process of its own, each part is
        made in its own thread and works there."""

    def announcements(self, incarnation: int) -> Sequence[Joined]:
        """What the parts will announce, without making them: a station that leases its devices is made when it first
        is on them."""


#: The stations of a run: the factory of each, and the resources of each of its ranks, one at least.
StationList = Sequence[tuple[StationFactory, *tuple[Resources, ...]]]


def make_parts(
    factory: StationFactory, context: StationContext, incarnation: int, resources: Resources
) -> Sequence[tuple[str, Callable[[], Station]]]:
    """The station's parts, made by its factory, or by the wrapper of its seat, which is called with these arguments."""
    if not resources.wrapper:
        return factory.parts(context, incarnation)
    parts: Sequence[tuple[str, Callable[[], Station]]] = import_address(resources.wrapper)(
        factory, context, incarnation, resources
    )
    return parts


def pack(factory: StationFactory) -> tuple[str, bytes]:
    kind = type(factory)
    return f"{kind.__module__}:{kind.__qualname__}", msgspec.msgpack.encode(factory)


def unpack(kind: str, content: bytes) -> StationFactory:
    factory: StationFactory = msgspec.msgpack.decode(content, type=import_address(kind))
    return factory
