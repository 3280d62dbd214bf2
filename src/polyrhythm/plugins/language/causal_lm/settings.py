"""Settings of the policy `causal_lm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from torch import nn

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.plugins.language.causal_lm.engine_settings import (
    AddedSettings,
    EngineSettings,
    NativeSettings,
    OpenAiSettings,
    ServerSettings,
    VllmSettings,
)
from polyrhythm.plugins.language.causal_lm.network import CausalNetwork
from polyrhythm.plugins.language.causal_lm.policy import LENGTH, MESSAGE, TOKENS, CausalLm
from polyrhythm.plugins.pretrained.adapting import LoraSettings
from polyrhythm.policies.base import SETTINGS
from polyrhythm.policies.form import PolicyForm, Role, ValueKind, describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.traits import SAMPLING, EngineTraits, PolicyTraits, SettingsTraits
from polyrhythm.specs import ArraySpec, EnvSpec

Count = Annotated[int, Field(ge=1)]

#: Purpose of the memory that `policy.engine.cache_gib` sets.
VLLM_CACHE = "vLLM's keys and values"
FOLDERS = "polyrhythm.plugins.language.causal_lm.folders:CausalLmFolders"
PRELOAD = ("transformers.modeling_utils",)


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
        """Expand the short form `policy.engine=vllm`."""
        return {"type": engine} if isinstance(engine, str) else engine

    @model_validator(mode="after")
    def _engine_can(self) -> CausalLmSettings:
        if not isinstance(self.engine, ServerSettings):
            return self
        if self.engine.type == "sglang" and (self.top_k or self.top_p < 1):
            name = "top_k" if self.top_k else "top_p"
            raise ValueError(
                f"{name} = {getattr(self, name)}: the log-probs of engine sglang are those before such cuts; set top_k "
                "to 0 and top_p to 1"
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
        server = isinstance(self.engine, ServerSettings)
        kind = f"policy.engine.type = {self.engine.type}"
        fixed = isinstance(self.engine, OpenAiSettings) and not self.engine.weights.load
        engine = EngineTraits(
            streams_only=kind if self.engine.type != "native" else "",
            single=f"policy.engine.url = {self.engine.url}" if isinstance(self.engine, ServerSettings) else "",
            keeps_device=kind if self.engine.type == "vllm" else "",
            fixed_weights="policy.engine.weights.load is empty" if fixed else "",
            cache=VLLM_CACHE if self.engine.type == "vllm" else "",
            fresh_cache=self.refresh_cache and not server and not isinstance(self.engine, AddedSettings),
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
        return SettingsTraits(
            PRELOAD, SAMPLING, outlines=True, adapts=True, folders=FOLDERS, engine=engine, policy=policy
        )

    def check(self) -> None:
        """MissingError: the engine is not installed."""
        if self.engine.type == "vllm" and find_spec("vllm") is None:
            install = install_command("vllm")
            raise MissingError(f"policy.engine.type = vllm: the package vllm is not installed; run: {install}")

    @model_validator(mode="after")
    def _heads_divide(self) -> CausalLmSettings:
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"width = {self.width}: it is an even multiple of heads ({self.heads}); change one of them"
            )
        return self

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        from polyrhythm.plugins.language.causal_lm.network import cache_bytes

        answers = {MESSAGE: ArraySpec((env_spec.chunk,), "int32")} if env_spec.chunk else {}
        config = self._config(env_spec)
        value: ValueKind = "action" if self.value_head else "chunk"
        form = describe(lambda role: self._empty(env_spec, config, role), answers, value)
        tokens = env_spec.observation[TOKENS].shape[0] + env_spec.chunk
        cache, engine = tokens * cache_bytes(config), self._engine_bytes(form.act_bytes)
        return replace(form, row_tokens=tokens - 1, row_cache=cache, engine=engine)

    def _engine_bytes(self, weights: int) -> dict[str, int] | None:
        """Bytes that a non-native engine holds in the generator's process. weights: bytes in float32."""
        if self.engine.type == "native":
            return None
        if not isinstance(self.engine, VllmSettings):
            return {}  # it is the server's, or not known
        own = weights if self.engine.dtype == "float32" else weights // 2
        return {"vLLM's weights": own, VLLM_CACHE: int(self.engine.cache_gib * 2**30)}

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> CausalLm:
        from polyrhythm.plugins.language.causal_lm.network import loaded_network, random_network

        config = self._config(env_spec)
        network = loaded_network(self.checkpoint) if self.checkpoint else random_network(config, seed)
        return self._adapted(env_spec, network, role, seed).to(device)

    def outline(self, env_spec: EnvSpec, *, role: Role) -> CausalLm:
        return self._empty(env_spec, self._config(env_spec), role)

    def _empty(self, env_spec: EnvSpec, config: Any, role: Role) -> CausalLm:
        from polyrhythm.plugins.language.causal_lm.network import empty_network

        return self._adapted(env_spec, empty_network(config), role, seed=0)

    def _adapted(self, env_spec: EnvSpec, network: CausalNetwork, role: Role, seed: int) -> CausalLm:
        from polyrhythm.plugins.language.causal_lm.network import adapt, recompute_layers

        adapt(network.model, self.train, self.lora, role, seed)
        if self.gradient_checkpointing and role == "train":
            recompute_layers(network.model)
        if not self.value_head:
            return CausalLm(self, env_spec, network)
        width = network.model.get_output_embeddings().in_features  # type: ignore[operator]
        with seeded(seed):
            return CausalLm(self, env_spec, network, nn.Linear(width, 1))

    def _config(self, env_spec: EnvSpec) -> Any:
        from polyrhythm.plugins.language.causal_lm.network import check_context, check_vocabulary, open_config

        _refuse_other_environment(env_spec)
        tokens = env_spec.observation[TOKENS].shape[0] + env_spec.chunk
        if not self.checkpoint:
            return self._small_llama(env_spec.action.choices, tokens)
        config = open_config(self.checkpoint)
        what = f"policy.checkpoint = {self.checkpoint}"
        if config.vocab_size < env_spec.action.choices:
            raise ConfigError(
                f"{what}: it has embeddings of {config.vocab_size} ids, the environment's tokenizer ids below "
                f"{env_spec.action.choices}; set env.tokenizer to the same folder"
            )
        check_vocabulary(self.checkpoint, env_spec.action, what)
        check_context(config, tokens, what)
        return config

    def _small_llama(self, choices: int, tokens: int) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=choices,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=tokens,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )


def _refuse_other_environment(env_spec: EnvSpec) -> None:
    """ConfigError: it is not a text environment."""
    observation, action = env_spec.observation, env_spec.action
    if not env_spec.chunk or not action.stops or action.dim != 1 or not {TOKENS, LENGTH} <= observation.keys():
        raise ConfigError(
            "policy.type = causal_lm: the environment is no text environment (prompts of tokens, messages that end); "
            "use one such as env.type = chains, or another policy"
        )
