"""Figure 7 and 1,024 GPUs with links between hosts and the conductor's measured CPU: what bounds a run first.

Two workloads, eight GPUs to a host, on the virtual clock with the real conductor:

- `figure 7`: LIBERO + GR00T N1.5 with the costs of table 4, fully asynchronous, as many environments per GPU at every
  size. `ranks: paper` has the exchange and publication that table 1 lets one estimate (`scaling`: linear in the ranks);
  `ranks: links` a ring over the hosts' NICs for gradients, and weights that each host fetches once.
- `quick steps`: env batches of 8 rows with chunk steps of 200 ms, 8 for each GPU (like examples/clusters/large.yaml),
  a version about every 14 s.

Payloads: two uint8 images of 256 x 256 per observation; samples have the same per chunk step; 5.4 GB of weights and of
gradients (2.7 billion parameters in bfloat16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.costs import Cost, parse_cost
from polyrhythm.plugins.virtual.clustersim.measures import EXCHANGE, SERVE, STEP, TRAIN
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings, ConductorSection, LinkSection
from polyrhythm.scheduler.conductor import Conductor
from polyrhythm.scheduler.records import TrainUntil
from polyrhythm.specs.distributions import Constant
from polyrhythm_bench.papers import scaling
from polyrhythm_bench.papers.model import Costs, cluster_settings, measured
from polyrhythm_bench.papers.published import EPISODES, PaperData, PaperRow, published
from polyrhythm_bench.workloads.batching_scenario import FOREVER

GPUS = (8, 32, 128, 256, 1024)
GPUS_PER_HOST = 8
#: One 100 Gb/s port for each host.
LATENCY_S, GB_PER_S = 50e-6, 12.5
#: As fitted to table 4 (bench/results/papers.md).
COSTS = Costs(step=1.67, spread=0.08, generate=66.6e-3, train=8.99e-3)
#: Seconds of virtual time of `quick steps`.
WARM_UP_S, COUNTED_S = 20.0, 28.0
OBSERVATION_MB, WEIGHTS_GB = 2 * 256 * 256 * 3 * 1e-6, 5.4


def run(gpus: Sequence[int] = GPUS, event: str = "25us", seed: int = 0) -> dict[str, Any]:
    """Simulate both workloads at each number of GPUs (multiples of 8). event: CPU of the conductor for an event.

    Returns `figure_7` and `quick_steps`: throughput, efficiency against the smallest size, busy shares, what bounds.
    """
    data = published()
    example = next(row for row in data.rows if row.setup.key == "libero" and row.batches == 4 and row.mode == "full")
    return {
        "event": event,
        "gb_per_s": GB_PER_S,
        "figure_7": list(_efficiency(_figure_7(data, example, COSTS, gpus, event, seed))),
        "quick_steps": list(_efficiency(_quick_steps(gpus, event, seed))),
    }


def _efficiency(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with their throughput per GPU over that of the smallest size of the same case."""
    first: dict[str, float] = {}
    for row in rows:
        each = row["transitions_per_s"] / row["gpus"]
        yield {**row, "efficiency": each / first.setdefault(row["case"], each)}


def _links(main: str) -> LinkSection:
    return LinkSection(
        latency=LATENCY_S,
        gb_per_s=GB_PER_S,
        main=main,
        observation_mb=OBSERVATION_MB,
        sample_mb=OBSERVATION_MB,
        weights_gb=WEIGHTS_GB,
    )


def _hosts(gpus: int) -> dict[str, Any]:
    return {"host": "node", "hosts": max(1, gpus // GPUS_PER_HOST)}


def ring_s(hosts: int) -> float:
    """Seconds in which so many hosts sum their gradients by a ring of their NICs."""
    return 2 * (hosts - 1) / hosts * WEIGHTS_GB / GB_PER_S + 2 * (hosts - 1) * LATENCY_S


def _figure_7(
    data: PaperData, example: PaperRow, costs: Costs, gpus: Sequence[int], event: str, seed: int
) -> Iterator[dict[str, Any]]:
    chunk_steps = scaling.CHUNK_STEPS
    share = scaling.version_s(example, costs) * scaling.growth(data) / 2
    for ranks, serving in (("paper", "main"), ("links", "main"), ("links", "beside")):
        for count in gpus:
            row = replace(
                example,
                gpus=count,
                envs=example.envs * count // example.gpus,
                setup=replace(example.setup, global_batch=example.setup.global_batch * count // example.gpus),
            )
            steps, hosts = row.gradient_steps(chunk_steps) * EPISODES, max(1, count // GPUS_PER_HOST)
            grown = replace(costs, synchronise=share / steps, publish=share) if ranks == "paper" else costs
            settings = cluster_settings(row, grown, chunk_steps, seed)
            rows = row.envs // (len(row.simulating) * row.batches)  # of an env batch, for which one row stands
            links = _links("node-0" if hosts > 1 else "node")
            sizes = {"observation_mb": rows * OBSERVATION_MB, "sample_mb": rows * OBSERVATION_MB}
            trainer = settings.trainer.model_copy(update=_hosts(count))
            if ranks == "links":
                trainer = trainer.model_copy(update={"synchronise": Cost(Constant(ring_s(hosts)))})
            changed = settings.model_copy(
                update={
                    "simulators": tuple(group.model_copy(update=_hosts(count)) for group in settings.simulators),
                    "generators": tuple(group.model_copy(update=_hosts(count)) for group in settings.generators),
                    "trainer": trainer,
                    "links": links.model_copy(update=sizes),
                    "conductor": ConductorSection(event=parse_cost(event), serving=serving),
                }
            )
            found = measured(row, changed, chunk_steps)
            yield {
                "case": f"ranks {ranks}, serving {serving}",
                "gpus": count,
                "transitions_per_s": found.throughput,
                **_shares(found.cluster),
            }


def _quick_steps(gpus: Sequence[int], event: str, seed: int) -> Iterator[dict[str, Any]]:
    for case, cost, serving in (("free", "0us", "main"), ("main", event, "main"), ("beside", event, "beside")):
        for count in gpus:
            cluster = VirtualCluster(quick_cluster(count, cost, serving, seed))
            driver = cluster.driver
            driver.submit(TrainUntil(FOREVER))
            driver.run(FOREVER, WARM_UP_S)
            before = driver.measures.transitions
            driver.run(FOREVER, WARM_UP_S + COUNTED_S)
            for station in cluster.stations.values():
                station.flush()
            yield {
                "case": f"conductor {case}",
                "gpus": count,
                "transitions_per_s": (driver.measures.transitions - before) / COUNTED_S,
                **_shares(cluster),
            }


def quick_cluster(gpus: int, event: str, serving: str, seed: int) -> ClusterSettings:
    """A quarter of the GPUs simulate, half serve, a quarter train; every host has some of each."""
    hosts = _hosts(gpus)
    return ClusterSettings.model_validate(
        {
            "seed": seed,
            "versions": FOREVER,
            "scheduler": {
                "batch_size": 64 * gpus,
                "max_lag": 2,
                "batching": "dynamic",
                "max_rows": 128,
                "max_wait_s": 0.02,
            },
            "simulators": [
                {
                    **hosts,
                    "count": gpus // 4,
                    "gpus": 1,
                    "env_batches": 32,
                    "rows": 8,
                    "step": "lognormal:200ms:0.5",
                    "reset": "500ms",
                    "steps": "lognormal:40steps:0.4",
                    "chunk": 8,
                }
            ],
            "generators": [{**hosts, "count": gpus // 2, "gpus": 1, "serve": "80ms+1.5ms", "apply": "1s"}],
            "trainer": {**hosts, "ranks": gpus // 4, "gpus": gpus // 4, "update": "1s+6us"},
            "links": _links("node-0" if gpus > GPUS_PER_HOST else "node"),
            "conductor": {"event": event, "serving": serving},
        }
    )


def _shares(cluster: VirtualCluster) -> dict[str, Any]:
    """Busy shares of stations, links and the conductor; `bound`: the one that is busiest."""
    driver, conductor = cluster.driver, cluster.conductor
    assert isinstance(conductor, Conductor)
    found = summarise(driver, conductor.ledger.as_dict())
    time, links, cpu = found["time"], found["links"], found["conductor"]
    shares = {
        "simulation": time["slots"][STEP]["share"],
        "generation": time["generators"][SERVE]["share"],
        "training": time["trainer"][TRAIN]["share"],
        "exchange": time["trainer"][EXCHANGE]["share"],
        "publication": found["publishing_s"] / found["virtual_s"],
        "nic": links["busiest_share"],
        "conductor": cpu["share"],
        "half": cpu["halves_share"],
    }
    trainer = shares["training"] + shares["exchange"]
    kinds = {**shares, "trainer": trainer}
    for part in ("training", "exchange"):
        kinds.pop(part)
    waited = links["waited_s"]
    return {
        **shares,
        "event_wait_ms": 1000 * cpu["wait_s"],
        "fetch_ms": 1000 * waited["observations"] / max(1, found["requests"]["batches"]),
        "local": found["requests"]["local"],
        "bound": max(kinds, key=lambda name: kinds[name]),
    }
