"""Execution of a generator's forward passes: on the CPU at launch, on a device asynchronously.

On a device the host gathers the next batch between launch and finish:

    host      gather n | launch n | gather n+1 | launch n+1 | finish n | replies of n
    copies             | inputs of n           | inputs of n+1
    compute                        | pass n, its answers to the host    | pass n+1 …

Passes may be captured as CUDA graphs: one call starts all kernels of a pass, including the loop of a flow's steps. A
graph reads and writes the addresses of the captured tensors. So the inputs are static, weights are overwritten in place
(`runtime.memory.receiver`), and constants that a policy keeps on the device are never freed. Randomness comes from the
noise keys, which are inputs, so a replay draws new numbers.

Invariants: passes finish in launch order; the memory of a batch is refilled only after its pass has finished; all
computation, weights included, runs in the order in which the host queued it.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.errors import first_line
from polyrhythm.policies.base import Act, Policy, extended
from polyrhythm.runtime.memory.prefixes import PrefixPool
from polyrhythm.runtime.memory.receiver import CopyStream
from polyrhythm.stations.batch_buffer import BatchBuffer, BatchLayout, BatchMemory, Inputs, PackedAnswers

log = logging.getLogger(__name__)

Graphs = Literal["auto", "off"]
#: Makes a pass, which uses static tensors only, replayable: a function that repeats it. RuntimeError: it cannot be
#: captured.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class UnfitAct(Exception):
    """The output of a policy's `act` differs in form from that before the start; the message says how."""


class Lending(NamedTuple):
    """Rows of a pass whose precomputed arrays are lent to the trainer, and their entries of the arena, both [n], whose
    slots are claimed."""

    pool: PrefixPool
    rows: NDArray[np.int64]
    entries: NDArray[np.int64]

    def places(self, device: torch.device) -> Tensor:
        """What `PrefixPool.write` needs to know on the device; the host does not wait."""
        both = torch.from_numpy(np.stack((self.entries, self.rows)))
        return both.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else both


class Passes(Protocol):
    """Runs the forward passes of a station. depth: maximum number of launched, unfinished passes."""

    depth: int

    def warm_up(self, policies: Sequence[Policy], buckets: Sequence[int]) -> None:
        """Run one pass of every policy and bucket on zeros, so that no later pass meets a new shape."""

    def buffer(self, rows: int) -> BatchBuffer:
        """Buffer for the inputs of the next pass."""

    def launch(self, policy: Policy, rows: int, version: int, lending: Lending | None = None) -> None:
        """Launch the pass of the gathered inputs. UnfitAct: its output has another form."""

    def finish(self) -> BatchBuffer:
        """Wait for the oldest pass. Its answers are valid until the launch after the next one; on the CPU, the next."""


def passes_on(
    device: torch.device, layout: BatchLayout, rows: int, graphs: Graphs, lender: Policy | None = None
) -> Passes:
    """Passes of at most `rows` rows on the device of the policies. lender: the policy whose precomputed arrays may be
    lent."""
    if device.type != "cuda":
        return HostPasses(layout, rows)
    return DevicePasses(device, layout, rows, GraphCapture(device) if graphs == "auto" else None, lender)


def act_by_precomputed(policy: Policy, inputs: Inputs) -> tuple[Act, Mapping[str, Tensor]]:
    """The policy's action from what its frozen parts give, and these arrays."""
    obs, greedy, noise_key = inputs
    found = extended(policy).precompute(obs)
    return policy.act({**obs, **found}, greedy, noise_key), found


class HostPasses:
    """Passes on the CPU: the policy reads the gathered arrays themselves."""

    depth = 1

    def __init__(self, layout: BatchLayout, rows: int) -> None:
        self._memory = BatchMemory(layout, rows)
        self._launched = self._memory.buffer(0)

    def warm_up(self, policies: Sequence[Policy], buckets: Sequence[int]) -> None:
        for rows in buckets:
            for policy in policies:
                policy.act(*self._memory.buffer(rows).inputs)

    def buffer(self, rows: int) -> BatchBuffer:
        return self._memory.buffer(rows)

    def launch(self, policy: Policy, rows: int, version: int, lending: Lending | None = None) -> None:
        buffer = self._launched = self._memory.buffer(rows)
        buffer.take_on_device(buffer.inputs[0])
        if lending is None:
            act = policy.act(*buffer.inputs)
        else:
            act, found = act_by_precomputed(policy, buffer.inputs)
            lending.pool.write(lending.places(torch.device("cpu")), found)
        if wrong := buffer.form_error(act):
            raise UnfitAct(wrong)
        buffer.answer(act)
        buffer.sign(version)

    def finish(self) -> BatchBuffer:
        return self._launched


class _Slot:
    """Memory of one pass, on the host and for its inputs on the device. landed, answered: CUDA events."""

    def __init__(self, layout: BatchLayout, rows: int, copies: CopyStream) -> None:
        device = copies.device
        self.memory = BatchMemory(layout, rows, pinned=device.type == "cuda")
        self.landing = torch.empty(layout.input_bytes(rows), dtype=torch.uint8, device=device)
        self.landed, self.answered = copies.event(), copies.event(blocking=True)
        self.rows, self.version = 0, -1


class DevicePasses:
    """Passes on a device: inputs cross in one copy, beside the computation, and answers in one.

    The policy reads static tensors, shared by all passes of as many rows. capture: makes the passes of buckets
    replayable; None: no pass is captured. lender: the policy whose passes leave their precomputed arrays in static
    tensors. On the CPU the same steps run one after another.
    """

    depth = 2

    def __init__(
        self,
        device: torch.device,
        layout: BatchLayout,
        rows: int,
        capture: Capture | None,
        lender: Policy | None = None,
    ) -> None:
        self._layout, self._capture = layout, capture
        self._copies = CopyStream(device)
        self._slots = [_Slot(layout, rows, self._copies) for _ in range(self.depth)]
        self._launches = 0
        self._flying: deque[_Slot] = deque()
        self._inputs = torch.zeros(layout.input_bytes(rows), dtype=torch.uint8, device=device)
        self._answers = torch.zeros(layout.answer_bytes(rows), dtype=torch.uint8, device=device)
        self._runs: dict[tuple[Policy, int], Callable[[], None]] = {}
        self._lender, self._lent = lender, dict[str, Tensor]()
        if lender is not None:
            obs, _, _ = layout.inputs_over(self._inputs, 1)
            with torch.inference_mode():
                found = extended(lender).precompute(obs)
            self._lent = {name: x.new_zeros(rows, *x.shape[1:]) for name, x in found.items()}
        self._copies.wait_for_computation()  # it may still use the former content of this memory

    def warm_up(self, policies: Sequence[Policy], buckets: Sequence[int]) -> None:
        for rows in buckets:
            for policy in policies:
                policy.act(*self._layout.inputs_over(self._inputs, rows))
        if self._capture is not None:
            captured = self._capture_all(self._capture, policies, buckets)
            self._runs |= captured
            log.info("passes that are captured as CUDA graphs: %d (buckets: %s)", len(captured), list(buckets))
        torch.cuda.empty_cache()  # other processes on the device get what only the passes before captures used

    def _capture_all(
        self, capture: Capture, policies: Sequence[Policy], buckets: Sequence[int]
    ) -> dict[tuple[Policy, int], Callable[[], None]]:
        """The captured passes, largest first; empty, with a warning, if one cannot be captured."""
        captured = {}
        for rows in sorted(buckets, reverse=True):
            for policy in policies:
                try:
                    captured[policy, rows] = capture(self._make_run(policy, rows))
                except UnfitAct:
                    return {}  # the first pass that is served reports it
                except RuntimeError as error:
                    message = "%s: passes of %d rows cannot be captured as CUDA graphs, so they run without: %s"
                    why = first_line(error)
                    log.warning(message, type(policy).__name__, rows, why)
                    return {}
        return captured

    def _make_run(self, policy: Policy, rows: int) -> Callable[[], None]:
        """The pass of `rows` rows, from static inputs to packed answers."""
        inputs = self._layout.inputs_over(self._inputs, rows)
        answers = PackedAnswers(self._layout, self._answers, rows)
        expected = self._slots[0].memory.buffer(rows)

        def run() -> None:
            if policy is self._lender:
                act, found = act_by_precomputed(policy, inputs)
                for name, x in found.items():
                    self._lent[name][:rows].copy_(x)
            else:
                act = policy.act(*inputs)
            if wrong := expected.form_error(act):
                raise UnfitAct(wrong)
            answers.write(act)

        return run

    def buffer(self, rows: int) -> BatchBuffer:
        return self._next.memory.buffer(rows)

    @property
    def _next(self) -> _Slot:
        assert len(self._flying) < self.depth, "the memory of a pass that has not finished would be overwritten"
        return self._slots[self._launches % self.depth]

    def launch(self, policy: Policy, rows: int, version: int, lending: Lending | None = None) -> None:
        slot, copies = self._next, self._copies
        slot.rows, slot.version = rows, version
        buffer, answers = slot.memory.buffer(rows), self._layout.answer_bytes(rows)
        # What is on the device already does not cross.
        cross = slice(0 if buffer.gathered else self._layout.obs_bytes(rows), self._layout.input_bytes(rows))
        with copies.active():
            _copy(slot.landing, slot.memory.inputs, cross)
            copies.record(slot.landed)
        copies.computation_waits(slot.landed)
        _copy(self._inputs, slot.landing, cross)
        buffer.take_on_device(self._layout.inputs_over(self._inputs, rows)[0])
        run = self._runs.get((policy, rows))
        if run is None:
            run = self._runs[policy, rows] = self._make_run(policy, rows)
        places = lending.places(self._inputs.device) if lending is not None else None
        run()
        if lending is not None and places is not None:
            lending.pool.write(places, self._lent)
        _copy(slot.memory.answers, self._answers, slice(answers))
        copies.record_computation(slot.answered)
        self._launches += 1
        self._flying.append(slot)

    def finish(self) -> BatchBuffer:
        slot = self._flying.popleft()
        slot.answered.synchronize()
        buffer = slot.memory.buffer(slot.rows)
        buffer.sign(slot.version)
        return buffer


def _copy(into: Tensor, source: Tensor, part: slice) -> None:
    """Copy these bytes; the host does not wait if its side is pinned."""
    into[part].copy_(source[part], non_blocking=True)


#: Passes before a capture, in which libraries choose their kernels and allocate their workspaces.
_WARM_UP = 2


class GraphCapture:
    """Captures CUDA graphs, which share one memory pool: one runs at a time. The largest first keeps the pool small."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """As in `Capture`. A pass that makes the host wait is refused before the capture. A failure in the middle of a
        capture would leave an allocator that returns less memory."""
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(here):  # a capture that fails leaves the thread on the capture's stream
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UP):
                    run()
                with refuse_waiting():
                    run()
            here.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile: they are not part of the graph.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps 33 MB on the device for each stream that it has used."""
    return torch.cuda.Stream(device)


@contextmanager
def refuse_waiting() -> Iterator[None]:
    """RuntimeError for operations in the context that make the host wait for the device, such as `.item()`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that not every such operation is detected
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
