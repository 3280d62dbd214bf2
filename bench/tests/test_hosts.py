"""The parts of `bench hosts` and `bench scale` that are quick."""

from __future__ import annotations

import pytest
from tests.long import long

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
def test_a_cluster_of_small_batches_counts_what_would_remain(serving: str) -> None:
    measured = links.Measurement(links.small_cluster(16, "25us", serving, 0))
    row = measured.row(serving, 16, measured.run_seconds(1.0, 1.0))
    assert row["transitions_per_s"] > 0
    assert 0 < row["rest_per_s"] < row["events_per_s"] / 2
    assert 0 < row["rest_cpu"] < row["cpu"]
    assert (row["half"] > 0) == (serving == "beside")


def test_every_host_of_a_hybrid_run_simulates_and_generates() -> None:
    settings = links.placed_cluster(links.row_for(64), links.devices_of("hybrid", 64), "25us", 0)
    assert [(group.host, group.count) for group in settings.simulators] == [(f"node-{n}", 6) for n in range(8)]
    assert [(group.host, group.count) for group in settings.generators] == [(f"node-{n}", 2) for n in range(8)]
    assert settings.trainer.host_names == [f"node-{n}" for n in range(8)]


def test_the_trainer_of_a_disaggregated_run_is_on_hosts_of_its_own() -> None:
    settings = links.placed_cluster(links.row_for(64), links.devices_of("disaggregated", 64), "25us", 0)
    assert settings.trainer.host_names == ["node-0", "node-1"]
    assert {group.host for group in settings.simulators} == {f"node-{n}" for n in range(2, 8)}


@long(14, "bench hosts, every workload")
def test_every_workload_runs_at_the_smallest_size() -> None:
    found = links.run((8,))
    assert [row["case"] for row in found["placements"]] == list(links.PLACEMENTS)
    rows = [row for part in ("placements", "quick_steps", "small_batches") for row in found[part]]
    assert all(row["transitions_per_s"] > 0 and row["efficiency"] == 1 for row in rows)
    assert {row["bound"] for row in rows} <= {"simulation", "generation", "trainer", "publication", "nic", "main"}
