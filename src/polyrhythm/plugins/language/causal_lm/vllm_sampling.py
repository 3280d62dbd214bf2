"""Logits processor for vLLM that draws tokens exactly as the other engines here do.

vLLM's noise comes from a generator per request, which a resumed request would restart, and its log-probs follow its own
top-k and top-p. So each row of logits is processed and drawn here, and vLLM is left one choice: the drawn token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyrhythm.plugins.language.causal_lm.sampling import Sampling, draw, process_logits
from polyrhythm.policies import noise

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate

#: Where vLLM carries what is ours of a request.
EXTRA = "polyrhythm"


class Draws(NamedTuple):
    """Sampling of one request. noise_key, greedy: as in `EngineRequest`; first: number of its prefix tokens."""

    noise_key: int
    greedy: bool
    first: int = 0


@dataclass(slots=True)
class Drawn:
    """Tokens drawn for a request. output: vLLM's own token list; logprobs, versions: one per token, and perhaps one
    more, for a token that vLLM dropped because the prompt was not read to its end."""

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def put(self, logprob: float, version: int) -> None:
        """Record the token that vLLM appends next; overwrites a dropped one."""
        kept = len(self.output)
        self.logprobs[kept:], self.versions[kept:] = [logprob], [version]


class _Row(NamedTuple):
    draws: Draws
    drawn: Drawn
    uniform: noise.UniformStream

    def next_uniform(self) -> float:
        return self.uniform.at(self.draws.first + len(self.drawn.output))


class BatchSampler:
    """Tracks vLLM's batch and draws one token per row. version: of the weights."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.version = -1
        self._drawn: dict[str, Drawn] = {}
        self._rows: dict[int, _Row] = {}
        self._greedy = torch.zeros(0, dtype=torch.bool)

    def follow(self, update: BatchUpdate | None) -> None:
        """Apply vLLM's batch update: removed, added and moved rows, in this order."""
        if update is None:
            return
        for row in update.removed:
            self._rows.pop(row, None)
        for row, params, _, output in update.added:
            name, draws = (params.extra_args or {})[EXTRA]
            drawn = self._drawn.setdefault(name, Drawn())
            drawn.output = output
            self._rows[row] = _Row(draws, drawn, noise.UniformStream(draws.noise_key))
        for source, target, direction in update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction.name == "SWAP":
                self._rows[source] = other
        self._greedy = torch.zeros(0, dtype=torch.bool)

    def take(self, name: str) -> Drawn:
        """Remove a finished request and return its draws."""
        found = self._drawn.pop(name, None) or Drawn()
        count = len(found.output)
        return Drawn(list(found.output), found.logprobs[:count], found.versions[:count])

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token for each of the rows 0..n-1 and mask all others in logits [n,V], in place."""
        rows = [self._rows[row] for row in range(len(logits))]
        if len(self._greedy) != len(rows):
            self._greedy = torch.tensor([row.draws.greedy for row in rows], device=logits.device)
        uniform = torch.tensor([row.next_uniform() for row in rows], device=logits.device)
        tokens, logprobs = draw(process_logits(logits, self.sampling), uniform, self._greedy)
        for row, logprob in zip(rows, logprobs.tolist(), strict=True):
            row.drawn.put(logprob, self.version)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)


def processor_class(sampler: BatchSampler) -> type[Any]:
    """The logits processor class for vLLM, defined here because its base class needs vLLM to be imported."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class OwnSampling(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, *_: object) -> None:
            """Ignores vLLM's configuration and device."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            sampler.follow(batch_update)

        def apply(self, logits: Tensor) -> Tensor:
            return sampler.draw(logits)

    return OwnSampling
