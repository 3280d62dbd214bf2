"""Computes once which stations a run has and where each is: settings and a number of devices in, `Placed` out.

Every user of placements (building, checks, memory plans, logs, the summary) calls this module, so that they agree.
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
from polyrhythm.runtime.memory.published import CPU, Ends
from polyrhythm.runtime.memory.tensors import count_cores, count_devices
from polyrhythm.runtime.messages import rank_name
from polyrhythm.scheduler.settings import LeaseSettings

TRAINER = "trainer"
#: Prefix of the names of simulators that join.
JOINED = "simulator-joined-"
#: Stations for evaluation during training.
EVALUATION_SIMULATOR, EVALUATION_GENERATOR = f"simulator{EVALUATION}", f"generator{EVALUATION}"


@dataclass(frozen=True, slots=True)
class SharedSeats:
    """Result of a plugin of kind `placement`, which is named by `placement.sharing`: changed seats, the lease of shared
    devices, and a sentence for each setting that wastes devices."""

    seats: Mapping[str, Resources]
    lease: LeaseSettings | None = None
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """The stations of a run.

    names: by kind, those for background evaluation last; of the trainer, its ranks. seats: resources of each. ends:
    devices where weights are published and used. lease: stations that share devices in turns, or None. warnings: a
    sentence for each setting that wastes devices or cores.
    """

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
        """Seats of the station's processes: the trainer has one per rank; stations of plugins get a default."""
        names = self.names["trainer"] if station == TRAINER else [station]
        return [self.seats.get(name, Resources()) for name in names]


def place(config: RunConfig, *, trainer: bool = True, folder: Path | None = None, devices: int | None = None) -> Placed:
    """Place the stations on a machine with this number of CUDA devices (None: count them).

    folder: of the run, for state that leases move from the host to disk; trainer: whether there is one. ConfigError:
    `placement` names a device that does not exist.
    """
    devices = count_devices() if devices is None else devices
    placement, names = config.placement, station_names(config, trainer=trainer, devices=devices)
    seats = assign_seats(placement, names, devices, os.environ, inline=config.launcher == "inline", row=config.devices)
    leaves = traits_of(config.env).leaves_device
    joined = {name: Resources("cpu", 1) for name in joined_names(config)}  # they only forward messages
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
    """The `Placed.warnings` that need no seats, for machines on which not every station has one."""
    return _list_warnings(config, station_names(config, trainer=trainer), count_devices())


def _list_warnings(config: RunConfig, names: dict[Kind, list[str]], devices: int) -> list[str]:
    excess = list_excess_threads(config.placement, names, count_cores()) if config.launcher == "local" else []
    fewer = []
    if config.launcher == "local" and 0 < devices < (config.devices or 0):
        there = f"{devices} CUDA device{'s' * (devices > 1)}"
        fewer = [f"devices = {config.devices}: this machine has {there}; add devices={devices} to scale the row"]
    return fewer + list_unused_devices(config.placement, names) + excess


def station_names(config: RunConfig, *, trainer: bool = True, devices: int | None = None) -> dict[Kind, list[str]]:
    """`Placed.names`, which needs no seats."""
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
    """Number of trainer processes on a machine with this number of CUDA devices (None: count them)."""
    return count_ranks(config.placement, count_devices() if devices is None else devices)


def joined_names(config: RunConfig) -> list[str]:
    return [f"{JOINED}{index}" for index in range(config.join.simulators)]


def generator_names(config: RunConfig) -> list[str]:
    """Generators, without one for evaluation alone."""
    return [f"generator-{index}" for index in range(config.rollout.generators)]


def scorer_names(config: RunConfig) -> list[str]:
    return [f"scorer-{index}" for index in range(config.scoring.processes)] if config.scoring is not None else []


def evaluator_name(config: RunConfig) -> str:
    """Generator that holds the weights for background evaluation; "" for none."""
    if not config.evaluation.reserved_rows:
        return ""
    return EVALUATION_GENERATOR if config.evaluation.weights == "own_generator" else generator_names(config)[0]
