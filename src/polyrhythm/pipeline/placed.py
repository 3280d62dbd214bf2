"""Computes once which stations a run has and where each is: settings and a number of devices in, `Placed` out.

Every user of placements (building, checks, memory plans, logs, the summary) calls this module, so that they agree.
Instance i of a kind, or rank i of the trainer, gets the i-th device of its list, round robin. Device ids are those of
the run (`runtime.devices`): torch's on one machine, counted on from node to node on a cluster; several stations may
share a device. Invariant: every process has exactly one seat, and within a kind two
devices differ by at most one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.placement import PlacementSettings, SeatSettings, list_device_ids
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.envs.base import traits_of
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.imports import count_cores
from polyrhythm.pipeline.observers.totals import EVALUATION
from polyrhythm.plugin import load, table
from polyrhythm.readable import counted
from polyrhythm.runtime.devices import CPU, CUDA, SIMULATED, Devices, bind_environment, devices_here, number_of
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.published import Ends
from polyrhythm.runtime.memory.tensors import count_devices
from polyrhythm.runtime.messages import TRAINER, rank_name
from polyrhythm.scheduler.settings import LeaseSettings

#: Prefix of the names of simulators that join.
JOINED = "simulator-joined-"
#: Stations for evaluation during training.
EVALUATION_SIMULATOR, EVALUATION_GENERATOR = f"simulator{EVALUATION}", f"generator{EVALUATION}"


#: Runs from before the stations start until they have ended; takes their seats and the folder of their logs, and gives
#: the seats with what they need to find it.
SharingService = Callable[[Mapping[str, Resources], Path | None], AbstractContextManager[Mapping[str, Resources]]]


@dataclass(frozen=True, slots=True)
class SharedSeats:
    """Result of a plugin of kind `placement`, which is named by `placement.sharing`: changed seats, the lease of shared
    devices, a sentence for each setting that wastes devices, and what runs beside the stations, if anything does."""

    seats: Mapping[str, Resources]
    lease: LeaseSettings | None = None
    warnings: Sequence[str] = ()
    service: SharingService | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """The stations of a run.

    names: by kind, those for background evaluation last; of the trainer, its ranks. seats: resources of each. ends:
    devices where weights are published and used. lease: stations that share devices in turns, or None. warnings: a
    sentence for each setting that wastes devices or cores. service: what runs beside the stations, or None.
    """

    names: dict[Kind, list[str]]
    seats: dict[str, Resources]
    ends: Ends
    lease: LeaseSettings | None
    warnings: tuple[str, ...]
    service: SharingService | None = None

    @property
    def serves_on_device(self) -> bool:
        """Whether generators are on devices."""
        return any(self.seats[name].device != CPU for name in self.names["generators"])

    def lends_prefixes(self, generator: str) -> bool:
        """Whether a rank of the trainer is on the generator's device, and neither leases it."""
        own, ranks = self.seats[generator], [self.seats[name] for name in self.names["trainer"]]
        return not own.leases and any(not rank.leases and rank.device == own.device for rank in ranks)

    def seats_of(self, station: str) -> list[Resources]:
        """Seats of the station's processes: the trainer has one per rank; stations of plugins get a default."""
        names = self.names["trainer"] if station == TRAINER else [station]
        return [self.seats.get(name, Resources()) for name in names]


def place(
    config: RunConfig, *, trainer: bool = True, folder: Path | None = None, devices: Devices | int | None = None
) -> Placed:
    """Place the stations on these devices (None: find them; a number: of this machine).

    folder: of the run, for state that leases move from the host to disk; trainer: whether there is one. ConfigError:
    `placement` names a device that does not exist.
    """
    found = _devices_of(config, devices)
    placement, names = config.placement, station_names(config, trainer=trainer, devices=found)
    seats = assign_seats(placement, names, found, os.environ, inline=config.launcher == "inline", row=config.devices)
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
    warnings = [*list_seat_warnings(config, names=names, devices=found), *shared.warnings]
    return Placed(names, seats, ends, shared.lease, tuple(warnings), shared.service)


def with_start(config: RunConfig, begun: RunConfig | None = None, devices: Devices | None = None) -> RunConfig:
    """The configuration with the settings that `placement.start` names. begun: of the run that it resumes, which keeps
    its own; devices: of another machine (None: find them)."""
    return load("pipeline", "start")(config, begun, devices) if config.placement.start == "plan" else config


def list_seat_warnings(
    config: RunConfig,
    *,
    trainer: bool = True,
    names: dict[Kind, list[str]] | None = None,
    devices: Devices | int | None = None,
) -> list[str]:
    """The `Placed.warnings` that need no seats, for machines on which not every station has one."""
    names = station_names(config, trainer=trainer) if names is None else names
    all_devices, preset = _devices_of(config, devices), config.placement.preset
    count = all_devices.count
    found = []
    least = _least_devices(preset) if preset is not None else 1  # with fewer it is an error
    if config.launcher != "inline" and least <= count < (config.devices or 0):
        there = f"are {count} devices" if count > 1 else "is 1 device"
        found = [f"devices = {config.devices}: there {there}; add devices={count} to scale the row"]
    found += list_unused_devices(config.placement, names, all_devices)
    return found + (list_excess_threads(config.placement, names, count_cores()) if config.launcher == "local" else [])


def station_names(
    config: RunConfig, *, trainer: bool = True, devices: Devices | int | None = None
) -> dict[Kind, list[str]]:
    """`Placed.names`, which needs no seats."""
    simulators = [f"simulator-{index}" for index in range(config.rollout.simulators)] + joined_names(config)
    generators = generator_names(config)
    if trainer and config.evaluation.reserved_rows:
        simulators.append(EVALUATION_SIMULATOR)
        if evaluator_name(config) not in generators:
            generators.append(evaluator_name(config))
    ranks = trainer_ranks(config, devices) if trainer else 0
    trainers = [rank_name(TRAINER, rank) for rank in range(ranks)]
    found: dict[Kind, list[str]] = {"simulators": simulators, "generators": generators, "trainer": trainers}
    return found if config.scoring is None else {**found, "scorers": scorer_names(config)}


def trainer_ranks(config: RunConfig, devices: Devices | int | None = None) -> int:
    """Number of trainer processes on these devices (None: find them; a number: of this machine)."""
    return count_ranks(config.placement, _devices_of(config, devices))


def find_devices(config: RunConfig) -> Devices:
    """The devices that a run of this configuration has: its launcher's, if a plugin of kind `devices` knows them, else
    this machine's."""
    if config.launcher in table("devices"):
        devices: Devices = load("devices", config.launcher)(config)
        return devices
    if simulated := config.placement.simulated_devices:
        return devices_here(simulated, SIMULATED)
    return devices_here(count_devices())


def _devices_of(config: RunConfig, devices: Devices | int | None) -> Devices:
    if devices is None:
        return find_devices(config)
    kind = SIMULATED if config.placement.simulated_devices else CUDA
    return devices_here(devices, kind) if isinstance(devices, int) else devices


def joined_names(config: RunConfig) -> list[str]:
    return [f"{JOINED}{index}" for index in range(config.join.simulators)]


def generator_names(config: RunConfig) -> list[str]:
    """Generators, without one for evaluation alone."""
    return [f"generator-{index}" for index in range(config.rollout.generators)]


def prefix_lenders(config: RunConfig, placed: Placed) -> list[str]:
    """Generators that may lend the trainer what frozen parts of the policy give: those of passes, on the device of a
    rank, where both stay."""
    if config.training.precomputed_mib == 0 or isinstance(config.batching, StreamsBatching):
        return []
    return [name for name in generator_names(config) if placed.lends_prefixes(name)]


def scorer_names(config: RunConfig) -> list[str]:
    return [f"scorer-{index}" for index in range(config.scoring.processes)] if config.scoring is not None else []


def evaluator_name(config: RunConfig) -> str:
    """Generator that holds the weights for background evaluation; "" for none."""
    if not config.evaluation.reserved_rows:
        return ""
    return EVALUATION_GENERATOR if config.evaluation.weights == "own_generator" else generator_names(config)[0]


Kind = Literal["simulators", "generators", "trainer", "scorers"]
#: Kinds whose processes are bound to their device by their environment.
_BOUND: tuple[Kind, ...] = ("simulators", "scorers")
#: Ids of the devices of each kind; none for the CPU.
DeviceIds = dict[Kind, tuple[int, ...]]

#: hybrid: one device in this many generates, the others simulate (RL-VLA³, A.1: 6 and 2 of 8). disaggregated: one in
#: this many trains (A.2, at 3:1).
_DEVICES_PER_OTHER = 4
#: Name of the instances of a kind, and the setting that counts them; other kinds: `rollout.<kind>`.
_NUMBERS: dict[Kind, tuple[str, str]] = {
    "trainer": ("ranks", "placement.trainer.ranks"),
    "scorers": ("scorers", "scoring.processes"),
}
_INLINE = (
    "placement.simulators.devices: with launcher = inline a simulator has no process of its own that could be "
    "bound to a device; set placement.simulators.devices to cpu, or launcher to local"
)
#: Maximum number of stations of a kind that are listed by name.
_LISTED = 3


def assign_seats(
    placement: PlacementSettings,
    stations: Mapping[Kind, Sequence[str]],
    devices: Devices,
    environment: Mapping[str, str] | None = None,
    *,
    inline: bool = False,
    row: int | None = None,
) -> dict[str, Resources]:
    """Seat of every station, and of every further rank of the trainer, by name.

    stations: names by kind, evaluation's own last; of the trainer, its ranks. environment: variables of this process; a
    simulator's seat has the additional ones of its process. row: number of devices that the recipe is made for
    (`devices`), for the message. MissingError: devices are missing, with a problem for each kind. ConfigError:
    simulators are bound to devices in an `inline` run, which has one process.
    """
    kinds = [kind for kind, names in stations.items() if names]
    ids = _list_ids(placement, kinds, devices, inline=inline, row=row)
    seats: dict[str, Resources] = {}
    for kind, names in stations.items():
        threads, own = _settings(placement, kind).threads, ids.get(kind, ())
        for index, name in enumerate(names):
            if not own:
                seats[name] = Resources("cpu", threads)
                continue
            number = own[index % len(own)]
            node, there = devices.place(number)
            binds = kind in _BOUND and devices.kind == CUDA
            variables = bind_environment(there, environment or {}) if binds else {}
            local = "" if there == number or devices.kind == SIMULATED else f"{CUDA}:{there}"
            seats[name] = Resources(devices.name(number), threads, variables, node, local)
    return seats


def find_ends(
    placement: PlacementSettings, stations: Mapping[Kind, Sequence[str]], seats: Mapping[str, Resources]
) -> Ends:
    """Devices where weights are published (by the trainer's first rank, or else by main) and used."""
    ranks = stations["trainer"]
    why = ""
    if placement.trainer.strategy == "shard" and len(ranks) > 1:
        why = "the trainer's weights are sharded, and no rank keeps them whole"
    elif ranks and seats[ranks[0]].leases:
        why = "the trainer leaves its device while others are on it"
    own = seats[ranks[0]] if ranks else Resources()
    there = [seat for name in stations["generators"] if (seat := seats[name]).node == own.node]
    local = {seat.device: seat.local for seat in (own, *there) if seat.local}
    # Neither end of a pair frees its process group when it leaves the device.
    pairs = not any(seats[name].leases for name in [*ranks[:1], *stations["generators"]])
    together = bool(own.process) and all(seat.process == own.process for seat in there)
    return Ends(own.device, tuple(seat.device for seat in there), why, local, pairs, together)


def find_drawing_device(config: RunConfig, environment: Mapping[str, str], devices: Devices | int | None = None) -> str:
    """The device, as torch names it, on which simulators of this machine that draw by EGL would draw while a generator
    or the trainer computes there; "" if there is none.

    None computes meanwhile in one thread, or if all env batches wait for each other and for the update. Simulators
    without a device draw on EGL's first one. environment: variables of this process.
    """
    alone = config.batching.type == "lockstep" and config.freshness.max_lag == 0
    if config.launcher != "local" or alone or config.placement.simulated_devices:
        return ""
    names = station_names(config, devices=devices)
    try:
        seats = assign_seats(config.placement, names, _devices_of(config, devices), environment)
    except ConfigError:
        return ""  # the check of devices reports it
    variables = [seats[name].environment for name in names["simulators"]] or [{}]
    chosen = environment.get("MUJOCO_EGL_DEVICE_ID", "0")
    draws = {own.get("MUJOCO_EGL_DEVICE_ID", chosen) for own in variables}
    for name in (*names["generators"], *names["trainer"]):
        device = seats[name].torch_device
        if device != CPU and bind_environment(number_of(device), environment)["CUDA_VISIBLE_DEVICES"] in draws:
            return device
    return ""


def count_ranks(placement: PlacementSettings, devices: Devices) -> int:
    """Number of trainer processes: as set, else one per device of the trainer, else one. Missing devices are reported
    elsewhere."""
    trainer, preset = placement.trainer, placement.preset
    if trainer.ranks is not None:
        return trainer.ranks
    asked = trainer.devices
    if asked is None:
        placed = preset is not None and devices.count >= _least_devices(preset)
        return len(divide_devices(preset, devices)["trainer"]) if placed and preset else 1
    return max(1, devices.count) if asked == "all" else 1 if asked == "cpu" else len(list_device_ids(asked))


def list_unused_devices(
    placement: PlacementSettings, stations: Mapping[Kind, Sequence[str]], devices: Devices
) -> list[str]:
    """A sentence for each kind that has more devices, named or of the preset, than stations; and one if no station has
    any of the devices that are simulated or a cluster's."""
    found = []
    preset = placement.preset
    has = divide_devices(preset, devices) if preset is not None and devices.count >= _least_devices(preset) else {}
    for kind, names in stations.items():
        asked = _settings(placement, kind).devices
        named = asked not in (None, "cpu", "all")
        ids = list_device_ids(asked) if asked and named else has.get(kind, ()) if asked is None else ()
        if names and (unused := ids[len(names) :]):
            rest = ", ".join(map(str, unused))
            fewer, setting = _NUMBERS.get(kind, (kind, f"rollout.{kind}"))
            what = f"placement.{kind}.devices = {asked}" if named else f"placement.preset = {preset}"
            found.append(
                f"{what}: {rest} stay unused, because there are fewer {fewer}; raise {setting} to {len(ids)}"
                + (", or name fewer devices" if named else "")
            )
    nobody = not has and all(_settings(placement, kind).devices in (None, "cpu") for kind in stations)
    if nobody and devices.count and (devices.kind == SIMULATED or devices.on_cluster):
        found.append(f"placement: no station is on the {devices.count} devices; see placement, such as colocated")
    return found


def list_excess_threads(placement: PlacementSettings, stations: Mapping[Kind, Sequence[str]], cores: int) -> list[str]:
    """A sentence for each kind whose stations have more threads than this machine has cores."""
    return [
        f"placement.{kind}.threads = {threads}: this machine has {cores} core{'s' * (cores > 1)}, and more threads "
        f"than cores are many times slower; set it to {cores} or less"
        for kind, names in stations.items()
        if names and (threads := _settings(placement, kind).threads) > cores
    ]


def describe_seat(seat: Resources) -> str:
    """`cuda:1, 2 threads, in turn`; "in turn" marks a leased device."""
    return f"{seat.device}, {seat.threads} thread{'s' * (seat.threads > 1)}{', in turn' * bool(seat.leases)}"


def describe_seats(seats: Mapping[str, Resources]) -> dict[str, dict[str, str | int]]:
    """Seats as plain data by station: `{"generator-0": {"device": "cuda:1", "threads": 2}}`."""
    return {name: {"device": seat.device, "threads": seat.threads} for name, seat in seats.items()}


def group_seats(seats: Mapping[str, Resources]) -> str:
    """All seats in one line, equal ones merged: `simulator-0, simulator-1: cpu, 1 thread; trainer: cuda:0, …`."""
    names: dict[str, list[str]] = {}
    for name, seat in seats.items():
        names.setdefault(describe_seat(seat), []).append(name)
    return "; ".join(f"{_list_names(own)}: {seat}" for seat, own in names.items())


def _list_names(names: Sequence[str]) -> str:
    """`simulator-0 to simulator-119, trainer`: more than three of a kind are abbreviated, with gaps between them to
    `simulator-0, … simulator-6 (4)`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.rpartition("-")[0] or name, []).append(name)
    listed = []
    for own in kinds.values():
        numbers = [name.rpartition("-")[2] for name in own]
        if len(own) <= _LISTED:
            listed += own
        elif all(map(str.isdecimal, numbers)) and int(numbers[-1]) - int(numbers[0]) == len(own) - 1:
            listed.append(f"{own[0]} to {own[-1]}")
        else:
            listed.append(f"{own[0]}, {own[1]}, … {own[-1]} ({len(own)})")
    return ", ".join(listed)


def _settings(placement: PlacementSettings, kind: Kind) -> SeatSettings:
    settings: SeatSettings = getattr(placement, kind)
    return settings


def _list_ids(
    placement: PlacementSettings, kinds: Sequence[Kind], devices: Devices, *, inline: bool, row: int | None
) -> DeviceIds:
    found: DeviceIds = {}
    bound = placement.simulators.devices  # simulators are bound to devices by the environment of their processes
    binds = bound != "cpu" if bound is not None else placement.preset is not None
    problems = [_INLINE] * (inline and binds)
    kind_of_error: type[ConfigError] = ConfigError if problems else MissingError
    for kind in kinds:
        asked = _settings(placement, kind).devices
        try:
            if asked is not None:
                found[kind] = _check_ids(kind, asked, devices)
            elif placement.preset is not None:
                found[kind] = divide_devices(placement.preset, devices, row).get(kind, ())
        except ConfigError as error:
            problems += error.problems
            if not isinstance(error, MissingError):
                kind_of_error = ConfigError
    if problems:
        raise kind_of_error(*dict.fromkeys(problems))
    return found


def _check_ids(kind: Kind, asked: str, devices: Devices) -> tuple[int, ...]:
    if asked == "cpu":
        return ()
    count = devices.count
    ids = tuple(range(count)) if asked == "all" else list_device_ids(asked)
    what = f"placement.{kind}.devices = {asked}: {_describe_devices(devices)}"
    if not count:
        more = "nodes that have GPUs" if devices.on_cluster else "a torch that has CUDA"
        raise MissingError(f"{what}; use cpu, or {more}")
    if max(ids) >= count:
        last = f"0-{count - 1}" if count > 1 else "0"
        raise MissingError(f"{what}; use cpu, or ids of {last}")
    return ids


def _describe_devices(devices: Devices) -> str:
    """`torch sees 2 CUDA devices here`, `the cluster has 16 GPUs (8 on node a, 8 on node b)`."""
    count = devices.count
    if devices.on_cluster:
        simulated = devices.kind == SIMULATED
        own = ", ".join(f"{number} on {node}" for node, number in devices.nodes if number)
        has = f"the cluster has {counted(count, 'simulated device' if simulated else 'GPU')}"
        how = ", which are counted as GPUs of its nodes (`ray start --num-gpus N`)" * simulated
        return has + f" ({own})" * bool(own) + how
    if devices.kind == CUDA:
        return f"torch sees {counted(count, 'CUDA device')} here"
    return f"{counted(count, 'device')} {'is' if count == 1 else 'are'} simulated here"


def divide_devices(preset: str, devices: Devices, row: int | None = None) -> DeviceIds:
    """Device ids of each kind under a preset (RL-VLA³, section 4 and A.2), of devices 0 to n-1.

    colocated: every device simulates, generates and trains. hybrid: a device simulates (three in four) or generates
    (one in four, at least one); every device trains. disaggregated: one device in four, at least one, only trains;
    every other one simulates and generates. The ratios are those of all nodes together. Generators of hybrid are dealt
    to nodes by their devices, because a simulator and its generator exchange something at each chunk step; the trainer
    of disaggregated has the last devices, because its ranks exchange gradients.
    """
    least, count = _least_devices(preset), devices.count
    if count < least:
        gpus = "device" if devices.kind == SIMULATED else "GPU" if devices.on_cluster else "CUDA device"
        takes = f"it takes at least {counted(least, gpus)}"
        if row and row >= least:
            takes = f"this row takes {counted(row, gpus)} (devices=N scales it to N)"
        raise MissingError(
            f"placement.preset = {preset}: {takes} and {_describe_devices(devices)}; write "
            f"{'placement=colocated, or ' * bool(count)}placement=null for the CPU"
        )
    every = tuple(range(count))
    if preset == "colocated":
        return {"simulators": every, "generators": every, "trainer": every}
    others = max(1, count // _DEVICES_PER_OTHER)
    if preset == "disaggregated":
        first, last = every[:-others], every[-others:]
        return {"simulators": first, "generators": first, "trainer": last}
    generates: list[int] = []
    end = 0
    for _, own in devices.nodes:
        end += own
        share = others * end // count - len(generates)
        generates += range(end - share, end)
    simulates = tuple(number for number in every if number not in generates)
    return {"simulators": simulates, "generators": tuple(generates), "trainer": every}


def _least_devices(preset: str) -> int:
    return 1 if preset == "colocated" else 2
