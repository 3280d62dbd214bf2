"""Sets the dtype of each tensor of a network and computes in it; the only user of autocast.

| tensors | acting | training |
|---|---|---|
| weights of linear layers, convolutions, embeddings: trained | `dtype` | `master` |
| the same, frozen | `dtype` | `dtype` |
| the release's float32 tensors (`float32`), and all others (norms, scales, learned tokens) | float32 | float32 |

Both roles run the network inside `Precision.computing`, so both multiply matrices in `dtype`, and training uses its
weights rounded as they are published. Layers with float32 weights in the release also compute in float32. With `dtype`
float32 nothing is cast and autocast is never entered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyrhythm.plugins.pretrained.folder_files import matches
from polyrhythm.policies.form import Role

#: Layers of which the weights may be kept in a smaller dtype; other parameters are small and enter sums directly.
_MATRICES = (nn.Linear, nn.Conv2d, nn.Embedding)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a network. float32: `fnmatch` patterns of tensors that are float32 in both roles."""

    dtype: torch.dtype
    master: torch.dtype = torch.float32
    float32: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_single(self) -> bool:
        return self.dtype is torch.float32

    def computing(self, device: torch.device | str) -> AbstractContextManager[object]:
        """Context of a network's forward pass on a device of this type, in both roles."""
        if self.is_single:
            return nullcontext()
        return torch.autocast(torch.device(device).type, dtype=self.dtype)


def computing_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a layer with this weight computes: autocast's, else its own."""
    kind = str(weight.device.type)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def in_float32(device: torch.device | str) -> AbstractContextManager[object]:
    """Context without autocast, for float32 arithmetic. The caller converts its inputs."""
    kind = torch.device(device).type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def cast(network: nn.Module, precision: Precision, role: Role) -> None:
    """Cast every parameter in place; `requires_grad` marks trained ones. Works on the meta device. Layers with float32
    weights then compute in float32, and embeddings return `dtype` in both roles. A second call, after adapters were
    added, changes only the adapters."""
    for path, module in network.named_modules():
        released = path.removesuffix(".base_layer")  # of an adapted layer
        own = {f"{released}.{name}".lstrip("."): p for name, p in module.named_parameters(recurse=False)}
        single = not isinstance(module, _MATRICES) or any(matches(name, precision.float32) for name in own)
        for p in own.values():
            wide = precision.master if p.requires_grad and role == "train" else precision.dtype
            wanted = torch.float32 if single else wide
            if p.is_floating_point() and p.dtype != wanted:
                # On meta, avoid torch's conversion, which imports its compiler.
                p.data = torch.empty(p.shape, dtype=wanted, device="meta") if p.is_meta else p.data.to(wanted)
        if precision.is_single:
            continue
        if single and type(module) in _FLOAT32:
            module.__class__ = _FLOAT32[type(module)]
        elif type(module) is nn.Embedding and not single:
            module.__class__ = RoundedEmbedding
            module.dtype = precision.dtype  # type: ignore[assignment]


class Float32Linear(nn.Linear):
    """A linear layer that computes in float32, whatever its input's dtype and autocast."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        with in_float32(input.device):
            return super().forward(input.float())


class Float32Conv2d(nn.Conv2d):
    """The same of a convolution."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        with in_float32(input.device):
            return super().forward(input.float())


class RoundedEmbedding(nn.Embedding):
    """An embedding that returns `dtype`, even if its table is kept in float32 for training."""

    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return super().forward(input).to(self.dtype)


#: Class of a layer -> the one that computes in float32. Names of parameters stay as they are.
_FLOAT32: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Float32Linear, nn.Conv2d: Float32Conv2d}
