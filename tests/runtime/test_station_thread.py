"""The loop of a part: a device that works beside it, and a command that cannot be obeyed after all."""

from __future__ import annotations

import os
import queue
import select
import threading
from typing import Any

import pytest

from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import StationTraits, Unobeyable
from polyrhythm.runtime.processes import station_thread
from polyrhythm.runtime.processes.station_thread import PartQueue, StationThread
from polyrhythm.runtime.spans import PASS, Span
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.scheduler import records as r

LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={"a": 1})
HOUR = 3600.0


class Host:
    """A process that does nothing for its part."""

    def connect(self, message: wire.Connect | wire.HostAt) -> None: ...

    def is_meant(self, message: wire.Dismissed) -> bool:
        return message.incarnation == 1

    def beat(self, *, pending_work: bool = False) -> None: ...

    def refuse(self, command: bytes, why: str) -> None: ...

    begin_frame = flush = notify = beat


class Launching:
    """Has two units of work, of which the second would wait for the device. said: what happened, in order; begins: of
    its units of work."""

    name = "g"

    def __init__(self, patience: float) -> None:
        self.said: list[str] = []
        self.spoken = [threading.Event(), threading.Event()]
        self.begins: list[float] = []
        self._patience = patience

    @property
    def traits(self) -> StationTraits:
        return StationTraits(patience=self.patience)

    def handle(self, command: Any) -> None:
        self.said.append("hear")

    def patience(self) -> float:
        return self._patience if self.said == ["work"] else 0.0

    def work(self) -> bool:
        units = self.said.count("work")
        if units == 2:
            return False
        self.said.append("work")
        self.spoken[units].set()
        return True

    def spans(self, begin: float, end: float) -> list[Span]:
        self.begins.append(begin)
        return [Span("g", PASS, begin, end)]

    def close(self) -> None: ...


def lived(patience: float) -> tuple[Launching, StationThread]:
    """The station in its thread, told of a batch once it has done its first unit of work."""
    station, inbox = Launching(patience), PartQueue()
    part = StationThread("g.0", lambda: station, inbox, DropCounter("test"), LAYOUT, Host())  # type: ignore[arg-type, return-value]
    part.spans.on = True
    part.start()
    assert station.spoken[0].wait(60)
    if not patience:
        assert station.spoken[1].wait(60)
    inbox.put(wire.encode(r.Serve("g", r.Batch(1, "g", ()))))
    assert station.spoken[1].wait(60)
    inbox.put(wire.encode(wire.Stop()))
    assert part.over.wait(60)
    return station, part


def test_a_message_is_heard_before_a_unit_of_work_that_would_wait_for_the_device() -> None:
    station, part = lived(HOUR)
    assert station.said == ["work", "hear", "work"]
    (first, _), _ = part.spans.take()
    assert station.begins[1] == first.end, "the time until then is the station's: its device works"
    assert part.busy_s >= station.begins[1] - station.begins[0]


def test_without_patience_it_goes_on_at_once() -> None:
    station, _ = lived(0.0)
    assert station.said[:2] == ["work", "work"]


class Unable:
    """Accepts commands, and finds in its work that it cannot obey the first."""

    name = "t"

    traits = StationTraits()

    def __init__(self) -> None:
        self._todo: list[Any] = []

    def handle(self, command: Any) -> None:
        self._todo.append(command)

    def work(self) -> bool:
        if not self._todo:
            return False
        first = self._todo[0]
        self._todo.clear()
        raise Unobeyable(first, "its samples are gone")

    def close(self) -> None: ...


class Told(Host):
    """A process whose parts refuse commands."""

    def __init__(self) -> None:
        self.refused = queue.Queue[tuple[bytes, str]]()

    def refuse(self, command: bytes, why: str) -> None:
        self.refused.put((command, why))


def test_a_command_that_turns_out_to_be_impossible_is_refused_as_it_came_and_the_part_hears_on() -> None:
    """Main replaces the station then, as after one that it refuses at once."""
    inbox, host = PartQueue(), Told()
    part = StationThread("t.0", Unable, inbox, DropCounter("test"), LAYOUT, host)  # type: ignore[arg-type, return-value]
    part.start()
    command = wire.encode(r.StartUpdate("t", 3, 2, (7,), ("b/1",), (0,), (0.5,)))
    inbox.put(command)
    assert host.refused.get(timeout=60) == (command, "its samples are gone")
    inbox.put(wire.encode(wire.Stop()))
    assert part.over.wait(60)
    assert part.error is None


class Waiting:
    """Has a unit of work once its pipe can be read, or it was told something."""

    name = "s"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.told = self.worked = 0
        self.read, self.write = os.pipe()
        self.spoken = threading.Semaphore(0)

    def wait_beside(self) -> int:
        return self.read

    @property
    def traits(self) -> StationTraits:
        return StationTraits(wait_beside=self.wait_beside)

    def handle(self, command: Any) -> None:
        self.told += 1

    def work(self) -> bool:
        if select.select([self.read], [], [], 0)[0]:
            self.said.append(os.read(self.read, 1).decode())
        elif self.told > self.worked:
            self.worked += 1
            self.said.append("told")
        else:
            return False
        self.spoken.release()
        return True

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


def test_a_part_that_waits_beside_messages_is_woken_by_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station_thread, "_WAIT_S", HOUR)
    station, inbox = Waiting(), PartQueue()
    part = StationThread("s.0", lambda: station, inbox, DropCounter("test"), LAYOUT, Host())  # type: ignore[arg-type, return-value]
    part.start()
    turns = ["a", "told", "b", "told", "told", "c"]
    for turn in turns:
        if turn == "told":
            inbox.put(wire.encode(r.Serve("s", r.Batch(1, "s", ()))))
        else:
            os.write(station.write, turn.encode())
        assert station.spoken.acquire(timeout=60)
    inbox.put(wire.encode(wire.Stop()))
    assert part.over.wait(60)
    assert (part.error, station.said) == (None, turns)
