"""Sends a run, and videos of its policy, to the trackers of `tracking`.

`trackers.json` in the run's folder has the identifier of each tracker's run, by which a resumed run continues it, and
the run's key, which is written before the first try to open a tracker.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast
from uuid import uuid4

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.files import write_json
from polyrhythm.observe.run_folder import REPORT_FILE, SUMMARY_FILE, lock_run_folder
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.plugins.trackers.delivery import Delivery, DirectDelivery, Patience, QueuedDelivery
from polyrhythm.plugins.trackers.process import SinkProcess
from polyrhythm.plugins.trackers.sink import Table, TrackedRun, TrackerSettings
from polyrhythm.readable import counted

log = logging.getLogger(__name__)

#: Seconds that the end of an evaluation waits more for each of its videos.
_VIDEO_S = 10.0
TRACKERS_FILE = "trackers.json"
_KEY = "key"
_EVALUATION = ("rate", "low", "high", "successes", "episodes", "mean_return")


class TrackerPart(RunPart):
    """Deliveries of one run to all its trackers."""

    def __init__(self, config: RunConfig, patience: Patience | None = None) -> None:
        self._config, self._patience = config, patience or Patience()
        self._deliveries: list[Delivery] = []
        self._folder = Path()

    def on_start(self, folder: Path) -> None:
        self._folder = folder
        self._deliveries = open_deliveries(self._config, folder, self._patience)

    def on_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        for delivery in self._deliveries:
            delivery.send("metrics", step, numbers)

    def on_evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        tables = {f"evaluation/{name}": evaluation_table(result)}
        if result["conversations"]:
            tables[f"conversations/{name}"] = conversation_table(result["conversations"])
        for delivery in self._deliveries:
            for title, table in tables.items():
                delivery.send("table", title, result["version"], table.columns, table.rows)

    def close(self) -> None:
        finished, report = (self._folder / SUMMARY_FILE).is_file(), self._folder / REPORT_FILE
        for delivery in self._deliveries:
            if finished and report.is_file():
                delivery.send("artifact", "report", str(report.absolute()))
            delivery.end(finished)
        for delivery in self._deliveries:
            delivery.close()


class TrackerHooks(RunHooks):
    files: ClassVar[tuple[str, ...]] = (TRACKERS_FILE,)
    folders: ClassVar[tuple[str, ...]] = ("tensorboard", "wandb", "swanlog")

    def begin(self, config: RunConfig) -> RunPart | None:
        return TrackerPart(config) if config.tracking else None

    def on_videos(self, config: RunConfig, folder: Path, version: int, files: Mapping[str, Path]) -> None:
        """Add the videos to the runs of those trackers that have recorded this run."""
        from polyrhythm.plugins.trackers.videos import with_common_format

        known = _read_ids(folder)
        had = [one for one in _trackers(config) if one.in_run or one.type in known]
        if not had:
            return
        patience = Patience(close_s=60.0 + _VIDEO_S * len(files))
        try:
            with lock_run_folder(folder), TemporaryDirectory() as beside:
                shown = {name: with_common_format(file, Path(beside)).absolute() for name, file in files.items()}
                deliveries = open_deliveries(config.model_copy(update={"tracking": tuple(had)}), folder, patience)
                for delivery in deliveries:
                    for name, file in shown.items():
                        delivery.send("video", f"video/{name}", version, str(file))
                    delivery.end((folder / SUMMARY_FILE).is_file())
                for delivery in deliveries:
                    delivery.close()
        except RunFolderError:
            log.warning("%s: not sent to the run's trackers, since the run is under way", counted(len(files), "video"))


HOOKS = TrackerHooks()


def open_deliveries(config: RunConfig, folder: Path, patience: Patience) -> list[Delivery]:
    """Open every tracker for the run in `folder`; failures are logged."""
    folder = folder.absolute()
    ids, lock, plain = _read_ids(folder), threading.Lock(), config.model_dump(mode="json")

    def keep(tracker: str, found: str) -> None:
        """Keep a tracker's identifier, or the key. Called in the threads of the deliveries."""
        with lock:
            if found and ids.get(tracker) != found:
                ids[tracker] = found
                try:
                    write_json(folder / TRACKERS_FILE, ids)
                except OSError as error:
                    log.warning("%s cannot be written (%s)", folder / TRACKERS_FILE, error.strerror)

    if _KEY not in ids and not all(one.in_run for one in _trackers(config)):
        keep(_KEY, uuid4().hex[:16])
    key = ids.get(_KEY, "")
    opened: list[Delivery] = []
    for settings in _trackers(config):
        kind = settings.type
        run = TrackedRun(f"{config.name}-{folder.name}", folder, plain, ids.get(kind, ""), key)
        if settings.in_run:
            opened.append(DirectDelivery(settings, run))
            continue
        process = SinkProcess(settings, folder / "logs" / f"tracker-{re.sub(r'[^A-Za-z0-9_.-]+', '-', kind)}.log")
        opened.append(QueuedDelivery(settings, run, process, partial(keep, kind), patience))
    return opened


def _trackers(config: RunConfig) -> Sequence[TrackerSettings]:
    """The trackers' settings; the check `trackers` has refused those of another class."""
    return cast(Sequence[TrackerSettings], config.tracking)


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / TRACKERS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(one) for name, one in found.items()} if isinstance(found, dict) else {}


def evaluation_table(result: Mapping[str, Any]) -> Table:
    """The evaluation as a row, then one for each task: success rate with its interval, episodes, mean return."""
    parts = {"all": result, **result.get("tasks", {})}
    return Table(
        ("task", *_EVALUATION), [[name, *(part.get(key) for key in _EVALUATION)] for name, part in parts.items()]
    )


def conversation_table(conversations: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each conversation; `text` alternates the policy's messages and the environment's replies."""
    rows = [
        [one["index"], one["task"], one["seed"], one["prompt"], _text(one["turns"]), one["success"], one["return"]]
        for one in conversations
    ]
    return Table(("index", "task", "seed", "prompt", "text", "success", "return"), rows)


def _text(turns: Sequence[Mapping[str, str]]) -> str:
    return "\n\n".join(part for turn in turns for part in (turn["message"], turn["reply"]) if part)
