"""Declares what loading, saving and inspecting need from each published architecture.

The module of a network defines one `Architecture` per released form; `architecture(name)` finds it by the policy's
type. Nothing here imports torch, so a folder is recognised before any network's module is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyrhythm.specs import WeightSpec

#: Policy type -> `module:attribute` of its `Architecture`.
ARCHITECTURES = {
    "pi0": "polyrhythm.plugins.vla.pi0.network:PI0",
    "pi05": "polyrhythm.plugins.vla.pi0.network:PI05",
    "openvla_oft": "polyrhythm.plugins.vla.openvla_oft.network:OPENVLA_OFT",
    "groot_n1d5": "polyrhythm.plugins.vla.groot_n1d5.network:GROOT_N1D5",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One published architecture. All patterns are of `fnmatch` and match whole names of the network's tensors.

    name: the policy's type.
    size: (config.json, tensors of the folder by the network's names) -> the size of the network. ValueError: they do
    not fit each other. Shapes come from the tensors wherever these tell them; config tells the rest.
    network: size -> the network, an `nn.Module` whose state_dict has the released names; it must be constructible on
    torch's meta device. If it has `initialise()`, that draws its parameters where there is no checkpoint.
    aliases: name in some folders -> the name that the network has for the same tensor (tied embeddings). If a folder
    has both, the network's own name is read, and saving writes both.
    optional: tensors of the network that a folder may lack; the seed draws them (a released head that is not used);
    they must be of torch's own layers.
    unused: tensors of a folder that the network does not have and need not be told as unexpected, such as the value and
    noise heads that RLinf's PPO leaves in its checkpoints; saving copies them.
    parts: `train` -> patterns of the network's tensors that it trains; `lora` -> patterns of adapted matrices.
    dead: tensors that no output depends on; they are never trained.
    float32: tensors that the release keeps in float32 whatever the backbone's dtype.
    config: size -> the content of config.json that `size` reads back, for a network that was in no folder before.
    """

    name: str
    size: Callable[[Mapping[str, Any], Mapping[str, WeightSpec]], Any]
    network: Callable[[Any], Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dead: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    config: Callable[[Any], Mapping[str, Any]] | None = None


def architecture(name: str) -> Architecture:
    """The architecture of a policy type. KeyError: not one of `ARCHITECTURES`."""
    module, _, attribute = ARCHITECTURES[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, Architecture), f"{ARCHITECTURES[name]} is no Architecture"
    return found
