"""Arrays to tensors and back, weights in given memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.specs.weights import WeightsLayout, WeightSpec, first_misfit, weight_specs

State = Mapping[str, Tensor]
#: Rows of a published tensor: its name, the rows, and the row of the whole tensor that they begin at; None: it is the
#: whole tensor.
RowsOf = tuple[str, Tensor, int | None]
#: Copies the tensors that both have from the second into the first.
Copy = Callable[[State, State], None]
Module = torch.nn.Module
Device = torch.device

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


def tensors_over(layout: WeightsLayout, memory: memoryview) -> dict[str, Tensor]:
    """The layout's tensors, whose data is `memory`; nothing is copied."""
    return views_of(layout, torch.frombuffer(memory, dtype=torch.uint8, count=layout.nbytes)) if layout.nbytes else {}


def views_of(layout: WeightsLayout, memory: Tensor) -> dict[str, Tensor]:
    """The layout's tensors, whose data are the bytes `memory` on any device; nothing is copied."""
    found = {}
    for placed in layout.tensors:
        data = memory[placed.offset : placed.offset + placed.spec.nbytes].view(getattr(torch, placed.spec.dtype))
        found[placed.name] = data.view(placed.spec.shape)
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of the tensor, in order, as bytes [n]; a view if they lie so."""
    return tensor.reshape(-1).view(torch.uint8)


def to_dtype(tensor: Tensor, dtype: str, *, host: bool = False) -> Tensor:
    """A copy without gradient, in the dtype of this name, on the same device or in host memory."""
    found = tensor.detach().to(getattr(torch, dtype), copy=not (host and tensor.is_cuda))
    return found.cpu() if host else found


def copy_into(into: State, state: State) -> None:
    """Copy the tensors that both have in place, converting dtypes; see `copy_tensor`."""
    for name, tensor in into.items():
        if name in state:
            copy_tensor(tensor, state[name])


def copy_tensor(into: Tensor, source: Tensor) -> None:
    """Copy in place, converting the dtype: from a device to the host on the device, since torch would do it with one
    core of the host."""
    with torch.no_grad():
        into.copy_(source.to(into.dtype) if source.is_cuda and into.is_cpu else source)


def tensors_of(module: Module) -> list[Tensor]:
    """The module's parameters, with their gradients, and its buffers."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *gradients, *module.buffers()]


def use_one_thread() -> None:
    """One thread per operation: small policies are no faster with more, and far slower where cores are shared."""
    torch.set_num_threads(1)


def count_devices() -> int:
    """CUDA devices that torch sees on this machine, as CUDA_VISIBLE_DEVICES leaves them."""
    return torch.cuda.device_count()


#: Tensors by name, one at a time: each may be gone when the next is asked for.
Stream = Iterable[tuple[str, Tensor]]


def fitting(layout: WeightsLayout, given: State | Stream) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the layout once, out of `given`; what else is there is left out.

    Of a mapping all are checked before this returns. Of a stream, which may have any order, the first is; the others as
    they come, and none is held while the next is asked for. ValueError: one is missing, given twice, or does not fit.
    """
    if isinstance(given, Mapping):
        check_fit(layout, given, convertible=True)
        return ((name, given[name]) for name in layout.published)
    return _begun(_each(layout, given))


def _each(layout: WeightsLayout, stream: Stream) -> Iterator[tuple[str, Tensor]]:
    specs = layout.published
    missing = dict(specs)
    for name, tensor in stream:
        if name in specs:
            if name not in missing:
                raise ValueError(f"weights do not fit the policy: {name} is given twice")
            spec, found = missing.pop(name), weight_specs({name: tensor})
            if first_misfit({name: spec}, found, convertible=True):
                raise _misfit(name, found[name], spec)
            yield name, tensor
        del tensor
    for name, spec in missing.items():
        raise _misfit(name, None, spec)


def _begun(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, the first of which has been asked for."""
    first = [item for item in (next(tensors, None),) if item is not None]

    def go_on() -> Iterator[tuple[str, Tensor]]:
        while first:
            yield first.pop()
        yield from tensors

    return go_on()


def check_fit(layout: WeightsLayout, state: State, *, convertible: bool) -> None:
    """Raise ValueError unless `state` has all tensors of the layout. convertible: in any floating-point dtype."""
    found = weight_specs({name: tensor for name, tensor in state.items() if name in layout.published})
    if name := first_misfit(layout.published, found, convertible=convertible):
        raise _misfit(name, found.get(name), layout.published[name])


def _misfit(name: str, found: WeightSpec | None, spec: WeightSpec) -> ValueError:
    return ValueError(f"weights do not fit the policy: {name} is {found or 'missing'}, the layout has {spec}")
