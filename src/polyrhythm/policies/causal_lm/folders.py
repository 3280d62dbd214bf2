"""Writes a trained language model in the layout of its folder, or as adapters in peft's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from polyrhythm.errors import ConfigError
from polyrhythm.policies.causal_lm.network import open_config
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
    open_config(str(base.folder))
    model = {name.removeprefix(_MODEL): tensor for name, tensor in weights.items()}
    if any(is_adapter(name) for name in model):
        state = {NETWORK + name: tensor for name, tensor in model.items()}
        lora = section.lora
        save_adapters(state, out, alpha=lora.alpha, base=str(base.folder), also=lora.also, task="CAUSAL_LM")
        return "adapters"
    stored = {_stored(name, base): tensor for name, tensor in model.items()}
    for name, tensor in stored.items():
        if tuple(tensor.shape) != tuple(base.tensors[name].shape):
            raise ConfigError(
                f"{name} is {list(tensor.shape)} in the policy and {list(base.tensors[name].shape)} in {base.folder}; "
                "name the folder that it was built from"
            )
    save_changed(base, stored.get, out, {})
    return "network"


def _stored(name: str, base: Checkpoint) -> str:
    """The folder's name of a tensor. ConfigError: it has none."""
    for prefix in _BASES:
        if (found := name.removeprefix(prefix)) in base.tensors:
            return found
    raise ConfigError(
        f"{base.folder} has no tensor {name}, which was trained; name the folder that the policy was built from"
    )
