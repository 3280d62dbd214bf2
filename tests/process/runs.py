"""Runs in real processes, and what they must not leave behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from polyrhythm.config.load import merge, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.runtime.memory.shared_folder import shared_root
from polyrhythm.runtime.processes.template import kept_fork_servers

ROOT = Path(__file__).parents[2]

#: Seconds after which what a test waits for counts as missing. Long, as other programs may have the machine; a test
#: that passes does not wait for it.
PATIENCE_S = 300.0

ASYNCHRONOUS: dict[str, Any] = {
    "name": "process",
    "seed": 3,
    "env": {"type": "gymnasium", "id": "CartPole-v1", "max_steps": 40},
    "policy": {"type": "categorical", "hidden": 16},
    "rollout": {"simulators": 2, "env_batches": 2, "rows": 2, "generators": 2, "segment_steps": 16},
    "batching": {"type": "dynamic", "max_rows": 8, "max_wait_ms": 1},
    "freshness": {"max_lag": 1},
    "training": {"versions": 4, "mini_batch_samples": 8, "epochs": 2, "minibatch_steps": 64},
    "evaluation": {"episodes": 0},
}

#: As many rows as samples per version: no row is refilled while others run, so no timing decides who asks with whom.
LOCKSTEP: dict[str, Any] = {
    **ASYNCHRONOUS,
    # One shape of forward pass: what is resumed in the middle of a version runs in smaller batches, of other bits.
    "rollout": {"rows": 10, "routing": "fixed", "buckets": [16]},
    "batching": {"type": "lockstep"},
    "freshness": {"max_lag": 0, "on_update": "drain"},
    "training": {**ASYNCHRONOUS["training"], "order": "ticket", "mini_batch_samples": 10},
}


def config(base: dict[str, Any] = ASYNCHRONOUS, **changes: Any) -> RunConfig:
    return validate(merge(base, changes))


@contextmanager
def closed(pipeline: Pipeline) -> Iterator[Pipeline]:
    """The pipeline, closed at the end; nothing of it is left then."""
    try:
        yield pipeline
    finally:
        pipeline.close()
    assert not children()
    assert not orphaned_folders()


def children() -> list[psutil.Process]:
    """Processes that this one started, directly or not; without zombies, and without what all tests share."""
    found = [p for p in psutil.Process().children(recursive=True) if p.pid not in kept_fork_servers()]
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


def orphaned_folders() -> list[Path]:
    """Folders in shared memory whose runs are over."""
    found = []
    for folder in shared_root().glob(f"polyrhythm-{os.getuid()}-*"):
        try:
            lock = os.open(folder / "owner", os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_size:  # else it is just being made
                found.append(folder)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return found


#: Starts the rest of the command as a shell starts what runs in its background.
WITHOUT_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def command(
    folder: Path, base: dict[str, Any] = ASYNCHRONOUS, *, background: bool = False, **changes: Any
) -> Iterator[subprocess.Popen[str]]:
    """`polyrhythm train` of this recipe in a process of its own. background: SIGINT is ignored when it starts."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merge(base, changes)))
    words = [sys.executable, "-m", "polyrhythm", "train", str(recipe), "--out", str(folder / "run")]
    if background:
        words = [sys.executable, "-c", WITHOUT_SIGINT, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    output = (folder / "output").open("a+")
    process = subprocess.Popen(words, stdout=output, stderr=output, env=environment, text=True, cwd=folder)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        output.close()


def wait_for_updates(folder: Path, updates: int, process: subprocess.Popen[str]) -> None:
    """Until the run has written the metrics of so many updates."""
    file = folder / "run" / "metrics.jsonl"

    def found() -> bool:
        return file.is_file() and file.read_text().count("train/actor/policy_loss") >= updates

    _wait_for(found, f"{updates} updates", folder, process)


def wait_for_output(folder: Path, text: str, process: subprocess.Popen[str], times: int = 1) -> None:
    """Until the runs in this folder have said this so many times."""
    _wait_for(lambda: (folder / "output").read_text().count(text) >= times, repr(text), folder, process)


def wait_for_file(file: Path, folder: Path, process: subprocess.Popen[str]) -> None:
    """Until a process of the run in this folder has made the file."""
    _wait_for(file.exists, file.name, folder, process)


def wait_until(condition: Callable[[], object], step_s: float = 0.005) -> None:
    """Until something is so."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(step_s)


def _wait_for(found: Callable[[], bool], what: str, folder: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if found():
            return
        assert process.poll() is None, (folder / "output").read_text()
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {PATIENCE_S} s: {(folder / 'output').read_text()}")


def gone(pids: list[int], seconds: float = PATIENCE_S) -> bool:
    """Whether all these processes end within so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(_lives(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stations_of(pid: int) -> dict[str, int]:
    """Process ids by station of the run whose main process this is; its log file's name is the station's."""
    found = {}
    for child in psutil.Process(pid).children():
        log = Path(f"/proc/{child.pid}/fd/2").readlink().name
        found[log.partition(".")[0]] = child.pid
    return found
