"""Requests and samples of an arena as pieces to send, and back; each piece is one array, or its rows where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.plugins.cluster.hosts.questions import PART_BYTES
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView

Piece = NDArray[Any]
#: A piece, or the rows of which it consists, where they lie.
Sent = Piece | list[Piece]
Received = bytes | memoryview
#: Bytes of an entry that is not copied before it is sent.
_LARGE = 2**14


def pieces_of_request(arena: Arena, slot: str, rows: int) -> Iterator[Sent]:
    """Noise keys, greedy flags, then the observations by name. A slot that has abandoned its request may name any
    entry; clipping keeps the index valid."""
    view = arena.view(slot, rows)
    yield view.noise_key.copy()
    yield view.greedy
    for array in arena.obs.values():
        yield _rows(array, view.entries)


def request_of(layout: ArenaLayout, rows: int, received: Sequence[Received]) -> RequestView:
    """The request whose pieces these are, over their memory. ValueError: they do not fit."""
    noise_key, greedy, *others = received
    obs = {
        name: _as_array(piece, np.dtype(spec.dtype), (rows, *spec.shape))
        for (name, spec), piece in zip(layout.obs.items(), others, strict=True)
    }
    keys, flags = _as_array(noise_key, np.dtype(np.int64), (rows,)), _as_array(greedy, np.dtype(bool), (rows,))
    return RequestView(np.zeros(rows, np.int64), keys, flags, obs)


def write_request(arena: Arena, slot: str, entries: NDArray[np.int64], request: RequestView) -> None:
    """Write a request's observations to these entries of this arena, and post it."""
    assert request.obs is not None, "it came with its observations"
    for name, array in request.obs.items():
        arena.obs[name][entries] = array
    arena.post(slot, request._replace(entries=entries))


def pieces_of_rest(arena: Arena, block: int) -> Iterator[Piece]:
    """Parts of a finished sample that only its host has: rewards, flags of executed actions, the last observation."""
    steps, layout = int(arena.head[block, 0]), arena.layout
    for array in (arena.rewards, arena.valid):
        yield np.ascontiguousarray(array[layout.block(block, steps)])
    last = block + steps * layout.blocks
    yield from (array[last : last + 1] for array in arena.obs.values())


def write_rest(
    arena: Arena,
    block: int,
    steps: int,
    received: Sequence[Received],
    check: Callable[[dict[str, Piece]], None] = lambda _: None,
) -> None:
    """Write the pieces of `pieces_of_rest` to a block that has the sample's other parts. steps: of the sample; check:
    called with the arrays by name before they are written. ValueError: they do not fit."""
    part, last = arena.layout.block(block, steps), block + steps * arena.layout.blocks
    places = [("reward", arena.rewards, part), ("valid", arena.valid, part)]
    places += [(name, array, slice(last, last + 1)) for name, array in arena.obs.items()]
    found = _fitting([(array, entries) for _, array, entries in places], received)
    check({name: piece for (name, _, _), piece in zip(places, found, strict=True)})
    if not found[1][:, 0].all():
        raise ValueError("a step without an action")
    for (_, array, entries), piece in zip(places, found, strict=True):
        array[entries] = piece


def entries_at_a_time(layout: ArenaLayout) -> int:
    """Entries of a sample that are sent in one answer: `PART_BYTES` of them, or one if that is larger."""
    entry = layout.answer_dtype.itemsize + layout.chunk * 5 + sum(spec.nbytes for spec in layout.obs.values())
    return max(1, PART_BYTES // entry)


def pieces_of_sample(arena: Arena, block: int, begin: int, count: int, *, obs: bool = True) -> Iterator[Sent]:
    """The block's head, then `count` of the entries that the sample fills, from `begin` on, with or without its
    observations. LookupError: it holds no finished sample, or none that long."""
    head = arena.head[block].copy()
    steps = int(head[0])
    if not 0 < steps <= arena.layout.steps:
        raise LookupError(f"block {block} holds no finished sample")
    if not (0 <= begin <= steps and 0 < count <= entries_at_a_time(arena.layout)):
        raise LookupError(f"there are no {count} entries from {begin} on of a sample of {steps} steps")
    yield head
    for array, entries in _parts(arena, block, steps, slice(begin, begin + count), obs=obs):
        yield _rows(array, np.arange(entries.start, entries.stop, entries.step))


def write_part(arena: Arena, block: int, begin: int, received: Sequence[Received], *, obs: bool = True) -> Piece:
    """Write what `pieces_of_sample` gave to the same block of this host's arena, but for the head, which this returns:
    it is written once all parts are. ValueError: it does not fit."""
    head = _as_array(received[0] if received else b"", arena.head.dtype, arena.head.shape[1:])
    steps = int(head[0])
    if not 0 < steps <= arena.layout.steps:
        raise ValueError(f"a sample of {steps} steps; at most {arena.layout.steps} are possible")
    part = slice(begin, begin + entries_at_a_time(arena.layout))
    places = list(_parts(arena, block, steps, part, obs=obs))
    for (array, entries), piece in zip(places, _fitting(places, received[1:]), strict=True):
        array[entries] = piece
    return head


def largest_answer(layout: ArenaLayout) -> int:
    """Bytes of the largest piece: an array of one entry, or of one request."""
    rows = max([1, *layout.slots.values()])
    sizes = (spec.nbytes for spec in layout.obs.values())
    return rows * max([8, layout.answer_dtype.itemsize, layout.chunk * 4, *sizes])


def _rows(array: Piece, entries: NDArray[np.int64]) -> Sent:
    """These entries: where they lie if each is large, so that they are read once; otherwise a copy."""
    if array[:1].nbytes < _LARGE:
        return array.take(entries, 0, mode="clip")
    return [array[entry] for entry in entries.clip(0, len(array) - 1)]


def _parts(arena: Arena, block: int, steps: int, part: slice, *, obs: bool) -> Iterator[tuple[Piece, slice]]:
    """Each array with these entries of a sample, as far as it has them."""
    blocks = arena.layout.blocks

    def places(entries: int) -> slice:
        begin, stop = min(part.start, entries), min(part.stop, entries)
        return slice(block + begin * blocks, block + stop * blocks, blocks)

    yield from ((array, places(steps)) for array in (arena.answers, arena.rewards, arena.valid))
    if obs:
        yield from ((array, places(steps + 1)) for array in arena.obs.values())


def _fitting(places: Sequence[tuple[Piece, slice]], received: Sequence[Received]) -> list[Piece]:
    """Each piece as entries of its array. ValueError: one does not fit."""
    return [
        _as_array(piece, array.dtype, array[entries].shape)
        for (array, entries), piece in zip(places, received, strict=True)
    ]


def _as_array(piece: Received, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Piece:
    if dtype == np.bool_ and np.frombuffer(piece, np.uint8).max(initial=0) > 1:
        raise ValueError("a flag that is neither true nor false")
    array: Piece = np.frombuffer(piece, dtype).reshape(shape)
    return array
