"""Hundreds of GPUs on the virtual clock with the real conductor: what bounds a run first, by size and placement.

Eight GPUs to a host, each with one port; 5.4 GB of weights and of gradients (2.7 billion parameters in bfloat16). Three
workloads:

- `placements`: LIBERO + GR00T N1.5 with the stage times of RL-VLA3's table 4, fully asynchronous, 32 environments for
  each GPU, on the devices that `pipeline.placed.divide_devices` gives a run for each preset. Gradients go round a ring
  over the ports.
- `quick steps`: env batches of 8 rows with chunk steps of 200 ms and two images, 8 for each GPU; a version every 7 s.
  Hosts fetch it from the trainer's, or send it on (`fan_out`).
- `small batches`: env batches of one row without images and chunk steps of 100 ms, 16 for each GPU, and 0.1 GB of
  weights: the most that the conductor decides. Serving is in the main process, or beside the generators.

The conductor's CPU is measured while it decides; `main` is the share of a core that the whole main process takes, by
`event`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.conductors import build_conductor
from polyrhythm.pipeline.placed import DeviceIds, Kind, divide_devices
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.costs import Cost, parse_cost
from polyrhythm.plugins.virtual.clustersim.measures import EXCHANGE, SERVE, STEP, TRAIN
from polyrhythm.plugins.virtual.clustersim.settings import (
    ClusterSettings,
    ConductorSection,
    GeneratorGroup,
    LinkSection,
    SimulatorGroup,
)
from polyrhythm.runtime.devices import Devices
from polyrhythm.scheduler.conductor import SERVING_EVENTS
from polyrhythm.scheduler.records import Command, Event, TrainUntil, UpdateDone
from polyrhythm.specs.distributions import Constant, Lognormal
from polyrhythm_bench.papers.published import EPISODES, PaperRow, published
from polyrhythm_bench.papers.stages import FIXED_ROWS, SPREAD, Times, cluster_settings, whole
from polyrhythm_bench.workloads.batching_scenario import FOREVER

GPUS = (8, 64, 256, 1024)
GPUS_PER_HOST = 8
#: One 100 Gb/s port for each host.
LATENCY_S, GB_PER_S = 50e-6, 12.5
#: Stage times of table 4 (bench/results/papers.md), and versions by which rollout may be ahead.
TIMES, MAX_LAG = Times(step=0.138, contention=0.65, generate=7.59e-3, train=21.4e-3), 2
#: Env batches of a GPU that simulates, and chunk steps of an episode (of 96, so weights have that share of their bytes)
#: in `placements`.
ENV_BATCHES, CHUNK_STEPS = 2, 2
#: Versions before those counted, and counted, in `placements`.
WARM_UP, COUNTED = MAX_LAG + 1, 2
#: Virtual seconds before those counted, and counted.
QUICK_S, SMALL_S = (10.0, 16.0), (2.0, 3.0)
OBSERVATION_MB, WEIGHTS_GB = 2 * 256 * 256 * 3 * 1e-6, 5.4
#: CPU of the main process for an event: 31 µs a chunk step at 2,048 env batches, of which 1.2 events each
#: (bench/results/ceiling.md).
EVENT = "25us"

PLACEMENTS = ("colocated", "hybrid", "disaggregated")


def run(gpus: Sequence[int] = GPUS, event: str = EVENT, seed: int = 0) -> dict[str, Any]:
    """Simulate the workloads at each number of GPUs (multiples of 8). event: CPU of the main process for an event.

    Returns `placements`, `quick_steps` and `small_batches`: throughput, efficiency against the smallest size, busy
    shares, the conductor's CPU, what bounds.
    """
    return {
        "event": event,
        "gb_per_s": GB_PER_S,
        "placements": list(_efficiency(_placements(gpus, event, seed))),
        "quick_steps": list(_efficiency(_quick_steps(gpus, event, seed))),
        "small_batches": list(_efficiency(_small_batches(gpus, event, seed))),
    }


def _efficiency(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with their throughput per GPU over that of the smallest size of the same case."""
    first: dict[str, float] = {}
    for row in rows:
        each = row["transitions_per_s"] / row["gpus"]
        yield {**row, "efficiency": each / first.setdefault(row["case"], each)}


def ring_s(hosts: int) -> float:
    """Seconds in which so many hosts sum their gradients by a ring of their NICs."""
    return 2 * (hosts - 1) / hosts * WEIGHTS_GB / GB_PER_S + 2 * (hosts - 1) * LATENCY_S


# ------------------------------------------------------------ the conductor, measured


@dataclass(slots=True)
class Counted:
    """Events and their CPU nanoseconds."""

    events: int = 0
    ns: int = 0


class MeasuredConductor:
    """The conductor of these settings. serving, rest: events that requests and batches cause, and all others: those
    that would remain in the main process if serving were elsewhere."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.inner = build_conductor(settings.scheduler)
        self.serving, self.rest = Counted(), Counted()
        now = time.thread_time_ns
        self._clock_ns = int(statistics.median(-(now() - now()) for _ in range(101)))

    def handle(self, event: Event, now: float) -> list[Command]:
        began = time.thread_time_ns()
        commands = self.inner.handle(event, now)
        self.inner.deadline()
        counted = self.serving if type(event) in SERVING_EVENTS else self.rest
        counted.ns += time.thread_time_ns() - began - self._clock_ns
        counted.events += 1
        return commands

    def deadline(self) -> float:
        return self.inner.deadline()

    def forget(self) -> None:
        self.serving, self.rest = Counted(), Counted()


class Measurement:
    """A simulation whose beginning is not counted. started: when the counted part began, in virtual seconds."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.conductor = MeasuredConductor(settings)
        self.cluster = VirtualCluster(settings, self.conductor)
        self.cluster.driver.submit(TrainUntil(FOREVER))
        self.started = 0.0
        gc.collect()
        gc.freeze()  # what stands for the stations is not in a live main process

    def run_versions(self, before: int, counted: int) -> None:
        """Run until so many versions are trained, of which those `before` are not counted."""
        driver, updates = self.cluster.driver, 0

        def note(now: float, event: Event, commands: list[Command]) -> None:  # noqa: ARG001 (the driver's)
            nonlocal updates
            if isinstance(event, UpdateDone):
                updates += 1
                if updates == before * EPISODES:
                    self._count_from_here()
                if updates == (before + counted) * EPISODES:
                    driver.halted = "all is counted"

        driver.observer = note
        driver.run(FOREVER)

    def run_seconds(self, before: float, counted: float) -> float:
        """Run for so many virtual seconds; returns the transitions of those counted."""
        driver = self.cluster.driver
        driver.run(FOREVER, before)
        self._count_from_here()
        done = driver.measures.transitions
        driver.run(FOREVER, before + counted)
        return driver.measures.transitions - done

    def _count_from_here(self) -> None:
        self.started = self.cluster.driver.clock.now
        self.conductor.forget()

    @property
    def seconds(self) -> float:
        return self.cluster.driver.clock.now - self.started

    def row(self, case: str, gpus: int, transitions: float) -> dict[str, Any]:
        """The result. events_per_s, rest_per_s: of the conductor, and those other than serving; cpu, rest_cpu: the
        cores that it took here for them; event_us: CPU of one; bound: what is busiest."""
        gc.unfreeze()
        driver, seconds = self.cluster.driver, self.seconds
        for station in self.cluster.stations.values():
            station.flush()
        serving, rest = self.conductor.serving, self.conductor.rest
        events, spent = serving.events + rest.events, (serving.ns + rest.ns) * 1e-9
        return {
            "case": case,
            "gpus": gpus,
            "transitions_per_s": transitions / seconds,
            **_shares(summarise(driver, self.conductor.inner.ledger.as_dict())),
            "events_per_s": events / seconds,
            "rest_per_s": rest.events / seconds,
            "event_us": 1e6 * spent / max(1, events),
            "cpu": spent / seconds,
            "rest_cpu": rest.ns * 1e-9 / seconds,
        }


def _shares(found: dict[str, Any]) -> dict[str, Any]:
    """Busy shares of stations, links and the main process since the start; `bound`: the one that is busiest."""
    times, links, cpu = found["time"], found["links"], found["conductor"]
    shares = {
        "simulation": times["slots"][STEP]["share"],
        "generation": times["generators"][SERVE]["share"],
        "trainer": times["trainer"][TRAIN]["share"] + times["trainer"][EXCHANGE]["share"],
        "publication": found["publishing_s"] / found["virtual_s"],
        "nic": links["busiest_share"],
        "main": cpu["share"],
    }
    return {
        **shares,
        "half": cpu["halves_share"],
        "event_wait_ms": 1000 * cpu["wait_s"],
        "local": found["requests"]["local"],
        "bound": max(shares, key=lambda name: shares[name]),
    }


# ------------------------------------------------------------ placements


def devices_of(placement: str, gpus: int) -> DeviceIds:
    """Devices of simulators, generators and the trainer, as a run gets them on hosts of eight."""
    return divide_devices(placement, Devices([(f"host {n}", GPUS_PER_HOST) for n in range(gpus // GPUS_PER_HOST)]))


def row_for(gpus: int) -> PaperRow:
    """LIBERO + GR00T, fully asynchronous, with as many environments and as large a batch for each GPU at every size."""
    example = next(row for row in published().rows if row.setup.key == "libero" and row.mode == "full")
    setup = replace(example.setup, global_batch=example.setup.global_batch * gpus // example.gpus)
    return replace(example, gpus=gpus, envs=example.envs * gpus // example.gpus, batches=ENV_BATCHES, setup=setup)


def _placements(gpus: Sequence[int], event: str, seed: int) -> Iterator[dict[str, Any]]:
    for placement in PLACEMENTS:
        for count in gpus:
            row = row_for(count)
            measured = Measurement(placed_cluster(row, devices_of(placement, count), event, seed))
            measured.run_versions(WARM_UP, COUNTED)
            transitions = COUNTED * EPISODES * row.envs * CHUNK_STEPS * row.setup.chunk
            yield measured.row(placement, count, transitions)


def placed_cluster(row: PaperRow, devices: DeviceIds, event: str, seed: int) -> ClusterSettings:
    """The row's work on these devices, device d on host d // 8. The trainer's first host is `node-0`."""
    hosts, first = max(1, row.gpus // GPUS_PER_HOST), devices["trainer"][0] // GPUS_PER_HOST
    base = cluster_settings(row, TIMES, CHUNK_STEPS, seed, whole(row))
    rows = row.envs / (len(devices["simulators"]) * row.batches)  # of an env batch, for which one row stands
    # Cores of a host are divided among its devices that simulate.
    share = len(devices["simulators"]) / GPUS_PER_HOST / len({each // GPUS_PER_HOST for each in devices["simulators"]})
    step = Cost(Lognormal(TIMES.step * share * rows, SPREAD))
    serve = Cost(Constant(FIXED_ROWS * TIMES.generate), TIMES.generate * rows)
    update = Cost(Constant(0.0), TIMES.train * rows)
    ranks = max(1, len(devices["trainer"]) // GPUS_PER_HOST)
    shorter = CHUNK_STEPS / row.setup.chunk_steps

    def host(number: int) -> str:
        return f"node-{(number // GPUS_PER_HOST - first) % hosts}" if hosts > 1 else "node"

    def dealt(kind: Kind) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for number in devices[kind]:
            found.setdefault(host(number), []).append(number)
        return {name: tuple(numbers) for name, numbers in found.items()}

    simulators: tuple[SimulatorGroup, ...] = tuple(
        base.simulators[0].model_copy(update={"host": name, "step": step, "count": len(numbers)})
        for name, numbers in dealt("simulators").items()
    )
    generators: tuple[GeneratorGroup, ...] = tuple(
        base.generators[0].model_copy(update={"host": name, "devices": numbers, "count": len(numbers), "serve": serve})
        for name, numbers in dealt("generators").items()
    )
    trainer = {
        "devices": devices["trainer"],
        "host": "node" if ranks > 1 or hosts == 1 else "node-0",
        "hosts": ranks,
        "update": update,
        "synchronise": Cost(Constant(ring_s(ranks))),
    }
    return base.model_copy(
        update={
            "versions": FOREVER,
            "scheduler": replace(base.scheduler, batch_size=len(devices["simulators"]) * row.batches, max_lag=MAX_LAG),
            "simulators": simulators,
            "generators": generators,
            "trainer": base.trainer.model_copy(update=trainer),
            "links": _links(hosts, rows * OBSERVATION_MB, fan_out=2, weights_gb=WEIGHTS_GB * shorter),
            "conductor": ConductorSection(event=parse_cost(event)),
        }
    )


def _links(hosts: int, observation_mb: float, *, fan_out: int, weights_gb: float = WEIGHTS_GB) -> LinkSection:
    return LinkSection(
        latency=LATENCY_S,
        gb_per_s=GB_PER_S,
        main="node-0" if hosts > 1 else "node",
        observation_mb=observation_mb,
        sample_mb=observation_mb,
        weights_gb=weights_gb,
        fan_out=fan_out,
    )


# ------------------------------------------------------------ quick steps, and small batches


def _quick_steps(gpus: Sequence[int], event: str, seed: int) -> Iterator[dict[str, Any]]:
    for case, fan_out in (("all from the trainer's host", 0), ("each host sends to two", 2)):
        for count in gpus:
            measured = Measurement(quick_cluster(count, event, seed, fan_out))
            yield measured.row(case, count, measured.run_seconds(*QUICK_S))


def _small_batches(gpus: Sequence[int], event: str, seed: int) -> Iterator[dict[str, Any]]:
    for serving in ("main", "beside"):
        for count in gpus:
            measured = Measurement(small_cluster(count, event, serving, seed))
            yield measured.row(f"serving {serving}", count, measured.run_seconds(*SMALL_S))


def quick_cluster(gpus: int, event: str, seed: int, fan_out: int) -> ClusterSettings:
    simulators = {"env_batches": 32, "rows": 8, "step": "lognormal:200ms:0.5", "steps": "lognormal:40steps:0.4"}
    generators = {"serve": "80ms+1.5ms", "apply": "1s"}
    links = _links(gpus // GPUS_PER_HOST, OBSERVATION_MB, fan_out=fan_out)
    return _mixed(gpus, seed, 32 * gpus, simulators, generators, links, ConductorSection(event=parse_cost(event)))


def small_cluster(gpus: int, event: str, serving: str, seed: int) -> ClusterSettings:
    simulators = {"env_batches": 64, "rows": 1, "step": "lognormal:100ms:0.5", "steps": "lognormal:40steps:0.4"}
    generators = {"serve": "10ms+0.1ms", "apply": "100ms"}
    links = _links(gpus // GPUS_PER_HOST, 1e-3, fan_out=2, weights_gb=0.1)
    conductor = ConductorSection.model_validate({"event": event, "serving": serving})
    return _mixed(gpus, seed, 16 * gpus, simulators, generators, links, conductor)


def _mixed(
    gpus: int,
    seed: int,
    batch_size: int,
    simulators: dict[str, Any],
    generators: dict[str, Any],
    links: LinkSection,
    conductor: ConductorSection,
) -> ClusterSettings:
    """A quarter of the GPUs simulate, half serve, a quarter train; every host has some of each."""
    hosts = {"host": "node", "hosts": max(1, gpus // GPUS_PER_HOST)}
    return ClusterSettings.model_validate(
        {
            "seed": seed,
            "versions": FOREVER,
            "scheduler": {
                "batch_size": batch_size,
                "max_lag": 2,
                "batching": "dynamic",
                "max_rows": 128,
                "max_wait_s": 0.02,
            },
            "simulators": [{**hosts, "count": gpus // 4, "gpus": 1, "reset": "500ms", "chunk": 8, **simulators}],
            "generators": [{**hosts, "count": gpus // 2, "gpus": 1, **generators}],
            "trainer": {**hosts, "ranks": gpus // 4, "gpus": gpus // 4, "update": "1s+6us"},
            "links": links,
            "conductor": conductor,
        }
    )
