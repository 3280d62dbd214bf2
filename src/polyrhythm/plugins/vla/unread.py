"""Reads the tensors of a checkpoint part by part, for ranks that share them: none ever has the whole network.

The network is made as always, but for what the folder has of it: large tensors stay on the meta device. `read` then
copies what lies within one part of the network, straight from the mapped files.
"""

from __future__ import annotations

from torch import nn

from polyrhythm.plugins.vla.adapting import released_name
from polyrhythm.plugins.vla.building import load_into, slots_by_name
from polyrhythm.plugins.vla.checkpoint import Checkpoint


class UnreadTensors:
    """What a network lacks still. found: a tensor's name without adapters -> the folder's (`fitting.fit`)."""

    def __init__(self, checkpoint: Checkpoint, found: dict[str, str]) -> None:
        self._checkpoint, self._left = checkpoint, dict(found)

    def read(self, network: nn.Module, part: nn.Module, device: str) -> None:
        """Put copies on `device` in the place of the tensors within `part` that were not read yet, in their dtypes."""
        inside = {id(held) for module in part.modules() for held in (module._parameters, module._buffers)}
        wanted = {}
        for name, slots in slots_by_name(network).items():
            released = released_name(name)
            if released in self._left and any(id(held) in inside for held, _ in slots):
                wanted[name] = self._left.pop(released)
        load_into(network, self._checkpoint, wanted, device=device)
