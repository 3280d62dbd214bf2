"""The copies of the policy in a generator, and their weight versions.

Invariant: only `apply` overwrites a copy, whole and in place; a version staged on the device is not visible before.
"""

from __future__ import annotations

import threading

from polyrhythm.policies.base import Policy, as_module
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.tensors import Module
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.scheduler.records import ApplyWeights


class PolicyCopies:
    """policy: the copy that serves training; pinned: the copy for background evaluations. pinned equals `policy` if the
    station does nothing else, and is None if it does not evaluate. version: of `policy`, -1 before the first."""

    def __init__(self, name: str, policy: Policy, pinned: Policy | None, weights: Weights) -> None:
        self.policy, self.version = policy, -1
        self.module = as_module(policy).eval()
        self._name, self._pinned, self._weights = name, pinned, weights
        self._receiver = Receiver(weights, self.module)
        self._pinned_version = -1
        self._pinned_receiver = Receiver(weights, as_module(pinned).eval(), ahead=False) if pinned is not None else None
        # An exclusive evaluator applies versions only on command.
        self._stages_ahead = pinned is not policy and not next(self.module.parameters()).is_cpu
        self._staging: threading.Thread | None = None

    @property
    def all(self) -> list[Policy]:
        """The distinct copies."""
        return [self.policy] if self._pinned in (None, self.policy) else [self.policy, self.evaluated]

    @property
    def evaluated(self) -> Policy:
        assert self._pinned is not None, f"{self._name} is not the evaluator"
        return self._pinned

    def serving(self, *, pinned: bool) -> tuple[Policy, int]:
        return (self.evaluated, self._pinned_version) if pinned else (self.policy, self.version)

    def can_serve(self, *, pinned: bool) -> bool:
        return self._pinned is not None or not pinned

    def can_apply(self, command: ApplyWeights) -> bool:
        """Whether the version is published, and the copy exists."""
        return 0 <= command.version <= self._weights.newest and self.can_serve(pinned=command.pinned)

    def apply(self, command: ApplyWeights) -> int:
        """Change the weights of one copy; returns its new version."""
        if command.pinned:
            assert self._pinned_receiver is not None, f"{self._name} does not evaluate"
            self._pinned_version = self._pinned_receiver.apply(command.version)
            return self._pinned_version
        self.wait_for_staging()
        self.version = self._receiver.apply(command.version)
        return self.version

    def stage_ahead(self) -> None:
        """Copy the newest published version from host memory to the device, in a thread beside serving."""
        if not self._stages_ahead or (self._staging is not None and self._staging.is_alive()):
            return
        newest, receiver = self._weights.newest, self._receiver
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
        for receiver in self._receivers:
            receiver.drop_staged()

    @property
    def modules(self) -> list[Module]:
        return [self.module] if self._pinned is None else [self.module, as_module(self._pinned)]

    @property
    def _receivers(self) -> list[Receiver]:
        return [receiver for receiver in (self._receiver, self._pinned_receiver) if receiver is not None]

    def statistics(self) -> dict[str, float]:
        """Traffic of weights (`runtime.memory.published`), evaluations included."""
        found: dict[str, float] = {}
        for receiver in self._receivers:
            for name, count in receiver.traffic.statistics().items():
                found[name] = found.get(name, 0.0) + count
        return found
