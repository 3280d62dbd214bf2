"""The one module of `runtime` that imports torch: arrays to tensors and back, weights in given memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

State = Mapping[str, Tensor]
Module = torch.nn.Module

_ALIGNMENT = 64
_BFLOAT16 = torch.bfloat16


def as_tensors(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Tensors on `device`; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor, which needs no gradient, as an array; it shares memory on the CPU. bfloat16 becomes float32."""
    if tensor.dtype is _BFLOAT16:
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy() if tensor.is_cpu else tensor.cpu().numpy()
    return array


def nbytes_of(state: State) -> int:
    """Memory that `tensors_over` needs for tensors like these."""
    return sum(_padded(tensor) for tensor in state.values())


def tensors_over(like: State, memory: memoryview) -> dict[str, Tensor]:
    """Tensors with the names, shapes and dtypes of `like`, whose data is `memory`; nothing is copied."""
    found, offset = {}, 0
    for name, tensor in like.items():
        data = torch.frombuffer(memory, dtype=tensor.dtype, count=max(tensor.numel(), 1), offset=offset)
        found[name] = data[: tensor.numel()].view(tensor.shape)
        offset += _padded(tensor)
    return found


def snapshot(state: State, into: State) -> None:
    """Copy the tensors into those of the same names. ValueError if names or shapes differ; then nothing is copied."""
    _refuse_unlike(into, state)
    with torch.no_grad():
        for name, tensor in state.items():
            into[name].copy_(tensor)


def apply_state(module: Module, state: State) -> None:
    """Overwrite the module's weights with `state`, whole or not at all.

    Raises ValueError if names or shapes differ; then nothing has been changed.
    """
    snapshot(state, module.state_dict())


def _refuse_unlike(own: State, state: State) -> None:
    if own.keys() != state.keys():
        odd = sorted(own.keys() ^ state.keys())
        raise ValueError(f"weights do not fit the policy: {odd[0]} (and {len(odd) - 1} more) is on one side only")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"weights do not fit the policy: {name} is {tuple(tensor.shape)}, it should be {tuple(own[name].shape)}"
            )


def _padded(tensor: Tensor) -> int:
    """Bytes of the tensor's data, one element at least, up to the next alignment."""
    return -(-max(tensor.numel(), 1) * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def use_one_thread() -> None:
    """One thread per operation: small policies are no faster with more, and far slower where cores are shared."""
    torch.set_num_threads(1)


def count_devices() -> int:
    """CUDA devices that torch sees on this machine, as CUDA_VISIBLE_DEVICES leaves them."""
    return torch.cuda.device_count()
