"""A causal language model as a policy: a chunk step is one message, each token a primitive action.

C = `max_new_tokens` of the environment, A = 1. Entries after the token that ends a message have log-prob and entropy 0;
the environment reports them as not executed, so no loss counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, Field, field_validator, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.plugin import load
from polyrhythm.plugins.language.causal_lm.engine import NativeEngine, Sampling, entropy, process_logits
from polyrhythm.plugins.language.causal_lm.engine_settings import (
    AddedSettings,
    EngineSettings,
    NativeSettings,
    OpenAiSettings,
    ServerSettings,
    VllmSettings,
)
from polyrhythm.plugins.language.causal_lm.network import (
    CausalNetwork,
    cache_bytes,
    check_context,
    check_vocabulary,
    empty_network,
    loaded_network,
    open_config,
    random_network,
    recompute_layers,
)
from polyrhythm.plugins.language.causal_lm.packing import PackedMessages, Packing, SlotCache, pack, pack_longest
from polyrhythm.plugins.language.causal_lm.servers.engine import ServerEngine, protocol_of
from polyrhythm.plugins.language.causal_lm.vllm_engine import VllmEngine, VllmModel
from polyrhythm.plugins.pretrained.adapting import Adaptation, AdaptedPolicy, LoraSettings
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.policies import distributions
from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations
from polyrhythm.policies.engine import Engine, EngineRequest, Generated
from polyrhythm.policies.form import PolicyForm, Role, ValueKind, describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.traits import SAMPLING, EngineTraits, PolicyTraits, SettingsTraits
from polyrhythm.specs import ArraySpec, EnvSpec

Count = Annotated[int, Field(ge=1)]

#: Names of the observation (`plugins.language.text`) and of the forward input.
TOKENS, LENGTH, MESSAGE = "tokens", "length", "message"
#: Purpose of the memory that `policy.engine.cache_gib` sets.
VLLM_CACHE = "vLLM's keys and values"


class CausalLmSettings(BaseModel):
    """A causal language model for text environments: a local folder's, or a small Llama from a random start.

    Tokens are the environment's (`env.tokenizer`): with a checkpoint name its folder there too.
    """

    model_config = SETTINGS
    needs: ClassVar = ("torch", "transformers", "safetensors")
    extra: ClassVar = "vla"

    type: Literal["causal_lm"] = "causal_lm"
    """The policy's name."""
    checkpoint: str = ""
    """Folder of a causal language model in the layout of Hugging Face; empty for a random Llama of the sizes below."""
    layers: Count = 4
    """Layers of the random Llama."""
    width: Count = 64
    """Features per token of the random Llama."""
    heads: Count = 4
    """Attention heads of the random Llama."""
    hidden: Count = 256
    """Units of its feed-forward layers."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in generation and in training."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among so many of the likeliest tokens; 0 for all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that have this probability together; 1 for all."""
    logits_mib: Annotated[float, Field(gt=0)] = 256.0
    """Memory of the logits that training makes at a time; where they are more, the backward pass makes them again."""
    train: Literal["all", "lora"] = "all"
    """What is trained: everything, or adapters of which alone generators get new versions."""
    lora: LoraSettings = LoraSettings()
    """The adapters of train: lora; without targets those of all linear layers but the one of the logits."""
    value_head: bool = False
    """A value for each token, a linear function of its features, for gae and v_trace (with reward_level action). The
    trainer computes it before an update, as engines do not."""
    value_detach: bool = False
    """Keep the value loss out of the network (verl, ROLL and AReaL have a critic of its own)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    refresh_cache: bool = False
    """After new weights compute the keys and values of unfinished messages again, instead of keeping the old ones."""
    tolerance: Annotated[float, Field(gt=0)] = 5e-5
    """Largest difference of log-probs between generation and training in float32."""
    engine: EngineSettings = NativeSettings()
    """What generates where batching is streams: native or vllm, in the generator; sglang or openai, at a server."""

    @field_validator("engine", mode="before")
    @classmethod
    def _named(cls, engine: Any) -> Any:
        return {"type": engine} if isinstance(engine, str) else engine

    @model_validator(mode="after")
    def _fits(self) -> CausalLmSettings:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width = {self.width}: it is an even multiple of heads ({self.heads}); change one of them"
            )
        if not isinstance(self.engine, ServerSettings):
            return self
        if self.engine.type == "sglang" and (self.top_k or self.top_p < 1):
            cut = f"top_k = {self.top_k}" if self.top_k else f"top_p = {self.top_p}"
            raise ValueError(
                f"{cut}: the log-probs of engine sglang are those before such cuts; set top_k to 0 and top_p to 1"
            )
        if self.train != "all":
            raise ValueError(f"train = {self.train}: engine {self.engine.type} gets whole models; set it to all")
        return self

    @property
    def training_defaults(self) -> Mapping[str, Any]:
        """One pass over the messages; small learning rate for a pretrained model (as in TRL and verl)."""
        lr = 1e-6 if self.checkpoint and self.train == "all" else 1e-5 if self.checkpoint else 2e-4
        return {"epochs": 1, "minibatch_steps": 128, "max_kl": None, "optimizer": {"lr": lr, "betas": (0.9, 0.99)}}

    @property
    def traits(self) -> SettingsTraits:
        how = self.engine
        kind, server, vllm = f"policy.engine.type = {how.type}", isinstance(how, ServerSettings), how.type == "vllm"
        fixed = isinstance(how, OpenAiSettings) and not how.weights.load
        engine = EngineTraits(
            streams_only=kind if how.type != "native" else "",
            single=f"policy.engine.url = {how.url}" if isinstance(how, ServerSettings) else "",
            keeps_device=kind if vllm else "",
            fixed_weights="policy.engine.weights.load is empty" if fixed else "",
            cache=VLLM_CACHE if vllm else "",
            fresh_cache=self.refresh_cache and not server and not isinstance(how, AddedSettings),
        )
        policy = PolicyTraits(
            value=self.value_head,
            critic=self.value_head,
            values_late=self.value_head,
            late_values=True,
            publishes_part=True,
            shares_reference=True,
            counts_tokens=True,
            streams=True,
            asks_server=server,
        )
        folders = "polyrhythm.plugins.language.causal_lm.folders:CausalLmFolders"
        preload = ("transformers.modeling_utils",)
        return SettingsTraits(
            preload, SAMPLING, outlines=True, adapts=True, folders=folders, engine=engine, policy=policy
        )

    def check(self) -> None:
        """MissingError: the engine is not installed."""
        if self.engine.type == "vllm" and find_spec("vllm") is None:
            install = install_command("vllm")
            raise MissingError(f"policy.engine.type = vllm: the package vllm is not installed; run: {install}")

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        answers = {MESSAGE: ArraySpec((env_spec.chunk,), "int32")} if env_spec.chunk else {}
        config = self._config(env_spec)
        value: ValueKind = "action" if self.value_head else "chunk"
        form = describe(lambda role: self._adapted(env_spec, empty_network(config), role, seed=0), answers, value)
        engine: dict[str, int] | None = None if self.engine.type == "native" else {}  # a server's is not known
        if isinstance(self.engine, VllmSettings):
            own = form.act_bytes if self.engine.dtype == "float32" else form.act_bytes // 2
            engine = {"vLLM's weights": own, VLLM_CACHE: int(self.engine.cache_gib * 2**30)}
        tokens = _tokens(env_spec)
        return replace(form, row_tokens=tokens - 1, row_cache=tokens * cache_bytes(config), engine=engine)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> CausalLm:
        config = self._config(env_spec)
        network = loaded_network(self.checkpoint) if self.checkpoint else random_network(config, seed)
        return self._adapted(env_spec, network, role, seed).to(device)

    def outline(self, env_spec: EnvSpec, *, role: Role) -> CausalLm:
        return self._adapted(env_spec, empty_network(self._config(env_spec)), role, seed=0)

    def _adapted(self, env_spec: EnvSpec, network: CausalNetwork, role: Role, seed: int) -> CausalLm:
        """Select the trained and published tensors of the model, and add its adapters, by default to all linear layers
        except the output layer. ValueError: no layer matches."""
        model: Any = network.model
        output = model.get_output_embeddings()
        linear = [path for path, part in model.named_modules() if isinstance(part, nn.Linear) and part is not output]
        inner = {"lora": tuple(f"{path}.weight" for path in linear)}
        how = Adaptation(self.train, inner, Precision(torch.float32), lora=self.lora)
        how.prepare(model, role)
        how.finish(model, role, seed)
        if self.gradient_checkpointing and role == "train":
            recompute_layers(model)
        if not self.value_head:
            return CausalLm(self, env_spec, network)
        with seeded(seed):
            return CausalLm(self, env_spec, network, nn.Linear(output.in_features, 1))

    def _config(self, env_spec: EnvSpec) -> Any:
        """The model's configuration. ConfigError: it is not a text environment, or the model does not fit it."""
        observation, action = env_spec.observation, env_spec.action
        if not env_spec.chunk or not action.stops or action.dim != 1 or not {TOKENS, LENGTH} <= observation.keys():
            raise ConfigError(
                "policy.type = causal_lm: the environment is no text environment (prompts of tokens, messages that "
                "end); use one such as env.type = chains, or another policy"
            )
        if self.checkpoint:
            config = open_config(self.checkpoint)
            check_vocabulary(self.checkpoint, config, action)
            check_context(config, _tokens(env_spec), f"policy.checkpoint = {self.checkpoint}")
            return config
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=action.choices,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=_tokens(env_spec),
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )


def _tokens(env_spec: EnvSpec) -> int:
    """Tokens of the longest prompt and message."""
    return env_spec.observation[TOKENS].shape[0] + env_spec.chunk


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
        self.sampling = Sampling(env_spec.action.choices, settings.temperature, settings.top_k, settings.top_p)
        self._stops = env_spec.action.stops
        self._prompt = env_spec.observation[TOKENS].shape[0]
        self._logits_bytes = int(settings.logits_mib * 2**20)
        self._refresh, self._engine = settings.refresh_cache, settings.engine

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        """Sample whole messages with an engine that is created for this call."""
        prompts, lengths = obs[TOKENS].cpu().numpy().astype(np.int32), _lengths(obs).tolist()
        what, length = (self.network, self.sampling, self._stops), max(lengths) + self.chunk
        engine = NativeEngine(*what, capacity=len(lengths), length=length)
        requests = zip(lengths, greedy.tolist(), noise_key.tolist(), strict=True)
        for row, (count, is_greedy, key) in enumerate(requests):
            engine.add(EngineRequest(row, prompts[row, :count], self.chunk, is_greedy, key))
        found: list[Generated] = []
        while len(found) < len(lengths):
            found += engine.step()
        return self._answer(sorted(found, key=lambda one: one.request_id), greedy.device)

    @torch.no_grad()
    def act_longest(self, obs: Observations) -> Tensor:
        tokens = obs[TOKENS].long()
        count, length = tokens.shape
        rows = torch.arange(count, device=tokens.device).repeat_interleave(length)
        cache = SlotCache(count, length + self.chunk)
        features = self.network.prefill(tokens.flatten(), Packing([length] * count), rows, cache)
        return process_logits(self.network.logits(features[length - 1 :: length]), self.sampling)

    def _answer(self, found: list[Generated], device: torch.device) -> Act:
        shape = (len(found), self.chunk)
        message, logprob = np.full(shape, self._stops[0], np.int64), np.zeros(shape, np.float32)
        for row, generated in enumerate(found):
            count = len(generated.tokens)
            message[row, :count], logprob[row, :count] = generated.tokens, generated.logprobs
        actions = torch.from_numpy(message).to(device)
        value = torch.zeros(shape if self.traits.value else shape[:1], device=device)
        logprobs = torch.from_numpy(logprob).to(device)
        return Act(actions.unsqueeze(-1), logprobs.unsqueeze(-1), value, {MESSAGE: actions.to(torch.int32)})

    def make_engine(self, capacity: int) -> Engine:
        how, what = self._engine, (self.network, self.sampling, self._stops)
        room: dict[str, Any] = {"capacity": capacity, "length": self._prompt + self.chunk}
        if isinstance(how, AddedSettings):
            added: Engine = load("engine", how.type)(*what, **room, **how.options)
            return added
        if isinstance(how, ServerSettings):
            return ServerEngine(how, *what, **room)
        if isinstance(how, VllmSettings):
            model = VllmModel(self.network, self.sampling, how, **room)
            return VllmEngine(model, self.network, self._stops, **room, refresh=self._refresh)
        return NativeEngine(*what, **room, refresh=self._refresh)

    def ask_server(self) -> None:
        assert isinstance(self._engine, ServerSettings)
        protocol_of(self._engine, self.network, self.sampling, self._stops).begin(self._prompt + self.chunk)

    def prompt_of(self, obs: Observations) -> tuple[NDArray[np.int32], int]:
        length = int(_lengths(obs)[0])
        return obs[TOKENS][0, :length].cpu().numpy().astype(np.int32), self.chunk

    def act_of(self, obs: Observations, generated: Generated) -> Act:
        return self._answer([generated], obs[TOKENS].device)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        message = forward_inputs[MESSAGE].long()
        return self._evaluation(self._pack(obs, message), message)

    def row_tokens(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        return _lengths(obs) + self._counts(forward_inputs[MESSAGE].long()) - 1

    def evaluate_longest(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
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
        message = forward_inputs[MESSAGE].long()
        packed = self._pack(obs, message)
        return self._values(self._features(packed), packed, message)

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Mean cross entropy per token of messages [B,C,1], without temperature, top-k and top-p."""
        message = actions.squeeze(-1).long()
        packed, plain = self._pack(obs, message), Sampling(self.sampling.choices)
        tokens = message.flatten()[packed.places]
        logprob, _ = self._scores(self._features(packed), tokens, plain, with_entropy=False)
        return -_spread(logprob, packed, message).sum() / self._counts(message).sum()

    def _pack(self, obs: Observations, message: Tensor) -> PackedMessages:
        return pack(obs[TOKENS].long(), _lengths(obs), message, self._counts(message))

    def _counts(self, message: Tensor) -> Tensor:
        """Length of each message [B,C], first stop included: [B] int64."""
        stop = torch.isin(message, torch.tensor(self._stops, device=message.device))
        return torch.where(stop.any(1), stop.to(torch.int8).argmax(1) + 1, self.chunk)

    def _features(self, packed: PackedMessages) -> Tensor:
        """Features [M,width] from which the message tokens are sampled."""
        return self.network.packed(packed.tokens, packed.packing)[packed.predicts]

    def _evaluation(self, packed: PackedMessages, message: Tensor) -> Evaluation:
        """Numbers [B,C] float32 of messages [B,C] int64, 0 after their ends (values [B] without a critic)."""
        features, tokens = self._features(packed), message.flatten()[packed.places]
        scores = self._scores(features, tokens, self.sampling, with_entropy=True)
        logprob, entropies = (_spread(flat, packed, message).unsqueeze(-1) for flat in scores)
        return Evaluation(logprob, self._values(features, packed, message), entropies)

    def _values(self, features: Tensor, packed: PackedMessages, message: Tensor) -> Tensor:
        if self.critic is None:
            return torch.zeros(len(message), device=message.device)
        seen = features.detach() if self.value_detach else features
        return _spread(self.critic(seen).squeeze(-1), packed, message)

    def _scores(
        self, features: Tensor, tokens: Tensor, sampling: Sampling, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, or 0, [T] of tokens [T] from features [T,width]. Logits are computed in pieces, and
        recomputed in the backward pass."""
        size = max(1, self._logits_bytes // (self.sampling.choices * 4))
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


def _spread(flat: Tensor, packed: PackedMessages, message: Tensor) -> Tensor:
    """Values [M] of message tokens in the shape of messages [B,C], 0 after their ends."""
    return flat.new_zeros(message.numel()).scatter(0, packed.places, flat).view(message.shape)
