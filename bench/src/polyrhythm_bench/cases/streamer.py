"""What basic and streamer training gain: RL-VLA3's figure 9, simulated, and a small live run.

The figure prints no numbers. Its text says, of LIBERO with OpenVLA-OFT on 8 GPUs of which 4, 5 or 6 roll out: training
asynchronously gains more than rolling out asynchronously, most of all 1:1; both together gain most; streamer training
alone gains little, since trajectories are equally long. Stage times are those of `bench papers` (`papers.stages`);
environments are 64 a rollout GPU, in four env batches, and episodes equally long or lognormal.

| training | settings |
|---|---|
| none | max_lag 0, `drain`; a version's first update waits for all its samples |
| basic | max_lag 2, `continue`; the same |
| per epoch | max_lag 2, `continue`; an update begins with its own samples, a quarter of a version |
| streamer | max_lag 2, `continue`; and with the first of them (dynamic rollout alone) |
| on-policy per epoch, on-policy streamer | max_lag 0, `drain`; as the two above: the paper has no such modes |

With max_lag 2 rollout is ahead of training, so an update's samples are there before the trainer is; on policy it waits
for each of them, and that is where an early beginning is worth most. The live run has both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import parse_count
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm_bench.harness.version_cost import VersionCost, measure
from polyrhythm_bench.papers.published import PASSES, PaperRow, published
from polyrhythm_bench.papers.stages import Times, cluster_settings, fit, measured

log = logging.getLogger(__name__)

#: GPUs that roll out, of 8: the panels of the figure.
ROLLOUT_GPUS = (4, 5, 6)
#: Versions by which rollout may be ahead; versions left out at the start, counted, left out at the end: rollout is
#: ahead before the first that is counted, and still runs at the last.
MAX_LAG = 2
BEFORE, COUNTED, AFTER = MAX_LAG + 1, 4, MAX_LAG
#: Lengths of episodes in chunk steps, by name.
STEPS = 24
LENGTHS = {"equal": f"{STEPS}", "lognormal, σ 0.5": f"lognormal:{STEPS}steps:0.5"}
#: Settings of the scheduler by kind of training, and of the rollout.
TRAINING: dict[str, dict[str, Any]] = {
    "none": {"max_lag": 0, "on_update": "drain", "streaming": False},
    "basic": {"max_lag": MAX_LAG, "on_update": "continue", "streaming": False},
    "per epoch": {"max_lag": MAX_LAG, "on_update": "continue", "streaming": True},
    "streamer": {"max_lag": MAX_LAG, "on_update": "continue", "streaming": True, "parts": True},
    "on-policy per epoch": {"max_lag": 0, "on_update": "drain", "streaming": True},
    "on-policy streamer": {"max_lag": 0, "on_update": "drain", "streaming": True, "parts": True},
}


def run(repeats: int = 3, versions: int = 6) -> dict[str, Any]:
    """`figure_9`: what `simulated` gives; `live`: what `live` gives."""
    data = published()
    row = next(row for row in data.rows if row.setup.key == "b8" and row.mode == "full")
    times = fit(data)[row.setup.workload]
    return {"figure_9": list(simulated(row, times)), "live": live(repeats, versions)}


def simulated(row: PaperRow, times: Times, seeds: int = 3) -> Iterator[dict[str, Any]]:
    """For each panel, length, rollout and training: transitions per second (median over seeds) and times the one with
    neither."""
    for gpus in ROLLOUT_GPUS:
        panel = replace(row, rollout_gpus=gpus, envs=64 * gpus)
        for length, steps in LENGTHS.items():
            first = 0.0
            for rollout, batching in (("lock-step", "lockstep"), ("dynamic", "dynamic")):
                for training, kind in TRAINING.items():
                    if batching == "lockstep" and (kind.get("parts") or training.startswith("on-policy")):
                        continue
                    rates = [rate_of(panel, times, training, batching, steps, seed) for seed in range(seeds)]
                    rate = median(rates)
                    first = first or rate
                    yield {
                        "rollout : training GPUs": f"{gpus} : {row.gpus - gpus}",
                        "episodes": length,
                        "rollout": rollout,
                        "training": training,
                        "transitions/s": rate,
                        "gain": rate / first,
                    }


def rate_of(row: PaperRow, times: Times, training: str, batching: str, steps: str, seed: int) -> float:
    own = replace(row, mode="baseline" if batching == "lockstep" else "rollout" if training == "none" else "full")
    base = cluster_settings(own, times, STEPS, seed)
    count = parse_count(int(steps) if steps.isdigit() else steps)
    settings = base.model_copy(
        update={
            "versions": BEFORE + COUNTED + AFTER,
            "scheduler": replace(base.scheduler, **{"parts": False, **TRAINING[training], "batching": batching}),
            "simulators": tuple(group.model_copy(update={"steps": count}) for group in base.simulators),
            "trainer": base.trainer.model_copy(update={"streamed": 1 / PASSES}),
        }
    )
    return measured(own, settings, STEPS, BEFORE, COUNTED).throughput


#: Settings of the live run by kind of training: whitening compares over an update, which then waits for its samples.
LIVE: dict[str, dict[str, Any]] = {
    "basic": {"training": {"streaming": False}},
    "per epoch": {"algorithm": {"normalize_advantage": True}},
    "streamer": {},
}


def live_config(training: str, max_lag: int, seed: int = 0) -> RunConfig:
    """Sixteen rows whose episodes of 24 steps take about 0.6 s; an update of 8 samples sleeps 0.3 s, K = 2."""
    changes = LIVE[training]
    return validate(
        {
            "name": "streamer",
            "seed": seed,
            "env": {"type": "latency", "episode_steps": 24, "step_time": "lognormal:20ms:0.6"},
            "policy": {
                "type": "polyrhythm_bench.workloads.slow_policy:SlowPolicySettings",
                "policy": {"type": "gaussian"},
                "evaluate": "0ms+1.5ms",
            },
            "rollout": {"simulators": 2, "env_batches": 8, "rows": 1, "generators": 1},
            "batching": {"type": "dynamic", "max_rows": 16, "max_wait_ms": 2},
            "freshness": {"max_lag": max_lag, "sync_interval": 2, "on_update": "continue" if max_lag else "drain"},
            "training": {
                "versions": 1,
                "mini_batch_samples": 8,
                "epochs": 1,
                "minibatch_steps": 0,
                "max_kl": None,
                **changes.get("training", {}),
            },
            "algorithm": {
                "advantage": "reinforce_plus_plus",
                "normalize_advantage": False,
                "proximal": "behavior",
                "value": {"coef": 0.0},
                **changes.get("algorithm", {}),
            },
        }
    )


def twin(training: str, max_lag: int, versions: int = 60) -> float:
    """Seconds per version of the live run on the virtual clock, where nothing else takes time."""
    settings = ClusterSettings.model_validate(
        {
            "versions": versions,
            "scheduler": {
                "batch_size": 8,
                "sync_interval": 2,
                "max_lag": max_lag,
                "max_wait_s": 0.002,
                "on_update": "continue" if max_lag else "drain",
                "streaming": training != "basic",
                "parts": training == "streamer",
            },
            "simulators": [{"count": 2, "env_batches": 8, "steps": 24, "step": "lognormal:20ms:0.6"}],
            "generators": [{}],
            "trainer": {"update": "0ms+1.5ms"},
        }
    )
    cluster = VirtualCluster(settings)
    cluster.run()
    return cluster.driver.clock.now / versions


def live(repeats: int, versions: int) -> list[dict[str, Any]]:
    """By max_lag and training: seconds per version in interleaved turns (medians), basic's over them in the same turn,
    both simulated, and the trainer's busy share."""
    turns: dict[tuple[int, str], list[VersionCost]] = {(lag, name): [] for lag in (0, 1) for name in LIVE}
    for turn in range(repeats):
        for (lag, name), costs in turns.items():
            costs.append(measure(live_config(name, lag, turn), versions, validated=False))
            log.info("turn %d, lag %d, %s: %.2f s per version", turn + 1, lag, name, costs[-1].seconds_per_version)
    return [
        {
            "max_lag": lag,
            "training": name,
            "seconds_per_version": median(cost.seconds_per_version for cost in costs),
            "gain": median(
                basic.seconds_per_version / cost.seconds_per_version
                for basic, cost in zip(turns[lag, "basic"], costs, strict=True)
            ),
            "simulated_s": twin(name, lag),
            "simulated_gain": twin("basic", lag) / twin(name, lag),
            "trainer_busy": median(cost.busy["trainer"] for cost in costs),
            "lag_mean": median(cost.lag_mean for cost in costs),
        }
        for (lag, name), costs in turns.items()
    ]
