"""The one module of `runtime` that imports torch: arrays to tensors and back, snapshots of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

State = dict[str, Tensor]


def as_tensors(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Tensors on `device`; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor, which needs no gradient, as an array; it shares memory on the CPU. bfloat16 becomes float32."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()
    return array


def snapshot(state: Mapping[str, Tensor], into: State | None = None) -> State:
    """Copy the tensors, into `into`'s memory where it has the same names (it came from an earlier snapshot)."""
    if into is None or into.keys() != state.keys():
        return {name: tensor.detach().clone() for name, tensor in state.items()}
    with torch.no_grad():
        for name, tensor in state.items():
            into[name].copy_(tensor)
    return into


def apply_state(module: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite the module's weights with `state`, whole or not at all.

    Raises ValueError if names or shapes differ; then nothing has been changed.
    """
    own = module.state_dict()
    if own.keys() != state.keys():
        odd = sorted(own.keys() ^ state.keys())
        raise ValueError(f"weights do not fit the policy: {odd[0]} (and {len(odd) - 1} more) is on one side only")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"weights do not fit the policy: {name} is {tuple(tensor.shape)}, it should be {tuple(own[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def use_one_thread() -> None:
    """One thread per operation: small policies are no faster with more, and far slower where cores are shared."""
    torch.set_num_threads(1)
