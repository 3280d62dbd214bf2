"""The network between hosts and the conductor's CPU: small clusters whose times were worked out by hand."""

from __future__ import annotations

import random

import pytest
from tests.oracles.arbitrary import arbitrary_hosts
from tests.plugins.virtual.clustersim.clusters import run, settings, times

from polyrhythm.plugins.virtual.clustersim.hardware import Network, VirtualClock
from polyrhythm.scheduler.records import (
    BatchDone,
    GeneratorJoined,
    RequestArrived,
    SampleFinished,
    SimulatorJoined,
    UpdateDone,
    WeightsApplied,
)

ms = pytest.approx
#: 10 ms one way, 1 GB/s: an observation takes 4 ms, a sample of 3 chunk steps 6 ms, a version 50 ms.
LINKS = {"latency": "10ms", "gb_per_s": 1.0, "observation_mb": 4.0, "sample_mb": 2.0, "weights_gb": 0.05}
FAR, NEAR = {"host": "far"}, {"host": "near"}


def test_a_nic_sends_one_thing_after_the_other_and_receives_so_too() -> None:
    network = Network(VirtualClock(), 0.0, 1e9)
    assert [network.transfer("a", to, 10**9) for to in "bc"] == [1.0, 2.0]
    network = Network(VirtualClock(), 0.0, 1e9)
    assert [network.transfer(source, "b", 10**9) for source in "ac"] == [1.0, 2.0]
    network = Network(VirtualClock(), 0.25, 1e9)
    assert [network.transfer(source, target, 10**9) for source, target in ("ab", "cd", "ba")] == [1.25, 1.25, 1.25]
    assert network.transfer("a", "a", 10**9) == 0.0
    assert network.summary()["gb"] == 3.0


def test_a_nic_is_busy_for_at_most_the_time_that_has_passed() -> None:
    """Twenty transfers of 1 s are queued: after 5 s five have passed, after 40 s all of them have for 20 s."""
    clock = VirtualClock()
    network = Network(clock, 0.0, 1e9)
    for _ in range(20):
        network.transfer("a", "b", 10**9)
    shares = []
    for at in (5.0, 40.0):
        clock.at(at, lambda _: shares.append(network.summary()["busiest_share"]), None)
    clock.advance()
    clock.advance()
    assert shares == [1.0, 0.5]
    assert network.summary()["mean_share"] == 0.5


@pytest.mark.parametrize(
    ("fan_out", "seconds"),
    [(0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), (1, [1.0] * 6), (2, [1.0, 2.0, 1.0, 2.0, 2.0, 2.0])],
)
def test_hosts_send_weights_on_while_they_arrive(fan_out: int, seconds: list[float]) -> None:
    """A version takes a NIC 1 s. With two each, a and b ask the trainer's host, c and d ask a, e and f ask b."""
    network = Network(VirtualClock(), 0.0, 1e9, weights=10**9, fan_out=fan_out, trainer="t")
    assert [network.mirror(host, 7) for host in "abcdef"] == seconds
    assert [network.mirror(host, 7) for host in "fa"] == [seconds[-1], seconds[0]], "once for each host"
    assert network.mirror("t", 7) == 0.0


def test_a_simulator_on_another_host_pays_for_messages_observations_answers_and_samples() -> None:
    cluster, summary = run(settings(simulators=FAR, generators=NEAR, trainer=NEAR, links=LINKS, versions=1))
    # Weights at 50; tickets there at 60, reset 50. Then each time: request 10, question 10, observation 4 + 10, pass 6,
    # answer 10, step 10. The sample is told 10 later; it is fetched in 10 + 6 + 10, then the update takes 100.
    assert times(cluster, WeightsApplied)[0] == ms(0.050)
    assert times(cluster, RequestArrived) == ms([0.120, 0.180, 0.240])
    assert times(cluster, SampleFinished) == ms([0.300])
    assert times(cluster, UpdateDone) == ms([0.426])
    assert summary["links"]["gb"] == ms((3 * 4e6 + 6e6) * 1e-9)
    assert summary["links"]["waited_s"] == {"observations": ms(3 * 0.024), "weights": 0.0, "samples": ms(0.026)}


def test_a_host_fetches_a_version_once() -> None:
    cluster, summary = run(settings(generators={**FAR, "count": 2}, trainer=NEAR, links=LINKS, simulators=FAR))
    # Told at 40 ms; question 10, weights 50 + 10, loading 20, report 10. The second finds them there.
    assert times(cluster, WeightsApplied)[:2] == ms([0.140, 0.140])
    samples_gb = 2 * 0.006
    assert summary["links"]["gb"] == ms(3 * 0.05 + samples_gb)  # versions 0, 1 and 2


def test_stations_are_dealt_to_hosts_in_order() -> None:
    cluster, _ = run(
        settings(
            simulators={"count": 4, "host": "node", "hosts": 2},
            generators={"count": 2, "host": "node", "hosts": 2},
            trainer={"host": "node", "hosts": 2},
            scheduler={"batch_size": 4, "max_wait_s": 0.0, "batching": "dynamic"},
            links=LINKS,
        )
    )
    joined = [step.event for step in cluster.driver.steps if isinstance(step.event, SimulatorJoined | GeneratorJoined)]
    hosts = ["node-0", "node-0", "node-1", "node-1", "node-0", "node-1"]
    assert sorted(event.host for event in joined) == sorted(hosts)
    assert [cluster.stations[f"simulator-{n}"].host for n in range(4)] == hosts[:4]


def busy(serving: str):
    """Eight slots whose chunk steps are due more often than the conductor can hear of them."""
    return run(
        settings(
            simulators={"env_batches": 8, "step": "1ms", "steps": 10, "host": "node"},
            generators={"serve": "1ms", "host": "node"},
            trainer={"host": "node"},
            scheduler={"batch_size": 8, "max_wait_s": 0.0, "batching": "dynamic", "max_requests": 1},
            conductor={"event": "2ms", "serving": serving},
        )
    )


def test_the_conductors_cpu_bounds_the_rate_and_serving_halves_take_it_off() -> None:
    cluster, summary = busy("main")
    spent = summary["conductor"]
    assert spent["share"] * summary["virtual_s"] == ms(0.002 * spent["events"])
    serving = len(times(cluster, RequestArrived)) + len(times(cluster, BatchDone))
    assert summary["virtual_s"] >= 0.002 * serving
    assert spent["wait_s"] > 0.001  # a request waits for others'
    _, beside = busy("beside")
    assert beside["conductor"]["events"] <= spent["events"] - serving
    assert beside["conductor"]["halves"] == 1
    assert beside["conductor"]["halves_share"] > beside["conductor"]["share"]


def test_an_event_that_costs_nothing_changes_nothing() -> None:
    _, plain = run(settings())
    _, free = run(settings(conductor={"event": "0ms"}))
    assert free["throughput"] == plain["throughput"]
    assert free["virtual_s"] == ms(plain["virtual_s"])


@pytest.mark.parametrize("seed", range(8))
def test_every_guarantee_holds_over_links_and_with_a_slow_conductor(seed) -> None:
    run(arbitrary_hosts(random.Random(seed)))


def test_streams_and_links_are_refused() -> None:
    with pytest.raises(ValueError, match="are not simulated"):
        settings(scheduler={"batching": "streams"}, links={})
