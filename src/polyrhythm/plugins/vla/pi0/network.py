"""Network of π0 and π0.5, with the parameter names of the release (openpi, lerobot).

A PaliGemma prefix (images and language, bidirectional) produces keys and values of each layer, which the action expert,
a smaller Gemma, reads at every denoise step. The prefix never attends to the suffix, so training uses the same two
passes. π0 gives the expert a state token and mixes the time into the action tokens; π0.5 has the state in the prompt
and the time as condition of the expert's norms. Time: 1 is noise, 0 is data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.pretrained.fitting import Architecture
from polyrhythm.plugins.pretrained.precision import computing_dtype
from polyrhythm.plugins.vla.flow_policy import Prefix
from polyrhythm.plugins.vla.layers.attention import AdaRMSNorm, additive, mean_of, padding_mask, positions_of
from polyrhythm.plugins.vla.layers.decoder import Decoder
from polyrhythm.plugins.vla.layers.siglip import SiglipVisionModel
from polyrhythm.plugins.vla.pi0.size import Pi0Size, config_from_size, size_from_config


class VisionTower(nn.Module):
    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.vision_model = SiglipVisionModel(size.vision)


class PaliGemmaProjector(nn.Module):
    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.linear = nn.Linear(size.vision.width, size.vlm.width)


class PaliGemmaModel(nn.Module):
    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.vision_tower = VisionTower(size)
        self.multi_modal_projector = PaliGemmaProjector(size)
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
    """The action expert, and an unused output layer that every released checkpoint has."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.model = Decoder(size.expert)
        self.lm_head = nn.Linear(size.expert.width, size.expert_vocabulary, bias=False)


class PaliGemmaWithExpert(nn.Module):
    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.paligemma = PaliGemma(size)
        self.gemma_expert = GemmaExpert(size)


class Suffix(NamedTuple):
    """Input of the expert: tokens [B,T,width] float32, and the condition of its norms [B,width] or None."""

    tokens: Tensor
    condition: Tensor | None


class Pi0Network(nn.Module):
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
        self.paligemma_with_expert = PaliGemmaWithExpert(size)
        width = size.expert.width
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
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        for module in self.modules():
            if isinstance(module, AdaRMSNorm):  # gates start open
                nn.init.normal_(module.dense.weight, std=0.5 * module.dense.in_features**-0.5)
                nn.init.ones_(module.dense.bias.data[-module.dense.out_features // 3 :])
        nn.init.normal_(self.action_out_proj.weight, std=0.02)

    def prefix_parameters(self) -> Iterable[Tensor]:
        return self.paligemma_with_expert.paligemma.parameters()

    def frozen_inputs(self, _inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def prefix(self, inputs: Mapping[str, Tensor], *, features: bool = True) -> Prefix:
        """The pass over images and language. features: False returns [B,0] and skips the end of the last layer.

        Features are the mean hidden state of all present tokens after the last norm.
        """
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
        hidden = self.expert_hidden(prefix, self.embed_suffix(inputs, x, t))
        features = hidden[:, -self.horizon :].float()
        return self.action_out_proj(features), features

    def embed_suffix(self, inputs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> Suffix:
        """The expert's tokens for the flow's state x [B,H,A] at time t [B]; its layers have float32 weights."""
        time, actions = self.time_code(t), self.action_in_proj(x.float())
        if self.size.adaptive:
            condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(time))))
            return Suffix(actions, condition)
        both = torch.cat((actions, time.unsqueeze(1).expand_as(actions)), dim=2)
        mixed = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(both)))
        return Suffix(torch.cat((self.state_proj(inputs["state"].float()).unsqueeze(1), mixed), dim=1), None)

    def time_code(self, t: Tensor) -> Tensor:
        """sin and cos of the time t [B] at geometric periods -> [B,width] float32, computed in float64."""
        shortest, longest = self.size.periods
        steps = torch.linspace(0.0, 1.0, self.size.expert.width // 2, dtype=torch.float64, device=t.device)
        angles = t.double().unsqueeze(1) * (2.0 * math.pi / (shortest * (longest / shortest) ** steps))
        return torch.cat((angles.sin(), angles.cos()), dim=1).float()

    def expert_hidden(self, prefix: Prefix, suffix: Suffix) -> Tensor:
        """The expert's hidden states after its last norm [B,T,width]."""
        tokens = suffix.tokens.to(self._dtype)
        mask, positions = self.suffix_mask(prefix.present, tokens.shape[1])
        expert = self.paligemma_with_expert.gemma_expert.model
        hidden, _ = expert(tokens, positions, mask, prefix.keys_values, suffix.condition)
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
_WORDS = f"{_P}paligemma.lm_head.weight"
_HEADS = ("action_*", "state_proj.*", "time_mlp_*")


def dead_tensors(size: Pi0Size, *, features: bool = False) -> tuple[str, ...]:
    """Name patterns of the tensors that do not affect any output. features: a module learns from the prefix
    features, which otherwise are the only use of the end of the last layer."""
    never = (f"{_P}gemma_expert.lm_head.weight",)
    if features:
        return never
    language = f"{_P}paligemma.model.language_model"
    last = f"{language}.layers.{size.vlm.layers - 1}"
    ends = ("self_attn.q_proj.*", "self_attn.o_proj.*", "mlp.*", "post_attention_layernorm.*")
    return (*never, f"{language}.norm.*", *(f"{last}.{end}" for end in ends))


def _architecture(name: str, *, adaptive: bool) -> Architecture:
    return Architecture(
        name=name,
        size=lambda config, tensors: size_from_config(config, adaptive, tensors),
        network=Pi0Network,
        config=lambda size: config_from_size(size, name, 200 if adaptive else 48),
        aliases={f"{_P}paligemma.model.language_model.embed_tokens.weight": _WORDS},
        optional=(f"{_P}gemma_expert.lm_head.weight",),
        unused=(f"{_P}gemma_expert.model.embed_tokens.weight", "value_head.*", "noise_head.*"),
        parts={
            "expert": (f"{_P}gemma_expert.*", *_HEADS),
            "head": ("action_out_proj.*", f"{_P}gemma_expert.model.norm.*"),
            "lora": (f"{_P}*language_model.layers.*_proj.weight", f"{_P}gemma_expert.model.layers.*_proj.weight"),
        },
        dead=dead_tensors(Pi0Size()),
        float32=("*.embeddings.*", "*norm.*", "*layernorm.*", "*layer_norm?.*", *_HEADS),
    )


PI0 = _architecture("pi0", adaptive=False)
PI05 = _architecture("pi05", adaptive=True)
