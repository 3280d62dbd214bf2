"""OpenVLA-OFT: DINOv2 and SigLIP side by side, an MLP, and one bidirectional pass of Llama over empty action slots."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyrhythm.plugins.vla.openvla_oft.network import OpenVlaOftSize
from polyrhythm_bench.references.base import (
    Inputs,
    Reference,
    additive,
    dinov2,
    language_model,
    log_probs,
    siglip,
    value_head,
)


class OpenVlaOftReference(Reference):
    """`Dinov2WithRegistersModel`, `SiglipVisionModel`, `LlamaModel`. The towers have one layer less than the release,
    whose last one is never used."""

    nearest = "for timm's DINOv2: transformers' Dinov2WithRegistersModel of the same sizes"

    def __init__(self, size: OpenVlaOftSize) -> None:
        super().__init__()
        self.size = size
        width, vision = size.llama.width, size.dino.width + size.siglip.width
        self.dino, self.siglip = dinov2(size.dino, size.dino.layers - 1), siglip(size.siglip, size.siglip.layers - 1)
        layers = [nn.Linear(vision, 4 * vision), nn.GELU(), nn.Linear(4 * vision, width), nn.GELU()]
        self.projector = nn.Sequential(*layers, nn.Linear(width, width))
        self.language = language_model("Llama", size.llama, size.vocabulary.rows)
        self.lm_head = nn.Linear(width, size.vocabulary.rows, bias=False)
        self.critic = value_head(width)

    @torch.inference_mode()
    def act(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        scores, value = self._forward(inputs)
        tokens = torch.multinomial(scores.float().softmax(-1).flatten(0, 1), 1).view(scores.shape[:2])
        return tokens + log_probs(scores, tokens), value

    def loss(self, inputs: Inputs) -> Tensor:
        scores, value = self._forward(inputs)
        return log_probs(scores, scores.new_zeros(scores.shape[:2], dtype=torch.int64)).sum() + value.sum()

    def _forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Scores of the action rows [B,H·A,bins] and value [B,1]."""
        dtype, size, rows = self.dtype, self.size, len(inputs.tokens)
        pixels = inputs.pixels(dtype)
        dino = self.dino(pixels).last_hidden_state[:, 1 + size.dino.registers :]
        patches = self.projector(torch.cat((dino, self.siglip(pixels).last_hidden_state), dim=2))
        patches = patches.reshape(rows, -1, patches.shape[-1])
        words = self.language.embed_tokens(inputs.tokens).to(dtype)  # type: ignore[operator]
        slots = words.new_zeros(rows, size.slots, words.shape[2])
        x = torch.cat((words[:, :1], patches, words[:, 1:], slots), dim=1)
        exist = inputs.present.new_ones(rows, patches.shape[1])
        after = inputs.present.new_ones(rows, size.slots)
        present = torch.cat((inputs.present[:, :1], exist, inputs.present[:, 1:], after), dim=1)
        hidden = self.language(
            inputs_embeds=x,
            attention_mask=additive(present.unsqueeze(1).expand(-1, x.shape[1], -1), dtype),
            position_ids=present.long().cumsum(1) - 1,
            use_cache=False,
        ).last_hidden_state[:, -1 - size.slots : -1]
        ids = size.vocabulary
        return self.lm_head(hidden)[..., ids.first_action : ids.real], self.critic(hidden[:, 0].detach())
