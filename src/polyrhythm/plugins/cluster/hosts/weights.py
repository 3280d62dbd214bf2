"""The weights channel of a run on several hosts: a version crosses to each host once, then its processes share it.

A process that needs a version asks the agent of its own host to bring it into the host's mirror, which is the memory of
`SharedWeights`, over the tree of hosts (`relay`); others wait for that, or find it there.

Invariant: a publication keeps the number that it has where it was published, so a version that was published again with
other content is fetched again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostSilent
from polyrhythm.plugins.cluster.hosts.relay import CopyProgress, decode_progress
from polyrhythm.runtime.memory.device_weights import DeviceWeights
from polyrhythm.runtime.memory.published import EMPTY, Traffic
from polyrhythm.runtime.memory.tensors import Copy, Device, State, Stream, copy_into
from polyrhythm.runtime.memory.weights import NOTHING, Fetched, Publication, SharedWeights
from polyrhythm.specs.weights import WeightsLayout

#: Times that a version is looked for which its publisher overwrites while it is fetched.
_TRIES = 20
#: Seconds without a further byte of any version after which the agent's copy is given up.
_STALLED_S = 60.0
_decode_held = msgspec.msgpack.Decoder(dict[int, int]).decode


class OtherHost:
    """A host that publishes. client: of its server."""

    def __init__(self, client: DataClient) -> None:
        self.name, self._client = client.host, client

    def held(self) -> Mapping[int, int]:
        (content,) = self._client.ask(q.Held())
        return _decode_held(content)


class Mirror(NamedTuple):
    """What processes of this host share of other hosts' publications. agent: a client of this host's own server, whose
    relay fills it; route: the hosts above this one by the publisher's name, with the endpoints of their servers."""

    memory: SharedWeights
    agent: DataClient
    route: Callable[[str], Sequence[tuple[str, str]]]

    def bring(self, publisher: str, publication: Publication) -> CopyProgress:
        """Wait until the publication is in the mirror, or gone. LookupError: it cannot be had. HostSilent: nothing
        comes."""
        asked = q.Bring(q.Relayed(publication.version, publication.number, self.route(publisher)))
        received, came, first = -1, time.monotonic(), False
        while True:
            (content,) = self.agent.ask(asked)
            found = decode_progress(content)
            first |= found.first
            if found.number or found.gone:
                return found._replace(first=first)
            now = time.monotonic()
            if found.received > received:
                received, came = found.received, now
            elif now > came + _STALLED_S:
                raise HostSilent(f"nothing of version {publication.version} has come for {_STALLED_S:g} s")


class _Source(NamedTuple):
    """A publication, and which of the publishers has it."""

    publisher: int
    publication: Publication


class _Local(NamedTuple):
    """A publication on this host. number: in that memory; progress: how it came there, None if it was published
    there."""

    memory: SharedWeights | DeviceWeights
    number: int
    progress: CopyProgress | None


class HostWeights:
    """One process's end. own: what is published on this host, None if nothing is; others: the other publishers. What
    they have published comes by `tcp` to the first process of the host that asks for it, and by `host` to others."""

    fetches = True

    def __init__(self, own: SharedWeights | DeviceWeights | None, others: Sequence[DataClient], mirror: Mirror) -> None:
        self.layout: WeightsLayout = mirror.memory.layout
        self.traffic: Traffic = own.traffic if own is not None else Traffic()
        self._own, self._others, self._mirror = own, [OtherHost(client) for client in others], mirror
        self._publishers: list[SharedWeights | DeviceWeights | OtherHost] = [
            *([own] if own is not None else []),
            *self._others,
        ]

    @property
    def shared(self) -> SharedWeights | None:
        return self._own.shared if self._own is not None else None

    @property
    def newest(self) -> int:
        return max((version for publisher in self._publishers for version in publisher.held()), default=EMPTY)

    def publish(self, version: int, state: State | Stream) -> None:
        assert self._own is not None, "nothing is published on this host"
        self._own.publish(version, state)

    def find(self, version: int) -> Publication | None:
        for index, publisher in enumerate(self._publishers):
            if (number := publisher.held().get(version)) is not None:
                return self._signed(index, Publication(version, number))
        return None

    def origin(self, publication: Publication) -> tuple[str, int]:
        """The host that has published it, "" for this one, and its number there."""
        number, index = divmod(publication.number, len(self._publishers))
        publisher = self._publishers[index]
        return (publisher.name if isinstance(publisher, OtherHost) else ""), number

    def _signed(self, index: int, publication: Publication) -> Publication:
        """With a number that no other publisher gives."""
        return publication._replace(number=publication.number * len(self._publishers) + index)

    def lies_on(self, device: Device) -> bool:
        return device.type == "cpu" or (self._own is not None and self._own.lies_on(device))

    def fetch(self, version: int, into: State, present: Publication = NOTHING, copy: Copy = copy_into) -> Fetched:
        for _ in range(_TRIES):
            source = self._look_for(version)
            found = self._signed(*source)
            if found == present:
                return Fetched(found, None)
            if (local := self._bring(source)) is None:
                continue
            memory, number, progress = local
            taken = memory.fetch(source.publication.version, into, copy=copy)
            if taken.publication.number == number:
                if progress is None or not progress.first:
                    return Fetched(found, taken.way)
                return Fetched(found, "tcp", progress.sources)
            present = NOTHING  # another has come
        raise self._overwritten(version)

    def read(self, version: int | None = None) -> tuple[int, State]:
        for _ in range(_TRIES):
            source = self._look_for(EMPTY if version is None else version)
            if (local := self._bring(source)) is not None:
                held, state = local.memory.read(source.publication.version)
                if held == source.publication.version:
                    return held, state
        raise self._overwritten(version)

    def _overwritten(self, version: int | None) -> RuntimeError:
        return RuntimeError(f"version {version} and those after it were overwritten {_TRIES} times while fetched")

    def _look_for(self, version: int) -> _Source:
        newest = _Source(-1, NOTHING)
        for index, publisher in enumerate(self._publishers):
            held = publisher.held()
            if version != EMPTY and version in held:
                return _Source(index, Publication(version, held[version]))
            if held and max(held) > newest.publication.version:
                newest = _Source(index, Publication(max(held), held[max(held)]))
        assert newest.publisher >= 0, "nothing was published"
        return newest

    def _bring(self, source: _Source) -> _Local | None:
        """Where this host has it; None if it is gone. LookupError: it cannot be had, twice."""
        other, publication = source.publisher - (self._own is not None), source.publication
        if other < 0:
            assert self._own is not None
            return _Local(self._own, publication.number, None)
        publisher = self._others[other].name
        try:
            progress = self._mirror.bring(publisher, publication)
        except HostSilent:
            raise
        except LookupError:  # a connection that has ended is made anew
            progress = self._mirror.bring(publisher, publication)
        return None if progress.gone else _Local(self._mirror.memory, progress.number, progress)
