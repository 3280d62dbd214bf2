"""Hooks by which plugins take part in every run: kind `observer` registers addresses of `RunHooks` instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TextIO

from polyrhythm.plugin import load, load_all, table

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.pipeline.build import Pipeline
    from polyrhythm.pipeline.observers.base import Observer
    from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram
    from polyrhythm.pipeline.observers.totals import RunTotals


class Display(Protocol):
    """Live display of a command; a plugin registers a context manager of one under kind `pipeline`, name `terminal`."""

    def phase(self, name: str, began: float) -> None:
        """A phase begins. began: start time of the whole run."""

    def count_episodes(self, done: int, of: int) -> None:
        """Set the progress of a phase without stations, such as the recording of demonstrations."""

    def watch(self, pipeline: Pipeline, parts: Sequence[RunPart] = ()) -> None:
        """Show the stations of this pipeline, its evaluations, and the status of these parts."""

    def train(
        self, updates: int, episodes: EpisodeTracker, totals: RunTotals, lags: LagHistogram, after_s: float
    ) -> None:
        """The current phase is training with `updates` updates in all; the other arguments are read live. after_s:
        estimated seconds of the phases after it."""


@contextmanager
def open_display(stream: TextIO) -> Iterator[Display | None]:
    """Display progress on the stream; None if it cannot, or no plugin does."""
    if "terminal" not in table("pipeline"):
        yield None
        return
    with load("pipeline", "terminal")(stream) as display:
        yield display


class Alarm(NamedTuple):
    """A problem of a run. step: of its line of metrics; None if it is one of the whole run; name: of its condition."""

    step: float | None
    text: str
    name: str = ""


class RunPart:
    """A plugin's part in one run, from its start or resume to its end; subclass it."""

    def on_start(self, folder: Path) -> None:
        """Called before the first phase. folder: the run's, with the metrics of what it resumes from."""

    def on_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Called with each line of metrics.jsonl."""

    def on_evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        """Called after each evaluation. result: its tally, with `version` and `conversations`."""

    def metrics(self) -> Mapping[str, float]:
        """Called for each update's line of metrics: what to add to it."""
        return {}

    def status(self) -> Sequence[str]:
        """Lines for the live display, which calls it twice a second."""
        return ()

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:  # noqa: ARG002
        """Observers of all phases, from the start of the stations on. They stay attached: their end is `close`."""
        return ()

    def on_trained(self) -> None:
        """Called once, when training is complete."""

    def close(self) -> None:
        """Called at the end of the run."""


class RunHooks:
    """Hooks of a plugin; subclass it. Its module is imported for every run, so it must import nothing heavy.

    files, folders: names of the files and folders that it writes to a run's folder.
    """

    files: ClassVar[tuple[str, ...]] = ()
    folders: ClassVar[tuple[str, ...]] = ()

    def begin(self, config: RunConfig) -> RunPart | None:  # noqa: ARG002
        """Called before a run or a resumed part does anything. StartError, with nothing left open: it cannot start."""
        return None

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:  # noqa: ARG002
        """Observers of the run's training."""
        return ()

    def on_evaluation(self, folder: Path, name: str, result: Mapping[str, Any]) -> None:
        """Called after each evaluation. result: its tally, with `version` and `conversations`."""

    def on_videos(self, config: RunConfig, folder: Path, version: int, files: Mapping[str, Path]) -> None:
        """Called after an evaluation of a run's policy by itself has written videos (.gif, .mp4 or .webp), by their
        names. folder: the run's."""

    def rewind(self, folder: Path, version: int) -> None:
        """Called when the run resumes from this version: results of later versions will be recomputed."""

    def alarms(self, lines: Sequence[Mapping[str, Any]]) -> Sequence[Alarm]:  # noqa: ARG002
        """Problems of a run, from its lines of metrics, for summary and report."""
        return ()

    def summarise(
        self,
        config: RunConfig,  # noqa: ARG002
        summary: Mapping[str, Any],  # noqa: ARG002
        lines: Sequence[Mapping[str, Any]],  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Fields to add to the summary of a complete run. lines: of metrics. An error is logged and changes nothing."""
        return {}

    def finish(self, folder: Path) -> None:
        """Called when the run is complete and its summary is written. An error is logged and changes nothing."""


def run_hooks() -> list[RunHooks]:
    """Hooks of all plugins."""
    return load_all("observer")


def all_alarms(lines: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """Problems of a run that any plugin finds in its lines of metrics."""
    return [alarm for hooks in run_hooks() for alarm in hooks.alarms(lines)]


@contextmanager
def begin_parts(config: RunConfig) -> Iterator[list[RunPart]]:
    """The parts of all plugins in a run, closed at the end of this block."""
    with ExitStack() as undo:
        yield [undo.enter_context(closing(part)) for hooks in run_hooks() if (part := hooks.begin(config)) is not None]
