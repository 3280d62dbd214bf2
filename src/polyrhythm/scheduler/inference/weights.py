"""When a generator takes newer weights.

`drain`: no training tickets are granted while a version waits, and the version is applied once no training episode
runs. `continue`, `abort`: it is applied between two forward passes, or between two decode steps of streams, generator
by generator. While an evaluation holds the weights (pinned), the live generators keep theirs.

Cost: all generators are looked at only after a change of weights or when `quiet` or `pinned` change while a version
waits. Otherwise only the generator whose pass has just ended is looked at, so a request costs O(1).

Invariant: after every event `due_weights` over all generators is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polyrhythm.scheduler.inference.generators import GeneratorRegistry, GeneratorState
from polyrhythm.scheduler.records import ApplyWeights
from polyrhythm.scheduler.versions import VersionLedger


def due_weights(
    candidates: Iterable[GeneratorState], versions: VersionLedger, *, anyone_live: bool, quiet: bool, pinned: bool
) -> list[GeneratorState]:
    """The free ones of `candidates` that take weights now: the published ones, or the applied ones where `pinned`.

    quiet: no training episode runs. pinned: an evaluation holds the weights, so that only generators that are not live
    yet take some: the applied ones. A generator that is not live cannot serve, so it also takes the published weights
    when these are the applied ones, or when no generator is live.
    """
    free = [generator for generator in candidates if not generator.busy]
    if pinned:
        return [generator for generator in free if not generator.live]
    behind = [generator for generator in free if generator.version < versions.published]
    if quiet or versions.settings.on_update != "drain" or not anyone_live:
        return behind
    return [generator for generator in behind if not generator.live and versions.published == versions.applied]


@dataclass(slots=True)
class WeightScheduler:
    """Gives generators their `ApplyWeights`. seen: (quiet, pinned) when all generators were last looked at."""

    seen: tuple[bool, bool] = (False, False)

    def settle(
        self, generators: GeneratorRegistry, versions: VersionLedger, *, changed: bool, quiet: bool, pinned: bool
    ) -> list[ApplyWeights]:
        """Commands after an event that may allow weights to be taken. changed: it changed who holds or is offered
        which weights."""
        if not (changed or (versions.waiting and (quiet, pinned) != self.seen)):
            return []
        self.seen = quiet, pinned
        generators.update_live(versions.applied, versions.published)
        return self._apply(generators.present.values(), generators, versions, quiet=quiet, pinned=pinned)

    def settle_one(
        self,
        generator: GeneratorState,
        generators: GeneratorRegistry,
        versions: VersionLedger,
        *,
        quiet: bool,
        pinned: bool,
    ) -> list[ApplyWeights]:
        """The same for one generator whose pass has just ended."""
        if generator.name in generators.apart or (generator.live and not versions.waiting):
            return []
        return self._apply((generator,), generators, versions, quiet=quiet, pinned=pinned)

    def _apply(
        self,
        candidates: Iterable[GeneratorState],
        generators: GeneratorRegistry,
        versions: VersionLedger,
        *,
        quiet: bool,
        pinned: bool,
    ) -> list[ApplyWeights]:
        due = due_weights(candidates, versions, anyone_live=bool(generators.live), quiet=quiet, pinned=pinned)
        version = versions.applied if pinned else versions.published
        for generator in due:
            generator.applying = version
            generators.note(generator)
        return [ApplyWeights(generator.name, version) for generator in due]
