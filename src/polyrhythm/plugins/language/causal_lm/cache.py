"""Keys and values of several sequences of different lengths, as the attention layers of transformers ask for them.

Rows 0..n-1 are in use, one sequence each, with the key of position p at p; no padding in front, so rows join and leave
without moving anything but the last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class SlotCache:
    """Room for `rows` sequences of `length` positions. `begin` and `advance` say what the next forward pass writes."""

    is_compileable = False

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._write: tuple[Any, ...] = ()
        self._read: tuple[slice, slice] | None = None

    def begin(self, rows: Tensor, positions: Tensor) -> None:
        """The next pass is of packed sequences from position 0 on: row and position of each token, [T] int64."""
        self._write, self._read = (rows, slice(None), positions), None

    def advance(self, positions: Tensor, longest: int) -> None:
        """The next pass is of one position each of the rows 0..n-1, at positions [n], and reads `longest` of them."""
        n = len(positions)
        self._write = (torch.arange(n, device=positions.device), slice(None), positions)
        self._read = (slice(n), slice(longest))

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values of a layer, [1,heads,T,d] or [n,heads,1,d]; return those to attend to."""
        if layer == len(self._keys):
            for made, like in ((self._keys, keys), (self._values, values)):
                made.append(like.new_zeros(self.rows, like.shape[1], self.length, like.shape[3]))
        own_keys, own_values = self._keys[layer], self._values[layer]
        if self._read is None:
            own_keys[self._write], own_values[self._write] = (x[0].transpose(0, 1) for x in (keys, values))
            return keys, values
        own_keys[self._write], own_values[self._write] = keys[:, :, 0], values[:, :, 0]
        rows, length = self._read
        return own_keys[rows, :, length], own_values[rows, :, length]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, from the first pass on."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of a row to others."""
        for tensor in (*self._keys, *self._values):
            tensor[list(targets), :, :length] = tensor[source, :, :length]

    def get_seq_length(self, layer: int = 0) -> int:  # noqa: ARG002 - transformers asks for it
        """Positions are given with every pass, so none are counted here."""
        return 0
