"""The simulator station: hosts env batches and lets each do its turn. Reaches neither torch nor transformers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from polyrhythm.envs.base import EnvBatch
from polyrhythm.flow.records import CancelRow, Command, EnvBatchInfo, Event, RefuseRequest, SimulatorJoined, StartRows
from polyrhythm.runtime.messages import Reply
from polyrhythm.runtime.payloads import Payloads
from polyrhythm.stations.env_host import EnvHost
from polyrhythm.stations.slot import StepSettings


class Simulator:
    """Hosts `batches` and signs its events with `name` and `epoch`.

    Raises ValueError for a setting that one of the environments cannot do.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        batches: Sequence[tuple[EnvBatchInfo, EnvBatch]],
        settings: StepSettings,
        payloads: Payloads,
        emit: Callable[[Event], None],
    ) -> None:
        self.name, self.epoch = name, epoch
        self.hosts = [EnvHost(info, env, settings, (name, epoch), payloads, emit) for info, env in batches]
        self._by_slot = {slot: host for host in self.hosts for slot in host.slots}
        self._turns = deque(self.hosts)

    def joined(self) -> SimulatorJoined:
        """The event that announces it."""
        return SimulatorJoined(self.name, self.epoch, tuple(host.info for host in self.hosts))

    def handle(self, command: Command) -> None:
        match command:
            case StartRows():
                self._by_slot[command.slot].start(command)
            case CancelRow():
                self._by_slot[command.slot].cancel(command)
            case RefuseRequest():
                self._by_slot[command.slot].refuse(command)
            case _:
                raise TypeError(f"a simulator does not do {type(command).__name__}")

    def deliver(self, reply: Reply) -> None:
        """A generator's answer to one of the slots."""
        self._by_slot[reply.slot].deliver(reply)

    def work(self) -> bool:
        """One unit of one env batch, each in its turn.

        Consumes: grants and answers. Waits for: nothing. Unblocked by: `handle` and `deliver`.
        Produces: requests, finished and failed samples.
        """
        for _ in self.hosts:
            host = self._turns[0]
            self._turns.rotate(-1)
            if host.work():
                return True
        return False

    def outstanding(self) -> list[str]:
        """What each live slot waits for, for a stall report."""
        return [slot.outstanding() for host in self.hosts for slot in host.slots.values() if slot.live or slot.pending]

    def statistics(self) -> dict[str, float]:
        """env_s: seconds inside the environments; env_steps: transitions; chunk_steps: of rows."""
        return {
            "env_s": sum(host.env.seconds for host in self.hosts),
            "env_steps": float(sum(host.env_steps for host in self.hosts)),
            "chunk_steps": float(sum(host.chunk_steps for host in self.hosts)),
        }

    def close(self) -> None:
        for host in self.hosts:
            host.env.close()
