"""The receiving end of the weights channel: from a published version into the module that serves.

The bytes of a version cross in chunks to a staging buffer beside the module: while one is on its way to the device from
one of two pinned buffers, the other is filled from where the version lies. On the CPU nothing is pinned, and chunks are
copied one after another.

Invariant: `apply` keeps every tensor of the module at its address, so graphs captured over them stay valid.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from polyrhythm.runtime.memory.published import APPLY, Traffic
from polyrhythm.runtime.memory.tensors import Copy, Module, State, as_bytes, check_fit, copy_into, views_of
from polyrhythm.runtime.memory.weights import NOTHING, Publication, Weights
from polyrhythm.specs.weights import WeightsLayout


class CopyStream:
    """A stream for copies that go on beside the computation of `device`, which is on the thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._api: Any = torch.cuda if device.type == "cuda" else torch.cpu
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()

    def active(self) -> AbstractContextManager[Any]:
        """What is queued within goes to this stream."""
        context: AbstractContextManager[Any] = self._api.stream(self.stream)
        return context

    def event(self, *, blocking: bool = False) -> Any:
        """An event that has not been recorded: waiting for it returns at once. blocking: a thread that waits for it
        sleeps instead of holding its core."""
        return torch.cuda.Event(blocking=blocking) if self.device.type == "cuda" else torch.cpu.Event()

    def record(self, event: Any) -> None:
        """The event happens when this stream has come here."""
        event.record(self.stream)

    def wait(self, event: Any) -> None:
        """This stream goes on after the event."""
        self.stream.wait_event(event)

    def wait_for_computation(self) -> None:
        """This stream goes on after what the computation has queued so far."""
        self.stream.wait_stream(self._computation())

    def record_computation(self, event: Any) -> None:
        """The event happens when the computation has come here."""
        event.record(self._computation())

    def computation_waits(self, event: Any) -> None:
        """The computation goes on after the event."""
        self._computation().wait_event(event)

    def _computation(self) -> Any:
        return self._api.current_stream(self.device)


CHUNK_BYTES = 32 * 2**20


class StagingBuffer:
    """Memory for one version on `device`, filled over a stream of its own.

    Invariant: what was filled is whole before it is used, and used before it is filled anew; the device keeps this
    order, so no thread waits for it.
    """

    def __init__(self, layout: WeightsLayout, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._layout, self._copies = layout, CopyStream(device)
        self._memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self._copies.wait_for_computation()  # it may still use what this memory was before
        self.tensors = views_of(layout, self._memory)
        self._offsets = [placed.offset for placed in layout.tensors]
        self._chunk_bytes = min(chunk_bytes, max(layout.nbytes, 1))
        self._chunks: list[tuple[Tensor, Any]] = []
        self._filled, self._used = self._copies.event(), self._copies.event()
        if device.type == "cuda":
            self._memory.record_stream(self._copies.stream)

    def fill(self, _into: State, state: State) -> None:
        """Copy a version in, in the dtypes of the layout: the `copy` of `Weights.fetch`. When this returns, the host's
        part is done: `state` is not read any more."""
        with torch.no_grad(), self._copies.active():
            self._copies.wait(self._used)
            if next(iter(state.values())).device.type == self._copies.device.type == "cuda":
                self._copies.wait_for_computation()  # which has made the version
                for name, tensor in self.tensors.items():
                    tensor.copy_(state[name], non_blocking=True)
                self._copies.stream.synchronize()
            else:
                self._fill_from_host(state)
            self._copies.record(self._filled)

    def _fill_from_host(self, state: State) -> None:
        size = self._layout.nbytes
        for number, first in enumerate(range(0, size, self._chunk_bytes)):
            if number >= len(self._chunks) < 2:
                pinned = self._copies.device.type == "cuda"
                memory = torch.zeros(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned)
                self._chunks.append((memory, self._copies.event(blocking=True)))
            chunk, sent = self._chunks[number % 2]  # one of the two, in turn, and the event that it has been sent
            sent.synchronize()
            part = chunk[: min(self._chunk_bytes, size - first)]
            self._read(part, first, state)
            self._memory[first : first + len(part)].copy_(part, non_blocking=True)
            self._copies.record(sent)

    def _read(self, chunk: Tensor, first: int, state: State) -> None:
        tensors, end = self._layout.tensors, first + len(chunk)
        for placed in islice(tensors, bisect_right(self._offsets, first) - 1, bisect_left(self._offsets, end)):
            begin, stop = max(placed.offset, first), min(placed.offset + placed.spec.nbytes, end)
            if begin < stop:
                source = as_bytes(state[placed.name])
                chunk[begin - first : stop - first].copy_(source[begin - placed.offset : stop - placed.offset])

    def copy_to(self, own: State) -> None:
        """Overwrite the module's tensors, in the order of its computation."""
        self._copies.computation_waits(self._filled)
        with torch.no_grad():
            torch._foreach_copy_([own[name] for name in self.tensors], list(self.tensors.values()))
        self._copies.record_computation(self._used)


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
        found, way, sources = self._weights.fetch(version, into, present, copy)
        if way is not None:
            self.traffic.add(way, self._weights.layout.nbytes, time.perf_counter() - begin, sources)
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
