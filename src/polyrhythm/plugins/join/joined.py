"""Proxy station for a remote simulator: the run treats it like a simulator of its own.

    commands, replies     are forwarded to the remote simulator
    requests              carry observations, which are written to the run's blocks for the generators to read
    finished samples      carry everything else; then the block is complete

The remote simulator refers to the run's blocks by number and has its own memory. Its messages are validated before
anything is written (`InFlight`, `JoinedSamples`). Imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from polyrhythm.plugins.join import messages as m
from polyrhythm.plugins.join.joined_samples import JoinedSamples
from polyrhythm.plugins.join.reception import ReceivedEvent, Reception, Terms
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.messages import (
    Order,
    Reply,
    Station,
    StationTraits,
    newest_version,
    part_address,
    process_address,
)
from polyrhythm.runtime.processes.incarnation import AWAITING
from polyrhythm.runtime.spans import Span
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.drops import DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import AnsweringEnd, Sockets
from polyrhythm.scheduler import records
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.guard import MOST_BYTES
from polyrhythm.stations.simulator.slot import StepSettings

log = logging.getLogger(__name__)

#: Maximum frames of one unit of work, so that other stations get their turns.
_AT_ONCE = 64
#: Seconds for sending the end of the session to the simulator.
_LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class JoinedSimulatorFactory:
    """A proxy that accepts a simulator at `port` of this machine's `address`.

    spec: of its environment; info: its env batch; keys: of the token; polyrhythm: the version that it must have;
    reconnect_s, start_s: as for `Reception`; ports: the run's other join ports.
    """

    name: str
    spec: EnvSpec
    info: records.EnvBatchInfo
    step: StepSettings
    address: str
    port: int
    keys: RunKeys
    polyrhythm: str
    reconnect_s: float
    start_s: float
    ports: tuple[int, ...] = ()

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        address = part_address(process_address(self.name, incarnation), 0)
        arena, emit = context.arena, context.channels.emit
        return [(address, lambda: JoinedSimulator(self, incarnation, address, arena, emit))]

    def announcements(self, incarnation: int) -> Sequence[records.SimulatorJoined]:
        return [records.SimulatorJoined(self.name, incarnation, (self.info,))]


class JoinedSimulator:
    """One incarnation of the proxy; answers for it arrive at `address`. StartError: its port is taken."""

    def __init__(
        self,
        plan: JoinedSimulatorFactory,
        incarnation: int,
        address: str,
        arena: Arena,
        emit: Callable[[records.Event], None],
        clock: Callable[[], float] = time.monotonic,
        sockets: Callable[..., Sockets] = Sockets,
    ) -> None:
        self.name, self.incarnation = plan.name, incarnation
        self._plan, self._address, self._arena, self._emit, self._clock = plan, address, arena, emit, clock
        self._drops = DropCounter(plan.name)
        self._in_flight = InFlight(arena.layout)
        self._in_flight.join(self.joined(), (address,))
        self._samples = JoinedSamples(arena, plan.spec, plan.step)
        self._reception = Reception(
            Terms(plan.polyrhythm, plan.spec),
            lambda session: m.Welcome(
                session, plan.name, incarnation, address, plan.info, plan.step, arena.layout, plan.reconnect_s
            ),
            self._drops,
            reconnect_s=plan.reconnect_s,
            start_s=plan.start_s,
            ports=plan.ports,
        )
        self._since = clock()
        self._units, self._bytes = 0, 0
        self._sockets = sockets("tcp", "", plan.keys, self._drops.stranger, 0, address=plan.address)
        try:
            self._end: AnsweringEnd = self._sockets.answering(_largest(arena.layout, plan.info), plan.port)
        except BaseException:
            self._sockets.close()
            raise

    def joined(self) -> records.SimulatorJoined:
        return records.SimulatorJoined(self.name, self.incarnation, (self._plan.info,))

    # ------------------------------------------------------------ frames of the simulator

    @property
    def traits(self) -> StationTraits:
        return StationTraits(deliver=self.deliver, attend=self.attend, socket=self._end.socket)

    def attend(self, seconds: float) -> bool:
        """Accept connections for up to `seconds`; whether a simulator is present. Its later
        messages are left to `work`."""
        for turn in range(_AT_ONCE):
            if not self._receive(0.0 if turn else seconds) or self._reception.present:
                break
        return self._reception.present

    def work(self) -> bool:
        """Handle the frames that the remote simulator has sent.

        Consumes: frames. Waits for: nothing. Unblocked by: a frame. Produces: requests, finished and failed samples.
        Raises Departed if the simulator is gone.
        """
        worked = False
        for _ in range(_AT_ONCE):
            if not self._receive(0.0):
                break
            worked = True
        return worked

    def _receive(self, seconds: float) -> bool:
        """Handle one frame, if one arrives in time, and check the connection. Departed: the simulator is gone."""
        try:
            found = self._end.receive(seconds)
            if found is not None:
                who, parts = found
                received = self._reception.receive(who, parts[0] if len(parts) == 1 else b"", self._clock())
                if received is not None:
                    self._take(received)
            self._reception.check(self._clock())
        finally:
            self._flush()
        return found is not None

    def _take(self, received: ReceivedEvent) -> None:
        """Handle one event of the simulator; reject the simulator if the event contradicts the run."""
        try:
            event = wire.decode(received.event)
            if isinstance(event, wire.Refused):
                raise UnfitMessage("impossible", f"it refuses a command: {event.why[:200]}")
            self._in_flight.accept(event)
            match event:
                case records.RequestArrived():
                    self._samples.request(event, received.pieces)
                case records.SampleFinished():
                    self._samples.finish(event, received.pieces)
                case records.SampleFailed():
                    self._samples.fail(event)
        except (UnfitMessage, ValueError) as error:
            self._drops.drop("impossible", str(error))
            self._reception.reject(str(error)[:300])
            return
        self._units += 1
        self._bytes += sum(map(len, received.pieces))
        self._emit(event)  # type: ignore[arg-type]

    def _flush(self) -> None:
        out = self._reception.out
        while out:
            who, frame = out.popleft()
            self._end.answer(who, [frame])

    # ------------------------------------------------------------ messages to the simulator

    def handle(self, command: Order) -> None:
        match command:
            case records.StartRows():
                self._in_flight.on_command(command)
                self._samples.start(command)
            case records.RefuseRequest(slot=slot, sequence=sequence):
                self._samples.refuse(slot, sequence)
            case records.CancelRow():
                pass
            case _:
                raise UnfitMessage("misdirected", f"{type(command).__name__} is not for a simulator that joins")
        self._reception.send(wire.encode(command))
        self._flush()

    def deliver(self, reply: Reply) -> None:
        """Forward a generator's answer; one for an earlier incarnation is dropped."""
        if reply.reply_to != self._address:
            return
        if len(reply.answers):
            self._in_flight.on_version(newest_version(reply.answers))
        self._samples.answer(reply)
        self._reception.send(wire.encode_reply(reply))
        self._flush()

    # ------------------------------------------------------------ reports

    def spans(self, begin: float, end: float) -> Iterable[Span]:  # noqa: ARG002
        """None: the remote machine has another clock."""
        return ()

    def current_call(self) -> tuple[str, float]:
        """The environment call under way; `join` while no simulator is present."""
        if not self._reception.present:
            return AWAITING, self._since
        return self._reception.current_call(self._clock())

    def pending_work(self) -> list[str]:
        if not self._reception.present:
            return [f"{self.name} waits for a simulator to join at port {self._plan.port}"]
        call, since = self._reception.current_call(self._clock())
        doing = f", in one {call} for {self._clock() - since:.1f} s" if call else ""
        return [f"{self.name} has joined and holds {len(self._samples)} tickets{doing}"]

    def statistics(self) -> dict[str, float]:
        """The simulator's last reported counters, those of its connections, and the number of rejected simulators."""
        beat = self._reception.beat
        counts = dict(beat.statistics) if beat else {}
        own = {"join_reconnects": self._reception.reconnects, "join_refused": self._reception.refused}
        own |= {"join_events": self._units, "join_bytes": self._bytes}
        return counts | {name: float(count) for name, count in own.items()} | self._drops.statistics()

    def close(self) -> None:
        self._reception.close("the run is over")
        self._flush()
        self._end.close(_LINGER_S)
        self._sockets.close(unsent=True)


def _largest(layout: ArenaLayout, info: records.EnvBatchInfo) -> int:
    """Bytes of a simulator's largest frame: a request of all its rows, or the rest of a sample with its texts."""
    rows = sum(slot.rows for slot in info.slots)
    shown = sum(spec.nbytes for spec in layout.obs.values())
    sample = layout.steps * 5 * layout.chunk + shown
    pieces = 8 + 2 * len(layout.obs)
    return max(rows * (shown + 17), sample + 2 * MOST_BYTES) + 64 * pieces + m.HEAD_BYTES
