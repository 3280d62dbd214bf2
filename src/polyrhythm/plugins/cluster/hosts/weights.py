"""The weights channel of a run on several hosts: a version crosses to each host once, then its processes share it.

Whoever needs a version first copies it from the host where it was published into this host's mirror, which is the
memory of `SharedWeights`; the others wait for that, or find it there.

Invariant: a publication keeps the number that it has where it was published, so a version that was published again with
other content is fetched again.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.runtime.memory.published import EMPTY, Traffic, lock_file
from polyrhythm.runtime.memory.tensors import Copy, Device, State, Stream, copy_into
from polyrhythm.runtime.memory.weights import NOTHING, Fetched, Publication, SharedWeights
from polyrhythm.specs.weights import WeightsLayout

#: Times that a version is looked for which its publisher overwrites while it is fetched.
_TRIES = 20
_decode_held = msgspec.msgpack.Decoder(dict[int, int]).decode
_decode_known = msgspec.msgpack.Decoder(dict[int, tuple[int, int]]).decode


class OtherHost:
    def __init__(self, client: DataClient) -> None:
        self._client = client

    def held(self) -> Mapping[int, int]:
        (content,) = self._client.ask(q.Held())
        return _decode_held(content)

    def copy(self, publication: Publication, memory: memoryview) -> None:
        """Receive its bytes into this memory. LookupError: it is gone."""
        version, number = publication
        parts = [memory[begin : begin + q.PART_BYTES] for begin in range(0, len(memory), q.PART_BYTES)]
        questions = (q.Part(version, number, index * q.PART_BYTES, len(part)) for index, part in enumerate(parts))
        coming = iter(parts)

        def place(before: Sequence[memoryview], size: int) -> Sequence[memoryview] | None:  # noqa: ARG001
            return None if before else [next(coming)]

        for answer in self._client.ask_all(questions, q.AHEAD, place):
            if not answer or bytes(answer[-1]) != b"1":
                raise LookupError(f"version {version} is gone")


class _Source(NamedTuple):
    """A publication, and which of the publishers has it."""

    publisher: int
    publication: Publication


class HostWeights:
    """One process's end. own: what is published on this host, None if nothing is; others: the other publishers; mirror,
    folder: of this host, with the locks; by which way a version came is `tcp` for the one that copied it."""

    fetches = True

    def __init__(
        self, own: SharedWeights | None, others: Sequence[DataClient], mirror: SharedWeights, folder: Path
    ) -> None:
        self.layout: WeightsLayout = mirror.layout
        self.traffic: Traffic = own.traffic if own is not None else Traffic()
        self._own, self._others, self._mirror = own, [OtherHost(client) for client in others], mirror
        self._publishers: list[SharedWeights | OtherHost] = [*([own] if own is not None else []), *self._others]
        self._turn, self._known = folder / "mirror.lock", folder / "mirror.known"

    @property
    def shared(self) -> SharedWeights | None:
        return self._own

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

    def _signed(self, index: int, publication: Publication) -> Publication:
        """With a number that no other publisher gives."""
        return publication._replace(number=publication.number * len(self._publishers) + index)

    def lies_on(self, device: Device) -> bool:
        return device.type == "cpu"

    def fetch(self, version: int, into: State, present: Publication = NOTHING, copy: Copy = copy_into) -> Fetched:
        for _ in range(_TRIES):
            source = self._look_for(version)
            found = self._signed(*source)
            if found == present:
                return Fetched(found, None)
            local, moved = self._bring(source)
            if local is None:
                continue
            taken = local.fetch(source.publication.version, into, copy=copy).publication
            identity = source.publisher, source.publication.number
            if local is self._own:
                unchanged = taken == source.publication
            else:
                unchanged = self._read_known().get(taken.number) == identity
            if unchanged:
                return Fetched(found, "tcp" if moved else "host")
        raise self._overwritten(version)

    def read(self, version: int | None = None) -> tuple[int, State]:
        for _ in range(_TRIES):
            source = self._look_for(EMPTY if version is None else version)
            local, _ = self._bring(source)
            if local is not None:
                held, state = local.read(source.publication.version)
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

    def _bring(self, source: _Source) -> tuple[SharedWeights | None, bool]:
        """The memory of this host that has it, None if it is gone; whether it was copied just now."""
        other = source.publisher - (self._own is not None)
        if other < 0:
            return self._own, False
        with lock_file(self._turn, fcntl.LOCK_EX):
            known = self._read_known()
            held = self._mirror.held()
            if any(known.get(held[v]) == (source.publisher, source.publication.number) for v in held):
                return self._mirror, False
            copy = partial(self._others[other].copy, source.publication)
            try:
                self._mirror.publish_bytes(source.publication.version, copy)
            except LookupError:
                return None, False
            held = self._mirror.held()
            known[held[source.publication.version]] = (source.publisher, source.publication.number)
            kept = {number: identity for number, identity in known.items() if number in held.values()}
            part = self._known.with_suffix(".part")
            part.write_bytes(msgspec.msgpack.encode(kept))
            part.replace(self._known)
        return self._mirror, True

    def _read_known(self) -> dict[int, tuple[int, int]]:
        """Whose publication each number of the mirror is."""
        return _decode_known(self._known.read_bytes()) if self._known.exists() else {}
