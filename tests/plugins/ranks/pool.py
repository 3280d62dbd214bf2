"""Rank processes for tests: four, forked from one that has imported what they need, fed with functions over sockets.

Every answer has a deadline; what is left of the processes when the pool is closed, or a deadline has passed, is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from polyrhythm.config.sections.placement import ShardSettings
from polyrhythm.training.ranks import Meeting

RANKS = 4
_START_S, _MEET_S, _ANSWER_S, _END_S = 120.0, 60.0, 150.0, 10.0


class RankPool:
    """Up to `RANKS` ranks that execute functions of test modules."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._stores = count()
        self._host: subprocess.Popen[bytes] | None = None
        self._ends: list[Connection] = []

    def _start(self) -> None:
        ours, theirs = zip(*(socket.socketpair() for _ in range(RANKS)), strict=True)
        fds = [end.fileno() for end in theirs]
        self._host = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, fds)], pass_fds=fds, start_new_session=True
        )
        for end in theirs:
            end.close()
        self._ends = [Connection(end.detach()) for end in ours]
        self._read(self._ends, _START_S)

    def run(
        self,
        function: str,
        size: int,
        strategy: str = "replicate",
        shard: ShardSettings | None = None,
        devices: Sequence[str] = ("cpu",) * RANKS,
        hosts: Sequence[str] = (),
        **arguments: Any,
    ) -> list[Any]:
        """`module:function`(ranks, **arguments) on ranks 0..size-1 of a trainer of their own; their answers by rank.
        hosts: of the ranks, which then meet at a port of the loopback interface.

        AssertionError: a rank failed; TimeoutError: it gave no answer. Then the next call starts other processes."""
        if self._host is None:
            self._start()
        store = Path(self._folder.name) / str(next(self._stores))
        for rank, end in enumerate(self._ends[:size]):
            place = rank, size, Meeting(store, hosts, "127.0.0.1" * bool(hosts)), devices[rank], strategy, shard
            end.send_bytes(pickle.dumps((function, place, arguments)))
        return self._read(self._ends[:size], _ANSWER_S)

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        if self._host is not None:
            try:
                self._host.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._kill()
        self._folder.cleanup()

    def _read(self, ends: list[Connection], deadline: float) -> list[Any]:
        answers = []
        until = time.monotonic() + deadline
        for rank, end in enumerate(ends):
            if not end.poll(max(until - time.monotonic(), 0.0)):
                self._kill()
                raise TimeoutError(f"rank {rank} gave no answer within {deadline:g} s")
            answers.append(pickle.loads(end.recv_bytes()))
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            self._kill()
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _kill(self) -> None:
        assert self._host is not None
        os.killpg(self._host.pid, signal.SIGKILL)
        self._host.wait()
        self._host = None
        for end in self._ends:
            end.close()


def _serve(end: Connection) -> None:
    """Execute what comes until the other end is closed. A failed rank is not used again: others may wait for it."""
    from polyrhythm.training.ranks import open_ranks

    end.send_bytes(pickle.dumps(("", None)))
    while True:
        try:
            function, (rank, size, meeting, *others), arguments = pickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            meeting = replace(meeting, find=partial(_read, meeting.file), by=time.monotonic() + _MEET_S)
            ranks = open_ranks(rank, size, meeting, *others)
            try:
                module, name = function.split(":")
                answer = getattr(importlib.import_module(module), name)(ranks, **arguments)
            finally:
                ranks.close()
            end.send_bytes(pickle.dumps(("", answer)))
        except BaseException:  # noqa: BLE001 - the test fails with it
            end.send_bytes(pickle.dumps((traceback.format_exc(), None)))


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _main(fds: list[int]) -> None:
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import polyrhythm.plugins.ranks.replicated
    import polyrhythm.plugins.ranks.sharded
    import polyrhythm.training.learner  # noqa: F401

    with contextlib.suppress(ImportError):
        import peft  # noqa: F401 - takes seconds in every process that trains adapters

    faulthandler.enable()
    torch.set_num_threads(1)
    children = []
    for fd in fds:
        child = os.fork()
        if child == 0:
            for other in fds:
                if other != fd:
                    os.close(other)
            try:
                _serve(Connection(fd))
            finally:
                os._exit(0)
        children.append(child)
    for fd in fds:
        os.close(fd)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    _main([int(fd) for fd in sys.argv[1:]])
