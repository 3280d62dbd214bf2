"""Turns a profile and a recipe into the settings of a simulated cluster, and into memory by device.

A station's work costs in the simulation what it took alone. What it takes longer beside others follows from the
devices: the stations of a device share it, and the stations without one share their host's cores, which are a device of
their own (`CORES` + the host's number) on which a station takes the share of its threads.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.array_specs import bucket_sizes, env_batch_infos, largest_batch
from polyrhythm.pipeline.build import env_settings, scheduler_settings
from polyrhythm.pipeline.placed import Kind as PlacedKind
from polyrhythm.pipeline.placed import Placed, place
from polyrhythm.plugins.memory_estimate.needs import micro_batch_rows
from polyrhythm.plugins.planning.profile import Kind, Profile, StationProfile, Work, WorkName, refuse_other_recipe
from polyrhythm.plugins.virtual.clustersim.costs import FREE, Cost, Count
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
#: Standard normal quantile of the 90th percentile.
_Z90 = 1.2816
#: Largest standard deviation of a time's logarithm, so that a few outliers among few measurements do not set it.
_WIDEST = 1.0
#: Chunk steps of an update, as shares of the expected ones, at which its time is computed; between them it is linear.
_SHARES = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
#: By which a quotient may be off.
_ROUNDING = 1e-9
#: Least share of a device that a pass takes.
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class MeasuredCost(Cost):
    """A cost by measured points (units, mean seconds), linear between them, times a draw of mean 1.

    base, per_unit: the line through the points, for the parts of the simulation that need one.
    """

    points: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    sigma: float = 0.0

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], sigma: float = 0.0) -> MeasuredCost:
        """points: in ascending order of units."""
        (low, first), (high, last) = points[0], points[-1]
        slope = max(0.0, (last - first) / (high - low)) if high > low else 0.0
        base = max(0.0, fmean(seconds - slope * units for units, seconds in points))
        return cls(Constant(base), slope, tuple(points), sigma)

    def mean(self, units: int = 1) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        index = min(max(1, bisect_left(points, (units,))), len(points) - 1)
        (low, first), (high, last) = points[index - 1], points[index]
        return max(0.0, first + (last - first) * (units - low) / (high - low))

    def draw(self, rng: random.Random, units: int = 1) -> float:
        mean = self.mean(units)
        return mean * Lognormal(1.0, self.sigma).sample(rng) if self.sigma and mean else mean


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


def refuse_incomplete(profile: Profile, config: RunConfig) -> None:
    """ConfigError: the profile lacks a station of the recipe, or what is needed of one."""
    for kind in ("simulator", "generator", "trainer", *(("scorer",) if config.scoring is not None else ())):
        _station(profile, kind, _NEEDED[kind])


def update_seconds(
    profile: Profile, training: TrainingSettings, chunk_steps: float, *, ranks: int = 1, epochs: int | None = None
) -> float:
    """Seconds of an update of this many chunk steps of a rank: targets, then every mini-batch of every epoch in its
    micro-batches, each mini-batch with an optimizer step. ranks: share each mini-batch.

    epochs: instead of the recipe's. Updates that `training.max_kl` ends are shorter.
    """
    works = _station(profile, "trainer", ("micro_batch", "optimizer_step")).works
    mini, parts = mini_batch(training, chunk_steps, ranks)
    each = parts * _seconds(works["micro_batch"], mini / parts) + works["optimizer_step"].seconds(1)
    prepare = _seconds(works["prepare"], chunk_steps) if "prepare" in works else 0.0
    return prepare + (training.epochs if epochs is None else epochs) * max(1.0, chunk_steps / mini) * each


def mini_batch(training: TrainingSettings, chunk_steps: float, ranks: int = 1) -> tuple[float, int]:
    """A rank's chunk steps of an optimizer step, and the number of its micro-batches. chunk_steps: of a rank's
    update. A share of `require_batches` is cut into the fewest equal mini-batches, as the learner does."""
    mini = chunk_steps / training.require_batches
    if training.minibatch_steps:
        mini /= max(1, math.ceil(mini * ranks / training.minibatch_steps - _ROUNDING))
    mini = max(1.0, mini)
    return mini, max(1, math.ceil(mini / (training.micro_batch_steps or mini) - _ROUNDING))


def sample_steps(profile: Profile, config: RunConfig) -> float:
    """Mean chunk steps of a sample: of an episode, or of its segments."""
    mean, segment = profile.episodes.mean, config.rollout.segment_steps
    return mean if not segment else mean / math.ceil(mean / segment)


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
                found.setdefault(seat.device, ([], []))[bool(seat.leases)].append(each.get(_KINDS[plural], 0))
    return {device: sum(stay) + max(turn, default=0) for device, (stay, turn) in sorted(found.items())}


#: Kind of station by its plural in `Placed.names`.
_KINDS: Mapping[PlacedKind, Kind] = {
    "simulators": "simulator",
    "generators": "generator",
    "trainer": "trainer",
    "scorers": "scorer",
}
#: Works without which a station is not simulated.
_NEEDED: Mapping[Kind, tuple[WorkName, ...]] = {
    "simulator": ("step",),
    "generator": ("pass",),
    "trainer": ("micro_batch", "optimizer_step"),
    "scorer": ("score",),
}


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
        station = _station(self.profile, "simulator", _NEEDED["simulator"])
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
                step=_cost(station, "step", _mean(station, "handover")),
                reset=_cost(station, "reset"),
                sample=_cost(station, "sample", units=1) if "sample" in station.works else FREE,
                steps=self._episode(),
                chunk=self.profile.episodes.chunk,
                segment_steps=self.config.rollout.segment_steps,
            )

    def generators(self, buckets: Sequence[int]) -> Iterator[GeneratorGroup]:
        """One group for each host. buckets: row counts that passes are padded to."""
        station = _station(self.profile, "generator", _NEEDED["generator"])
        serve = _cost(station, "pass", _mean(station, "handover"), buckets)
        for _, seats in self._alike("generators"):
            group = self._group("generators", seats)
            depth = 2 if seats[0].device != CPU else 1
            apply = FREE if self._one_thread else _cost(station, "apply", units=self.profile.weights)
            yield GeneratorGroup(**group, depth=depth, serve=serve, apply=apply)

    def trainer(self) -> TrainerSettings:
        """The trainer, whose update costs what its mini-batches and micro-batches do."""
        station = _station(self.profile, "trainer", _NEEDED["trainer"])
        training, seats = self.config.training, [self.placed.seats[name] for name in self.placed.names["trainer"]]
        ranks, chunk = len(seats), self.profile.episodes.chunk
        steps = training.batch_size * sample_steps(self.profile, self.config) / ranks
        handover, publish = _mean(station, "handover"), _cost(station, "stage", units=self.profile.weights)
        if self._one_thread:  # no other station works while weights are published and applied
            apply = _cost(self.profile.stations["generator"], "apply", units=self.profile.weights)
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
            update=MeasuredCost.of(points, _sigma(station.works["micro_batch"])),
            streamed=min(1.0, first / whole) if whole else 1.0,
            # In one process other stations work between two steps of an update.
            gradient_steps=steps_of_update if ranks > 1 or self._one_thread else 1,
            publish=publish,
        )

    def scorers(self) -> Iterator[ScorerGroup]:
        if (scoring := self.config.scoring) is not None:
            station = _station(self.profile, "scorer", _NEEDED["scorer"])
            yield ScorerGroup(count=scoring.processes, places=scoring.at_a_time, score=_cost(station, "score"))

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
        kind, seat = _KINDS[plural], seats[0]
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


def _station(profile: Profile, kind: Kind, needed: Sequence[WorkName]) -> StationProfile:
    """ConfigError: the profile lacks this station, or works of it."""
    station = profile.stations.get(kind)
    missing = [name for name in needed if station is None or name not in station.works]
    if station is None or missing:
        raise ConfigError(
            f"profile: it lacks {', '.join(missing)} of the {kind}, which the time was too short for or the recipe did "
            "not have; measure again with more --minutes"
        )
    return station


def share_beside(station: StationProfile) -> float:
    """Share of a device that the station's work takes: half of the factor by which it and another slow each other down,
    since two that take a share of a half do not. Not measured: all, as by time slices."""
    if not station.beside:
        return 1.0
    return min(1.0, max(_LEAST_SHARE, fmean(station.beside.values()) / 2))


def _number(leased: int) -> int:
    """Number of a leased device in the simulation; the host's is negative."""
    return leased if leased >= 0 else CORES


def _size(batches: Sequence[EnvBatchInfo]) -> tuple[tuple[int, ...], ...]:
    """Rows of each slot of each env batch."""
    return tuple(tuple(slot.rows for slot in batch.slots) for batch in batches)


def _cost(
    station: StationProfile,
    name: WorkName,
    added_s: float = 0.0,
    buckets: Sequence[int] = (),
    units: int | None = None,
) -> Cost:
    """A work's cost by its amount. units: of this amount alone; buckets: amounts that others are padded to; added_s: to
    each."""
    work = station.works.get(name)
    if work is None:
        return Cost(Constant(0.0))
    sigma = _sigma(work)
    if units is not None:
        return MeasuredCost.of([(1, work.seconds(units))], sigma)
    if buckets:  # a step at each bucket
        ends = sorted({*buckets, *(bucket + 1 for bucket in buckets[:-1])})
        seconds: Callable[[int], float] = lambda n: work.seconds(buckets[bisect_left(buckets, n)])  # noqa: E731
        return MeasuredCost.of([(n, seconds(n) + added_s) for n in ends], sigma)
    amounts = [timing.amount for timing in work.timings]
    beyond = [2 * amounts[-1]] if amounts[-1] else []
    return MeasuredCost.of([(n, work.seconds(n) + added_s) for n in (*amounts, *beyond)], sigma)


def _seconds(work: Work, amount: float) -> float:
    """`Work.seconds` of an amount that is a mean."""
    low, share = math.floor(amount), amount % 1
    return (1 - share) * work.seconds(low) + share * work.seconds(low + 1) if share else work.seconds(low)


def _mean(station: StationProfile, name: WorkName) -> float:
    return station.works[name].seconds(0) if name in station.works else 0.0


def _sigma(work: Work) -> float:
    """Standard deviation of the logarithm of a time, from its median and 90th percentile, by the measurements."""
    pairs = [(timing.count, timing) for timing in work.timings if timing.p90_s > timing.median_s > 0]
    total = sum(count for count, _ in pairs)
    return min(_WIDEST, sum(n * math.log(t.p90_s / t.median_s) for n, t in pairs) / _Z90 / total) if total else 0.0


def _memory(work: Work, amount: float) -> int:
    """Bytes of an amount: proportional beyond the largest measured one, else of the next larger one."""
    most = work.timings[-1]
    if amount > most.amount:
        return round(most.memory * amount / max(1, most.amount))
    return next(timing.memory for timing in work.timings if timing.amount >= amount)
