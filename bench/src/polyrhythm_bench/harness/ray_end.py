"""Ray on a link: a cluster of two nodes, one at each end, and an actor there that returns arrays by its object store.

Runs in a Python that has Ray (`Worker(..., python=...)`), which needs none of ours but this package.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_PORT = 26379
_STORE_BYTES, _MEMORY_BYTES = 500 * 2**20, 200 * 2**20
_DEADLINE_S = 60.0


@contextmanager
def asker(here: str, there: str, prefix: list[str]) -> Iterator[Any]:
    """Answers `observation`, `samples`, `weights`: seconds of each of `count` fetches of so many bytes."""
    # A cluster of this benchmark's own, with a token of its own; set before Ray is imported, which reads it then.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import numpy as np
    import ray

    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="pr", ignore_cleanup_errors=True)))
        start = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--num-cpus=1",
            "--disable-usage-stats",
        ]
        start += [f"--object-store-memory={_STORE_BYTES}", f"--memory={_MEMORY_BYTES}"]
        head = [*start, "--head", f"--node-ip-address={here}", f"--port={_PORT}", "--include-dashboard=false"]
        other = [*start, f"--address={here}:{_PORT}", f"--node-ip-address={there}", '--resources={"there":1}']
        log = undo.enter_context((folder / "log").open("wb"))
        first = _node([*head, f"--temp-dir={folder}/h"], log, undo)
        _wait_for_port(first, here, folder / "log")
        ray.init(address=f"{here}:{_PORT}", _node_ip_address=here, log_to_driver=False, logging_level="ERROR")
        undo.callback(ray.shutdown)
        _node([*prefix, *other, f"--temp-dir={folder}/h"], log, undo)
        _wait_for_two(ray)

        class Far:
            """Holds arrays and gives them as Ray does: what is returned goes into its node's object store."""

            def __init__(self) -> None:
                self._held = np.zeros(0, np.uint8)

            def give(self, nbytes: int) -> Any:
                if len(self._held) != nbytes:
                    self._held = np.zeros(nbytes, np.uint8)
                return self._held

            def give_many(self, nbytes: int, count: int) -> list[Any]:
                return [ray.put(np.zeros(nbytes, np.uint8)) for _ in range(count)]

        far: Any = ray.remote(num_cpus=1, resources={"there": 1})(Far).remote()
        ray.get(far.give.remote(8), timeout=_DEADLINE_S)

        def answer(nbytes: int, count: int, *, many: bool = False) -> list[float]:
            """Seconds of each fetch; many: of all `count`, which lie in the other node's store by then."""
            room = np.empty(nbytes, np.uint8)
            if many:
                refs = ray.get(far.give_many.remote(nbytes, count), timeout=_DEADLINE_S)
                begin = time.perf_counter()
                for array in ray.get(refs, timeout=_DEADLINE_S):
                    room[:] = array
                return [time.perf_counter() - begin]
            found = []
            for _ in range(count):
                begin = time.perf_counter()
                room[:] = ray.get(far.give.remote(nbytes), timeout=_DEADLINE_S)
                found.append(time.perf_counter() - begin)
            return found

        yield answer


def _node(command: Sequence[str], log: Any, undo: ExitStack) -> subprocess.Popen[bytes]:
    """Start a node's processes, which end with it."""
    popen = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )

    def end() -> None:
        family = [*psutil.Process(popen.pid).children(recursive=True), psutil.Process(popen.pid)]
        popen.terminate()
        _, left = psutil.wait_procs(family, 3)
        for process in left:  # Ray's own takes tens of seconds
            with suppress(psutil.NoSuchProcess):
                process.kill()
        popen.wait()

    undo.callback(end)
    return popen


def _wait_for_port(node: subprocess.Popen[bytes], here: str, log: Path) -> None:
    """Wait until the head answers. RuntimeError: it has ended, or takes too long."""
    until = time.monotonic() + _DEADLINE_S
    while node.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection((here, _PORT), 1):
            return
        time.sleep(0.2)
    said = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise RuntimeError(f"Ray's head node does not answer at {here}:{_PORT}: {''.join(said)[:300]}")


def _wait_for_two(ray: Any) -> None:
    until = time.monotonic() + _DEADLINE_S
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        if time.monotonic() > until:
            raise TimeoutError(f"Ray's second node did not join within {_DEADLINE_S:g} s")
        time.sleep(0.2)
