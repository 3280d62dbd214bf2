"""A causal language model as a policy: a chunk step is one message, each token a primitive action.

C = `max_new_tokens` of the environment, A = 1. Entries after the token that ends a message have log-prob and entropy 0;
the environment reports them as not executed, so no loss counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.plugin import load
from polyrhythm.plugins.language.causal_lm.engine import NativeEngine
from polyrhythm.plugins.language.causal_lm.engine_settings import AddedSettings, ServerSettings
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.packing import PackedMessages, Packing, SlotCache, pack, pack_longest
from polyrhythm.plugins.language.causal_lm.sampling import Sampling, entropy, process_logits
from polyrhythm.plugins.language.causal_lm.servers.build import ask_server, engine_at_server
from polyrhythm.plugins.language.causal_lm.vllm_engine import VllmEngine, VllmModel, VllmStart
from polyrhythm.plugins.pretrained.adapting import AdaptedPolicy
from polyrhythm.policies import distributions
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.engine import Engine, EngineRequest, Generated
from polyrhythm.specs import EnvSpec

if TYPE_CHECKING:
    from polyrhythm.plugins.language.causal_lm.settings import CausalLmSettings

#: Names of the observation (`plugins.language.text`) and of the forward input.
TOKENS, LENGTH, MESSAGE = "tokens", "length", "message"


class CausalLm(AdaptedPolicy):
    """Policy over a causal language model. forward_inputs = {"message": int32 [B,C]}: sampled tokens, padded with the
    first stop.

    Without a critic `value` is 0, for algorithms that compare the samples of a group. With one (`value_head`) it is
    [B,C], linear in the features from which each token is sampled; engines do not compute it, so `act` returns zeros
    (`values_late`).
    """

    network: CausalNetwork

    def __init__(
        self, settings: CausalLmSettings, env_spec: EnvSpec, network: CausalNetwork, critic: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.network, self.critic = network, critic
        traits = settings.traits.policy
        assert traits is not None
        self.traits = traits
        self.value_detach = settings.value_detach
        self.chunk, self.action_dim = env_spec.chunk, 1
        self.exact, self.tolerance = False, settings.tolerance
        self._sampling = Sampling(env_spec.action.choices, settings.temperature, settings.top_k, settings.top_p)
        self._stops = env_spec.action.stops
        self._prompt = env_spec.observation[TOKENS].shape[0]
        self._logits_bytes = int(settings.logits_mib * 2**20)
        self._refresh, self._engine = settings.refresh_cache, settings.engine

    # ------------------------------------------------------------ acting

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        """Sample whole messages with an engine that is created for this call."""
        prompts, lengths = obs[TOKENS].cpu().numpy(), _lengths(obs).tolist()
        engine = NativeEngine(
            self.network, self._sampling, self._stops, capacity=len(lengths), length=max(lengths) + self.chunk
        )
        requests = zip(lengths, greedy.tolist(), noise_key.tolist(), strict=True)
        for row, (length, is_greedy, key) in enumerate(requests):
            prompt = prompts[row, :length].astype(np.int32)
            engine.add(EngineRequest(row, prompt, self.chunk, is_greedy, key))
        found: list[Generated] = []
        while len(found) < len(lengths):
            found += engine.step()
        return self._answer(sorted(found, key=lambda one: one.request_id), greedy.device)

    @torch.no_grad()
    def act_longest(self, obs: Observations) -> Tensor:
        """Run the first step at full prompt length and allocate the cache, to measure memory: as many messages as
        rows."""
        tokens = obs[TOKENS].long()
        count, length = tokens.shape
        rows = torch.arange(count, device=tokens.device).repeat_interleave(length)
        cache = SlotCache(count, length + self.chunk)
        features = self.network.prefill(tokens.flatten(), Packing([length] * count), rows, cache)
        return process_logits(self.network.logits(features[length - 1 :: length]), self._sampling)

    def _answer(self, found: list[Generated], device: torch.device) -> Act:
        shape = (len(found), self.chunk)
        message = np.full(shape, self._stops[0], np.int64)
        logprob = np.zeros(shape, np.float32)
        for row, generated in enumerate(found):
            count = len(generated.tokens)
            message[row, :count], logprob[row, :count] = generated.tokens, generated.logprobs
        actions = torch.from_numpy(message).to(device)
        value = torch.zeros(shape if self.traits.value else shape[:1], device=device)
        logprobs = torch.from_numpy(logprob).to(device)
        return Act(actions.unsqueeze(-1), logprobs.unsqueeze(-1), value, {MESSAGE: actions.to(torch.int32)})

    def make_engine(self, capacity: int) -> Engine:
        """Create an engine with this module's weights, on its device or at a server (`policies.engine.Streams`)."""
        length, how = self._prompt + self.chunk, self._engine
        what = (self.network, self._sampling, self._stops)
        if isinstance(how, AddedSettings):
            added: Engine = load("engine", how.type)(*what, capacity=capacity, length=length, **how.options)
            return added
        if isinstance(how, ServerSettings):
            return engine_at_server(how, *what, capacity=capacity, length=length)
        if how.type == "vllm":
            start = VllmStart(how.cache_gib, how.compile, how.dtype, how.tolerance)
            model = VllmModel(self.network, self._sampling, start, capacity=capacity, length=length)
            return VllmEngine(model, self.network, self._stops, capacity=capacity, length=length, refresh=self._refresh)
        return NativeEngine(*what, capacity=capacity, length=length, refresh=self._refresh)

    def ask_server(self) -> None:
        """Check that the engine's server answers (trait asks_server)."""
        assert isinstance(self._engine, ServerSettings)
        ask_server(self._engine, self.network, self._sampling, self._stops, self._prompt + self.chunk)

    def prompt_of(self, obs: Observations) -> tuple[NDArray[np.int32], int]:
        """Prompt and maximum number of new tokens of one row of observations (tensors [1,...])."""
        length = int(_lengths(obs)[0])
        return obs[TOKENS][0, :length].cpu().numpy().astype(np.int32), self.chunk

    def act_of(self, obs: Observations, generated: Generated) -> Act:
        """The `Act` of one row (tensors [1,...]) whose message an engine generated; equal to `act` with these
        tokens."""
        return self._answer([generated], obs[TOKENS].device)

    # ------------------------------------------------------------ training

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        message = forward_inputs[MESSAGE].long()
        return self._evaluation(pack(obs[TOKENS].long(), _lengths(obs), message, self._counts(message)), message)

    def row_tokens(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        """Number of positions that `evaluate` computes for each row: [B] int64."""
        return _lengths(obs) + self._counts(forward_inputs[MESSAGE].long()) - 1

    def evaluate_longest(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """`evaluate` with every prompt and message at full length; the tensors need no values."""
        message = forward_inputs[MESSAGE].long()
        return self._evaluation(pack_longest(obs[TOKENS].long(), message), message)

    def value(self, obs: Observations) -> Tensor:
        """Value before the first token of a message, repeated to [B,C]; zeros [B] without a critic."""
        if self.critic is None:
            return torch.zeros(len(obs[LENGTH]), device=obs[LENGTH].device)
        first = torch.zeros(len(obs[LENGTH]), 1, dtype=torch.int64, device=obs[LENGTH].device)
        packed = pack(obs[TOKENS].long(), _lengths(obs), first, torch.ones_like(first[:, 0]))
        return self._values(self._features(packed), packed, first).expand(-1, self.chunk)

    def late_values(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        """The values of `evaluate`, without logits."""
        message = forward_inputs[MESSAGE].long()
        packed = pack(obs[TOKENS].long(), _lengths(obs), message, self._counts(message))
        return self._values(self._features(packed), packed, message)

    def _evaluation(self, packed: PackedMessages, message: Tensor) -> Evaluation:
        """Log-probs, entropies and values [B,C] float32 of messages [B,C] int64, 0 after their ends (values [B] without
        a critic)."""
        features = self._features(packed)
        logprob, entropies = self._log_probs(features, packed, message, self._sampling, with_entropy=True)
        value = self._values(features, packed, message)
        return Evaluation(logprob.unsqueeze(-1), value, entropies.unsqueeze(-1))

    def _features(self, packed: PackedMessages) -> Tensor:
        """Features [M,width] from which the message tokens are sampled."""
        return self.network.packed(packed.tokens, packed.packing)[packed.predicts]

    def _values(self, features: Tensor, packed: PackedMessages, message: Tensor) -> Tensor:
        if self.critic is None:
            return torch.zeros(len(message), device=message.device)
        seen = features.detach() if self.value_detach else features
        flat = seen.new_zeros(message.numel()).scatter(0, packed.places, self.critic(seen).squeeze(-1))
        return flat.view(message.shape)

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Mean cross entropy per token of messages [B,C,1], without temperature, top-k and top-p."""
        message = actions.squeeze(-1).long()
        plain, counts = Sampling(self._sampling.choices), self._counts(message)
        packed = pack(obs[TOKENS].long(), _lengths(obs), message, counts)
        logprob, _ = self._log_probs(self._features(packed), packed, message, plain, with_entropy=False)
        return -logprob.sum() / counts.sum()

    def _counts(self, message: Tensor) -> Tensor:
        """Length of each message [B,C], first stop included: [B] int64."""
        stop = torch.isin(message, torch.tensor(self._stops, device=message.device))
        return torch.where(stop.any(1), stop.to(torch.int8).argmax(1) + 1, self.chunk)

    def _log_probs(
        self, features: Tensor, packed: PackedMessages, message: Tensor, sampling: Sampling, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B,C] float32 of messages [B,C] int64, 0 after their ends. Logits are computed for
        message tokens only, in pieces, and recomputed in the backward pass."""
        tokens = message.flatten()[packed.places]
        flat, entropies = self._scores(features, tokens, sampling, with_entropy)
        zeros = flat.new_zeros(message.numel())
        shape = message.shape
        return zeros.scatter(0, packed.places, flat).view(shape), zeros.scatter(0, packed.places, entropies).view(shape)

    def _scores(
        self, features: Tensor, tokens: Tensor, sampling: Sampling, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [T] of tokens [T] from features [T,width]; entropies are 0 unless `with_entropy`."""
        size = max(1, self._logits_bytes // (self._sampling.choices * 4))
        if len(tokens) <= size:
            return self._score(features, tokens, sampling, with_entropy)
        parts = [
            checkpoint(self._score, x, y, sampling, with_entropy, use_reentrant=False)
            for x, y in zip(features.split(size), tokens.split(size), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(self, features: Tensor, tokens: Tensor, sampling: Sampling, with_entropy: bool) -> tuple[Tensor, Tensor]:
        log_p = process_logits(self.network.logits(features), sampling, keep=tokens)
        logprob = distributions.categorical_logprob(log_p, tokens)
        return logprob, entropy(log_p) if with_entropy else torch.zeros_like(logprob)


def _lengths(obs: Observations) -> Tensor:
    """Length of each prompt, at least 1: [B] int64."""
    return obs[LENGTH].long().clamp(min=1)
