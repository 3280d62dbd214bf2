"""Writes a trained language model in the layout of its folder, or as adapters in peft's."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import ConfigError
from polyrhythm.policies.causal_lm.network import empty_network, open_config
from polyrhythm.policies.causal_lm.settings import CausalLmSettings
from polyrhythm.policies.vla.adapters import is_adapter, save_adapters
from polyrhythm.policies.vla.building import NETWORK
from polyrhythm.policies.vla.checkpoint import Checkpoint
from polyrhythm.policies.vla.saving import save_changed

#: Prefix of the model's tensors in a policy's state_dict.
_MODEL = f"{NETWORK}model."
#: Prefixes that a folder may lack: of a model saved without its output layer, such as the first GPT-2.
_BASES = ("", "model.", "transformer.")


def save_trained(weights: Mapping[str, Tensor], section: CausalLmSettings, base: Checkpoint, out: Path) -> str:
    """Write a policy's published weights into the new folder `out`; what it is: adapters, or the network.

    ConfigError: `base` is no causal language model, or lacks a tensor.
    """
    config = open_config(str(base.folder))
    model = {name.removeprefix(_MODEL): tensor for name, tensor in weights.items() if name.startswith(_MODEL)}
    if any(is_adapter(name) for name in model):
        state = {NETWORK + name: tensor for name, tensor in model.items()}
        lora = section.lora
        save_adapters(state, out, alpha=lora.alpha, base=str(base.folder), also=lora.also, task="CAUSAL_LM")
        return "adapters"
    stored = {_stored(name, base): tensor for name, tensor in model.items()}
    stored |= {name: model[trained] for name, trained in _tied(config, model).items() if name in base.tensors}
    for name, tensor in stored.items():
        if tuple(tensor.shape) != tuple(base.tensors[name].shape):
            raise ConfigError(
                f"{name} is {list(tensor.shape)} in the policy and {list(base.tensors[name].shape)} in {base.folder}; "
                "name the folder that it was built from"
            )
    save_changed(base, stored.get, out, {})
    return "network"


def _tied(config: Any, trained: Container[str]) -> dict[str, str]:
    """Names of tensors that the model ties to a trained one, with that one's name: a folder may hold them all the same,
    and a value of before the training would undo the tie."""
    with torch.device("meta"):
        model = empty_network(config).model
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for names in groups.values():
        if (first := next((name for name in names if name in trained), None)) is not None:
            found |= {name: first for name in names if name not in trained}
    return found


def _stored(name: str, base: Checkpoint) -> str:
    """The folder's name of a tensor. ConfigError: it has none."""
    for prefix in _BASES:
        if (found := name.removeprefix(prefix)) in base.tensors:
            return found
    raise ConfigError(
        f"{base.folder} has no tensor {name}, which was trained; name the folder that the policy was built from"
    )
