"""The guarantees over random clusters served by streams: any lengths of answers, places, weights, aborts, faults."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_streams
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached
from tests.scheduler.test_properties import check_restored

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster

examples = settings(max_examples=tries(33, 100), deadline=None, suppress_health_check=list(HealthCheck))
randoms = st.randoms(use_true_random=False)


@examples
@given(randoms)
def test_every_target_is_reached_and_no_guarantee_is_broken_on_the_way(rng: random.Random) -> None:
    cluster_settings = arbitrary_streams(rng)
    conductor = build_conductor(cluster_settings.scheduler)
    cluster = VirtualCluster(cluster_settings, conductor, record=True)
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))


@settings(examples, max_examples=tries(10, 30))
@given(randoms)
def test_a_restored_conductor_decides_as_the_saved_one_would_have(rng: random.Random) -> None:
    check_restored(arbitrary_streams(rng), rng)
