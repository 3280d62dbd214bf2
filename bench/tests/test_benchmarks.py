"""Each benchmark runs at a small size and says what it documents; nothing here asserts a time."""

from __future__ import annotations

import json

import pytest
from tests.long import long
from tests.process.runs import children, orphaned_folders

from polyrhythm.cli.main import main
from polyrhythm_bench.cases import ranks, throughput, weights_page


@pytest.fixture
def result(capsys):
    def run(*words):
        assert main(["bench", *words, "--json"]) == 0
        assert not children()
        assert not orphaned_folders()
        return json.loads(capsys.readouterr().out)

    return run


@long(6, "bench roundtrip, short")
def test_roundtrip(result):
    found = result("roundtrip", "--steps", "64", "--repeats", "1")
    assert found["round_trips"] == 64
    assert 0 < found["bare_p50_us"] <= found["bare_p99_us"]
    assert found["p50_us"] <= found["p99_us"]
    assert found["ratio"] == pytest.approx(found["p50_us"] / found["bare_p50_us"])
    assert found["within_limit"] == (found["ratio"] <= 4.0)


@long(10, "bench weights, short")
def test_weights(result, tmp_path):
    found = result("weights", "--megabytes", "4", "--repeats", "2")
    ways = {name: mode["way"] for name, mode in found["modes"].items()}
    host = dict.fromkeys(("shared memory", "shared memory, streamed"), "host")
    assert ways.items() >= {"inline": "reference", **host, "gloo broadcast": "gloo (no run uses it)"}.items()
    for mode in found["modes"].values():
        assert mode["gb_per_s"] == pytest.approx(found["mb"] / (mode["publish_ms"] + mode["apply_ms"]), rel=1e-3)
        assert mode["ratio"] > 0
    assert found["ratio"] == found["modes"]["shared memory, streamed"]["ratio"]
    assert found["within_limit"] == (found["ratio"] <= 1.3)
    serving = found["serving"]
    assert set(serving["pass_ms"]) == set(serving["pause_ratio"]) == {"8 rows", "64 rows"}
    assert serving["pause_ms"] > 0
    assert (ways["tcp between hosts"], ways["pair between hosts, simulated"]) == ("tcp", "pair")
    assert (ways["CUDA IPC, simulated"], ways["device to device, simulated"]) == ("ipc", "peer")
    assert {name for name in ways if "ranks" in name} == {"shards, 2 ranks", "shards, 4 ranks", "gathered from 2 ranks"}
    sent = {tree["hosts"]: (tree["sent"], tree["star_sent"]) for tree in found["trees"]}
    assert sent == {2: (2.0, 2.0), 6: (2.0, 6.0)}, "whatever the number of hosts"
    assert not any("tcp" in sentence for sentence in found["left_out"])
    text = weights_page.write(found, tmp_path)[0].read_text()
    assert all(f"| {name} |" in text for name in ways)
    assert "policies of this size have no shorter passes" in " ".join(text.split())


def test_switch(result, tmp_path):
    words = ("switch", "--megabytes", "4", "--repeats", "2", "--out", str(tmp_path))
    found = result(*words)
    assert result(*words)["modes"] == found["modes"], "kept, and not measured again"
    host = found["modes"]["cpu"]
    assert 3.0 < host["freed_mb"] < 4.2
    assert host["ratio"] > 0
    assert host["gb_per_s"] == pytest.approx(2 * host["freed_mb"] / (host["leave_ms"] + host["back_ms"]))
    device = found["modes"].get("cuda:0")
    assert found["within_limit"] == (None if device is None else device["ratio"] <= 1.2)
    assert len(found["left_out"]) == (device is None)


@long(14, "bench throughput, short")
def test_throughput_beside_a_plain_loop_that_does_the_same():
    found = throughput.measure(16, updates=2, repeats=1)
    for way in ("plain", "inline", "local"):
        assert found[way]["transitions_per_s"] > 0
        assert found[way]["cpu_s_per_million"] > 0
        assert found[way]["pss_mb"] > 50
    assert found["ratio_inline"] == pytest.approx(
        found["inline"]["transitions_per_s"] / found["plain"]["transitions_per_s"]
    )
    assert not children()
    assert not orphaned_folders()


@long(7, "bench conductor, short")
def test_conductor_charges_every_request_and_says_whether_it_is_within_the_limit(result):
    found = result("conductor", "--slots", "16,24", "--generators", "1")
    assert [size["slots"] for size in found["sizes"]] == [16, 24]
    for size in found["sizes"]:
        assert 0 < size["p50_us"] <= size["p99_us"]
        assert size["requests"] > 100
        mean = 1e6 * size["events"] / size["events_per_s"] / size["requests"]
        assert size["mean_us"] == pytest.approx(mean)
    assert found["p50_us"] == max(size["p50_us"] for size in found["sizes"])
    assert [drain["generators"] for drain in found["drain"]] == [1]


@long(9, "bench ranks, short")
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_ranks_do_the_same_maths_as_plain_torch(strategy):
    found = ranks.measure("mlp", 2, strategy, repeats=1)
    assert found["ratio"] == pytest.approx(found["ours_ms"] / found["plain_ms"])
    assert found["difference"] < 1e-5
    assert not children()


@long(5, "memory of one rank")
def test_memory_of_a_rank():
    found = ranks.measure_memory("ours", 1, "replicate")
    assert 0 < found["base_mb"] < found["uss_mb"] <= found["pss_mb"] <= found["peak_mb"]
    assert 80 < found["weights_mb"] < 120
