"""Rows of precomputed arrays where they lie: in a pool of what generators lend, or in memory of the trainer's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

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


class _Sent(NamedTuple):
    """Places of some rows on the devices that read them. pooled, own: rows of the pool and of the trainer's own;
    to_pooled, to_own: where these are among the rows; None if all are of the pool."""

    pooled: Tensor
    own: Tensor
    to_pooled: Tensor | None
    to_own: Tensor


class Places:
    """Where N rows of several arrays are: row i is row at[i] of the pool, or where that is negative row -1 - at[i] of
    the trainer's own `own_rows`. at [N] int64, on the host. The arrays ask alike, one after another, so the last answer
    of each method is kept."""

    def __init__(self, at: Tensor, own_rows: int) -> None:
        self.at, self.own_rows = at, own_rows
        self._selected: tuple[Tensor, Places] | None = None
        self._joined: tuple[tuple[Places, ...], Places] | None = None
        self._sent: tuple[tuple[slice, torch.device, torch.device], _Sent] | None = None

    def select(self, index: Tensor) -> Places:
        if self._selected is None or self._selected[0] is not index:
            self._selected = index, Places(self.at.index_select(0, index), self.own_rows)
        return self._selected[1]

    def join(self, *others: Places) -> Places:
        """The places of all parts, in order, with the own rows of all."""
        if self._joined is None or list(map(id, self._joined[0])) != list(map(id, others)):
            before, found = 0, list[Tensor]()
            for part in (self, *others):
                found.append(torch.where(part.at < 0, part.at - before, part.at))
                before += part.own_rows
            self._joined = others, Places(torch.cat(found), before)
        return self._joined[1]

    def sent(self, rows: slice, device: torch.device, own_device: torch.device) -> _Sent:
        """Those of these rows, on the pool's device and on that of the own rows."""
        asked = rows, device, own_device
        if self._sent is None or self._sent[0] != asked:
            at = self.at[rows]
            lent = at >= 0
            to_pooled, to_own = (x.nonzero().squeeze(1) for x in (lent, ~lent))
            own = _sent(-1 - at[to_own], own_device)
            if len(to_own):
                found = _Sent(_sent(at[to_pooled], device), own, _sent(to_pooled, device), _sent(to_own, device))
            else:
                found = _Sent(_sent(at, device), own, None, to_own)
            self._sent = asked, found
        return self._sent[1]


def _sent(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


class PooledRows:
    """Stands for a tensor [N, ...] among observations, whose rows are in `pool` and `own` by `places`, which all arrays
    of the observations share; own may be in host memory. A slice is a tensor, copied, on the pool's device; what
    `index_select` gives still stands for one."""

    def __init__(self, pool: Tensor, own: Tensor, places: Places) -> None:
        self.pool, self.own, self.places, self.device = pool, own, places, places.at.device

    def __len__(self) -> int:
        return len(self.places.at)

    @property
    def lent(self) -> int:
        """Number of rows in the pool."""
        return int((self.places.at >= 0).sum())

    def index_select(self, dim: int, index: Tensor) -> PooledRows:
        assert dim == 0
        return PooledRows(self.pool, self.own, self.places.select(index))

    def __getitem__(self, rows: slice) -> Tensor:
        pooled, own, to_pooled, to_own = self.places.sent(rows, self.pool.device, self.own.device)
        if to_pooled is None:
            return self.pool.index_select(0, pooled)
        out = self.pool.new_empty(len(to_pooled) + len(to_own), *self.pool.shape[1:])
        out[to_pooled] = self.pool.index_select(0, pooled)
        out[to_own] = self.own.index_select(0, own).to(out.device)
        return out

    def isfinite(self) -> Tensor:
        """Whether each row is finite, [N]; row by row, as all together may not fit in memory."""
        return torch.tensor([bool(self[row : row + 1].isfinite().all()) for row in range(len(self))])


def join_pooled(parts: Sequence[PooledRows]) -> PooledRows:
    """The rows of all parts, in order; they have one pool."""
    first, *others = parts
    device = torch.device("cpu") if any(part.own.is_cpu for part in parts) else first.own.device
    places = first.places.join(*(part.places for part in others))
    return PooledRows(first.pool, torch.cat([part.own.to(device) for part in parts]), places)
