"""GR00T's action head: encoders per embodiment, and a transformer that denoises a chunk of actions.

Every second block of the transformer attends to the backbone's features, the others to their own tokens: one for the
state, learned ones, one for each action. The release has no mask here, so its head also reads the backbone's padding.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.pretrained.precision import in_float32
from polyrhythm.plugins.vla.decoder import DecoderSize, KeysValues, attend, run_layer, split_heads
from polyrhythm.plugins.vla.vision import SIGLIP, VisionSize
from polyrhythm.policies.constants import kept

#: Qwen3 1.7B, of whose 28 layers the release keeps 12.
QWEN3 = DecoderSize(2048, 12, 6144, heads=16, kv_heads=8, head_dim=128, activation="silu", theta=1e6, qk_norm=True)


@dataclass(frozen=True, slots=True)
class StackSize:
    """Size of a stack of transformer blocks of the action head."""

    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class GrootSize:
    """Size of a network; the defaults are the release's.

    image_token: id of the placeholder for image tokens. vl: self-attention over the backbone's features; dit: the
    diffusion transformer. hidden: units of the encoders and of the transformer's output. horizon: predicted actions
    (H); action_dim, state_dim: padded entries (A, S). future: learned tokens between state and actions. positions: rows
    of the position table; buckets: of the transformer's time.
    """

    llm: DecoderSize = QWEN3
    vision: VisionSize = SIGLIP
    vocabulary: int = 151680
    image_token: int = 151669
    vl: StackSize = StackSize(4, 32, 64)
    dit: StackSize = StackSize(16, 32, 48)
    hidden: int = 1024
    horizon: int = 16
    action_dim: int = 32
    state_dim: int = 64
    embodiments: int = 32
    future: int = 32
    positions: int = 1024
    buckets: int = 1000

    def __post_init__(self) -> None:
        if self.vl.width != self.llm.width:
            raise ValueError(
                f"policy.size: vl has heads x head_dim = {self.vl.width} and the language model width = "
                f"{self.llm.width}; make them equal"
            )
        if self.positions < self.horizon:
            raise ValueError(f"policy.size: positions = {self.positions} is below horizon = {self.horizon}; raise it")

    @property
    def image(self) -> int:
        """Pixels along the side of an image."""
        return self.vision.image


_TIME_CHANNELS, _LONGEST = 256, 10000.0
_NORM_EPS, _LAST_EPS = 1e-5, 1e-6


#: The embodiment of all rows, or that of each: int64 [B].
Embodiment = int | Tensor


class EmbodimentLinear(nn.Module):
    """A linear map for each embodiment, in float32: W [E,inputs,outputs], b [E,outputs]."""

    def __init__(self, embodiments: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(embodiments, inputs, outputs))
        self.b = nn.Parameter(torch.zeros(embodiments, outputs))

    def forward(self, x: Tensor, embodiment: Embodiment) -> Tensor:
        """x [B,T,inputs] -> [B,T,outputs] float32. One matrix multiplies the rows of one embodiment; else each row has
        a copy of its own."""
        with in_float32(x.device):
            if isinstance(embodiment, int):
                flat = torch.addmm(self.b[embodiment], x.float().flatten(0, 1), self.W[embodiment])
                found: Tensor = flat.unflatten(0, x.shape[:2])
                return found
            return torch.baddbmm(self.b[embodiment].unsqueeze(1), x.float(), self.W[embodiment])


class EmbodimentMlp(nn.Module):
    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs)

    def forward(self, x: Tensor, embodiment: Embodiment) -> Tensor:
        found: Tensor = self.layer2(functional.relu(self.layer1(x, embodiment)), embodiment)
        return found


class ActionEncoder(nn.Module):
    """Encodes noisy actions and their time as tokens."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        width = size.dit.width
        self.W1 = EmbodimentLinear(size.embodiments, size.action_dim, width)
        self.W2 = EmbodimentLinear(size.embodiments, 2 * width, width)
        self.W3 = EmbodimentLinear(size.embodiments, width, width)

    def forward(self, x: Tensor, bucket: Tensor, embodiment: Embodiment) -> Tensor:
        """x [B,H,A], bucket [B] -> tokens [B,H,width] float32."""
        actions = self.W1(x, embodiment)
        half = actions.shape[2] // 2
        time = time_code(bucket, half, divisor=half, sine_first=True).unsqueeze(1).expand_as(actions)
        mixed = self.W2(torch.cat((actions, time), dim=2), embodiment)
        found: Tensor = self.W3(functional.silu(mixed), embodiment)
        return found


def time_code(bucket: Tensor, half: int, *, divisor: int, sine_first: bool) -> Tensor:
    """Sines and cosines of the bucket [B] at `half` geometric frequencies, from 1 downwards -> [B,2·half] float32."""
    angles = bucket.float().unsqueeze(1) * _frequencies(half, divisor, bucket.device)
    parts = (angles.sin(), angles.cos()) if sine_first else (angles.cos(), angles.sin())
    return torch.cat(parts, dim=1)


@kept
def _frequencies(half: int, divisor: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        steps = torch.arange(half, dtype=torch.float32, device=device)
        return torch.exp(steps * -math.log(_LONGEST) / divisor)


class HeadAttention(nn.Module):
    """Attention with biases. context: width of the input of keys and values."""

    def __init__(self, size: StackSize, context: int) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.to_q = nn.Linear(size.width, size.width)
        self.to_k = nn.Linear(context, size.width)
        self.to_v = nn.Linear(context, size.width)
        self.to_out = nn.ModuleList([nn.Linear(size.width, size.width)])

    def keys_values(self, context: Tensor) -> KeysValues:
        """Keys and values [B,heads,T,head_dim] of [B,T,width]."""
        return split_heads(self.to_k(context), self.head_dim), split_heads(self.to_v(context), self.head_dim)

    def forward(self, x: Tensor, found: KeysValues, mask: Tensor | None = None) -> Tensor:
        queries = split_heads(self.to_q(x), self.head_dim)
        out: Tensor = self.to_out[0](attend(queries, *found, mask))
        return out


class FeedForward(nn.Module):
    """Two layers around gelu with the tanh approximation; the middle is the release's dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first = nn.Sequential(OrderedDict(proj=nn.Linear(width, 4 * width), gelu=nn.GELU("tanh")))
        self.net = nn.Sequential(first, nn.Identity(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        first, _, last = self.net
        found: Tensor = last(first(x))
        return found


class AdaptiveNorm(nn.Module):
    """Layer norm without weights; scale and shift depend on the time, after its silu."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.linear(time).unsqueeze(1).chunk(2, dim=2)
        return scaled_norm(x, scale, shift, _NORM_EPS).to(x.dtype)


def scaled_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Layer norm of x [B,T,width], times 1 + scale, plus shift: [B,1,width] each."""
    return torch.addcmul(shift, functional.layer_norm(x, x.shape[-1:], eps=eps), 1.0 + scale)


class SelfAttentionBlock(nn.Module):
    """A block over the backbone's features, with plain norms."""

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        self.norm1, self.norm3 = nn.LayerNorm(size.width, _NORM_EPS), nn.LayerNorm(size.width, _NORM_EPS)
        self.attn1 = HeadAttention(size, size.width)
        self.ff = FeedForward(size.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn1(normed, self.attn1.keys_values(normed), mask)
        found: Tensor = x + self.ff(self.norm3(x))
        return found


class DitBlock(nn.Module):
    """A block of the diffusion transformer. context: width of the tokens that it attends to, 0 for its own."""

    def __init__(self, size: StackSize, context: int) -> None:
        super().__init__()
        self.crosses = context > 0
        self.norm1 = AdaptiveNorm(size.width)
        self.attn1 = HeadAttention(size, context or size.width)
        self.ff = FeedForward(size.width)

    def forward(self, x: Tensor, time: Tensor, context: KeysValues | None, mask: Tensor | None) -> Tensor:
        """time [B,width], after its silu; mask: of the context."""
        normed = self.norm1(x, time)
        if context is None:
            x = x + self.attn1(normed, self.attn1.keys_values(normed))
        else:
            x = x + self.attn1(normed, context, mask)
        normed = functional.layer_norm(x, x.shape[-1:], eps=_NORM_EPS)
        found: Tensor = x + self.ff(normed)
        return found


class Dit(nn.Module):
    """Diffusion transformer: even blocks attend to the backbone's features, odd ones to their own tokens.
    checkpointing: recompute the blocks' activations in the backward pass instead of keeping them."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        stack, self.checkpointing = size.dit, False
        layers = {"linear_1": nn.Linear(_TIME_CHANNELS, stack.width), "silu": nn.SiLU()}
        layers["linear_2"] = nn.Linear(stack.width, stack.width)
        self.timestep_encoder: Any = nn.ModuleDict({"timestep_embedder": nn.Sequential(OrderedDict(layers))})
        self.transformer_blocks = nn.ModuleList(
            DitBlock(stack, size.llm.width if index % 2 == 0 else 0) for index in range(stack.layers)
        )
        self.proj_out_1 = nn.Linear(stack.width, 2 * stack.width)
        self.proj_out_2 = nn.Linear(stack.width, size.hidden)

    def keys_values(self, features: Tensor) -> tuple[KeysValues, ...]:
        """Keys and values of the backbone's features [B,P,width], for each block that attends to them."""
        return tuple(block.attn1.keys_values(features) for block in self.transformer_blocks[::2])  # type: ignore[union-attr,operator]

    def embed_time(self, bucket: Tensor) -> Tensor:
        """Buckets [B] -> [B,width] float32."""
        half = _TIME_CHANNELS // 2
        code = time_code(bucket, half, divisor=half - 1, sine_first=False)
        found: Tensor = self.timestep_encoder.timestep_embedder(code)
        return found

    def forward(self, x: Tensor, bucket: Tensor, context: tuple[KeysValues, ...], mask: Tensor | None = None) -> Tensor:
        """Tokens x [B,T,width], bucket [B] of the time, mask [B,1,1,P] of the context -> [B,T,hidden]."""
        time = functional.silu(self.embed_time(bucket))
        for index, block in enumerate(self.transformer_blocks):
            seen = context[index // 2] if index % 2 == 0 else None
            x = run_layer(block, x, time, seen, mask, recompute=self.checkpointing)
        shift, scale = self.proj_out_1(time).unsqueeze(1).chunk(2, dim=2)
        found: Tensor = self.proj_out_2(scaled_norm(x, scale, shift, _LAST_EPS))
        return found


class VlSelfAttention(nn.Module):
    """Self-attention blocks over the backbone's features. checkpointing: recompute their activations in the backward
    pass."""

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        self.checkpointing = False
        self.transformer_blocks = nn.ModuleList(SelfAttentionBlock(size) for _ in range(size.layers))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.transformer_blocks:
            x = run_layer(block, x, mask, recompute=self.checkpointing)
        return x


class ActionHead(nn.Module):
    """Everything after the backbone, under the release's names."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        width, embodiments = size.dit.width, size.embodiments
        self.horizon = size.horizon
        self.vlln = nn.LayerNorm(size.llm.width, _NORM_EPS)
        self.vl_self_attention = VlSelfAttention(size.vl)
        self.state_encoder = EmbodimentMlp(embodiments, size.state_dim, size.hidden, width)
        self.action_encoder = ActionEncoder(size)
        self.action_decoder = EmbodimentMlp(embodiments, size.hidden, size.hidden, size.action_dim)
        self.future_tokens = nn.Embedding(size.future, width)
        self.position_embedding = nn.Embedding(size.positions, width)
        self.model = Dit(size)

    def leading_tokens(self, state: Tensor, embodiment: Embodiment) -> Tensor:
        """state [B,S] -> the transformer's tokens before those of the actions [B,1+future,width] float32."""
        future = _first_rows(self.future_tokens, self.future_tokens.num_embeddings).expand(len(state), -1, -1)
        return torch.cat((self.state_encoder(state.unsqueeze(1), embodiment), future), dim=1)

    def action_tokens(self, x: Tensor, bucket: Tensor, embodiment: Embodiment) -> Tensor:
        """x [B,H,A], bucket [B] -> the actions' tokens [B,H,width] float32."""
        tokens: Tensor = self.action_encoder(x, bucket, embodiment) + _first_rows(self.position_embedding, x.shape[1])
        return tokens


def _first_rows(table: nn.Embedding, count: int) -> Tensor:
    """The first rows of a table [count,width] float32. Called as a module, not read from its weight, so that acting
    and training both use the published, rounded rows (`precision.RoundedEmbedding`)."""
    rows: Tensor = table(torch.arange(count, device=table.weight.device))
    return rows.float()
