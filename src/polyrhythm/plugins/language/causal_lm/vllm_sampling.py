"""Sampling of ours inside vLLM: a logits processor that draws each token as every engine here does.

vLLM's own noise is a generator per request, which a resumed request would begin anew, and its log-probs are those of
its own cuts. So each row of logits is processed and drawn from here, and then leaves vLLM one choice: the drawn token.
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
    """How a request is sampled. noise_key, greedy: as in `EngineRequest`; first: tokens of its prefix."""

    noise_key: int
    greedy: bool
    first: int = 0


@dataclass(slots=True)
class Drawn:
    """What was drawn for a request. output: vLLM's own list of its tokens; logprobs, versions: of those, and perhaps of
    one more, which vLLM dropped because the prompt was not read to its end yet."""

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def put(self, logprob: float, version: int) -> None:
        """Of the token that vLLM appends next, in place of one that it dropped."""
        kept = len(self.output)
        self.logprobs[kept:], self.versions[kept:] = [logprob], [version]


class _Row(NamedTuple):
    """A row of vLLM's batch."""

    draws: Draws
    drawn: Drawn
    uniform: noise.UniformStream

    def next_uniform(self) -> float:
        return self.uniform.at(self.draws.first + len(self.drawn.output))


class BatchSampler:
    """Follows vLLM's batch, and draws a token of each row. version: of the weights."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.version = -1
        self._drawn: dict[str, Drawn] = {}
        self._rows: dict[int, _Row] = {}
        self._greedy = torch.zeros(0, dtype=torch.bool)

    def follow(self, update: BatchUpdate | None) -> None:
        """Take note of the rows that have left, come and moved, in this order."""
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
        """What was drawn for a request, which has ended."""
        found = self._drawn.pop(name, None) or Drawn()
        count = len(found.output)
        return Drawn(list(found.output), found.logprobs[:count], found.versions[:count])

    def draw(self, logits: Tensor) -> Tensor:
        """The logits [n,V] of rows 0..n-1 with one choice each, in place."""
        rows = [self._rows[row] for row in range(len(logits))]
        if len(self._greedy) != len(rows):
            self._greedy = torch.tensor([row.draws.greedy for row in rows], device=logits.device)
        uniform = torch.tensor([row.next_uniform() for row in rows], device=logits.device)
        tokens, logprobs = draw(process_logits(logits, self.sampling), uniform, self._greedy)
        for row, logprob in zip(rows, logprobs.tolist(), strict=True):
            row.drawn.put(logprob, self.version)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)


def processor_class(sampler: BatchSampler) -> type[Any]:
    """The class that vLLM makes its logits processor of. It is vLLM's, so it is made where vLLM is imported."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class OwnSampling(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, *_: object) -> None:
            """vLLM gives its configuration and device."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            sampler.follow(batch_update)

        def apply(self, logits: Tensor) -> Tensor:
            return sampler.draw(logits)

    return OwnSampling
