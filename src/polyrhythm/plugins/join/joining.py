"""One session of a simulator that has joined a run: its station, its own memory, and what it says, numbered.

The run's blocks keep their numbers outside; here each lies in a block of this process's own arena.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from polyrhythm.envs.base import EnvBatch
from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.hosts.pieces import Sent, pieces_of_request, pieces_of_rest
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.numbering import Numbering
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, in_memory
from polyrhythm.runtime.messages import Station
from polyrhythm.runtime.processes.part_inbox import PartQueue
from polyrhythm.runtime.processes.station_thread import StationThread
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.scheduler import records
from polyrhythm.stations.simulator.slot import StepSettings
from polyrhythm.stations.simulator.station import Simulator

#: Blocks for each row: one that it writes, and one whose end the run does not know of yet.
_BLOCKS_PER_ROW = 2
#: Characters of a refusal that the run is told.
_REASON_CHARS = 300


class Session:
    """What `welcome` lets in. env: makes the environment of so many rows, in the thread that calls `part.run`; wake:
    called by that thread when there is something to send, or it has ended.

    part: the station at work; out: frames to be sent. StartError: the run's samples do not fit into memory here.
    """

    def __init__(
        self, welcome: m.Welcome, env: Callable[[int], EnvBatch], wake: Callable[[], None], drops: DropCounter
    ) -> None:
        self.name, self.station, self.out = welcome.session, welcome.station, deque[bytes]()
        self.numbering, self._turn = Numbering(), threading.Lock()
        self._welcome, self._wake, self._dtype = welcome, wake, welcome.layout.answer_dtype
        self._over = False
        layout = _own_layout(welcome.layout, welcome.info)
        self._arena: Arena = in_memory(layout)
        self._free = list(range(layout.blocks))
        self._blocks: dict[tuple[int, int], int] = {}
        self._outside = np.zeros(layout.blocks, np.int64)  # the run's number of each block
        self._queue = PartQueue()
        step = m.decode_settings(welcome.step, StepSettings)

        def make() -> Station:
            rows = sum(slot.rows for slot in welcome.info.slots)
            batch = [(welcome.info, env(rows))]
            return Simulator(welcome.station, welcome.incarnation, batch, step, self._arena, self.say, welcome.address)

        self.part = StationThread(welcome.address, make, self._queue, drops, layout, self)

    # ------------------------------------------------------------ what comes in

    def hear(self, told: m.Told, content: memoryview) -> None:
        """Hand a command or reply of the run to the station. UnfitMessage: it cannot be the run's."""
        with self._turn:
            message = wire.decode(content, self._dtype, m.LARGEST_TOLD)
            self.numbering.note(told.received)
            if not self.numbering.take(told.number):
                return
            if isinstance(message, records.StartRows):
                content = memoryview(wire.encode(self._with_own_blocks(message)))
        self._queue.put(bytes(content))

    def _with_own_blocks(self, start: records.StartRows) -> records.StartRows:
        if len(start.grants) > len(self._free):
            raise UnfitMessage("impossible", f"{len(start.grants)} rows to start, {len(self._free)} blocks are free")
        own = []
        for grant in start.grants:
            block = heapq.heappop(self._free)
            self._blocks[grant.ticket.number, grant.ticket.attempt] = block
            self._outside[block] = grant.block
            own.append(replace(grant, block=block))
        return replace(start, grants=tuple(own))

    def note(self, received: int) -> None:
        """The run has what was said up to this number."""
        with self._turn:
            self.numbering.note(received)

    def resume(self, received: int) -> None:
        """A connection is new: say again what the run lacks."""
        with self._turn:
            self.numbering.note(received)
            self.out = deque(self.numbering.kept())

    @property
    def reconnect_s(self) -> float:
        """How long it outlasts its connection."""
        return self._welcome.reconnect_s

    def stop(self) -> None:
        """Have the station finish what it is at and end; what it says from now on is lost."""
        self._over = True
        self._queue.put(wire.encode(wire.Stop()))

    # ------------------------------------------------------------ what the station says

    def say(self, event: records.Event | wire.Refused) -> None:
        """Send an event with what belongs to it; the arrays are copied here, as the station goes on."""
        with self._turn:
            if self._over:
                return
            event, pieces = self._with_pieces(event)
            said = m.Said(self.name, self.numbering.next(), self.numbering.received, wire.encode(event))
            frame = m.pack(said, list(map(_bytes_of, pieces)))
            self.numbering.keep(frame)
            self.out.append(frame)

    def _with_pieces(self, event: records.Event | wire.Refused) -> tuple[records.Event | wire.Refused, list[Sent]]:
        arena, count = self._arena, self._arena.layout.blocks
        match event:
            case records.RequestArrived(slot=slot, rows=rows):
                entries = arena.view(slot, rows).entries
                outside = entries // count * self._welcome.layout.blocks + self._outside[entries % count]
                return event, [outside, *pieces_of_request(arena, slot, rows)]
            case records.SampleFinished(ticket=ticket, attempt=attempt):
                block = self._blocks.pop((ticket, attempt))
                heapq.heappush(self._free, block)
                if not event.payload_id:
                    return event, []
                return replace(event, payload_id=str(self._outside[block])), list(pieces_of_rest(arena, block))
            case records.SampleFailed(ticket=ticket, attempt=attempt):
                heapq.heappush(self._free, self._blocks.pop((ticket, attempt)))
        return event, []

    def sign_of_life(self) -> m.Beat:
        """Whether it is ready, and what it is at."""
        part, station = self.part, self.part.station
        doing, since = station.current_call() if station is not None else ("", 0.0)
        counts = {**(station.statistics() if station is not None else {}), "busy_s": part.busy_s}
        for_s = max(0.0, time.monotonic() - since) if doing else 0.0
        ready = part.ready.is_set() and part.error is None and station is not None
        return m.Beat(self.name, self.numbering.received, ready, doing, for_s, part.units, counts)

    # ------------------------------------------------------------ for the station's thread (`PartHost`)

    def is_meant(self, message: wire.Dismissed) -> bool:  # noqa: ARG002
        """Main does not tell who joined."""
        return False

    def connect(self, message: wire.Connect | wire.HostAt) -> None:
        raise UnfitMessage("misdirected", f"{type(message).__name__} is not for who joined")

    def beat(self, *, pending_work: bool = False) -> None:
        """Nothing: signs of life come in their own time."""

    def collect(self) -> None:
        """Nothing is collected: what the station says is sent by the thread that has the connection."""

    def flush(self) -> None:
        if self.out:
            self._wake()

    def refuse(self, command: bytes, why: str) -> None:
        self.say(wire.Refused(self.station, self._welcome.incarnation, command, why[:_REASON_CHARS]))

    def notify(self) -> None:
        self._wake()


def _own_layout(layout: ArenaLayout, info: records.EnvBatchInfo) -> ArenaLayout:
    """The layout of the arena here. StartError: it needs more memory than this machine has."""
    slots = {slot.slot: slot.rows for slot in info.slots}
    own = replace(layout, blocks=_BLOCKS_PER_ROW * sum(slots.values()), slots=slots)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if own.nbytes > memory / 2:
        raise StartError(
            f"join.rows: samples of {sum(slots.values())} rows need {own.nbytes / 2**30:.1f} GiB here, this machine "
            f"has {memory / 2**30:.1f} GiB; lower it in the run's recipe"
        )
    return own


def _bytes_of(array: Sent) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
