"""Stations are replaced step by step, and nobody waits for one that takes its time to die."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from tests.process.runs import PATIENCE_S, children, config, wait_until
from tests.runtime.scripted import HANGS, RAISES, ScriptedFactory

from polyrhythm.runtime.factories import Resources, StationContext
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.local import LocalHosting, RunMemory
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.messages import Station
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import start_child
from polyrhythm.runtime.processes.together import SharingSpawn
from polyrhythm.scheduler.records import Event, Published, PublishWeights, StationLost, TrainerJoined
from polyrhythm.specs import WeightsLayout

LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
NO_WEIGHTS = WeightsLayout.of({})


def memory_in(folder: Path) -> RunMemory:
    return RunMemory(InFlight(LAYOUT), NO_WEIGHTS, folder)


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

    limits = config(supervision={"update_s": 0.5}).supervision
    stations = [(ScriptedFactory(name), Resources()) for name in ("a", "b")]
    with closing_folder(LAYOUT) as folder:
        hosting = LocalHosting(stations, memory_in(folder.folder), limits, tmp_path, spawn=spawn)
        with closing(hosting):
            hosting.start()
            hosting.send("a", PublishWeights("a", 1))
            next_event(hosting)
            # It is counted after its event is sent.
            wait_until(lambda: hosting.statistics(fresh=True)["a"].get("units") == 1.0)
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
    limits = config().supervision
    stations = [(ScriptedFactory("a"), Resources())]
    with closing_folder(LAYOUT) as folder:
        hosting = LocalHosting(stations, memory_in(folder.folder), limits, tmp_path)
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
    stations = [(ScriptedFactory(name), Resources()) for name in ("a", "b")]
    with closing_folder(LAYOUT) as folder:
        hosting = LocalHosting(stations, memory_in(folder.folder), config().supervision, tmp_path)
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


@dataclass(frozen=True)
class Slow(ScriptedFactory):
    """Its station takes some time to be made, and leaves a file then."""

    made: str

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        ((address, make),) = super().parts(context, incarnation)

        def make_slowly() -> Station:
            time.sleep(0.3)
            Path(self.made).touch()
            return make()

        return [(address, make_slowly)]


def test_stations_of_one_process_announce_themselves_when_all_are_made(tmp_path: Path) -> None:
    """Else the first one would get work while the other one is being made."""
    made, together = tmp_path / "made", Resources(process="a")
    stations = [(ScriptedFactory("a"), together), (Slow("b", str(made)), together)]
    spawn = SharingSpawn(stations, start_child)
    with closing_folder(LAYOUT) as folder:
        hosting = LocalHosting(stations, memory_in(folder.folder), config().supervision, tmp_path, spawn=spawn)
        with closing(hosting):
            hosting.start()
            made.unlink()
            psutil.Process(process_ids(hosting)["a"]).kill()
            joined = set[str]()
            while joined != {"a", "b"}:
                event = next_event(hosting)
                if isinstance(event, TrainerJoined):
                    assert made.exists(), f"{event.trainer} is early"
                    joined.add(event.trainer)
    assert not children()


class closing_folder:  # noqa: N801 - used like `contextlib.closing`
    """The run's folder with its memory, removed in the end."""

    def __init__(self, layout: ArenaLayout) -> None:
        self._folder = SharedRunFolder({"arena": layout.nbytes, "weights": 64})

    def __enter__(self) -> SharedRunFolder:
        return self._folder

    def __exit__(self, *_: object) -> None:
        self._folder.remove()
