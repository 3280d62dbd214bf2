"""The benchmark on one device: what it refuses, how it goes on where it was, how it counts, and a small live run."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from tests.long import long
from tests.process.runs import children, orphaned_folders

from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.callbacks import StopTraining
from polyrhythm_bench.cases import gpu_colocated
from polyrhythm_bench.cases.gpu_colocated import Pace
from polyrhythm_bench.harness.resources import CpuReading
from polyrhythm_bench.workloads import colocated
from polyrhythm_bench.workloads.colocated import MODES

SMALL = colocated.scene_of(tiny=True)


def write_result(out, mode, rate, scene=SMALL):
    gpu_colocated.kept(out, scene).write(mode, {"transitions_per_s": rate})


def mark(time_s, transitions):
    rates = {"throughput/transitions_per_s": 1.0, "staleness/lag_mean": 1.0, "stations/faults": 0.0}
    return {"time_s": time_s, "throughput/transitions": transitions, "stations/utilisation/trainer": 0.5, **rates}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_sentence_says_what_to_do(capsys):
    assert main(["bench", "gpu-colocated"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "polyrhythm: error: PR203: bench gpu-colocated: torch sees no CUDA device here; run it where"
    )
    assert "--tiny" in said
    assert said.count("\n") == 1


def test_modes_that_are_there_are_not_run_again(tmp_path):
    for number, mode in enumerate(MODES):
        write_result(tmp_path, mode, 100.0 + 40.0 * number)
    found = gpu_colocated.run(tmp_path, 0.001, tiny=True)
    assert found["gain"] == pytest.approx(3.8), "the best of full asynchrony"
    assert [mode["gain"] for mode in found["modes"].values()] == pytest.approx([1.0, 1.4, 1.8, 2.2, 2.6, 3.0, 3.4, 3.8])
    assert found["missing"] == ""


def test_results_of_another_scene_are_refused(tmp_path):
    write_result(tmp_path, "lockstep", 100.0, SMALL._replace(rows=16))
    with pytest.raises(ConfigError, match=r"lockstep.json is of .*name another folder"):
        gpu_colocated.run(tmp_path, tiny=True)


def pace_of(*marks):
    cpu = [CpuReading(one["time_s"], 3.0 * one["time_s"], 1.0 * one["time_s"]) for one in marks]
    return Pace(time.monotonic() + 100, "cpu", list(marks), cpu=cpu)


def test_transitions_are_counted_from_the_second_update_on():
    found = pace_of(mark(0.0, 0), mark(10.0, 500), mark(12.0, 700), mark(15.0, 1000)).summary()
    assert found["transitions_per_s"] == pytest.approx(100.0)
    assert (found["versions"], found["seconds"]) == (2, 5.0)
    assert found["busy"] == {"trainer": 0.5}
    assert found["others_cores"] == pytest.approx(2.0)


def test_of_two_updates_the_first_begins():
    assert pace_of(mark(1.0, 0), mark(3.0, 300)).summary()["transitions_per_s"] == pytest.approx(150.0)


def test_a_run_stops_after_its_time_and_three_updates():
    pace = Pace(time.monotonic() - 1.0, "cpu")
    pace.on_update(mark(0.0, 0))
    pace.on_update(mark(1.0, 1))
    with pytest.raises(StopTraining):
        pace.on_update(mark(2.0, 2))
    assert len(pace.marks) == 3


def test_the_full_size_fits_a_device_of_80_gib():
    """0.6 GiB of float32 for each of the expert's gradients and moments, 6.5 GiB for the acting policy."""
    scene = SMALL._replace(size="released", device="cpu", rows=64, image=224, max_steps=50, precomputed_mib=20480)
    form = gpu_colocated.form_of(colocated.config_of(scene, "full_async", None))
    plan = colocated.memory_plan(scene, form)
    assert form.parameters == pytest.approx(3.5e9, rel=0.01)
    assert plan["generator: weights"] == pytest.approx(6.5, abs=0.1)
    assert plan["trainer: moments"] == pytest.approx(2 * plan["trainer: gradients"])
    assert sum(plan.values()) + gpu_colocated.REST_GIB < 75


def test_rows_of_a_device_are_modes_by_drawings_those_that_say_most_first(tmp_path, monkeypatch):
    monkeypatch.setattr(colocated, "is_loadable", lambda backend: backend == "osmesa")
    monkeypatch.setenv("PATH", str(tmp_path))
    scene = SMALL._replace(device="cuda")
    rows = colocated.rows_of(scene)
    assert len(rows) == 2 * len(MODES)
    assert list(rows)[:2] == ["full_async-osmesa", "lockstep-egl"]
    assert colocated.why_not("lockstep", "osmesa") == ""
    assert colocated.why_not("lockstep", "egl") == "no library of egl"
    assert colocated.why_not("full_async_mps", "osmesa") == "nvidia-cuda-mps-control is not on the PATH"
    rates = {"full_async-osmesa": 312.0, "lockstep-osmesa": 176.0, "lockstep-egl": 272.0}
    results = {name: {"transitions_per_s": rate} for name, rate in rates.items()}
    found = gpu_colocated.summarise(scene, rows, results, {})
    assert found["gain"] == pytest.approx(312 / 272), "over the best lock-step of any drawing"
    assert "full_async_mps-osmesa (nvidia-cuda-mps-control is not on the PATH)" in found["missing"]
    assert "not finished in the time: full_async_process-osmesa, full_async_unlent-osmesa, " in found["missing"]


def test_the_modes_are_the_four_of_the_paper_and_other_ways_of_sharing():
    """Batching, freshness, the device's sharing and who computes prefixes differ, nothing else."""
    made = {mode: colocated.config_of(SMALL, mode, None) for mode in MODES}
    assert [c.batching.type for c in made.values()] == ["lockstep", "dynamic"] * 2 + ["lockstep"] + ["dynamic"] * 3
    assert [config.freshness.max_lag for config in made.values()] == [0, 0, 1, 1, 0, 1, 1, 1]
    lends = [config.training.precomputed_mib > 0 for config in made.values()]
    assert lends == [mode != "full_async_unlent" for mode in MODES]
    left_out = {"batching": True, "freshness": True, "placement": True, "training": {"precomputed_mib"}}
    same = [config.model_dump(exclude=left_out) for config in made.values()]
    assert all(one == same[0] for one in same)
    assert same[0]["rollout"]["buckets"] == "powers", "else no pass is captured on a GPU"


def test_what_makes_no_update_is_ended_in_time():
    before = signal.getsignal(signal.SIGTERM)
    began = time.monotonic()
    with gpu_colocated.time_limit(0.1):
        threading.Event().wait(60)
    assert time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_by_the_user_ends_the_benchmark():
    with pytest.raises(KeyboardInterrupt), gpu_colocated.time_limit(60):
        raise KeyboardInterrupt


@long(15, "bench gpu-colocated, one mode live on a CPU")
@pytest.mark.slow
def test_one_mode_live_and_the_others_from_the_folder(tmp_path):
    for mode in set(MODES) - {"full_async"}:
        write_result(tmp_path, mode, 1.0)
    found = gpu_colocated.run(tmp_path, 0.4, tiny=True)
    live = found["modes"]["full_async"]
    assert live["transitions_per_s"] > 0
    assert live["versions"] >= 1
    assert live["lag_mean"] <= 1.0
    assert found["missing"] == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{mode}.json" for mode in MODES)
    assert not children()
    assert not orphaned_folders()
