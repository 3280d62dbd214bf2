"""Starts one process for several stations (`Resources.process`) when the last of them is to start.

Each station has a handle of its own to it. It ends as one: killed for one station, it is gone for all.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from dataclasses import replace
from typing import IO

from polyrhythm.runtime.factories import StationList
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import ProcessHandle, Spawn


class SharedProcess:
    """One start of a process: a `ProcessHandle`, of each of its stations. pid: 0 until it is started."""

    def __init__(self) -> None:
        self._specs: list[tuple[ChildSpec, int]] = []  # with a descriptor of its log
        self._handle: ProcessHandle | None = None
        self._killed = False

    @property
    def pid(self) -> int:
        return self._handle.pid if self._handle is not None else 0

    @property
    def killed(self) -> bool:
        """Whether it was killed before it was started: it never will be."""
        return self._killed and self._handle is None

    def add(self, spec: ChildSpec, log: IO[bytes]) -> int:
        """A station of it is to start; how many are."""
        self._specs.append((spec, os.dup(log.fileno())))
        return len(self._specs)

    def start(self, spawn: Spawn, leader: str) -> None:
        """Start it for all. leader: the station whose seat and log it gets. OSError: the system cannot."""
        self._specs.sort(key=lambda one: one[0].station != leader)
        (first, own), *others = self._specs
        for spec, log in others:
            with os.fdopen(log, "ab") as file:
                file.write(f"{spec.station} works in the process of {leader}, see its log\n".encode())
        with os.fdopen(own, "ab") as file:
            self._handle = spawn(replace(first, beside=tuple(spec for spec, _ in others)), file)

    def poll(self) -> int | None:
        if self._handle is not None:
            return self._handle.poll()
        return -signal.SIGKILL if self._killed else None

    def wait(self, timeout: float) -> int:
        if self._handle is not None:
            return self._handle.wait(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a process that is not started", timeout)
        return status

    def kill(self) -> None:
        if self._handle is not None:
            self._handle.kill()
        elif not self._killed:
            self._killed = True
            for _, log in self._specs:
                os.close(log)


class SharingSpawn:
    """Starts processes by `spawn`, one for all stations of a `Resources.process`."""

    def __init__(self, stations: StationList, spawn: Spawn) -> None:
        self._spawn = spawn
        self._counts = Counter(seats[0].process for _, *seats in stations)
        self._pending: dict[str, SharedProcess] = {}

    def __call__(self, spec: ChildSpec, log: IO[bytes]) -> ProcessHandle:
        name = spec.resources.process
        if not name:
            return self._spawn(spec, log)
        shared = self._pending.pop(name, None)
        if shared is None or shared.killed:
            shared = SharedProcess()
        if shared.add(spec, log) < self._counts[name]:
            self._pending[name] = shared
        else:
            shared.start(self._spawn, name)
        return shared
