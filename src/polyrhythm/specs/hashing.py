"""Counter-based hashing: 63 pseudo-random bits from a few integers, the same on every platform.

Seeds and noise keys are such hashes, never draws of a stateful generator, so a row's noise depends only on its ticket
and step: not on the other rows of its batch, the attempt, or the process.

`mix` on Python integers and `mix_array` in numpy agree bit for bit; so does `polyrhythm.policies.noise` in torch.
Each part is mixed in by the finalizer of splitmix64 (Steele, Lea, Flood 2014; constants of Stafford's "Mix13"):

    h ← 0;  for each part p:  h ← finalize((h + GOLDEN) xor p)  mod 2^64;  result: the low 63 bits of h
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
SECOND_MULTIPLIER = 0x94D049BB133111EB
MASK_63 = (1 << 63) - 1
#: Bit of an episode's seed that is set in evaluations and clear in training.
HELD_OUT = 1 << 62
_MASK_64 = (1 << 64) - 1


def _finalize(z: int) -> int:
    z = ((z ^ (z >> 30)) * FIRST_MULTIPLIER) & _MASK_64
    z = ((z ^ (z >> 27)) * SECOND_MULTIPLIER) & _MASK_64
    return z ^ (z >> 31)


def mix(*parts: int) -> int:
    """Hash of the parts, in order, in 0..2^63-1. A part counts modulo 2^64, so negative ones are allowed.

    >>> mix(7, 0) == mix(7, 0), mix(7, 0) == mix(7, 1), mix(7, 1) == mix(1, 7)
    (True, False, False)
    """
    h = 0
    for part in parts:
        h = _finalize(((h + GOLDEN) ^ part) & _MASK_64)
    return h & MASK_63


def split_seed(seed: int, *, held_out: bool) -> int:
    """The seed with its `HELD_OUT` bit set or cleared, so that evaluations and training share no episode."""
    return seed | HELD_OUT if held_out else seed & ~HELD_OUT


def seed_in_state(seed: int, state: int, states: int) -> int:
    """A seed congruent to `state` modulo `states`, so its episode begins in that initial state; keeps `HELD_OUT`."""
    high = seed | 1 << 61  # so that the subtraction does not change HELD_OUT
    return high - (high - state) % states


def library_seed(seed: int) -> int:
    """An episode's seed in 0..2^31-1, as libraries take it: numpy's `RandomState` has 32 bits, much C code 31.

    A seed below 2^30 is itself, others are hashed; bit 30 is the `HELD_OUT` bit, so evaluations stay apart from
    training. Two of n seeds of one side coincide with probability about n²/2^31: 0.0005 for 1,000 episodes of an
    evaluation. Of a million in training about 470 pairs begin alike.
    """
    low = seed if seed < 1 << 30 else mix(seed & ~HELD_OUT) & ((1 << 30) - 1)
    return low | (seed & HELD_OUT) >> 32


def mix_array(keys: NDArray[np.int64], step: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """`mix(key, step)` for each pair of the broadcast arrays, as int64: the noise key per row."""
    h = _fold(np.zeros((), np.uint64), np.asarray(keys, np.int64))
    h = _fold(h, np.asarray(step, np.int64))
    return (h & np.uint64(MASK_63)).astype(np.int64)


def _fold(h: NDArray[np.uint64], part: NDArray[np.int64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = (h + np.uint64(GOLDEN)) ^ part.astype(np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST_MULTIPLIER)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND_MULTIPLIER)
        folded: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return folded


def row_digests(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """A checksum of each row of these arrays [n, ...] together, [n] from 1 on: equal rows have equal ones."""
    named = [(name, np.ascontiguousarray(array)) for name, array in sorted(arrays.items())]
    seed = zlib.crc32(repr([(name, array.dtype.str, array.shape[1:]) for name, array in named]).encode())
    found = np.empty(min(len(array) for _, array in named), np.int64)
    for row in range(len(found)):
        digest = seed
        for _, array in named:
            digest = zlib.crc32(array[row : row + 1].data, digest)
        found[row] = digest + 1
    return found
