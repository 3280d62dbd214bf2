"""The simulator station: works on several env batches in turn; its factory makes it from plain data. Imports neither
torch nor transformers."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvBatch, EnvSettings
from polyrhythm.envs.mujoco import RUN_FOLDER
from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import (
    OffloadStore,
    Order,
    Reply,
    Station,
    StationTraits,
    part_address,
    process_address,
)
from polyrhythm.runtime.spans import Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import (
    CancelRow,
    EnvBatchInfo,
    Event,
    PrepareEpisodes,
    RefuseRequest,
    SimulatorJoined,
    StartRows,
)
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.env_host import EnvHost
from polyrhythm.stations.simulator.guard import IDLE
from polyrhythm.stations.simulator.reset_ahead import ResetAhead
from polyrhythm.stations.simulator.slot import SlotIdentity, StepSettings


class Simulator:
    """Simulator of `batches`; its events carry `name` and `incarnation`; answers arrive at `address`. Raises ValueError
    for a setting that an environment does not support."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        batches: Sequence[tuple[EnvBatchInfo, EnvBatch]],
        settings: StepSettings,
        arena: Arena,
        emit: Callable[[Event], None],
        address: str = "",
    ) -> None:
        self.name, self.incarnation = name, incarnation
        source = SlotIdentity(name, incarnation, address, emit)
        self.hosts = [EnvHost(info, env, settings, arena, source) for info, env in batches]
        self._by_slot = {slot: host for host in self.hosts for slot in host.slots}
        self._turns = deque(self.hosts)
        self._poll: select.epoll | None = None

    def joined(self) -> SimulatorJoined:
        return SimulatorJoined(self.name, self.incarnation, tuple(host.info for host in self.hosts))

    def handle(self, command: Order) -> None:
        match command:
            case StartRows():
                self._host(command.slot).start(command)
            case CancelRow():
                self._host(command.slot).cancel(command)
            case RefuseRequest():
                self._host(command.slot).refuse(command)
            case PrepareEpisodes():
                self._host(command.slot).prepare(command)
            case _:
                raise UnfitMessage("misdirected", f"{type(command).__name__} is not for a simulator")

    @property
    def traits(self) -> StationTraits:
        return StationTraits(deliver=self.deliver, wait_beside=self.wait_beside)

    def deliver(self, reply: Reply) -> None:
        """Deliver a generator's answer to its slot. UnfitMessage: it does not fit."""
        self._host(reply.slot).deliver(reply)

    def _host(self, slot: str) -> EnvHost:
        host = self._by_slot.get(slot)
        if host is None:
            raise UnfitMessage("misdirected", f"{self.name} has no slot {slot!r}")
        return host

    def wait_beside(self) -> int | None:
        """As `StationTraits.wait_beside`, for asynchronous steps."""
        found = [number for host in self.hosts if (number := host.defer()) is not None]
        if not found:
            return None
        self._poll = select.epoll()
        for number in found:
            self._poll.register(number, select.EPOLLIN)
        return self._poll.fileno()

    def work(self) -> bool:
        """Do one unit of work of one env batch, in round-robin order.

        Consumes: grants and answers. Waits for: asynchronous steps; for nothing after `wait_beside`. Unblocked by:
        `handle` and `deliver`. Produces: requests, finished and failed samples.
        """
        for _ in self.hosts:
            host = self._turns[0]
            self._turns.rotate(-1)
            if host.work():
                return True
        return False

    def suspend(self, _store: OffloadStore) -> int:
        """Move environments off the leased device, if they can leave it; returns the bytes freed."""
        return sum(host.env.inner.suspend() for host in self.hosts if host.env.traits.leaves_device)

    def resume(self, _store: OffloadStore) -> None:
        for host in self.hosts:
            if host.env.traits.leaves_device:
                host.env.inner.resume()

    def spans(self, begin: float, end: float) -> Iterable[Span]:
        return self._turns[-1].spans(begin, end)

    def current_call(self) -> tuple[str, float]:
        """The environment call that has been under way longest."""
        return min((doing for host in self.hosts if (doing := host.doing)[0]), key=lambda d: d[1], default=IDLE)

    def pending_work(self) -> list[str]:
        return [slot.pending_work() for host in self.hosts for slot in host.slots.values() if slot.live or slot.pending]

    def statistics(self) -> dict[str, float]:
        """env_s: seconds inside the environments; env_steps: transitions; chunk_steps: summed over rows. With
        spare rows, resets by how they began: resets_ready, resets_waited, resets_in_place (`ResetAhead`)."""
        ahead = [host.ahead for host in self.hosts if host.ahead is not None]
        resets = {
            "resets_ready": float(sum(env.ready for env in ahead)),
            "resets_waited": float(sum(env.waited for env in ahead)),
            "resets_in_place": float(sum(env.in_place for env in ahead)),
        }
        return {
            **(resets if ahead else {}),
            "env_s": sum(host.env.seconds for host in self.hosts),
            "env_steps": float(sum(host.env_steps for host in self.hosts)),
            "chunk_steps": float(sum(host.chunk_steps for host in self.hosts)),
        }

    def close(self) -> None:
        for host in self.hosts:
            host.env.close()
        if self._poll is not None:
            self._poll.close()


@dataclass(frozen=True, slots=True)
class SimulatorFactory:
    """A simulator from plain data. env: the environment's settings; spec: as reported to main. batches: its env batches
    of `rows` rows and their spares, one part each."""

    name: str
    env: dict[str, Any]
    spec: EnvSpec
    rows: int
    batches: tuple[EnvBatchInfo, ...]
    step: StepSettings

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        settings = resolve("env", self.env)
        assert isinstance(settings, EnvSettings), "checked before the start"
        if context.rendezvous is not None:  # a process of its own
            os.environ[RUN_FOLDER] = str(context.rendezvous.parent)

        def make(info: EnvBatchInfo, address: str) -> Station:
            with ExitStack() as undo:
                env = settings.build(self.rows + info.spares)
                undo.callback(env.close)
                refuse_other(env, self.spec, self.rows + info.spares)
                batches = [(info, ResetAhead(env, info.spares) if info.spares else env)]
                station = Simulator(
                    self.name, incarnation, batches, self.step, context.arena, context.channels.emit, address
                )
                undo.pop_all()
            return station

        process = process_address(self.name, incarnation)
        addresses = [part_address(process, part) for part in range(len(self.batches))]
        return [
            (address, lambda info=info, address=address: make(info, address))  # type: ignore[misc]
            for info, address in zip(self.batches, addresses, strict=True)
        ]

    def announcements(self, incarnation: int) -> Sequence[SimulatorJoined]:
        return [SimulatorJoined(self.name, incarnation, (info,)) for info in self.batches]


def refuse_other(env: EnvBatch, spec: EnvSpec, rows: int) -> None:
    """RunHalted: the batch differs from the expected spec or rows."""
    if env.rows != rows:
        raise RunHalted(f"env.build({rows}) gave rows = {env.rows}, it must be {rows}; correct the environment")
    for name, found, wanted in env.spec.differing(spec):
        where = f"the spec of env.build({rows})"
        raise RunHalted(f"{where} gave {name} = {found}, it must be {wanted}; correct the environment")
