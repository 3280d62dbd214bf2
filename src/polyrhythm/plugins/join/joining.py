"""Client of `polyrhythm join`: its connection, clock, environment and memory.

One thread has the connection and executes what `plugins.join.joiner` decides. Another makes and steps the environment,
so heartbeats continue while a reset waits for a person. The run's blocks keep their numbers in messages; each is mapped
to a block of this process's own arena.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import cast

import numpy as np

from polyrhythm.config.base import type_name
from polyrhythm.envs.base import EnvBatch, EnvSettings
from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.hosts.pieces import Sent, pieces_of_request, pieces_of_rest
from polyrhythm.plugins.cluster.line import JoinLine, Lines
from polyrhythm.plugins.join import joiner as j
from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.reception import BEAT_S
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, in_memory
from polyrhythm.runtime.messages import Station
from polyrhythm.runtime.processes.station_thread import PartQueue, StationThread
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import wait_for
from polyrhythm.scheduler import records
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.slot import SlotIdentity
from polyrhythm.stations.simulator.station import Simulator, refuse_other

log = logging.getLogger(__name__)

#: Blocks for each row: one being written, and one whose end is not acknowledged yet.
_BLOCKS_PER_ROW = 2
#: Maximum characters of a refusal sent to the run.
_REASON_CHARS = 300
#: Seconds that an environment has to close.
_CLOSE_S = 5.0


class JoinClient:
    """Takes part in the run at `address` with the token's `keys`. settings: of the environment; version: of this
    program. limits: `patience_s` and `park_s` of `Joiner`, which raises StartError for invalid arguments."""

    def __init__(self, address: str, keys: RunKeys, settings: EnvSettings, version: str, **limits: float) -> None:
        spec = settings.spec()
        words = " ".join(filter(None, (type_name(settings), getattr(settings, "id", ""))))
        self.joiner = j.Joiner(address, spec, words, version, time.monotonic(), **limits)
        self._lines = Lines(keys, m.LARGEST_MESSAGE)
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        self._line: JoinLine | None = None
        self._station: JoinedStation | None = None
        self._ending: JoinedStation | None = None  # of an earlier session
        self._env = EnvThread(settings, spec)
        self._leaving, self._outcome = False, ""

    def run(self) -> str:
        """Take part until the run is over; returns why it ended.

        Consumes: frames of the run, events of the station. Waits for: either, or the next heartbeat. Unblocked by:
        these. Produces: frames. Raises the errors of `Joiner.handle`.
        """
        try:
            while not self._outcome:
                if self._ending is not None and self._ending.part.over.is_set():
                    self._ending = None
                status = self._station.status() if self._station is not None else None
                self._handle(j.TimePassed(status, self._ending is not None, self._leaving))
                if not self._outcome:
                    self._wait()
        except KeyboardInterrupt:
            self._do(self.joiner.farewell(j.INTERRUPTED, blame=False))
            raise
        except BaseException as error:
            self._do(self.joiner.farewell(str(error) or type(error).__name__, blame=True))
            raise
        finally:
            self.close()
        return self._outcome

    def leave(self) -> None:
        """Leave the run, which continues; callable from any thread."""
        self._leaving = True
        self.wake()

    def wake(self) -> None:
        """Interrupt the wait for frames and events; callable from any thread."""
        with suppress(OSError):  # the pipe is full, which wakes as well, or closed
            os.write(self._waking, b"\0")

    def close(self) -> None:
        """Close the environment and the connection; a second call does nothing."""
        for station in (self._station, self._ending):
            if station is not None:
                station.stop()
        self._station = self._ending = None
        self._env.close()
        self._do([j.CloseLine()])
        self._lines.close(j.LEAVE_S)
        for end in (self._woken, self._waking):
            if end >= 0:
                os.close(end)
        self._woken = self._waking = -1

    def _wait(self) -> None:
        line = self._line
        wait_for([self._woken, *([line.socket, line.monitor] if line is not None else [])], BEAT_S / 2)
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        if line is not None:
            state = line.update()
            if state == "proven":
                self._handle(j.LineIs(state))
            while self._line is line and not self._outcome and (frame := line.receive()) is not None:
                self._handle(j.FrameCame(frame))
            if self._line is line and not self._outcome and state in ("refused", "broken"):
                self._handle(j.LineIs(state))
        while self._station is not None and self._station.events:
            self._handle(self._station.events.popleft())

    def _handle(self, event: j.JoinEvent) -> None:
        self._do(self.joiner.handle(event, time.monotonic()))

    def _do(self, actions: Iterable[j.JoinAction]) -> None:
        for action in actions:
            match action:
                case j.OpenLine(address):
                    self._line = self._lines.open(address)
                case j.SendFrame(frame, linger_s) if self._line is not None:
                    self._line.send(frame, linger_s)
                case j.CloseLine() if self._line is not None:
                    self._line.close()
                    self._line = None
                case j.MakeStation(welcome):
                    self._station = JoinedStation(welcome, self._env.batch, self.wake, self.joiner.drops)
                    self._env.work(self._station)
                case j.HandOver() if self._station is not None:
                    self._station.take(action)
                case j.StopStation() if self._station is not None:
                    self._station.stop()
                    self._ending, self._station = self._station, None
                case j.LeaveRun(reason):
                    self._outcome = reason


class JoinedStation:
    """The station of the session that `welcome` begins.

    env: makes the environment for a number of rows, in the thread that calls `part.run`; wake: called by that thread
    when an event is queued or it has ended. part: the running station; events: queued ones. StartError: the run's
    samples do not fit into this machine's memory.
    """

    def __init__(
        self, welcome: m.Welcome, env: Callable[[int], EnvBatch], wake: Callable[[], None], drops: DropCounter
    ) -> None:
        self.events = deque[j.StationEvent]()
        self._turn = threading.Lock()
        self._welcome, self._wake, self._drops = welcome, wake, drops
        self._over = False
        layout = _own_layout(welcome.layout, welcome.info)
        self._arena: Arena = in_memory(layout)
        self._free = list(range(layout.blocks))
        self._blocks: dict[tuple[int, int], int] = {}
        self._outside = np.zeros(layout.blocks, np.int64)  # the run's number of each block
        self._queue = PartQueue()

        def make() -> Station:
            rows = sum(slot.rows for slot in welcome.info.slots)
            source = SlotIdentity(welcome.station, welcome.incarnation, welcome.address, self.emit)
            return Simulator(source, welcome.info, env(rows), welcome.step, self._arena)

        self.part = StationThread(welcome.address, make, self._queue, drops, layout, self)

    def take(self, hand: j.HandOver) -> None:
        """Pass a command or reply of the run to the station; invalid ones are dropped and counted."""
        content = hand.content
        if isinstance(hand.message, records.StartRows):
            try:
                content = memoryview(wire.encode(self._with_own_blocks(hand.message)))
            except UnfitMessage as unfit:
                self._drops.drop(unfit.kind, str(unfit))
                return
        self._queue.put(bytes(content))

    def _with_own_blocks(self, start: records.StartRows) -> records.StartRows:
        own = []
        with self._turn:
            if len(start.grants) > len(self._free):
                raise UnfitMessage(
                    "impossible", f"{len(start.grants)} rows to start, {len(self._free)} blocks are free"
                )
            for grant in start.grants:
                block = heapq.heappop(self._free)
                self._blocks[grant.ticket.number, grant.ticket.attempt] = block
                self._outside[block] = grant.block
                own.append(replace(grant, block=block))
        return replace(start, grants=tuple(own))

    def stop(self) -> None:
        """Stop the station after its current unit of work; its later events are lost."""
        self._over = True
        self._queue.put(wire.encode(wire.Stop()))

    def status(self) -> j.StationStatus:
        part, station = self.part, self.part.station
        doing, since = station.current_call() if station is not None else ("", 0.0)
        counts = {**(station.statistics() if station is not None else {}), "busy_s": part.busy_s}
        ready = part.ready.is_set() and part.error is None and station is not None
        return j.StationStatus(ready, doing, since, part.units, counts, part.over.is_set(), part.error)

    # ------------------------------------------------------------ events of the station

    def emit(self, event: records.Event | wire.Refused) -> None:
        """Queue an event with copies of its arrays, as the station goes on to overwrite them."""
        with self._turn:
            if not self._over:
                event, pieces = self._with_pieces(event)
                self.events.append(j.StationEvent(wire.encode(event), [memoryview(_bytes_of(one)) for one in pieces]))

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

    # ------------------------------------------------------------ for the station's thread (`PartHost`)

    def is_meant(self, message: wire.Dismissed) -> bool:  # noqa: ARG002
        """The run does not send these to joined simulators."""
        return False

    def connect(self, message: wire.Connect | wire.HostAt) -> None:
        raise UnfitMessage("misdirected", f"{type(message).__name__} is not for who joined")

    def beat(self, *, pending_work: bool = False) -> None:
        """Nothing: heartbeats are sent by the connection's thread."""

    def begin_frame(self) -> None:
        """Nothing: the connection's thread sends the queued events."""

    def flush(self) -> None:
        if self.events:
            self._wake()

    def refuse(self, command: bytes, why: str) -> None:
        self.emit(wire.Refused(self._welcome.station, self._welcome.incarnation, command, why[:_REASON_CHARS]))

    def notify(self) -> None:
        self._wake()


class EnvThread:
    """Thread that makes the environment once and steps it in successive sessions."""

    def __init__(self, settings: EnvSettings, spec: EnvSpec) -> None:
        self._settings, self._spec = settings, spec
        self._env: EnvBatch | None = None
        self._stations: SimpleQueue[JoinedStation | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def work(self, station: JoinedStation) -> None:
        """Queue this station to run after the current one."""
        self._stations.put(station)

    def batch(self, rows: int) -> EnvBatch:
        """The environment, which outlives the session."""
        if self._env is None or self._env.rows != rows:
            if self._env is not None:
                self._env.close()
            self._env = self._settings.build(rows)
            refuse_other(self._env, self._spec, rows)
        return cast(EnvBatch, KeptEnv(self._env))

    def _run(self) -> None:
        """Consumes: stations. Waits for: one. Unblocked by: `work`, or `close`. Produces: their events."""
        while (station := self._stations.get()) is not None:
            station.part.run()
        if self._env is not None:
            try:
                self._env.close()
            except Exception:
                log.exception("the environment raised while it was closed")

    def close(self) -> None:
        """Stop the thread; one that hangs in the environment ends with the process."""
        self._stations.put(None)
        self._thread.join(_CLOSE_S)


class KeptEnv:
    """An environment that outlives its station: `close` does nothing."""

    def __init__(self, env: EnvBatch) -> None:
        self._env = env

    def __getattr__(self, name: str) -> object:
        return getattr(self._env, name)

    def close(self) -> None: ...


def _own_layout(layout: ArenaLayout, info: records.EnvBatchInfo) -> ArenaLayout:
    """Layout of the local arena. StartError: it needs more memory than this machine has."""
    slots = {slot.slot: slot.rows for slot in info.slots}
    own = replace(layout, blocks=_BLOCKS_PER_ROW * sum(slots.values()), slots=slots)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if own.nbytes > memory / 2:
        raise StartError(
            f"join.rows: samples of {sum(slots.values())} rows need {own.nbytes / 2**30:.1f} GiB here, this machine "
            f"has {memory / 2**30:.1f} GiB; lower it in the run's recipe"
        )
    return own


def _bytes_of(array: Sent) -> bytes:
    return np.ascontiguousarray(array).tobytes()
