"""Small clusters for the tests of this folder."""

from __future__ import annotations

from typing import Any

from tests.oracles.guarantees import GuaranteeChecker

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings


def settings(
    *,
    scheduler: dict[str, Any] | None = None,
    simulators: dict[str, Any] | None = None,
    generators: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    **rest: Any,
) -> ClusterSettings:
    """One slot of one row, episodes of three steps; everything can be replaced.

    A reset takes 50 ms, a step 10 ms, a pass 5 ms and 1 ms per row, loading weights 20 ms, an update 100 ms,
    publication 30 ms.
    """
    return ClusterSettings.model_validate(
        {
            "versions": 2,
            "scheduler": {"batch_size": 1, "max_lag": 0.0, "on_update": "drain", **(scheduler or {})},
            "simulators": [{"step": "10ms", "reset": "50ms", "steps": 3, **(simulators or {})}],
            "generators": [{"serve": "5ms+1ms", "apply": "20ms", **(generators or {})}],
            "trainer": {"update": "100ms", "publish": "30ms", **(trainer or {})},
            **rest,
        }
    )


def run(cluster_settings: ClusterSettings) -> tuple[VirtualCluster, dict[str, Any]]:
    """The cluster after its run, every guarantee watched, and its summary."""
    conductor = build_conductor(cluster_settings.scheduler)
    cluster = VirtualCluster(cluster_settings, conductor, record=True)
    watch = GuaranteeChecker(cluster, conductor)
    cluster.run()
    watch.finish()
    ledger = conductor.ledger.as_dict()
    return cluster, summarise(cluster.driver, ledger, cluster_settings.gpus, conductor.rollout.summary())


def times(cluster: VirtualCluster, event: type) -> list[float]:
    """When the conductor took the events of this kind."""
    return [step.now for step in cluster.driver.steps if isinstance(step.event, event)]
