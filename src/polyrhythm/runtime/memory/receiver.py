"""The receiving end of the weights channel: from a published version into the module that serves.

Invariant: `apply` keeps every tensor of the module at its address, so graphs captured over them stay valid.
"""

from __future__ import annotations

import torch

from polyrhythm.runtime.memory.tensors import Module, State, copy_into
from polyrhythm.runtime.memory.weights import Weights, check_fit

_NONE = -1


class Receiver:
    """Takes versions from `weights` into `module`. version: in the module; staged: in the staging buffer (-1: none).

    ValueError: the module lacks a tensor of the layout, or has it in another shape or dtype.
    """

    def __init__(self, weights: Weights, module: Module) -> None:
        check_fit(weights.layout, module.state_dict(), convertible=False)
        self._weights, self._module = weights, module
        self.version = self.staged = _NONE
        self._staging: State = {}
        device = next(module.parameters()).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stage(self, version: int) -> int:
        """Copy `version` beside the module, on its device; the version staged. The module may be used meanwhile."""
        if not self._staging:
            own = self._module.state_dict()
            self._staging = {name: torch.empty_like(own[name]) for name in self._weights.layout.published}
        self.staged = _NONE
        if self._stream is None:
            self.staged = self._weights.fetch(version, self._staging)
            return self.staged
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # the last `apply` may still read it
        with torch.cuda.stream(self._stream):
            staged = self._weights.fetch(version, self._staging)
        self._stream.synchronize()
        self.staged = staged
        return staged

    def apply(self, version: int) -> int:
        """Overwrite the module's tensors in place with `version`; the version applied, newer if that is gone.

        From the staging buffer if `version` is there, else directly. Nothing is copied if the module has it.
        """
        if version == self.version:
            return version
        own, staged = self._module.state_dict(), self.staged
        if version == staged:
            copy_into(own, self._staging)
            self.version = staged
        else:
            self.version = self._weights.fetch(version, own, self.version)
        return self.version
