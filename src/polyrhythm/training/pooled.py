"""Rows of precomputed arrays where they lie: in a pool of what generators lend, or in memory of the trainer's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class LentRows(Protocol):
    """A pool. arrays: name → [slots, ...] on the trainer's device; nbytes: of all."""

    @property
    def arrays(self) -> Mapping[str, Tensor]: ...

    @property
    def nbytes(self) -> int: ...

    def holds(self, entries: NDArray[np.int64], digests: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each entry's slot, of the same number, has what was computed from an observation of this digest."""


class PrefixSource(Protocol):
    """Where generators lend prefixes."""

    def find(self) -> LentRows | None:
        """The pool on this device, of the trainer's own frozen tensors; None if there is none."""


class PooledRows:
    """Stands for a tensor [N, ...] among observations: row i is row places[i] of `pool`, or where that is negative row
    -1 - places[i] of `own`. places [N] int64, on the host; own may be in host memory. The rows that are read are
    copied, to the pool's device."""

    def __init__(self, pool: Tensor, own: Tensor, places: Tensor) -> None:
        self.pool, self.own, self.places, self.device = pool, own, places, places.device

    def __len__(self) -> int:
        return len(self.places)

    @property
    def lent(self) -> int:
        """Number of rows in the pool."""
        return int((self.places >= 0).sum())

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        assert dim == 0
        return self._read(self.places.index_select(0, index))

    def __getitem__(self, rows: slice) -> Tensor:
        return self._read(self.places[rows])

    def isfinite(self) -> Tensor:
        """Whether each row is finite, [N]; row by row, as all together may not fit in memory."""
        return torch.tensor([bool(self[row : row + 1].isfinite().all()) for row in range(len(self))])

    def _read(self, places: Tensor) -> Tensor:
        device = self.pool.device
        lent = places >= 0
        if lent.all():
            return self.pool.index_select(0, places.to(device))
        out = self.pool.new_empty(len(places), *self.pool.shape[1:])
        at = lent.nonzero().squeeze(1)
        out[at.to(device)] = self.pool.index_select(0, places[at].to(device))
        at = (~lent).nonzero().squeeze(1)
        out[at.to(device)] = self.own.index_select(0, (-1 - places[at]).to(self.own.device)).to(device)
        return out


def join_pooled(parts: Sequence[PooledRows]) -> PooledRows:
    """The rows of all parts, in order; they have one pool."""
    before, places = 0, []
    for part in parts:
        places.append(torch.where(part.places < 0, part.places - before, part.places))
        before += len(part.own)
    device = torch.device("cpu") if any(part.own.is_cpu for part in parts) else parts[0].own.device
    return PooledRows(parts[0].pool, torch.cat([part.own.to(device) for part in parts]), torch.cat(places))
