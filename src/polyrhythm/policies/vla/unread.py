"""Reads the tensors of a checkpoint part by part, for ranks that share them: none ever has the whole network.

The network is made as always, but for what the folder has of it, which stays on the meta device. `read` then copies
what lies within one part of it, straight from the mapped files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from polyrhythm.policies.vla.adapting import released_name
from polyrhythm.policies.vla.building import load_into, slots_by_name
from polyrhythm.policies.vla.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class UnreadTensors:
    """What a network lacks. found: its name without adapters -> the folder's (`building.fit`)."""

    checkpoint: Checkpoint
    found: Mapping[str, str]

    def read(self, network: nn.Module, part: nn.Module, device: str) -> None:
        """Put copies on `device` in the place of the tensors within `part` that are on meta, in their dtypes."""
        within = {id(module) for module in part.modules()}
        inside = {id(held) for module in network.modules() if id(module) in within for held in _held(module)}
        wanted = {}
        for name, slots in slots_by_name(network).items():
            stored = self.found.get(released_name(name) or "")
            if stored is not None and slots[0][0][slots[0][1]].is_meta and any(id(held) in inside for held, _ in slots):
                wanted[name] = stored
        load_into(network, self.checkpoint, wanted, device=device)


def _held(module: nn.Module) -> tuple[object, ...]:
    return module._parameters, module._buffers
