"""Weights & Biases, https://docs.wandb.ai."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from polyrhythm.errors import MissingError
from polyrhythm.plugins.trackers.sink import Sink, Table, TrackedRun, TrackerSettings

_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbSettings(TrackerSettings):
    """Weights & Biases. Its files are in the run's folder, `wandb/`."""

    needs: ClassVar[tuple[str, ...]] = ("wandb",)
    extra: ClassVar[str] = "wandb"

    type: str = "wandb"
    mode: Literal["online", "offline"] = "online"
    """online: send to the service as the run goes; offline: write files, which `wandb sync` sends later."""
    project: str = "polyrhythm"
    """Project of the run."""
    entity: str = ""
    """User or team; empty: the account's default."""
    group: str = ""
    """Group of the run, such as an experiment of several seeds."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""

    def check(self) -> None:
        if self.mode == "online" and not any(map(os.environ.get, _KEYS)) and not _has_login():
            raise MissingError(
                "tracking.mode = online: no key of Weights & Biases is on this machine; run `wandb login`, set "
                "WANDB_API_KEY, or set the mode to offline"
            )

    def open(self, run: TrackedRun) -> Sink:
        return WandbSink(self, run)


def _has_login() -> bool:
    """Whether a key may be stored: `wandb login` writes to .netrc. The service's host differs between versions."""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(str(path.expanduser())).hosts:
                return True
    return False


class WandbSink(Sink):
    """A run of Weights & Biases. The axis of metrics is `update`, below `evaluation/` and of all else `version`."""

    def __init__(self, settings: WandbSettings, run: TrackedRun) -> None:
        if settings.mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        run.folder.joinpath("wandb").mkdir(exist_ok=True)
        self._run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity or None,
            group=settings.group or None,
            tags=settings.tags or None,
            name=run.name,
            id=run.id or run.key or None,
            resume="allow" if run.id or run.key else None,
            mode=settings.mode,
            dir=str(run.folder),
            config=dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True, save_code=False),
        )
        for axis, names in (
            ("update", "*"),
            *(("version", f"{part}/*") for part in ("evaluation", "conversations", "video")),
        ):
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(names, step_metric=axis)
        self.id = str(self._run.id)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        version = any(name.startswith("evaluation/") for name in values)
        self._run.log({**values, "version" if version else "update": step})

    def log_table(self, name: str, step: int, table: Table) -> None:
        rows = [list(row) for row in table.rows]
        found = self._wandb.Table(columns=list(table.columns), data=rows, allow_mixed_types=True)
        self._run.log({f"{name}_table": found, "version": step})

    def log_video(self, name: str, step: int, file: Path) -> None:
        self._run.log({name: self._wandb.Video(str(file), format=file.suffix[1:]), "version": step})

    def log_artifact(self, name: str, file: Path) -> None:
        artifact = self._wandb.Artifact(f"{name}-{self.id}", type=name)
        artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
