"""The number of env batches is limited by nothing that a process has one of: sockets, descriptors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.long import long
from tests.process.runs import ROOT, children, orphaned_folders

#: Runs the command line under a limit on descriptors.
LIMITED = (
    "import resource, runpy, sys\n"
    "most = int(sys.argv.pop(1))\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
    "runpy.run_module('polyrhythm', run_name='__main__')\n"
)


def train(folder: Path, descriptors: int, simulators: int, env_batches: int) -> subprocess.CompletedProcess[str]:
    """`polyrhythm train` of one version, with so many descriptors allowed for each process."""
    recipe: dict[str, Any] = {
        "name": "many",
        "env": {"type": "latency", "step_time": "constant:5ms", "episode_steps": 4, "observation_shape": [2]},
        "policy": {"type": "gaussian", "hidden": 8},
        "rollout": {"simulators": simulators, "env_batches": env_batches, "rows": 1},
        "batching": {"type": "dynamic", "max_rows": 256, "max_wait_ms": 1},
        "training": {"versions": 1, "mini_batch_samples": simulators * env_batches},
        "evaluation": {"episodes": 0},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    words = [sys.executable, "-c", LIMITED, str(descriptors), "train", str(file), "--out", str(folder / "run")]
    return subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)


@long(17, "2048 env batches")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_2048_env_batches_train_with_1024_descriptors_for_each_process(tmp_path: Path) -> None:
    done = train(tmp_path, 1024, simulators=8, env_batches=256)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["trained"] == 2048
    assert not children()
    assert not orphaned_folders()


def test_too_few_descriptors_are_one_clear_error_before_anything_starts(tmp_path: Path) -> None:
    done = train(tmp_path, 70, simulators=4, env_batches=2)
    assert done.returncode != 0
    assert "6 station processes need 88 file descriptors in the main process, 70 are allowed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "logs").exists(), "no station has been started"
