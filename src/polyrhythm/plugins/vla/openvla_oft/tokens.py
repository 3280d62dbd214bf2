"""Actions as tokens: a row is one of the vocabulary's last `bins` rows, numbered from 0.

A larger id is a smaller action. The `bins` rows map to the `bins - 1` intervals between `bins` equally spaced edges of
-1..1, so the first two rows map to the same action (OpenVLA's convention).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from polyrhythm.policies import distributions


def centres(bins: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The action of each row: [bins] on the CPU, in -1..1."""
    edges = torch.linspace(-1.0, 1.0, bins, dtype=torch.float64, device="cpu")
    middles = (edges[:-1] + edges[1:]) / 2.0
    return middles[(bins - 1 - torch.arange(bins, device="cpu")).clamp(0, bins - 2)].to(dtype)


def rows_of(actions: Tensor, bins: int) -> Tensor:
    """Rows of actions, clipped to -1..1: [...] -> int64 [...]. An action on an edge belongs to the interval above."""
    edges = torch.linspace(-1.0, 1.0, bins, dtype=actions.dtype, device=actions.device)
    return bins - torch.bucketize(actions.clamp(-1.0, 1.0), edges, right=True)


def rows_of_ids(ids: Tensor, first: int, bins: int) -> Tensor:
    """Rows of token ids, given the id of row 0: [...] -> int64 [...]. Ids outside the action rows are clamped to the
    nearest."""
    return (ids - first).clamp(0, bins - 1)


class TokenDistribution(NamedTuple):
    """Categorical distributions over rows. log_p [...,K] float32: of the `kept` rows, or of all rows if `kept` is
    None; kept [...,K] uint8: the K likeliest rows at sampling time."""

    log_p: Tensor
    kept: Tensor | None

    def sample(self, uniform: Tensor, greedy: Tensor, best: Literal["mean", "mode"]) -> Tensor:
        """Rows drawn by inverse CDF from uniform [...] in (0,1), the `best` ones where greedy [B] -> int64 [...]."""
        index = distributions.categorical_sample(self.log_p, uniform, greedy, self._best(best))
        return index if self.kept is None else _gathered(self.kept, index).long()

    def logprob(self, rows: Tensor) -> Tensor:
        """Log-prob of rows: int64 [...] -> [...] float32. A row that is not kept counts as the first kept one."""
        index = rows if self.kept is None else (self.kept == rows.unsqueeze(-1)).long().argmax(-1)
        return _gathered(self.log_p, index)

    def entropy(self) -> Tensor:
        """Entropy in nats: [...] float32."""
        return distributions.categorical_entropy(self.log_p)

    def _best(self, kind: Literal["mean", "mode"]) -> Tensor:
        """Index of the likeliest row, or of the row nearest to the mean."""
        if kind == "mode":
            return self.log_p.argmax(-1)
        rows = torch.arange(self.log_p.shape[-1], device=self.log_p.device) if self.kept is None else self.kept
        mean = (self.log_p.exp() * rows).sum(-1, keepdim=True)
        return (rows - mean).abs().argmin(-1)


def token_distribution(
    logits: Tensor, temperature: float, top_k: int = 0, kept: Tensor | None = None
) -> TokenDistribution:
    """The float32 distribution for sampling tokens and evaluating them: logits [...,bins].

    top_k: sample only from the k likeliest rows, 0 for all. kept: those rows at sampling time; the distribution is then
    over them, so a token keeps a log-prob even if the likeliest rows have changed.
    """
    scaled = logits.float() / temperature
    if kept is None and 0 < top_k < logits.shape[-1]:
        kept = scaled.detach().topk(top_k, dim=-1).indices.to(torch.uint8)
    if kept is not None:
        scaled = scaled.gather(-1, kept.long())
    return TokenDistribution(distributions.log_probs(scaled), kept)


def soft_labels(actions: Tensor, bins: int, sigma: float) -> Tensor:
    """Target probabilities of supervised training: actions in -1..1 [...] -> [...,bins]. sigma: their width in units
    of half the range; 0 puts all probability on the action's row, as published."""
    if sigma == 0.0:
        return functional.one_hot(rows_of(actions, bins), bins).float()
    distance = centres(bins).to(actions.device) - actions.clamp(-1.0, 1.0).unsqueeze(-1)
    return (-0.5 * (distance / sigma).square()).softmax(-1)


def _gathered(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)
