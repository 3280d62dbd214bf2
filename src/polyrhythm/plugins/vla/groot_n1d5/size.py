"""Size of a GR00T N1.5 network, from the release's values or from a folder's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.plugins.vla.layers.decoder import DecoderSize
from polyrhythm.plugins.vla.layers.siglip import SiglipSize
from polyrhythm.specs import WeightSpec

#: Qwen3 1.7B, of whose 28 layers the release keeps 12.
QWEN3 = DecoderSize(2048, 12, 6144, heads=16, kv_heads=8, head_dim=128, activation="silu", theta=1e6, qk_norm=True)
_VISION = SiglipSize()
_EAGLE, _HEAD = "backbone.eagle_model", "action_head"


@dataclass(frozen=True, slots=True)
class StackSize:
    """Size of a stack of transformer blocks of the action head."""

    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


_VL = StackSize(4, 32, 64)
_DIT = StackSize(16, 32, 48)


@dataclass(frozen=True, slots=True)
class GrootSize:
    """Size of a network; the defaults are the release's.

    image_token: id of the placeholder for image tokens. vl: self-attention over the backbone's features; dit: the
    diffusion transformer. hidden: units of the encoders and of the transformer's output. horizon: predicted actions
    (H); action_dim, state_dim: padded entries (A, S). future: learned tokens between state and actions. positions: rows
    of the position table; buckets: of the transformer's time.
    """

    llm: DecoderSize = QWEN3
    vision: SiglipSize = _VISION
    vocabulary: int = 151680
    image_token: int = 151669
    vl: StackSize = _VL
    dit: StackSize = _DIT
    hidden: int = 1024
    horizon: int = 16
    action_dim: int = 32
    state_dim: int = 64
    embodiments: int = 32
    future: int = 32
    positions: int = 1024
    buckets: int = 1000

    def __post_init__(self) -> None:
        if self.vl.width != self.llm.width:
            raise ValueError(
                f"policy.size: vl has heads x head_dim = {self.vl.width} and the language model width = "
                f"{self.llm.width}; make them equal"
            )
        if self.positions < self.horizon:
            raise ValueError(f"policy.size: positions = {self.positions} is below horizon = {self.horizon}; raise it")

    @property
    def image(self) -> int:
        """Pixels along the side of an image."""
        return self.vision.image


def size_from_config(config: Mapping[str, Any], tensors: Mapping[str, WeightSpec] | None = None) -> GrootSize:
    """Size of a folder's network: from the shapes of its tensors where these determine it, else from config.json,
    else the release's. ValueError: inconsistent numbers."""
    released, shapes = GrootSize(), tensors or {}
    head, backbone = _section(config, "action_head_cfg"), _section(config, "backbone_cfg")
    eagle = _section(config, "eagle_config")

    def shape(name: str, axis: int, otherwise: int) -> int:
        return shapes[name].shape[axis] if name in shapes else otherwise

    words = f"{_EAGLE}.language_model.lm_head.weight"
    return GrootSize(
        llm=_decoder(_section(eagle, "text_config"), backbone, shapes),
        vision=_vision(_section(eagle, "vision_config"), shapes),
        vocabulary=shape(words, 0, _section(eagle, "text_config").get("vocab_size", released.vocabulary)),
        image_token=eagle.get("image_token_index", released.image_token),
        vl=_stack(_section(head, "vl_self_attention_cfg"), released.vl),
        dit=_stack(_section(head, "diffusion_model_cfg"), released.dit),
        hidden=shape(f"{_HEAD}.state_encoder.layer1.W", 2, head.get("hidden_size", released.hidden)),
        horizon=head.get("action_horizon", config.get("action_horizon", released.horizon)),
        action_dim=shape(f"{_HEAD}.action_encoder.W1.W", 1, head.get("action_dim", released.action_dim)),
        state_dim=shape(f"{_HEAD}.state_encoder.layer1.W", 1, head.get("max_state_dim", released.state_dim)),
        embodiments=shape(f"{_HEAD}.state_encoder.layer1.W", 0, head.get("max_num_embodiments", released.embodiments)),
        future=shape(f"{_HEAD}.future_tokens.weight", 0, head.get("num_target_vision_tokens", released.future)),
        positions=shape(f"{_HEAD}.position_embedding.weight", 0, head.get("max_seq_len", released.positions)),
        buckets=head.get("num_timestep_buckets", released.buckets),
    )


def config_from_size(size: GrootSize) -> dict[str, Any]:
    """The config.json of a network of this size, with the release's keys."""
    return {
        "model_type": "gr00t_n1_5",
        "action_dim": size.action_dim,
        "action_horizon": size.horizon,
        "hidden_size": size.llm.width,
        "backbone_cfg": {"select_layer": size.llm.layers, "project_to_dim": None},
        "action_head_cfg": {
            "action_dim": size.action_dim,
            "action_horizon": size.horizon,
            "backbone_embedding_dim": size.llm.width,
            "hidden_size": size.hidden,
            "input_embedding_dim": size.dit.width,
            "max_action_dim": size.action_dim,
            "max_state_dim": size.state_dim,
            "max_seq_len": size.positions,
            "max_num_embodiments": size.embodiments,
            "num_target_vision_tokens": size.future,
            "num_timestep_buckets": size.buckets,
            "diffusion_model_cfg": _stack_config(size.dit) | {"output_dim": size.hidden},
            "vl_self_attention_cfg": _stack_config(size.vl),
        },
        "eagle_config": {
            "image_token_index": size.image_token,
            "text_config": {
                "head_dim": size.llm.head_dim,
                "hidden_size": size.llm.width,
                "intermediate_size": size.llm.mlp,
                "num_attention_heads": size.llm.heads,
                "num_key_value_heads": size.llm.kv_heads,
                "rms_norm_eps": size.llm.eps,
                "rope_theta": size.llm.theta,
                "vocab_size": size.vocabulary,
            },
            "vision_config": {
                "hidden_size": size.vision.width,
                "image_size": size.vision.image,
                "intermediate_size": size.vision.mlp,
                "layer_norm_eps": size.vision.eps,
                "num_attention_heads": size.vision.heads,
                "num_hidden_layers": size.vision.layers,
                "patch_size": size.vision.patch,
            },
        },
    }


def _stack_config(size: StackSize) -> dict[str, int]:
    return {
        "num_layers": size.layers,
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_dim,
    }


def _decoder(text: Mapping[str, Any], backbone: Mapping[str, Any], shapes: Mapping[str, WeightSpec]) -> DecoderSize:
    start = f"{_EAGLE}.language_model.model.layers."
    stored = {name[len(start) :].partition(".")[0] for name in shapes if name.startswith(start)}
    gate = shapes.get(f"{start}0.mlp.gate_proj.weight")
    return replace(
        QWEN3,
        width=gate.shape[1] if gate else text.get("hidden_size", QWEN3.width),
        layers=len(stored) or backbone.get("select_layer", QWEN3.layers),
        mlp=gate.shape[0] if gate else text.get("intermediate_size", QWEN3.mlp),
        heads=text.get("num_attention_heads", QWEN3.heads),
        kv_heads=text.get("num_key_value_heads", QWEN3.kv_heads),
        head_dim=text.get("head_dim", QWEN3.head_dim),
        eps=text.get("rms_norm_eps", QWEN3.eps),
        theta=float(text.get("rope_theta", QWEN3.theta)),
    )


def _vision(details: Mapping[str, Any], shapes: Mapping[str, WeightSpec]) -> SiglipSize:
    start = f"{_EAGLE}.vision_model.vision_model."
    patches, positions = (
        shapes.get(f"{start}embeddings.{name}.weight") for name in ("patch_embedding", "position_embedding")
    )
    layers = {
        name.partition(".encoder.layers.")[2].partition(".")[0]
        for name in shapes
        if name.startswith(f"{start}encoder.layers.")
    }
    patch = patches.shape[2] if patches else details.get("patch_size", _VISION.patch)
    return SiglipSize(
        width=patches.shape[0] if patches else details.get("hidden_size", _VISION.width),
        layers=len(layers) or details.get("num_hidden_layers", _VISION.layers),
        mlp=details.get("intermediate_size", _VISION.mlp),
        heads=details.get("num_attention_heads", _VISION.heads),
        image=math.isqrt(positions.shape[0]) * patch if positions else details.get("image_size", _VISION.image),
        patch=patch,
        eps=details.get("layer_norm_eps", _VISION.eps),
    )


def _stack(details: Mapping[str, Any], released: StackSize) -> StackSize:
    return StackSize(
        details.get("num_layers", released.layers),
        details.get("num_attention_heads", released.heads),
        details.get("attention_head_dim", released.head_dim),
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config.get(name) or {}
