"""Network of GR00T N1.5, with the parameter names of the release, and the policy's settings.

The backbone, the self-attention over its features, and the keys and values that every second block of the diffusion
transformer reads are computed once per chunk step. GR00T's time runs from 0 (noise) to 1 (data) in 1,000 buckets and
its velocity is data − noise; both are reversed here to match `FlowNetwork`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import (
    COUNT,
    Architecture,
    config_of,
    fields_of_tensors,
    read_fields,
    with_fields,
)
from polyrhythm.plugins.pretrained.precision import Precision, computing_dtype
from polyrhythm.plugins.vla.decoder import (
    CAUSAL,
    TEXT_KEYS,
    Decoder,
    additive,
    causal_mask,
    draw_unit_variance,
    gelu_mlp,
    mean_of,
    positions_of,
)
from polyrhythm.plugins.vla.flow_policy import FlowNetwork, FlowPolicy, FlowVlaSettings, Prefix
from polyrhythm.plugins.vla.groot_n1d5.action_head import (
    QWEN3,
    ActionHead,
    AdaptiveNorm,
    EmbodimentLinear,
    GrootSize,
    StackSize,
)
from polyrhythm.plugins.vla.input_plan import InputForm
from polyrhythm.plugins.vla.input_settings import InputSizeSettings, OwnOrReleased
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.prompts import PromptTable
from polyrhythm.plugins.vla.vision import SiglipVisionModel, VisionSize, tower_keys, tower_seen
from polyrhythm.specs import WeightSpec


class PoolingHead(nn.Module):
    """SigLIP's attention pooling: present in every released checkpoint, unused."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(1, 1, size.width))
        self.attention = nn.MultiheadAttention(size.width, size.heads, batch_first=True)
        self.layernorm = nn.LayerNorm(size.width, size.eps)
        self.mlp = gelu_mlp(size.width, size.mlp, size.width, approximate="tanh")


class EagleLanguageModel(nn.Module):
    """The decoder, and `lm_head`: the word embedding, which the release stores under this name."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        words = nn.Embedding(size.vocabulary, size.llm.width)
        self.model, self.lm_head = Decoder(size.llm), words


class EagleModel(nn.Module):
    """The tower with its unused head, a linear map, and the language model."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        self.image_token = size.image_token
        tower = SiglipVisionModel(size.vision)
        tower.head = PoolingHead(size.vision)
        self.vision_model: Any = nn.ModuleDict({"vision_model": tower})
        self.mlp1 = nn.Sequential(nn.Linear(size.vision.width, size.llm.width))
        self.language_model = EagleLanguageModel(size)

    def image_features(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images [B,3,side,side] in -1..1 -> [B,tokens,width]."""
        features: Tensor = self.mlp1(self.vision_model.vision_model(images, dtype))
        return features.to(dtype)

    def embed(self, images: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Word embeddings with the images' features in place of their placeholders, in order: images
        [B,N,3,side,side], tokens [B,L] with N x tokens placeholders per row -> [B,L,width]."""
        seen = self.image_features(images.flatten(0, 1), dtype).unflatten(0, images.shape[:2]).flatten(1, 2)
        place = tokens == self.image_token
        number = (place.long().cumsum(dim=1) - 1).clamp(min=0)
        first = torch.arange(0, seen.shape[0] * seen.shape[1], seen.shape[1], device=seen.device)
        words = self.language_model.lm_head(tokens).to(dtype)
        # Whole rows are looked up: as `gather` would take numbers one by one, in the backward pass too.
        at_places = functional.embedding(number + first.unsqueeze(1), seen.flatten(0, 1))
        return torch.where(place.unsqueeze(2), at_places, words)

    def forward(self, embedded: Tensor, present: Tensor | None) -> Tensor:
        """Hidden states after the last norm [B,L,width] of embedded [B,L,width], present [B,L], None for all. The
        attention of padding is zero, as from flash attention. Positions count only present tokens, so left padding has
        no effect."""
        decoder = self.language_model.model
        if present is None:
            positions = torch.arange(embedded.shape[1], device=embedded.device).unsqueeze(0)
            return decoder.hidden_of(None, embedded, positions, CAUSAL)
        mask = additive(causal_mask(present), embedded.dtype, -math.inf)
        return decoder.hidden_of(None, embedded, positions_of(present).clamp(min=0), mask)


class Backbone(nn.Module):
    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        self.eagle_model = EagleModel(size)


#: Input with the backbone's hidden states, in place of images and words.
_HIDDEN = "backbone_hidden"
_VISIBLE, _LEADING = "visible", "leading_tokens"
#: Raises a time such as 0.2, which is a little less in float32, above its bucket's edge.
_EDGE = 1e-3


class GrootNetwork(FlowNetwork):
    """GR00T N1.5 as a `FlowNetwork`.

    inputs: images [B,N,3,side,side] float32 in -1..1, input_ids [B,L] int64 with one placeholder per image token,
    attention_mask [B,L] bool, state [B,S] float32, visible [B,L] bool: the places that the head reads, by default
    attention_mask; embodiment_id [B] int64, by default `embodiment` in all rows. The release's head also reads padding,
    so its output depends on the length to which prompts are padded; a prompt without padding does not have this effect.

    padded: prompts may have padding; hides: the head does not read it. Without, attention needs no mask.
    """

    step_inputs = ("state",)
    embodiment = 0
    padded = hides = True

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        self.size, self.horizon, self.action_dim = size, size.horizon, size.action_dim
        self.feature_width, self.action_width = size.llm.width, size.hidden
        self.backbone = Backbone(size)
        self.action_head = ActionHead(size)

    def initialise(self) -> None:
        """Draw all parameters: unit variance through every linear map, first velocities near zero."""
        for module in self.modules():
            draw_unit_variance(module, embedding=0.5)
            if isinstance(module, EmbodimentLinear):
                nn.init.normal_(module.W, std=module.W.shape[1] ** -0.5)
        for module in self.modules():
            if isinstance(module, AdaptiveNorm):
                nn.init.normal_(module.linear.weight, std=0.2 * module.linear.in_features**-0.5)
        nn.init.normal_(self.action_head.action_decoder.layer2.W, std=0.02)

    def prefix_parameters(self) -> Iterable[Tensor]:
        head = self.action_head
        crossing = [block.attn1 for block in head.model.transformer_blocks[::2]]
        yield from self.backbone.parameters()
        for module in (head.vlln, head.vl_self_attention):
            yield from module.parameters()
        for attention in crossing:
            for linear in (attention.to_k, attention.to_v):  # type: ignore[union-attr]
                yield from linear.parameters()  # type: ignore[union-attr]

    def frozen_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The hidden states of a frozen backbone, and the inputs that are read beside them; {} otherwise."""
        if any(p.requires_grad for p in self.backbone.parameters()):
            return {}
        beside = {name: inputs[name] for name in self.step_inputs}
        return beside | {_VISIBLE: _visible(inputs), _HIDDEN: self._hidden(inputs)}

    def prefix(self, inputs: Mapping[str, Tensor], *, features: bool = True) -> Prefix:
        """The pass over images and language. Features are the mean over all places that the head reads."""
        seen, visible = self.features(inputs), _visible(inputs)
        keys_values = self.action_head.model.keys_values(seen)
        if not features:
            return Prefix(keys_values, visible, seen.new_empty(len(seen), 0, dtype=torch.float32))
        return Prefix(keys_values, visible, mean_of(seen.float(), visible) if self.hides else seen.float().mean(1))

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The backbone's features after the head's norm and self-attention [B,L,width]."""
        head, hidden = self.action_head, inputs.get(_HIDDEN)
        if hidden is None:
            hidden = self._hidden(inputs)
        mask = self._mask(_visible(inputs), hidden.dtype)
        found: Tensor = head.vl_self_attention(head.vlln(hidden).to(hidden.dtype), mask)
        return found

    def _hidden(self, inputs: Mapping[str, Tensor]) -> Tensor:
        eagle = self.backbone.eagle_model
        present = inputs["attention_mask"] if self.padded else None
        found: Tensor = eagle(eagle.embed(inputs["images"], inputs["input_ids"], self._dtype), present)
        return found

    def _mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Attention mask over the visible places [B,P], equal for all queries: [B,1,1,P]; None if nothing is hidden."""
        return additive(visible[:, None, None, :], dtype, -math.inf) if self.hides else None

    @property
    def _dtype(self) -> torch.dtype:
        weight = self.backbone.eagle_model.mlp1[0].weight
        assert isinstance(weight, Tensor)
        return computing_dtype(weight)

    def step_constants(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """With the transformer's tokens before those of the actions."""
        if _LEADING in inputs:
            return inputs
        embodiment = inputs.get("embodiment_id", self.embodiment)
        return {**inputs, _LEADING: self.action_head.leading_tokens(inputs["state"], embodiment)}

    def velocity(self, prefix: Prefix, inputs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        head, embodiment = self.action_head, inputs.get("embodiment_id", self.embodiment)
        bucket = (self.size.buckets * (1.0 - t) + _EDGE).long()
        leading = self.step_constants(inputs)[_LEADING]
        tokens = torch.cat((leading, head.action_tokens(x, bucket, embodiment)), dim=1).to(self._dtype)
        hidden = head.model(tokens, bucket, prefix.keys_values, self._mask(prefix.present, tokens.dtype))
        features = hidden[:, -self.horizon :].float()
        return -head.action_decoder(features, embodiment), features


def _visible(inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs[_VISIBLE] if _VISIBLE in inputs else inputs["attention_mask"]


_E = "backbone.eagle_model."
_LAYERS, _HEAD = f"{_E}language_model.model.layers.", "action_head."
_WORDS = f"{_E}language_model.lm_head.weight"
_POOLING = f"{_E}vision_model.vision_model.head.*"
_FLOW_HEADS = ("action_head.state_encoder.*", "action_head.action_encoder.*", "action_head.action_decoder.*")


def _stack_keys(name: str, section: str) -> dict[str, str]:
    keys = {"layers": "num_layers", "heads": "num_attention_heads", "head_dim": "attention_head_dim"}
    return {f"{name}.{field}": f"action_head_cfg.{section}.{key}" for field, key in keys.items()}


#: The size in config.json.
_KEYS = {
    **{f"llm.{field}": f"eagle_config.text_config.{key}" for field, key in TEXT_KEYS.items()},
    "llm.layers": "backbone_cfg.select_layer",
    **tower_keys("eagle_config.vision_config"),
    "vocabulary": "eagle_config.text_config.vocab_size",
    "image_token": "eagle_config.image_token_index",
    "hidden": "action_head_cfg.hidden_size",
    "horizon": "action_head_cfg.action_horizon|action_horizon",
    "action_dim": "action_head_cfg.action_dim",
    "state_dim": "action_head_cfg.max_state_dim",
    "embodiments": "action_head_cfg.max_num_embodiments",
    "future": "action_head_cfg.num_target_vision_tokens",
    "positions": "action_head_cfg.max_seq_len",
    "buckets": "action_head_cfg.num_timestep_buckets",
    **_stack_keys("dit", "diffusion_model_cfg"),
    **_stack_keys("vl", "vl_self_attention_cfg"),
}
_SHAPES = {
    "llm.width": (f"{_LAYERS}0.mlp.gate_proj.weight", 1),
    "llm.mlp": (f"{_LAYERS}0.mlp.gate_proj.weight", 0),
    "llm.layers": (_LAYERS, COUNT),
    "vocabulary": (_WORDS, 0),
    "embodiments": (f"{_HEAD}state_encoder.layer1.W", 0),
    "state_dim": (f"{_HEAD}state_encoder.layer1.W", 1),
    "hidden": (f"{_HEAD}state_encoder.layer1.W", 2),
    "action_dim": (f"{_HEAD}action_encoder.W1.W", 1),
    "future": (f"{_HEAD}future_tokens.weight", 0),
    "positions": (f"{_HEAD}position_embedding.weight", 0),
}
#: Other keys of the release, by the field that they repeat.
_REPEATED = {
    "action_dim": "action_head_cfg.max_action_dim",
    "dit.width": "action_head_cfg.input_embedding_dim",
    "llm.width": "action_head_cfg.backbone_embedding_dim",
    "hidden": "action_head_cfg.diffusion_model_cfg.output_dim",
}


def size_from_config(config: Mapping[str, Any], tensors: Mapping[str, WeightSpec] | None = None) -> GrootSize:
    """Size of a folder's network: from the shapes of its tensors where these determine it, else from config.json,
    else the release's. ValueError: inconsistent numbers."""
    values = read_fields(config, _KEYS) | fields_of_tensors(tensors or {}, _SHAPES)
    values |= tower_seen(tensors or {}, f"{_E}vision_model.vision_model.")
    size: GrootSize = with_fields(GrootSize(), values)
    return size


def config_from_size(size: GrootSize) -> dict[str, Any]:
    """The config.json of a network of this size, with the release's keys."""
    top = {"action_dim": "action_dim", "horizon": "action_horizon", "llm.width": "hidden_size"}
    content = {"model_type": "gr00t_n1_5", **config_of(size, top), **config_of(size, _KEYS, _REPEATED)}
    content["backbone_cfg"]["project_to_dim"] = None
    return content


GROOT_N1D5 = Architecture(
    name="groot_n1d5",
    size=size_from_config,
    network=GrootNetwork,
    config=config_from_size,
    aliases={f"{_E}language_model.model.embed_tokens.weight": _WORDS},
    unused=("action_head.value_head.*", "action_head.reinflow_explore_noise_net.*"),
    parts={
        "expert": ("action_head.*",),
        "head": ("action_head.action_decoder.*", "action_head.model.proj_out_?.*"),
        "lora": (f"{_E}language_model.model.layers.*_proj.weight", "action_head.model.*.attn1.to_*.weight"),
    },
    dead=(_POOLING,),
    float32=("*.embeddings.*", "*norm.*", "*norm?.*", "*layernorm.*", "*timestep_encoder.*", *_FLOW_HEADS),
)


class GrootSizeSettings(InputSizeSettings):
    """Form of a network that is not a checkpoint's. The default has 1 million parameters."""

    multiples: ClassVar = (("width", 2, "heads"), ("dit_width", 1, "heads"), *InputSizeSettings.multiples)

    width: int = Field(96, ge=8)
    """Features per token of the language model; heads x an even number."""
    mlp: int = Field(288, ge=8)
    """Hidden units of its MLPs."""
    layers: int = Field(2, ge=1)
    """Its layers."""
    heads: int = Field(4, ge=1)
    """Its attention heads, and those of the action head."""
    dit_width: int = Field(64, ge=8)
    """Features per token of the diffusion transformer; a multiple of heads."""
    dit_layers: int = Field(4, ge=1)
    """Its blocks; the even ones attend to images and words."""
    hidden: int = Field(64, ge=8)
    """Units of the encoders of state and actions."""

    def network(self, *, horizon: int, action_dim: int, state_dim: int) -> GrootSize:
        """Size of the network, with one embodiment and without padded entries."""
        head_dim, heads = self.width // self.heads, self.heads
        llm = replace(QWEN3, width=self.width, layers=self.layers, mlp=self.mlp, heads=heads, kv_heads=heads)
        return GrootSize(
            llm=replace(llm, head_dim=head_dim),
            vision=self.tower(),
            vocabulary=self.words,
            image_token=self.words - 1,
            vl=StackSize(1, heads, head_dim),
            dit=StackSize(self.dit_layers, heads, self.dit_width // heads),
            hidden=self.hidden,
            horizon=horizon,
            action_dim=action_dim,
            state_dim=state_dim,
            embodiments=1,
            future=4,
            positions=horizon,
        )


class GrootSettings(FlowVlaSettings):
    """GR00T N1.5 (NVIDIA 2025)."""

    architecture: ClassVar = GROOT_N1D5

    type: Literal["groot_n1d5"] = "groot_n1d5"
    """The policy's name."""
    size: OwnOrReleased[GrootSizeSettings] = GrootSizeSettings()
    """Form of the network without a checkpoint; released: full size (2.4 billion parameters), for measurements."""

    def policy(self, network: nn.Module, inputs: VlaInputs, precision: Precision) -> FlowPolicy:
        assert isinstance(network, GrootNetwork)
        plan = inputs.plan
        assert isinstance(plan.prompts, PromptTable)
        network.embodiment, network.padded = plan.embodiment, not plan.prompts.present.all()
        network.hides = network.padded and not plan.padding_counts
        return super().policy(network, inputs, precision)

    def input_form(self, size: GrootSize, source: Checkpoint | None) -> InputForm:  # noqa: ARG002 - all alike
        return InputForm(
            architecture=self.type,
            image=size.image,
            horizon=size.horizon,
            action_dim=size.action_dim,
            vocabulary=size.vocabulary,
            words=size.image_token,
            state_dim=size.state_dim,
            fill="left",
            image_token=size.image_token,
            image_tokens=size.vision.tokens,
            embodiments=size.embodiments,
        )
