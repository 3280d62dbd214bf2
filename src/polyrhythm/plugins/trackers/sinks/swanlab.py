"""SwanLab, https://docs.swanlab.cn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import uuid4

from polyrhythm.errors import MissingError
from polyrhythm.plugins.trackers.sink import Sink, Table, TrackedRun, TrackerSettings
from polyrhythm.plugins.trackers.videos import as_gif
from polyrhythm.readable import markdown_table


class SwanlabSettings(TrackerSettings):
    """SwanLab. Its files are in the run's folder, `swanlog/`."""

    needs: ClassVar[tuple[str, ...]] = ("swanlab",)
    extra: ClassVar[str] = "swanlab"

    type: str = "swanlab"
    mode: Literal["online", "offline"] = "online"
    """online: send to the service as the run goes; offline: write files, which `swanlab sync` sends later."""
    project: str = "polyrhythm"
    """Project of the run."""
    workspace: str = ""
    """User or organisation; empty: the account's default."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""

    def check(self) -> None:
        home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
        stored = any((Path(folder).expanduser() / ".netrc").exists() for folder in (".swanlab", home))
        if self.mode == "online" and not os.environ.get("SWANLAB_API_KEY") and not stored:
            raise MissingError(
                "tracking.mode = online: no key of SwanLab is on this machine; run `swanlab login`, set "
                "SWANLAB_API_KEY, or set the mode to offline"
            )

    def open(self, run: TrackedRun) -> Sink:
        return SwanlabSink(self, run)


class SwanlabSink(Sink):
    """A run of SwanLab. Tables are Markdown. Files that are not media are kept with the run, not sent."""

    def __init__(self, settings: SwanlabSettings, run: TrackedRun) -> None:
        import swanlab

        self._swanlab: Any = swanlab
        self.id = run.id or run.key or uuid4().hex[:16]
        self._run: Any = swanlab.init(
            id=self.id,
            resume="allow",
            mode=settings.mode,
            project=settings.project,
            workspace=settings.workspace or None,
            name=run.name,
            tags=list(settings.tags) or None,
            log_dir=str(run.folder / "swanlog"),
            config=dict(run.config),
            settings=swanlab.Settings(interactive=False),
        )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, name: str, step: int, table: Table) -> None:
        self._run.log({name: self._swanlab.Text(markdown_table(*table))}, step=step)

    def log_video(self, name: str, step: int, file: Path) -> None:
        self._run.log({name: self._swanlab.Video(BytesIO(as_gif(file)[0]))}, step=step)

    def log_artifact(self, name: str, file: Path) -> None:  # noqa: ARG002
        self._run.save(str(file), base_path=str(file.parent), policy="now")

    def close(self, finished: bool) -> None:
        self._run.finish("success" if finished else "aborted")
