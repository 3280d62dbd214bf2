"""A simulated device: a lock that processes take in the order in which they asked, and a log of its turns.

Files of device 0 in the folder:

    device-0            flock: whoever holds it is on the device
    device-0.asked      the number of the last turn; flock while a turn is given out
    device-0.turn-7     flock by turn 7 from the moment it is given out until it ends; removed then
    turns.csv           a line for each turn that ended

Turn n waits for the lock of turn n-1, then for the device's. A plain `flock` would let the holder, who is awake, take
the device again before the next in line has woken up. The kernel releases the locks of a process that dies, so what
comes after it goes on; mutual exclusion stands even then, by the device's own lock.

Whoever needs several devices asks for them in increasing number and gives each back when it is through with it. Nobody
waits for a device while holding one in the same thread, so that no cycle of waiting can form.
"""

from __future__ import annotations

import csv
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_TURNS = "turns.csv"


class TurnRecord(NamedTuple):
    """A turn that ended. asked (before its number was given out), began, ended: on the machine's monotonic clock, in
    seconds; number: of the device's turns, in the order in which they began."""

    device: int
    number: int
    station: str
    asked: float
    began: float
    ended: float


class Turn:
    """One turn on a device, from the moment somebody asked for it."""

    def __init__(self, folder: Path, device: int, station: str, number: int, own: int, asked: float) -> None:
        self._folder, self._device, self._station, self._number, self._own = folder, device, station, number, own
        self._asked, self._began = asked, 0.0
        self._lock = -1

    def wait(self) -> None:
        """Return when the device is this turn's: those before it have ended, or died."""
        try:
            before = os.open(_turn_file(self._folder, self._device, self._number - 1), os.O_RDWR)
        except FileNotFoundError:
            pass  # it has ended
        else:
            fcntl.flock(before, fcntl.LOCK_EX)
            os.close(before)
        self._lock = _locked(self._folder / f"device-{self._device}")
        self._began = time.monotonic()

    def end(self) -> None:
        """Give the device to the next in line, and write the turn down."""
        record = TurnRecord(self._device, self._number, self._station, self._asked, self._began, time.monotonic())
        os.close(self._lock)
        _turn_file(self._folder, self._device, self._number).unlink()
        os.close(self._own)
        line = ",".join(map(str, record)) + "\n"
        with open(self._folder / _TURNS, "a", encoding="ascii") as file:  # noqa: PTH123 (one write, appended whole)
            file.write(line)


class Device:
    """Device `number` of those in `folder`."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    def ask(self, station: str) -> Turn:
        """Join the line; the caller waits for the turn, and ends it."""
        begin = time.monotonic()
        asked = _locked(self.folder / f"device-{self.number}.asked")
        try:
            number = int(os.pread(asked, 20, 0) or b"0") + 1
            own = _locked(_turn_file(self.folder, self.number, number))
            os.pwrite(asked, str(number).encode(), 0)
        finally:
            os.close(asked)
        return Turn(self.folder, self.number, station, number, own, begin)

    @contextmanager
    def hold(self, station: str) -> Iterator[None]:
        """The device from its turn to the end of the block."""
        turn = self.ask(station)
        turn.wait()
        try:
            yield
        finally:
            turn.end()


def station_of_thread() -> str:
    """The station of this thread, which the runtime names by its address: `simulator-2` of `simulator-2.0.1`."""
    return threading.current_thread().name.partition(".")[0]


def index_of(station: str) -> int:
    """2 of `simulator-2`. ValueError: the name has no number."""
    return int(station.rpartition("-")[2])


def read_turns(folder: Path) -> list[TurnRecord]:
    """All turns that ended, in the order in which they were written down."""
    with (folder / _TURNS).open(encoding="ascii", newline="") as file:
        return [
            TurnRecord(int(device), int(number), station, float(asked), float(began), float(ended))
            for device, number, station, asked, began, ended in csv.reader(file)
        ]


def _turn_file(folder: Path, device: int, number: int) -> Path:
    return folder / f"device-{device}.turn-{number}"


def _locked(path: Path) -> int:
    """A descriptor of the file, locked as soon as nobody else has it locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
