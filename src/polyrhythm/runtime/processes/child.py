"""Where a station's process starts: `python -m polyrhythm.runtime.processes.child`, its spec on standard input.

The main thread sends heartbeats and watches the parts; each part works in a thread of its own. SIGINT, SIGTERM and
SIGHUP are main's affair and ignored here. The process dies with its parent, whatever ended that.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import msgspec

from polyrhythm.errors import PolyrhythmError
from polyrhythm.imports import keep_freed_memory
from polyrhythm.readable import set_up_logging
from polyrhythm.runtime.factories import Resources, StationContext, make_parts, unpack
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.process_memory import RANKS, open_memory
from polyrhythm.runtime.messages import (
    Channels,
    Departed,
    Spans,
    Station,
    add_counts,
    merge_joined,
    process_address,
    rank_name,
)
from polyrhythm.runtime.processes.station_thread import (
    FrameReader,
    InboxThread,
    Outgoing,
    OwnInbox,
    PartInbox,
    PartQueue,
    StationThread,
    largest_message,
)
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets, Transport
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

_BEAT_S = 0.5
_LINGER_S = 2.0
#: Seconds before the deadline for a start at which ranks say who of them has not come. It counts from the station's
#: turn, main's deadline from the call that started it: that comes first where the two are further apart than this.
_NOTICE_S = 10.0
#: Seconds from which on main is told where in user code a call is.
_LONG_S = 1.0
#: Characters of a refusal that main is told.
_REASON_CHARS = 300
#: Characters of a warning that main is told.
_WARNING_CHARS = 2000
_PR_SET_PDEATHSIG = 1
#: Seconds after which a thread that computes in Python lets another one in, where stations share a process.
_SWITCH_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What a station's process gets at its start. kind, content: the packed factory; main: the endpoint of main's
    inbox; keys: of the run, if its sockets need them; parent: process id of who started it; rank, ranks: which of how
    many processes of this incarnation it is; host: what it knows of the run's hosts, None if there is one; start_s:
    seconds until it has to be ready; beside: further stations of the process."""

    station: str = ""
    incarnation: int = 0
    kind: str = ""
    content: bytes = b""
    resources: Resources = field(default_factory=Resources)
    layout: ArenaLayout
    weights: WeightsLayout
    folder: str
    main: str
    transport: Transport
    keys: RunKeys | None
    parent: int
    rank: int = 0
    ranks: int = 1
    host: HostView | None = None
    start_s: float = math.inf
    beside: tuple[ChildSpec, ...] = ()


class WarningsToMain(logging.Handler):
    """Sends to main what the modules of environments warn of. send: of the process's outgoing messages."""

    def __init__(self, station: str, incarnation: int, send: Callable[[wire.Message], None]) -> None:
        super().__init__(logging.WARNING)
        self._station, self._incarnation, self._send = station, incarnation, send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(wire.Warned(self._station, self._incarnation, record.getMessage()[:_WARNING_CHARS]))


class Construction:
    """Of the stations of one process: they are made one after another, and none announces itself before all are made.

    What makes a network sets torch's random state and default dtype, which all threads share; two threads that let
    msgspec learn one class at the same time crash it (0.22); and while a generator captures its passes, a wait for the
    device is an error in every thread (`stations.passes.refuse_waiting`), so that no update may begin."""

    def __init__(self, stations: int = 1) -> None:
        self.turn, self._stations = threading.Lock(), stations
        self._made: dict[str, Callable[[], None]] = {}

    def is_over(self, made: str, notify: Callable[[], None]) -> bool:
        """Whether all stations are made; this one is. notify: called when the last one is."""
        self._made[made] = notify
        over = len(self._made) == self._stations
        for tell in list(self._made.values()) if over else ():
            tell()
        return over


class StationProcess:
    """A process of one station: its inbox, its parts, and what it says. Events, reports and spans are said by rank 0
    alone; the other ranks compute the same and keep them to themselves."""

    def __init__(self, spec: ChildSpec, construction: Construction) -> None:
        self._spec, self._construction = spec, construction
        self._drops = DropCounter(rank_name(spec.station, spec.rank))
        self._largest = largest_message(spec.layout)
        address = spec.host.address if spec.host is not None else LOOPBACK
        self._sockets = Sockets(
            spec.transport, spec.folder, spec.keys, self._drops.stranger, self._largest, address=address
        )
        self._memory = open_memory(spec.layout, spec.weights, Path(spec.folder), spec.host, self._sockets)
        self._outgoing = Outgoing(self._sockets, spec.main)
        self._news, self._telling = threading.Event(), threading.Lock()
        self._parts: list[StationThread] = []
        self._reading: InboxThread | None = None
        self._endpoint = ""
        self.beat = self._beat
        self.begin_frame, self.flush = self._outgoing.begin_frame, self._outgoing.flush
        self.notify = self._news.set

    def _open(self) -> list[StationThread]:
        """The parts of the station, in the memory that the run shares, and the inbox of the process."""
        spec = self._spec
        send = self._outgoing.send_event if spec.rank == 0 else _discard
        resources = spec.resources
        context = StationContext(
            self._memory.arena(),
            partial(self._memory.weights, resources.device, resources.ends, resources.torch_device),
            Channels(send, self._outgoing.reply, send),
            resources.torch_device,
            overlap=True,
            rank=spec.rank,
            ranks=spec.ranks,
            rendezvous=Path(spec.folder) / f"{process_address(spec.station, spec.incarnation)}{RANKS}",
            ready_by=time.monotonic() + spec.start_s - min(_NOTICE_S, spec.start_s / 4),
            memory=self._memory,
            seat=resources.device,
        )
        parts = make_parts(unpack(spec.kind, spec.content), context, spec.incarnation, resources)
        inbox = self._sockets.inbox(self._name())
        self._endpoint = inbox.endpoint
        reader = FrameReader(inbox, self._drops, self._largest, len(parts))
        inboxes: list[PartInbox] = [OwnInbox(reader)]
        if len(parts) > 1:
            queues = [PartQueue() for _ in parts]
            inboxes, self._reading = [*queues], InboxThread(reader, queues, self.notify)
        return [
            StationThread(address, partial(self._make, make), inbox, self._drops, spec.layout, self)
            for (address, make), inbox in zip(parts, inboxes, strict=True)
        ]

    def _make(self, make: Callable[[], Station]) -> Station:
        with self._construction.turn:
            return make()

    def connect(self, message: wire.Connect | wire.HostAt) -> None:
        """Know where a simulator's replies go and where its requests lie, or another host. UnfitMessage: that cannot
        be."""
        if isinstance(message, wire.HostAt):
            self._memory.add_host(message.host, message.endpoint)
        else:
            if message.host:
                self._memory.move_slots(message.host, message.slots)
            self._outgoing.connect(message)

    def is_meant(self, message: wire.Dismissed) -> bool:
        return (message.station, message.incarnation) == (self._spec.station, self._spec.incarnation)

    def _name(self) -> str:
        return process_address(self._spec.station, self._spec.incarnation, self._spec.rank)

    def run(self) -> int:
        """Work until told to stop, or until a part fails; the exit status.

        Consumes: nothing itself. Waits for: news of a part. Unblocked by: some, or `_BEAT_S`. Produces: heartbeats, the
        station's announcement, and its failure.
        """
        warnings = WarningsToMain(self._spec.station, self._spec.incarnation, self._outgoing.send)
        logging.getLogger("polyrhythm.envs").addHandler(warnings)
        try:
            with self._construction.turn:
                self._parts = self._open()
            for part in self._parts:
                part.start()
        except Exception as error:  # noqa: BLE001 - main is told
            return self._leave(error)
        announced = False
        while not all(part.over.is_set() for part in self._parts):
            if self._failed() is not None or os.getppid() != self._spec.parent:
                break
            if self._memory.is_cut_off():
                log.error("%s ends: it cannot reach the run's main host, so it has been given up", self._name())
                break
            made = all(part.ready.is_set() and part.error is None for part in self._parts)
            if made and not announced and self._construction.is_over(self._spec.station, self.notify):
                self._announce()
                announced = True
            self._beat()
            self._news.wait(_BEAT_S)
            self._news.clear()
        return self._leave(self._failed())

    def _failed(self) -> BaseException | None:
        errors = [part.error for part in self._parts]
        errors += [self._reading.error] if self._reading is not None else []
        return next((error for error in errors if error is not None), None)

    def _leave(self, error: BaseException | None) -> int:
        spec, now = self._spec, time.monotonic()
        if isinstance(error, Departed):
            log.info("%s ends: who had joined %s", self._name(), error)
            failed = wire.Failed(spec.station, spec.incarnation, str(error), False, departed=True, blame=error.blame)
            self._outgoing.send(failed)
        elif error is not None:
            log.error("%s ends", self._name(), exc_info=error)
            fatal = isinstance(error, PolyrhythmError | ImportError)
            reason = str(error) if isinstance(error, PolyrhythmError) else f"{type(error).__name__}: {error}"
            self._outgoing.send(wire.Failed(spec.station, spec.incarnation, reason, fatal, spec.rank, now))
        else:
            self._beat()
        self._outgoing.close(_LINGER_S)
        if all(part.over.is_set() for part in self._parts):
            self._memory.close()
            self._sockets.close(unsent=True)
        else:
            time.sleep(_LINGER_S / 10)  # a part hangs, so the failure message gets a moment instead of a confirmation
        return 1 if error is not None else 0

    def refuse(self, command: bytes, why: str) -> None:
        spec, reason = self._spec, why[:_REASON_CHARS]
        self._outgoing.send(wire.Refused(spec.station, spec.incarnation, command, reason, spec.rank))

    def _announce(self) -> None:
        spec = self._spec
        addresses = tuple(part.address for part in self._parts)
        announced = merge_joined([part.station.joined() for part in self._parts if part.station is not None])
        joined = wire.encode(announced)
        self._outgoing.send(wire.Hello(spec.station, spec.incarnation, self._endpoint, addresses, joined, spec.rank))

    def _beat(self, *, pending_work: bool = False) -> None:
        """Send the spans measured so far, then a heartbeat with the call of the part that has been busy longest."""
        with self._telling:  # a part beats too when it is asked, and spans are to come in order
            for part in self._parts:
                measured, lost = part.spans.take()
                if measured or lost:
                    self._outgoing.send(Spans(self._spec.station, self._spec.incarnation, tuple(measured), lost))
        spec, stations = self._spec, [part.station for part in self._parts if part.station is not None]
        calls = [(part, *part.station.current_call()) for part in self._parts if part.station is not None]
        now = time.monotonic()  # after the calls' begins, so that none lasts less than nothing
        doing, since, place = "", now, ""
        if under_way := [call for call in calls if call[1]]:
            part, doing, since = min(under_way, key=lambda call: call[2])
            place = part.own_call()[:_REASON_CHARS] if now >= since + _LONG_S else ""
        counts: dict[str, float] = {}
        for station in stations:
            add_counts(counts, station.statistics())
        counts.setdefault("busy_s", sum(part.busy_s for part in self._parts) / len(self._parts))
        add_counts(counts, self._drops.statistics())
        waiting = tuple(line for station in stations for line in station.pending_work()) if pending_work else None
        units = sum(part.units for part in self._parts)
        self._outgoing.send(
            wire.Heartbeat(spec.station, spec.incarnation, doing, now - since, units, waiting, counts, spec.rank, place)
        )


def _discard(message: object) -> None:
    """Of a rank above 0: rank 0 sends the same."""


def die_with(parent: int) -> None:
    """Be killed when the parent's process ends, however it ends (Linux; elsewhere `run` notices it)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def run_stations(specs: Sequence[ChildSpec]) -> int:
    """Run the stations of this process, each with sockets, memory and heartbeats of its own, until all have ended, or
    one with an error: then the process ends, and the supervisor replaces all of them. The exit status."""
    construction, ended = Construction(len(specs)), SimpleQueue[int]()
    if len(specs) == 1:
        return StationProcess(specs[0], construction).run()
    sys.setswitchinterval(_SWITCH_S)

    def run(spec: ChildSpec) -> None:
        status = 1
        try:
            status = StationProcess(spec, construction).run()
        finally:
            ended.put(status)

    for spec in specs:
        threading.Thread(target=run, args=(spec,), name=f"station {spec.station}", daemon=True).start()
    for _ in specs:
        if status := ended.get():
            return status
    return 0


def main() -> None:
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ChildSpec)
    die_with(spec.parent)
    keep_freed_memory()
    set_up_logging(anew=True)  # a module that the template has imported may have set it up
    status = run_stations([spec, *spec.beside])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that hang in a simulator, and a simulator's own exit handlers, must not keep the process.
    os._exit(status)


if __name__ == "__main__":
    main()
