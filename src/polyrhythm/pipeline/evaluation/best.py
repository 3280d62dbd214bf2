"""Which policies of a run were the best, by evaluations of their own: a list for people, and the weights that stay.

    evaluations.json                    every evaluation during training, and the one after it
    checkpoints/policy-<version>.pt     the weights of the best `keep` of them
    best.pt                             those of the best one

The best is the one with the highest lower end of its success interval, then the highest mean return; of equals the
older.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write
from polyrhythm.observe.intervals import deciding
from polyrhythm.pipeline.persistence.checkpoints import STATES

EVALUATIONS_FILE, BEST_FILE = "evaluations.json", "best.pt"


class BestCheckpoints:
    """Of the run in `folder`; goes on with what an earlier part of it has listed."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._file = folder / EVALUATIONS_FILE
        self.listed: list[dict[str, Any]] = []
        try:
            if self._file.is_file():
                self.listed = _entries(json.loads(self._file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise RunFolderError(
                f"{self._file} is damaged ({error}); remove it to go on without its results"
            ) from error

    @property
    def newest(self) -> int:
        """The newest version that is listed; 0 before the first."""
        return max((entry["version"] for entry in self.listed), default=0)

    def path(self, version: int) -> Path:
        """Where the weights of a version lie, before and after it is listed."""
        return self._folder / STATES / f"policy-{version:06d}.pt"

    def rewind(self, version: int) -> None:
        """The run goes on from `version`: what came after it is done anew."""
        self.listed = [entry for entry in self.listed if entry["version"] <= version]
        self._settle()

    def add(self, version: int, tallies: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """List an evaluation; the entry. The weights are in `path(version)`, unless nobody could take them in time.

        tallies: by the way of acting, greedy or sampled; the first of them decides. OSError: it cannot be written.
        """
        entry = {"version": version, **tallies}
        self.listed = [*(other for other in self.listed if other["version"] != version), entry]
        self._settle()
        return entry

    def forget(self, version: int) -> None:
        """The weights of a version that was not evaluated after all may go."""
        if not any(entry["version"] == version for entry in self.listed):
            self.path(version).unlink(missing_ok=True)

    def best(self) -> dict[str, Any] | None:
        """The entry of `best.pt`."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _ranked(self) -> list[dict[str, Any]]:
        there = [entry for entry in self.listed if self.path(entry["version"]).is_file()]
        return sorted(there, key=_merit, reverse=True)

    def _settle(self) -> None:
        """Write the list, and let only the best stay."""
        with atomic_write(self._file) as unfinished:
            unfinished.write_text(json.dumps(self.listed, indent=2) + "\n", encoding="utf-8")
        ranked = self._ranked()
        stay = {self.path(entry["version"]) for entry in ranked[: self._keep]}
        best = self._folder / BEST_FILE
        if not ranked:
            best.unlink(missing_ok=True)
        elif not (best.is_file() and best.samefile(self.path(ranked[0]["version"]))):
            with atomic_write(best) as unfinished:
                unfinished.unlink(missing_ok=True)
                os.link(self.path(ranked[0]["version"]), unfinished)
        for path in (self._folder / STATES).glob("policy-*.pt*"):
            if path not in stay and path.is_file():
                path.unlink()


def _entries(content: Any) -> list[dict[str, Any]]:
    """The list that `BestCheckpoints` writes. ValueError: this is something else."""
    try:
        entries = [{**entry, "version": int(entry["version"])} for entry in content]
        sum(sum(_merit(entry)) for entry in entries)
    except (LookupError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"it is no list of evaluations: {type(error).__name__}: {error}") from error
    return entries


def _merit(entry: dict[str, Any]) -> tuple[float, float]:
    tally = deciding(entry)
    return tally["low"], tally["mean_return"]
