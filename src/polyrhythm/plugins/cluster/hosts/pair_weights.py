"""The generator's end of a pair (`pairs`): versions as they arrive, and over tcp where they do not.

Threads take turns: a pair has one order of buckets for both ends. A pair that has ended because nothing was asked of it
for long is made anew at once.
Whatever fails, versions come over tcp instead, at once and for `_PAUSE_S`, and then by a new pair.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
from torch import Tensor

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostSilent
from polyrhythm.plugins.cluster.hosts.pairs import (
    RECEIVER,
    Join,
    PairGroup,
    Send,
    Sent,
    breaking,
    buckets,
    decode_joined,
    dist,
    means_of,
)
from polyrhythm.plugins.cluster.hosts.weights import HostWeights
from polyrhythm.runtime.memory.tensors import Copy, Device, State, Stream, copy_into
from polyrhythm.runtime.memory.weights import NOTHING, Fetched, Publication
from polyrhythm.specs.weights import PlacedTensor, WeightsLayout

log = logging.getLogger(__name__)

#: Seconds without pairs after one has failed.
_PAUSE_S = 30.0


class Arriving(Mapping[str, Tensor]):
    """The layout's tensors as they come, in the order of memory. One that is asked for out of order is waited for, and
    those before it are kept until they are; each can be asked for again until the next is."""

    def __init__(self, layout: WeightsLayout, group: PairGroup) -> None:
        self._layout, self._group = layout, group
        self._todo = iter(layout.tensors)
        self._buckets = buckets(layout.nbytes)
        self._bucket, self._begin = torch.empty(0, dtype=torch.uint8, device=group.device), 0
        self._kept: dict[str, Tensor] = {}
        self._last = ""

    def __getitem__(self, name: str) -> Tensor:
        if name != self._last:
            self._kept.pop(self._last, None)
            self._last = name
        while name not in self._kept:
            placed = next(self._todo, None)
            if placed is None:
                raise KeyError(name)
            self._kept[placed.name] = self._receive(placed)
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return (placed.name for placed in self._layout.tensors)

    def __len__(self) -> int:
        return len(self._layout.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._layout.published

    def rest(self) -> None:
        """Receive what nobody has asked for, so that the pair can be used again."""
        for placed in self._todo:
            self._receive(placed)
        for part in self._buckets:
            self._next(part)

    def _receive(self, placed: PlacedTensor) -> Tensor:
        begin, stop, pieces = placed.offset, placed.offset + placed.spec.nbytes, []
        while True:
            piece = self._bucket[max(begin - self._begin, 0) : max(stop - self._begin, 0)]
            if len(piece):
                pieces.append(piece)
            if stop <= self._begin + len(self._bucket):
                break
            self._next(next(self._buckets))
        content = pieces[0] if len(pieces) == 1 else torch.cat([self._bucket[:0], *pieces])
        return content.view(getattr(torch, placed.spec.dtype)).view(placed.spec.shape)

    def _next(self, part: slice) -> None:
        self._bucket, self._begin = self._bucket.new_empty(part.stop - part.start), part.start
        self._group.receive(self._bucket)


class PairWeights:
    """The `Weights` of a generator on a device of another host than the trainer's. host: its end over tcp; publisher:
    the trainer's host; find: a client of its `PairSender`, and its address, LookupError: there is none; address: of
    this host; device: by torch's name."""

    fetches, shared = True, None

    def __init__(
        self,
        host: HostWeights,
        publisher: str,
        device: Device,
        find: Callable[[], tuple[DataClient, str]],
        address: str,
    ) -> None:
        self.layout, self.traffic = host.layout, host.traffic
        self._host, self._publisher, self._device = host, publisher, device
        self._find, self._address = find, address
        self._joined: tuple[DataClient, PairGroup, int] | None = None
        self._turn, self._paused = threading.Lock(), 0.0

    @property
    def newest(self) -> int:
        return self._host.newest

    def publish(self, version: int, state: State | Stream) -> None:
        self._host.publish(version, state)

    def find(self, version: int) -> Publication | None:
        return self._host.find(version)

    def read(self, version: int | None = None) -> tuple[int, State]:
        return self._host.read(version)

    def lies_on(self, device: Device) -> bool:  # noqa: ARG002
        return False

    def fetch(self, version: int, into: State, present: Publication = NOTHING, copy: Copy = copy_into) -> Fetched:
        wanted = self._host.find(version) or self._host.find(self._host.newest)
        if wanted is not None and wanted != present:
            with self._turn:
                if time.monotonic() >= self._paused:
                    if self._try(wanted, into, copy):
                        return Fetched(wanted, "pair", {self._publisher: self.layout.nbytes})
                    present = NOTHING  # part of another may have come
        return self._host.fetch(version, into, present, copy)

    def _try(self, wanted: Publication, into: State, copy: Copy) -> bool:
        """Whether it came whole; if the pair is of no use, none is tried for a while."""
        try:
            return self._receive(wanted, into, copy)
        except LookupError as error:
            self._paused = time.monotonic() + _PAUSE_S
            self._leave()
            log.warning("weights come over tcp for %g s: %s", _PAUSE_S, error)
            return False
        except BaseException:
            self._leave()  # buckets that nobody takes are on their way
            raise

    def _receive(self, wanted: Publication, into: State, copy: Copy) -> bool:
        """Whether it came whole. LookupError: the pair is of no use."""
        publisher, number = self._host.origin(wanted)
        if publisher != self._publisher:
            return False
        if not self._begin(wanted.version, number):
            return False
        assert self._joined is not None, "the publication is on its way"
        client, group, pair = self._joined
        arriving = Arriving(self.layout, group)
        copy(into, arriving)
        arriving.rest()
        return _says_yes(client, Sent(pair))

    def _begin(self, version: int, number: int) -> bool:
        """Whether the publication is there, and follows."""
        if self._joined is not None:
            client, _, pair = self._joined
            try:
                return _says_yes(client, Send(pair, version, number))
            except HostSilent:
                raise
            except LookupError:  # it has ended
                self._leave()
        client, _, pair = self._join()
        return _says_yes(client, Send(pair, version, number))

    def _join(self) -> tuple[DataClient, PairGroup, int]:
        client, there = self._find()
        try:
            (content,) = client.ask(Join())
            pair, port = decode_joined(content)
            with breaking():
                store = dist.TCPStore(there, port, 2, is_master=False, timeout=timedelta(seconds=q.PAIR_S))
            self._joined = client, PairGroup(store, RECEIVER, self._device, self._address), pair
        except BaseException:
            client.close()
            raise
        log.info(
            "weights come from host %s to %s by a pair (%s)", self._publisher, self._device, means_of(self._device)
        )
        return self._joined

    def close(self) -> None:
        with self._turn:
            self._leave()

    def _leave(self) -> None:
        if self._joined is not None:
            (client, group, _), self._joined = self._joined, None
            client.close()
            group.close()


def _says_yes(client: DataClient, question: Send | Sent) -> bool:
    (content,) = client.ask(question)
    return bytes(content) == b"1"
