"""The processes of stations and agents in actors of a Ray cluster, and the thread that watches them.

An actor starts a process on its node and is its parent: it knows how the process ended, and the process dies with it.
No call here waits for Ray in the thread of the run: an actor is asked, and its answers are received by the watcher.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.cluster.hosts.agent import AgentProcess, AgentSpec, Found
from polyrhythm.plugins.cluster.ray.reach import Versions, own_versions, why_not
from polyrhythm.runtime.devices import bind_environment
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import start_child

log = logging.getLogger(__name__)


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
    def __init__(self) -> None:
        self._agent: AgentProcess | None = None

    def start(self, content: bytes, versions: Sequence[str]) -> bytes:
        """What the agent found. versions: of the run, as plain strings, which every version can read."""
        found = Found()
        if differs := why_not(Versions(*versions[:2]), own_versions()):
            found = Found(error=differs)
        else:
            try:
                self._agent = AgentProcess(msgspec.msgpack.decode(content, type=AgentSpec))
                found = self._agent.found()
            except PolyrhythmError as error:
                found = Found(error=str(error))
        return msgspec.msgpack.encode(found)

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def own_device() -> tuple[str, int, dict[str, str], str]:
    """In a bundle that holds a device: Ray's id of the node, the device's number for torch there, variables of a
    process that is bound to it, and the version of torch that is installed there."""
    context = ray.get_runtime_context()
    (name,) = context.get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = visible.index(name) if name in visible else int(name)
    return context.get_node_id(), index, bind_environment(index, os.environ), metadata.version("torch")


#: Seconds between two looks at the actors, and between two readings of a log.
_LOOK_S, _LOG_S = 0.2, 1.0
#: Seconds that an actor may take to answer.
ANSWER_S = 5.0
#: Seconds after which a process counts as ended that was killed and whose actor says nothing, though its host is not
#: lost: longer than a busy machine keeps an actor waiting, or Ray needs to find that one is gone.
_ABANDONED_S = 20.0
#: Most bytes of a log that are brought at a time.
_LOG_BYTES = 2**20
#: What a process that went with its actor or node is said to have ended by.
_WITH_ITS_NODE = -signal.SIGKILL
#: Status of a process that its actor could not start.
_NOT_STARTED = 1


class ActorProcess:
    """A station's process in `actor`. file: where its log goes. host_lost: that of its node is. abandoned: it counts as
    ended, and may still live."""

    def __init__(self, actor: Any, file: Path) -> None:
        self.actor = actor
        self._file = file
        self._offset, self._read_at = 0, time.monotonic()
        self._status: int | None = None
        self._over = threading.Event()
        self._killed_at = float("inf")
        self.abandoned = self.host_lost = False
        self._pid_ref, self._reading = actor.pid.remote(), None
        self._pid = 0
        self.ended = actor.wait.remote()

    @property
    def pid(self) -> int:
        """Its process id on its node; 0 while that is not known, as nobody waits for it: actors start beside each
        other."""
        if not self._pid and ray.wait([self._pid_ref], timeout=0)[0]:
            try:
                self._pid = ray.get(self._pid_ref, timeout=ANSWER_S)
            except RayError:
                return 0
        return self._pid

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float) -> int:
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired("a station in an actor", timeout)
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        """Have the actor kill it; an actor that does not answer is given up, with its node."""
        self._killed_at = min(self._killed_at, time.monotonic())
        self.actor.kill.remote()

    # ------------------------------------------------------------ the watcher's thread

    def look(self, now: float) -> bool:
        """Take what the actor has answered; True if the process has ended."""
        if ray.wait([self.ended], timeout=0)[0]:
            self._end(self._exit_status())  # at once, as the run waits for that
            ray.kill(self.actor)
            return True
        if now >= self._killed_at + (0.0 if self.host_lost else _ABANDONED_S):
            log.warning("a node does not answer; the station there counts as ended")
            self.abandon()
            ray.kill(self.actor)
            return True
        if self._reading is not None and ray.wait([self._reading], timeout=0)[0]:
            self._keep(self._reading)
        elif self._reading is None and now >= self._read_at + _LOG_S:
            self._reading = self.actor.read_log.remote(self._offset, _LOG_BYTES)
        return False

    def _exit_status(self) -> int:
        try:
            status: int = ray.get(self.ended, timeout=ANSWER_S)
        except RayError as error:
            with suppress(RayError):
                ray.get(self._pid_ref, timeout=0)
                return _WITH_ITS_NODE  # it had started
            if isinstance(error, ActorUnschedulableError):
                return _WITH_ITS_NODE
            if isinstance(error, ActorDiedError) and "creation task" not in str(error):
                return _WITH_ITS_NODE  # else its own `__init__` failed
            self._write(f"{last_line(error)}\n".encode())  # as if the process had said it
            return _NOT_STARTED
        while self._keep(self._reading or self.actor.read_log.remote(self._offset, _LOG_BYTES)) == _LOG_BYTES:
            pass
        self._keep(self.actor.read_log.remote(self._offset, _LOG_BYTES))
        return status

    def _write(self, content: bytes) -> None:
        try:
            with self._file.open("ab") as file:
                file.write(content)
        except OSError as error:
            log.warning("%s: %d bytes of a station's log are lost (%s)", self._file, len(content), error.strerror)

    def _keep(self, reading: Any) -> int:
        """Append what was read to the log; how much it was."""
        self._reading, self._read_at = None, time.monotonic()
        try:
            content: bytes = ray.get(reading, timeout=ANSWER_S)
        except RayError:
            return 0
        if content:
            self._write(content)
            self._offset += len(content)
        return len(content)

    def abandon(self) -> None:
        """Count it as ended, though it may still live."""
        self.abandoned = True
        self._end(_WITH_ITS_NODE)

    def _end(self, status: int) -> None:
        self._status = status
        self._over.set()


def last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


class Watcher:
    """Looks at the actors in a thread of its own, until it is closed."""

    def __init__(self) -> None:
        self._processes: list[ActorProcess] = []
        self._turn, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()

    def add(self, process: ActorProcess) -> None:
        with self._turn:
            self._processes.append(process)

    def _run(self) -> None:
        """Consumes: answers of actors. Waits for: the end of one of their processes, or `_LOOK_S`. Unblocked by: these.
        Produces: exit statuses and logs. Where the cluster itself no longer answers, or looking fails otherwise, all
        processes are abandoned, so that main knows."""
        while not self._over.is_set():
            try:
                self._look()
            except Exception as error:  # main is told, whatever it was
                log.exception("the Ray cluster does not answer (%s); its stations are abandoned", type(error).__name__)
                with self._turn:
                    processes, self._processes = self._processes, []
                for process in processes:
                    process.abandon()

    def _look(self) -> None:
        with self._turn:
            processes = list(self._processes)
        if processes:
            ray.wait([process.ended for process in processes], timeout=_LOOK_S)
        else:
            self._over.wait(_LOOK_S)
        over = [process for process in processes if process.look(time.monotonic())]
        with self._turn:
            self._processes = [process for process in self._processes if process not in over]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
