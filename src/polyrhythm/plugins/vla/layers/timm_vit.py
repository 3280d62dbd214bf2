"""Vision transformers with the parameter names of timm: OpenVLA's DINOv2 (Oquab et al. 2023) and SigLIP.

Only the second-to-last block's features are used, without the final norm. The last block, that norm and SigLIP's
pooling exist because the release has their tensors; they are never computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.vla.layers.attention import attend, run_layer


@dataclass(frozen=True, slots=True)
class VitSize:
    """Size of a vision transformer. Images are square, `image` pixels, cut into squares of `patch` pixels.

    registers: register tokens (Darcet et al. 2023), accompanied by a class token, 0 for neither; layer_scale: each
    branch is multiplied by learned factors; pooled: the release has an attention pooling.
    """

    width: int
    layers: int
    mlp: int
    heads: int
    registers: int = 0
    layer_scale: bool = False
    pooled: bool = False
    image: int = 224
    patch: int = 14
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.heads or self.width % self.heads:
            raise ValueError(
                f"a vision tower's width = {self.width} is not a multiple of its heads = {self.heads}; correct one"
            )

    @property
    def tokens(self) -> int:
        """Patches per image."""
        return (self.image // self.patch) ** 2


#: The released towers: vit_large_patch14_reg4_dinov2 and vit_so400m_patch14_siglip_224.
DINOV2_LARGE = VitSize(1024, 24, 4096, 16, registers=4, layer_scale=True)
SIGLIP_SO400M = VitSize(1152, 27, 4304, 16, pooled=True)


class PatchEmbedding(nn.Module):
    """Linear projection of patches."""

    def __init__(self, size: VitSize) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, size.width, size.patch, size.patch)

    def forward(self, images: Tensor) -> Tensor:
        """[B,3,H,W] -> [B,tokens,width]."""
        patches: Tensor = self.proj(images)
        return patches.flatten(2).transpose(1, 2)


class VitAttention(nn.Module):
    """Bidirectional self-attention; queries, keys and values from one matrix."""

    def __init__(self, size: VitSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        found: Tensor = self.proj(attend(queries, keys, values, None))
        return found


class VitMlp(nn.Module):
    """fc2(gelu(fc1(x))), gelu with the exact error function."""

    def __init__(self, size: VitSize) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size.width, size.mlp)
        self.fc2 = nn.Linear(size.mlp, size.width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(functional.gelu(self.fc1(x)))
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

    def __init__(self, size: VitSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width, size.eps)
        self.attn = VitAttention(size)
        self.ls1 = LayerScale(size.width) if size.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(size.width, size.eps)
        self.mlp = VitMlp(size)
        self.ls2 = LayerScale(size.width) if size.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        found: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return found


class AttentionPool(nn.Module):
    """SigLIP's pooling by one learned query: present for its tensors, never computed."""

    def __init__(self, size: VitSize) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, size.width))
        self.q = nn.Linear(size.width, size.width)
        self.kv = nn.Linear(size.width, 2 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.norm = nn.LayerNorm(size.width, size.eps)
        self.mlp = VitMlp(size)


class VisionTransformer(nn.Module):
    """A tower. Positions are added to the patches before class and register tokens are prepended.

    checkpointing: recompute the blocks' activations in the backward pass instead of keeping them.
    """

    def __init__(self, size: VitSize) -> None:
        super().__init__()
        self.size, self.checkpointing = size, False
        if size.registers:
            self.cls_token = nn.Parameter(torch.empty(1, 1, size.width).normal_(std=0.02))
            self.reg_token = nn.Parameter(torch.empty(1, size.registers, size.width).normal_(std=0.02))
        self.pos_embed = nn.Parameter(torch.empty(1, size.tokens, size.width).normal_(std=0.02))
        self.patch_embed = PatchEmbedding(size)
        self.blocks = nn.ModuleList(VitBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, size.eps)
        if size.pooled:
            self.attn_pool = AttentionPool(size)

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalised images [B,3,H,W] -> the patches' features after the second-to-last block [B,tokens,width], in
        `dtype`."""
        x: Tensor = self.patch_embed(images.to(dtype)) + self.pos_embed.to(dtype)
        prefix = 0
        if self.size.registers:
            tokens = torch.cat((self.cls_token, self.reg_token), dim=1)
            prefix = tokens.shape[1]
            x = torch.cat((tokens.to(dtype).expand(len(x), -1, -1), x), dim=1)
        for index in range(self.size.layers - 1):
            x = run_layer(self.blocks[index], x, recompute=self.checkpointing)
        return x[:, prefix:]


def tower_dead_patterns(size: VitSize) -> tuple[str, ...]:
    """`fnmatch` patterns of a tower's tensors that do not affect its features."""
    pooling = ("attn_pool.*",) if size.pooled else ()
    return f"blocks.{size.layers - 1}.*", "norm.*", *pooling
