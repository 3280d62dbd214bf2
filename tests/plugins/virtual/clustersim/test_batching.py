"""The third batch trigger in a simulated run: whom a generator waits for."""

from __future__ import annotations

import pytest
from tests.plugins.virtual.clustersim.clusters import run, settings


def mean_wait(**scheduler: object) -> float:
    """Seconds from a request to its batch. Two slots of different tempo, two generators."""
    cluster = settings(
        scheduler={"batch_size": 4, "max_lag": 4.0, "on_update": "continue", **scheduler},
        simulators={"count": 2, "step": "lognormal:20ms:0.8", "steps": 20},
        generators={"count": 2, "serve": "1ms", "apply": "0ms"},
        versions=6,
    )
    return float(run(cluster)[1]["requests"]["wait_s"])


@pytest.mark.parametrize("routing", ["fixed", "affinity"])
def test_a_generator_with_one_slot_never_waits_for_the_others(routing: str) -> None:
    assert mean_wait(routing=routing, max_wait_s=10.0) == pytest.approx(0.0, abs=1e-9)


def test_where_slots_are_shared_the_slower_one_is_awaited() -> None:
    assert mean_wait(routing="least_loaded", max_wait_s=10.0) > 0.005


@pytest.mark.parametrize("routing", ["fixed", "least_loaded"])
def test_without_the_trigger_a_lone_request_waits_its_time(routing: str) -> None:
    waited = mean_wait(routing=routing, max_wait_s=0.005, fire_when_all_wait=False)
    assert waited == pytest.approx(0.005, rel=1e-6 if routing == "fixed" else 0.25)


def test_generators_with_slots_of_their_own_gain_from_it() -> None:
    """Slots that any generator may serve are all awaited, as all slots were by the rule before."""

    def rate(routing: str) -> float:
        cluster = settings(
            scheduler={"batch_size": 16, "max_lag": 4.0, "max_wait_s": 0.05, "routing": routing},
            simulators={"count": 2, "env_batches": 4, "step": "lognormal:20ms:0.5", "steps": 20},
            generators={"count": 2, "serve": "10ms"},
            versions=20,
        )
        return float(run(cluster)[1]["throughput"]["transitions_per_s"])

    assert rate("fixed") > 1.05 * rate("least_loaded")
