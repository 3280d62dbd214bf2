"""Which weights exist, who holds which, and when a generator may take newer ones.

A version is published after every K updates. `drain`: no training tickets while a version waits; it is applied once
no training episode runs. `continue`: applied between two forward passes, generator by generator. At most one version
waits; a newer one replaces it.

Invariants: versions never go back; the applied version is at most what any live generator holds; a generator is live
once it holds the applied version or a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class VersionLedger:
    """trained: version of the trainer's weights; updates: in all; in_version: updates since `trained`;
    published: newest that generators can fetch; applied: lowest that every live generator holds (-1: none yet);
    reached: updates contained in each version from `published` on, but for those that were undone."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    trained: int = 0
    updates: int = 0
    in_version: int = 0
    published: int = -1
    applied: int = -1
    reached: dict[int, int] = field(default_factory=lambda: {0: 0})

    @property
    def waiting(self) -> bool:
        """A published version is not applied yet."""
        return self.published > self.applied

    @property
    def draining(self) -> bool:
        """Training tickets wait for a version to be applied."""
        return self.settings.on_update == "drain" and self.waiting

    def count_update(self) -> bool:
        """One update is trained; True if it completes a version."""
        self.updates += 1
        self.in_version += 1
        if self.in_version < self.settings.sync_interval:
            return False
        self.in_version = 0
        self.trained += 1
        self.reached[self.trained] = self.updates
        return True

    def note_published(self, version: int) -> None:
        """Generators can fetch this version."""
        self.published = max(self.published, version)
        self.reached = {known: updates for known, updates in self.reached.items() if known >= self.published}

    def is_live(self, generator: GeneratorState) -> bool:
        return generator.version >= 0 and generator.version >= self.applied

    def note_applied(self, generators: Iterable[GeneratorState]) -> None:
        """Raise the applied version to what all live generators hold."""
        held = [generator.version for generator in generators if generator.version >= self.applied]
        if held:
            self.applied = max(self.applied, min(held))

    def due(self, generators: Iterable[GeneratorState], *, quiet: bool, pinned: bool) -> list[GeneratorState]:
        """The free generators that take weights now: the published ones, or the applied ones where `pinned`.

        quiet: no training episode runs. pinned: an evaluation holds the weights, and only generators that are not
        live yet take some: the applied ones. A generator that is not live helps nobody as it is, so it also takes
        the published weights when that changes nothing for the others, or when there are no others.
        """
        present = list(generators)
        if pinned:
            return [g for g in present if not g.busy and not self.is_live(g)]
        behind = [g for g in present if not g.busy and g.version < self.published]
        allowed = quiet or self.settings.on_update == "continue"
        if allowed or not any(self.is_live(g) for g in present):
            return behind
        return [g for g in behind if not self.is_live(g) and self.published == self.applied]

    def restart(self, updates: int) -> tuple[int, bool]:
        """A trainer came back with the weights of `updates` updates: (updates undone, whether to publish `trained`).

        Back to the newest published version the count simply goes back, as nobody has seen what came after. Weights
        older than that are published under a new number: versions that were seen never go back. So are weights beside
        a published version that is not in `reached`: a resumed run offers what an earlier trainer had written, though
        its updates were undone since, and no trainer has them.
        """
        undone = self.updates - updates
        self.updates = updates
        if self.published < 0 or (self.published in self.reached and updates >= self.reached[self.published]):
            self.reached = {known: at for known, at in self.reached.items() if at <= updates}
            self.trained = max(self.reached)
            self.in_version = updates - self.reached[self.trained]
        else:
            self.trained = max(self.trained, self.published) + 1
            self.in_version = 0
            self.reached[self.trained] = updates
        return undone, self.published < self.trained
