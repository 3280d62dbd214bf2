"""Exports trained language models in the layout of their folder or as peft adapters; merges adapters into a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.cli.show import aligned
from polyrhythm.errors import ConfigError
from polyrhythm.files import new_folder
from polyrhythm.plugins.language.causal_lm.network import empty_network, is_known, loaded_network, open_config
from polyrhythm.plugins.language.causal_lm.policy import CausalLmSettings
from polyrhythm.plugins.pretrained.adapters import (
    LEFT_OUT,
    Adapters,
    is_adapter,
    merge_into,
    refuse_adapters,
    save_adapters,
)
from polyrhythm.plugins.pretrained.building import NETWORK, copy_others, save_changed, tensor_files, tied_names
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.folder_files import CONFIG, INDEX
from polyrhythm.policies.base import FolderReport

#: Prefix of the model's tensors in a policy's state_dict.
_MODEL = f"{NETWORK}model."


class CausalLmFolders:
    """Folders of causal language models in the Hugging Face layout (`policies.base.FolderFormat`)."""

    def export(
        self,
        settings: CausalLmSettings,
        weights: Mapping[str, Tensor],
        out: Path,
        *,
        base: str,
        source: Path,
        env: object,  # noqa: ARG002 - the contract's
    ) -> str:
        """Export in the layout of `base`, or as its adapters. A model drawn from a seed has no released layout."""
        if base:
            return save_trained(weights, settings, Checkpoint.open(base), out)
        refuse_adapters(source, weights)
        return ""

    def recognises(self, folder: Path) -> bool:
        if not (folder / CONFIG).is_file():
            return False
        opened = Checkpoint.open(folder)
        return not opened.architecture and is_known(opened.config.get("model_type"))

    def inspect(self, folder: Path) -> FolderReport:
        """ConfigError: the model type is not supported, such as an encoder."""
        opened, config = Checkpoint.open(folder), open_config(str(folder))
        told = {
            "architecture": "causal_lm",
            "folder": str(folder),
            "model": config.model_type,
            "parameters": opened.parameters,
            "vocabulary": config.vocab_size,
            "context": getattr(config, "max_position_embeddings", None),
            "tokenizer": (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file(),
        }
        rows = {
            "architecture": f"causal_lm ({told['model']})",
            "tensors": f"{told['parameters']:,} numbers",
            "tokens": f"{told['vocabulary']:,} in its vocabulary, a context of {told['context'] or 'any number'}",
            "tokenizer": "here" if told["tokenizer"] else "none: training needs one in this folder",
        }
        policy = f"policy: {{type: causal_lm, checkpoint: {folder}}}"
        recipe = f"{policy}\nenv:\n  tokenizer: {folder}   # of a text environment"
        return FolderReport(told, f"{aligned(rows.items())}\n\n{recipe}")

    def merge(self, adapters: Path, base: Path, out: Path) -> None:
        merge(Adapters.open(adapters), Checkpoint.open(base), out)


def save_trained(weights: Mapping[str, Tensor], section: CausalLmSettings, base: Checkpoint, out: Path) -> str:
    """Write a policy's published weights into the new folder `out`; return what was written: adapters or the network.
    ConfigError: `base` is not a causal language model, or lacks a tensor."""
    with torch.device("meta"):
        tied = tied_names(empty_network(open_config(str(base.folder))).model)
    model = {name.removeprefix(_MODEL): tensor for name, tensor in weights.items() if name.startswith(_MODEL)}
    if any(is_adapter(name) for name in model):
        state, lora = {NETWORK + name: tensor for name, tensor in model.items()}, section.lora
        save_adapters(state, out, alpha=lora.alpha, base=base, also=lora.also, tied=tied, task="CAUSAL_LM")
        return "adapters"
    stored = {}
    for name, tensor in model.items():
        if not (place := _place(name, base)):
            raise ConfigError(
                f"{base.folder} has no tensor {name}, which was trained; name the folder that the policy was built from"
            )
        stored[place] = tensor
    for names in tied:  # the folder may store every name, and an old value would undo the tie
        stored |= {name: model[one] for one in names if one in model for name in names if name in base.tensors}
    for name, tensor in stored.items():
        if tuple(tensor.shape) != tuple(base.tensors[name].shape):
            raise ConfigError(
                f"{name} is {list(tensor.shape)} in the policy and {list(base.tensors[name].shape)} in {base.folder}; "
                "name the folder that it was built from"
            )
    save_changed(base, stored.get, out, {})
    return "network"


def merge(adapters: Adapters, base: Checkpoint, out: Path) -> None:
    """Merge the adapters into the language model `base` and write it into the new folder `out`.

    Layout and dtypes are the base's; if they cannot hold the result, such as an output layer that is no longer tied to
    the embedding, the layout is that of transformers. ConfigError: the adapters belong to another base.
    """
    open_config(str(base.folder))
    model: Any = loaded_network(str(base.folder)).model
    tied = merge_into(model, adapters)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    untied = any(not torch.equal(tensors[first], tensors[name]) for first, *others in tied for name in others)
    twins = {name for _, *others in tied for name in others}
    places = {name: place for name in tensors if (place := _place(name, base))}
    if not untied and not tensors.keys() - places.keys() - twins:
        save_changed(base, {place: tensors[name] for name, place in places.items()}.get, out, {})
        return
    files = tensor_files(base)
    dtypes = {name: getattr(torch, base.tensors[place].dtype) for name, place in places.items()}
    common = next(iter(dtypes.values()))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, common))
    if untied:
        model.config.tie_word_embeddings = False
    with new_folder(out) as unfinished:
        model.save_pretrained(unfinished)
        written = {*files, base.folder / INDEX, *(base.folder / path.name for path in unfinished.iterdir())}
        copy_others(base.folder, unfinished, written)


def _place(name: str, base: Checkpoint) -> str:
    """The name of a tensor in the folder, "" if it has none."""
    return next((found for prefix in LEFT_OUT if (found := name.removeprefix(prefix)) in base.tensors), "")
