"""The network: a causal language model of transformers, from a local folder or from a random start.

    packed(tokens, packing)   features of packed whole sequences: for training
    prefill, decode           features of new positions, with a cache: for generation
    logits(features)          logits of selected features

Features and logits are separate because the logits of all positions of a large vocabulary would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.language.causal_lm.packing import Packing, SlotCache, register_attention
from polyrhythm.plugins.pretrained.folder_files import weight_files
from polyrhythm.policies.mlp import seeded
from polyrhythm.sources import local_folder
from polyrhythm.specs import ActionSpec
from polyrhythm.specs.model_folder import end_ids

#: Kinds of layers of which the state is keys and values alone.
_ATTENTION = {"full_attention", "sliding_attention"}
#: Settings by which a model changes the logits of its output layer.
_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def is_known(model_type: object) -> bool:
    """Whether transformers knows this `model_type` of config.json."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def open_config(folder: str) -> Any:
    """Configuration of a folder's model. MissingError: no such folder. ConfigError: it holds no model that fits."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    what, path = f"policy.checkpoint = {folder}", local_folder(folder)
    if not path.is_dir():
        raise MissingError(f"{what}: there is no such folder; name one with config.json (nothing is downloaded here)")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{what}: it has no config.json; name the folder of a causal language model")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for an invalid configuration
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{what}: config.json is of no model that transformers knows ({reason}); name another"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{what}: it holds a {config.model_type} model, which is no causal language model; name the folder of one"
        )
    saved = getattr(config, "architectures", None) or ()
    known = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), "ForCausalLM", "LMHeadModel")
    if saved and not saved[0].endswith(known):  # a model that was saved wrapped has a name with more before it
        raise ConfigError(f"{what}: it holds a {saved[0]}, which is no causal language model; name the folder of one")
    weight_files(path)
    _refuse_unfit(config, what)
    return config


def _refuse_unfit(config: Any, what: str) -> None:
    """ConfigError: the layers or logits of the model are not supported by the native engine."""
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if kinds:
        raise ConfigError(
            f"{what}: it has layers of the kind {', '.join(sorted(kinds))}; name a model of attention alone"
        )
    changed = [name for name in _LOGITS if getattr(config, name, None) not in (None, 1, 1.0)]
    if changed:
        raise ConfigError(f"{what}: it changes its logits by {changed[0]}, which is not supported; name another model")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not (model._supports_attention_backend and model._supports_sdpa):
        raise ConfigError(
            f"{what}: the attention of a {config.model_type} model cannot be replaced by that of packed sequences; "
            "name a model of another kind, such as llama, qwen3 or mistral"
        )


def check_context(config: Any, tokens: int, what: str) -> None:
    """ConfigError: the model's context or attention window is shorter than `tokens`."""
    limits = {"max_position_embeddings": getattr(config, "max_position_embeddings", None)}
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds):
        limits["sliding_window"] = getattr(config, "sliding_window", None)
    for name, limit in limits.items():
        if limit is not None and limit < tokens:
            raise ConfigError(
                f"{what}: its {name} is {limit}, the environment has up to {tokens} tokens (env.max_prompt_tokens + "
                f"env.max_new_tokens); lower one of them to {limit} in all"
            )


def cache_bytes(config: Any) -> int:
    """Bytes of the keys and values of one position in all layers, in float32."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * heads * width * 4)


class CausalNetwork(nn.Module):
    """A transformers model with its packed, prefill and decode passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def frozen_names(self) -> frozenset[str]:
        """Names of state_dict tensors that are not trained (`plugins.pretrained.adapting.AdaptedPolicy`)."""
        return frozenset(f"model.{name}" for name in getattr(self.model, "frozen_names", ()))

    def packed(self, tokens: Tensor, packing: Packing, cache: SlotCache | None = None) -> Tensor:
        """Features [T,width] of sequences [T] int64 packed by `packing`. cache: begun at their rows and positions."""
        found = self._features(tokens[None], None, packing.positions(tokens.device), cache, packing=packing)[0]
        assert packing.layers, "no attention layer was told where the sequences are"
        return found

    def prefill(self, tokens: Tensor, packing: Packing, rows: Tensor, cache: SlotCache) -> Tensor:
        """Like `packed`, and writes keys and values to the cache's `rows` [T]."""
        cache.begin(rows, packing.positions(tokens.device)[0])
        return self.packed(tokens, packing, cache)

    def decode(
        self, tokens: Tensor, positions: Tensor, longest: int, cache: SlotCache, *, even: bool = False
    ) -> Tensor:
        """Features [n,width] of the next token [n] int64 of the cache's first n rows, at positions [n] < `longest`.
        even: all positions equal `longest` - 1, so no mask is needed."""
        cache.advance(positions, longest)
        mask = None if even else (torch.arange(longest, device=tokens.device) <= positions[:, None])[:, None, None]
        return self._features(tokens[:, None], mask, positions[:, None], cache)[:, 0]

    def _features(
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: SlotCache | None, **options: Any
    ) -> Tensor:
        options |= {"position_ids": positions, "past_key_values": cache, "use_cache": cache is not None}
        features: Tensor = self.model.base_model(input_ids=tokens, attention_mask=mask, **options).last_hidden_state  # type: ignore[operator]
        return features

    def logits(self, features: Tensor) -> Tensor:
        found: Tensor = self.model.get_output_embeddings()(features)  # type: ignore[operator]
        return found


def empty_network(config: Any) -> CausalNetwork:
    """The network in float32, with the values that its constructor leaves."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=register_attention())
    return CausalNetwork(model)


def random_network(config: Any, seed: int) -> CausalNetwork:
    """The network with weights drawn from `seed`, on the CPU."""
    with seeded(seed):
        return empty_network(config)


def loaded_network(folder: str) -> CausalNetwork:
    """The network with the folder's weights in float32 on the CPU. ConfigError: weights are missing or damaged."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    path = local_folder(folder)
    disable_progress_bar()  # it would mix with the log
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            dtype=torch.float32,
            attn_implementation=register_attention(),
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise many types
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"policy.checkpoint = {folder}: its weights cannot be read ({reason}); fetch it again"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"policy.checkpoint = {folder}: its weights lack {missing[0]} (and {len(missing) - 1} more); fetch it again"
        )
    return CausalNetwork(model)


def recompute_layers(model: nn.Module) -> None:
    """Keep only the input of each decoder layer and recompute the rest in the backward pass. The checkpointing of
    transformers needs training mode, whose dropout would change log-probs. ValueError: there are no such layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"policy.gradient_checkpointing = true: {type(model).__name__} has no layers that can be computed again; "
            "set it to false"
        )

    def recomputed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)


def check_vocabulary(checkpoint: str, config: Any, action: ActionSpec) -> None:
    """Check that a checkpoint folder's model and tokenizer fit the environment's tokenizer.

    ConfigError: the model has too few embeddings, the largest ids of the tokenizers differ, or none of the folder's
    end-of-text tokens is a stop of the environment. Tokenizers that agree in these are not distinguished.
    """
    what, folder = f"policy.checkpoint = {checkpoint}", local_folder(checkpoint)
    if config.vocab_size < action.choices:
        raise ConfigError(
            f"{what}: it has embeddings of {config.vocab_size} ids, the environment's tokenizer ids below "
            f"{action.choices}; set env.tokenizer to the same folder"
        )
    own = _own_ids(folder)
    if own and own != action.choices:
        raise ConfigError(
            f"{what}: its own tokenizer has ids below {own}, the environment's ids below {action.choices}; set "
            "env.tokenizer to the same folder"
        )
    ends, stops = set(end_ids(folder)), set(action.stops)
    if ends and not ends & stops:
        named, stopping = (", ".join(map(str, sorted(ids))) for ids in (ends, stops))
        raise ConfigError(
            f"{what}: its end of text is token {named}, the environment's messages end at {stopping}; set "
            "env.tokenizer to the same folder, or correct eos_token_id in its generation_config.json"
        )


@lru_cache(maxsize=8)
def _own_ids(folder: Path) -> int:
    """The largest id of the folder's tokenizer.json, added tokens included, plus 1; 0 if it cannot be read."""
    from transformers import PreTrainedTokenizerFast

    try:
        known = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")).get_vocab()
    except Exception:  # noqa: BLE001 - transformers and tokenizers raise many kinds
        return 0
    return 1 + max(known.values(), default=-1)
