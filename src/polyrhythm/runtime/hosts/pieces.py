"""Requests and samples of an arena as pieces to send, and back; each piece is one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView

Piece = NDArray[Any]
Received = bytes | memoryview


def pieces_of_request(arena: Arena, slot: str, rows: int) -> Iterator[Piece]:
    """Noise keys, greedy flags, then the observations by name. A slot that has abandoned its request may name any
    entry; clipping keeps the index valid."""
    view = arena.view(slot, rows)
    yield view.noise_key.copy()
    yield view.greedy
    for array in arena.obs.values():
        yield array.take(view.entries, 0, mode="clip")


def request_of(layout: ArenaLayout, rows: int, received: Sequence[Received]) -> RequestView:
    """The request whose pieces these are, over their memory. ValueError: they do not fit."""
    noise_key, greedy, *others = received
    obs = {
        name: _as_array(piece, np.dtype(spec.dtype), (rows, *spec.shape))
        for (name, spec), piece in zip(layout.obs.items(), others, strict=True)
    }
    keys, flags = _as_array(noise_key, np.dtype(np.int64), (rows,)), _as_array(greedy, np.dtype(bool), (rows,))
    return RequestView(np.zeros(rows, np.int64), keys, flags, obs)


def pieces_of_sample(arena: Arena, block: int) -> Iterator[Piece]:
    """The block's head, then the entries that the sample fills. LookupError: it holds no finished sample."""
    head = arena.head[block].copy()
    steps = int(head[0])
    if not 0 < steps <= arena.layout.steps:
        raise LookupError(f"block {block} holds no finished sample")
    yield head
    for array, entries in _parts(arena, block, steps):
        yield np.ascontiguousarray(array[entries])


def write_sample(arena: Arena, block: int, received: Sequence[Received]) -> None:
    """Write a sample into the same block of this host's arena, its head last. ValueError: it does not fit."""
    head = _as_array(received[0], arena.head.dtype, arena.head.shape[1:])
    steps = int(head[0])
    if not 0 < steps <= arena.layout.steps:
        raise ValueError(f"a sample of {steps} steps; at most {arena.layout.steps} are possible")
    parts = list(_parts(arena, block, steps))
    found = [
        _as_array(piece, array.dtype, array[entries].shape)
        for (array, entries), piece in zip(parts, received[1:], strict=True)
    ]
    for (array, entries), piece in zip(parts, found, strict=True):
        array[entries] = piece
    arena.head[block] = head


def largest_answer(layout: ArenaLayout) -> int:
    """Bytes of the largest piece: an array of one sample, or of one request."""
    rows = max([layout.entries, *layout.slots.values()])
    sizes = [int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize for spec in layout.obs.values()]
    return rows * max([8, layout.answer_dtype.itemsize, layout.chunk * 4, *sizes])


def _parts(arena: Arena, block: int, steps: int) -> Iterator[tuple[Piece, slice]]:
    layout = arena.layout
    part, shown = layout.block(block, steps), layout.block(block, steps + 1)
    yield from ((arena.answers, part), (arena.rewards, part), (arena.valid, part))
    yield from ((array, shown) for array in arena.obs.values())


def _as_array(piece: Received, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Piece:
    array: Piece = np.frombuffer(piece, dtype).reshape(shape)
    return array
