"""Makes a simulator station from plain data. Imports neither torch nor transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvBatch, EnvSettings
from polyrhythm.envs.mujoco import RUN_FOLDER
from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import Station, part_address, process_address
from polyrhythm.scheduler.records import EnvBatchInfo, SimulatorJoined
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.reset_ahead import ResetAhead
from polyrhythm.stations.simulator.slot import SlotIdentity, StepSettings
from polyrhythm.stations.simulator.station import Simulator


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
                source = SlotIdentity(self.name, incarnation, address, context.channels.emit)
                batch = ResetAhead(env, info.spares) if info.spares else env
                station = Simulator(source, info, batch, self.step, context.arena)
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
