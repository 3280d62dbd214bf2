"""Saves the run folders of this folder anew: `python -m tests.held.save_runs FOLDER`, from the root of the repository.

Saved on 2026-11-28 at commit cab4a14d, by that command with /runs. A folder says where it was made, so FOLDER is a
short neutral path that does not exist yet. Reports, traces and TensorBoard's files are left out: a resumed run makes
its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import yaml
from tests.pipeline.runs import LOCKSTEP
from tests.pipeline.test_streams import LANGUAGE

from polyrhythm.config.load import merge

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "run_folders"
LEFT_OUT = ("tensorboard", "logs", "trace.json", "report.html", ".lock")

CUT: dict[str, Any] = merge(
    LOCKSTEP,
    {
        "launcher": "local",
        "rollout": {"rows": 4, "env_batches": 2, "simulators": 2, "generators": 2, "routing": "affinity"},
        "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 1},
        "freshness": {"max_lag": 2, "on_update": "continue"},
        "training": {"order": "arrival", "versions": 100_000},
        "checkpoint": {"run_every_s": 0},
        "evaluation": {"episodes": 4},
    },
)
#: Name → recipe. Those of CUT are killed in the middle.
RUNS: dict[str, dict[str, Any]] = {
    "cut": CUT,
    "scored": merge(CUT, {"scoring": {"function": "tests.held.keys:by_seed"}}),
    "leased": merge(CUT, {"placement": {"sharing": "lease", "lease": {"min_hold_s": 0.02}}}),
    "chains": merge(LANGUAGE, {"training": {"versions": 2}, "evaluation": {"episodes": 4}}),
}


def waiting(run: Path) -> bool:
    """Whether the newest saved run has some versions, and samples that wait."""
    saved = sorted((run / "checkpoints").glob("run-??????"))
    if not saved or json.loads((saved[-1] / "run.json").read_text())["version"] < 2:
        return False
    return (saved[-1] / "samples.npz").stat().st_size > 1000


def train(folder: Path, name: str) -> Path:
    """The folder of the run, killed where samples wait, or at its end."""
    recipe, run = folder / f"{name}.yaml", folder / name
    recipe.write_text(yaml.safe_dump(RUNS[name]))
    words = [sys.executable, "-m", "polyrhythm", "train", str(recipe), "--out", str(run)]
    memory = folder / "memory"  # what a killed run leaves there goes with the folder
    memory.mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "POLYRHYTHM_SHARED_MEMORY": str(memory)}
    process = subprocess.Popen(words, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if RUNS[name]["training"]["versions"] > 1000:
        while process.poll() is None and not waiting(run):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert waiting(run), f"{name}: killed during a save; once more"
    assert process.wait() in (0, -signal.SIGKILL)
    return run


def pack(run: Path) -> Path:
    """The run folder in one file."""
    file = FOLDER / f"{run.name}.tar.xz"
    with tarfile.open(file, "w:xz", preset=9) as archive:
        for part in sorted(run.rglob("*")):
            within = part.relative_to(run)
            if part.is_file() and within.parts[0] not in LEFT_OUT:
                info = archive.gettarinfo(part, str(Path(run.name) / within))
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                with part.open("rb") as content:
                    archive.addfile(info, content)
    return file


def main(folder: Path) -> None:
    folder.mkdir()
    FOLDER.mkdir(exist_ok=True)
    try:
        for name in RUNS:
            file = pack(train(folder, name))
            sys.stdout.write(f"{name}: {file.stat().st_size} bytes\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
