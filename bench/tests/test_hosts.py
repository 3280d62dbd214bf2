"""The parts of `bench hosts` and `bench scale` that are quick."""

from __future__ import annotations

import pytest

from polyrhythm.cli.main import main
from polyrhythm_bench.cases import hosts
from polyrhythm_bench.harness.raw_tcp import raw_end
from polyrhythm_bench.papers import links


def test_the_bare_end_answers_with_as_many_bytes_as_it_is_asked_for() -> None:
    with raw_end("127.0.0.1", (), 3_000_000) as raw:
        raw.room[:] = b"\1" * 3_000_000
        raw.fetch(1_000)
        raw.fetch(2_000_000)
        assert bytes(raw.room[:2_000_000]) == bytes(2_000_000)
        assert bytes(raw.room[2_000_000:]) == b"\1" * 1_000_000


def test_everything_that_crosses_is_measured_beside_the_bare_socket() -> None:
    found = hosts.measure_link("", repeats=1, megabytes=1, ray=None)
    assert [entry["what"] for entry in found] == list(hosts.FarHost.names)
    assert all(entry["of_bare"] > 0 and "ray_ms" not in entry for entry in found)


def test_a_python_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hosts", "--ray", "/no/python"]) == 2
    assert "--ray /no/python: there is no such Python" in capsys.readouterr().err


def test_a_ring_over_more_hosts_takes_no_longer_but_for_its_latency() -> None:
    two, many = links.ring_s(2), links.ring_s(128)
    assert two == pytest.approx(links.WEIGHTS_GB / links.GB_PER_S, rel=1e-3)
    assert many == pytest.approx(2 * 127 / 128 * links.WEIGHTS_GB / links.GB_PER_S + 254 * links.LATENCY_S)


def test_gpus_that_fill_no_host_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--gpus", "12"]) == 2
    assert "--gpus 12: hosts have 8 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("serving", ["main", "beside"])
def test_a_cluster_of_quick_steps_runs(serving: str) -> None:
    from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
    from polyrhythm.scheduler.records import TrainUntil

    cluster = VirtualCluster(links.quick_cluster(16, "25us", serving, 0))
    cluster.driver.submit(TrainUntil(links.FOREVER))
    cluster.driver.run(links.FOREVER, 4.0)
    assert cluster.driver.measures.transitions > 0
    assert cluster.driver.cpu is not None
    assert cluster.driver.cpu.summary()["halves"] == (2 if serving == "beside" else 0)
