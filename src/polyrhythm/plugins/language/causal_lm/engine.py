"""Native engine, torch only: continuous batching with a slot cache and exact log-probs in float32.

Invariant: running requests occupy rows 0..n-1 of the cache and of the arrays here. When a request ends, the last row
moves into its row, so a decode step reads the cache without copying it.

A prompt is computed once for all requests that have it, such as the members of a group: requests that start together,
or that start while a request with the same prompt, computed with the same weights, is running. They receive copies of
its keys and values and sample from the same features.

After a weight change the keys and values of running requests are kept, as in other engines: their next log-probs mix
new weights with old keys. `refresh` recomputes the keys and values instead, so every log-prob is that of the weights
alone.

The distribution that tokens are sampled from is the same in generation and in training: logits are divided by the
temperature, then cut to the `top_k` largest and to the smallest set of probability `top_p`; the rest is renormalised.
All in float32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.packing import Packing, SlotCache
from polyrhythm.policies import distributions, noise
from polyrhythm.policies.engine import EngineRequest, Generated, Progress, refuse_unfit

#: Attention reads a multiple of so many positions of rows of different lengths, so that shapes repeat.
_STRIDE = 16


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


@dataclass(slots=True)
class _Row(Progress):
    """A running request. weights: number of weight changes before its prompt was computed; uniform: its noise."""

    weights: int = -1
    uniform: noise.UniformStream = field(init=False)

    def __post_init__(self) -> None:
        self.uniform = noise.UniformStream(self.request.noise_key)

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)


class NativeEngine:
    """An engine that runs `network` itself. length: the longest sequence in tokens; stops: tokens that end one;
    prompt_tokens: of all started requests; shared_tokens: those copied from another request instead of computed."""

    def __init__(
        self,
        network: CausalNetwork,
        sampling: Sampling,
        stops: Sequence[int],
        *,
        capacity: int,
        length: int,
        refresh: bool = False,
    ) -> None:
        self.capacity = capacity
        self._network, self._sampling, self._stops = network, sampling, frozenset(stops)
        self._length, self._refresh = length, refresh
        self._device = next(network.parameters()).device
        self._version = -1
        self._weights = 0  # number of weight changes
        self.prompt_tokens = self.shared_tokens = 0
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._greedy: Tensor | None = None  # [running] bool; None: rows changed since it was built
        self._prompt_ends: Tensor | None = None  # [capacity,width] features of the prompts' last tokens
        self._cache = SlotCache(capacity, length)

    def add(self, request: EngineRequest) -> None:
        """ValueError: there is no free row, the sequence is too long, or it would generate nothing."""
        known = {row.request.request_id for row in (*self._running, *self._waiting)}
        refuse_unfit(request, known, self.capacity, self._length)
        self._waiting.append(_Row.of(request))

    def abort(self, request_id: int) -> Generated:
        """KeyError: unknown request."""
        for row in self._waiting:
            if row.request.request_id == request_id:
                self._waiting.remove(row)
                return row.generated(finished=False)
        for place, row in enumerate(self._running):
            if row.request.request_id == request_id:
                self._remove(place)
                return row.generated(finished=False)
        raise KeyError(request_id)

    def weights_changed(self, version: int) -> None:
        self._version = version
        self._weights += 1
        if self._refresh and self._running:
            self._waiting.extendleft(reversed(self._running))
            self._running.clear()

    def statistics(self) -> dict[str, int | float]:
        return {"prompt_tokens": self.prompt_tokens, "shared_tokens": self.shared_tokens}

    @torch.no_grad()
    def step(self) -> list[Generated]:
        """Generate one token per request: new requests from their prompts, running ones from the cache."""
        if not self._running and not self._waiting:
            return []
        running = len(self._running)
        features = [self._decode(running)] if running else []
        if self._waiting:
            features.append(self._begin())
        self._sample(torch.cat(features))
        finished = []
        for place in range(len(self._running) - 1, -1, -1):
            row = self._running[place]
            if row.tokens[-1] in self._stops or len(row.tokens) >= row.request.max_new_tokens:
                finished.append(row.generated(finished=True))
                self._remove(place)
        return finished[::-1]

    def _decode(self, count: int) -> Tensor:
        """Features [count,width] of the last tokens of the rows 0..count-1."""
        rows = self._running[:count]
        positions = [row.length - 1 for row in rows]
        longest, even = max(positions) + 1, min(positions) == max(positions)
        if not even:
            longest = min(self._length, -(-longest // _STRIDE) * _STRIDE)
        tokens = torch.tensor([row.tokens[-1] for row in rows], device=self._device)
        return self._network.decode(
            tokens, torch.tensor(positions, device=self._device), longest, self._cache, even=even
        )

    def _begin(self) -> Tensor:
        """Move all waiting requests to rows; return the features of their last positions."""
        rows, first = list(self._waiting), len(self._running)
        self._waiting.clear()
        present = [(place, row) for place, row in enumerate(self._running) if row.weights == self._weights]
        known = {row.request.prompt.tobytes(): place for place, row in present}
        self._running += rows
        self._greedy = None
        computed, shared = self._shares(first, known)
        ends: dict[int, Tensor] = self._compute(computed) if computed else {}
        for source, places in shared.items():
            self._cache.copy(source, places, len(self._running[source].request.prompt))
            assert self._prompt_ends is not None
            self._prompt_ends[places] = self._prompt_ends[source].clone()
            ends |= dict.fromkeys(places, self._prompt_ends[source])
        return torch.stack([ends[place] for place in range(first, len(self._running))])

    def _shares(self, first: int, known: dict[bytes, int]) -> tuple[list[int], dict[int, list[int]]]:
        """Split the rows from `first` on into rows to compute and, by source row, rows that copy its prompt. known:
        source rows by prompt. A resumed request with tokens is always computed, and others may copy its prompt."""
        computed: list[int] = []
        shared: dict[int, list[int]] = {}
        places = range(first, len(self._running))
        for place in sorted(places, key=lambda place: not self._running[place].tokens):
            row = self._running[place]
            row.weights = self._weights
            self.prompt_tokens += len(row.request.prompt)
            source = known.setdefault(row.request.prompt.tobytes(), place)
            if source == place or row.tokens:
                computed.append(place)
            else:
                shared.setdefault(source, []).append(place)
                self.shared_tokens += len(row.request.prompt)
        return computed, shared

    def _compute(self, places: list[int]) -> dict[int, Tensor]:
        places.sort(key=lambda place: self._running[place].length)
        rows = [self._running[place] for place in places]
        lengths = torch.tensor([row.length for row in rows], device=self._device)
        sequences = [token for row in rows for token in (*row.request.prompt.tolist(), *row.tokens)]
        tokens = torch.tensor(sequences, device=self._device)
        index = torch.tensor(places, device=self._device)
        packing = Packing([row.length for row in rows])
        features = self._network.prefill(tokens, packing, index.repeat_interleave(lengths), self._cache)
        prompts = torch.tensor([len(row.request.prompt) for row in rows], device=self._device)
        if self._prompt_ends is None:
            self._prompt_ends = features.new_zeros(self.capacity, features.shape[1])
        ends = lengths.cumsum(0)
        self._prompt_ends[index] = features[ends - lengths + prompts - 1]
        return dict(zip(places, features[ends - 1], strict=True))

    def _sample(self, features: Tensor) -> None:
        """Append a token to every running request, sampled from features [n,width] of the last positions."""
        log_p = process_logits(self._network.logits(features), self._sampling)
        uniform = torch.tensor([row.uniform.at(len(row.tokens)) for row in self._running], device=self._device)
        if self._greedy is None:
            self._greedy = torch.tensor([row.request.greedy for row in self._running], device=self._device)
        tokens, logprobs = draw(log_p, uniform, self._greedy)
        for row, token, logprob in zip(self._running, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self._version)

    def _remove(self, place: int) -> None:
        """Free a row; the last row moves into it."""
        last = len(self._running) - 1
        if place < last:
            self._cache.copy(last, [place], self._running[last].length)
            if self._prompt_ends is not None:
                self._prompt_ends[place] = self._prompt_ends[last].clone()
            self._running[place] = self._running[last]
        self._running.pop()
        self._greedy = None


def compared_request(choices: int, noise_key: int = 0) -> EngineRequest:
    """A short request, of distinct tokens as far as `choices` allows, whose log-probs are compared."""
    prompt = np.array([token % choices for token in range(1, 5)], np.int32)
    return EngineRequest(-1, prompt, 4, greedy=False, noise_key=noise_key)


@torch.no_grad()
def worst_difference(network: CausalNetwork, sampling: Sampling, answered: Progress) -> float:
    """Largest difference between an engine's log-probs of an answer and the network's; inf if it has no tokens."""
    if not answered.tokens:
        return torch.inf
    prompt = answered.request.prompt.tolist()
    sequence = torch.tensor([*prompt, *answered.tokens], device=next(network.parameters()).device)
    features = network.packed(sequence[:-1], Packing([len(sequence) - 1]))[len(prompt) - 1 :]
    log_p = process_logits(network.logits(features), sampling)
    expected = log_p.gather(-1, sequence[len(prompt) :, None])[:, 0].cpu()
    difference = (expected - torch.tensor(answered.logprobs)).abs().max().item()
    return difference if difference == difference else torch.inf  # noqa: PLR0124 - NaN
