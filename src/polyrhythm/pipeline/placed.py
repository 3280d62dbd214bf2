"""Which stations a run has and where each of them is, found once: settings and a number of devices in, `Placed` out.

Whoever asks where a station is (building, checks, plans of memory, logs, the summary) asks this, so that all of them
have the same answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.base import traits_of
from polyrhythm.pipeline.observers.totals import EVALUATION
from polyrhythm.pipeline.seats import (
    Kind,
    assign_seats,
    count_ranks,
    find_ends,
    list_excess_threads,
    list_unused_devices,
)
from polyrhythm.plugin import load
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.tensors import count_cores, count_devices
from polyrhythm.runtime.memory.ways import CPU, Ends
from polyrhythm.runtime.messages import rank_name
from polyrhythm.scheduler.settings import LeaseSettings

TRAINER = "trainer"
#: How the names of simulators that join begin.
JOINED = "simulator-joined-"
#: Stations for evaluation during training.
EVALUATION_SIMULATOR, EVALUATION_GENERATOR = f"simulator{EVALUATION}", f"generator{EVALUATION}"


@dataclass(frozen=True, slots=True)
class SharedSeats:
    """What a plugin of kind `placement`, by the name that `placement.sharing` has, makes of the seats: these seats, who
    is on its device in turn, and a sentence for each setting that wastes devices."""

    seats: Mapping[str, Resources]
    lease: LeaseSettings | None = None
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """The stations of a run. names: by kind, those for background evaluation last; of the trainer, those of its ranks.
    seats: the resources of each. ends: where published weights come from and go to. lease: who is on its devices in
    turn, if anybody is. warnings: a sentence for each setting that wastes devices or cores."""

    names: dict[Kind, list[str]]
    seats: dict[str, Resources]
    ends: Ends
    lease: LeaseSettings | None
    warnings: tuple[str, ...]

    @property
    def serves_on_device(self) -> bool:
        """Whether generators are on CUDA devices."""
        return any(self.seats[name].device != CPU for name in self.names["generators"])

    def seats_of(self, station: str) -> list[Resources]:
        """The seat of the station's process, of the trainer one for each rank; a default for plugins' own."""
        names = self.names["trainer"] if station == TRAINER else [station]
        return [self.seats.get(name, Resources()) for name in names]


def place(config: RunConfig, *, trainer: bool = True, folder: Path | None = None, devices: int | None = None) -> Placed:
    """Place the stations on a machine with so many CUDA devices (None: this one). folder: of the run, for what leaves a
    leased host; trainer: whether there is one. ConfigError: `placement` names a device that does not exist."""
    devices = count_devices() if devices is None else devices
    placement, names = config.placement, station_names(config, trainer=trainer, devices=devices)
    seats = assign_seats(placement, names, devices, os.environ, inline=config.launcher == "inline", row=config.devices)
    leaves = traits_of(config.env).leaves_device
    joined = {name: Resources("cpu", 1) for name in joined_names(config)}  # they only pass on what comes
    own = {name: seat for name, seat in seats.items() if name not in joined}
    shared = SharedSeats(own)
    if placement.sharing != "share":
        shared = load("placement", placement.sharing)(
            placement, own, simulators_leave=leaves, offload=str(folder or "")
        )
    seats |= joined | dict(shared.seats)
    ends = find_ends(placement, names, seats)
    seats |= {name: replace(seats[name], ends=ends) for name in [*names["generators"], *names["trainer"]]}
    warnings = [*_list_warnings(config, names, devices), *shared.warnings]
    return Placed(names, seats, ends, shared.lease, tuple(warnings))


def list_seat_warnings(config: RunConfig, *, trainer: bool = True) -> list[str]:
    """Those of `Placed.warnings` that need no seats, as not every station may have one on this machine."""
    return _list_warnings(config, station_names(config, trainer=trainer), count_devices())


def _list_warnings(config: RunConfig, names: dict[Kind, list[str]], devices: int) -> list[str]:
    excess = list_excess_threads(config.placement, names, count_cores()) if config.launcher == "local" else []
    fewer = []
    if config.launcher == "local" and 0 < devices < (config.devices or 0):
        there = f"{devices} CUDA device{'s' * (devices > 1)}"
        fewer = [f"devices = {config.devices}: this machine has {there}; add devices={devices} to scale the row"]
    return fewer + list_unused_devices(config.placement, names) + excess


def station_names(config: RunConfig, *, trainer: bool = True, devices: int | None = None) -> dict[Kind, list[str]]:
    """`Placed.names`, also where not every station has a seat on the machine."""
    simulators, generators = (
        [f"simulator-{index}" for index in range(config.rollout.simulators)] + joined_names(config),
        generator_names(config),
    )
    if trainer and config.evaluation.reserved_rows:
        simulators.append(EVALUATION_SIMULATOR)
        if evaluator_name(config) not in generators:
            generators.append(evaluator_name(config))
    ranks = trainer_ranks(config, devices) if trainer else 0
    trainers = [rank_name(TRAINER, rank) for rank in range(ranks)]
    found: dict[Kind, list[str]] = {"simulators": simulators, "generators": generators, "trainer": trainers}
    return found if config.scoring is None else {**found, "scorers": scorer_names(config)}


def trainer_ranks(config: RunConfig, devices: int | None = None) -> int:
    """Processes of the trainer on a machine with so many CUDA devices (None: this one)."""
    return count_ranks(config.placement, count_devices() if devices is None else devices)


def joined_names(config: RunConfig) -> list[str]:
    """The simulators that join."""
    return [f"{JOINED}{index}" for index in range(config.join.simulators)]


def generator_names(config: RunConfig) -> list[str]:
    """The generators, without one for evaluation alone."""
    return [f"generator-{index}" for index in range(config.rollout.generators)]


def scorer_names(config: RunConfig) -> list[str]:
    """The scorers, if there are any."""
    return [f"scorer-{index}" for index in range(config.scoring.processes)] if config.scoring is not None else []


def evaluator_name(config: RunConfig) -> str:
    """The generator that has the weights for background evaluation; "" for none."""
    if not config.evaluation.reserved_rows:
        return ""
    return EVALUATION_GENERATOR if config.evaluation.weights == "own_generator" else generator_names(config)[0]
