"""The distribution that tokens are sampled from, the same in generation and in training.

Logits are divided by the temperature, then cut to the `top_k` largest and to the smallest set of probability `top_p`;
the rest is renormalised. All in float32. Pure functions of tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.policies import distributions


class Sampling(NamedTuple):
    """Sampling parameters. temperature > 0; top_k: number of tokens, 0 for all; top_p: probability, 1 for all; choices:
    number of valid ids, which may be fewer than the logits."""

    choices: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def cuts(self) -> bool:
        """Whether top_k or top_p excludes tokens."""
        return 0 < self.top_k < self.choices or self.top_p < 1.0


def process_logits(logits: Tensor, sampling: Sampling, keep: Tensor | None = None) -> Tensor:
    """Log-probs [..., choices] float32 of logits [..., V]; -inf for excluded tokens.

    keep [...] int64: sampled tokens that are never excluded. They were allowed under the policy that sampled them;
    under other weights they may be excluded, and their ratio would be 0 or infinite.
    """
    log_p = distributions.log_probs(logits[..., : sampling.choices] / sampling.temperature)
    if not sampling.cuts:
        return log_p
    kept = _kept(log_p.detach(), sampling)
    if keep is not None:
        kept.scatter_(-1, keep.unsqueeze(-1), True)
    return distributions.log_probs(log_p.masked_fill(~kept, -torch.inf))


def _kept(log_p: Tensor, sampling: Sampling) -> Tensor:
    """Tokens that are not excluded: bool [..., choices]; at least the most likely one."""
    kept = torch.ones_like(log_p, dtype=torch.bool)
    if 0 < sampling.top_k < sampling.choices:
        kept &= log_p >= log_p.topk(sampling.top_k, dim=-1).values[..., -1:]
    if sampling.top_p < 1.0:
        p, order = log_p.masked_fill(~kept, -torch.inf).softmax(-1).sort(dim=-1, descending=True)
        before = p.cumsum(-1) - p
        kept &= torch.zeros_like(kept).scatter_(-1, order, before < sampling.top_p)
    return kept


def draw(log_p: Tensor, uniform: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Sample tokens [B] int64 with their log-probs [B] from log_p [B,K], uniform [B] in (0,1) and greedy [B] bool."""
    best = log_p.argmax(-1)
    token = distributions.categorical_sample(log_p, uniform, greedy, best)
    logprob = distributions.categorical_logprob(log_p, token)
    cut = logprob.isinf()  # rounding at the upper end of the last token's interval
    token = torch.where(cut, best, token)
    return token, torch.where(cut, distributions.categorical_logprob(log_p, best), logprob)


def entropy(log_p: Tensor) -> Tensor:
    """Entropy [...] in nats of log-probs [..., K], which may contain -inf."""
    finite = log_p.masked_fill(log_p.isinf(), 0.0)
    return -(log_p.exp() * finite).sum(-1)
