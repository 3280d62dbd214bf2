"""The job files in examples/ray name a run that this version takes, and the Ray that it needs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from polyrhythm.config.load import load_config

ROOT = Path(__file__).parents[3]
SLURM, KUBERNETES = ROOT / "examples/ray/slurm.sh", ROOT / "examples/ray/rayjob.yaml"


def ray_version() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (found,) = {match[1] for line in extras["ray"] if (match := re.search(r"ray.*?==([\d.]+)", line))}
    return found


def test_tests_run_with_the_ray_of_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = f"ray=={ray_version()}"
    assert pinned in extras["dev"]
    assert pinned in (ROOT / "constraints.txt").read_text().splitlines()


def check_command(text: str, variables: dict[str, str]) -> list[str]:
    """The words of the command, whose settings fit."""
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    words = shlex.split(text)
    assert words[:2] == ["polyrhythm", "train"]
    config = load_config(words[2], [word for word in words[3:] if "=" in word])
    assert (config.launcher, config.ray.address) == ("ray", "auto")
    assert config.ray.start_s > 60, "nodes take minutes"
    return words


def test_the_slurm_job_is_a_shell_script_with_a_run() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True, timeout=20)
    command = SLURM.read_text().rpartition(" -- \\\n")[2].partition(" &\n")[0]
    assert check_command(command, {"SLURM_JOB_ID": "1"})[-3:] == ["--out", "runs/1", "resume=auto"]


def test_the_slurm_job_is_requeued_when_its_time_is_nearly_up_and_calls_the_same_command(tmp_path: Path) -> None:
    """With commands that say how they were called; the signal comes while the first `srun` is at it."""
    tools = {
        "scontrol": 'echo "scontrol $*" >> said; [ "$1" != show ] || echo node-1',
        "getent": "echo 10.0.0.1 STREAM node-1",
        "srun": 'echo "srun $*" >> said; [ -e begun ] || { touch begun; kill -USR1 $PPID; exec sleep 5; }',
    }
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NUM_NODES": "3"}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    codes = [
        subprocess.run(["bash", SLURM], cwd=tmp_path, env=variables, timeout=20, check=False).returncode for _ in "12"
    ]
    said = (tmp_path / "said").read_text().splitlines()
    runs = [line for line in said if line.startswith("srun")]
    assert said.count("scontrol requeue 7") == 1
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert runs[0].endswith("--out runs/7 resume=auto")
    assert codes[1] == 0, "that of the run"


def test_the_kubernetes_job_has_a_run_memory_to_share_and_a_shared_folder() -> None:
    spec = yaml.safe_load(KUBERNETES.read_text())["spec"]
    check_command(spec["entrypoint"], {})
    assert spec["rayClusterSpec"]["rayVersion"] == ray_version()
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    folder = load_config("cartpole", spec["entrypoint"].split()[3:]).out_dir
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {"/dev/shm"} < set(volumes)
        assert any(str(folder).startswith(path) for path in volumes)
        assert set(volumes.values()) == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("page", ["docs/clusters.md"])
def test_the_page_links_both(page: str) -> None:
    text = (ROOT / page).read_text()
    assert all(str(path.relative_to(ROOT)) in text for path in (SLURM, KUBERNETES))
