"""A run starts a control daemon of MPS for its stations and ends it, whatever ends the run.

The daemon is a small program in its place: a process that detaches itself and writes down what it is called with. That
our side starts, finds and ends it is tested here, not what NVIDIA's program does (docs/never-run.md).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.long import long
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, PATIENCE_S, closed, config

from polyrhythm.checks import CheckContext
from polyrhythm.errors import ConfigError, MissingError, StartError
from polyrhythm.imports import same_imports
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.placed import place
from polyrhythm.plugins.sharing import CHECKS
from polyrhythm.plugins.sharing.mps import PROGRAM, control_daemon
from polyrhythm.runtime.hosting import process_ids

ON_ONE: dict[str, Any] = {"placement": {"simulated_devices": 1, "preset": "colocated", "sharing": "mps"}}

PROGRAM_TEXT = """#!{python}
import json, os, signal, sys, time
from pathlib import Path

folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
said = sys.stdin.read().strip() if len(sys.argv) < 2 else sys.argv[1]
names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES")
with open({calls!r}, "a") as file:
    file.write(json.dumps([said, {{name: os.environ.get(name) for name in names}}]) + "\\n")
if said == "quit" and {hangs!r}:
    time.sleep(600)
elif said == "quit":
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
elif said == "-d" and not {fails!r}:
    (folder / "pid").unlink(missing_ok=True)
    if os.fork():
        while not (folder / "pid").exists():
            time.sleep(0.01)
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
    if {stubborn!r}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()  # a server
    time.sleep(600)
else:
    sys.exit(3)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Puts the program on the PATH; returns the file with its calls. No daemon is left, whatever a test finds."""

    def put(*, fails: bool = False, stubborn: bool = False, hangs: bool = False) -> Path:
        calls, folder = tmp_path / "calls", tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        how = {"fails": fails, "stubborn": stubborn, "hangs": hangs}
        text = PROGRAM_TEXT.format(python=sys.executable, calls=str(calls), **how)
        (folder / PROGRAM).write_text(text)
        (folder / PROGRAM).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return calls

    yield put
    for process in daemons(tmp_path):
        process.kill()


def calls_in(file: Path) -> list[tuple[str, dict[str, str | None]]]:
    return [(said, found) for said, found in map(json.loads, file.read_text().splitlines())]


def daemons(tmp_path: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(tmp_path / "bin" / PROGRAM) in words and "-d" in words:
            found.append(process)
    return found


def _is_told(caplog: pytest.LogCaptureFixture, times: int) -> bool:
    return caplog.text.count("the control daemon has ended") == times


def wait_until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@long(7, "a run with a daemon; the others here start it without one")
def test_a_run_starts_the_daemon_for_its_stations_and_ends_it(
    tmp_path: Path, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = program()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "run").mkdir()
    with caplog.at_level("INFO"):
        context = RunContext(config(LOCKSTEP, **ON_ONE), folder=tmp_path / "run")
        with closed(build_pipeline(context)) as pipeline:
            (said, found), *_ = calls_in(calls)
            assert said == "-d"
            assert found["CUDA_VISIBLE_DEVICES"] is None, "it numbers devices as the machine does"
            pipe = found["CUDA_MPS_PIPE_DIRECTORY"]
            for name, pid in process_ids(pipeline.launcher.hosting).items():
                theirs = psutil.Process(pid).environ().get("CUDA_MPS_PIPE_DIRECTORY")
                assert theirs == (None if name.startswith("simulator") else pipe), name
            pipeline.loop.train_until(1)
    assert [said for said, _ in calls_in(calls)] == ["-d", "quit"]
    assert not daemons(tmp_path)
    assert not Path(str(pipe)).exists()
    assert (tmp_path / "run" / "logs" / "mps").is_dir(), "what it logged stays"
    assert "generator-0, trainer share their device under a control daemon" in caplog.text
    assert "the control daemon has ended" in caplog.text


@pytest.mark.parametrize("how", [{"hangs": True}, {"stubborn": True}])
def test_a_daemon_that_does_not_quit_is_killed_with_its_servers(
    how: dict[str, bool], tmp_path: Path, program: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    program(**how)
    with caplog.at_level("INFO"), control_daemon(tmp_path, quit_s=0.5):
        assert daemons(tmp_path)
    assert not daemons(tmp_path)
    assert _is_told(caplog, 1)


def test_an_end_that_is_not_seen_is_not_told(
    tmp_path: Path, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program()
    monkeypatch.setattr("polyrhythm.plugins.sharing.mps.longest_end_s", lambda _: 0.2)
    with caplog.at_level("INFO"), control_daemon(tmp_path) as found:
        pid = int((Path(found["CUDA_MPS_PIPE_DIRECTORY"]) / "pid").read_text())
        guard = psutil.Process(pid).parent()
        assert guard is not None
        guard.suspend()
    os.kill(pid, signal.SIGKILL)
    assert not Path(found["CUDA_MPS_PIPE_DIRECTORY"]).parent.exists()
    assert f"its guard {guard.pid} does not end; it is killed" in caplog.text
    assert _is_told(caplog, 0)


@long(7, "a run with a daemon that is killed")
def test_the_daemon_ends_with_a_run_that_is_killed(tmp_path: Path, program: Callable[..., Path]) -> None:
    program()
    code = (
        "import os, signal\n"
        "from polyrhythm.plugins.sharing.mps import control_daemon\n"
        "with control_daemon(None) as found:\n"
        "    print(found['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | same_imports(), capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until(lambda: not daemons(tmp_path))
    wait_until(lambda: not Path(done.stdout.strip()).exists())


def test_a_daemon_that_ends_is_reported_and_started_again(
    tmp_path: Path, program: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    calls = program()
    with control_daemon(tmp_path) as found:
        for number in range(4):
            pid = int((Path(found["CUDA_MPS_PIPE_DIRECTORY"]) / "pid").read_text())
            os.kill(pid, signal.SIGKILL)
            wait_until(partial(_is_told, caplog, number + 1))
        assert caplog.text.count("was started again; stations that used it are replaced") == 3
        assert "has ended 4 times; the device is shared by time slices from now on" in caplog.text
    assert [said for said, _ in calls_in(calls)] == ["-d"] * 4
    assert not daemons(tmp_path)


def test_what_cannot_be_is_said_before_the_start(
    tmp_path: Path, program: Callable[..., Path], monkeypatch: Any
) -> None:
    (check,) = CHECKS
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check.run(CheckContext(config())) is None
    with pytest.raises(MissingError, match=f"sharing = mps: {PROGRAM} is not on the PATH; it comes with"):
        check.run(CheckContext(config(**ON_ONE)))
    monkeypatch.undo()
    program(fails=True)
    with monkeypatch.context() as changes:
        changes.setattr("polyrhythm.plugins.sharing.mps.CHILDREN", str(tmp_path / "none"))
        with pytest.raises(MissingError, match=f"mps: this kernel does not list .*could not end {PROGRAM}; set sha"):
            check.run(CheckContext(config(**ON_ONE)))
    with monkeypatch.context() as changes:
        changes.setattr(sys, "executable", "/bin/false")
        with pytest.raises(StartError, match=f"{PROGRAM} cannot be started .its guard has ended"), control_daemon(None):
            pass
    assert check.run(CheckContext(config(**ON_ONE)))
    with pytest.raises(ConfigError, match="mps: with launcher = ray the run does not start its stations"):
        check.run(CheckContext(config(**ON_ONE, launcher="ray")))
    with (
        pytest.raises(StartError, match=f"mps: {PROGRAM} cannot be started .status 3.; its log: "),
        control_daemon(None),
    ):
        pass


@pytest.mark.parametrize(
    ("placement", "serves"),
    [
        ({"simulated_devices": 1, "preset": "colocated"}, True),
        ({"simulated_devices": 2, "generators": {"devices": "0-1"}}, False),
        ({"simulated_devices": 2, "preset": "colocated", "trainer": {"ranks": 1}}, True),
        ({"simulated_devices": 1, "generators": {"devices": "0"}}, True),
        ({}, False),
    ],
)
def test_a_daemon_serves_only_stations_that_share_a_device(placement: dict[str, Any], serves: bool) -> None:
    placed = place(config(ASYNCHRONOUS, placement={**placement, "sharing": "mps"}))  # two generators
    assert (placed.service is not None) == serves
    assert any("no two stations compute on one device" in sentence for sentence in placed.warnings) == (not serves)
