"""Trackio, https://huggingface.co/docs/trackio."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from polyrhythm.plugins.trackers.sink import Sink, Table, TrackedRun, TrackerSettings


class TrackioSettings(TrackerSettings):
    """Trackio: a database on this machine (TRACKIO_DIR), for `trackio show`, or a Space."""

    needs: ClassVar[tuple[str, ...]] = ("trackio",)
    extra: ClassVar[str] = "trackio"

    type: str = "trackio"
    project: str = "polyrhythm"
    """Project of the run."""
    space_id: str = ""
    """Hugging Face Space that gets the run (USER/SPACE); empty: this machine alone."""
    group: str = ""
    """Group of the run, such as an experiment of several seeds."""

    def open(self, run: TrackedRun) -> Sink:
        return TrackioSink(self, run)


class TrackioSink(Sink):
    """A run of Trackio, continued by its name."""

    def __init__(self, settings: TrackioSettings, run: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        self.id = run.id or run.name
        self._run: Any = trackio.init(
            project=settings.project,
            name=self.id,
            group=settings.group or None,
            space_id=settings.space_id or None,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, name: str, step: int, table: Table) -> None:
        rows = [list(row) for row in table.rows]
        self._run.log({name: self._trackio.Table(columns=list(table.columns), data=rows)}, step=step)

    def log_video(self, name: str, step: int, file: Path) -> None:
        self._run.log({name: self._trackio.Video(str(file), format=file.suffix[1:])}, step=step)

    def log_artifact(self, name: str, file: Path) -> None:
        self._run.log_artifact(str(file), name=f"{self.id}-{name}", type=name)

    def close(self, finished: bool) -> None:  # noqa: ARG002
        self._run.finish()
