"""Stations are replaced step by step, and nobody waits for one that takes its time to die."""

from __future__ import annotations

import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from tests.process.runs import PATIENCE_S, children, config, wait_until
from tests.runtime.scripted import HANGS, RAISES, ScriptedFactory
from tests.runtime.test_rank_group import LIMITS, group

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.local import LocalHosting
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.process import start_child
from polyrhythm.runtime.processes.replacement import Replacements
from polyrhythm.runtime.processes.supervision import LivenessMonitor
from polyrhythm.scheduler.records import Event, Published, PublishWeights, StationLost, TrainerJoined
from polyrhythm.specs import WeightsLayout


class Process:
    """What a replacement sees of a station's processes."""

    def __init__(self, station: str) -> None:
        self.station, self.alive = station, [1]
        self.exited = self.ended = False

    @property
    def any_exited(self) -> bool:
        return self.exited


class Manager:
    """What a replacement asks of the process manager. wrong: what is wrong with each station, by name; silent: those
    that are suspected for want of heartbeats; far: those on another host."""

    def __init__(self, *processes: Process) -> None:
        self._processes = processes
        self.wrong: dict[str, str] = {}
        self.silent, self.far = set[str](), set[str]()

    def suspects(self, now: float) -> list[Process]:
        return [process for process in self._processes if process.exited or process.station in self.wrong]

    def complaint(self, process: Process, now: float) -> str:
        return "ended" if process.exited else self.wrong.get(process.station, "")

    def is_silent(self, process: Process, now: float) -> bool:
        return process.station in self.silent

    def is_far(self, process: Process) -> bool:
        return process.station in self.far

    def note_pause(self, seconds: float) -> None: ...

    def dismiss(self, process: Process) -> None:
        process.ended = True


class RealGroup(Manager):
    """The same of a real group of two ranks with real heartbeats, which were heard at 0 s."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = group(2)
        self.ranks.kill = lambda: None
        self.note_pause = self.ranks.note_pause  # type: ignore[method-assign]

    def suspects(self, now: float) -> list[Process]:
        return [self.ranks] if self.ranks.is_suspect(now, LIMITS) else []

    def complaint(self, process: Any, now: float) -> str:
        return str(process.complaint(now, LIMITS))

    def is_silent(self, process: Any, now: float) -> bool:
        return bool(process.is_silent(now, LIMITS))

    def hear(self, now: float) -> None:
        for process in self.ranks:
            process.monitor.note_heartbeat(now, "", 0.0)


def under_way(*processes: Process) -> tuple[Manager, Any]:
    manager = Manager(*processes)
    return manager, Replacements(manager, 0.0)  # type: ignore[arg-type]


def look(replacements: Any, now: float, *, empty: bool = True) -> list[Any]:
    """A look at the inbox and at the stations; empty: nothing was left in the inbox."""
    replacements.listen(now)
    if empty:
        replacements.note_empty_inbox(now)
    return replacements.advance(now)  # type: ignore[no-any-return]


def looks(replacements: Any, begin: float, end: float, **how: bool) -> list[Any]:
    """Looks every 20 ms until something is lost."""
    for step in range(round((end - begin) / 0.02) + 1):
        if lost := look(replacements, begin + 0.02 * step, **how):
            return lost
    return []


def test_a_station_is_lost_once_it_has_been_reaped_and_its_last_messages_have_been_received() -> None:
    process = Process("a")
    manager, replacements = under_way(process)
    assert (look(replacements, 0.5), bool(replacements)) == ([], False)
    manager.wrong["a"] = "hangs"
    assert (look(replacements, 1.0, empty=False), bool(replacements), process.ended) == ([], True, False)
    assert (look(replacements, 1.02), process.ended) == ([], True)
    assert looks(replacements, 1.04, 2.0) == [], "it has not been reaped"
    process.exited = True
    assert looks(replacements, 2.02, 2.26) == [], "its last message may still be on its way"
    assert look(replacements, 2.28) == [(process, "hangs")]
    assert not replacements


def test_what_comes_from_another_host_may_take_some_retransmissions() -> None:
    process = Process("a")
    manager, replacements = under_way(process)
    manager.far.add("a")
    process.exited = True
    assert looks(replacements, 1.0, 2.48) == []
    assert look(replacements, 2.52) == [(process, "ended")]


def test_a_silent_station_may_speak_for_one_heartbeat_more() -> None:
    """Main and it may have been stopped together just before."""
    process = Process("a")
    manager, replacements = under_way(process)
    manager.wrong["a"] = "sent no heartbeat"
    manager.silent.add("a")
    assert (looks(replacements, 1.0, 1.48), process.ended) == ([], False)
    assert (look(replacements, 1.52), process.ended) == ([], True)


def test_a_suspect_that_is_heard_of_is_left_alone() -> None:
    """Main was late: the heartbeats had come, but had not been looked at."""
    process = Process("a")
    manager, replacements = under_way(process)
    manager.wrong["a"] = "sent no heartbeat"
    assert look(replacements, 1.0, empty=False) == []
    del manager.wrong["a"]
    assert looks(replacements, 1.02, 1.3) == []
    assert not process.ended
    assert not replacements


def test_nobody_is_given_up_before_the_inbox_was_empty() -> None:
    process = Process("a")
    manager, replacements = under_way(process)
    manager.wrong["a"] = "sent no heartbeat"
    assert looks(replacements, 1.0, 20.0, empty=False) == []
    assert not process.ended
    assert (look(replacements, 20.02), process.ended) == ([], True)


def test_time_in_which_main_did_not_listen_is_nobodys_silence() -> None:
    """heartbeat_s is 4; main is held for 100 s, and then for 0.6 s after each look, with heartbeats unread."""
    manager = RealGroup()
    replacements: Any = Replacements(manager, 0.0)  # type: ignore[arg-type]
    assert look(replacements, 100.0) == []
    assert not replacements, "of 100 s one counts"
    for step in range(1, 20):
        assert look(replacements, 100.0 + 0.6 * step, empty=False) == []
        assert not manager.ranks.ended
    assert replacements, "it is suspected, but its heartbeats may have come"
    replacements.listen(112.0)
    manager.hear(112.0)
    assert looks(replacements, 112.0, 115.98) == []
    assert not replacements
    assert look(replacements, 116.02) == []
    assert replacements, "and silence while it listens does"
    assert looks(replacements, 116.04, 116.5) == []
    assert not manager.ranks.ended
    assert looks(replacements, 116.52, 116.56) == []
    assert manager.ranks.ended


def test_a_pause_of_all_processes_loses_nobody() -> None:
    """Main runs first afterwards and finds its inbox empty; the stations speak seconds later."""
    manager = RealGroup()
    replacements: Any = Replacements(manager, 0.0)  # type: ignore[arg-type]
    assert looks(replacements, 0.02, 0.5) == []
    assert looks(replacements, 60.0, 62.4) == []
    assert not replacements
    replacements.listen(62.42)
    manager.hear(62.42)
    assert looks(replacements, 62.44, 66.4) == []
    assert not replacements


def test_what_main_was_too_late_for_counts_for_no_call_and_no_start() -> None:
    monitor = LivenessMonitor(began=0.0)
    monitor.note_pause(50.0)
    assert monitor.deadline(LIMITS) == 50.0 + LIMITS.start_s
    monitor.present = True
    monitor.note_heartbeat(100.0, "update", 98.0)
    monitor.note_pause(30.0)
    assert monitor.complaint(131.9, LIMITS) == ""
    assert monitor.complaint(132.0, LIMITS).startswith("has been in one update for 100.0 s")


def test_a_process_that_never_ends_halts_the_run_in_time() -> None:
    manager, replacements = under_way(Process("a"))
    manager.wrong["a"] = "hangs"
    assert looks(replacements, 0.0, 29.9) == []
    with pytest.raises(RunHalted, match="a: its process 1 has not ended 30 s after SIGKILL"):
        looks(replacements, 29.92, 30.4)


class Reluctant:
    """A real process whose end is seen only once `may_end` is set, as of one that the kernel cannot end yet. killed: it
    was told to end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.killed, self.may_end = process, False, False
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.poll() if self.may_end or not self.killed else None

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self.killed = True
        self._process.kill()


def next_event(hosting: LocalHosting) -> Event:
    """The next event, however long it takes."""
    event = hosting.receive(PATIENCE_S)
    assert event is not None
    return event


def test_events_of_others_flow_while_a_killed_station_takes_long_to_die(tmp_path: Path) -> None:
    handles: dict[str, Reluctant] = {}

    def spawn(spec: ChildSpec, log: IO[bytes]) -> Reluctant:
        handle = Reluctant(start_child(spec, log))  # type: ignore[arg-type]
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
            next_event(hosting)
            wait_until(lambda: hosting.statistics()["a"].get("units") == 1.0)  # it is counted after its event is sent
            hosting.send("a", PublishWeights("a", HANGS))
            answered = 0  # while the first station is dying
            while answered < 100:
                hosting.send("b", PublishWeights("b", answered))
                assert next_event(hosting) == Published("b", 0, answered), "the other station is heard all the time"
                if handles["a"].killed:
                    answered += 1
                    assert not hosting.station("a").reachable
                    assert hosting.statistics()["a"]["units"] == 1.0, "what it has done counts once"
            handles["a"].may_end = True
            lost = next_event(hosting)
            assert isinstance(lost, StationLost)
            assert lost.station == "a"
            assert next_event(hosting) == TrainerJoined("a", 1, 0)
    assert not children()


def test_what_a_station_said_before_it_ended_is_heard_however_slowly_main_reads(tmp_path: Path) -> None:
    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    limits = config().supervision
    stations = [(ScriptedFactory("a"), Resources())]
    with closing_folder(layout) as folder:
        hosting = LocalHosting(stations, layout, folder.folder, WeightsLayout.of({}), limits, tmp_path)
        with closing(hosting):
            hosting.start()
            for version in (*range(30), RAISES):
                hosting.send("a", PublishWeights("a", version))
            process = psutil.Process(process_ids(hosting)["a"])
            while process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            heard: list[Any] = []
            while not heard or not isinstance(heard[-1], StationLost):
                heard.append(hosting.receive(1.0))
                time.sleep(0.03)
    assert [event.version for event in heard[:-1]] == list(range(30))


def test_a_main_that_others_keep_busy_replaces_all_the_same(tmp_path: Path) -> None:
    """Something is always in its inbox: 50 messages of b are on their way, and each takes main 5 ms."""
    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    stations = [(ScriptedFactory(name), Resources()) for name in ("a", "b")]
    with closing_folder(layout) as folder:
        hosting = LocalHosting(stations, layout, folder.folder, WeightsLayout.of({}), config().supervision, tmp_path)
        with closing(hosting):
            hosting.start()
            for version in range(50):
                hosting.send("b", PublishWeights("b", version))
            psutil.Process(process_ids(hosting)["a"]).kill()
            for _ in range(2000):
                event = next_event(hosting)
                if isinstance(event, StationLost):
                    break
                assert isinstance(event, Published)
                hosting.send("b", PublishWeights("b", event.version))
                time.sleep(0.005)
            assert isinstance(event, StationLost)
            assert event.station == "a"


class closing_folder:  # noqa: N801 - used like `contextlib.closing`
    """The run's folder with its memory, removed in the end."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._folder = SharedRunFolder({"arena": layout.nbytes, "weights": 64})

    def __enter__(self) -> SharedRunFolder:
        return self._folder

    def __exit__(self, *_: object) -> None:
        self._folder.remove()
