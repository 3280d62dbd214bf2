"""Judges a placement: the real scheduler on the simulated cluster, with the costs of a profile.

    profile, config, devices ──▶ cluster_settings ──▶ simulate ──▶ Prediction

Decisions are the real scheduler's, freshness included, so a prediction holds `max_lag`. Left out: evaluations, faults
and filtered groups. Assumed, since one machine cannot tell: ranks sum gradients at `_NEAR` within a node and at `_FAR`
between nodes; a simulator on the CPU is on any node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from polyrhythm.conductors import build_conductor
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.planning.cluster import CORES, cluster_settings
from polyrhythm.plugins.planning.costs import MeasuredCost, sample_steps
from polyrhythm.plugins.planning.memory import device_memory
from polyrhythm.plugins.planning.profile import Profile
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.costs import FREE, Cost
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings, SimulatorGroup
from polyrhythm.runtime.devices import Devices
from polyrhythm.scheduler.records import Command, Event, UpdateDone
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.distributions import Constant, Lognormal

#: Gradient steps of an update that are simulated one by one; more are joined.
_GRADIENT_STEPS = 4
#: Bytes per second between devices of a node, and between nodes (assumed: NVLink, and NICs of 100 Gb/s).
_NEAR, _FAR = 200e9, 12.5e9
#: Name of the host's memory in `Prediction.memory`.
HOST = "host"


@dataclass(frozen=True, slots=True)
class Length:
    """How much is simulated. counted: versions over which throughput is taken; skipped: before them, besides those
    that rollout may be ahead; of both more, until they are whole waves (`wave`). requests: at most, about: chunk steps
    are joined, several to one, until there are no more. steps: simulated chunk steps that an episode keeps at least."""

    counted: int = 3
    skipped: int = 1
    requests: int = 12_000
    steps: int = 8


#: Versions at most that are counted as one wave.
_LONGEST_WAVE = 12
#: Of what is told, and of what is only compared.
FULL, SHORT = Length(), Length(counted=1, skipped=0, requests=3_000, steps=5)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulated cluster says of a placement. samples_per_s: trained; version_s: seconds of a version; busy:
    utilisation by kind of station; lag_mean, lag_max: versions by which trained samples were behind; memory: bytes by
    device, and of the fullest host; over: why memory rules it out, "" if it fits; halted: why the run stops, ""."""

    samples_per_s: float
    version_s: float
    busy: dict[str, float]
    lag_mean: float
    lag_max: int
    memory: dict[str, int]
    over: str = ""
    halted: str = ""


def predict(
    profile: Profile,
    config: RunConfig,
    devices: Devices,
    *,
    spec: EnvSpec | None = None,
    seed: int = 0,
    length: Length = FULL,
) -> Prediction:
    """Simulate a recipe on these devices, until the last version that counts.

    Deterministic for a seed. ConfigError: from `cluster_settings`.
    """
    spec = env_settings(config).spec() if spec is None else spec
    ahead, every = math.ceil(config.freshness.max_lag), config.freshness.sync_interval
    whole = wave(config)
    counted, skipped = (math.ceil(least / whole) * whole for least in (length.counted, length.skipped))
    first = (ahead + skipped) * every
    last = first + counted * every
    versions = 2 * ahead + skipped + counted  # rollout of the last that counts goes on as in a long run
    settings = cluster_settings(profile, config, devices=devices, spec=spec, versions=versions)
    settings = joined(_adapted(settings, profile, devices), joined_steps(profile, config, settings, length))
    conductor = build_conductor(settings.scheduler)
    cluster = VirtualCluster(settings.model_copy(update={"seed": seed}), conductor)
    ends = [0.0]

    def count(now: float, event: Event, _: list[Command]) -> None:
        if isinstance(event, UpdateDone):
            ends.append(now)
            if len(ends) > last:
                cluster.driver.reached = versions

    cluster.driver.observer = count
    cluster.run()
    found = summarise(cluster.driver, conductor.ledger.as_dict())
    last = min(len(ends) - 1, last)
    seconds = (ends[last] - ends[first]) / (last - first) * every if last > first else math.inf
    memory = memory_of(profile, config, devices, spec)
    return Prediction(
        samples_per_s=config.training.batch_size * every / seconds if seconds else math.inf,
        version_s=seconds,
        busy={kind: share for kind, share in found["utilisation"].items() if kind in profile.stations},
        lag_mean=found["lag"]["mean"],
        lag_max=found["lag"]["max"],
        memory=memory,
        over=why_over(profile, memory),
        halted=found["halted"],
    )


def wave(config: RunConfig) -> int:
    """Versions until rows that began together have ended together as often as updates have taken all their samples.

    Episodes of about one length end in waves. With 32 rows and versions of 16 samples, two versions come at once and
    then none for a while; the time of one says nothing about the rate. `max_lag` lets fewer rows begin at a time.
    """
    rollout, samples = config.rollout, config.training.batch_size
    rows = rollout.simulators * rollout.env_batches * rollout.rows
    begun = min(rows, (math.ceil(config.freshness.max_lag) + 1) * samples)
    return min(_LONGEST_WAVE, math.lcm(*(many // math.gcd(many, samples) for many in (rows, begun))))


def memory_of(profile: Profile, config: RunConfig, devices: Devices, spec: EnvSpec) -> dict[str, int]:
    """Bytes on each device, and of the fullest host: processes of the CPU's simulators are dealt over the hosts, all
    others count on the first."""
    host = host_memory(profile, config.rollout.simulators, config.rollout.generators, devices)
    return {**device_memory(profile, config, devices=devices, spec=spec), HOST: host}


def host_memory(profile: Profile, simulators: int, generators: int, devices: Devices) -> int:
    """Bytes of the processes of so many stations on the fullest host."""
    hosts = max(1, len(devices.nodes))
    counts = {"simulator": math.ceil(simulators / hosts), "generator": generators, "trainer": 1}
    return sum(profile.stations[kind].host * count for kind, count in counts.items() if kind in profile.stations)


def why_over(profile: Profile, memory: dict[str, int]) -> str:
    """`cuda:0 would hold 96 of 80 GB`, or ""."""
    for name, size in memory.items():
        room = profile.machine.memory if name == HOST else profile.machine.device_memory
        if room and size > room:
            return f"{'the host' if name == HOST else name} would hold {size / 1e9:.3g} of {room / 1e9:.3g} GB"
    return ""


# ------------------------------------------------------------ what a profile does not say


def _adapted(settings: ClusterSettings, profile: Profile, devices: Devices) -> ClusterSettings:
    """With simulators dealt over all hosts, and the time in which ranks sum gradients."""
    trainer = settings.trainer
    joins = max(1, math.ceil(trainer.gradient_steps / _GRADIENT_STEPS))
    exchange = FREE
    if trainer.size > 1:  # a ring: each rank sends and receives the gradients twice
        nodes = {devices.place(number)[0] for number in trainer.devices if number < CORES}
        exchange = Cost(Constant(joins * 2 * profile.weights / (_FAR if len(nodes) > 1 else _NEAR)))
    changed = {"gradient_steps": math.ceil(trainer.gradient_steps / joins), "synchronise": exchange}
    return settings.model_copy(
        update={
            "trainer": trainer.model_copy(update=changed),
            "simulators": tuple(_dealt(settings.simulators, len(devices.nodes))),
        }
    )


def _dealt(groups: tuple[SimulatorGroup, ...], hosts: int) -> Iterator[SimulatorGroup]:
    for group in groups:
        if hosts < 2 or group.devices[0] < CORES:
            yield group
            continue
        for host in range(hosts):
            if count := len(range(host, group.count, hosts)):
                where = {"count": count, "host": f"host-{host}", "devices": (CORES + host,)}
                yield group.model_copy(update=where)


# ------------------------------------------------------------ long episodes


def joined_steps(profile: Profile, config: RunConfig, settings: ClusterSettings, length: Length) -> int:
    """Number of chunk steps to simulate as one."""
    group, steps = settings.simulators[0], sample_steps(profile, config)
    requests = settings.versions * settings.scheduler.version_samples * steps / group.rows
    return max(1, min(math.ceil(requests / length.requests), int(steps // length.steps)))


def joined(settings: ClusterSettings, times: int) -> ClusterSettings:
    """The same cluster with this many chunk steps simulated as one, with the sum of their times."""
    if times == 1:
        return settings
    simulators = [
        group.model_copy(
            update={
                "step": _times(group.step, times),
                "chunk": group.chunk * times,
                "segment_steps": math.ceil(group.segment_steps / times),
            }
        )
        for group in settings.simulators
    ]
    generators = [group.model_copy(update={"serve": _times(group.serve, times)}) for group in settings.generators]
    links = settings.links
    if links is not None:
        per_step = {"observation_mb": links.observation_mb * times, "sample_mb": links.sample_mb * times}
        links = links.model_copy(update=per_step)
    return settings.model_copy(
        update={
            "simulators": tuple(simulators),
            "generators": tuple(generators),
            "links": links,
            "scheduler": replace(settings.scheduler, max_wait_s=settings.scheduler.max_wait_s * times),
        }
    )


def _times(cost: Cost, times: int) -> Cost:
    """The sum of so many independent draws, as one draw of its mean and deviation."""
    if not isinstance(cost, MeasuredCost):
        return Cost(_sum(cost.base, times), cost.per_unit * times)  # type: ignore[arg-type]
    points = [(units, seconds * times) for units, seconds in cost.points]
    return MeasuredCost.of(points, _sigma_of_sum(cost.sigma, times))


def _sum(base: Constant | Lognormal, times: int) -> Constant | Lognormal:
    if isinstance(base, Lognormal):
        return Lognormal(base.mean * times, _sigma_of_sum(base.sigma, times))
    return Constant(base.mean * times)


def _sigma_of_sum(sigma: float, times: int) -> float:
    """Standard deviation of the logarithm of a sum of so many independent lognormal draws, by its variance."""
    return math.sqrt(math.log1p(math.expm1(sigma**2) / times))
