"""A process's memory of its run: the arena and the weights of its host, and what it reads of others.

    <folder>/arena             samples
    <folder>/weights           published weights

Where a run has one host, `LocalMemory` is all there is. The spec of a process names any other class.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from polyrhythm.plugin import import_address
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs.weights import WeightsLayout

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.published import Ends
    from polyrhythm.runtime.memory.weights import Weights

log = logging.getLogger(__name__)

ARENA, WEIGHTS = "arena", "weights"


class ProcessMemory(Protocol):
    """A process's end of the run's memory. folder: of the run on this host; host: its name, "" if the run has one;
    clients: connections to the servers of the other hosts."""

    folder: Path
    host: str
    clients: Mapping[str, Any]

    def arena(self) -> Arena: ...

    def weights(self, device: str, ends: Ends | None) -> Weights:
        """This process's end of the weights channel, for a station on `device`. ValueError: the layout is damaged."""
        ...

    def add_host(self, host: str, endpoint: str) -> None:
        """The run has another host. UnfitMessage: there can be none of this name, or not there."""
        ...

    def move_slots(self, host: str, slots: Sequence[str]) -> None:
        """Requests of these slots lie on this host now. UnfitMessage: there is no such host."""
        ...

    def is_cut_off(self) -> bool:
        """Whether main's host has been silent for so long that this process has been given up."""
        ...

    def close(self) -> None: ...


class LocalMemory:
    """The memory of a run that has one host."""

    host = ""

    def __init__(self, layout: ArenaLayout, weights: WeightsLayout, folder: Path) -> None:
        self._layout, self._weights, self.folder = layout, weights, folder
        self.clients: Mapping[str, Any] = {}

    def arena(self) -> Arena:
        return Arena(self._layout, memoryview(open_segment(self.folder, ARENA)))

    def weights(self, device: str, ends: Ends | None) -> Weights:
        self._weights.verify()
        return open_weights(self._weights, memoryview(open_segment(self.folder, WEIGHTS)), self.folder, device, ends)

    def add_host(self, host: str, endpoint: str) -> None:
        raise UnfitMessage("impossible", f"no other host of this run is {host!r} at {endpoint!r}")

    def move_slots(self, host: str, slots: Sequence[str]) -> None: ...

    def is_cut_off(self) -> bool:
        return False

    def close(self) -> None: ...


def open_memory(
    layout: ArenaLayout, weights: WeightsLayout, folder: Path, view: HostView | None, sockets: Sockets
) -> ProcessMemory:
    """A process's memory. view: of the run's hosts, None if it has one; sockets: of the process."""
    if view is None:
        return LocalMemory(layout, weights, folder)
    memory: ProcessMemory = import_address(view.memory)(layout, weights, folder, view, sockets)
    return memory


def open_weights(layout: WeightsLayout, memory: memoryview, folder: Path, device: str, ends: Ends | None) -> Weights:
    """The end of a process on `device` (cpu or cuda:N). memory, folder: see `SharedWeights`; ends: where all ends are,
    None: not known, so the host's memory alone. The process's log says which way it takes and why."""
    from polyrhythm.runtime.memory.device_weights import (  # torch, which simulators do not need
        CudaHandles,
        DeviceWeights,
        can_reach,
    )
    from polyrhythm.runtime.memory.published import CPU, choose_way, keeps_copy
    from polyrhythm.runtime.memory.weights import SharedWeights

    host = SharedWeights(layout, memory, folder)
    if ends is None or CPU in (device, ends.trainer) or ends.host_only:
        return host
    choice = choose_way(ends, device, can_reach)
    log.info("weights at %s: %s, because %s", device, choice.way, choice.why)
    if choice.way == "host":
        return host
    return DeviceWeights(host, folder, CudaHandles(ends.trainer), choice.way, keeps=keeps_copy(ends, can_reach))


#: Parameters of glibc's `mallopt`: name → (number of the parameter, value).
_SETTINGS = {"M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 256 << 20), "M_ARENA_MAX": (-8, 1)}


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 32 MiB in this process for reuse; True if that was set. Call it before threads start.

    By default glibc returns blocks of some megabytes, such as a small policy's activations, to the system at once; the
    next step then pays a page fault for each page of them. The price is memory: the process keeps its peak. All threads
    share one heap, because glibc trims other heaps whatever is set here. Nothing changes where the C library is not
    glibc, or where the environment sets the allocator (MALLOC_…, GLIBC_TUNABLES).
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(number, value) == 1 for number, value in _SETTINGS.values())
