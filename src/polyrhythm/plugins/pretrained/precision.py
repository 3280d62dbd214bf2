"""Decides in which dtype each tensor of a network is kept, and computes in that; the only user of autocast.

| tensors | acting | training |
|---|---|---|
| weights of linear layers, convolutions, embeddings: trained | `dtype` | `master` |
| the same, frozen | `dtype` | `dtype` |
| what the release keeps in float32 (`float32`), and all others (norms, scales, learned tokens) | float32 | float32 |

Both roles run the network within `Precision.computing`, so matrices are multiplied in `dtype` by both, and the training
module computes with its weights rounded as they are published. Layers of which the release keeps the weights in float32
also compute in float32. With `dtype` float32 nothing is cast and autocast is never entered.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from polyrhythm.policies.form import Role

#: Layers of which the weights may be kept in a smaller dtype; other parameters are small and enter sums directly.
_MATRICES = (nn.Linear, nn.Conv2d, nn.Embedding)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a network. float32: `fnmatch` patterns of its tensors that are float32 in both roles."""

    dtype: torch.dtype
    master: torch.dtype = torch.float32
    float32: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of `dtype`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_single(self) -> bool:
        """Whether all is float32."""
        return self.dtype is torch.float32

    def kept(self, *, trained: bool, role: Role) -> torch.dtype:
        """The dtype of a matrix that is not float32 by the release."""
        return self.master if trained and role == "train" else self.dtype

    def computing(self, device: torch.device | str) -> AbstractContextManager[object]:
        """The context of a network's forward pass on a device of this type, in both roles."""
        if self.is_single:
            return nullcontext()
        return torch.autocast(torch.device(device).type, dtype=self.dtype)


def computing_dtype(weight: Tensor) -> torch.dtype:
    """What a layer with this weight computes in: autocast's dtype, else its own."""
    kind = str(weight.device.type)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def in_float32(device: torch.device | str) -> AbstractContextManager[object]:
    """Context without autocast, for arithmetic that is float32 whatever the backbone's dtype. The caller converts the
    tensors that go in."""
    return torch.autocast(torch.device(device).type, enabled=False)


def cast(network: nn.Module, precision: Precision, role: Role) -> None:
    """Give every parameter its dtype, in place; `requires_grad` tells which are trained. Works on the meta device.

    Layers with float32 weights compute in float32 afterwards, and embeddings give vectors in `dtype` in both roles.
    Calling it again, after adapters were added, changes only these.
    """
    for path, module in network.named_modules():
        released = path.removesuffix(".base_layer")  # of an adapted layer
        own = {f"{released}.{name}".lstrip("."): p for name, p in module.named_parameters(recurse=False)}
        single = not isinstance(module, _MATRICES) or _matches_any(own, precision.float32)
        for p in own.values():
            wanted = torch.float32 if single else precision.kept(trained=p.requires_grad, role=role)
            if p.is_floating_point() and p.dtype != wanted:
                # On meta without torch's own conversion, which imports its compiler.
                p.data = torch.empty(p.shape, dtype=wanted, device="meta") if p.is_meta else p.data.to(wanted)
        if not precision.is_single:
            _set_arithmetic(module, precision.dtype, single=single)


def _set_arithmetic(module: nn.Module, dtype: torch.dtype, *, single: bool) -> None:
    kind = type(module)
    if single and kind in _FLOAT32:
        module.__class__ = _FLOAT32[kind]
    elif kind is nn.Embedding and not single:
        module.__class__ = RoundedEmbedding
        module.dtype = dtype  # type: ignore[assignment]


class Float32Linear(nn.Linear):
    """A linear layer in float32, whatever the dtype of its input and around it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        with in_float32(input.device):
            return super().forward(input.float())


class Float32Conv2d(nn.Conv2d):
    """A convolution in float32, whatever the dtype of its input and around it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        with in_float32(input.device):
            return super().forward(input.float())


class RoundedEmbedding(nn.Embedding):
    """An embedding that gives vectors in `dtype`, also where the table is kept in float32 to be trained."""

    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input).to(self.dtype)


#: Class of a layer -> the one that computes in float32. Names of parameters stay as they are.
_FLOAT32: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Float32Linear, nn.Conv2d: Float32Conv2d}


def _matches_any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    patterns = tuple(patterns)
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
