"""π0 and π0.5: SigLIP, a Gemma over images and words, and a small Gemma that reads its cache at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.vla.pi0.network import Pi0Size
from polyrhythm_bench.references.base import (
    FlowReference,
    Inputs,
    additive,
    language_model,
    siglip,
    time_code,
    value_head,
)


class Pi0Reference(FlowReference):
    """`SiglipVisionModel`, a linear map, `GemmaModel` twice; a `DynamicCache` carries the keys and values."""

    def __init__(self, size: Pi0Size, steps: int) -> None:
        super().__init__(steps)
        self.size, self.horizon, self.action_dim = size, size.horizon, size.action_dim
        width = size.expert.width
        self.vision = siglip(size.vision)
        self.projector = nn.Linear(size.vision.width, size.vlm.width)
        self.language = language_model("Gemma", size.vlm, size.vocabulary)
        self.expert = language_model("Gemma", size.expert, 1)
        self.actions_in, self.actions_out = nn.Linear(size.action_dim, width), nn.Linear(width, size.action_dim)
        self.time_in = nn.Linear(width if size.adaptive else 2 * width, width)
        self.time_out = nn.Linear(width, width)
        self.state_in = nn.Identity() if size.adaptive else nn.Linear(size.state_dim, width)
        self.critic = value_head(size.vlm.width + size.state_dim)
        if size.adaptive:
            self.nearest = (
                "transformers' Gemma has no norms with a condition: here each norm of the expert is replaced by a "
                "module that computes scale, shift and gate and does not apply the gate"
            )
            _make_adaptive(self.expert, width)

    def prefix(self, inputs: Inputs) -> tuple[Any, Tensor]:
        from transformers import DynamicCache

        dtype, rows = self.dtype, len(inputs.tokens)
        seen = self.projector(self.vision(inputs.pixels(dtype)).last_hidden_state)
        seen = seen.reshape(rows, -1, seen.shape[-1])
        words = self.language.embed_tokens(inputs.tokens).to(dtype)  # type: ignore[operator]
        present = torch.cat((inputs.present.new_ones(rows, seen.shape[1]), inputs.present), dim=1)
        cache = DynamicCache()
        hidden = self.language(
            inputs_embeds=torch.cat((seen, words), dim=1),
            attention_mask=additive(present.unsqueeze(1) & present.unsqueeze(2), dtype),
            position_ids=present.long().cumsum(1) - 1,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        weights = present.unsqueeze(2).to(dtype)
        return (cache, present), (hidden * weights).sum(1) / weights.sum(1)

    def velocity(self, prefix: Any, inputs: Inputs, x: Tensor, t: Tensor) -> Tensor:
        cache, present = prefix
        tokens = self._tokens(inputs, x, t)
        count = tokens.shape[1]
        own = torch.ones(count, count, dtype=torch.bool, device=x.device)
        if not self.size.adaptive:
            own[0, 1:] = False
        seen = torch.cat((present.unsqueeze(1).expand(-1, count, -1), own.expand(len(x), -1, -1)), dim=2)
        hidden = self.expert(
            inputs_embeds=tokens,
            attention_mask=additive(seen, self.dtype),
            position_ids=present.sum(1, keepdim=True) + torch.arange(count, device=x.device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        cache.crop(-count)  # the next step's tokens replace these
        found: Tensor = self.actions_out(hidden[:, -self.horizon :])
        return found

    def _tokens(self, inputs: Inputs, x: Tensor, t: Tensor) -> Tensor:
        """The expert's tokens; π0.5's condition goes to its norms."""
        actions: Tensor = self.actions_in(x)
        time = time_code(t, self.size.expert.width)
        if self.size.adaptive:
            condition = functional.silu(self.time_out(functional.silu(self.time_in(time))))
            for norm in self.expert.modules():
                if isinstance(norm, AdaptiveNorm):
                    norm.condition = condition
            return actions
        both = torch.cat((actions, time.unsqueeze(1).expand_as(actions)), dim=2)
        mixed = self.time_out(functional.silu(self.time_in(both)))
        return torch.cat((self.state_in(inputs.state.to(self.dtype)).unsqueeze(1), mixed), dim=1)


class AdaptiveNorm(nn.Module):
    """RMS norm with scale and shift from `condition` [B,width], which is set before a pass."""

    condition: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, _ = self.dense(self.condition).unsqueeze(1).chunk(3, dim=2)
        normed: Tensor = functional.rms_norm(x, x.shape[-1:]) * (1.0 + scale) + shift
        return normed


def _make_adaptive(expert: Any, width: int) -> None:
    for layer in expert.layers:
        layer.input_layernorm, layer.post_attention_layernorm = AdaptiveNorm(width), AdaptiveNorm(width)
    expert.norm = AdaptiveNorm(width)
