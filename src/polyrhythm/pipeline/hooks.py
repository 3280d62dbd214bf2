"""Hooks by which plugins take part in every run: kind `observer` registers addresses of `RunHooks` instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.plugin import load_all

if TYPE_CHECKING:
    from polyrhythm.pipeline.build import Pipeline
    from polyrhythm.pipeline.observers.base import Observer


class RunHooks:
    """A plugin's part in a run; subclass it. Its module is imported for every run, so it must import nothing heavy.

    files: names of the files that it writes to a run's folder.
    """

    files: ClassVar[tuple[str, ...]] = ()

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:  # noqa: ARG002
        """Observers of the run's training."""
        return ()

    def on_evaluation(self, folder: Path, name: str, result: Mapping[str, Any]) -> None:
        """Called after each evaluation. result: its tally, with `version` and `conversations`."""

    def rewind(self, folder: Path, version: int) -> None:
        """Called when the run resumes from this version: results of later versions will be recomputed."""

    def finish(self, folder: Path) -> None:
        """Called when the run is complete and its summary is written. An error is logged and changes nothing."""


def run_hooks() -> list[RunHooks]:
    """Hooks of all plugins."""
    return load_all("observer")
