"""Versions from the trainer's host to a generator's device on another host, in buckets over a process group of the two
(way pair): NCCL between devices, gloo where they are simulated.

A process of the trainer's host serves (`PairSender`), by questions of the generator (`pair_weights`) over sealed
connections:

    Join    a group is made for who asks; the answer has the port of its store
    Send    the buckets of a publication follow over the group, in order
    Sent    whether it was there until the last of them had been read

The generator asks when it wants a version, so nobody waits for the slowest, and an end that dies breaks its own pair.
It takes the buckets into its staging buffer, one tensor after another. Whatever fails, versions come over tcp instead.

Each wait is `q.PAIR_S` at most. The sender reads the buckets out of the host's memory as the host's server does:
without a lock, so that no generator keeps the trainer waiting, and asks afterwards whether the publication is still
there.

Limits: what crosses a group is neither encrypted nor authenticated, as between ranks of a trainer. NCCL's part was
never run.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed
from torch import Tensor

from polyrhythm.errors import first_line
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.server import HostServer
from polyrhythm.plugins.ranks.store import serve_store
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.memory.receiver import CHUNK_BYTES, CopyStream
from polyrhythm.runtime.memory.tensors import Device
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.runtime.transport.sockets import Sockets

log = logging.getLogger(__name__)

#: Not all of it is exported or has types.
dist: Any = torch.distributed

#: Seconds that a pair lives on without being asked for a version.
_IDLE_S = 600.0
#: Seconds between two looks whether the sender is to end.
_LOOK_S = 0.5
SENDER, RECEIVER = 0, 1
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
#: Held while the environment has another value of it.
_environment = threading.Lock()


class Join(msgspec.Struct, frozen=True, tag=0):
    """Make a pair: its number, and the port of its store."""


class Send(msgspec.Struct, frozen=True, tag=1):
    """Send this publication: b"1" if it follows, b"0" if it is gone."""

    pair: int
    version: int
    number: int


class Sent(msgspec.Struct, frozen=True, tag=2):
    """Whether it was there until the last bucket had been read: b"1" or b"0"."""

    pair: int


_decode = msgspec.msgpack.Decoder(Join | Send | Sent).decode
decode_joined = msgspec.msgpack.Decoder(tuple[int, int]).decode


class PairBroken(LookupError):
    """The other end of a pair has failed, or took too long."""


@contextmanager
def breaking() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError, AttributeError) as error:  # torch's own; or it was built without NCCL
        raise PairBroken(first_line(error, type(error).__name__)) from error


@contextmanager
def _blocking_wait() -> Iterator[None]:
    """A group that is made in this context ends a wait by an error, in place of the process by its watchdog."""
    with _environment:
        before = os.environ.get(_BLOCKING)
        os.environ[_BLOCKING] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_BLOCKING]
            else:
                os.environ[_BLOCKING] = before


class PairGroup:
    """A process group of two. device: of this end; address: of this host."""

    def __init__(self, store: Any, rank: int, device: Device, address: str) -> None:
        self.device, self._other = device, 1 - rank
        limit = timedelta(seconds=q.PAIR_S)
        self._group: Any
        with breaking():
            if device.type == "cuda":
                options: Any = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                with _blocking_wait():
                    self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._timeout = limit
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
                self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, bucket: Tensor) -> None:
        with breaking():
            self._group.send([bucket], self._other, 0).wait(timedelta(seconds=q.PAIR_S))

    def receive(self, bucket: Tensor) -> None:
        with breaking():
            self._group.recv([bucket], self._other, 0).wait(timedelta(seconds=q.PAIR_S))

    def close(self) -> None:
        if self.device.type == "cuda":
            self._group.abort()
        self._group = None


def buckets(nbytes: int) -> Iterator[slice]:
    return (slice(begin, min(begin + CHUNK_BYTES, nbytes)) for begin in range(0, nbytes, CHUNK_BYTES))


def means_of(device: Device) -> str:
    """How its pairs send, for the log."""
    return "NCCL" if device.type == "cuda" else "gloo, as devices are simulated"


class _Pair:
    """The sender's end of one pair, in a thread of its own. port: of the store, which lives as long as the thread."""

    def __init__(self, memory: PublishedMemory, device: Device, address: str, idle_s: float) -> None:
        self._memory, self._device, self._address, self._idle_s = memory, device, address, idle_s
        store, self.port = serve_store(address, timedelta(seconds=q.PAIR_S))
        self._orders, self._results = queue.Queue[Send | None](2), queue.Queue[bool](1)
        self._thread = threading.Thread(target=self._run, args=(store,), name="pair", daemon=True)
        self._thread.start()

    @property
    def lives(self) -> bool:
        return self._thread.is_alive()

    def begin(self, asked: Send) -> bool:
        """Whether the publication is there, and so is sent."""
        if not self._memory.has(asked.version, asked.number):
            return False
        self._orders.put(asked, timeout=q.PAIR_S)
        return True

    def result(self) -> bool:
        """queue.Empty: it is not sent yet."""
        return self._results.get(timeout=q.PAIR_S)

    def end(self) -> None:
        with suppress(queue.Full):  # of orders whose results nobody takes: it ends by that
            self._orders.put_nowait(None)

    def _run(self, store: Any) -> None:
        """Consumes: orders. Waits for: the next one, and the other end, which joins and takes each bucket. Unblocked
        by: these, or their limits. Produces: buckets, and whether they were the publication's."""
        try:
            group = PairGroup(store, SENDER, self._device, self._address)
        except PairBroken as error:
            log.warning("a generator of another host has not joined its pair: %s", error)
            return
        try:
            copies = CopyStream(self._device)
            while (asked := self._orders.get(timeout=self._idle_s)) is not None:
                with copies.active():
                    self._results.put(self._send(group, asked), timeout=q.PAIR_S)
        except (queue.Empty, queue.Full):
            pass  # nobody asks any more
        except PairBroken as error:
            log.warning("a generator of another host has left its pair: %s", error)
        finally:
            group.close()

    def _send(self, group: PairGroup, asked: Send) -> bool:
        memory = self._memory
        for part in buckets(len(memory.buffers[0])):
            content = memory.find_part(asked.version, asked.number, part)
            if content is None:  # the other end waits for as many bytes, and is told afterwards
                content = memory.buffers[0][part]
            group.send(torch.frombuffer(content, dtype=torch.uint8).to(group.device))
        return memory.has(asked.version, asked.number)


class PairSender:
    """Serves pairs from `memory`, what is published on this host. device: of this process, by torch's name; idle_s: for
    which a pair lives on without being asked for a version."""

    def __init__(
        self, memory: PublishedMemory, folder: Path, device: Device, sockets: Sockets, idle_s: float = _IDLE_S
    ) -> None:
        self._memory, self._device, self._address, self._idle_s = memory, device, sockets.address, idle_s
        self._file = folder / q.PAIR_FILE
        self._pairs: dict[int, _Pair] = {}
        self._count = 0
        self._turn, self._over = threading.Lock(), threading.Event()
        drops = DropCounter("the server of pairs")
        self._server = HostServer(sockets, self, drops)
        new = self._file.with_name(f"{q.PAIR_FILE}.new")
        new.write_text(self._server.endpoint)
        new.replace(self._file)
        self._thread = threading.Thread(target=self._serve, name="pairs", daemon=True)
        self._thread.start()
        log.info("generators on devices of other hosts get weights from this process, by pairs (%s)", means_of(device))

    def _serve(self) -> None:
        """Consumes: requests for connections. Waits for: these. Unblocked by: `close`. Produces: tickets."""
        try:
            while not self._over.is_set():
                self._server.serve(_LOOK_S)
        except RuntimeError as error:
            self._file.unlink(missing_ok=True)
            log.warning("no more pairs are made, so generators of other hosts get weights over tcp: %s", error)

    def answer(self, content: bytes | memoryview) -> list[Any]:
        """As `DataServer.answer`."""
        try:
            return [b"", self._answer(_decode(content))]
        except (LookupError, ValueError, RuntimeError, OSError, queue.Empty, queue.Full) as error:
            return [(str(error) or type(error).__name__).encode(errors="replace")[:500]]

    def _answer(self, asked: Join | Send | Sent) -> bytes:
        if isinstance(asked, Join):
            made = _Pair(self._memory, self._device, self._address, self._idle_s)
            with self._turn:
                self._pairs = {number: other for number, other in self._pairs.items() if other.lives}
                self._count += 1
                self._pairs[self._count] = made
                return q.encode((self._count, made.port))
        with self._turn:
            pair = self._pairs.get(asked.pair)
        if pair is None or not pair.lives:
            raise LookupError("this pair has ended")
        done = pair.begin(asked) if isinstance(asked, Send) else pair.result()
        return b"1" if done else b"0"

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for pair in self._pairs.values():
            pair.end()
        self._server.close()
