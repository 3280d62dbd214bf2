"""Weights as plain data: name, shape and dtype of each tensor, and its offset in one block of memory.

Needs no tensor library, so every process can use it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

#: Bytes per element, by dtype name.
ITEM_BYTES = dict(float64=8, float32=4, float16=2, bfloat16=2, float8_e4m3fn=1, float8_e5m2=1)  # noqa: C408
ITEM_BYTES |= dict(int64=8, int32=4, int16=2, int8=1, uint8=1, bool=1)  # noqa: C408
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Shape and dtype name (as in `ITEM_BYTES`) of one tensor. ValueError: unknown dtype."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype = {self.dtype!r}: unknown; use one of {', '.join(ITEM_BYTES)}")

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def weight_specs(state: Mapping[str, Any]) -> dict[str, WeightSpec]:
    """Shape and dtype of each tensor of a state_dict."""
    return {name: WeightSpec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in state.items()}


def first_misfit(published: Mapping[str, WeightSpec], found: Mapping[str, WeightSpec], *, convertible: bool) -> str:
    """Name of the first published tensor that `found` lacks or has in another form, "" if all fit; `found` may have
    more. convertible: any other floating-point dtype fits, since publishing converts."""
    for name, spec in published.items():
        other = found.get(name)
        same = other == spec or (
            convertible and other is not None and other.shape == spec.shape and other.is_float and spec.is_float
        )
        if not same:
            return name
    return ""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of a layout: `spec.nbytes` bytes at `offset`."""

    name: str
    spec: WeightSpec
    offset: int


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Memory layout of one version of the published weights. Main derives it once and sends it to every process.
    tensors: in memory order, aligned to 64 bytes; nbytes: size of one version; checksum: CRC-32 of the layout."""

    tensors: tuple[PlacedTensor, ...]
    nbytes: int
    checksum: int

    @classmethod
    def of(cls, published: Mapping[str, WeightSpec]) -> WeightsLayout:
        """Layout of these tensors, in their order."""
        placed, offset = [], 0
        for name, spec in published.items():
            placed.append(PlacedTensor(name, spec, offset))
            offset += -(-max(spec.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        tensors = tuple(placed)
        return cls(tensors, offset, _checksum(tensors, offset))

    def verify(self) -> None:
        """Raise ValueError if the checksum does not match the content."""
        if (found := _checksum(self.tensors, self.nbytes)) != self.checksum:
            raise ValueError(
                f"weights layout: its checksum is {self.checksum:08x}, its content gives {found:08x}; "
                "start every process from the same version of polyrhythm"
            )

    @property
    def published(self) -> dict[str, WeightSpec]:
        return {tensor.name: tensor.spec for tensor in self.tensors}


def _checksum(tensors: tuple[PlacedTensor, ...], nbytes: int) -> int:
    """CRC-32 of the layout as text, the same in every process and on every machine."""
    lines = [f"{tensor.name}\0{tensor.spec}\0{tensor.offset}" for tensor in tensors]
    return zlib.crc32("\n".join([*lines, str(nbytes)]).encode())
