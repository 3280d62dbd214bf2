"""What all references share: their inputs, the value head, and transformers' modules for our sizes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.vla.decoder import DecoderSize
from polyrhythm.plugins.vla.vision import VisionSize

_UNITS, _TIME_PERIOD = 256, 10000.0


class Inputs(NamedTuple):
    """What a reference reads: camera images uint8 [B,N,S,S,3] in the network's size, prompt ids int64 [B,L] and which
    of them exist bool [B,L], normalised state float32 [B,S]."""

    images: Tensor
    tokens: Tensor
    present: Tensor
    state: Tensor

    def pixels(self, dtype: torch.dtype) -> Tensor:
        """All images [B·N,3,S,S] in -1..1."""
        return (self.images.flatten(0, 1).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0).to(dtype)


class Reference(nn.Module):
    """A plain policy. `act`: actions and value; `loss`: a scalar with gradient to the weights, from one training pass.

    nearest: what stands in for modules that transformers lacks, in words.
    """

    nearest = ""

    def act(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def loss(self, inputs: Inputs) -> Tensor:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype


class FlowReference(Reference):
    """A reference that denoises in K Euler steps from random noise."""

    horizon: int
    action_dim: int
    critic: nn.Module

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def prefix(self, inputs: Inputs) -> tuple[Any, Tensor]:
        """What every step reads, and features [B,W] for the value."""
        raise NotImplementedError

    def velocity(self, prefix: Any, inputs: Inputs, x: Tensor, t: Tensor) -> Tensor:
        """x [B,H,A], t [B] -> [B,H,A]."""
        raise NotImplementedError

    def value(self, features: Tensor, inputs: Inputs) -> Tensor:
        """The value head; its gradient stays out of the network, as by default in ours."""
        found: Tensor = self.critic(torch.cat((features.detach(), inputs.state.to(self.dtype)), dim=1))
        return found

    @torch.inference_mode()
    def act(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        prefix, features = self.prefix(inputs)
        rows = len(inputs.tokens)
        x = torch.randn(rows, self.horizon, self.action_dim, dtype=self.dtype, device=inputs.tokens.device)
        for step in range(self.steps):
            t = x.new_full((rows,), 1.0 - step / self.steps)
            x = x - self.velocity(prefix, inputs, x, t) / self.steps
        return x.clamp(-1.0, 1.0).float(), self.value(features, inputs).float()

    def loss(self, inputs: Inputs) -> Tensor:
        prefix, features = self.prefix(inputs)
        rows = len(inputs.tokens)
        x = torch.randn(rows, self.horizon, self.action_dim, dtype=self.dtype, device=inputs.tokens.device)
        velocity = self.velocity(prefix, inputs, x, x.new_full((rows,), 0.5))
        return velocity.sum() + self.value(features, inputs).sum()


def value_head(inputs: int) -> nn.Module:
    """An MLP to one number."""
    layers = [nn.LayerNorm(inputs), nn.Linear(inputs, _UNITS), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(_UNITS, _UNITS), nn.SiLU(), nn.Linear(_UNITS, 1))


def time_code(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of t [B] -> [B,width]."""
    exponents = torch.arange(width // 2, device=t.device) / (width // 2)
    angles = t.float().unsqueeze(1) * torch.exp(-math.log(_TIME_PERIOD) * exponents)
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(t.dtype)


def siglip(size: VisionSize, layers: int | None = None) -> nn.Module:
    """`SiglipVisionModel` without its pooling head. layers: fewer than the size has."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=layers or size.layers,
        num_attention_heads=size.heads,
        image_size=size.image,
        patch_size=size.patch,
        vision_use_head=False,
    )
    model: nn.Module = SiglipVisionModel(config)
    return model


def dinov2(size: VisionSize, layers: int) -> nn.Module:
    """`Dinov2WithRegistersModel`, the nearest to timm's tower."""
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    config = Dinov2WithRegistersConfig(
        hidden_size=size.width,
        mlp_ratio=size.mlp // size.width,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        image_size=size.image,
        patch_size=size.patch,
        num_register_tokens=size.registers,
    )
    model: nn.Module = Dinov2WithRegistersModel(config)
    return model


def language_model(family: str, size: DecoderSize, vocabulary: int) -> nn.Module:
    """`GemmaModel`, `LlamaModel` or `Qwen3Model` with its word embedding."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        rms_norm_eps=size.eps,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    )
    model: nn.Module = getattr(transformers, f"{family}Model")(config)
    return model


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What queries may look at, bool [B,Q,K], as the mask [B,1,Q,K] that transformers adds to the scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).unsqueeze(1)


def log_probs(scores: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs of tokens [...] under scores [...,K], in float32."""
    return functional.log_softmax(scores.float(), dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
