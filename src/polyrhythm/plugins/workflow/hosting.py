"""Opens the hosting of a workflow's workers, by launcher; it is the hosting of the pipeline's stations.

A workflow has no samples and no weights, so the arena that every process opens has one empty block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from polyrhythm.plugins.cluster.hosts.agent import Node
from polyrhythm.plugins.cluster.hosts.build import StationNodes, open_hosts
from polyrhythm.plugins.cluster.parcels import KeptParcels, Parcels, SharedParcels
from polyrhythm.plugins.workflow.station import WorkerBeside, WorkerFactory
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import Resources, StationList
from polyrhythm.runtime.hosting import Hosting
from polyrhythm.runtime.hosts import MAIN
from polyrhythm.runtime.inline import InlineHosting
from polyrhythm.runtime.local import LocalHosting, RunMemory, RunSockets
from polyrhythm.runtime.memory.arena import ArenaLayout, in_memory
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.transport.sockets import LOOPBACK, Transport
from polyrhythm.specs import WeightsLayout

Launcher = Literal["inline", "local", "ray"]
LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
NO_WEIGHTS = WeightsLayout.of({})


@dataclass(frozen=True)
class Limits:
    """`SupervisionLimits` of a workflow: no failure is survived, and calls have no time limit while their process
    lives. heartbeat_s, start_s: as in the section supervision."""

    heartbeat_s: float = 20.0
    start_s: float = 300.0
    reset_s: float = math.inf
    step_s: float = math.inf
    pass_s: float = math.inf
    update_s: float = math.inf
    score_s: float = math.inf
    max_failures: int = 0
    max_start_failures: int = 0
    forgive_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Opened:
    """waker: makes the object that interrupts the hosting's `receive`, if it has its own thread; undo:
    closed after the hosting."""

    hosting: Hosting
    parcels: Parcels
    waker: Callable[[], Callable[[], None]] | None
    undo: ExitStack


def open_inline(stations: Sequence[tuple[WorkerFactory, Resources]]) -> Opened:
    """All workers in this process, taking turns."""
    parcels = KeptParcels()
    workers = [(WorkerBeside(factory, parcels), seat) for factory, seat in stations]
    hosting = InlineHosting(workers, in_memory(LAYOUT), cast(Any, None))
    return Opened(hosting, parcels, None, ExitStack())


def open_local(stations: StationList, limits: Limits, logs: Path, transport: Transport) -> Opened:
    """Each worker in a process of this machine. StartError: it lacks something; nothing is left running."""
    with ExitStack() as undo:
        folder = SharedRunFolder({"arena": LAYOUT.nbytes})
        undo.callback(folder.remove)
        memory = RunMemory(InFlight(LAYOUT), NO_WEIGHTS, folder.folder)
        hosting = LocalHosting(stations, memory, limits, logs, network=RunSockets(transport))
        return Opened(hosting, SharedParcels(folder.folder, "driver"), hosting.waker, undo.pop_all())


def open_on_nodes(
    stations: StationList,
    limits: Limits,
    logs: Path,
    nodes: Mapping[str, Node],
    address: str = LOOPBACK,
    leave: Callable[[], None] = lambda: None,
) -> Opened:
    """Each worker in a process on its node. address: of this machine for the nodes; leave: called at the end.
    StartError: a node lacks something; nothing is left running."""
    hosts = open_hosts(stations, LAYOUT, NO_WEIGHTS, limits, logs, StationNodes(address, nodes, {}, leave=leave))
    parcels = SharedParcels(hosts.folder.folder, "driver", MAIN, hosts.memory.clients)
    undo = ExitStack()
    undo.callback(hosts.folder.remove)
    undo.callback(hosts.undo.close)
    return Opened(hosts.hosting, parcels, hosts.hosting.waker, undo)


def open_ray(stations: StationList, limits: Limits, logs: Path, settings: Mapping[str, Any]) -> Opened:
    """Each worker in an actor of a Ray cluster. settings: of the section `ray`. StartError: the cluster does not exist
    or lacks room; nothing is left running."""
    from polyrhythm.config.sections.running import RaySettings
    from polyrhythm.plugins.cluster.ray.cluster import Cluster

    seats = {factory.name: own[0] for factory, *own in stations}
    devices = {seat.device for seat in seats.values()} - {CPU}
    cluster = Cluster(RaySettings(**settings), seats, logs, len(devices))
    return open_on_nodes(stations, limits, logs, cluster.nodes, cluster.address, cluster.close)
