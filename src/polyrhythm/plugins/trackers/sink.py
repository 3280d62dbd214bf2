"""Contract of a tracker: settings that open a sink, which records one run.

A sink of a package or of a module in the working folder is used as `tracking: [module:Class]`, with a subclass of
`TrackerSettings` (docs/extending.md). tests/plugins/trackers/test_sinks.py has what every sink must keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from polyrhythm.config.base import Section


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a sink records.

    name: recipe and time; folder: absolute; config: all settings as plain data; id: the identifier that the sink had
    given in an earlier part of the run, "" if there was none; key: 16 hexadecimal digits of this run alone, equal in
    each try to open the sink, by which a try finds what one before it, which failed half-way, had begun.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    id: str = ""
    key: str = ""


class Table(NamedTuple):
    """Rows of plain values: text, numbers, booleans, None."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


class Sink:
    """Records of one run in a tracker; subclass it, a method that is not overridden records nothing.

    Its constructor begins a run there, or continues the one of `TrackedRun.id`, and sends the configuration. Any method
    may block and may raise: the call is repeated by the rule of `delivery`, so one that failed half-way may come twice.
    id: identifier by which a later part of the run continues this one.
    """

    id: str = ""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by the names of docs/metrics.md; they may be NaN or infinite.

        step: the update, from 0; for names below `evaluation/`, the version of the weights. A resumed run repeats the
        steps since it was last saved.
        """

    def log_table(self, name: str, step: int, table: Table) -> None:
        """Record the table `name` at a version of the weights, such as an evaluation by task, or conversations."""

    def log_video(self, name: str, step: int, file: Path) -> None:
        """Record a .gif or .mp4 of episodes with a version of the weights."""

    def log_artifact(self, name: str, file: Path) -> None:
        """Record a file of the run, such as its report."""

    def close(self, finished: bool) -> None:
        """End this part of the run. finished: the run is complete; otherwise it may be resumed."""


class TrackerSettings(Section):
    """Options of a tracker; subclass it with a field `type`, whose default is the name, or module:Class.

    needs: packages that the sink imports; extra: the extra that installs them; in_run: the sink only appends to local
    files and works in the run's own thread; any other has a process of its own.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    in_run: ClassVar[bool] = False

    type: str
    """Name of the tracker, or module:Class."""

    def check(self) -> None:
        """Raise MissingError if this machine lacks something else than packages; called before the run starts."""

    def open(self, run: TrackedRun) -> Sink:
        """Begin or continue the tracker's run."""
        raise NotImplementedError(f"{type(self).__name__} has no method open(run)")


def perform(sink: Sink, call: str, arguments: Sequence[Any]) -> None:
    """Make a call that was passed as plain data."""
    match call, arguments:
        case "metrics", (step, values):
            sink.log_metrics(step, values)
        case "table", (name, step, columns, rows):
            sink.log_table(name, step, Table(columns, rows))
        case "video", (name, step, file):
            sink.log_video(name, step, Path(file))
        case "artifact", (name, file):
            sink.log_artifact(name, Path(file))
        case "close", (finished,):
            sink.close(finished)
        case _:
            raise ValueError(f"call {call!r} of a sink with {len(arguments)} arguments")
