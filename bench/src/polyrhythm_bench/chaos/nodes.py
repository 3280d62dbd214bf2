"""A Ray cluster whose nodes can be cut off and lost: each in a network namespace with a memory of its own.

The head shares memory with the run and is on this machine's end of a bridge; every other node is in a namespace behind
a link to it. A partition takes the link down for a while; a loss kills every process of the namespace, empties its
memory, and brings a new node.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import ray

from polyrhythm.errors import StartError

_STARTED_S, _GONE_S = 120.0, 3.0
_STORE_BYTES = 80 * 2**20
#: For the nodes and the run: the cluster is of this machine alone.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # else it ends actors where other programs fill the machine's memory
    "RAY_worker_niceness": "0",  # Ray gives its workers 15, which starves stations beside anything else
}


@dataclass
class ChaosNode:
    """A node behind a link. space: its network namespace; memory: what its processes share."""

    name: str
    space: str
    link: str
    address: str
    memory: Path

    def processes(self) -> set[int]:
        """The ids of all processes in its namespace."""
        words = ["ip", "netns", "pids", self.space]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
        return {int(word) for word in done.stdout.split()}


class RayNodes:
    """A cluster of a head and `count` - 1 nodes with `cpus` each, and `gpus` that are none. address: of the head.

    StartError: this machine has no network namespaces for us, or Ray does not start; then nothing is left."""

    def __init__(self, count: int, cpus: int, gpus: int = 0) -> None:
        self.gpus, self._has = gpus, ["--num-cpus", str(cpus), "--num-gpus", str(gpus)]
        self._net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.nodes: dict[str, ChaosNode] = {}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
        self.address = ""
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._bridge(undo)
            os.environ |= _QUIET
            head = self._start([], f"{self._net}.1", None, head=True)
            undo.callback(self._end, [head])
            for number in range(1, count):
                self._add(number, undo)
            self._await_all(count)
            self._undo = undo.pop_all()

    def _bridge(self, undo: ExitStack) -> None:
        name = f"prb{os.getpid()}"
        _ip("link", "add", name, "type", "bridge")
        undo.callback(_run, ["ip", "link", "del", name])
        _ip("addr", "add", f"{self._net}.1/24", "dev", name)
        _ip("link", "set", name, "up")

    def _memory(self, name: str) -> Path:
        memory = self.folder / f"memory-{name}"
        memory.mkdir()
        return memory

    def _add(self, number: int, undo: ExitStack) -> None:
        pid = os.getpid()
        node = ChaosNode(
            f"node-{number}",
            f"prn{pid}-{number}",
            f"pr{pid}-{number}",
            f"{self._net}.{number + 1}",
            self._memory(str(number)),
        )
        _ip("netns", "add", node.space)
        undo.callback(_run, ["ip", "netns", "del", node.space])
        _ip("link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", node.space)
        _ip("link", "set", node.link, "master", f"prb{pid}", "up")
        _ip("-n", node.space, "addr", "add", f"{node.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", node.space, "link", "set", device, "up")
        _ip("-n", node.space, "route", "add", "default", "via", f"{self._net}.1")
        for server in _name_servers():  # else who asks for a name there, as torch for each connection, waits 10 s
            _run(["ip", "-n", node.space, "route", "add", "unreachable", server])
        undo.callback(self._end_node, node)
        self.nodes[node.name] = node
        self.start_node(node)

    # ------------------------------------------------------------ what chaos does

    def cut(self, node: ChaosNode) -> None:
        """Nothing comes or goes over its link."""
        _ip("link", "set", node.link, "down")

    def mend(self, node: ChaosNode) -> None:
        _ip("link", "set", node.link, "up")

    def lose(self, node: ChaosNode) -> None:
        """Kill what is there, at once, and empty its memory."""
        self.cut(node)  # as a machine that loses its power says nothing any more
        self._started.pop(node.name, None)
        self._end_node(node)
        for entry in node.memory.iterdir():
            shutil.rmtree(entry, ignore_errors=True)

    def start_node(self, node: ChaosNode) -> None:
        """A new node of the cluster in this place, without waiting until it is there."""
        self.mend(node)
        self._started[node.name] = self._start(["ip", "netns", "exec", node.space], node.address, node.memory)

    def revive(self) -> None:
        """Start those again that have ended: Ray gives up a node that takes long to start."""
        for name, process in list(self._started.items()):
            if process.poll() is not None:
                self.start_node(self.nodes[name])

    def node_of(self, pid: int) -> ChaosNode | None:
        """Where a process is; None for the head, or if it has ended."""
        return next((node for node in self.nodes.values() if pid in node.processes()), None)

    # ------------------------------------------------------------ Ray

    def _start(
        self, prefix: list[str], address: str, memory: Path | None, *, head: bool = False
    ) -> subprocess.Popen[bytes]:
        port = 6379 + os.getpid() % 1000
        program = str(Path(sys.executable).with_name("ray"))  # of this Python, whatever the shell finds
        words = [*prefix, program, "start", "--block", "--node-ip-address", address]
        words += [*self._has, "--object-store-memory", str(_STORE_BYTES), "--disable-usage-stats"]
        if head:
            words += ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", str(self.folder)]
        else:
            words += ["--address", self.address]
        with (self.folder / f"{address}.out").open("ab") as output:
            process = subprocess.Popen(  # noqa: S603
                words, stdout=output, stderr=output, env=_environment(memory), start_new_session=True
            )
        if head:
            self.address = f"{address}:{port}"
            self._wait_for(address, port, process, Path(output.name))
        return process

    def _wait_for(self, address: str, port: int, process: subprocess.Popen[bytes], output: Path) -> None:
        until = time.monotonic() + _STARTED_S
        while time.monotonic() < until and process.poll() is None:
            try:
                socket.create_connection((address, port), 1.0).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise StartError(f"ray start --head does not start: {output.read_text()[-500:]}")

    def _await_all(self, count: int) -> None:
        """Until all nodes belong to the cluster."""
        ray.init(address=self.address, log_to_driver=False, configure_logging=False, logging_level=logging.WARNING)
        try:
            until = time.monotonic() + _STARTED_S
            while (here := sum(node["Alive"] for node in ray.nodes())) < count:
                if time.monotonic() > until:
                    said = "\n".join(file.read_text()[-500:] for file in sorted(self.folder.glob("*.out")))
                    raise StartError(f"{here} of {count} nodes are there after {_STARTED_S:g} s; they said:\n{said}")
                self.revive()
                time.sleep(0.2)
        finally:
            ray.shutdown()

    def remains(self) -> list[str]:
        """What a run that is over has left on the nodes, in words."""
        time.sleep(_GONE_S)  # Ray's actors end a moment after they were told to
        found = []
        for name, pids in [(n.name, n.processes()) for n in self.nodes.values()]:
            ours = [pid for pid in pids if b"polyrhythm." in _command(pid)]
            found += [f"{name}: process {pid} is left: {_command(pid).decode(errors='replace')}" for pid in ours]
        for memory in self.folder.glob("memory-*"):
            found += [f"{memory.name}: {entry.name} is left" for entry in memory.iterdir()]
        return found

    def _end_node(self, node: ChaosNode) -> None:
        until = time.monotonic() + 10.0
        while (pids := node.processes()) and time.monotonic() < until:
            for pid in pids:
                _kill(pid)
            _reap(pids)
            time.sleep(0.05)

    def _end(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            _kill_group(process)

    def close(self) -> None:
        """End the cluster; nothing of it is left."""
        self._undo.close()


def _environment(memory: Path | None) -> Mapping[str, str]:
    return os.environ | _QUIET | ({"POLYRHYTHM_SHARED_MEMORY": str(memory)} if memory is not None else {})


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _reap(pids: Iterable[int]) -> None:
    """Those that are children of this process."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """`ray start --block` and what it started, which is in its session or has its own."""
    import psutil

    try:
        every = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for other in every:
        _kill(other.pid)
    process.wait()


def _name_servers() -> list[str]:
    lines = [line.split() for line in Path("/etc/resolv.conf").read_text().splitlines()]
    return [line[1] for line in lines if line[:1] == ["nameserver"] and len(line) > 1]


def _ip(*words: str) -> None:
    if wrong := _run(["ip", *words]):
        raise StartError(f"ip {' '.join(words)}: {wrong}; --nodes needs root and network namespaces")


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    return (done.stderr or f"status {done.returncode}").strip() if done.returncode else ""
