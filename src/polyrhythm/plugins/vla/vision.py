"""Vision transformers: SigLIP (Zhai et al. 2023) by Hugging Face's names, and DINOv2 (Oquab et al. 2023) and SigLIP by
timm's.

`vision_model.{embeddings,encoder.layers.N,post_layernorm}` is the tower of π0, π0.5 and GR00T N1.5. OpenVLA-OFT has
timm's (`VisionTransformer`), of which only the second-to-last block's features are used, without the final norm. The
last block, that norm and SigLIP's pooling exist because the release has their tensors; they are never computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.plugins.pretrained.fitting import COUNT, fields_of_tensors
from polyrhythm.plugins.vla.decoder import attend, gelu_mlp, run_layer, split_heads
from polyrhythm.specs import WeightSpec


@dataclass(frozen=True, slots=True)
class VisionSize:
    """Size of a tower. Images are square, `image` pixels, cut into squares of `patch` pixels; the remainder is dropped.

    registers: register tokens (Darcet et al. 2023), accompanied by a class token, 0 for neither; layer_scale: each
    branch is multiplied by learned factors; pooled: the release has an attention pooling. These three: timm's towers.
    """

    width: int = 1152
    layers: int = 27
    mlp: int = 4304
    heads: int = 16
    image: int = 224
    patch: int = 14
    eps: float = 1e-6
    registers: int = 0
    layer_scale: bool = False
    pooled: bool = False

    def __post_init__(self) -> None:
        if not self.heads or self.width % self.heads:
            raise ValueError(
                f"a vision tower's width = {self.width} is not a multiple of its heads = {self.heads}; correct one"
            )

    @property
    def tokens(self) -> int:
        """Patches per image."""
        return (self.image // self.patch) ** 2


#: The release's tower of π0, π0.5 and GR00T N1.5.
SIGLIP = VisionSize()
#: The fields of a tower as `vision_config` of a config.json has them.
_KEYS = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
    "image": "image_size",
    "patch": "patch_size",
    "eps": "layer_norm_eps",
}


def tower_keys(section: str) -> dict[str, str]:
    """Keys in this section of config.json for the tower `vision` of a network's size (`fitting.read_fields`)."""
    return {f"vision.{field}": f"{section}.{key}" for field, key in _KEYS.items()}


def tower_seen(tensors: Mapping[str, WeightSpec], start: str) -> dict[str, int]:
    """The fields of `vision` that the shapes of a SigLIP tower's tensors determine. start: of their names."""
    found = fields_of_tensors(
        tensors,
        {
            "width": (f"{start}embeddings.patch_embedding.weight", 0),
            "patch": (f"{start}embeddings.patch_embedding.weight", 2),
            "tokens": (f"{start}embeddings.position_embedding.weight", 0),
            "mlp": (f"{start}encoder.layers.0.mlp.fc1.weight", 0),
            "layers": (f"{start}encoder.layers.", COUNT),
        },
    )
    if (tokens := found.pop("tokens", 0)) and "patch" in found:
        found["image"] = math.isqrt(tokens) * found["patch"]
    return {f"vision.{field}": value for field, value in found.items()}


class SiglipAttention(nn.Module):
    """Bidirectional self-attention with biases."""

    def __init__(self, size: VisionSize) -> None:
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


class SiglipLayer(nn.Module):
    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(size.width, size.eps)
        self.self_attn = SiglipAttention(size)
        self.layer_norm2 = nn.LayerNorm(size.width, size.eps)
        self.mlp = gelu_mlp(size.width, size.mlp, size.width, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        # Autocast's norms are float32 on CUDA: rounded once here, not once for each of queries, keys and values.
        x = x + self.self_attn(self.layer_norm1(x).to(x.dtype))
        branch: Tensor = self.mlp(self.layer_norm2(x))
        return x + branch


class SiglipVisionModel(nn.Module):
    """Patches plus learned positions, both float32 in the released policies, then layers and a final norm, without a
    pooling head. checkpointing: recompute the layers' activations in the backward pass instead of keeping them."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        positions = nn.Embedding(size.tokens, size.width)
        self.embeddings: Any = nn.ModuleDict({"patch_embedding": patches, "position_embedding": positions})
        self.encoder: Any = nn.ModuleDict({"layers": nn.ModuleList(SiglipLayer(size) for _ in range(size.layers))})
        self.post_layernorm = nn.LayerNorm(size.width, size.eps)
        self.checkpointing = False

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images [B,3,H,W] in -1..1 -> features [B,tokens,width], computed in `dtype` after the embeddings."""
        embed = self.embeddings.patch_embedding
        patches: Tensor = embed(images.to(embed.weight.dtype))  # [B,width,rows,columns]
        x = (patches.flatten(2).transpose(1, 2) + self.embeddings.position_embedding.weight).to(dtype)
        for layer in self.encoder.layers:
            x = run_layer(layer, x, recompute=self.checkpointing)
        features: Tensor = self.post_layernorm(x)
        return features


#: The released towers: vit_large_patch14_reg4_dinov2 and vit_so400m_patch14_siglip_224.
DINOV2_LARGE = VisionSize(1024, 24, 4096, registers=4, layer_scale=True)
SIGLIP_SO400M = VisionSize(pooled=True)


class VitAttention(nn.Module):
    """Bidirectional self-attention; queries, keys and values from one matrix."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        found: Tensor = self.proj(attend(queries, keys, values, None))
        return found


class LayerScale(nn.Module):
    """Learned factors of a branch (Touvron et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor.to(x.dtype)


class VitBlock(nn.Module):
    """One layer: attention and MLP, layer norms before both, optional layer scale after both."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, size.eps)
        self.attn = VitAttention(size)
        self.ls1 = LayerScale(size.width) if size.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(size.width, size.eps)
        self.mlp = gelu_mlp(size.width, size.mlp, size.width)
        self.ls2 = LayerScale(size.width) if size.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        found: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return found


class AttentionPool(nn.Module):
    """SigLIP's pooling by one learned query: present for its tensors, never computed."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, size.width))
        self.q = nn.Linear(size.width, size.width)
        self.kv = nn.Linear(size.width, 2 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm = nn.LayerNorm(size.width, size.eps)
        self.mlp = gelu_mlp(size.width, size.mlp, size.width)


class VisionTransformer(nn.Module):
    """A tower. Positions are added to the patches before class and register tokens are prepended. checkpointing:
    recompute the blocks' activations in the backward pass instead of keeping them."""

    def __init__(self, size: VisionSize) -> None:
        super().__init__()
        self.size, self.checkpointing = size, False
        if size.registers:
            self.cls_token = nn.Parameter(torch.empty(1, 1, size.width).normal_(std=0.02))
            self.reg_token = nn.Parameter(torch.empty(1, size.registers, size.width).normal_(std=0.02))
        self.pos_embed = nn.Parameter(torch.empty(1, size.tokens, size.width).normal_(std=0.02))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, size.width, size.patch, size.patch)})
        self.blocks = nn.ModuleList(VitBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, size.eps)
        if size.pooled:
            self.attn_pool = AttentionPool(size)

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalised images [B,3,H,W] -> the patches' features after the second-to-last block [B,tokens,width], in
        `dtype`."""
        patches: Tensor = self.patch_embed["proj"](images.to(dtype))  # [B,width,rows,columns]
        x = patches.flatten(2).transpose(1, 2) + self.pos_embed.to(dtype)
        prefix = 0
        if self.size.registers:
            tokens = torch.cat((self.cls_token, self.reg_token), dim=1)
            prefix = tokens.shape[1]
            x = torch.cat((tokens.to(dtype).expand(len(x), -1, -1), x), dim=1)
        for index in range(self.size.layers - 1):
            x = run_layer(self.blocks[index], x, recompute=self.checkpointing)
        return x[:, prefix:]


def tower_dead_patterns(size: VisionSize) -> tuple[str, ...]:
    """`fnmatch` patterns of a tower's tensors that do not affect its features."""
    pooling = ("attn_pool.*",) if size.pooled else ()
    return f"blocks.{size.layers - 1}.*", "norm.*", *pooling
