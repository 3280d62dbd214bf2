"""Simulates ROLL Flash's figure 9: 512 environments of some 22 turns with normal latencies, batched or independent.

Together (`lockstep`) each turn takes as long as the slowest environment; alone (`dynamic`, one request per batch) only
whole episodes are waited for. Nothing is fitted. Generation takes no time: of the published 892 s it has at most three.

A normal distribution has latencies below 0 where the deviation is large. They are set to 0 here; drawing them again
(the distribution `normal` of cluster files) makes the mean of (10, 10) 12.9 s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import Cost
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm_bench.papers.published import Latency, PaperData


@dataclass(frozen=True, slots=True)
class ClippedNormal:
    """A normal distribution, clipped at 0."""

    location: float
    scale: float

    @property
    def mean(self) -> float:
        standard, cut = NormalDist(), self.location / self.scale
        return self.location * standard.cdf(cut) + self.scale * standard.pdf(cut)

    def sample(self, rng: random.Random) -> float:
        return max(0.0, rng.normalvariate(self.location, self.scale))


def rollout_s(latency: Latency, batch: int, turns: int, *, together: bool, rollouts: int, seed: int = 0) -> float:
    """Mean seconds of a rollout of the whole batch."""
    settings = ClusterSettings.model_validate(
        {
            "seed": seed,
            "versions": rollouts,
            "scheduler": {
                "batch_size": batch,
                "max_lag": 0,
                "on_update": "drain",
                "batching": "lockstep" if together else "dynamic",
                "max_requests": 1,
                "max_wait_s": 0.0,
            },
            "simulators": [
                {"env_batches": batch, "steps": turns, "step": Cost(ClippedNormal(latency.mean_s, latency.deviation_s))}
            ],
            "generators": [{}],
        }
    )
    cluster = VirtualCluster(settings)
    cluster.run()
    return cluster.driver.clock.now / rollouts


def rows(data: PaperData, *, rollouts: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """A row for each printed number: speed-ups, and seconds if given."""
    for point in data.latencies:
        name = f"normal({point.mean_s:g} s, {point.deviation_s:g} s)"
        together, alone = (
            rollout_s(point, data.batch, data.turns, together=together, rollouts=rollouts, seed=seed)
            for together in (True, False)
        )
        yield _row(f"{name}: speed-up", point.speedup, together / alone)
        if point.batch_s:
            yield _row(f"{name}: together, s", point.batch_s, together)
            yield _row(f"{name}: each alone, s", point.environment_s, alone)


def _row(name: str, published: float, predicted: float) -> dict[str, Any]:
    return {
        "table": "figure 9",
        "row": name,
        "fitted": False,
        "published": published,
        "predicted": predicted,
        "error": predicted / published - 1,
    }
