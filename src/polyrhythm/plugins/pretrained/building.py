"""Builds a checkpoint's network: first without memory, then tensor by tensor from the mapped files.

Each tensor is copied from its file directly to the device in its final dtype, so no second copy of the model exists.
Without a checkpoint every tensor is drawn from the seed on the CPU, so it is equal on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture, check_fit, released_size
from polyrhythm.policies.form import weights_on_meta
from polyrhythm.policies.mlp import seeded

#: Changes an empty network before it is filled: dtypes of its parameters, `requires_grad`, classes of its layers.
Prepare = Callable[[nn.Module], None]

#: Prefix of the network's tensors in a policy's state_dict, and in polyrhythm.safetensors of those that the folder's
#: other files have no place for.
NETWORK = "network."


def load_network(
    of: Architecture,
    checkpoint: Checkpoint,
    *,
    device: str,
    prepare: Prepare | None = None,
    seed: int = 0,
    size: Any = None,
) -> nn.Module:
    """The checkpoint's network on `device`. ConfigError: tensors are missing, unexpected or of another shape.

    Dtypes are those of the network after `prepare`, or the file's without it. size: by default `released_size`. seed:
    for tensors that are `optional` in the architecture and missing in the folder.
    """
    network, found = unfilled_network(of, checkpoint, device=device, prepare=prepare, seed=seed, size=size)
    load_into(network, checkpoint, found, device=device, as_stored=prepare is None)
    _finish(network, device)
    return network


def unfilled_network(
    of: Architecture, checkpoint: Checkpoint, *, device: str, prepare: Prepare | None, seed: int, size: Any
) -> tuple[nn.Module, dict[str, str]]:
    """The network of `load_network` before tensors are read, with large tensors on meta, and the names of the
    folder's tensors: the network's -> the folder's."""
    size = released_size(of, checkpoint) if size is None else size
    with weights_on_meta():
        network: nn.Module = of.network(size)
    found = dict(check_fit(of, checkpoint, network).found)
    if prepare is not None:
        prepare(network)
    own = [name for name in network.state_dict() if name not in found]
    _draw(network, own, seed)
    drawn = network.state_dict()
    ours = _ours_for(checkpoint, {NETWORK + name: drawn[name] for name in own})
    added = ((name.removeprefix(NETWORK), tensor) for name, tensor in ours)
    _assign(network, added, device, as_stored=prepare is None)
    return network, found


def random_network(of: Architecture, size: Any, *, seed: int, device: str, prepare: Prepare | None = None) -> nn.Module:
    """A network drawn from the seed, equal on every device, in the dtypes of `prepare`."""
    with seeded(seed), torch.device("cpu"):
        network: nn.Module = of.network(size)
        if callable(initialise := getattr(network, "initialise", None)):
            initialise()
    if prepare is not None:
        prepare(network)
    _finish(network, device)
    return network


def load_into(
    network: nn.Module, checkpoint: Checkpoint, found: Mapping[str, str], *, device: str, as_stored: bool = False
) -> None:
    """Replace the network's tensors, on meta or not, by copies of the folder's, on `device`.

    found: network's name -> the folder's (`fit`). as_stored: in the folder's dtypes, otherwise in the network's.
    """
    names = {stored: name for name, stored in found.items()}
    tensors = ((names[stored], tensor) for stored, tensor in checkpoint.read(names))
    _assign(network, tensors, device, as_stored=as_stored)


def load_ours(policy: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the folder's own tensors (critic, noise head) into the policy. ConfigError: a shape differs."""
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith(NETWORK)}
    for name, tensor in _ours_for(checkpoint, state):
        with torch.no_grad():
            state[name].copy_(tensor)


def _ours_for(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of polyrhythm.safetensors that are in `state`. ConfigError: a shape differs."""
    for name, tensor in checkpoint.read_ours():
        if name not in state:
            continue
        if state[name].shape != tensor.shape:
            raise ConfigError(
                f"checkpoint = {checkpoint.folder}: {name} is {list(tensor.shape)} in polyrhythm.safetensors, "
                f"{list(state[name].shape)} in this policy; use the settings that it was saved with "
                "(such as policy.value_level and chunk), or remove that file"
            )
        yield name, tensor


def _assign(network: nn.Module, tensors: Iterator[tuple[str, Tensor]], device: str, *, as_stored: bool) -> None:
    """Put a copy of each tensor into every module that shares it."""
    places = slots_by_name(network)
    for name, tensor in tensors:
        held, key = places[name][0]
        dtype = tensor.dtype if as_stored else held[key].dtype
        _replace(places[name], torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor))


#: A module's dictionary of parameters or buffers, and the key in it.
Slot = tuple[dict[str, Any], str]


def slots_by_name(network: nn.Module) -> dict[str, list[Slot]]:
    """All slots of each tensor, by its name in the state_dict; several for a tied tensor."""
    slots: dict[int, list[Slot]] = {}
    names: dict[str, int] = {}
    for path, module in network.named_modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append((held, key))
                    names[f"{path}.{key}" if path else key] = id(tensor)
    return {name: slots[identity] for name, identity in names.items()}


def tied_names(network: nn.Module) -> list[list[str]]:
    """Groups of names of the same parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def untie(network: nn.Module) -> list[list[str]]:
    """Give each name of a tied parameter its own copy; return the former groups."""
    tied = tied_names(network)
    for name in (name for _, *others in tied for name in others):
        path, _, key = name.rpartition(".")
        module = network.get_submodule(path)
        setattr(module, key, nn.Parameter(module.get_parameter(key).detach().clone(), requires_grad=False))
    return tied


def _replace(slots: list[Slot], tensor: Tensor) -> None:
    held, key = slots[0]
    if isinstance(held[key], nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=held[key].requires_grad)
    for held, key in slots:
        held[key] = tensor


def _draw(network: nn.Module, names: list[str], seed: int) -> None:
    """Draw the layers that contain these tensors on the CPU, with torch's initialisation."""
    with seeded(seed):
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            layer = network.get_submodule(path)
            reset = getattr(layer, "reset_parameters", None)
            assert callable(reset), f"{path} is optional, but {type(layer).__name__} cannot be drawn"
            layer.to_empty(device="cpu", recurse=False)
            reset()


def _finish(network: nn.Module, device: str) -> None:
    """Move remaining tensors to the device; check that none is left on meta."""
    for name, slots in slots_by_name(network).items():
        held, key = slots[0]
        tensor = held[key].detach()
        assert not tensor.is_meta, (
            f"{name} is in no checkpoint and has no value: make constants from numbers (torch.arange, torch.tensor), "
            "not with torch.empty or torch.rand"
        )
        if tensor.device.type != torch.device(device).type:
            _replace(slots, tensor.to(device))
