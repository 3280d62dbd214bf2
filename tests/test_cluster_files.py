"""The job files in examples/ray name a run that this version takes, and the Ray that it needs."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from polyrhythm.config.load import load_config

ROOT = Path(__file__).parents[1]
SLURM, KUBERNETES = ROOT / "examples/ray/slurm.sh", ROOT / "examples/ray/rayjob.yaml"


def ray_version() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (found,) = {match[1] for line in extras["ray"] if (match := re.search(r"ray.*?==([\d.]+)", line))}
    return found


def check_command(text: str, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    words = shlex.split(text)
    assert words[:2] == ["polyrhythm", "train"]
    config = load_config(words[2], words[3:])
    assert (config.launcher, config.ray.address) == ("ray", "auto")
    assert config.ray.start_s > 60, "nodes take minutes"


def test_the_slurm_job_is_a_shell_script_with_a_run() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True, timeout=20)
    command = SLURM.read_text().rpartition(" -- \\\n")[2]
    check_command(command, {"SLURM_JOB_ID": "1"})


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
