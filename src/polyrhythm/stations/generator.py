"""The generator station: holds copies of the policy for inference, and an engine that answers requests with them.

`OnePassEngine` answers a batch in one forward pass, `StreamingEngine` each request token by token.

Invariant: weights change only between two steps of the engine and all at once; commands are executed in order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from polyrhythm.policies.base import Policy, as_module
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.observed import ObservedReader
from polyrhythm.runtime.memory.prefixes import Prefixes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.tensors import Module, tensors_of
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.runtime.messages import Channels, OffloadStore, Order, StationTraits
from polyrhythm.runtime.spans import APPLY, Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import AbortStream, ApplyWeights, GeneratorCommand, GeneratorJoined, Serve
from polyrhythm.stations.simulator.guard import IDLE

#: Commands that an engine may execute.
EngineCommand = Serve | records.StartStream | AbortStream
Todo = deque[GeneratorCommand]


class PolicyCopies:
    """policy: the copy that serves training; pinned: the copy for background evaluations. pinned equals `policy` if the
    station does nothing else, and is None if it does not evaluate. version: of `policy`, -1 before the first.

    Only `apply` overwrites a copy, whole and in place; a version staged on the device is not visible before.
    """

    def __init__(self, policy: Policy, pinned: Policy | None, weights: Weights) -> None:
        self.policy, self.module, self._weights = policy, as_module(policy).eval(), weights
        self._policies, self._receivers = {False: policy}, {False: Receiver(weights, self.module)}
        if pinned is not None:
            self._policies[True] = pinned
            self._receivers[True] = Receiver(weights, as_module(pinned).eval(), ahead=False)
        self._versions = dict.fromkeys(self._policies, -1)
        # An exclusive evaluator applies versions only on command.
        self._stages_ahead = pinned is not policy and not next(self.module.parameters()).is_cpu
        self._staging: threading.Thread | None = None

    @property
    def version(self) -> int:
        return self._versions[False]

    @property
    def all(self) -> list[Policy]:
        """The distinct copies."""
        pinned = self._policies.get(True, self.policy)
        return [self.policy] if pinned is self.policy else [self.policy, pinned]

    def serving(self, *, pinned: bool) -> tuple[Policy, int]:
        return self._policies[pinned], self._versions[pinned]

    def can_serve(self, *, pinned: bool) -> bool:
        return pinned in self._policies

    def can_apply(self, command: ApplyWeights) -> bool:
        """Whether the version is published, and the copy exists."""
        return 0 <= command.version <= self._weights.newest and self.can_serve(pinned=command.pinned)

    def apply(self, command: ApplyWeights) -> int:
        """Change the weights of one copy; returns its new version."""
        if not command.pinned:
            self.wait_for_staging()
        version = self._versions[command.pinned] = self._receivers[command.pinned].apply(command.version)
        return version

    def stage_ahead(self) -> None:
        """Copy the newest published version from host memory to the device, in a thread beside serving."""
        if not self._stages_ahead or (self._staging is not None and self._staging.is_alive()):
            return
        newest, receiver = self._weights.newest, self._receivers[False]
        if newest <= max(receiver.version, receiver.staged) or not receiver.stages:
            return
        self._staging = threading.Thread(target=receiver.stage, args=(newest,), name="staging", daemon=True)
        self._staging.start()

    def wait_for_staging(self) -> None:
        if self._staging is not None:
            self._staging.join()
            self._staging = None

    def drop_staged(self) -> None:
        """Free staged versions, which can be staged again."""
        self.wait_for_staging()
        for receiver in self._receivers.values():
            receiver.drop_staged()

    @property
    def modules(self) -> list[Module]:
        return [as_module(policy) for policy in self._policies.values()]

    def statistics(self) -> dict[str, float]:
        """Traffic of weights (`runtime.memory.published`), evaluations included."""
        found: dict[str, float] = {}
        for receiver in self._receivers.values():
            for name, count in receiver.traffic.statistics().items():
                found[name] = found.get(name, 0.0) + count
        return found


@dataclass(frozen=True, slots=True)
class GeneratorContext:
    """Shared by a generator and its engine. label: the policy's name in errors; observed: observations on its device;
    None: all come from the arena; prefixes: lends what frozen parts give to the trainer, None: nothing is lent."""

    name: str
    incarnation: int
    copies: PolicyCopies
    arena: Arena
    channels: Channels
    label: str
    observed: ObservedReader | None = None
    prefixes: Prefixes | None = None


class GeneratorEngine(Protocol):
    """Answers requests with the policy copies of a generator. commands: the command types that it executes; depth:
    batches that it accepts at a time; doing: the current call and its start (`Station.current_call`)."""

    commands: ClassVar[tuple[type, ...]]
    depth: int
    doing: tuple[str, float]

    def accepts(self, command: EngineCommand, todo: Todo) -> bool:
        """Whether the command fits the arena and the copies. todo: earlier commands."""

    def advance(self, todo: Todo) -> bool:
        """Do one unit of work, and remove the commands that it begins from `todo`. False if there is no work before the
        next change of weights."""

    def change_weights(self, command: ApplyWeights) -> int:
        """Apply weights to a copy, between two units of work; returns its new version."""

    def patience(self, todo: Todo) -> float:
        """Seconds to wait for a message before the next unit of work."""

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """Spans of the last unit of work; also called after a change of weights, for delayed spans."""

    def pending_work(self) -> list[str]: ...

    def statistics(self) -> dict[str, float]: ...

    def suspend(self) -> None:
        """Free device memory that `resume` can recreate; requires that no work is under way."""

    def resume(self) -> None:
        """Recreate what `suspend` freed."""

    def close(self) -> None: ...


class Generator:
    """Inference server of one policy copy, and of a second one if it is the evaluator."""

    def __init__(self, context: GeneratorContext, engine: GeneratorEngine) -> None:
        self.name, self.incarnation = context.name, context.incarnation
        self._copies, self._channels, self.engine = context.copies, context.channels, engine
        self._todo: Todo = deque()
        self._changing = IDLE
        self._changed: ApplyWeights | None = None  # in the last unit of work

    @property
    def version(self) -> int:
        """Version of its weights, -1 until the first are applied."""
        return self._copies.version

    def joined(self) -> GeneratorJoined:
        return GeneratorJoined(self.name, self.incarnation, self.version, depth=self.engine.depth)

    def handle(self, command: Order) -> None:
        known = isinstance(command, (ApplyWeights, *self.engine.commands))
        if not isinstance(command, GeneratorCommand) or not known or command.generator != self.name:
            raise UnfitMessage("misdirected", f"{self.name} received {type(command).__name__}, which is not for it")
        if isinstance(command, ApplyWeights):
            fits = self._copies.can_apply(command)
        else:
            fits = self.engine.accepts(command, self._todo)
        if not fits:
            raise UnfitMessage("impossible", f"{self.name} cannot execute {command}")
        self._todo.append(command)

    def work(self) -> bool:
        """Do one unit of work of the engine, or change weights once, before the next command.

        Consumes: requests to answer or to abort, and weights, in command order. Waits for: the device. Unblocked by:
        `handle`, the device. Produces: replies to slots, then `BatchDone` or `StreamDone`; or `WeightsApplied`.
        """
        self._changed = None
        if not self.engine.advance(self._todo):
            if not self._todo:
                return False
            command = self._todo.popleft()
            assert isinstance(command, ApplyWeights), "the engine executes all others"
            self._changing = ("weights", time.monotonic())
            version = self.engine.change_weights(command)
            self._channels.emit(records.WeightsApplied(self.name, self.incarnation, version, command.pinned))
            self._changed, self._changing = command, IDLE
        self._copies.stage_ahead()
        return True

    @property
    def traits(self) -> StationTraits:
        return StationTraits(patience=self.patience)

    def patience(self) -> float:
        return self.engine.patience(self._todo)

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        yield from self.engine.spans(begin, end)
        if self._changed is not None:
            yield Span(self.name, APPLY, begin, end, self._changed.version)

    def suspend(self, store: OffloadStore) -> int:
        """As `Offloadable`: both copies of the weights go to the store; everything else is recreated."""
        self._copies.drop_staged()
        self.engine.suspend()
        return store.suspend(tensor for module in self._copies.modules for tensor in tensors_of(module))

    def resume(self, store: OffloadStore) -> None:
        store.resume()
        self.engine.resume()

    def current_call(self) -> tuple[str, float]:
        return self._changing if self._changing[0] else self.engine.doing

    def pending_work(self) -> list[str]:
        waiting = [f"{self.name} has {type(command).__name__} to do" for command in list(self._todo)]
        return self.engine.pending_work() + waiting

    def statistics(self) -> dict[str, float]:
        """Statistics of the engine; weights/...: traffic of weights, evaluations included."""
        return {**self.engine.statistics(), **self._copies.statistics()}

    def close(self) -> None:
        self._copies.wait_for_staging()
        self.engine.close()
