"""Stations are replaced step by step, and nobody waits for one that takes its time to die."""

from __future__ import annotations

import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest
from tests.process.runs import children, config
from tests.runtime.scripted import HANGS, ScriptedFactory

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.local import LocalHosting
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.process import start_child
from polyrhythm.runtime.processes.replacement import Replacements
from polyrhythm.scheduler.records import Published, PublishWeights, StationLost, TrainerJoined
from polyrhythm.specs import WeightsLayout


class Process:
    """What a replacement sees of a station's processes."""

    def __init__(self, station: str) -> None:
        self.station, self.alive = station, [1]
        self.exited = self.ended = False


class Manager:
    """What a replacement asks of the process manager. wrong: what is wrong with each station, by name."""

    def __init__(self, *processes: Process) -> None:
        self._processes = processes
        self.wrong: dict[str, str] = {}

    def suspects(self, now: float) -> list[Process]:
        return [process for process in self._processes if process.exited or process.station in self.wrong]

    def complaint(self, process: Process, now: float) -> str:
        return "ended" if process.exited else self.wrong.get(process.station, "")

    def dismiss(self, process: Process) -> None:
        process.ended = True


def under_way(*processes: Process) -> tuple[Manager, Any]:
    manager = Manager(*processes)
    return manager, Replacements(manager)  # type: ignore[arg-type]


def test_a_station_is_lost_once_it_has_been_reaped_and_its_last_messages_have_been_received() -> None:
    process = Process("a")
    manager, replacements = under_way(process)
    assert (replacements.advance(0.0), bool(replacements)) == ([], False)
    manager.wrong["a"] = "hangs"
    assert (replacements.advance(1.0), bool(replacements), process.ended) == ([], True, False)
    replacements.note_empty_inbox(1.02)
    assert (replacements.advance(1.03), process.ended) == ([], False), "its last message may still be on its way"
    replacements.note_empty_inbox(1.06)
    assert (replacements.advance(1.07), process.ended) == ([], True)
    replacements.note_empty_inbox(2.0)
    assert replacements.advance(2.0) == [], "it has not been reaped"
    process.exited = True
    assert replacements.advance(2.1) == []
    replacements.note_empty_inbox(2.2)
    assert replacements.advance(2.2) == [(process, "hangs")]
    assert not replacements


def test_a_suspect_that_is_heard_of_is_left_alone() -> None:
    """Main was late: the heartbeats had come, but had not been looked at."""
    process = Process("a")
    manager, replacements = under_way(process)
    manager.wrong["a"] = "sent no heartbeat"
    assert replacements.advance(1.0) == []
    del manager.wrong["a"]
    replacements.note_empty_inbox(1.1)
    assert replacements.advance(1.1) == []
    assert not process.ended
    assert not replacements


def test_others_that_talk_on_delay_a_replacement_by_half_a_second_at_most() -> None:
    process = Process("a")
    _, replacements = under_way(process)
    process.exited = True
    assert replacements.advance(1.0) == []
    assert replacements.advance(1.4) == []
    assert replacements.advance(1.5) == [(process, "ended")]


def test_a_process_that_never_ends_halts_the_run_in_time() -> None:
    manager, replacements = under_way(Process("a"))
    manager.wrong["a"] = "hangs"
    for now in (0.0, 0.5, 5.0, 10.4):
        assert replacements.advance(now) == []
    with pytest.raises(RunHalted, match="a: its process 1 has not ended 10 s after SIGKILL"):
        replacements.advance(10.5)


class Reluctant:
    """A real process whose end is seen only `late_s` after it was killed, as of one that the kernel cannot end yet."""

    def __init__(self, process: subprocess.Popen[bytes], late_s: float) -> None:
        self._process, self._late_s, self.killed = process, late_s, float("inf")
        self.pid = process.pid

    def poll(self) -> int | None:
        over = time.monotonic() >= self.killed + self._late_s
        return self._process.poll() if over or self.killed == float("inf") else None

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self.killed = time.monotonic()
        self._process.kill()


def test_events_of_others_flow_while_a_killed_station_takes_long_to_die(tmp_path: Path) -> None:
    handles: dict[str, Reluctant] = {}

    def spawn(spec: ChildSpec, log: IO[bytes]) -> Reluctant:
        handle = Reluctant(start_child(spec, log), late_s=2.0)  # type: ignore[arg-type]
        handles.setdefault(spec.station, handle)
        return handle

    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    limits = config(supervision={"update_s": 0.5}).supervision
    stations = [(ScriptedFactory(name), Resources()) for name in ("a", "b")]
    with closing_folder(layout) as folder:
        hosting = LocalHosting(stations, layout, folder.folder, WeightsLayout.of({}), limits, tmp_path, spawn=spawn)
        with closing(hosting):
            hosting.start()
            hosting.send("a", PublishWeights("a", 1))
            while hosting.receive(1.0) is None:
                pass
            assert hosting.statistics()["a"]["units"] == 1.0
            hosting.send("a", PublishWeights("a", HANGS))
            answered, slowest, lost = 0, 0.0, None
            while lost is None:
                begin = time.monotonic()
                hosting.send("b", PublishWeights("b", answered % 1000))
                event = None
                while event is None:
                    event = hosting.receive(1.0)
                if isinstance(event, StationLost):
                    lost = event
                    break
                slowest = max(slowest, time.monotonic() - begin)
                assert event == Published("b", 0, answered % 1000)
                if handles["a"].killed < float("inf"):
                    answered += 1
                    assert not hosting.reaches("a")
                    assert hosting.latest()["a"]["units"] == 1.0, "what it has done counts once"
            assert lost.station == "a"
            assert time.monotonic() - handles["a"].killed >= 2.0, "not before it has been reaped"
            assert answered > 100, "the other station was heard all the time"
            assert slowest < 1.0
            while not isinstance(event, TrainerJoined):
                event = hosting.receive(1.0)
            assert event == TrainerJoined("a", 1, 0)
    assert not children()


class closing_folder:  # noqa: N801 - used like `contextlib.closing`
    """The run's folder with its memory, removed in the end."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._folder = SharedRunFolder({"arena": layout.nbytes, "weights": 64})

    def __enter__(self) -> SharedRunFolder:
        return self._folder

    def __exit__(self, *_: object) -> None:
        self._folder.remove()
