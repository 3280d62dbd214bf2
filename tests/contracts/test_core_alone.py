"""The core stands alone: without the folder of plugins a run trains, and what needs one says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.contracts.test_imports import PACKAGE
from tests.long import long

from polyrhythm.config.recipes import recipes_folder


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, without plugins."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(PACKAGE, folder / "polyrhythm", ignore=shutil.ignore_patterns("plugins", "__pycache__"))
    shutil.copytree(recipes_folder(), folder / "polyrhythm" / "recipes")  # as a wheel has them
    return folder


def polyrhythm(core: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "polyrhythm", *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=150, check=False, cwd=core, env=environment)


@pytest.mark.parametrize("launcher", [pytest.param("inline", marks=long(4, "in one process")), "local"])
def test_a_run_trains_without_plugins(core: Path, launcher: str) -> None:
    words = [f"launcher={launcher}", "training.versions=2", "evaluation.episodes=4"]
    done = polyrhythm(core, "train", "cartpole", *words, "--json", "--out", f"run-{launcher}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ledger"]["trained"] > 0
    assert json.loads(done.stdout) == json.loads((core / f"run-{launcher}" / "summary.json").read_text())


#: Settings that plugins add, and what is said without them.
UNKNOWN = {
    "launcher=ray": "launcher = 'ray'",
    "policy=pi0": "policy.type = 'pi0'",
    "env=metaworld": "env.type = 'metaworld'",
    "prometheus.port=9464": "observer prometheus: no plugin that is installed adds it",
    "demonstrations={} supervised={}": "pipeline demonstrations: no plugin that is installed adds it",
    "placement.sharing=lease": "placement lease: no plugin that is installed adds it",
}


def test_what_a_plugin_would_add_is_unknown_without_it(core: Path) -> None:
    """All in one process, which takes long to start."""
    program = (
        "import sys\nfrom polyrhythm.cli.main import main\n"
        "for words in sys.argv[1:]:\n"
        "    print(main(['train', 'cartpole', *words.split()]), file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *UNKNOWN],
        capture_output=True, text=True, timeout=150, check=False, cwd=core, env=environment,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if not line.endswith("…")]
    assert len(lines) == 2 * len(UNKNOWN), done.stderr
    for said, status, wanted in zip(lines[::2], lines[1::2], UNKNOWN.values(), strict=True):
        assert wanted in said
        assert status == "2"
