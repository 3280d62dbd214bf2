"""Packs sequences of different lengths into one pass without padding.

All layers of a language model except attention work on each position alone. Attention receives the sequences in runs of
equal length, each run as its own batch: sequences of 3, 5 and 5 tokens are 13 positions and two runs. `attend` replaces
torch's attention in the model's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Name of the attention here, as transformers registers it.
ATTENTION = "polyrhythm_packed"


class Packing:
    """Layout of packed sequences. lengths: of each sequence, ascending, so that equal ones are neighbours; layers:
    number of attention layers that have used it, as a model that drops the keyword would mix the sequences."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.runs = [(len(list(same)), length) for length, same in groupby(lengths)]
        self.sizes = [count * length for count, length in self.runs]
        self.layers = 0

    def positions(self, device: torch.device) -> Tensor:
        """The position of each token in its sequence: [1,T] int64."""
        return torch.cat([torch.arange(length, device=device).repeat(count) for count, length in self.runs])[None]


class PackedMessages(NamedTuple):
    """Packed prompts and messages. M: number of tokens of all messages.

    tokens [T] int64: each prompt and its message except the last token, which predicts nothing; predicts [M]: index in
    T of the features that predict each message token; places [M]: index of that token in the flattened messages [B·C].
    """

    tokens: Tensor
    packing: Packing
    predicts: Tensor
    places: Tensor


def pack(prompt: Tensor, lengths: Tensor, message: Tensor, counts: Tensor) -> PackedMessages:
    """Pack prompts [B,P] of `lengths` [B] with messages [B,C] of `counts` [B] tokens, all int64 and at least 1."""
    order = (lengths + counts).argsort(stable=True)
    prompt, lengths, message, counts = (x[order] for x in (prompt, lengths, message, counts))
    size, chunk = prompt.shape[1], message.shape[1]
    at = torch.arange(size + chunk, device=prompt.device)
    answered = (at >= size) & (at < (size + counts - 1)[:, None])
    read = answered | (at < torch.minimum(lengths, torch.tensor(size))[:, None])
    predicting = answered | (at == lengths[:, None] - 1)
    row, column = (at[:chunk] < counts[:, None]).nonzero(as_tuple=True)
    return PackedMessages(
        torch.cat([prompt, message], 1)[read],
        Packing((lengths + counts - 1).tolist()),
        predicting[read].nonzero().squeeze(1),
        order[row] * chunk + column,
    )


def pack_longest(prompt: Tensor, message: Tensor) -> PackedMessages:
    """Like `pack` with every prompt [B,P] and message [B,C] at full length; the tensors need no values."""
    rows, size, chunk = len(prompt), prompt.shape[1], message.shape[1]
    length = size + chunk - 1
    row = torch.arange(rows, device=prompt.device)[:, None]
    column = torch.arange(chunk, device=prompt.device)
    return PackedMessages(
        torch.cat([prompt, message], 1)[:, :length].flatten(),
        Packing([length] * rows),
        (row * length + size - 1 + column).flatten(),
        (row * chunk + column).flatten(),
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature of transformers: query, key, value [B,heads,L,d] to [B,L,heads,d]. With `packing`,
    the single row holds several sequences, each of which attends only to itself."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if packing is None:
        return plain(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    packing.layers += 1
    parts = []
    runs = zip(*(x[0].split(packing.sizes, 1) for x in (query, key, value)), strict=True)
    for shape, run in zip(packing.runs, runs, strict=True):
        rows = (x.unflatten(1, shape).transpose(0, 1) for x in run)
        parts.append(plain(module, *rows, None, **options)[0].flatten(0, 1))
    return torch.cat(parts)[None], None


def register_attention() -> str:
    """Register `attend` with transformers; returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


class SlotCache:
    """Keys and values of `rows` sequences of `length` positions. Call `begin` or `advance` before each forward pass."""

    is_compileable = False

    def __init__(self, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._write: tuple[Any, ...] = ()
        self._read: tuple[slice, slice] | None = None

    def begin(self, rows: Tensor, positions: Tensor) -> None:
        """Prepare a pass of packed sequences from position 0: row and position of each token, [T] int64."""
        self._write, self._read = (rows, slice(None), positions), None

    def advance(self, positions: Tensor, longest: int) -> None:
        """Prepare a pass of one position for each of the rows 0..n-1, [n]; it reads the first `longest` positions."""
        n = len(positions)
        self._write = (torch.arange(n, device=positions.device), slice(None), positions)
        self._read = (slice(n), slice(longest))

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values of a layer, [1,heads,T,d] or [n,heads,1,d]; return those that attention reads."""
        if layer == len(self._keys):
            for made, like in ((self._keys, keys), (self._values, values)):
                made.append(like.new_zeros(self.rows, like.shape[1], self.length, like.shape[3]))
        own_keys, own_values = self._keys[layer], self._values[layer]
        if self._read is None:
            own_keys[self._write], own_values[self._write] = (x[0].transpose(0, 1) for x in (keys, values))
            return keys, values
        own_keys[self._write], own_values[self._write] = keys[:, :, 0], values[:, :, 0]
        rows, length = self._read
        return own_keys[rows, :, length], own_values[rows, :, length]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values; 0 before the first pass."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of a row to others."""
        for tensor in (*self._keys, *self._values):
            tensor[list(targets), :, :length] = tensor[source, :, :length]

    def get_seq_length(self, layer: int = 0) -> int:  # noqa: ARG002 - transformers asks for it
        """Always 0: positions are passed explicitly."""
        return 0
