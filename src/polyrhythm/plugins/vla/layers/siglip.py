"""The SigLIP vision tower (Zhai et al. 2023) with the parameter names of its Hugging Face release.

`vision_model.{embeddings,encoder.layers.N,post_layernorm}`; used by pi0, pi0.5 and GR00T N1.5. OpenVLA-OFT's SigLIP has
timm's names (`plugins.vla.layers.timm_vit`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.vla.layers.attention import attend, run_layer, split_heads


@dataclass(frozen=True, slots=True)
class SiglipSize:
    """Size of a tower. Images are square, `image` pixels, cut into squares of `patch` pixels; the remainder is
    dropped."""

    width: int = 1152
    layers: int = 27
    mlp: int = 4304
    heads: int = 16
    image: int = 224
    patch: int = 14
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.heads or self.width % self.heads:
            raise ValueError(
                f"the vision tower's width = {self.width} is not a multiple of its heads = {self.heads}; correct one"
            )

    @property
    def tokens(self) -> int:
        """Patches per image."""
        return (self.image // self.patch) ** 2


class SiglipEmbeddings(nn.Module):
    """Patches plus learned positions. The released policies keep both in float32."""

    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.position_embedding = nn.Embedding(size.tokens, size.width)

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,H,W] -> [B,tokens,width]."""
        patches: Tensor = self.patch_embedding(images.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class SiglipAttention(nn.Module):
    """Bidirectional self-attention with biases."""

    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.head_dim = size.width // size.heads
        self.k_proj = nn.Linear(size.width, size.width)
        self.v_proj = nn.Linear(size.width, size.width)
        self.q_proj = nn.Linear(size.width, size.width)
        self.out_proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (split_heads(f(x), self.head_dim) for f in (self.q_proj, self.k_proj, self.v_proj))
        found: Tensor = self.out_proj(attend(queries, keys, values, None))
        return found


class SiglipMlp(nn.Module):
    """fc2(gelu(fc1(x))) with the tanh approximation."""

    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size.width, size.mlp)
        self.fc2 = nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return found


class SiglipLayer(nn.Module):
    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size.width, size.eps)
        self.self_attn = SiglipAttention(size)
        self.layer_norm2 = nn.LayerNorm(size.width, size.eps)
        self.mlp = SiglipMlp(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        branch: Tensor = self.mlp(self.layer_norm2(x))
        return x + branch


class SiglipEncoder(nn.Module):
    """The stack of layers.

    checkpointing: recompute the layers' activations in the backward pass instead of keeping them.
    """

    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SiglipLayer(size) for _ in range(size.layers))
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = run_layer(layer, x, recompute=self.checkpointing)
        return x


class SiglipVisionModel(nn.Module):
    """Embeddings, encoder and final norm, without a pooling head."""

    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.embeddings = SiglipEmbeddings(size)
        self.encoder = SiglipEncoder(size)
        self.post_layernorm = nn.LayerNorm(size.width, size.eps)

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images [B,3,H,W] in -1..1 -> features [B,tokens,width], computed in `dtype` after the embeddings."""
        features: Tensor = self.post_layernorm(self.encoder(self.embeddings(images).to(dtype)))
        return features
