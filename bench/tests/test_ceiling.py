"""`bench ceiling`: null stations, a small measurement in real processes, and a size beyond the descriptor limit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.long import long
from tests.process.runs import children, orphaned_folders

from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm_bench.cases import ceiling
from polyrhythm_bench.cases.ceiling import summarise
from polyrhythm_bench.harness.main_process import ProcessUsage, Window
from polyrhythm_bench.workloads.null_env import NullEnvSettings
from polyrhythm_bench.workloads.null_policy import NullSettings


def test_episodes_of_the_null_environment_end_apart_by_their_seeds():
    batch = NullEnvSettings(type="", episode_steps=5).build(3)
    batch.reset(range(3), [0] * 3, [0, 7, 14])
    ended = [batch.step(range(3), np.zeros((3, 1), np.float32)).terminated.tolist() for _ in range(5)]
    assert [row.index(True) + 1 for row in zip(*ended, strict=True)] == [1, 3, 5]
    assert batch.spec.max_steps == 5


def test_the_null_policy_can_be_trained():
    policy = NullSettings(type="").build(NullEnvSettings(type="").spec(), seed=0, device="cpu", role="train")
    obs, none = {"state": torch.zeros(4, 1)}, torch.zeros(4, dtype=torch.int64)
    act, found = policy.act(obs, none.bool(), none), policy.evaluate(obs, {})
    assert found.logprob.shape == act.logprob.shape == (4, 1, 1)
    assert found.value.shape == act.value.shape == (4,)
    (found.logprob.sum() + found.value.sum() + found.entropy.sum()).backward()
    assert policy.nothing.grad == 0


def test_sixteen_env_batches_in_two_processes(capsys):
    found = ceiling.run((16,), (2,), seconds=0.3, repeats=2)
    assert not children()
    assert not orphaned_folders()
    (size,) = found["sizes"]
    assert (size["env_batches"], size["processes"], found["repeats"]) == (16, 2, 2)
    assert found["us_per_chunk_step"] == {"16": size["us_per_chunk_step"]}
    assert found["within_limit"] is None, "the limit is for another size"
    assert 0 < size["loop_us"] <= size["us_per_chunk_step"]
    assert found["saturates_at"]["16"] == pytest.approx(1e6 / size["loop_us"])
    assert size["us_per_chunk_step"] < 1e3 * size["cpu_ms_per_transition"], "main is one of the processes"
    assert 0 < size["main_busy"] < 2
    assert size["us_per_chunk_step"] == pytest.approx(sum(size["us_by_turn"]) / 2)
    for who in ("main", "simulator"):
        assert 0 < size[f"sockets_{who}"] < size[f"descriptors_{who}"]
        assert size[f"threads_{who}"] > 0


def window(chunk_steps, main_cpu_s):
    usage = ProcessUsage(descriptors=10, sockets=4, threads=3)
    return Window(2.0, chunk_steps, 10, main_cpu_s, 0.5 * main_cpu_s, 4 * main_cpu_s, 0.2, usage, usage)


def test_a_size_is_the_median_of_its_windows():
    found = summarise((64, 8), [window(1000, 0.1), window(1000, 0.3), window(1000, 0.2)], "")
    assert found["us_per_chunk_step"] == pytest.approx(200)
    assert found["saturates_at"] == pytest.approx(10_000)
    assert found["cpu_ms_per_transition"] == pytest.approx(0.8)
    assert (found["rows_per_batch"], found["chunk_steps_per_s"]) == (100, 500)
    assert summarise((64, 8), [], "why") == {"env_batches": 64, "processes": 8, "not_measured": "why"}


#: Under a limit that no run can live with: main itself needs more.
_FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
from polyrhythm.cli.main import main
sys.exit(main(["bench", "ceiling", "--env-batches", "64", "--processes", "2", "--repeats", "1", "--seconds", "0.1"]))
"""


@long(3, "bench ceiling, at a limit")
def test_a_size_beyond_the_descriptor_limit_is_reported_and_no_crash():
    ended = subprocess.run([sys.executable, "-c", _FEW], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Too many open files: at most 16 descriptors a process" in ended.stdout
    assert "us_per_chunk_step: 64 null" in ended.stdout


@pytest.mark.parametrize(
    ("error", "is_limit"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT)), False),
    ],
)
def test_only_a_limit_of_the_machine_excuses_a_size(error, is_limit):
    assert ceiling.is_limit(error) is is_limit


def test_a_lost_station_ends_a_turn_but_not_the_benchmark():
    refused = ceiling.reason_of(RunHalted("simulator-0 was lost while it was measured (was killed); measure again"))
    assert refused.startswith("simulator-0 was lost")
    with pytest.raises(ConfigError):
        ceiling.reason_of(ConfigError("a setting is wrong"))
    found = summarise((64, 8), [window(1000, 0.1)], refused)
    assert (found["us_per_chunk_step"], found["not_measured"]) == (pytest.approx(100), refused)
