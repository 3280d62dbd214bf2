"""What a placement decides, what it may not change, and what memory it takes. Pure.

`Demand` is what a recipe asks for wherever its stations are; `Nodes` is the hardware; an `Arrangement` puts stations on
it and says how many there are and how much each does at a time. Devices are numbered over all nodes, as in a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polyrhythm.plugins.planning.profile import Kind, Profile, Work
from polyrhythm.scheduler.settings import SchedulerSettings

Sharing = Literal["share", "process", "lease"]
#: Bytes of a process's CUDA context (assumed; `plan --memory` leaves it out).
CONTEXT = 500_000_000
#: Name of the host's memory in `memory_by_device`.
HOST = "host"


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines. devices: number on each node, 0 for a host of simulators; cores, memory (bytes): of each node;
    device_memory: bytes of each device, 0: not known."""

    devices: tuple[int, ...]
    cores: int
    memory: int = 0
    device_memory: int = 0

    @property
    def count(self) -> int:
        return sum(self.devices)

    def node_of(self, device: int) -> int:
        """The node of a device. IndexError: there is no such device."""
        for node, own in enumerate(self.devices):
            if device < own:
                return node
            device -= own
        raise IndexError(device)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a recipe asks for. scheduler: its scheduler, with limits of a batch that arrangements replace; rows: of all
    simulators; epochs: passes over an update's samples; minibatch_steps: chunk steps of an optimizer step, 0: those of
    a mini-batch; mini_batches: of an update; observation: bytes of a row's request; simulators_leave: they can leave
    their device; scorers: stations that score."""

    scheduler: SchedulerSettings
    rows: int
    epochs: int = 1
    minibatch_steps: int = 0
    mini_batches: int = 1
    observation: int = 0
    simulators_leave: bool = False
    scorers: int = 0

    def optimizer_steps(self, chunk_steps: float) -> int:
        """Optimizer steps of an update of samples of `chunk_steps` in the mean."""
        steps = self.scheduler.batch_size * chunk_steps / self.mini_batches
        divided = max(1, math.ceil(steps / self.minibatch_steps)) if self.minibatch_steps else 1
        return self.epochs * self.mini_batches * divided


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Stations on devices. devices: by kind, of which station i has the i-th, counted round; the trainer has a rank on
    each; none: on the hosts. env_batches: of a simulator; rows: of an env batch; slots: of an env batch; max_rows: of a
    pass; micro_batch: chunk steps of a training pass, 0: an optimizer step's."""

    simulators: int
    generators: int
    env_batches: int
    rows: int
    slots: int = 1
    max_rows: int = 64
    micro_batch: int = 0
    sharing: Sharing = "share"
    simulator_devices: tuple[int, ...] = ()
    generator_devices: tuple[int, ...] = ()
    trainer_devices: tuple[int, ...] = ()

    @property
    def slot_rows(self) -> int:
        """Rows of a slot."""
        return -(-self.rows // self.slots)

    @property
    def ranks(self) -> int:
        return max(1, len(self.trainer_devices))

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that have a station."""
        return tuple(sorted({*self.simulator_devices, *self.generator_devices, *self.trainer_devices}))

    def stations(self) -> Iterator[tuple[Kind, int | None]]:
        """The kind and device of each process; None: on a host."""
        for kind, count, devices in (
            ("simulator", self.simulators, self.simulator_devices),
            ("generator", self.generators, self.generator_devices),
            ("trainer", self.ranks, self.trainer_devices),
        ):
            for index in range(count):
                yield kind, devices[index % len(devices)] if devices else None  # type: ignore[misc]

    def recipe(self) -> dict[str, Any]:
        """The settings of a recipe that make it, as sections."""
        placement: dict[str, Any] = {
            kind: {"devices": devices_text(devices)}
            for kind, devices in (
                ("simulators", self.simulator_devices),
                ("generators", self.generator_devices),
                ("trainer", self.trainer_devices),
            )
        }
        return {
            "placement": placement | {"preset": None, "sharing": self.sharing},
            "rollout": {
                "simulators": self.simulators,
                "env_batches": self.env_batches,
                "rows": self.rows,
                "sharding": f"even:{self.slots}" if self.slots > 1 else "whole",
                "generators": self.generators,
            },
            "batching": {"max_rows": self.max_rows},
            "training": {"micro_batch_steps": self.micro_batch},
        }


def devices_text(devices: Sequence[int]) -> str:
    """Device ids as a recipe has them: (0, 1, 2, 6) → 0-2,6; none → cpu."""
    if not devices:
        return "cpu"
    parts: list[list[int]] = []
    for number in devices:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0]) for own in parts)


def memory_by_device(profile: Profile, demand: Demand, nodes: Nodes, one: Arrangement) -> dict[str, int]:
    """Bytes on each device by number, and of the fullest host, at the peak. Under `lease` the largest of the stations
    that take turns on a device counts there, and what they keep lies on the host too."""
    needs = {kind: _station_memory(profile, demand, one, kind) for kind in ("simulator", "generator", "trainer")}
    found = {str(number): 0 for number in range(nodes.count)}
    hosts = [0] * len(nodes.devices)
    turns: dict[int, list[int]] = {}
    simulated = 0
    for kind, device in one.stations():
        resident, peak, host = needs[kind]
        if device is None:  # simulators are dealt over the hosts; the rest is on the first
            node = simulated % len(hosts) if kind == "simulator" else 0
            simulated += kind == "simulator"
            hosts[node] += host + peak
            continue
        hosts[nodes.node_of(device)] += host
        leaves = one.sharing == "lease" and (kind != "simulator" or demand.simulators_leave)
        if leaves:
            turns.setdefault(device, []).append(peak)
            hosts[nodes.node_of(device)] += resident
        else:
            found[str(device)] += peak + CONTEXT
    for device, peaks in turns.items():
        found[str(device)] += max(peaks) + CONTEXT * len(peaks)
    if one.sharing == "process":
        found[str(one.generator_devices[0])] -= CONTEXT
    return found | {HOST: max(hosts)}


def why_not(profile: Profile, demand: Demand, nodes: Nodes, one: Arrangement) -> str:
    """Why memory rules it out, in words; "" if it fits."""
    for name, size in memory_by_device(profile, demand, nodes, one).items():
        room = nodes.memory if name == HOST else nodes.device_memory
        if room and size > room:
            what = "the host" if name == HOST else f"device {name}"
            return f"{what} would hold {size / 1e9:.3g} of {room / 1e9:.3g} GB"
    return ""


def _station_memory(profile: Profile, demand: Demand, one: Arrangement, kind: Kind) -> tuple[int, int, int]:
    """Resident and peak bytes of a station where it works, and bytes in host memory."""
    station = profile.stations.get(kind)
    if station is None:
        return 0, 0, 0
    amount, works = {
        "simulator": (one.rows * one.env_batches, ("step", "reset")),
        "generator": (one.max_rows, ("pass",)),
        "trainer": (micro_batch_of(profile, demand, one), ("micro_batch", "optimizer_step")),
    }[kind]
    working = max((_memory(station.works[name], amount) for name in works if name in station.works), default=0)
    return station.resident, station.resident + working, station.host


def micro_batch_of(profile: Profile, demand: Demand, one: Arrangement) -> int:
    """Chunk steps of a training pass of a rank."""
    whole = step_of_rank(profile, demand, one)
    return min(one.micro_batch or whole, whole)


def step_of_rank(profile: Profile, demand: Demand, one: Arrangement) -> int:
    """Chunk steps of a rank in an optimizer step."""
    steps = demand.scheduler.batch_size * profile.episodes.mean / demand.mini_batches
    return max(1, math.ceil(min(demand.minibatch_steps or steps, steps) / one.ranks))


def _memory(work: Work, amount: int) -> int:
    """Bytes of an amount of work above the resident ones: on the lines between those measured; beyond them in
    proportion to the last."""
    known = [timing for timing in work.timings if timing.memory]
    if not known:
        return 0
    below = [timing for timing in known if timing.amount <= amount]
    above = [timing for timing in known if timing.amount > amount]
    if not below:
        return known[0].memory
    low = below[-1]
    if not above:
        return round(low.memory * max(1.0, amount / max(1, low.amount)))
    high = above[0]
    share = (amount - low.amount) / (high.amount - low.amount)
    return round(low.memory + share * (high.memory - low.memory))
