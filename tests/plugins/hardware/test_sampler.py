"""Samples of cores and GPUs: metrics of an update, the live display, the report, labels of Prometheus."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.long import long
from tests.plugins.hardware.test_gpus import FOUR, StandIn

from polyrhythm.observe.metrics import MetricsWriter, check_names
from polyrhythm.plugins.hardware.gpus import Reading
from polyrhythm.plugins.hardware.sampler import HOOKS, CoreUse, HardwarePart, Samples, in_words
from polyrhythm.plugins.prometheus.endpoint import labelled
from polyrhythm.plugins.report.data import page_data
from polyrhythm.plugins.report.read import read_run

CORES = "cpu/utilization"


def test_shares_are_means_and_memory_the_largest_since_the_last_update() -> None:
    samples = Samples()
    assert samples.take() == {}
    samples.add({CORES: 0.5}, {0: Reading(0.2, 7.0)})
    samples.add({CORES: 1.0}, {0: Reading(0.6, 3.0)})
    found = samples.take()
    assert found == {"cpu/utilization": 0.75, "gpu/0/utilization": 0.4, "gpu/0/memory_gb": 7.0}
    check_names(found)
    assert samples.take() == {"cpu/utilization": 1.0, "gpu/0/utilization": 0.6, "gpu/0/memory_gb": 3.0}, "the last ones"
    samples.add({CORES: 0.1}, {0: Reading(None, 4.0)})
    assert samples.take() == {"cpu/utilization": 0.1, "gpu/0/utilization": 0.6, "gpu/0/memory_gb": 4.0}
    assert in_words(samples.newest()) == "cores 10%   gpu 0 60%, 4.0 GB"


def test_a_run_samples_until_it_closes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = StandIn(*FOUR)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    part = HardwarePart()
    part.on_start(tmp_path)
    until = time.monotonic() + 20
    while not part.metrics() and time.monotonic() < until:
        time.sleep(0.05)
    assert part.metrics()["gpu/2/utilization"] == 1.0
    assert "gpu 0 43%, 12.3 GB" in part.status()[0]
    part.close()
    part.close()
    assert library.opened == 0
    assert "hardware" not in [thread.name for thread in threading.enumerate()]


def test_a_run_that_never_started_closes() -> None:
    part = HOOKS.begin(None)  # type: ignore[arg-type]
    assert (part.metrics(), part.status()) == ({}, ())
    part.close()


@long(2, "a busy process")
def test_use_of_the_cores_counts_this_process_and_its_children() -> None:
    use = CoreUse()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(1.5)
        both = use.read()
        busy.kill()
    time.sleep(0.5)
    use.read()
    time.sleep(0.3)
    quiet = use.read()
    assert 0 < both["cpu/own"] <= 1
    assert quiet["cpu/own"] < both["cpu/own"]
    assert 0 <= quiet[CORES] <= 1


@pytest.mark.parametrize(
    ("metric", "name", "labels"),
    [
        ("gpu/0/utilization", "polyrhythm_gpu_utilization", (("gpu", "0"),)),
        ("gpu/11/memory_gb", "polyrhythm_gpu_memory_gb", (("gpu", "11"),)),
        ("cpu/utilization", "polyrhythm_cpu_utilization", ()),
    ],
)
def test_a_gpu_is_a_label_of_prometheus(metric: str, name: str, labels: tuple[tuple[str, str], ...]) -> None:
    assert labelled(metric, 0.5)[:2] == (name, labels)


def test_the_report_has_curves(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for update in range(4):
            use = {"cpu/utilization": 0.5, "cpu/own": 0.2, "gpu/0/utilization": 0.1 * update, "gpu/0/memory_gb": 3.0}
            metrics.log(
                update, use | {"throughput/transitions_per_s": 1.0, "throughput/transitions": 9.0 * update}, update
            )
    (tmp_path / "config.yaml").write_text("name: x\n")
    sections = {one["id"]: one["parts"] for one in page_data([read_run(tmp_path)])["sections"]}
    shares, memory = sections["hardware"]
    assert [one["label"] for one in shares["series"]] == ["by this run", "processor cores", "gpu 0"]
    assert [one["label"] for one in memory["series"]] == ["gpu 0"]
    assert memory["series"][0]["y"] == [3.0] * 4
    assert "hardware" not in [one["id"] for one in page_data([read_run(tmp_path)] * 2)["sections"]]
