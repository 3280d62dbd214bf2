"""GR00T N1.5: SigLIP, a linear map and Qwen3, then a diffusion transformer of torch.nn modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.vla.groot_n1d5.action_head import GrootSize, StackSize
from polyrhythm_bench.references.base import FlowReference, Inputs, language_model, siglip, time_code, value_head

_TIME_CHANNELS = 256


class GrootReference(FlowReference):
    """`SiglipVisionModel`, `Qwen3Model`, `nn.TransformerEncoderLayer`, and blocks around `nn.MultiheadAttention`, for
    one embodiment. Its cross attention makes keys and values anew at every step."""

    nearest = (
        "transformers has no diffusion transformer like GR00T's: its blocks are nn.MultiheadAttention, which keeps no "
        "keys and values from one step to the next, and nn.Linear; it crops and enlarges images as the release does"
    )

    def __init__(self, size: GrootSize, steps: int) -> None:
        super().__init__(steps)
        self.size, self.horizon, self.action_dim = size, size.horizon, size.action_dim
        width, hidden = size.dit.width, size.hidden
        self.vision = siglip(size.vision)
        self.projector = nn.Linear(size.vision.width, size.llm.width)
        self.language = language_model("Qwen3", size.llm, size.vocabulary)
        self.norm = nn.LayerNorm(size.llm.width)
        self.mixing = nn.Sequential(*(_encoder_layer(size.vl) for _ in range(size.vl.layers)))
        self.state_in = _mlp(size.state_dim, hidden, width)
        self.actions_in, self.time_mix = nn.Linear(size.action_dim, width), _mlp(2 * width, width, width)
        self.future = nn.Parameter(torch.zeros(size.future, width))
        self.places = nn.Parameter(torch.zeros(size.horizon, width))
        self.time_in = _mlp(_TIME_CHANNELS, width, width)
        contexts = (size.llm.width if index % 2 == 0 else 0 for index in range(size.dit.layers))
        self.blocks = nn.ModuleList(Block(size.dit, context) for context in contexts)
        self.last_scale, self.out = nn.Linear(width, 2 * width), nn.Linear(width, hidden)
        self.actions_out = _mlp(hidden, hidden, size.action_dim)
        self.critic = value_head(size.llm.width + size.state_dim)

    def prefix(self, inputs: Inputs) -> tuple[Any, Tensor]:
        dtype = self.dtype
        seen = self.projector(self.vision(_central(inputs.images, self.size.image).to(dtype)).last_hidden_state)
        words = self.language.embed_tokens(inputs.tokens).to(dtype)  # type: ignore[operator]
        place = (inputs.tokens == self.size.image_token).unsqueeze(2).expand_as(words)
        hidden = self.language(
            inputs_embeds=words.masked_scatter(place, seen), attention_mask=inputs.present.long(), use_cache=False
        ).last_hidden_state
        features = self.mixing(self.norm(hidden))
        return features, features.mean(1)

    def velocity(self, prefix: Any, inputs: Inputs, x: Tensor, t: Tensor) -> Tensor:
        actions = self.actions_in(x)
        code = time_code(1000.0 * t, actions.shape[2]).unsqueeze(1).expand_as(actions)
        mixed = self.time_mix(torch.cat((actions, code), dim=2)) + self.places
        state = self.state_in(inputs.state.to(self.dtype)).unsqueeze(1)
        tokens = torch.cat((state, self.future.expand(len(x), -1, -1), mixed), dim=1)
        time = self.time_in(time_code(1000.0 * t, _TIME_CHANNELS))
        for block in self.blocks:
            tokens = block(tokens, time, prefix)
        tokens = _scaled(tokens, self.last_scale(functional.silu(time)))
        found: Tensor = self.actions_out(self.out(tokens)[:, -self.horizon :])
        return found


def _central(images: Tensor, side: int, share: float = 0.95) -> Tensor:
    """The release's images: the centre of each of [B,N,S,S,3], enlarged to `side`, in whole levels -> [B·N,3,side,side]
    in -1..1."""
    whole = images.flatten(0, 1).permute(0, 3, 1, 2)
    cut = int(whole.shape[2] * share)
    edge = round((whole.shape[2] - cut) / 2)
    centre = whole[:, :, edge : edge + cut, edge : edge + cut].to(torch.float32) / 255
    levels = (functional.interpolate(centre, (side, side), mode="bilinear", antialias=True) * 255).to(torch.uint8)
    return levels.to(torch.float32) / 127.5 - 1.0


class Block(nn.Module):
    """Attention to `context` features, or to its own tokens (context 0), then an MLP."""

    def __init__(self, size: StackSize, context: int) -> None:
        super().__init__()
        width = size.width
        self.crosses = context > 0
        self.scale = nn.Linear(width, 2 * width)
        kwargs = {"kdim": context, "vdim": context} if context else {}
        self.attention = nn.MultiheadAttention(width, size.heads, batch_first=True, **kwargs)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        normed = _scaled(x, self.scale(functional.silu(time)))
        other = context if self.crosses else normed
        x = x + self.attention(normed, other, other, need_weights=False)[0]
        found: Tensor = x + self.mlp(functional.layer_norm(x, x.shape[-1:]))
        return found


def _scaled(x: Tensor, both: Tensor) -> Tensor:
    """Layer norm of x [B,T,width], scaled and shifted by `both` [B,2·width]."""
    scale, shift = both.unsqueeze(1).chunk(2, dim=2)
    return functional.layer_norm(x, x.shape[-1:]) * (1.0 + scale) + shift


def _encoder_layer(size: StackSize) -> nn.Module:
    return nn.TransformerEncoderLayer(
        size.width, size.heads, 4 * size.width, 0.0, functional.gelu, batch_first=True, norm_first=True
    )


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
