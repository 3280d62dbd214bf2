"""What runs on a node of a Ray cluster: plain classes, which `plugins.cluster.ray.cluster` makes actors of.

An actor starts the process of a station or of a host's agent, and is its parent: it knows how the process ended, and
the process dies with it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, Found
from polyrhythm.plugins.cluster.hosts.nodes import AgentProcess
from polyrhythm.plugins.cluster.ray.versions import Versions, own_versions, why_not
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import start_child


class StationActor:
    """The process of a station, from its packed spec, in `folder` if that is here too. Its log is a file of this node
    without a name, so that nothing is left however the actor ends; `read_log` shows it."""

    def __init__(self, content: bytes, folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)  # paths in settings are relative to it
        spec = replace(msgspec.msgpack.decode(content, type=ChildSpec), parent=os.getpid())
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as the actor
        self._process = start_child(spec, self._log)

    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """The exit status of the process, once it has been reaped."""
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def read_log(self, offset: int, size: int) -> bytes:
        """At most `size` bytes of the log from `offset` on."""
        return os.pread(self._log.fileno(), size, offset)


class AgentActor:
    """The agent of a node's host."""

    def __init__(self) -> None:
        self._agent: AgentProcess | None = None

    def start(self, content: bytes, versions: Sequence[str], folder: str) -> bytes:
        """What the agent found. versions: of the run, as plain strings, which every version can read; folder: of the
        run, which has to be seen from here, "" if it need not."""
        found = Found()
        if differs := why_not(Versions(*versions[:2]), own_versions()):
            found = Found(error=differs)
        elif folder and not Path(folder).is_dir():
            found = Found(
                error=f"the run's folder {folder} cannot be seen there, where the trainer saves its state; set out_dir "
                "to a folder that all nodes share"
            )
        else:
            try:
                self._agent = AgentProcess(msgspec.msgpack.decode(content, type=AgentSpec))
                found = self._agent.found()
            except PolyrhythmError as error:
                found = Found(error=str(error))
        return msgspec.msgpack.encode(found)

    def close(self) -> None:
        """End the agent; its folder goes with it."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None
