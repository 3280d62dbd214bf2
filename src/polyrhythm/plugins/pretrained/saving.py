"""Saves a network in the layout of its original folder: names, shards, dtypes and all other files.

Headers are written unchanged and tensors one by one, so an untrained network gives identical files and no second copy
of the model is made. Critic and noise head are saved to polyrhythm.safetensors. The folder is renamed to its name when
it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import ConfigError
from polyrhythm.files import check_link, copy_inner, name_in_errors, new_folder
from polyrhythm.plugins.pretrained.building import NETWORK
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint, read_stored
from polyrhythm.plugins.pretrained.fitting import Architecture, fit
from polyrhythm.plugins.pretrained.folder_files import ADAPTER_CONFIG, CHOICES, CONFIG, OURS, SINGLE
from polyrhythm.safetensors_files import read_header, write_tensors
from polyrhythm.specs.weights import weight_specs

#: A tensor of the network by its name, or None: as the folder has it.
NewTensor = Callable[[str], Tensor | None]


def save_folder(checkpoint: Checkpoint, of: Architecture, state: Mapping[str, Tensor], out: Path) -> None:
    """Write a policy's state_dict into the new folder `out`, in the layout of `checkpoint`.

    state: the network's tensors under `network.`; others go to polyrhythm.safetensors, as do those without a place in
    the layout. Tensors missing in it, such as frozen ones, are copied from the folder. ConfigError: `out` exists, or a
    shape differs from the folder's.
    """
    network = {name.removeprefix(NETWORK): tensor for name, tensor in state.items() if name.startswith(NETWORK)}
    found = fit(checkpoint, weight_specs(network), of)
    for name, (held, there) in found.reshaped.items():
        raise ConfigError(
            f"{name} is {list(held.shape)} in the policy and {list(there.shape)} in {checkpoint.folder}: save it in "
            "the layout of the folder that it was built from"
        )
    stored_as = {name: name for name in found.found} | dict(of.aliases)
    ours = {name: tensor for name, tensor in state.items() if not name.startswith(NETWORK)}
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
    network = {name.removeprefix(NETWORK): tensor for name, tensor in state.items() if name.startswith(NETWORK)}
    ours = {name: tensor for name, tensor in state.items() if not name.startswith(NETWORK)}
    content = {**of.config(size), CHOICES: dict(choices)}
    with new_folder(out) as unfinished:
        with name_in_errors(unfinished / CONFIG):
            (unfinished / CONFIG).write_text(json.dumps(content, indent=1), encoding="utf-8")
        write_tensors(network, unfinished / SINGLE[0])
        if ours:
            write_tensors(ours, unfinished / OURS)


def save_changed(checkpoint: Checkpoint, new: NewTensor, out: Path, ours: Mapping[str, Tensor]) -> None:
    """Copy the folder with tensors replaced by those that `new` returns for the folder's names, and with `ours`.

    Tensors of the network in the folder's own polyrhythm.safetensors are kept unless `ours` has them.
    """
    written = tensor_files(checkpoint)
    with new_folder(out) as unfinished:
        names = {place: name for name, place in checkpoint.places.items()}
        for file in sorted(written):
            here = unfinished / file.relative_to(checkpoint.folder)
            places = {place.stored: name for place, name in names.items() if place.file == file}
            if not any(new(name) is not None for name in places.values()):
                shutil.copyfile(file, here)
            elif file.suffix == ".pt":
                _write_torch_file(file, here, places, new)
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
    part of the weights.

    ConfigError: a file links out of the folder.
    """
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
        for stored, old in read_stored(file, {stored: stored for stored in header.tensors}):
            tensor = new(places[stored]) if stored in places else None
            stream.seek(header.begins[stored])
            kept = old if tensor is None else as_stored(tensor, old)
            stream.write(kept.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_torch_file(file: Path, here: Path, places: Mapping[str, str], new: NewTensor) -> None:
    content = dict(read_stored(file, {stored: stored for stored in places}))
    for stored, old in content.items():
        tensor = new(places[stored])
        content[stored] = old.clone() if tensor is None else as_stored(tensor, old)
    torch.save(content, here)


def as_stored(tensor: Tensor, old: Tensor) -> Tensor:
    """The tensor in the dtype of `old`. If `old` is finer, unchanged numbers keep their stored value."""
    tensor = tensor.detach().to("cpu")
    new = tensor.to(old.dtype)
    if old.is_floating_point() and tensor.element_size() < old.element_size():
        new = torch.where(old.to(tensor.dtype) == tensor, old, new)
    return new.contiguous()
