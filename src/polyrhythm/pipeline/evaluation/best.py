"""Lists a run's evaluations and keeps the weights of the best policies.

    evaluations.json                    every evaluation during training, and the one after it
    checkpoints/policy-<version>.pt     the weights of the best `keep` versions
    best.pt                             the weights of the best version

Rank: lower end of the success interval (0 if no success was reported), then mean return, then age, older first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write, link_or_copy, write_json
from polyrhythm.observe.intervals import deciding
from polyrhythm.pipeline.persistence.checkpoints import BEST_FILE, STATES

EVALUATIONS_FILE = "evaluations.json"


class BestCheckpoints:
    """Best checkpoints of the run in `folder`; extends the list of a resumed run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._file = folder / EVALUATIONS_FILE
        self.listed: list[dict[str, Any]] = []
        try:
            if self._file.is_file():
                self.listed = _entries(json.loads(self._file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise RunFolderError(
                f"{self._file} is damaged ({error}); remove it to continue without its results"
            ) from error

    @property
    def newest(self) -> int:
        """The newest listed version; 0 before the first."""
        return max((entry["version"] for entry in self.listed), default=0)

    def path(self, version: int) -> Path:
        """File of a version's weights, whether or not the version is listed."""
        return self._folder / STATES / f"policy-{version:06d}.pt"

    def rewind(self, version: int) -> None:
        """Remove entries newer than `version`, from which the run resumes."""
        self.listed = [entry for entry in self.listed if entry["version"] <= version]
        self._write()

    def add(self, version: int, tallies: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """List an evaluation and return its entry. The weights are in `path(version)`, unless saving them failed.

        tallies: by action mode, greedy or sampled; the first one determines the rank. OSError: the list cannot be
        written.
        """
        entry = {"version": version, **tallies}
        self.listed = [*(other for other in self.listed if other["version"] != version), entry]
        self._write()
        return entry

    def forget(self, version: int) -> None:
        """Delete the weights of a version whose evaluation was abandoned."""
        if not any(entry["version"] == version for entry in self.listed):
            self.path(version).unlink(missing_ok=True)

    def best(self) -> dict[str, Any] | None:
        """Entry of the policy in `best.pt`; None before the first."""
        ranked = self._ranked()
        return ranked[0] if ranked else None

    def _ranked(self) -> list[dict[str, Any]]:
        present = [entry for entry in self.listed if self.path(entry["version"]).is_file()]
        return sorted(present, key=_rank_key, reverse=True)

    def _write(self) -> None:
        write_json(self._file, self.listed)
        ranked = self._ranked()
        kept = {self.path(entry["version"]) for entry in ranked[: self._keep]}
        best = self._folder / BEST_FILE
        if not ranked:
            best.unlink(missing_ok=True)
        elif not (best.is_file() and best.samefile(self.path(ranked[0]["version"]))):
            with atomic_write(best) as unfinished:
                unfinished.unlink(missing_ok=True)
                link_or_copy(self.path(ranked[0]["version"]), unfinished)
        for path in (self._folder / STATES).glob("policy-*.pt*"):
            if path not in kept and path.is_file():
                path.unlink()


def _entries(content: Any) -> list[dict[str, Any]]:
    """Parse the content of evaluations.json. ValueError: it has another form."""
    try:
        entries = [{**entry, "version": int(entry["version"])} for entry in content]
        sum(sum(_rank_key(entry)) for entry in entries)
    except (LookupError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"it is not a list of evaluations: {type(error).__name__}: {error}") from error
    return entries


def _rank_key(entry: dict[str, Any]) -> tuple[float, float]:
    tally = deciding(entry)
    return tally["low"] or 0.0, tally["mean_return"]
