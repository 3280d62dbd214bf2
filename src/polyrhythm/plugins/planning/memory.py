"""Memory of a placement, from a profile: of each kind of station, and by device."""

from __future__ import annotations

import math
from collections.abc import Mapping

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.array_specs import env_batch_infos, largest_batch
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.placed import Kind as PlacedKind
from polyrhythm.pipeline.placed import place
from polyrhythm.plugins.memory_estimate.needs import micro_batch_rows
from polyrhythm.plugins.planning.costs import sample_steps
from polyrhythm.plugins.planning.profile import Kind, Profile, Work, WorkName
from polyrhythm.runtime.devices import CPU, Devices
from polyrhythm.specs import EnvSpec

#: Kind of station by its plural in `Placed.names`.
KINDS: Mapping[PlacedKind, Kind] = {
    "simulators": "simulator",
    "generators": "generator",
    "trainer": "trainer",
    "scorers": "scorer",
}


def station_memory(profile: Profile, config: RunConfig, spec: EnvSpec, ranks: int = 1) -> dict[Kind, int]:
    """Bytes that a station of each kind has on its device while it works, by the recipe's amounts. ranks: share the
    trainer's work; what each keeps is not divided."""
    infos, steps = env_batch_infos(config, spec), sample_steps(profile, config)
    amounts: dict[WorkName, float] = {
        "step": config.rollout.rows,
        "pass": largest_batch(config, infos),
        "micro_batch": micro_batch_rows(config, math.ceil(steps), ranks),
        "prepare": config.training.batch_size * steps / ranks,
    }
    found: dict[Kind, int] = {}
    for kind, station in profile.stations.items():
        own = [_memory(work, amounts.get(name, 0)) for name, work in station.works.items()]
        found[kind] = station.resident + max(own, default=0)
    return found


def device_memory(
    profile: Profile, config: RunConfig, *, devices: Devices | int | None = None, spec: EnvSpec | None = None
) -> dict[str, int]:
    """Bytes on each device of the placement: of its stations, and of those that take turns there the largest."""
    spec = env_settings(config).spec() if spec is None else spec
    placed = place(config, devices=devices)
    each = station_memory(profile, config, spec, len(placed.names["trainer"]))
    found: dict[str, tuple[list[int], list[int]]] = {}  # those that stay there, and those that take turns
    for plural, names in placed.names.items():
        for seat in (placed.seats[name] for name in names):
            if seat.device != CPU:
                found.setdefault(seat.device, ([], []))[bool(seat.leases)].append(each.get(KINDS[plural], 0))
    return {device: sum(stay) + max(turn, default=0) for device, (stay, turn) in sorted(found.items())}


def _memory(work: Work, amount: float) -> int:
    """Bytes of an amount: proportional beyond the largest measured one, else of the next larger one."""
    most = work.timings[-1]
    if amount > most.amount:
        return round(most.memory * amount / max(1, most.amount))
    return next(timing.memory for timing in work.timings if timing.amount >= amount)
