"""Log-probs of the module here, with which those of an engine outside it are compared: another model, other weights, or
log-probs of something else than what is sampled are found by a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.packing import Packing
from polyrhythm.plugins.language.causal_lm.sampling import Sampling, process_logits

#: Tokens of an answer that is compared, and of its prompt.
COMPARED = 4


def compared_prompt(choices: int) -> list[int]:
    """A prompt of different tokens, where there are as many."""
    return [token % choices for token in range(1, COMPARED + 1)]


@torch.no_grad()
def worst_difference(
    network: CausalNetwork, sampling: Sampling, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
) -> float:
    """The largest difference of an engine's log-probs of `tokens` from the network's; inf if there are none."""
    if not tokens:
        return torch.inf
    sequence = torch.tensor([*prompt, *tokens], device=next(network.parameters()).device)
    features = network.packed(sequence[:-1], Packing([len(sequence) - 1]))[len(prompt) - 1 :]
    log_p = process_logits(network.logits(features), sampling)
    expected = log_p.gather(-1, sequence[len(prompt) :, None])[:, 0].cpu()
    difference = (expected - torch.tensor(logprobs)).abs().max().item()
    return difference if difference == difference else torch.inf  # noqa: PLR0124 - NaN
