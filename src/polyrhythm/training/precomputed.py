"""What a policy's frozen parts give for the chunk steps of an update: lent by generators, or computed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.algorithms.sums import Total
from polyrhythm.policies.base import extended
from polyrhythm.policies.traits import policy_traits
from polyrhythm.specs.hashing import row_digests
from polyrhythm.training.batch import Arrays, MicroBatchLimits, PackedBatch
from polyrhythm.training.pooled import LentRows, Places, PooledRows, PrefixSource
from polyrhythm.training.steps import Metrics
from polyrhythm.training.targets import TargetInputs, as_many_on_every_rank

_LENT = "train/actor/lent_fraction"


@torch.no_grad()
def with_precomputed(
    packed: PackedBatch,
    inputs: TargetInputs,
    *,
    limit_mib: int,
    share: float = 1.0,
    prefixes: PrefixSource | None = None,
) -> PackedBatch:
    """The batch with the output of `policy.precompute` as its observations, beside those that the policy then still
    reads (the trait `beside_precomputed`); unchanged if that is empty.

    Rows that generators have lent stay where they are, in the pool of `prefixes`. The others are computed, and stay on
    the policy's device if they take at most their `share` of what the pool leaves of `limit_mib`, else they are in host
    memory. ValueError: a name is taken, or rows are missing.
    """
    if not policy_traits(inputs.policy).precomputes:
        return packed
    pool = prefixes.find() if prefixes is not None and packed.entries is not None else None
    lent = torch.from_numpy(_lent(packed, pool)) if pool is not None else torch.zeros(packed.chunk_steps).bool()
    missing = (~lent).nonzero().squeeze(1)
    room = limit_mib * 2**20 - (pool.nbytes if pool is not None else 0)
    own = _compute(packed, inputs, missing, int(share * room))
    if pool is None and own is None:
        return packed
    read = policy_traits(inputs.policy).beside_precomputed
    beside = {name: x for name, x in packed.obs.items() if read is None or name in read}
    if pool is None:
        return replace(packed, obs={**beside, **(own or {})})
    assert packed.entries is not None
    at = torch.where(lent, packed.entries, 0)
    at[missing] = -1 - torch.arange(len(missing))
    places = Places(at, len(missing))
    found = {name: PooledRows(x, own[name] if own else x[:0], places) for name, x in pool.arrays.items()}
    return replace(packed, obs={**beside, **cast(Arrays, found)})


def lent_metrics(packed: PackedBatch, total: Total) -> Metrics:
    """Share of the chunk steps whose precomputed arrays were lent."""
    pooled = next((x for x in cast(Mapping[str, object], packed.obs).values() if isinstance(x, PooledRows)), None)
    lent, rows = total(torch.tensor([pooled.lent if pooled is not None else 0, packed.chunk_steps]).double()).tolist()
    return {_LENT: lent / rows}


def _lent(packed: PackedBatch, pool: LentRows) -> NDArray[np.bool_]:
    assert packed.entries is not None
    digests = row_digests({name: x.numpy() for name, x in packed.obs.items()})
    return pool.holds(packed.entries.numpy(), digests)


def _compute(packed: PackedBatch, inputs: TargetInputs, rows: Tensor, room: int) -> Arrays | None:
    """`policy.precompute` of these rows [n], in order; None if it gives nothing, or there are no rows on any rank.
    room: bytes for it on the policy's device."""
    policy, device = extended(inputs.policy), inputs.device
    found: Arrays = {}
    sizes = MicroBatchLimits(inputs.policy, inputs.micro_batch).sizes(len(rows), {}, {})
    for part, counts in as_many_on_every_rank(sizes, inputs.ranks):
        index = rows[part] if counts else torch.zeros(1, dtype=torch.int64)
        some = policy.precompute({name: x.index_select(0, index).to(device) for name, x in packed.obs.items()})
        if not some:
            return None
        if not counts:
            continue
        if not found:
            _check(some, packed, part.stop)
            fits = len(rows) * sum(x[0].nbytes for x in some.values()) <= room
            found = {name: _room(x, len(rows), on_device=fits) for name, x in some.items()}
        for name, x in some.items():
            found[name][part].copy_(x, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies to the host that are under way
    return found or None


def _room(x: Tensor, rows: int, *, on_device: bool) -> Tensor:
    """Memory for `rows` rows like those of `x`; pinned if it is host memory for a GPU."""
    shape = (rows, *x.shape[1:])
    if on_device or not x.is_cuda:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    return torch.empty(shape, dtype=x.dtype, pin_memory=True)


def _check(some: Mapping[str, Tensor], packed: PackedBatch, rows: int) -> None:
    for name, x in some.items():
        if name in packed.obs:
            raise ValueError(f"policy.precompute gives {name!r}, which the observation has; give it another name")
        if x.dim() < 1 or len(x) != rows:
            raise ValueError(f"policy.precompute gives {name!r} {list(x.shape)} for {rows} rows; put the rows first")
