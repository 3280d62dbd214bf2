"""Cuts chunk steps into micro-batches: consecutive ones, of at most so many chunk steps and at most so many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from polyrhythm.policies.base import Policy, extended


class MicroBatchLimits(NamedTuple):
    """steps: most chunk steps of a micro-batch, 0 for all of them. tokens: most tokens, as `policy` counts them, 0 for
    any number; a chunk step with more is a micro-batch of its own."""

    policy: Policy
    steps: int
    tokens: int = 0

    def sizes(self, rows: int, obs: Mapping[str, Tensor], forward_inputs: Mapping[str, Tensor]) -> list[int]:
        """Chunk steps of each micro-batch of these rows."""
        if not self.tokens:
            size = self.steps or max(rows, 1)
            return [min(size, rows - first) for first in range(0, rows, size)]
        return _cut(extended(self.policy).row_tokens(obs, forward_inputs).tolist(), self.steps or rows, self.tokens)


def _cut(costs: Iterable[int], most_rows: int, most: int) -> list[int]:
    """How many of the costs fit together, one after another: [4, 4, 9, 1] with most = 8 is [2, 1, 1]."""
    sizes: list[int] = []
    total = 0
    for cost in costs:
        if sizes and sizes[-1] < most_rows and total + cost <= most:
            sizes[-1] += 1
            total += cost
        else:
            sizes.append(1)
            total = cost
    return sizes
