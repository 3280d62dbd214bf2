"""The form of a π0 or π0.5 network, from the release's numbers or from a folder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.policies.layers.decoder import DecoderSize
from polyrhythm.policies.layers.siglip import SiglipSize

#: Gemma as the release names its variants.
VARIANTS = {
    "gemma_2b": DecoderSize(2048, 18, 16384, heads=8, kv_heads=1, head_dim=256, activation="gelu_tanh", norm_offset=1),
    "gemma_300m": DecoderSize(1024, 18, 4096, heads=8, kv_heads=1, head_dim=256, activation="gelu_tanh", norm_offset=1),
}


_VISION = SiglipSize()


@dataclass(frozen=True, slots=True)
class Pi0Size:
    """The form of a network; the defaults are the release's.

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


def size_from_config(config: Mapping[str, Any], adaptive: bool) -> Pi0Size:
    """The form that a folder's config.json describes; absent keys have the release's values.

    Understands the keys of openpi (action_horizon, action_dim) and of lerobot (chunk_size, max_action_dim).
    ValueError: an unknown variant, or numbers that do not fit together.
    """
    released = Pi0Size(adaptive=adaptive)
    action_dim = _first(config, ("max_action_dim", "action_dim"), released.action_dim)
    return Pi0Size(
        adaptive=adaptive,
        vlm=_decoder(config, "paligemma_variant", "text_config", "gemma_2b"),
        expert=_decoder(config, "action_expert_variant", "expert_config", "gemma_300m"),
        vision=_vision(config, released.vision),
        vocabulary=_section(config, "text_config").get("vocab_size", released.vocabulary),
        expert_vocabulary=_section(config, "expert_config").get("vocab_size", released.expert_vocabulary),
        horizon=_first(config, ("chunk_size", "action_horizon"), released.horizon),
        action_dim=action_dim,
        state_dim=_first(config, ("max_state_dim", "state_dim"), action_dim),
        periods=(
            float(config.get("min_period", released.periods[0])),
            float(config.get("max_period", released.periods[1])),
        ),
    )


def _decoder(config: Mapping[str, Any], key: str, section: str, released: str) -> DecoderSize:
    variant = config.get(key, released)
    details = _section(config, section)
    if isinstance(variant, str):
        if variant not in VARIANTS:
            raise ValueError(f"config.json: {key} = {variant!r} is unknown; known are {', '.join(VARIANTS)}")
        size = VARIANTS[variant]
    else:
        size = replace(
            VARIANTS[released],
            width=variant["width"],
            layers=variant["depth"],
            mlp=variant["mlp_dim"],
            heads=variant["num_heads"],
            kv_heads=variant["num_kv_heads"],
            head_dim=variant["head_dim"],
        )
    return replace(
        size, eps=details.get("rms_norm_eps", size.eps), theta=float(details.get("rope_theta", size.theta))
    )


def _vision(config: Mapping[str, Any], released: SiglipSize) -> SiglipSize:
    details = _section(config, "vision_config")
    resolution = config.get("image_resolution", (released.image, released.image))
    if len(set(resolution)) != 1:
        raise ValueError(f"config.json: image_resolution = {list(resolution)}: the images of π0 are square")
    return SiglipSize(
        width=details.get("hidden_size", released.width),
        layers=details.get("num_hidden_layers", released.layers),
        mlp=details.get("intermediate_size", released.mlp),
        heads=details.get("num_attention_heads", released.heads),
        image=details.get("image_size", resolution[0]),
        patch=details.get("patch_size", released.patch),
        eps=details.get("layer_norm_eps", released.eps),
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config.get(name) or {}


def _first(config: Mapping[str, Any], names: tuple[str, ...], otherwise: Any) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), otherwise)
