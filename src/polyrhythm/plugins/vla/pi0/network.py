"""Network of π0 and π0.5, with the parameter names of the release (openpi, lerobot).

A PaliGemma prefix (images and language, bidirectional) produces keys and values of each layer, which the action expert,
a smaller Gemma, reads at every denoise step. The prefix never attends to the suffix, so training uses the same two
passes. π0 gives the expert a state token and mixes the time into the action tokens; π0.5 has the state in the prompt
and the time as condition of the expert's norms. Time: 1 is noise, 0 is data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.pretrained.fitting import (
    COUNT,
    Architecture,
    config_of,
    fields_of_tensors,
    read_fields,
    with_fields,
)
from polyrhythm.plugins.pretrained.precision import computing_dtype
from polyrhythm.plugins.vla.decoder import (
    AdaRMSNorm,
    Decoder,
    DecoderSize,
    additive,
    draw_unit_variance,
    for_shared_heads,
    mean_of,
    padding_mask,
    positions_of,
)
from polyrhythm.plugins.vla.flow_policy import FlowNetwork, Prefix
from polyrhythm.plugins.vla.vision import SIGLIP, SiglipVisionModel, VisionSize, tower_keys, tower_seen
from polyrhythm.policies.constants import kept
from polyrhythm.specs import WeightSpec

#: Gemma as the release names its variants.
VARIANTS = {
    "gemma_2b": DecoderSize(2048, 18, 16384, heads=8, kv_heads=1, head_dim=256, activation="gelu_tanh", norm_offset=1),
    "gemma_300m": DecoderSize(1024, 18, 4096, heads=8, kv_heads=1, head_dim=256, activation="gelu_tanh", norm_offset=1),
}


@dataclass(frozen=True, slots=True)
class Pi0Size:
    """Size of a network; the defaults are the release's.

    adaptive: π0.5, whose expert takes the time as condition of its norms and has no state token. vocabulary: rows of
    the word embedding, and of the expert's unused one. horizon: predicted actions (H); action_dim, state_dim: padded
    entries (A, S). min_period, max_period: of the time code, in units of the flow's time.
    """

    adaptive: bool = False
    vlm: DecoderSize = VARIANTS["gemma_2b"]
    expert: DecoderSize = VARIANTS["gemma_300m"]
    vision: VisionSize = SIGLIP
    vocabulary: int = 257152
    expert_vocabulary: int = 257152
    horizon: int = 50
    action_dim: int = 32
    state_dim: int = 32
    min_period: float = 0.004
    max_period: float = 4.0

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


@kept
def _frequencies(shortest: float, longest: float, width: int, device: torch.device) -> Tensor:
    """Radians per unit of the flow's time, of `width` / 2 geometric periods, float64."""
    with torch.inference_mode(False):
        steps = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=device)
        return 2.0 * math.pi / (shortest * (longest / shortest) ** steps)


class PaliGemmaModel(nn.Module):
    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.vision_tower: Any = nn.ModuleDict({"vision_model": SiglipVisionModel(size.vision)})
        self.multi_modal_projector: Any = nn.ModuleDict({"linear": nn.Linear(size.vision.width, size.vlm.width)})
        self.language_model = Decoder(size.vlm)


class PaliGemma(nn.Module):
    """The model, and `lm_head`: the word embedding, which the release stores only under this name."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.model = PaliGemmaModel(size)
        self.lm_head = nn.Embedding(size.vocabulary, size.vlm.width)

    def image_features(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images [B,3,side,side] in -1..1 -> unscaled features [B,tokens,width] in `dtype`."""
        seen = self.model.vision_tower.vision_model(images, dtype)
        features: Tensor = self.model.multi_modal_projector.linear(seen)
        return features.to(dtype)

    def word_features(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Ids [B,L] -> embeddings times √width [B,L,width] in `dtype`."""
        features: Tensor = self.lm_head(tokens).to(dtype) * math.sqrt(self.lm_head.embedding_dim)
        return features


class GemmaExpert(nn.Module):
    """The expert, and `lm_head`, which is in every release but unused."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.model = Decoder(size.expert)
        self.lm_head = nn.Linear(size.expert.width, size.expert_vocabulary, bias=False)


class PaliGemmaWithExpert(nn.Module):
    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.paligemma, self.gemma_expert = PaliGemma(size), GemmaExpert(size)


class Pi0Network(FlowNetwork):
    """π0, or π0.5 if the size is adaptive, as a `FlowNetwork`.

    inputs: images [B,N,3,side,side] float32 in -1..1 of the policy's N (at most three) cameras, image_present [B,N]
    bool, tokens [B,L] int64, token_present [B,L] bool, state [B,S] float32 (π0). Omitting an absent camera is
    equivalent to masking it.
    """

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.size, self.horizon, self.action_dim = size, size.horizon, size.action_dim
        self.feature_width, self.action_width = size.vlm.width, size.expert.width
        self.step_inputs = () if size.adaptive else ("state",)
        width = size.expert.width
        self.paligemma_with_expert = PaliGemmaWithExpert(size)
        self.action_in_proj = nn.Linear(size.action_dim, width)
        self.action_out_proj = nn.Linear(width, size.action_dim)
        if size.adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(size.state_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def initialise(self) -> None:
        """Draw all parameters: unit variance through every linear map, first velocities near zero."""
        for module in self.modules():
            draw_unit_variance(module)
        for module in self.modules():
            if isinstance(module, AdaRMSNorm):  # gates start open
                nn.init.normal_(module.dense.weight, std=0.5 * module.dense.in_features**-0.5)
                nn.init.ones_(module.dense.bias.data[-module.dense.out_features // 3 :])
        nn.init.normal_(self.action_out_proj.weight, std=0.02)

    def prefix_parameters(self) -> Iterable[Tensor]:
        yield from self.paligemma_with_expert.paligemma.parameters()

    def prefix(self, inputs: Mapping[str, Tensor], *, features: bool = True) -> Prefix:
        """The pass over images and language. Features are the mean hidden state of all present tokens after the last
        norm; without them the end of the last layer is skipped."""
        embedded, present = self.embed_prefix(inputs)
        positions, mask = positions_of(present), additive(padding_mask(present), embedded.dtype)
        language = self.paligemma_with_expert.paligemma.model.language_model
        if features:
            hidden, found = language(embedded, positions, mask)
            return Prefix(tuple(found), present, mean_of(hidden.float(), present))
        found = language.keys_values(embedded, positions, mask)
        return Prefix(tuple(found), present, torch.empty(len(present), 0, device=present.device))

    def embed_prefix(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Embeddings of the images' tokens, then of the language [B,P,width], and the present ones [B,P]."""
        paligemma, images = self.paligemma_with_expert.paligemma, inputs["images"]
        dtype = self._dtype
        seen = paligemma.image_features(images.flatten(0, 1), dtype)  # [B·N,tokens,width]
        seen = seen.view(len(images), -1, seen.shape[-1])
        image_present = inputs["image_present"].repeat_interleave(self.size.vision.tokens, dim=1)
        embedded = torch.cat((seen, paligemma.word_features(inputs["tokens"], dtype)), dim=1)
        return embedded, torch.cat((image_present, inputs["token_present"]), dim=1)

    def velocity(self, prefix: Prefix, inputs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.expert_hidden(prefix, *self.embed_suffix(inputs, x, t))
        features = hidden[:, -self.horizon :].float()
        return self.action_out_proj(features), features

    def embed_suffix(self, inputs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """The expert's tokens [B,T,width] float32 for the flow's state x [B,H,A] at time t [B], and the condition of
        its norms [B,width] or None; its layers have float32 weights."""
        time, actions = self.time_code(t), self.action_in_proj(x.float())
        if self.size.adaptive:
            condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(time))))
            return actions, condition
        both = torch.cat((actions, time.unsqueeze(1).expand_as(actions)), dim=2)
        mixed = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(both)))
        return torch.cat((self.state_proj(inputs["state"].float()).unsqueeze(1), mixed), dim=1), None

    def time_code(self, t: Tensor) -> Tensor:
        """sin and cos of the time t [B] at geometric periods -> [B,width] float32, computed in float64."""
        size = self.size
        angles = t.double().unsqueeze(1) * _frequencies(size.min_period, size.max_period, size.expert.width, t.device)
        return torch.cat((angles.sin(), angles.cos()), dim=1).float()

    def expert_hidden(self, prefix: Prefix, tokens: Tensor, condition: Tensor | None) -> Tensor:
        """The expert's hidden states after its last norm [B,T,width]."""
        tokens = tokens.to(self._dtype)
        mask, positions = self.suffix_mask(prefix.present, tokens.shape[1])
        expert, sharing = self.paligemma_with_expert.gemma_expert.model, self.size.expert.heads_per_key
        summands = additive(for_shared_heads(mask, sharing), tokens.dtype)
        hidden, _ = expert(tokens, positions, summands, prefix.keys_values, condition)
        assert isinstance(hidden, Tensor)
        return hidden

    def suffix_mask(self, present: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Visibility of prefix and suffix for each suffix token [B,1,T,P+T], and positions [B,T]: the state token
        attends to no action."""
        order = torch.arange(length, device=present.device)
        own = (order.unsqueeze(1) > 0) | (order == 0)  # the first token attends only to itself
        if self.size.adaptive:
            own = torch.ones_like(own)
        seen = torch.cat((present.unsqueeze(1).expand(-1, length, -1), own.expand(len(present), -1, -1)), dim=2)
        positions = present.sum(1, keepdim=True) + order
        return seen.unsqueeze(1), positions

    @property
    def _dtype(self) -> torch.dtype:
        return computing_dtype(self.paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight)


_P = "paligemma_with_expert."
_LANGUAGE, _EXPERT = f"{_P}paligemma.model.language_model.", f"{_P}gemma_expert.model."
_WORDS, _UNUSED_WORDS = f"{_P}paligemma.lm_head.weight", f"{_P}gemma_expert.lm_head.weight"
_HEADS = ("action_*", "state_proj.*", "time_mlp_*")


def _decoder_shapes(name: str, start: str) -> dict[str, tuple[str, int]]:
    gate = f"{start}layers.0.mlp.gate_proj.weight"
    return {f"{name}.width": (gate, 1), f"{name}.mlp": (gate, 0), f"{name}.layers": (f"{start}layers.", COUNT)}


#: The size in config.json: keys of lerobot and of openpi.
_KEYS = {
    "horizon": "chunk_size|action_horizon",
    "state_dim": "max_state_dim|state_dim",
    "action_dim": "max_action_dim|action_dim",
    "min_period": "min_period",
    "max_period": "max_period",
    **tower_keys("vision_config"),
    "vocabulary": "text_config.vocab_size",
    "vlm.eps": "text_config.rms_norm_eps",
    "vlm.theta": "text_config.rope_theta",
    "expert_vocabulary": "expert_config.vocab_size",
    "expert.eps": "expert_config.rms_norm_eps",
    "expert.theta": "expert_config.rope_theta",
}
_SHAPES = {
    "action_dim": ("action_in_proj.weight", 1),
    "state_dim": ("state_proj.weight", 1),
    "vocabulary": (_WORDS, 0),
    "expert_vocabulary": (_UNUSED_WORDS, 0),
    **_decoder_shapes("vlm", _LANGUAGE),
    **_decoder_shapes("expert", _EXPERT),
}
#: A decoder's variant -> its own keys.
_VARIANT = {
    "width": "width",
    "layers": "depth",
    "mlp": "mlp_dim",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
_VARIANTS = {"vlm": ("paligemma_variant", "gemma_2b"), "expert": ("action_expert_variant", "gemma_300m")}


def size_from_config(
    config: Mapping[str, Any], adaptive: bool, tensors: Mapping[str, WeightSpec] | None = None
) -> Pi0Size:
    """Size of a folder's network: from the shapes of its tensors where these determine it, else from config.json, else
    the release's. ValueError: an unknown variant, or inconsistent numbers."""
    size = Pi0Size(adaptive=adaptive)
    resolution = config.get("image_resolution", (size.image, size.image))
    if len(set(resolution)) != 1:
        raise ValueError(f"config.json: image_resolution = {list(resolution)}: π0's images are square; make them equal")
    values = {"vision.image": resolution[0]} | read_fields(config, _KEYS) | fields_of_tensors(tensors or {}, _SHAPES)
    values |= tower_seen(tensors or {}, f"{_P}paligemma.model.vision_tower.vision_model.")
    values.setdefault("state_dim", values.get("action_dim", size.action_dim))
    for name, (key, released) in _VARIANTS.items():
        variant = config.get(key, released)
        if isinstance(variant, str) and variant not in VARIANTS:
            raise ValueError(f"config.json: {key} = {variant!r} is unknown; known are {', '.join(VARIANTS)}")
        own = asdict(VARIANTS[variant]) if isinstance(variant, str) else {of: variant[k] for of, k in _VARIANT.items()}
        values = {f"{name}.{field}": value for field, value in own.items()} | values
    found: Pi0Size = with_fields(size, values)
    return found


def config_from_size(size: Pi0Size, kind: str, language: int) -> dict[str, Any]:
    """The config.json of a network of this size, with lerobot's keys. language: L, tokens of the prompt."""
    content = {"type": kind, **config_of(size, _KEYS), "n_action_steps": size.horizon, "tokenizer_max_length": language}
    content["image_resolution"] = [size.image, size.image]
    for name, (key, _) in _VARIANTS.items():
        own: DecoderSize = getattr(size, name)
        plain = {known: replace(one, eps=own.eps, theta=own.theta) for known, one in VARIANTS.items()}
        named = next((known for known, one in plain.items() if one == replace(own, condition=0)), None)
        content[key] = named or config_of(own, _VARIANT)
    return content


def dead_tensors(size: Pi0Size, *, features: bool = False) -> tuple[str, ...]:
    """Name patterns of the tensors that do not affect any output. features: a module learns from the prefix
    features, which otherwise are the only use of the end of the last layer."""
    if features:
        return (_UNUSED_WORDS,)
    last = f"{_LANGUAGE}layers.{size.vlm.layers - 1}"
    ends = ("self_attn.q_proj.*", "self_attn.o_proj.*", "mlp.*", "post_attention_layernorm.*")
    return (_UNUSED_WORDS, f"{_LANGUAGE}norm.*", *(f"{last}.{end}" for end in ends))


def _architecture(name: str, *, adaptive: bool) -> Architecture:
    return Architecture(
        name=name,
        size=lambda config, tensors: size_from_config(config, adaptive, tensors),
        network=Pi0Network,
        config=lambda size: config_from_size(size, name, 200 if adaptive else 48),
        aliases={f"{_LANGUAGE}embed_tokens.weight": _WORDS},
        optional=(_UNUSED_WORDS,),
        unused=(f"{_EXPERT}embed_tokens.weight", "value_head.*", "noise_head.*"),
        parts={
            "expert": (f"{_P}gemma_expert.*", *_HEADS),
            "head": ("action_out_proj.*", f"{_EXPERT}norm.*"),
            "lora": (f"{_P}*language_model.layers.*_proj.weight", f"{_EXPERT}layers.*_proj.weight"),
        },
        dead=dead_tensors(Pi0Size()),
        float32=("*.embeddings.*", "*norm.*", "*layernorm.*", "*layer_norm?.*", *_HEADS),
    )


PI0 = _architecture("pi0", adaptive=False)
PI05 = _architecture("pi05", adaptive=True)
