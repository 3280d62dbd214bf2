"""Saved states of a trainer.

    <folder>/trainer-<updates>.pt      policy, optimizer, updates: the state of one rank, or of ranks that are alike
    <folder>/trainer-<updates>/        the same in parts, if no rank has it whole

Each is complete or absent. Any number of ranks can resume from either.

Invariant: the newest `keep` states and that of every `keep_every`-th version exist; the highest number is the newest.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from polyrhythm.errors import RunFolderError, RunHalted
from polyrhythm.files import NO_DESCRIPTORS, REMOVED, UNFINISHED, copy_whole, remove_whole, trouble
from polyrhythm.training.checkpoint import Saving, load
from polyrhythm.training.learner import Learner

_NAME = re.compile(r"trainer-([0-9]+)(\.pt)?")


@dataclass(frozen=True, slots=True)
class TrainerStates:
    """The saved states of a trainer in `folder`.

    One is saved before every `every_versions`-th publication, and before that of version `last`, after which a run may
    end or is extended. keep_every: the state of every `keep_every`-th version is saved too and never removed; 0 for
    none. sync_interval: updates of a version.
    """

    pattern: ClassVar[str] = "trainer-*"
    folder: str
    every_versions: int = 1
    keep: int = 2
    last: int = 0
    keep_every: int = 0
    sync_interval: int = 1

    def due(self, version: int) -> bool:
        """Whether the state is saved before this version is published."""
        stays = bool(self.keep_every) and version % self.keep_every == 0
        return version % self.every_versions == 0 or version == self.last or stays

    def save(self, learner: Learner, *, background: bool = False) -> Saving:
        """Save the learner's state, on all its ranks together; rank 0 then removes the oldest ones.

        background: as in `Learner.save`; the previous save must have ended, as its unfinished files are removed.
        RunHalted, also from the result's `wait`: writing failed.
        """
        path = Path(self.folder) / f"trainer-{learner.updates:08d}{'' if learner.ranks.divides else '.pt'}"
        try:
            path.parent.mkdir(exist_ok=True)
            if learner.ranks.rank == 0:
                self._remove_unfinished()
            saving = learner.save(path, background=background)
        except OSError as error:
            raise _unwritable(path, error) from error
        return _StateSaving(self, path, saving, first=learner.ranks.rank == 0)

    def remove_oldest(self) -> None:
        """Remove all but the newest `keep` states and those kept forever."""
        for old in self.paths()[: -self.keep]:
            if not self._stays(old):
                remove_whole(old)

    def _stays(self, path: Path) -> bool:
        return bool(self.keep_every) and self.updates(path) % (self.keep_every * self.sync_interval) == 0

    def _remove_unfinished(self) -> None:
        """Remove files of a trainer that was killed while it wrote or removed a state."""
        for end in (UNFINISHED, REMOVED):
            for left in Path(self.folder).glob(f"{self.pattern}{end}"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)

    @staticmethod
    def holds(path: Path) -> bool:
        """Whether the path has the name and kind of a saved state."""
        name = _NAME.fullmatch(path.name)
        return name is not None and (path.is_file() if name[2] else path.is_dir())

    @staticmethod
    def updates(path: Path) -> int:
        return int(path.stem.removeprefix("trainer-"))

    def reset(self, state: Path | None) -> None:
        """Restart with this state, from any folder, or with none; removes others, except older ones kept forever."""
        updates = -1 if state is None else int(load(state)["updates"])
        for path in self.paths():
            if not (self._stays(path) and self.updates(path) < updates):
                remove_whole(path)
        if state is None:
            return
        path = Path(self.folder) / f"trainer-{updates:08d}{'' if state.is_dir() else '.pt'}"
        try:
            path.parent.mkdir(exist_ok=True)
            copy_whole(state, path)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written ({error.strerror}); make room there") from error

    def paths(self) -> list[Path]:
        """All states, oldest first."""
        return sorted(filter(self.holds, Path(self.folder).glob(self.pattern)), key=self.updates)


class _StateSaving:
    """See `checkpoint.Saving`. first: this is rank 0."""

    def __init__(self, states: TrainerStates, path: Path, saving: Saving, *, first: bool) -> None:
        self._states, self._path, self._saving, self._first = states, path, saving, first

    @property
    def over(self) -> bool:
        return self._saving.over

    @property
    def copied(self) -> Mapping[str, Any] | None:
        return self._saving.copied

    def wait(self) -> None:
        try:
            self._saving.wait()
        except OSError as error:
            raise _unwritable(self._path, error) from error
        if self._first:
            self._states.remove_oldest()


def _unwritable(path: Path, error: OSError) -> RunHalted | OSError:
    if error.errno in NO_DESCRIPTORS:  # some are free when the run ends, and it is saved then
        return OSError(error.errno, error.strerror, str(path))
    error.filename = error.filename or str(path)
    return RunHalted(trouble(error) or f"{path} cannot be written ({error.strerror or error}); make room on that disk")
