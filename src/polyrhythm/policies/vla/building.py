"""Makes the network of a checkpoint: first without memory, then tensor by tensor from the mapped files.

Each tensor goes from its file straight to the station's device in the dtype that it will have there, so no second
copy of the model exists. Without a checkpoint the seed decides every tensor, on the CPU, so that it is the same on
every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyrhythm.errors import ConfigError
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.vla.architectures import Architecture, architecture
from polyrhythm.policies.vla.checkpoint import Checkpoint
from polyrhythm.policies.vla.folder_files import few
from polyrhythm.specs import WeightSpec
from polyrhythm.specs.weights import weight_specs

#: Changes an empty network before it is filled: dtypes of its parameters, `requires_grad`, classes of its layers.
Prepare = Callable[[nn.Module], None]

#: Prefix of the network's tensors in a policy's state_dict, and in polyrhythm.safetensors of those that the folder's
#: other files have no place for.
NETWORK = "network."

#: Factories whose values no constructor relies on: they are overwritten, or drawn.
_DRAWN = frozenset((torch.empty, torch.empty_strided, torch.rand, torch.randn, torch.normal))
#: Factories of one repeated value: weights if they are large, constants if not.
_REPEATED = frozenset((torch.zeros, torch.ones))
_LARGE = 1 << 16


class _WeightsOnMeta(TorchFunctionMode):
    """Puts what a constructor allocates or draws on the meta device, large zeros and ones too, and computes everything
    else as usual.

    So weights take neither memory nor time, while constants made from numbers (frequencies, tables, scales) are right
    whether they are in the state_dict or not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWN:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in _REPEATED and prod(shape := _shape_of(args, kwargs)) > _LARGE:
            return torch.empty(shape, dtype=kwargs.get("dtype"), device="meta")
        first = args[0] if args else kwargs.get("tensor")  # by name in torch.nn.init
        if isinstance(first, Tensor) and first.is_meta and _only_fills(func):
            return first
        return func(*args, **kwargs)


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The shape that torch.zeros or torch.ones is called with."""
    if "size" in kwargs:
        return tuple(kwargs["size"])
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args


def _only_fills(func: Any) -> bool:
    """Whether it writes values into its first argument and returns that."""
    name = getattr(func, "__name__", "")
    return getattr(func, "__module__", "") == "torch.nn.init" or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Within it, modules are made without memory for their weights; their constants are real."""
    with torch.random.fork_rng(devices=[]), _WeightsOnMeta():
        yield


@dataclass(frozen=True, slots=True)
class Fit:
    """How a folder's tensors compare with a network's. found: network's name -> the folder's name for it; missing,
    unexpected: names; reshaped: name -> (the network's form, the folder's)."""

    found: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: Mapping[str, tuple[WeightSpec, WeightSpec]]

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)


def fit(checkpoint: Checkpoint, wanted: Mapping[str, WeightSpec], of: Architecture) -> Fit:
    """Compare the folder with the tensors `wanted` by a network. Dtypes may differ."""
    found = {name: stored for stored, name in of.aliases.items() if stored in checkpoint.tensors and name in wanted}
    found |= {name: name for name in wanted if name in checkpoint.tensors}
    known = {*wanted, *checkpoint.side, *(stored for stored, name in of.aliases.items() if name in wanted)}
    pairs = {name: (wanted[name], checkpoint.tensors[stored]) for name, stored in found.items()}
    return Fit(
        found=found,
        missing=tuple(name for name in wanted if name not in found and not _matches(name, of.optional)),
        unexpected=tuple(name for name in checkpoint.tensors if name not in known and not _matches(name, of.unused)),
        reshaped={name: pair for name, pair in pairs.items() if pair[0].shape != pair[1].shape},
    )


def check_fit(of: Architecture, checkpoint: Checkpoint, network: nn.Module) -> Fit:
    """How they fit. ConfigError unless every tensor of the network is there in its shape, and no other.

    The network may be on meta: `form` calls this, so that a wrong folder is told before anything starts.
    """
    checkpoint.require(of.name)
    found = fit(checkpoint, weight_specs(network.state_dict()), of)
    if not found.is_whole:
        raise ConfigError(
            f"checkpoint = {checkpoint.folder}: {misfit(found, of)}{without_config(checkpoint)}; look at polyrhythm "
            f"policies inspect {checkpoint.folder}, and download it again or name another folder"
        )
    return found


def check_whole(checkpoint: Checkpoint) -> None:
    """ConfigError unless the folder has every tensor of its architecture in its shape, and no other; none is read."""
    kind = checkpoint.architecture
    checkpoint.require(kind)
    of = architecture(kind)
    with weights_on_meta():
        network = of.network(released_size(of, checkpoint))
    check_fit(of, checkpoint, network)


def misfit(found: Fit, of: Architecture) -> str:
    """What is missing, unexpected or of another shape, in words."""
    shapes = [
        f"{name} is {list(there.shape)}, {list(ours.shape)} expected" for name, (ours, there) in found.reshaped.items()
    ]
    parts = {
        "missing": list(found.missing),
        "of another shape": shapes,
        "unexpected": list(found.unexpected),
    }
    told = [f"{_tensors(len(names))} {what} ({few(names)})" for what, names in parts.items() if names]
    return f"compared with the network of {of.name}, it has " + ", ".join(told)


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def released_size(of: Architecture, checkpoint: Checkpoint) -> Any:
    """The size of the checkpoint's network. ConfigError: another architecture, or config and tensors do not fit."""
    checkpoint.require(of.name)
    try:
        size = of.size(checkpoint.config, checkpoint.tensors)
        _check_numbers(size)
    except KeyError as error:
        raise ConfigError(
            f"checkpoint = {checkpoint.folder}: {error.args[0]} is neither in config.json nor among the tensors, so "
            f"the size of {of.name} is unknown; download the folder again"
        ) from error
    except ValueError as error:
        raise ConfigError(f"checkpoint = {checkpoint.folder}: {error}{without_config(checkpoint)}") from error
    except (TypeError, AttributeError, IndexError, ZeroDivisionError) as error:  # any JSON may be in there
        raise ConfigError(
            f"checkpoint = {checkpoint.folder}: its config.json does not describe a network of {of.name} ({error}); "
            "copy it again from its release"
        ) from error
    return size


#: Annotation of a size's field -> what its value may be.
_NUMBERS: Mapping[Any, Any] = {"int": int, "float": (int, float)}


def _check_numbers(size: Any) -> None:
    """ValueError: a number of a size, or of a size within it, is none."""
    for entry in fields(size) if is_dataclass(size) else ():
        value = getattr(size, entry.name)
        if is_dataclass(value):
            _check_numbers(value)
        elif entry.type in _NUMBERS and not (isinstance(value, _NUMBERS[entry.type]) and value >= 0):
            raise ValueError(
                f"config.json gives {entry.name} = {value!r}, not a number; copy it again from its release"
            )


def without_config(checkpoint: Checkpoint) -> str:
    """A likely reason why a folder does not fit, as an addition to a sentence; "" if it has a config.json."""
    return "" if checkpoint.config else " (it has no config.json, so the sizes of the release were assumed)"


def load_network(
    of: Architecture,
    checkpoint: Checkpoint,
    *,
    device: str,
    prepare: Prepare | None = None,
    seed: int = 0,
    size: Any = None,
) -> nn.Module:
    """The checkpoint's network on `device`; ConfigError: tensors missing, unexpected or of another shape.

    Each tensor has the dtype that the network has after `prepare`, without it that of the file. size: as
    `released_size` unless given. seed: for what is `optional` in the architecture and not in the folder.
    """
    network, found = unfilled_network(of, checkpoint, device=device, prepare=prepare, seed=seed, size=size)
    load_into(network, checkpoint, found, device=device, as_stored=prepare is None)
    _finish(network, device)
    return network


def unfilled_network(
    of: Architecture, checkpoint: Checkpoint, *, device: str, prepare: Prepare | None, seed: int, size: Any
) -> tuple[nn.Module, dict[str, str]]:
    """The network of `load_network` before any tensor is read: what is large of the folder's is on meta. And the names
    of what the folder has: the network's -> the folder's."""
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
    """A network whose tensors all follow from the seed, the same on every device, in the dtypes of `prepare`."""
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
    """Copy what the folder has of ours (critic, noise head) into the policy. ConfigError: of another shape."""
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith(NETWORK)}
    for name, tensor in _ours_for(checkpoint, state):
        with torch.no_grad():
            state[name].copy_(tensor)


def _ours_for(checkpoint: Checkpoint, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of polyrhythm.safetensors that `state` has. ConfigError: of another shape."""
    for name, tensor in checkpoint.read_ours():
        if name not in state:
            continue
        if state[name].shape != tensor.shape:
            raise ConfigError(
                f"checkpoint = {checkpoint.folder}: {name} is {list(tensor.shape)} in polyrhythm.safetensors, "
                f"{list(state[name].shape)} in this policy; use the settings that it was saved with, or "
                "remove that file"
            )
        yield name, tensor


def _assign(network: nn.Module, tensors: Iterator[tuple[str, Tensor]], device: str, *, as_stored: bool) -> None:
    """Put a copy of each tensor in its place, in every module that shares it."""
    places = slots_by_name(network)
    for name, tensor in tensors:
        held, key = places[name][0]
        dtype = tensor.dtype if as_stored else held[key].dtype
        _replace(places[name], torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor))


#: A module's dictionary of parameters or buffers, and the key in it.
Slot = tuple[dict[str, Any], str]


def slots_by_name(network: nn.Module) -> dict[str, list[Slot]]:
    """Name in the state_dict -> all places of that very tensor (more than one if it is tied)."""
    slots: dict[int, list[Slot]] = {}
    names: dict[str, int] = {}
    for path, module in network.named_modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append((held, key))
                    names[f"{path}.{key}" if path else key] = id(tensor)
    return {name: slots[identity] for name, identity in names.items()}


def _replace(slots: list[Slot], tensor: Tensor) -> None:
    """Put the tensor in these places, a parameter where a parameter was."""
    held, key = slots[0]
    if isinstance(held[key], nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=held[key].requires_grad)
    for held, key in slots:
        held[key] = tensor


def _draw(network: nn.Module, names: list[str], seed: int) -> None:
    """Draw the layers with these tensors on the CPU, as torch initialises them."""
    with seeded(seed):
        for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
            layer = network.get_submodule(path)
            reset = getattr(layer, "reset_parameters", None)
            assert callable(reset), f"{path} is optional, but {type(layer).__name__} cannot be drawn"
            layer.to_empty(device="cpu", recurse=False)
            reset()


def _finish(network: nn.Module, device: str) -> None:
    """Move what is not there to the device, and see that nothing was forgotten on meta."""
    for name, slots in slots_by_name(network).items():
        held, key = slots[0]
        tensor = held[key].detach()
        assert not tensor.is_meta, (
            f"{name} is in no checkpoint and has no value: make constants from numbers (torch.arange, torch.tensor), "
            "not with torch.empty or torch.rand"
        )
        if tensor.device.type != torch.device(device).type:
            _replace(slots, tensor.to(device))
