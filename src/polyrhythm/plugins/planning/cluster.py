"""Turns a profile and a recipe into the settings of a simulated cluster.

A station's work costs in the simulation what it took alone. What it takes longer beside others follows from the
devices: the stations of a device share it, and the stations without one share their host's cores, which are a device of
their own (`CORES` + the host's number) on which a station takes the share of its threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.array_specs import bucket_sizes, env_batch_infos
from polyrhythm.pipeline.build import env_settings, scheduler_settings
from polyrhythm.pipeline.placed import Kind as PlacedKind
from polyrhythm.pipeline.placed import Placed, place
from polyrhythm.plugins.planning.costs import (
    NEEDED,
    MeasuredCost,
    mean_s,
    mini_batch,
    sample_steps,
    share_beside,
    spread,
    station_of,
    update_seconds,
    work_cost,
)
from polyrhythm.plugins.planning.memory import KINDS
from polyrhythm.plugins.planning.profile import Kind, Profile, refuse_other_recipe
from polyrhythm.plugins.virtual.clustersim.costs import FREE, Count
from polyrhythm.plugins.virtual.clustersim.settings import (
    ClusterSettings,
    GeneratorGroup,
    LeaseCosts,
    LinkSection,
    ScorerGroup,
    SimulatorGroup,
    TrainerSettings,
)
from polyrhythm.runtime.devices import CPU, Devices, number_of
from polyrhythm.runtime.factories import Resources
from polyrhythm.scheduler.records import EnvBatchInfo
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.distributions import Constant, Lognormal

#: Number of the device that stands for the cores of the first host; the second's follows.
CORES = 1_000_000
#: Chunk steps of an update, as shares of the expected ones, at which its time is computed; between them it is linear.
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)


def cluster_settings(
    profile: Profile,
    config: RunConfig,
    *,
    devices: Devices | int | None = None,
    spec: EnvSpec | None = None,
    versions: int = 20,
) -> ClusterSettings:
    """The simulated cluster of this recipe on these devices, whose costs are the profile's.

    Rows, env batches, slots, generators, batching, freshness, groups, training sizes, placement and sharing are the
    recipe's, and may differ from those at the time of the measurement. devices: of the run; a number: of this machine;
    None: find them. spec: of the environment, if it is known. Evaluations and filters of groups are left out.

    ConfigError: the profile is of another recipe, lacks what the recipe needs, or its placement names a device that
    does not exist.
    """
    refuse_other_recipe(profile, config)
    quiet = config.evaluation.model_copy(update={"every": 0})
    config = config.model_copy(update={"evaluation": quiet})
    spec = env_settings(config).spec() if spec is None else spec
    placed = place(config, devices=devices)
    cluster = _Cluster(profile, config, spec, placed, devices if isinstance(devices, Devices) else None)
    infos = env_batch_infos(config, spec)
    buckets = bucket_sizes(config, infos, on_device=placed.serves_on_device)
    rules = scheduler_settings(config, spec, buckets, None)
    rules = replace(rules, min_return=-math.inf, max_return=math.inf)
    return ClusterSettings(
        seed=config.seed,
        versions=versions,
        scheduler=rules,
        simulators=tuple(cluster.simulators()),
        generators=tuple(cluster.generators(buckets)),
        trainer=cluster.trainer(),
        scorers=tuple(cluster.scorers()),
        sharing="lease" if placed.lease is not None else "thread" if config.launcher == "inline" else "shared",
        lease=cluster.lease(),
        links=cluster.links(),
    )


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The groups of the simulated cluster. devices: of a cluster of several nodes, else None."""

    profile: Profile
    config: RunConfig
    spec: EnvSpec
    placed: Placed
    devices: Devices | None

    @property
    def _one_thread(self) -> bool:
        return self.config.launcher == "inline"

    def simulators(self) -> Iterator[SimulatorGroup]:
        """One group for each host and size of env batch."""
        station = station_of(self.profile, "simulator", NEEDED["simulator"])
        infos = env_batch_infos(self.config, self.spec)
        for first, seats in self._alike("simulators", [_size(own) for own in infos]):
            batches = infos[first]
            slots, rows = len(batches[0].slots), sum(slot.rows for slot in batches[0].slots)
            yield SimulatorGroup(
                **self._group("simulators", seats),
                env_batches=len(batches),
                slots=slots,
                rows=math.ceil(rows / slots),
                shared_thread=True,  # an env batch steps in one thread
                reset_rows=batches[0].reset_rows,
                step=work_cost(station, "step", mean_s(station, "handover")),
                reset=work_cost(station, "reset"),
                sample=work_cost(station, "sample", units=1),
                steps=self._episode(),
                chunk=self.profile.episodes.chunk,
                segment_steps=self.config.rollout.segment_steps,
            )

    def generators(self, buckets: Sequence[int]) -> Iterator[GeneratorGroup]:
        """One group for each host. buckets: row counts that passes are padded to."""
        station = station_of(self.profile, "generator", NEEDED["generator"])
        serve = work_cost(station, "pass", mean_s(station, "handover"), buckets)
        for _, seats in self._alike("generators"):
            group = self._group("generators", seats)
            depth = 2 if seats[0].device != CPU else 1
            apply = FREE if self._one_thread else work_cost(station, "apply", units=self.profile.weights)
            yield GeneratorGroup(**group, depth=depth, serve=serve, apply=apply)

    def trainer(self) -> TrainerSettings:
        """The trainer, whose update costs what its mini-batches and micro-batches do."""
        station = station_of(self.profile, "trainer", NEEDED["trainer"])
        training, seats = self.config.training, [self.placed.seats[name] for name in self.placed.names["trainer"]]
        ranks, chunk = len(seats), self.profile.episodes.chunk
        steps = training.batch_size * sample_steps(self.profile, self.config) / ranks
        handover, publish = mean_s(station, "handover"), work_cost(station, "stage", units=self.profile.weights)
        if self._one_thread:  # no other station works while weights are published and applied
            apply = work_cost(self.profile.stations["generator"], "apply", units=self.profile.weights)
            each = publish.mean() + self.config.rollout.generators * apply.mean()
            handover, publish = handover + each / self.config.freshness.sync_interval, FREE
        points = [
            (share * steps * chunk, update_seconds(self.profile, training, share * steps, ranks=ranks) + handover)
            for share in _SHARES
        ]
        whole = update_seconds(self.profile, training, steps, ranks=ranks)
        first = update_seconds(self.profile, training, steps, ranks=ranks, epochs=1)
        group = self._group("trainer", seats) | {"count": 1}
        if all(seat.device == CPU for seat in seats):
            group |= {"ranks": ranks, **({"devices": (), "occupies": 1.0} if ranks > 1 else {})}
        steps_of_update = training.epochs * max(1, round(steps / mini_batch(training, steps, ranks)[0]))
        return TrainerSettings(
            **group,
            update=MeasuredCost.of(points, spread(station.works["micro_batch"])),
            streamed=min(1.0, first / whole) if whole else 1.0,
            # In one process other stations work between two steps of an update.
            gradient_steps=steps_of_update if ranks > 1 or self._one_thread else 1,
            publish=publish,
        )

    def scorers(self) -> Iterator[ScorerGroup]:
        if (scoring := self.config.scoring) is not None:
            station = station_of(self.profile, "scorer", NEEDED["scorer"])
            yield ScorerGroup(count=scoring.processes, places=scoring.at_a_time, score=work_cost(station, "score"))

    def lease(self) -> LeaseCosts:
        """How stations take turns; the bandwidth is the slowest that was measured."""
        rules = self.placed.lease
        if rules is None:
            return LeaseCosts()
        speeds = [
            timing.amount / timing.mean_s / 1e9
            for station in self.profile.stations.values()
            for name in ("offload", "onload")
            for timing in (station.works[name].timings if name in station.works else ())
            if timing.mean_s and timing.amount
        ]
        devices = tuple(sorted({_number(number) for own in rules.devices.values() for number in own}))
        speed = {"host_gb_per_s": min(speeds)} if speeds else {}
        return LeaseCosts(devices=devices, min_hold=rules.min_hold_s, switch_order=rules.switch_order, **speed)

    def links(self) -> LinkSection | None:
        """The network of several hosts, with the bytes of this recipe; its speed is the usual one."""
        if self.devices is None or len(self.devices.nodes) < 2:
            return None
        observation = sum(array.nbytes for array in self.spec.observation.values()) / 1e6
        weights = self.profile.weights / 1e9
        return LinkSection(observation_mb=observation, sample_mb=observation, weights_gb=weights)

    def _alike(self, plural: PlacedKind, sizes: Sequence[object] = ()) -> list[tuple[int, list[Resources]]]:
        """Stations of a kind that are on the same host and, if `sizes` are given, of equal size: the index of the first
        one, and the seats of all."""
        groups: dict[object, tuple[int, list[Resources]]] = {}
        for index, name in enumerate(self.placed.names[plural]):
            seat = self.placed.seats[name]
            key = (seat.node, seat.device == CPU, sizes[index] if sizes else None)
            groups.setdefault(key, (index, []))[1].append(seat)
        return list(groups.values())

    def _group(self, plural: PlacedKind, seats: Sequence[Resources]) -> dict[str, Any]:
        """count, host, devices, occupies and resident_gb of a group."""
        kind, seat = KINDS[plural], seats[0]
        station, cores = self.profile.stations[kind], self.profile.machine.cores
        leased = self.placed.lease.devices if self.placed.lease is not None else {}
        found: dict[str, Any] = {"count": len(seats), "host": self._host(seat), "resident_gb": station.resident / 1e9}
        if seat.leases:
            numbers = [CORES if one.device == CPU else number_of(one.device) for one in seats]
            resident = (station.resident or station.host) / 1e9  # without a device the host is leased
            return {**found, "devices": tuple(dict.fromkeys(numbers)), "resident_gb": resident}
        if CPU in (seat.device, station.device):
            if seat.device != CPU and kind in ("generator", "trainer"):
                raise ConfigError(
                    f"profile: its {kind} was measured on the CPU, and placement.{plural} is on devices; measure it "
                    "with this placement on a machine that has such a device"
                )
            numbers, share = [CORES + self._node(seat)], min(1.0, seat.threads / cores) * station.awake
        else:
            numbers, share = [number_of(one.device) for one in seats], self._share(kind)
        if any(_number(number) in numbers for own in leased.values() for number in own):
            return found  # it stays there while the others take turns
        return {**found, "devices": tuple(dict.fromkeys(numbers)), "occupies": share}

    def _share(self, kind: Kind) -> float:
        """Share of a device that the station's work takes."""
        sharing = self.config.placement.sharing
        if sharing != "share":
            return 0.5 if sharing in ("mps", "process") else 1.0
        return share_beside(self.profile.stations[kind])

    def _node(self, seat: Resources) -> int:
        names = [] if self.devices is None else [name for name, _ in self.devices.nodes]
        return names.index(seat.node) if seat.node in names else 0

    def _host(self, seat: Resources) -> str:
        return f"host-{self._node(seat)}" if self.devices is not None and len(self.devices.nodes) > 1 else ""

    def _episode(self) -> Count:
        """Env steps of an episode."""
        episodes = self.profile.episodes
        mean = episodes.mean * episodes.chunk
        if not episodes.deviation:
            return Count(Constant(mean))
        return Count(Lognormal(mean, math.sqrt(math.log1p((episodes.deviation / episodes.mean) ** 2))))


def _number(leased: int) -> int:
    """Number of a leased device in the simulation; the host's is negative."""
    return leased if leased >= 0 else CORES


def _size(batches: Sequence[EnvBatchInfo]) -> tuple[tuple[int, ...], ...]:
    """Rows of each slot of each env batch."""
    return tuple(tuple(slot.rows for slot in batch.slots) for batch in batches)
