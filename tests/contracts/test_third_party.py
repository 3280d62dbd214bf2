"""A package of somebody else adds a launcher, an observer of runs and a layout of datasets by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PLUGIN = """
from polyrhythm.plugin import Plugin

PLUGIN = Plugin("theirs", adds={
    "launcher": {"theirs": "theirs.parts:launch_theirs"},
    "observer": {"theirs": "theirs.parts:HOOKS"},
})
"""
PARTS = """
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.pipeline.context import LaunchPlan, launch_inline
from polyrhythm.pipeline.hooks import RunHooks
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler import records


def launch_theirs(plan: LaunchPlan) -> Launcher:
    print("launched", *(factory.name for factory, *_ in plan.stations))
    return launch_inline(plan)


class Updates(Observer):
    hears = (records.UpdateDone,)

    def on_decision(self, now, event, commands):
        if isinstance(event, records.UpdateDone):
            print("update")


class Hooks(RunHooks):
    def observers(self, pipeline) -> Sequence[Observer]:
        return [Updates()]

    def on_evaluation(self, folder, name, result):
        print("evaluated", name, result["version"])

    def finish(self, folder: Path) -> None:
        print("finished", (folder / "summary.json").is_file())
        raise RuntimeError("theirs is broken")


HOOKS = Hooks()
"""
RUN = """
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
import polyrhythm

try:
    load_config("cartpole", ["launcher=thers"])
except ConfigError as error:
    print(error)
small = ["launcher=theirs", "training.versions=2", "evaluation.episodes=2", "supervised=null", "demonstrations=null"]
result = polyrhythm.train(polyrhythm.load_recipe("cartpole", *small), out="run")
print("trained", result.finished)
"""


def test_a_package_elsewhere_adds_a_launcher_and_observes_runs(tmp_path: Path) -> None:
    """A name with a typo is answered with theirs, and an error of theirs does not take the run's result."""
    package, info = tmp_path / "theirs", tmp_path / "theirs-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(PLUGIN)
    (package / "parts.py").write_text(PARTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polyrhythm.plugins]\ntheirs = theirs.plugin:PLUGIN\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "launcher = 'thers': did you mean theirs?" in lines[0]
    assert lines[1].startswith("launched simulator-0")
    assert lines.count("update") >= 2
    assert "evaluated before 0" in lines
    assert "evaluated after 2" in lines
    assert lines[-2:] == ["finished True", "trained True"]
    assert "Hooks failed after the run, which is complete" in done.stderr
