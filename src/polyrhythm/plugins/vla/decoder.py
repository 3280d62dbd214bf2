"""Attention and its parts, and the decoder of Gemma, Llama and Qwen3 with the parameter names of the releases.

A decoder has rotary attention with shared keys, a gated MLP, and RMS norms before both (`layers.N.self_attn.q_proj`, …,
`norm`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019) times a learned scale. offset: added to the stored
    weight; 1 in Gemma, whose weights are deviations from 1, otherwise 0."""

    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """[...,width] -> the same shape and dtype."""
        weight = self.offset + self.weight.float() if self.offset else self.weight.float()
        return functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class AdaRMSNorm(nn.Module):
    """RMS normalisation whose scale and shift depend on a condition (pi0.5's action expert). It also returns a gate
    that multiplies the branch after the norm."""

    def __init__(self, width: int, condition: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dense = nn.Linear(condition, 3 * width)
        self.eps = eps

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,T,width], condition [B,condition] -> normalised x [B,T,width] and gate [B,1,width], in x's dtype."""
        scale, shift, gate = self.dense(condition).unsqueeze(1).float().chunk(3, dim=-1)
        return (normalise(x, self.eps) * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)


def normalise(x: Tensor, eps: float) -> Tensor:
    """x [...,width] divided by its root mean square over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gelu_mlp(*widths: int, approximate: str = "none") -> nn.Sequential:
    """Linear maps fc1, fc2, ... between these widths, and gelu between them: by the exact error function, or "tanh"."""
    layers: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(pairwise(widths), 1):
        if number > 1:
            layers[f"gelu{number}"] = nn.GELU(approximate)
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
    return nn.Sequential(OrderedDict(layers))


def draw_unit_variance(module: nn.Module, embedding: float | None = None) -> None:
    """Draw the weights of a linear map, for outputs of unit variance, or of an embedding. embedding: its standard
    deviation, by default that of unit length."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=embedding or module.embedding_dim**-0.5)


def run_layer(layer: nn.Module, *arguments: object, recompute: bool) -> Any:
    """`layer(*arguments)`. recompute: keep only the arguments for the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, *arguments, use_reentrant=False)
    return layer(*arguments)


#: Keys and values of one layer: [B,KV,T,D] each, keys already rotated.
KeysValues = tuple[Tensor, Tensor]
#: cos of the rotary angles, and sin, negative in the first half of D, where `rotate` subtracts: [B,1,T,D] each.
Rotary = tuple[Tensor, Tensor]


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Rotary angles (Su et al. 2021; halves, not pairs) of positions [B,T], computed in float32 and rounded to `dtype`
    once for all layers."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = positions.float().unsqueeze(-1) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1).unsqueeze(1).to(dtype),
        torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
    )


def rotate(x: Tensor, by: Rotary) -> Tensor:
    """Rotate x [B,H,T,D] by the angles of its positions."""
    cos, sin = by[0].to(x.dtype), by[1].to(x.dtype)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def positions_of(present: Tensor) -> Tensor:
    """Position of each present token among the present ones: bool [B,T] -> int64 [B,T] (-1 before the first one)."""
    return present.long().cumsum(dim=1) - 1


def mean_of(x: Tensor, present: Tensor) -> Tensor:
    """Mean over present tokens: [B,T,W], bool [B,T] -> [B,W]."""
    weights = present.unsqueeze(2).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


def padding_mask(present: Tensor) -> Tensor:
    """Mask of full attention among present tokens: bool [B,T] -> [B,1,T,T]."""
    return (present.unsqueeze(1) & present.unsqueeze(2)).unsqueeze(1)


def causal_mask(present: Tensor) -> Tensor:
    """Mask of causal attention among present tokens: bool [B,T] -> [B,1,T,T]."""
    length = present.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=present.device).tril()
    return padding_mask(present) & earlier


#: Numbers to which a row of a mask is filled up: CUDA's fused attention copies others in every layer.
_MASK_ROW = 16


def additive(mask: Tensor, dtype: torch.dtype, hidden: float | None = None) -> Tensor:
    """The mask as summands of scores: 0 where it is true, `hidden` elsewhere, by default the most negative finite
    number. With -inf the attention of a query that sees nothing is 0."""
    *rows, keys = mask.shape
    width = -(-keys // _MASK_ROW) * _MASK_ROW
    summands = torch.zeros((*rows, width), dtype=dtype, device=mask.device)[..., :keys]
    return summands.masked_fill_(~mask, torch.finfo(dtype).min if hidden is None else hidden)


#: In place of a mask: each token attends to itself and to those before it, of which all are present.
CAUSAL: Literal["causal"] = "causal"
Mask = Tensor | Literal["causal"] | None


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Scaled dot-product attention: [B,H,Q,D], [B,KV,K,D] twice -> [B,Q,H·D]. H is a multiple of KV (shared keys).

    mask: summands [B,1,Q,K], or without repeated keys [B,1,1,K] or of `for_shared_heads`."""
    (heads, tokens), sharing = queries.shape[1:3], queries.shape[1] // keys.shape[1]
    summands, causal = (None, True) if isinstance(mask, str) else (mask, False)
    if sharing > 1 and not causal and (summands is None or summands.shape[2] in (1, sharing * tokens)):
        queries = queries.unflatten(1, (-1, sharing)).flatten(2, 3)
    elif sharing > 1:
        keys, values = (x.unsqueeze(2).expand(-1, -1, sharing, -1, -1).flatten(1, 2) for x in (keys, values))
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=summands, is_causal=causal)
    return found.reshape(-1, heads, tokens, found.shape[-1]).transpose(1, 2).flatten(2)


def for_shared_heads(mask: Tensor, sharing: int) -> Tensor:
    """The mask [B,1,Q,K] for `attend` with keys that `sharing` heads share: [B,1,sharing·Q,K], whose queries are then
    those of one head, so that no key is repeated. For few queries: it is as large as that of sharing·Q tokens."""
    return mask.repeat(1, 1, sharing, 1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B,T,H·D] -> [B,H,T,D]."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """Size of a decoder.

    mlp: units of the gated MLP; kv_heads: heads of keys and values, each shared by heads/kv_heads queries; theta: base
    of the rotary frequencies; norm_offset: 1 for Gemma's norms; qk_norm: Qwen3's norms of queries and keys; condition:
    width of the condition of adaptive norms (pi0.5's action expert), 0 for plain ones.
    """

    width: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: Literal["gelu_tanh", "silu"]
    eps: float = 1e-6
    theta: float = 1e4
    norm_offset: float = 0.0
    qk_norm: bool = False
    condition: int = 0

    def __post_init__(self) -> None:
        if not self.kv_heads or self.heads % self.kv_heads:
            raise ValueError(
                f"the decoder's heads = {self.heads} are no multiple of its kv_heads = {self.kv_heads}; correct one"
            )

    @property
    def heads_per_key(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return self.heads // self.kv_heads


#: The fields of a decoder as `text_config` of a config.json has them, but for its layers.
TEXT_KEYS = {
    "width": "hidden_size",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "eps": "rms_norm_eps",
    "theta": "rope_theta",
}


class Attention(nn.Module):
    """Self-attention that can also attend to earlier keys and values."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.head_dim, queries, shared = size.head_dim, size.heads * size.head_dim, size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(size.width, queries, bias=False)
        self.k_proj = nn.Linear(size.width, shared, bias=False)
        self.v_proj = nn.Linear(size.width, shared, bias=False)
        self.o_proj = nn.Linear(queries, size.width, bias=False)
        self.q_norm = RMSNorm(size.head_dim, size.eps) if size.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size.head_dim, size.eps) if size.qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, angles: Rotary) -> KeysValues:
        """Keys and values [B,KV,T,D] of x [B,T,width]."""
        keys = rotate(self.k_norm(split_heads(self.k_proj(x), self.head_dim)), angles)
        return keys, split_heads(self.v_proj(x), self.head_dim)

    def forward(self, x: Tensor, angles: Rotary, mask: Mask, found: KeysValues) -> Tensor:
        """x [B,T,width] and all visible keys and values -> [B,T,width]."""
        queries = rotate(self.q_norm(split_heads(self.q_proj(x), self.head_dim)), angles)
        branch: Tensor = self.o_proj(attend(queries, *found, mask))
        return branch


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.width, size.mlp, bias=False)
        self.up_proj = nn.Linear(size.width, size.mlp, bias=False)
        self.down_proj = nn.Linear(size.mlp, size.width, bias=False)
        self.tanh = size.activation == "gelu_tanh"

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = functional.gelu(gate, approximate="tanh") if self.tanh else functional.silu(gate)
        branch: Tensor = self.down_proj(gate * self.up_proj(x))
        return branch


class DecoderLayer(nn.Module):
    """One layer. With adaptive norms, each branch is multiplied by its norm's gate before it is added. forward_methods:
    methods other than `forward` that callers use (`plugins.ranks.sharded`)."""

    forward_methods = ("keys_values",)

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp = GatedMlp(size)
        self.input_layernorm = _norm(size)
        self.post_attention_layernorm = _norm(size)

    def forward(
        self,
        x: Tensor,
        angles: Rotary,
        mask: Mask,
        past: KeysValues | None = None,
        condition: Tensor | None = None,
        outputs: slice | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """x [B,T,width], mask over past and own keys -> the layer's output, and its own keys and values. outputs: the
        tokens to compute, by default all; the mask must then be equal for all queries."""
        normed, gate = normed_by(self.input_layernorm, x, condition)
        own = self.self_attn.keys_values(normed, angles)
        if outputs is not None:
            x, normed = x[:, outputs], normed[:, outputs]
            angles = angles[0][:, :, outputs], angles[1][:, :, outputs]
        seen = own if past is None else (torch.cat((past[0], own[0]), dim=2), torch.cat((past[1], own[1]), dim=2))
        branch = self.self_attn(normed, angles, mask, seen)
        x = x + (branch if gate is None else branch * gate)
        normed, gate = normed_by(self.post_attention_layernorm, x, condition)
        branch = self.mlp(normed)
        return x + (branch if gate is None else branch * gate), own

    def keys_values(self, x: Tensor, angles: Rotary) -> KeysValues:
        """The layer's own keys and values, with plain norms."""
        return self.self_attn.keys_values(self.input_layernorm(x), angles)


class Decoder(nn.Module):
    """A stack of layers with a final norm. checkpointing: recompute the layers' activations in the backward pass
    instead of keeping them."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.size, self.checkpointing = size, False
        self.layers = nn.ModuleList(DecoderLayer(size) for _ in range(size.layers))
        self.norm = _norm(size)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        past: Sequence[KeysValues] | None = None,
        condition: Tensor | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """x [B,T,width] at positions [B,T]; mask [B,1,T,K] over the keys of past and x -> hidden states after the last
        norm [B,T,width], and each layer's own keys and values."""
        angles = rotary(positions, self.size.head_dim, self.size.theta, x.dtype)
        found: list[KeysValues] = []
        for index, layer in enumerate(self.layers):
            before = None if past is None else past[index]
            x, own = run_layer(layer, x, angles, mask, before, condition, recompute=self.checkpointing)
            found.append(own)
        return normed_by(self.norm, x, condition)[0], found

    def hidden_of(self, outputs: slice | None, x: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """The hidden states of the tokens `outputs` (None: of all), equal to those of `forward`. No keys and values are
        kept. With `outputs` the last layer computes only these tokens, and the mask must be equal for all queries:
        [B,1,1,T]."""
        angles = rotary(positions, self.size.head_dim, self.size.theta, x.dtype)
        *before, last = self.layers
        for layer in before:
            x, _ = run_layer(layer, x, angles, mask, recompute=self.checkpointing)
        x, _ = run_layer(last, x, angles, mask, None, None, outputs, recompute=self.checkpointing)
        return normed_by(self.norm, x, None)[0]

    def keys_values(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> list[KeysValues]:
        """Each layer's keys and values, equal to those of `forward`; the last layer computes nothing else."""
        angles = rotary(positions, self.size.head_dim, self.size.theta, x.dtype)
        *before, last = self.layers
        found: list[KeysValues] = []
        for layer in before:
            x, own = run_layer(layer, x, angles, mask, recompute=self.checkpointing)
            found.append(own)
        assert isinstance(last, DecoderLayer)
        found.append(last.keys_values(x, angles))
        return found


def normed_by(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(norm, AdaRMSNorm):
        assert condition is not None, "an adaptive norm needs its condition"
        normed, gate = norm(x, condition)
        return normed, gate
    return norm(x), None


def _norm(size: DecoderSize) -> nn.Module:
    if size.condition:
        return AdaRMSNorm(size.width, size.condition, size.eps)
    return RMSNorm(size.width, size.eps, size.norm_offset)
