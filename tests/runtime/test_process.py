"""How a station's process is started."""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest
from tests.process.runs import PATIENCE_S, config
from tests.runtime.scripted import ScriptedFactory

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.local import LocalHosting, RunMemory
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import start_child
from polyrhythm.specs import WeightsLayout

LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
NO_WEIGHTS = WeightsLayout.of({})


def memory_in(folder: Path) -> RunMemory:
    return RunMemory(InFlight(LAYOUT), NO_WEIGHTS, folder)


def test_starting_a_process_does_not_wait_until_it_reads_its_spec(tmp_path: Path) -> None:
    """The spec of a large run is more than a pipe holds, and a process may be stopped before it reads it."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(f"open({str(gate)!r}).read()")
    slots = {f"simulator-{number}.0/0": 1 for number in range(100_000)}
    spec = ChildSpec(
        station="a",
        incarnation=0,
        kind="no:Factory",
        content=b"",
        resources=Resources(environment={"PYTHONPATH": str(tmp_path)}),
        layout=ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots=slots),
        weights=NO_WEIGHTS,
        folder=str(tmp_path),
        main="ipc://nowhere",
        transport="ipc",
        keys=None,
        parent=os.getpid(),
    )
    started = []
    with (tmp_path / "log").open("wb") as log:
        starting = threading.Thread(target=lambda: started.append(start_child(spec, log)), daemon=True)
        starting.start()
        starting.join(PATIENCE_S)
        waited = starting.is_alive()
        gate.write_text("")  # lets the process go on
        starting.join()
    started[0].kill()
    started[0].wait()
    assert not waited
    assert {path.name for path in tmp_path.iterdir()} <= {"gate", "log", "sitecustomize.py", "__pycache__"}


def test_a_process_that_the_system_cannot_start_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    def spawn(spec: ChildSpec, log: IO[bytes]) -> Any:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    limits = config().supervision
    stations = [(ScriptedFactory("a"), Resources())]
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    with (
        closing(LocalHosting(stations, memory_in(folder), limits, tmp_path, spawn=spawn)) as hosting,
        pytest.raises(RunHalted, match=r"a: its process cannot be started \(Resource temporarily unavailable\); "),
    ):
        hosting.start()


def test_where_the_second_rank_cannot_be_started_the_first_is_not_left(tmp_path: Path) -> None:
    started = []

    def spawn(spec: ChildSpec, log: IO[bytes]) -> Any:
        if spec.rank == 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(start_child(spec, log))
        return started[-1]

    limits = config().supervision
    stations = [(ScriptedFactory("a"), Resources(), Resources())]
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    hosting = LocalHosting(stations, memory_in(folder), limits, tmp_path, spawn=spawn)
    with closing(hosting):
        with pytest.raises(RunHalted, match=r"a: its process cannot be started"):
            hosting.start()
        assert [process.returncode for process in started] == [-signal.SIGKILL]
