"""What a policy's frozen part computes of an update's observations: once per chunk step, not once per epoch.

The arrays join the batch's observations, so that every pass of the update finds them there: the recomputed proximal
log-probs, the reference policy, and all epochs. Final observations are evaluated once in an update anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from polyrhythm.policies.base import extended
from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.batch import Arrays, PackedBatch, slices
from polyrhythm.training.targets import TargetInputs, passes


@torch.no_grad()
def with_precomputed(packed: PackedBatch, inputs: TargetInputs, *, limit_mib: int) -> PackedBatch:
    """The batch with what `policy.precompute` gives among its observations; as it is if that is nothing.

    The arrays stay on the policy's device if they take at most `limit_mib`, else they are in host memory. ValueError: a
    name is taken, or rows are missing.
    """
    policy, device = inputs.policy, inputs.device
    if not policy_traits(policy).precomputes:
        return packed
    policy = extended(policy)
    rows = packed.chunk_steps
    found: Arrays = {}
    for own in passes(rows, inputs.micro_batch, inputs.ranks):
        some = policy.precompute(slices(packed.obs, own if own.start < rows else slice(0, 1), device))
        if not some:
            return packed
        if own.start >= rows:
            continue
        if not found:
            _check(some, packed, min(own.stop, rows))
            fits = rows * sum(x[0].nbytes for x in some.values()) <= limit_mib * 2**20
            found = {name: _room(x, rows, on_device=fits) for name, x in some.items()}
        for name, x in some.items():
            found[name][own].copy_(x, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # copies to the host that are under way
    return replace(packed, obs={**packed.obs, **found})


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
