"""Counter-based noise: a row's draws depend on its key alone, not on other rows or the global generator.

    word[b, i] = mix(key[b] xor mix(stream, i))      (`polyrhythm.specs.hashing.mix`, the same bits in int64 torch)
    uniform    = (top 23 bits of the word + ½) / 2^23, exact in float32, never 0 or 1

Words and uniforms have the same bits on CPU and GPU. `normal` uses log, cos and sin, whose last bits differ between
devices and torch versions: equal to about 1e-6, not bit-equal. Draw i of a stream does not depend on the number of
draws.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyrhythm.policies.constants import kept
from polyrhythm.specs.hashing import FIRST_MULTIPLIER, GOLDEN, SECOND_MULTIPLIER, mix

_UNIFORM_BITS = 23
_SCALE = 2.0**-_UNIFORM_BITS


def _signed(word: int) -> int:
    """64 bits as a two's complement integer, because torch has no uint64 arithmetic."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN, _FIRST, _SECOND = _signed(GOLDEN), _signed(FIRST_MULTIPLIER), _signed(SECOND_MULTIPLIER)


def mix_tensor(values: Tensor) -> Tensor:
    """`mix(value)` of each int64 entry: int64 in 0..2^63-1. Arithmetic wraps, right shifts are masked."""
    z = values ^ _GOLDEN
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_FIRST)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_SECOND)
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    return z.bitwise_and_((1 << 63) - 1)


@kept
def _counters(n: int, stream: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([mix(stream, i) for i in range(n)], dtype=torch.int64, device=device)


def words(keys: Tensor, n: int, stream: int = 0) -> Tensor:
    """n hash words per key: keys [B] int64 -> [B,n] int64 in 0..2^63-1. Streams of one key are independent."""
    return mix_tensor(keys.unsqueeze(1) ^ _counters(n, stream, keys.device))


def uniform(keys: Tensor, n: int, stream: int = 0) -> Tensor:
    """Uniform noise in the open interval (0,1): keys [B] int64 -> [B,n] float32, a multiple of 2^-24."""
    return (words(keys, n, stream) >> (63 - _UNIFORM_BITS)).to(torch.float32).add_(0.5).mul_(_SCALE)


def uniform_at(keys: Tensor, draws: Tensor, n: int, stream: int = 0) -> Tensor:
    """One draw of `uniform(keys, n, stream)` per key, at index `draws` [B] int64 below n: [B] float32."""
    word = mix_tensor(keys ^ _counters(n, stream, keys.device)[draws])
    return (word >> (63 - _UNIFORM_BITS)).to(torch.float32).add_(0.5).mul_(_SCALE)


class UniformStream:
    """The draws of `uniform` for one key, one at a time, computed on the CPU in blocks."""

    __slots__ = ("_first", "_key", "_values")
    _AHEAD = 64

    def __init__(self, key: int) -> None:
        self._key, self._first = key, 0
        self._values: list[float] = []

    def at(self, draw: int) -> float:
        place = draw - self._first
        if not 0 <= place < len(self._values):
            self._first, place = draw - draw % self._AHEAD, draw % self._AHEAD
            draws = torch.arange(self._first, self._first + self._AHEAD)
            few = 1 << (self._first + self._AHEAD).bit_length()  # bounds the number of cached tables
            self._values = uniform_at(torch.full_like(draws, self._key), draws, few).tolist()
        return self._values[place]


def normal(keys: Tensor, n: int, stream: int = 0) -> Tensor:
    """Standard normal noise by Box-Muller: keys [B] int64 -> [B,n] float32, within ±5.8."""
    pairs = uniform(keys, n + n % 2, stream).unflatten(1, (-1, 2))
    radius = pairs[..., 0].log().mul_(-2.0).sqrt_()
    angle = pairs[..., 1] * (2.0 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(1)[:, :n]


def content_keys(rows: Tensor) -> Tensor:
    """A key for each row from its bits alone: rows [B,...] -> [B] int64. Equal rows have equal keys."""
    bits = rows.detach().float().flatten(1).contiguous().view(torch.int32).long()
    counted = mix_tensor(bits ^ _counters(bits.shape[1], 0, bits.device))
    return mix_tensor(counted.sum(1))
