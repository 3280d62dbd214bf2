"""Size of a π0 or π0.5 network, from the release's values or from a folder's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.plugins.vla.layers.decoder import DecoderSize
from polyrhythm.plugins.vla.layers.siglip import SiglipSize
from polyrhythm.specs import WeightSpec

#: Gemma as the release names its variants.
VARIANTS = {
    "gemma_2b": DecoderSize(2048, 18, 16384, heads=8, kv_heads=1, head_dim=256, activation="gelu_tanh", norm_offset=1),
    "gemma_300m": DecoderSize(1024, 18, 4096, heads=8, kv_heads=1, head_dim=256, activation="gelu_tanh", norm_offset=1),
}


_VISION = SiglipSize()
_VLM, _EXPERT = "paligemma_with_expert.paligemma", "paligemma_with_expert.gemma_expert"


@dataclass(frozen=True, slots=True)
class Pi0Size:
    """Size of a network; the defaults are the release's.

    adaptive: π0.5, whose expert takes the time as condition of its norms and has no state token. vocabulary: rows of
    the word embedding, and of the expert's unused one. horizon: predicted actions (H); action_dim, state_dim: padded
    entries (A, S). periods: shortest and longest period of the time code, in units of the flow's time.
    """

    adaptive: bool = False
    vlm: DecoderSize = VARIANTS["gemma_2b"]
    expert: DecoderSize = VARIANTS["gemma_300m"]
    vision: SiglipSize = _VISION
    vocabulary: int = 257152
    expert_vocabulary: int = 257152
    horizon: int = 50
    action_dim: int = 32
    state_dim: int = 32
    periods: tuple[float, float] = (0.004, 4.0)

    def __post_init__(self) -> None:
        for field in ("layers", "heads", "kv_heads", "head_dim"):
            ours, theirs = getattr(self.vlm, field), getattr(self.expert, field)
            if ours != theirs:
                raise ValueError(
                    f"policy.size: {field} is {ours} in the language model and {theirs} in the action expert, which "
                    "reads its keys and values layer by layer; make them equal"
                )
        expected = self.expert.width if self.adaptive else 0
        if self.expert.condition != expected:
            object.__setattr__(self, "expert", replace(self.expert, condition=expected))

    @property
    def image(self) -> int:
        """Pixels along the side of an image."""
        return self.vision.image


def size_from_config(
    config: Mapping[str, Any], adaptive: bool, tensors: Mapping[str, WeightSpec] | None = None
) -> Pi0Size:
    """Size of a folder's network: from the shapes of its tensors where these determine it, else from config.json, else
    the release's.

    Reads the keys of openpi (action_horizon, action_dim) and of lerobot (chunk_size, max_action_dim). ValueError: an
    unknown variant, or inconsistent numbers.
    """
    released, seen = Pi0Size(adaptive=adaptive), _Shapes(tensors or {})
    action_dim = seen.of("action_in_proj.weight", 1) or _first(
        config, ("max_action_dim", "action_dim"), released.action_dim
    )
    words, unused = f"{_VLM}.lm_head.weight", f"{_EXPERT}.lm_head.weight"
    language = seen.under(f"{_VLM}.model.language_model")
    return Pi0Size(
        adaptive=adaptive,
        vlm=_decoder(config, "paligemma_variant", "text_config", "gemma_2b", language),
        expert=_decoder(config, "action_expert_variant", "expert_config", "gemma_300m", seen.under(f"{_EXPERT}.model")),
        vision=_vision(config, released.vision, seen.under(f"{_VLM}.model.vision_tower.vision_model")),
        vocabulary=seen.of(words) or _section(config, "text_config").get("vocab_size", released.vocabulary),
        expert_vocabulary=seen.of(unused)
        or _section(config, "expert_config").get("vocab_size", released.expert_vocabulary),
        horizon=_first(config, ("chunk_size", "action_horizon"), released.horizon),
        action_dim=action_dim,
        state_dim=seen.of("state_proj.weight", 1) or _first(config, ("max_state_dim", "state_dim"), action_dim),
        periods=(
            float(config.get("min_period", released.periods[0])),
            float(config.get("max_period", released.periods[1])),
        ),
    )


def config_from_size(size: Pi0Size, kind: str, language: int) -> dict[str, Any]:
    """The config.json of a network of this size, with lerobot's keys. language: L, tokens of the prompt."""
    return {
        "type": kind,
        "chunk_size": size.horizon,
        "n_action_steps": size.horizon,
        "max_state_dim": size.state_dim,
        "max_action_dim": size.action_dim,
        "min_period": size.periods[0],
        "max_period": size.periods[1],
        "image_resolution": [size.image, size.image],
        "tokenizer_max_length": language,
        "paligemma_variant": _variant(size.vlm),
        "action_expert_variant": _variant(size.expert),
        "vision_config": {
            "hidden_size": size.vision.width,
            "intermediate_size": size.vision.mlp,
            "num_hidden_layers": size.vision.layers,
            "num_attention_heads": size.vision.heads,
            "patch_size": size.vision.patch,
            "image_size": size.vision.image,
            "layer_norm_eps": size.vision.eps,
        },
        "text_config": {"vocab_size": size.vocabulary, "rms_norm_eps": size.vlm.eps, "rope_theta": size.vlm.theta},
        "expert_config": {
            "vocab_size": size.expert_vocabulary,
            "rms_norm_eps": size.expert.eps,
            "rope_theta": size.expert.theta,
        },
    }


def _variant(size: DecoderSize) -> str | dict[str, int]:
    for name, known in VARIANTS.items():
        if replace(size, condition=0, eps=known.eps, theta=known.theta) == known:
            return name
    return {
        "width": size.width,
        "depth": size.layers,
        "mlp_dim": size.mlp,
        "num_heads": size.heads,
        "num_kv_heads": size.kv_heads,
        "head_dim": size.head_dim,
    }


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes of the tensors under a name prefix."""

    tensors: Mapping[str, WeightSpec]
    prefix: str = ""

    def under(self, prefix: str) -> _Shapes:
        return _Shapes(self.tensors, f"{prefix}.")

    def of(self, name: str, axis: int = 0) -> int | None:
        spec = self.tensors.get(self.prefix + name)
        return None if spec is None else spec.shape[axis]

    def layers(self, prefix: str) -> int | None:
        start = self.prefix + prefix
        numbers = {name[len(start) :].partition(".")[0] for name in self.tensors if name.startswith(start)}
        return len(numbers) or None


def _decoder(config: Mapping[str, Any], key: str, section: str, released: str, seen: _Shapes) -> DecoderSize:
    variant, details = config.get(key, released), _section(config, section)
    if isinstance(variant, str) and variant not in VARIANTS:
        raise ValueError(f"config.json: {key} = {variant!r} is unknown; known are {', '.join(VARIANTS)}")
    size = VARIANTS[variant if isinstance(variant, str) else released]
    if not isinstance(variant, str):
        names = ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
        width, layers, mlp, heads, kv_heads, head_dim = (variant[name] for name in names)
        size = replace(size, width=width, layers=layers, mlp=mlp, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    return replace(
        size,
        width=seen.of("layers.0.mlp.gate_proj.weight", 1) or size.width,
        layers=seen.layers("layers.") or size.layers,
        mlp=seen.of("layers.0.mlp.gate_proj.weight") or size.mlp,
        eps=details.get("rms_norm_eps", size.eps),
        theta=float(details.get("rope_theta", size.theta)),
    )


def _vision(config: Mapping[str, Any], released: SiglipSize, seen: _Shapes) -> SiglipSize:
    details = _section(config, "vision_config")
    resolution = config.get("image_resolution", (released.image, released.image))
    if len(set(resolution)) != 1:
        raise ValueError(f"config.json: image_resolution = {list(resolution)}: π0's images are square; make them equal")
    patch = seen.of("embeddings.patch_embedding.weight", 2) or details.get("patch_size", released.patch)
    tokens = seen.of("embeddings.position_embedding.weight")
    image = math.isqrt(tokens) * patch if tokens else details.get("image_size", resolution[0])
    return SiglipSize(
        width=seen.of("embeddings.patch_embedding.weight") or details.get("hidden_size", released.width),
        layers=seen.layers("encoder.layers.") or details.get("num_hidden_layers", released.layers),
        mlp=seen.of("encoder.layers.0.mlp.fc1.weight") or details.get("intermediate_size", released.mlp),
        heads=details.get("num_attention_heads", released.heads),
        image=image,
        patch=patch,
        eps=details.get("layer_norm_eps", released.eps),
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config.get(name) or {}


def _first(config: Mapping[str, Any], names: tuple[str, ...], otherwise: Any) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), otherwise)
