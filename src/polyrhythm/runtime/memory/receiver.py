"""The receiving end of the weights channel: from a published version into the module that serves.

Invariant: `apply` keeps every tensor of the module at its address, so graphs captured over them stay valid.
"""

from __future__ import annotations

import torch

from polyrhythm.runtime.memory.tensors import Module, State, copy_into
from polyrhythm.runtime.memory.weights import NOTHING, Weights, check_fit


class Receiver:
    """Takes versions from `weights` into `module`. version: in the module; staged: in the staging buffer (-1: none).

    ValueError: the module lacks a tensor of the layout, or has it in another shape or dtype.
    """

    def __init__(self, weights: Weights, module: Module) -> None:
        check_fit(weights.layout, module.state_dict(), convertible=False)
        self._weights, self._module = weights, module
        self._applied = self._staged = NOTHING
        self._staging: State = {}
        device = next(module.parameters()).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def version(self) -> int:
        return self._applied.version

    @property
    def staged(self) -> int:
        return self._staged.version

    def stage(self, version: int) -> int:
        """Copy `version` beside the module, on its device; the version staged. The module may be used meanwhile."""
        if not self._staging:
            own = self._module.state_dict()
            self._staging = {name: torch.empty_like(own[name]) for name in self._weights.layout.published}
        self._staged = NOTHING
        if self._stream is None:
            self._staged = self._weights.fetch(version, self._staging)
            return self.staged
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # the last `apply` may still read it
        with torch.cuda.stream(self._stream):
            staged = self._weights.fetch(version, self._staging)
        self._stream.synchronize()
        self._staged = staged
        return self.staged

    def apply(self, version: int) -> int:
        """Overwrite the module's tensors in place with `version`; the version applied, newer if that is gone.

        From the staging buffer if `version` is there, else directly. Nothing is copied if the module has it.
        """
        own, present = self._module.state_dict(), self._weights.find(version)
        if version == self.version and present in (None, self._applied):
            return version
        if version == self.staged and present in (None, self._staged):
            copy_into(own, self._staging)
            self._applied = self._staged
        else:
            self._applied = self._weights.fetch(version, own, self._applied)
        return self.version
