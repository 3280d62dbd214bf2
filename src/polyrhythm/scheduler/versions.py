"""Version numbers of the weights: trained, published, applied.

Updates raise `trained`; a publication raises `published`; the generators raise `applied` (`inference/generators`). A
version is published after every K updates. At most one version waits to be applied; a newer one replaces it.

Invariants: versions never decrease; trained >= published; every live generator holds `applied` or a newer version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class VersionLedger:
    """trained: version of the trainer's weights; updates: total; in_version: updates since `trained`.

    published: newest that generators can fetch; applied: lowest that every live generator holds (-1: none yet);
    reached: updates contained in each version from `published` on, except undone updates; origins: (version, updates in
    it, updates per later version), one for version 0 and one after each change, by undone updates or another K.
    """

    settings: SchedulerSettings = field(metadata=UNSAVED)
    trained: int = 0
    updates: int = 0
    in_version: int = 0
    published: int = -1
    applied: int = -1
    reached: dict[int, int] = field(default_factory=lambda: {0: 0})
    origins: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.origins:
            self.origins = [(0, 0, self.settings.sync_interval)]

    @property
    def waiting(self) -> bool:
        """Whether a published version is not applied yet."""
        return self.published > self.applied

    @property
    def draining(self) -> bool:
        """Whether training tickets wait for a version to be applied."""
        return self.settings.on_update == "drain" and self.waiting

    def count_update(self) -> bool:
        """Count one trained update; True if it completes a version."""
        self.updates += 1
        self.in_version += 1
        if self.in_version < self.settings.sync_interval:
            return False
        self.in_version = 0
        self.trained += 1
        self._reach()
        return True

    def updates_in(self, version: int) -> int:
        """Updates contained in the weights of any version so far."""
        first, updates, interval = next(origin for origin in reversed(self.origins) if origin[0] <= version)
        return updates + (version - first) * interval

    def _reach(self) -> None:
        self.reached[self.trained] = self.updates
        if self.updates_in(self.trained) != self.updates:
            self.origins.append((self.trained, self.updates, self.settings.sync_interval))

    def on_published(self, version: int) -> None:
        self.published = max(self.published, version)
        self.reached = {known: updates for known, updates in self.reached.items() if known >= self.published}

    def on_held(self, held: Iterable[int]) -> None:
        """Raise the applied version to the lowest that the live generators hold. held: versions of all generators."""
        live = [version for version in held if version >= self.applied]
        if live:
            self.applied = max(self.applied, min(live))

    def restart(self, updates: int) -> tuple[int, bool]:
        """A trainer came back with the weights of `updates` updates: (updates undone, whether to publish `trained`).

        If these weights contain the newest published version, the count goes back to them: no generator has seen later
        ones. Otherwise they are published under a new number, because versions never decrease. The same applies if the
        published version is not in `reached`: a resumed run offers weights of an earlier trainer whose updates were
        undone since, so no trainer has them.
        """
        undone = self.updates - updates
        self.updates = updates
        if self.published < 0 or (self.published in self.reached and updates >= self.reached[self.published]):
            self.reached = {known: at for known, at in self.reached.items() if at <= updates}
            self.trained = max(self.reached)
            self.in_version = updates - self.reached[self.trained]
            self.origins = [origin for origin in self.origins if origin[0] <= self.trained]
        else:
            self.trained = max(self.trained, self.published) + 1
            self.in_version = 0
            self._reach()
        return undone, self.published < self.trained
