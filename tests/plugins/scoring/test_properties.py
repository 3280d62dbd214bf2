"""The guarantees over random clusters whose samples are scored: by any number of scorers that raise, hang and die."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_scored
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached
from tests.scheduler.test_properties import check_restored

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.scheduler.records import PayloadsLost
from polyrhythm.scheduler.samples.groups import SampleState

examples = settings(max_examples=tries(33, 100), deadline=None, suppress_health_check=list(HealthCheck))
randoms = st.randoms(use_true_random=False)


@examples
@given(randoms)
def test_every_target_is_reached_and_no_guarantee_is_broken_on_the_way(rng: random.Random) -> None:
    cluster_settings = arbitrary_scored(rng)
    conductor = build_conductor(cluster_settings.scheduler)
    cluster = VirtualCluster(cluster_settings, conductor, record=True)
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))


@settings(examples, max_examples=tries(13, 40))
@given(randoms)
def test_samples_of_lost_hosts_run_again_scored_or_not(rng: random.Random) -> None:
    cluster_settings = arbitrary_scored(rng)
    conductor = build_conductor(cluster_settings.scheduler)
    cluster = VirtualCluster(cluster_settings, conductor, record=True)

    def lose(_: object) -> None:
        states = (SampleState.BUFFERED, SampleState.SCORING)
        waiting = [sample.payload_id for sample in conductor.rollout.samples.values() if sample.state in states]
        cluster.driver.submit(PayloadsLost("far", tuple(rng.sample(waiting, rng.randint(0, len(waiting))))))

    for _ in range(rng.randint(1, 6)):
        cluster.driver.clock.at(rng.uniform(0.0, 0.5), lose, None)
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))


@settings(examples, max_examples=tries(13, 40))
@given(randoms)
def test_a_restored_conductor_decides_as_the_saved_one_would_have(rng: random.Random) -> None:
    check_restored(arbitrary_scored(rng), rng)


@settings(examples, max_examples=tries(13, 40))
@given(randoms)
def test_a_run_that_goes_on_without_its_stations_scores_what_was_not(rng: random.Random) -> None:
    """Detached at any event, with other stations: nothing is lost or trained twice."""
    cluster_settings = arbitrary_scored(rng).model_copy(update={"evaluations": ()})
    first = VirtualCluster(cluster_settings, record=True)
    first.run()
    conductor = build_conductor(cluster_settings.scheduler)
    for step in first.driver.steps[: rng.randint(1, len(first.driver.steps))]:
        conductor.handle(step.event, step.now)
    before = conductor.ledger.as_dict()
    conductor = restore_conductor(cluster_settings.scheduler, conductor.save())
    conductor.detach()
    after = conductor.ledger.as_dict()
    assert conductor.ledger.imbalance == 0
    assert after["scoring"] == before["scoring"] == len(conductor.rollout.scoring.waiting)
    unscored = {n for n, sample in conductor.rollout.samples.items() if sample.state is SampleState.SCORING}
    assert unscored == {entry.ticket for entry in conductor.rollout.scoring.waiting}
