"""Builds a checkpoint's network, and saves a network in the layout of its original folder.

Built: first without memory, then tensor by tensor from the mapped files. Each is copied from its file directly to the
device in its final dtype, so no second copy of the model exists. Without a checkpoint every tensor is drawn from
the seed on the CPU, so it is equal on every device.

Saved: names, shards, dtypes and all other files. Headers are written unchanged and tensors one by one, so an untrained
network gives identical files. Critic and noise head are saved to polyrhythm.safetensors. The folder is renamed to its
name when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import ConfigError
from polyrhythm.files import name_in_errors, new_folder
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint, read_stored
from polyrhythm.plugins.pretrained.fitting import Architecture, check_fit, fit, released_size
from polyrhythm.plugins.pretrained.folder_files import (
    ADAPTER_CONFIG,
    CHOICES,
    CONFIG,
    OURS,
    SINGLE,
    check_link,
    copy_inner,
)
from polyrhythm.policies.form import weights_on_meta
from polyrhythm.policies.mlp import seeded
from polyrhythm.safetensors_files import read_header, write_tensors
from polyrhythm.specs.weights import weight_specs

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
    """The checkpoint's network on `device`. ConfigError: tensors are missing, unexpected or of another shape. Dtypes
    are those of the network after `prepare`, or the file's without it. size: by default `released_size`. seed: for
    tensors that are `optional` in the architecture and missing in the folder."""
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
    """Replace the network's tensors, on meta or not, by copies of the folder's, on `device`. found: network's name ->
    the folder's (`fit`). as_stored: in the folder's dtypes, otherwise in the network's."""
    names = {stored: name for name, stored in found.items()}
    tensors = ((names[stored], tensor) for stored, tensor in checkpoint.read(names))
    _assign(network, tensors, device, as_stored=as_stored)


def load_ours(policy: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the folder's own tensors (critic, noise head) into the policy. ConfigError: a shape differs."""
    _, state = split_state(policy.state_dict())
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


#: A tensor of the network by its name, or None: as the folder has it.
NewTensor = Callable[[str], Tensor | None]


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A policy's tensors: the network's by its own names, and the others (critic, noise head)."""
    network = {name.removeprefix(NETWORK): x for name, x in state.items() if name.startswith(NETWORK)}
    return network, {name: x for name, x in state.items() if not name.startswith(NETWORK)}


def save_folder(checkpoint: Checkpoint, of: Architecture, state: Mapping[str, Tensor], out: Path) -> None:
    """Write a policy's state_dict into the new folder `out`, in the layout of `checkpoint`.

    state: the network's tensors under `network.`; others go to polyrhythm.safetensors, as do those without a place in
    the layout. Tensors missing in it, such as frozen ones, are copied from the folder. ConfigError: `out` exists, or a
    shape differs from the folder's.
    """
    network, ours = split_state(state)
    found = fit(checkpoint, weight_specs(network), of)
    for name, (held, there) in found.reshaped.items():
        raise ConfigError(
            f"{name} is {list(held.shape)} in the policy and {list(there.shape)} in {checkpoint.folder}: save it in "
            "the layout of the folder that it was built from"
        )
    stored_as = {name: name for name in found.found} | dict(of.aliases)
    ours |= {NETWORK + name: network[name] for name in network if name not in found.found}
    save_changed(checkpoint, lambda name: network.get(stored_as.get(name, name)), out, ours)


def save_new(of: Architecture, size: Any, state: Mapping[str, Tensor], out: Path, choices: Mapping[str, Any]) -> None:
    """Write a policy that was drawn from a seed as a released folder: model.safetensors, config.json and
    polyrhythm.safetensors.

    size: of the network. choices: config.json's section `polyrhythm`, which replaces the tokenizer, the statistics and
    the camera names of a release. ConfigError: the architecture does not define a config.json.
    """
    if of.config is None:
        raise ConfigError(
            f"policy.type = {of.name!r}, from a seed: its config.json cannot be written yet; name a released folder of "
            "the same size as --base, in whose layout it is saved"
        )
    network, ours = split_state(state)
    content = {**of.config(size), CHOICES: dict(choices)}
    with new_folder(out) as unfinished:
        with name_in_errors(unfinished / CONFIG):
            (unfinished / CONFIG).write_text(json.dumps(content, indent=1), encoding="utf-8")
        write_tensors(network, unfinished / SINGLE[0])
        if ours:
            write_tensors(ours, unfinished / OURS)


def save_changed(checkpoint: Checkpoint, new: NewTensor, out: Path, ours: Mapping[str, Tensor]) -> None:
    """Copy the folder with tensors replaced by those that `new` returns for the folder's names, and with `ours`.
    Tensors of the network in the folder's own polyrhythm.safetensors are kept unless `ours` has them."""
    written = tensor_files(checkpoint)
    with new_folder(out) as unfinished:
        names = {place: name for name, place in checkpoint.places.items()}
        for file in sorted(written):
            here = unfinished / file.relative_to(checkpoint.folder)
            places = {place.stored: name for place, name in names.items() if place.file == file}
            if not any(new(name) is not None for name in places.values()):
                shutil.copyfile(file, here)
            elif file.suffix == ".pt":
                content = dict(read_stored(file, {stored: stored for stored in places}))
                for stored, old in content.items():
                    tensor = new(places[stored])
                    content[stored] = old.clone() if tensor is None else as_stored(tensor, old)
                torch.save(content, here)
            else:
                _write_safetensors(checkpoint, file, here, places, new)
        copy_others(checkpoint.folder, unfinished, written)
        if not ours and checkpoint.ours:
            shutil.copyfile(checkpoint.folder / OURS, unfinished / OURS)
        elif ours:
            kept = {name: tensor for name, tensor in checkpoint.read_ours() if name.startswith(NETWORK)}
            write_tensors(kept | dict(ours), unfinished / OURS)


def tensor_files(checkpoint: Checkpoint) -> set[Path]:
    """The folder's tensor files except polyrhythm.safetensors. ConfigError: one of them, or that file, links out of
    the folder."""
    files = set(checkpoint.files) | {checkpoint.places[name].file for name in checkpoint.side}
    for file in (*sorted(files), checkpoint.folder / OURS):
        check_link(file, checkpoint.folder)
    return files


def copy_others(folder: Path, to: Path, written: set[Path]) -> None:
    """Copy all files except those `written`, hidden files, polyrhythm.safetensors, and folders of adapters, which are
    part of the weights. ConfigError: a file links out of the folder."""
    for path in sorted(folder.iterdir()):
        if path in written or path.name.startswith(".") or path.name == OURS or (path / ADAPTER_CONFIG).is_file():
            continue
        copy_inner(path, to / path.name, folder)


def _write_safetensors(
    checkpoint: Checkpoint, file: Path, here: Path, places: Mapping[str, str], new: NewTensor
) -> None:
    """Write a file with its own header and the new tensors. places: stored name -> name."""
    header = checkpoint.files.get(file) or read_header(file)
    with name_in_errors(here), file.open("rb") as source, here.open("wb") as stream:
        stream.write(source.read(header.data))
        for stored, old in read_stored(file):
            tensor = new(places[stored]) if stored in places else None
            stream.seek(header.begins[stored])
            kept = old if tensor is None else as_stored(tensor, old)
            stream.write(kept.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def as_stored(tensor: Tensor, old: Tensor) -> Tensor:
    """The tensor in the dtype of `old`. If `old` is finer, unchanged numbers keep their stored value."""
    tensor = tensor.detach().to("cpu")
    new = tensor.to(old.dtype)
    if old.is_floating_point() and tensor.element_size() < old.element_size():
        new = torch.where(old.to(tensor.dtype) == tensor, old, new)
    return new.contiguous()
