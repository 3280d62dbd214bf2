"""The receiving end of the weights channel: from a published version into the module that serves.

Invariant: `apply` keeps every tensor of the module at its address, so graphs captured over them stay valid.
"""

from __future__ import annotations

import time

from polyrhythm.runtime.memory.staging import StagingBuffer
from polyrhythm.runtime.memory.tensors import Copy, Module, State, check_fit, copy_into
from polyrhythm.runtime.memory.traffic import APPLY, Traffic
from polyrhythm.runtime.memory.weights import NOTHING, Publication, Weights


class Receiver:
    """Takes versions from `weights` into `module`. version: in the module; staged: in the staging buffer (-1: none).

    traffic: what it has taken, by way, and applied; seconds are the host's, which does not wait for copies that a
    device makes in its own order. ahead: keep a staging buffer where versions lie on another device, and bring them
    there through it; else there is none unless `stage` is called.
    ValueError: the module lacks a tensor of the layout, or has it in another shape or dtype.
    """

    def __init__(self, weights: Weights, module: Module, *, ahead: bool = True) -> None:
        check_fit(weights.layout, module.state_dict(), convertible=False)
        self._weights, self._module = weights, module
        self._applied = self._staged = NOTHING
        self.traffic = Traffic()
        self._device = next(module.parameters()).device
        self._staging: StagingBuffer | None = None
        self._ahead = ahead

    @property
    def stages(self) -> bool:
        """Whether a version is brought to the module's device before it is applied, so that it is worth doing early."""
        return self._ahead and not self._weights.lies_on(self._device)

    @property
    def version(self) -> int:
        return self._applied.version

    @property
    def staged(self) -> int:
        return self._staged.version

    def stage(self, version: int) -> int:
        """Copy `version` beside the module, on its device; the version staged. The module may be used meanwhile."""
        self._stage(version)
        return self.staged

    def _stage(self, version: int, present: Publication = NOTHING) -> StagingBuffer:
        """The staging buffer with `version`, or the newest if that is gone; unchanged, and nothing staged, if this is
        `present`."""
        if self._staging is None:
            self._staging = StagingBuffer(self._weights.layout, self._device)
        staging, self._staged = self._staging, NOTHING
        found = self._fetch(version, staging.tensors, present, staging.fill)
        self._staged = NOTHING if found == present else found
        return staging

    def _fetch(self, version: int, into: State, present: Publication, copy: Copy) -> Publication:
        begin = time.perf_counter()
        found, way = self._weights.fetch(version, into, present, copy)
        if way is not None:
            self.traffic.add(way, self._weights.layout.nbytes, time.perf_counter() - begin)
        return found

    def drop_staged(self) -> None:
        """Free the staging buffer; a version that was staged is fetched again when it is applied."""
        self._staging, self._staged = None, NOTHING

    def apply(self, version: int) -> int:
        """Overwrite the module's tensors in place with `version`; the version applied, newer if that is gone.

        From the staging buffer if `version` is there or on another device, else directly. Nothing is copied if the
        module has it.
        """
        own, present = self._module.state_dict(), self._weights.find(version)
        if version == self.version and present in (None, self._applied):
            return version
        begin, before = time.perf_counter(), self._applied
        self._bring(version, own, present)
        if self._applied != before:
            self.traffic.add(APPLY, self._weights.layout.nbytes, time.perf_counter() - begin)
        return self.version

    def _bring(self, version: int, own: State, present: Publication | None) -> None:
        if version != self.staged or present not in (None, self._staged):
            if not self.stages:
                self._staging, self._staged = None, NOTHING
                self._applied = self._fetch(version, own, self._applied, copy_into)
                return
            self._stage(version, self._applied)
        if self._staging is not None and self._staged != NOTHING:
            self._staging.copy_to(own)
            self._applied = self._staged
