"""Where processes of a run can be started: on this machine, or wherever a cluster has a place for them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from select import select
from typing import IO, Protocol

import msgspec

from polyrhythm.errors import StartError
from polyrhythm.imports import same_imports
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, Found
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import ProcessHandle, in_memory, start_child
from polyrhythm.runtime.transport.sockets import LOOPBACK

#: Seconds that an agent may take to say what it found, and to leave.
FOUND_S, _LEAVE_S = 30.0, 5.0


class Node(Protocol):
    """A place for processes. name: for people; address: by which other hosts reach it."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def abandoned(self) -> bool:
        """A process there was to end and could not be reached: it may still live."""
        ...

    @property
    def agent_failure(self) -> str:
        """How the host's agent there has ended, as far as this is known; "" while it serves."""
        ...

    @property
    def leaves(self) -> bool:
        """Whether it is one of a cluster that says which nodes are there."""
        ...

    def start_agent(self, spec: AgentSpec) -> Callable[[], Found]:
        """Start the host's agent there, until `close`, without waiting for it. What is returned waits for what it
        finds, until `FOUND_S` after the start. StartError, from either: it does not start."""
        ...

    def spawn(self, spec: ChildSpec, log: IO[bytes]) -> ProcessHandle:
        """Start a station's process there."""
        ...

    def give_up(self) -> None:
        """The host there is lost: processes that are to end there are not waited for."""
        ...

    def close(self) -> None:
        """End the agent; a second call does nothing."""
        ...


class AgentProcess:
    """An agent as a child of this process. prefix: words before its command; environment: variables in addition."""

    def __init__(
        self, spec: AgentSpec, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        words = [*prefix, sys.executable, "-m", "polyrhythm.plugins.cluster.hosts.agent", spec.host]
        own = os.environ | same_imports() | dict(environment or {})
        with in_memory(msgspec.msgpack.encode(replace(spec, parent=os.getpid())), "") as content:
            self._process = subprocess.Popen(  # noqa: S603
                words, stdin=content, stdout=subprocess.PIPE, env=own, start_new_session=True
            )
        self._until = time.monotonic() + FOUND_S
        self._serves = False

    def found(self) -> Found:
        """Wait for what it finds; asked once. StartError: nothing, and it has ended."""
        try:
            return self._hear()
        except BaseException:
            self.close()
            raise

    def _hear(self) -> Found:
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select([output], [], [], max(0.0, self._until - time.monotonic()))
        line = output.readline() if ready else b""
        if not line:
            raise StartError(f"the host's agent said nothing within {FOUND_S:g} s (status {self._process.poll()})")
        found = msgspec.json.decode(line, type=Found)
        if found.error:
            raise StartError(found.error)
        self._serves = bool(found.endpoint)
        return found

    @property
    def failure(self) -> str:
        """How it has ended; "" while it serves, or if it had nothing to serve."""
        status = self._process.poll()
        return "" if status is None or not self._serves else f"its agent has ended with status {status}"

    def close(self) -> None:
        """End it; its folder goes with it. A second call does nothing."""
        self._process.terminate()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class LocalNode:
    """A place on this machine. prefix: words before each command; environment: variables in addition, for example
    another folder for shared memory, which makes it a host of its own."""

    def __init__(
        self,
        name: str = "local",
        address: str = LOOPBACK,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.address = name, address
        self._prefix, self._environment = tuple(prefix), dict(environment or {})
        self._agent: AgentProcess | None = None
        self.abandoned = self.leaves = False

    def start_agent(self, spec: AgentSpec) -> Callable[[], Found]:
        assert self._agent is None, f"{self.name} has an agent"
        self._agent = AgentProcess(spec, self._prefix, self._environment)
        return self._agent.found

    @property
    def agent_failure(self) -> str:
        return self._agent.failure if self._agent is not None else ""

    def spawn(self, spec: ChildSpec, log: IO[bytes]) -> ProcessHandle:
        return start_child(spec, log, self._prefix, self._environment)

    def give_up(self) -> None: ...

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None
