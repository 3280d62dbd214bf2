"""Stations that hold their devices in turn: times worked out by hand, and every guarantee on random placements."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.clustersim.clusters import run, settings, times
from tests.oracles.arbitrary import arbitrary_cluster
from tests.oracles.guarantees import GuaranteeChecker

from polyrhythm.clustersim.cluster import Cluster
from polyrhythm.clustersim.settings import ClusterSettings, LeaseSection
from polyrhythm.scheduler.conductor import Conductor
from polyrhythm.scheduler.records import DeviceTaken, DeviceYielded, UpdateDone, WeightsApplied

near = pytest.approx


def leased(rng: random.Random, base: ClusterSettings) -> ClusterSettings:
    """The cluster on few devices: several stations on each, and the trainer on several of them."""
    every = tuple(range(rng.randint(1, 3)))

    def placed(group: Any) -> Any:
        own = rng.choice(((), every, tuple(rng.sample(every, rng.randint(1, len(every))))))
        return group.model_copy(update={"devices": own, "resident_gb": rng.choice((0.0, 0.1, 1.0))})

    rules = {
        "min_hold": rng.choice((0.0, 0.01, 0.2)),
        "switch_order": rng.choice(("data_flow", "arrival")),
        "host_gb_per_s": 20.0,
    }
    found = base.model_copy(
        update={
            "sharing": "lease",
            "lease": LeaseSection.model_validate(rules),
            "simulators": tuple(map(placed, base.simulators)),
            "generators": tuple(map(placed, base.generators)),
            "trainer": placed(base.trainer).model_copy(update={"gradient_steps": rng.choice((1, 3))}),
        }
    )
    return found.model_copy(update={"scheduler": replace(base.scheduler, lease=found.lease_rules())})


@examples(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_random_placements_reach_their_target_with_every_guarantee(rng: random.Random) -> None:
    cluster_settings = leased(rng, arbitrary_cluster(rng, redundant=rng.random() < 0.2))
    conductor = Conductor(cluster_settings.scheduler)
    cluster = Cluster(cluster_settings, conductor)
    watch = GuaranteeChecker(cluster, conductor)
    cluster.run()
    watch.finish()
    assert cluster.driver.reached >= cluster_settings.versions
    assert cluster.driver.evaluating == set()
    assert conductor.ledger.imbalance == 0
    if all(fault.station != "trainer" for fault in cluster_settings.faults):
        assert conductor.ledger.trained == cluster_settings.versions * cluster_settings.scheduler.version_samples
