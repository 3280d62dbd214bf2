"""Actions as tokens: a row is one of the vocabulary's last `bins` rows, numbered from 0.

A larger id is a smaller action. The `bins` rows stand for the `bins - 1` intervals between `bins` equally spaced edges
of -1..1, so the first two rows stand for the same action (OpenVLA's convention).
"""

from __future__ import annotations

import torch
from torch import Tensor


def centres(bins: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The action for which each row stands, by row: [bins] on the CPU, in -1..1."""
    edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64, device="cpu")
    middles = (edges[:-1] + edges[1:]) / 2.0
    return middles[(bins - 1 - torch.arange(bins, device="cpu")).clamp(0, bins - 2)].to(dtype)


def rows_of(actions: Tensor, bins: int) -> Tensor:
    """The rows of actions in -1..1 (clipped to these): [...] -> int64 [...]. An action on an edge belongs to the
    interval above."""
    edges = torch.linspace(-1.0, 1.0, bins, dtype=actions.dtype, device=actions.device)
    return bins - torch.bucketize(actions.clamp(-1.0, 1.0), edges, right=True)


def rows_of_ids(ids: Tensor, first: int, bins: int) -> Tensor:
    """The row as which each token id decodes, given the id of row 0: [...] -> int64 [...]. Ids that stand for no action
    count as the nearest that does."""
    return (ids - first).clamp(0, bins - 1)
