"""Carries the conductor's commands to stations and their events back, and puts the blocks of samples into grants.

A launcher joins a `Hosting` (where stations live), `ArenaPayloads` (where their samples live) and a weights channel.
A sample lies in a block for each attempt, named by a payload id, until it is released:

    put, or written by a simulator  →  read in place, by anybody who shares the memory  →  released

A payload id is `block` for a block of this host, or `host/block`. `ArenaPayloads` knows one host and refuses to read
others' blocks; `plugins.cluster.hosts.directory.HostedPayloads` fetches them.

Invariant: no block is given out while a station that may write to it lives. A station's blocks are freed by its
`StationLost`, which the hosting returns only when nothing of the station is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from polyrhythm.runtime.factories import NOBODY_JOINS, Joining, StationList
from polyrhythm.runtime.hosting import Hosting
from polyrhythm.runtime.inline import InlineHosting
from polyrhythm.runtime.local import LocalHosting, RunMemory, RunSockets
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.messages import WorkerJoined
from polyrhythm.runtime.processes.incarnation import SupervisionLimits
from polyrhythm.runtime.processes.template import Template
from polyrhythm.runtime.processes.together import SharingSpawn
from polyrhythm.runtime.transport.sockets import Transport
from polyrhythm.scheduler import records
from polyrhythm.specs import Trajectory, WeightsLayout

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.weights import Weights


class ArenaPayloads:
    """The samples of one run as the main process sees them: in the blocks of one arena in `memory`, which every station
    of this host shares. in_flight: the owner of each block.

    Invariant: a block that was assigned or that holds a finished sample is not assigned again before it is free.
    """

    def __init__(self, in_flight: InFlight, memory: memoryview | bytearray) -> None:
        self.layout, self.in_flight, self.arena = in_flight.layout, in_flight, Arena(in_flight.layout, memory)

    @classmethod
    def in_memory(cls, layout: ArenaLayout) -> ArenaPayloads:
        return cls(InFlight(layout), bytearray(layout.nbytes))

    def assign(self, command: records.StartRows) -> records.StartRows:
        """The command with a block in each grant."""
        return self.in_flight.assign(command)

    def on_event(self, event: records.Event) -> None:
        """An event is passed on to the conductor: a sample is finished or failed, or a station that wrote is gone."""
        self.in_flight.on_event(event)

    def release(self, payload_ids: Iterable[str]) -> None:
        """These samples are not needed any more; KeyError if one is not finished."""
        self.in_flight.release(payload_ids)

    def take_lost(self) -> records.PayloadsLost | None:
        """Finished samples that nobody can read any more, which the conductor does not know of yet; asked before every
        event."""
        return None

    def locate(self, payload_ids: Sequence[str]) -> tuple[str, ...]:
        """The same payloads by the names that stations of any host know."""
        return tuple(payload_ids)

    def put(self, payload_id: str, trajectory: Trajectory) -> None:
        """Write a finished sample into the block, as it was read from another."""
        self.arena.store(self.arena.block_of(payload_id), trajectory)

    def read(self, payload_id: str) -> Trajectory:
        """The finished sample, in place: valid until it is released. LookupError: it does not lie here."""
        return self.arena.read(payload_id)


@dataclass(frozen=True, slots=True)
class Launcher:
    """weights: main's end of the weights channel; shared: the folder of memory and sockets, None in one process; it is
    removed by `close`; undo: closed by it before that."""

    hosting: Hosting
    payloads: ArenaPayloads
    weights: Weights
    clock: Callable[[], float] = time.monotonic
    shared: SharedRunFolder | None = None
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def folder(self) -> Path | None:
        """Where memory and sockets of the run lie; None in one process."""
        return self.shared.folder if self.shared is not None else None

    def start(self) -> list[records.StationJoined]:
        """Start all stations; their announcements, in order. RunHalted: one of them cannot be started."""
        joined = self.hosting.start()
        return [station for station in joined if not isinstance(station, WorkerJoined)]  # a pipeline has no workers

    def send(self, command: records.Command) -> None:
        """Hand a command to the station that it addresses; `ReleasePayloads` frees blocks."""
        match command:
            case records.Serve(generator=station):  # first: the most frequent
                self.hosting.send(station, command)
            case records.ReleasePayloads(payload_ids):
                self.payloads.release(payload_ids)
            case records.StartUpdate(trainer=station):
                located = self.payloads.locate(command.payload_ids)
                self.hosting.send(station, replace(command, payload_ids=located))
            case records.ScoreSample(scorer=station, payload_id=payload_id):
                self.hosting.send(station, replace(command, payload_id=self.payloads.locate((payload_id,))[0]))
            case records.StartRows(simulator=station, slot=slot):
                if self.hosting.station(station).reachable:
                    self.hosting.send(station, self.payloads.assign(command), slot)
            case (
                records.CancelRow(simulator=station, slot=slot) | records.RefuseRequest(simulator=station, slot=slot)
                | records.PrepareEpisodes(simulator=station, slot=slot)
            ):  # fmt: skip
                self.hosting.send(station, command, slot)
            case (
                records.StartStream(generator=station) | records.AbortStream(generator=station)
                | records.ApplyWeights(generator=station)
                | records.PublishWeights(trainer=station) | records.SaveTrainer(trainer=station)
                | records.TakeDevice(station=station) | records.YieldDevice(station=station)
            ):  # fmt: skip
                self.hosting.send(station, command)
            case _:
                raise TypeError(f"{type(command).__name__} is not for a station")

    def receive(self, timeout: float) -> records.Event | None:
        """The next event, or None after `timeout` seconds. RunHalted: failures of stations end the run."""
        if lost := self.payloads.take_lost():
            return lost
        event = cast("records.Event | None", self.hosting.receive(timeout))
        if event is not None:
            self.payloads.on_event(event)
        return event

    def close(self) -> None:
        """End all stations and remove what they shared; a second call does nothing."""
        try:
            self.hosting.close()
        finally:  # a signal may interrupt any of it
            try:
                self.undo.close()
            finally:
                if self.shared is not None:
                    self.shared.remove()


def build_inline_launcher(
    stations: StationList,
    layout: ArenaLayout,
    weights: WeightsLayout,
    clock: Callable[[], float] = time.monotonic,
    joining: Joining = NOBODY_JOINS,
) -> Launcher:
    """The launcher `inline`: all stations in this thread, all memory in this process."""
    from polyrhythm.runtime.memory.weights import InlineWeights  # torch

    leased = any(seat.leases for _, *seats in stations for seat in seats)
    payloads, channel = ArenaPayloads.in_memory(layout), InlineWeights(weights, host=leased)
    return Launcher(InlineHosting(stations, payloads.arena, channel, clock, joining), payloads, channel, clock)


def build_local_launcher(
    stations: StationList,
    layout: ArenaLayout,
    weights: WeightsLayout,
    limits: SupervisionLimits,
    logs: Path,
    transport: Transport = "ipc",
    check_report: Callable[[Mapping[str, float]], None] = lambda _: None,
    joining: Joining = NOBODY_JOINS,
) -> Launcher:
    """The launcher `local`: each station in a process of its own, samples and weights in shared memory.

    check_report: raises ValueError for metrics that the observers do not know. StartError: there is too little memory,
    an address is taken, or strangers could not be kept out; then nothing has been started.
    """
    from polyrhythm.runtime.memory.published import shared_nbytes
    from polyrhythm.runtime.memory.weights import SharedWeights  # torch

    with ExitStack() as undo:
        folder = SharedRunFolder({"arena": layout.nbytes, "weights": shared_nbytes(weights)})
        undo.callback(folder.remove)
        payloads = ArenaPayloads(InFlight(layout, check_report), memoryview(folder.segment("arena")))
        channel = SharedWeights(weights, memoryview(folder.segment("weights")), folder.folder)
        rest = undo.enter_context(ExitStack())
        template = Template(stations)
        rest.callback(template.close)
        hosting = LocalHosting(
            stations,
            RunMemory(payloads.in_flight, weights, folder.folder),
            limits,
            logs,
            network=RunSockets(transport),
            spawn=SharingSpawn(stations, template.spawn),
            joining=joining,
        )
        undo.pop_all()
    return Launcher(hosting, payloads, channel, shared=folder, undo=rest)
