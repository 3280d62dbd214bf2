"""A process's memory of its run: the arena and the weights of its host, and what it reads of others.

    <folder>/arena             samples
    <folder>/weights           published weights

Where a run has one host, `ProcessMemory` is all there is. The spec of a process names any other class.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.plugin import import_address
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm.specs.weights import WeightsLayout

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.device_weights import DeviceWeights
    from polyrhythm.runtime.memory.published import Ends
    from polyrhythm.runtime.memory.weights import SharedWeights, Weights

log = logging.getLogger(__name__)

ARENA, WEIGHTS = "arena", "weights"
#: How the name of a file ends by which the ranks of an incarnation meet; the address of rank 0's inbox goes before.
RANKS = ".ranks"


class ProcessMemory:
    """A process's end of the memory of a run that has one host. folder: of the run on this host; host: its name, "" if
    the run has one; address: by which other hosts reach it; ranks: host and address of each rank of this process's
    station, () if the run has one host; clients: connections to the servers of the other hosts."""

    host, address = "", LOOPBACK
    ranks: Sequence[tuple[str, str]] = ()

    def __init__(self, layout: ArenaLayout, weights: WeightsLayout, folder: Path) -> None:
        self._layout, self._weights, self.folder = layout, weights, folder
        self.clients: Mapping[str, Any] = {}

    def arena(self) -> Arena:
        return Arena(self._layout, memoryview(open_segment(self.folder, ARENA)))

    def weights(self, device: str, ends: Ends | None, local: str = CPU) -> Weights:  # noqa: ARG002
        """This process's end of the weights channel, for a station on `device` of the run, which torch calls `local`.
        ValueError: the layout is damaged."""
        self._weights.verify()
        return open_weights(self._weights, memoryview(open_segment(self.folder, WEIGHTS)), self.folder, device, ends)

    def find_meeting(self, host: str, name: str) -> bytes:  # noqa: ARG002
        """What rank 0 of a station has written into this file of the run's folder on its host, so that the other ranks
        find it; b"" while it has not, or its host does not answer."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return b""

    def add_host(self, host: str, endpoint: str) -> None:
        """The run has another host. UnfitMessage: there can be none of this name, or not there."""
        raise UnfitMessage("impossible", f"no other host of this run is {host!r} at {endpoint!r}")

    def move_slots(self, host: str, slots: Sequence[str]) -> None:
        """Requests of these slots lie on this host now. UnfitMessage: there is no such host."""

    def is_cut_off(self) -> bool:
        """Whether main's host has been silent for so long that this process has been given up."""
        return False

    def close(self) -> None: ...


def open_memory(
    layout: ArenaLayout, weights: WeightsLayout, folder: Path, view: HostView | None, sockets: Sockets
) -> ProcessMemory:
    """A process's memory. view: of the run's hosts, None if it has one; sockets: of the process."""
    if view is None:
        return ProcessMemory(layout, weights, folder)
    memory: ProcessMemory = import_address(view.memory)(layout, weights, folder, view, sockets)
    return memory


def open_weights(
    layout: WeightsLayout,
    memory: memoryview,
    folder: Path,
    device: str,
    ends: Ends | None,
) -> SharedWeights | DeviceWeights:
    """The end of a process on `device` of the run. memory, folder: see `SharedWeights`; ends: where all ends are, None:
    not known, so the host's memory alone. The process's log says which way it takes and why."""
    # torch, which simulators do not need
    from polyrhythm.runtime.memory.device_weights import DeviceWeights, can_reach, handles_of
    from polyrhythm.runtime.memory.published import choose_way, keeps_copy
    from polyrhythm.runtime.memory.weights import SharedWeights

    host = SharedWeights(layout, memory, folder)

    def reaches(own: str, other: str) -> bool:
        names = ends.local if ends is not None else {}
        return can_reach(names.get(own, own), names.get(other, other))

    if ends is None or CPU in (device, ends.trainer) or ends.host_only:
        return host
    choice = choose_way(ends, device, reaches)
    log.info("weights at %s: %s, because %s", device, choice.way, choice.why)
    if choice.way == "host":
        return host
    shared = handles_of(ends.trainer, folder, ends.local.get(ends.trainer, ""), one_process=ends.one_process)
    return DeviceWeights(host, folder, shared, choice.way, keeps=keeps_copy(ends, reaches))
