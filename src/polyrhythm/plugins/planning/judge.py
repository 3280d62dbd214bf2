"""Judges an arrangement: the real scheduler on the simulated cluster, with the costs of a profile.

    profile, demand, nodes, arrangement ──▶ ClusterSettings ──▶ simulate ──▶ Prediction

Everything that is decided during a run is decided by the real scheduler, freshness included, so a prediction holds
`max_lag`. What it leaves out: evaluations, faults, filtered groups, and segments (a sample is as long as profiled).

Costs. A step, reset or pass takes what the profile says, on the line through a slot's rows and the most rows. A host is
a device of many parts: each step on it occupies one core, so more steps than cores slow each other down. Stations of
one device share its time, in the measure in which the profile found them to slow each other down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.planning.arrangement import (
    Arrangement,
    Demand,
    Nodes,
    memory_by_device,
    micro_batch_of,
    step_of_rank,
)
from polyrhythm.plugins.planning.profile import Profile, StationProfile, Timing, WorkName
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.costs import FREE, Cost, Count
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import Command, Event, UpdateDone
from polyrhythm.specs.distributions import Constant, Lognormal

#: Versions that are counted; before and after them as many as rollout may be ahead are left out.
COUNTED = 3
#: Requests of a simulation at most: chunk steps are joined, several to one, until there are no more.
REQUESTS = 12_000
#: Chunk steps that a sample keeps at least.
_LEAST_STEPS = 8
#: Gradient steps of an update that are simulated one by one; more are joined.
_GRADIENT_STEPS = 4
#: Number of the first host among the devices; its cores are what its stations share.
_HOSTS = 10_000
#: What a simulator's step takes of a device where the profile does not say (RLinf, section 2.2: below 24%).
_OCCUPIES = 0.24
#: Bytes per second between devices of a node, and between nodes (assumed: NVLink, and NICs of 100 Gb/s).
_NEAR, _FAR = 200e9, 12.5e9
#: 90% of a normal distribution lie below its mean and so many standard deviations.
_P90 = 1.2816


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulated cluster says of an arrangement. samples_per_s: trained; version_s: time of a version; busy:
    utilisation by kind; lag_mean, lag_max: versions by which trained samples were behind; memory: bytes by device and
    of the fullest host; halted: why the run cannot go on, "" if it can."""

    arrangement: Arrangement
    samples_per_s: float
    version_s: float
    busy: dict[str, float]
    lag_mean: float
    lag_max: int
    memory: dict[str, int]
    halted: str = ""


def predict(
    profile: Profile,
    demand: Demand,
    nodes: Nodes,
    arrangement: Arrangement,
    *,
    seed: int = 0,
    counted: int = COUNTED,
    requests: int = REQUESTS,
) -> Prediction:
    """Simulate the arrangement. counted: versions over which throughput is taken; requests: simulated at most, about.
    Deterministic for a seed."""
    ahead = math.ceil(demand.scheduler.max_lag)
    skipped, every = ahead + 1, demand.scheduler.sync_interval
    versions = skipped + counted + ahead
    joined = _joined_steps(profile, demand, arrangement, versions, requests)
    settings = cluster_of(profile, demand, nodes, arrangement, versions=versions, seed=seed, joined=joined)
    conductor = build_conductor(settings.scheduler)
    cluster = VirtualCluster(settings, conductor)
    ends = [0.0]

    def count(now: float, event: Event, _: list[Command]) -> None:
        if isinstance(event, UpdateDone):
            ends.append(now)

    cluster.driver.observer = count
    cluster.run()
    found = summarise(cluster.driver, conductor.ledger.as_dict())
    first, last = skipped * every, min(len(ends) - 1, (skipped + counted) * every)
    seconds = (ends[last] - ends[first]) / max(1, last - first) * every if last > first else math.inf
    return Prediction(
        arrangement=arrangement,
        samples_per_s=demand.scheduler.version_samples / seconds if seconds else math.inf,
        version_s=seconds,
        busy={kind: share for kind, share in found["utilisation"].items() if kind in profile.stations},
        lag_mean=found["lag"]["mean"],
        lag_max=found["lag"]["max"],
        memory=memory_by_device(profile, demand, nodes, arrangement),
        halted=found["halted"],
    )


def cluster_of(
    profile: Profile, demand: Demand, nodes: Nodes, one: Arrangement, *, versions: int, seed: int = 0, joined: int = 1
) -> ClusterSettings:
    """The simulated cluster of an arrangement. joined: chunk steps that are simulated as one, of their sum of times."""
    with_links = len(nodes.devices) > 1
    return ClusterSettings.model_validate(
        {
            "seed": seed,
            "versions": versions,
            "sharing": "lease" if one.sharing == "lease" else "shared",
            "lease": {"devices": list(range(nodes.count))} if one.sharing == "lease" else {},
            "scheduler": replace(
                demand.scheduler,
                max_rows=one.max_rows,
                max_requests=demand.scheduler.max_requests,
                max_wait_s=demand.scheduler.max_wait_s * joined,
                batching="dynamic" if demand.scheduler.batching == "auto" else demand.scheduler.batching,
                buckets=(),
                segments=False,
                queue_key="",
                evaluator="",
                evaluator_only=False,
                min_return=-math.inf,
                max_return=math.inf,
                lease=None,
                episode_deadline_s=math.inf,
            ),
            "simulators": _simulators(profile, demand, nodes, one, joined),
            "generators": _generators(profile, nodes, one, joined),
            "trainer": _trainer(profile, demand, nodes, one),
            "scorers": _scorers(profile, demand),
            "links": {
                "observation_mb": demand.observation * joined / 1e6,
                "sample_mb": demand.observation * joined / 1e6,
                "weights_gb": profile.weights / 1e9,
                "gb_per_s": _FAR / 1e9,
                "main": _node(0),
            }
            if with_links
            else None,
        }
    )


def _joined_steps(profile: Profile, demand: Demand, one: Arrangement, versions: int, most: int) -> int:
    steps = profile.episodes.mean
    requests = versions * demand.scheduler.version_samples * steps / one.slot_rows
    return max(1, min(math.ceil(requests / most), int(steps // _LEAST_STEPS)))


def _node(index: int) -> str:
    return f"node-{index}"


def _simulators(profile: Profile, demand: Demand, nodes: Nodes, one: Arrangement, joined: int) -> list[dict[str, Any]]:
    """A group for each node that has simulators."""
    station = profile.stations["simulator"]
    mean, deviation = profile.episodes.mean / joined, profile.episodes.deviation / joined
    chunk = profile.episodes.chunk * joined
    steps = max(1.0, mean) * chunk
    shared = {
        "env_batches": one.env_batches,
        "slots": one.slots,
        "rows": one.slot_rows,
        "shared_thread": True,
        "step": _cost(station, "step", 1, one.slot_rows, joined),
        "reset": _cost(station, "reset", 1, one.slot_rows),
        "steps": _count(steps, deviation * chunk),
        "chunk": chunk,
        "resident_gb": _resident_gb(station),
    }
    if not one.simulator_devices:
        found = []
        for node in range(len(nodes.devices)):
            count = len(range(node, one.simulators, len(nodes.devices)))
            host = {"devices": [_HOSTS + node], "occupies": 1 / nodes.cores, "host": _node(node)}
            found += [shared | host | {"count": count, "resident_gb": 0.0}] * (count > 0)
        return found
    beside = profile.stations["generator"].beside.get("simulator", 1 + _OCCUPIES)
    occupies = min(1.0, max(0.01, beside - 1))
    stays = one.sharing == "lease" and not demand.simulators_leave
    return [
        shared
        | {
            "count": len(range(index, one.simulators, len(one.simulator_devices))),
            "devices": [number + _HOSTS // 2 * stays],  # one that stays is not among those that take turns
            "occupies": occupies,
            "host": _node(nodes.node_of(number)),
        }
        for index, number in enumerate(one.simulator_devices)
        if index < one.simulators
    ]


def _generators(profile: Profile, nodes: Nodes, one: Arrangement, joined: int) -> list[dict[str, Any]]:
    station = profile.stations["generator"]
    by_reference = one.sharing == "process"
    shared = {
        "depth": 2 if one.generator_devices and one.sharing != "lease" else 1,
        "serve": _cost(station, "pass", min(one.slot_rows, one.max_rows), one.max_rows, joined),
        "apply": FREE if by_reference else _cost(station, "apply", profile.weights, profile.weights),
        "resident_gb": _resident_gb(station),
    }
    if not one.generator_devices:
        host = {"devices": [_HOSTS], "occupies": 1 / nodes.cores, "host": _node(0), "resident_gb": 0.0}
        return [shared | host | {"count": one.generators}]
    return [
        shared
        | {
            "count": len(range(index, one.generators, len(one.generator_devices))),
            "devices": [number],
            "host": _node(nodes.node_of(number)),
        }
        for index, number in enumerate(one.generator_devices)
        if index < one.generators
    ]


def _trainer(profile: Profile, demand: Demand, nodes: Nodes, one: Arrangement) -> dict[str, Any]:
    station = profile.stations["trainer"]
    chunk = profile.episodes.chunk
    steps = demand.optimizer_steps(profile.episodes.mean)
    per_step = demand.epochs * seconds_per_chunk_step(profile, demand, one)
    fixed = _seconds(station, "optimizer_step", 0) * steps
    simulated = min(steps, _GRADIENT_STEPS)
    spread = {nodes.node_of(number) for number in one.trainer_devices}
    exchange = 0.0
    if one.ranks > 1:  # a ring: each rank sends and receives twice the gradients
        exchange = 2 * profile.weights / (_FAR if len(spread) > 1 else _NEAR) * steps / simulated
    publish = 0.0 if one.sharing == "process" else _seconds(station, "stage", profile.weights)
    where: dict[str, Any] = {"devices": list(one.trainer_devices), "resident_gb": _resident_gb(station)}
    if not one.trainer_devices:
        where = {"devices": [_HOSTS], "occupies": 1 / nodes.cores}
    hosts = {"hosts": len(spread), "host": "node"} if spread == {*range(len(spread))} and len(spread) > 1 else None
    return {
        **where,
        **(hosts or {"host": _node(min(spread, default=0))}),
        # Samples have whole simulated chunk steps, so the cost is by what these have.
        "update": Cost(Constant(fixed), per_step / chunk),
        "gradient_steps": simulated,
        "synchronise": Cost(Constant(exchange)),
        "publish": Cost(Constant(publish)),
    }


def _scorers(profile: Profile, demand: Demand) -> list[dict[str, Any]]:
    station = profile.stations.get("scorer")
    if not demand.scorers or station is None:
        return []
    return [{"count": demand.scorers, "score": _cost(station, "score", 1, 1)}]


def _resident_gb(station: StationProfile) -> float:
    """Gigabytes that take, at the simulated rate of 25 GB/s, as long as the station's measured switch."""
    if station.device == "cpu":
        return 0.0
    measured = [station.works[name] for name in ("offload", "onload") if name in station.works]
    if not measured:
        return station.resident / 1e9
    return 25.0 * sum(work.seconds(station.resident) for work in measured) / len(measured)


def _seconds(station: StationProfile, name: WorkName, amount: int) -> float:
    """Mean seconds of an amount of work; 0 if the profile does not have it."""
    return station.works[name].seconds(amount) if name in station.works else 0.0


def _cost(station: StationProfile, name: WorkName, low: int, high: int, times: int = 1) -> Cost:
    """The cost of an amount between `low` and `high`, done `times` times: exact at both ends, as spread as measured."""
    if name not in station.works:
        return FREE
    first, last = _seconds(station, name, low), _seconds(station, name, high)
    per_unit = max(0.0, (last - first) / (high - low)) if high > low else 0.0
    base = max(0.0, first - per_unit * low) * times
    deviation = _spread(station.works[name].timings, high) * last * math.sqrt(times)
    if not base or not deviation:
        return Cost(Constant(base), per_unit * times)
    sigma = math.sqrt(math.log1p(min(1.0, deviation / base) ** 2))
    return Cost(Lognormal(base, sigma), per_unit * times)


def _spread(timings: tuple[Timing, ...], amount: int) -> float:
    """Standard deviation over mean, from the 90th percentile of the measured amount that is nearest."""
    nearest = min(timings, key=lambda timing: abs(timing.amount - amount))
    if nearest.count < 2 or nearest.median_s <= 0:
        return 0.0
    sigma = math.log(max(1.0, nearest.p90_s / nearest.median_s)) / _P90
    return math.sqrt(math.expm1(sigma**2)) if sigma < 1 else 1.0


def _count(mean: float, deviation: float) -> Count:
    """Env steps of a sample."""
    return Count(Lognormal(mean, math.sqrt(math.log1p((deviation / mean) ** 2))) if deviation > 0 else Constant(mean))


def seconds_per_chunk_step(profile: Profile, demand: Demand, one: Arrangement) -> float:
    """Seconds of a rank for a chunk step, once: of an optimizer step's micro-batches, the last one smaller."""
    micro, whole = micro_batch_of(profile, demand, one), step_of_rank(profile, demand, one)
    station = profile.stations["trainer"]
    passes, rest = divmod(whole, micro)
    seconds = passes * _seconds(station, "micro_batch", micro)
    return (seconds + (_seconds(station, "micro_batch", rest) if rest else 0.0)) / whole
