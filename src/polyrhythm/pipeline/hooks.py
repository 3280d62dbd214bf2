"""What plugins do beside every run: kind `observer` has addresses of instances of `RunHooks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polyrhythm.plugin import load_all

if TYPE_CHECKING:
    from polyrhythm.pipeline.build import Pipeline
    from polyrhythm.pipeline.observers.base import Observer


class RunHooks:
    """A plugin's part in a run; subclass it. The module is imported for every run, so it imports nothing heavy itself.

    files: names of files that it writes to a run's folder.
    """

    files: ClassVar[tuple[str, ...]] = ()

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:  # noqa: ARG002
        """Observers of the run's training."""
        return ()

    def on_evaluation(self, folder: Path, name: str, result: Mapping[str, Any]) -> None:
        """An evaluation of the run is done. result: its tally, with `version` and `conversations`."""

    def rewind(self, folder: Path, version: int) -> None:
        """The run goes on from this version: what is of later ones is done again."""

    def finish(self, folder: Path) -> None:
        """The run is complete, and its summary is written. An error is logged and changes nothing."""


def run_hooks() -> list[RunHooks]:
    """Those of all plugins."""
    return load_all("observer")
