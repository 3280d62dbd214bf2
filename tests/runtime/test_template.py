"""Stations that are forks of a template: children of this process like any others."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.long import long
from tests.process.runs import PATIENCE_S, children, closed, config, gone, orphaned_folders
from tests.runtime.scripted import DIES
from tests.runtime.telling import LATE, TellingFactory

from polyrhythm.pipeline.build import RunContext, build_pipeline
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.launcher import Launcher, build_local_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.processes import template as template_module
from polyrhythm.runtime.processes.template import kept_fork_servers
from polyrhythm.scheduler.records import PublishWeights, StationLost, TrainerJoined
from polyrhythm.specs import WeightsLayout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes adopt no orphans on this system")

LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})


@contextmanager
def started(folder: Path, monkeypatch: pytest.MonkeyPatch, *seats: Resources) -> Iterator[tuple[Launcher, Any]]:
    """A station for each seat, and what tells how one of them was started; nothing is left of them."""
    monkeypatch.chdir(folder)
    stations = [(TellingFactory(f"s{i}"), seat) for i, seat in enumerate(seats)]
    limits = config().supervision
    launcher = build_local_launcher(stations, LAYOUT, WeightsLayout.of({}), limits, folder / "logs")
    try:
        launcher.hosting.start()
        yield launcher, lambda name: json.loads((folder / f"{name}.json").read_text())
    finally:
        launcher.close()
        assert not children()
        assert not orphaned_folders()


def template() -> psutil.Process:
    (process,) = [child for child in children() if "processes.template" in " ".join(child.cmdline())]
    return process


def test_forks_are_children_with_their_own_names_sessions_and_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SETTING", "before")
    with started(tmp_path, monkeypatch, Resources(), Resources()) as (launcher, told):
        pids = process_ids(launcher.hosting)
        first, second = told("s0.0"), told("s1.0")
        assert [first["session"], second["session"]] == [pids["s0"], pids["s1"]]
        assert first["argv"] == ["s0"]
        assert first["logs"], "as a process that begins"
        assert first["command"] == [sys.executable, "-m", "polyrhythm.runtime.processes.child", "s0"]
        assert first["forked"]
        assert second["forked"]
        assert first["parent"] == second["parent"] == os.getpid()
        assert first["draw"] != second["draw"]
        assert first["path"] == sys.path
        assert first["setting"] == "before"
        assert first["specs"] == second["specs"] == 1, "its own alone, on standard input"
        monkeypatch.setenv("A_SETTING", "now")
        launcher.hosting.send("s0", PublishWeights("s0", DIES))
        lost = launcher.receive(PATIENCE_S)
        assert isinstance(lost, StationLost)
        assert lost.reason == "was ended by SIGKILL"
        assert launcher.receive(PATIENCE_S) == TrainerJoined("s0", 1, 0)
        assert (told("s0.1")["forked"], told("s0.1")["setting"]) == (True, "now")


def test_without_its_template_a_station_is_started_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, monkeypatch, Resources(), Resources()) as (launcher, told):
        template().send_signal(signal.SIGKILL)
        launcher.hosting.send("s1", PublishWeights("s1", DIES))
        assert isinstance(launcher.receive(PATIENCE_S), StationLost)
        assert launcher.receive(PATIENCE_S) == TrainerJoined("s1", 1, 0)
        assert (told("s1.0")["forked"], told("s1.1")["forked"]) == (True, False)


def test_what_has_another_seat_is_started_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, two = Resources(environment={"A_SETTING": "own"}), Resources(threads=2)
    with started(tmp_path, monkeypatch, two, two, own, Resources(), Resources()) as (_, told):
        said = [told(f"s{i}.0") for i in range(5)]
        assert [each["forked"] for each in said] == [False, False, False, True, True]
        assert said[2]["setting"] == "own"
        assert len({each["files"] for each in said}) == 1, "a fork has no more open"
        assert all(each["sockets"] <= 1 for each in said), "that of ZeroMQ, whose thread may not have opened it yet"


def test_a_fork_that_comes_late_is_ended_and_reaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    with started(tmp_path, monkeypatch, Resources(), Resources()) as (launcher, told):
        monkeypatch.setattr(template_module, "_ANSWER_S", 1.0)
        (tmp_path / LATE).touch()
        launcher.hosting.send("s1", PublishWeights("s1", DIES))
        assert isinstance(launcher.receive(PATIENCE_S), StationLost)
        assert launcher.receive(PATIENCE_S) == TrainerJoined("s1", 1, 0)
        # Zombies are children, too: neither the late fork nor what is left of it.
        assert set(psutil.Process().children()) - before == {
            *map(psutil.Process, process_ids(launcher.hosting).values())
        }
        assert not told("s1.1")["forked"]


def test_one_station_alone_needs_no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path, monkeypatch, Resources()) as (launcher, told):
        assert [child.pid for child in children()] == list(process_ids(launcher.hosting).values())
        assert not told("s0.0")["forked"]


@long(4, "three runs, whose server is killed")
def test_a_server_that_is_kept_serves_the_next_run_until_it_ends(tmp_path: Path) -> None:
    """Those of the tests are kept: `shared_fork_servers`, in conftest."""
    found = []
    for turn in range(3):
        with closed(build_pipeline(RunContext(config(), folder=tmp_path / str(turn)))) as pipeline:
            pipeline.loop.train_until(1)
        found.append(kept_fork_servers())
        if len(found) == 2:
            for pid in found[-1]:
                os.kill(pid, signal.SIGKILL)
            assert gone(list(found[-1]))
    assert found[0], "two stations at least import the same"
    assert found[1] == found[0]
    assert found[2].isdisjoint(found[1])
    assert found[2]
