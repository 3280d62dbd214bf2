"""What each change has to pass with Ray: a short run and both examples of workflows, on one Ray of this machine's own,
of which nothing is left. `test_ray.py` has the rest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.long import long
from tests.plugins.workflow.test_examples import FOLDER, check_pipeline, check_reward_model
from tests.process.runs import ASYNCHRONOUS, PATIENCE_S, ROOT, children, config, gone, orphaned_folders

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, with a cluster that runs, has the examples' folder, and ends after these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        package = pytest.importorskip("ray", reason="the ray extra is not installed")
        folder, before = tempfile.mkdtemp(prefix="ray-"), files()
        quiet = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        own = {"_temp_dir": folder, "object_store_memory": 80 * 2**20, "runtime_env": {"working_dir": str(FOLDER)}}
        try:
            package.init(address="local", num_cpus=2, **quiet, **own)
            yield package
            processes = [process.pid for process in children()]
        finally:
            package.shutdown()
            shutil.rmtree(folder)
        assert gone(processes, PATIENCE_S)
        assert files() <= before - {Path(folder)}


def files() -> set[Path]:
    """What Ray and runs may leave."""
    return {*Path(tempfile.gettempdir()).glob("ray*"), *Path("/dev/shm").glob("*"), *orphaned_folders()}


def stations() -> list[str]:
    """Processes of ours that this one started, by their commands; Ray's are none."""
    return [" ".join(own.cmdline()) for own in children() if any("polyrhythm." in word for word in own.cmdline())]


def test_a_run_trains_two_versions(ray: Any, tmp_path: Path) -> None:
    changes = {"rollout": {"simulators": 1, "generators": 1}, "training": {"versions": 2}}
    checked = validate_run(config(ASYNCHRONOUS, launcher="ray", ray={"cpus_per_station": 0.25}, **changes))
    (tmp_path / "run").mkdir()
    summary = train(checked, tmp_path / "run")
    assert (summary["ledger"]["trained"], summary["faults"], summary["dropped_messages"]) == (16, [], {})
    logs = {path.name for path in (tmp_path / "run" / "logs").glob("*.log")}
    assert logs == {"generator-0.0.log", "simulator-0.0.log", "trainer.0.log"}
    assert (stations(), orphaned_folders()) == ([], [])
    assert ray.is_initialized(), "it is not the run's"


def test_a_run_that_ray_refuses_leaves_nothing_and_proposes_no_resume(
    ray: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merge(ASYNCHRONOUS, {"launcher": "ray", "ray": {"cpus_per_station": 2.0}})))
    assert main(["train", str(recipe), f"out_dir={tmp_path / 'runs'}"]) == 2
    told = capsys.readouterr().err
    assert "ray.cpus_per_station = 2: 10 CPUs are wanted for 5 stations, 2 are in the cluster" in told
    assert "resume" not in told
    assert not list(tmp_path.glob("runs/*/*"))


@long(5, "an example on Ray")
def test_the_pipeline_learns(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pipeline("ray", monkeypatch)
    assert (stations(), orphaned_folders()) == ([], [])


@long(15, "an example on Ray")
def test_the_reward_model_scores(ray: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check_reward_model("ray", monkeypatch, capsys)
    assert (stations(), orphaned_folders()) == ([], [])
