"""Creates and locks the folder of a run: <root>/<recipe>/<time>, never shared and never overwritten.

Settings that changed when a run was resumed are in `settings_changes.jsonl`, one object per line; updates from `update`
on, counted from 0, were trained under the new settings:

    {"time": ISO 8601, "update": 40, "changes": {"training.versions": [120, 200]}}
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write

log = logging.getLogger(__name__)

#: Lock file, held by the process of the run.
LOCK_FILE = ".lock"
#: Settings, in every run folder.
CONFIG_FILE = "config.yaml"
#: Folder with the files of the job that is to make the run, which may be there before the run (`train --slurm`).
JOB_FOLDER = "job"
#: Files of a finished run.
SUMMARY_FILE, REPORT_FILE = "summary.json", "report.html"
#: Metrics of a run that trains, one line per update.
METRICS_FILE, PROGRESS_FILE = "metrics.jsonl", "progress.json"
#: Every evaluation during training, and the one after it; counts of samples.
EVALUATIONS_FILE, LEDGER_FILE = "evaluations.json", "ledger.json"
#: Folder with the episodes that an evaluation keeps and their videos, and the file there with a line for each.
GALLERY_FOLDER, EPISODES_FILE = "gallery", "episodes.jsonl"


def new_run_folder(root: Path, name: str, now: datetime) -> Path:
    """Make <root>/<name>/<YYYYmmdd-HHMMSS>; runs that start in the same second get -2, -3, …

    Creating the folder claims it, so two processes never get the same one. RunFolderError: it cannot be made.
    """
    parent, stamp, attempt = root / name, now.strftime("%Y%m%d-%H%M%S"), 0
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            attempt += 1
            folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise RunFolderError(
            f"folder {parent} cannot be made ({error.strerror}); set out_dir to another, or use --out"
        ) from error


def find_run(folder: Path) -> Path:
    """The folder itself if it is a run's; for a folder of runs, the newest run, which is logged.

    A folder of runs contains them by time, or by name and time as in `out_dir`.
    """
    if folder.is_dir() and not (folder / CONFIG_FILE).is_file():
        found = (file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{CONFIG_FILE}"))
        runs = sorted(found, key=lambda file: file.stat().st_mtime)
        if runs:
            log.info("%s is a folder of runs; its newest is taken: %s", folder, runs[-1].parent)
            return runs[-1].parent
    return folder


def run_of(path: Path, above: int = 2) -> Path | None:
    """The folder of the run that is, or has, this path; None outside a run. above: folders above it that are looked
    at."""
    return next((one for one in (path, *path.resolve().parents[:above]) if (one / CONFIG_FILE).is_file()), None)


def refuse_no_run(folder: Path) -> None:
    """Raise RunFolderError unless this is the folder of a run."""
    if not folder.exists():
        raise RunFolderError(f"{folder} is not there; name the folder of a run")
    if not (folder / CONFIG_FILE).is_file():
        raise RunFolderError(f"{folder} is not a run's folder: it has no {CONFIG_FILE}; name the folder of a run")


def take_file(file: Path) -> Path:
    """Check that a file named by the user does not exist, and make its folder. RunFolderError: it cannot be written."""
    if file.exists():
        raise RunFolderError(f"file {file} is there already; name another, nothing is overwritten")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"folder {file.parent} cannot be made ({error.strerror}); name another") from error
    if not os.access(file.parent, os.W_OK):
        raise RunFolderError(f"folder {file.parent} cannot be written to; name another")
    return file


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; the kernel releases the lock at the process's end.

    RunFolderError: another process holds the lock.
    """
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunFolderError(
                f"{folder} is in use by process {file.read().strip() or 'unknown'}; wait for it, or name another"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def take_folder(folder: Path) -> Path:
    """Make the folder that the user named. RunFolderError: it cannot be made, or is taken (`refuse_taken`)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"folder {folder} cannot be made ({error.strerror}); name another") from error
    refuse_taken(folder)
    return folder


def refuse_taken(folder: Path) -> None:
    """RunFolderError: the folder is there and has more than a job's files, or cannot be read."""
    try:
        taken = folder.is_dir() and any(one.name != JOB_FOLDER for one in folder.iterdir())
    except OSError as error:
        raise RunFolderError(f"folder {folder} cannot be read ({error.strerror}); name another") from error
    if (folder / CONFIG_FILE).is_file() and not (folder / SUMMARY_FILE).is_file():
        raise RunFolderError(
            f"folder {folder} holds a run that is not finished; to go on with it: polyrhythm resume "
            f"{shlex.quote(str(folder))}; for a new run name another folder"
        )
    if taken:
        raise RunFolderError(f"folder {folder} is not empty; name another, a run never overwrites one")


# ------------------------------------------------------------ settings that changed

CHANGES_FILE = "settings_changes.jsonl"


class Change(NamedTuple):
    """A changed setting, with the first update under the new value."""

    time: str
    update: int
    setting: str
    before: Any
    after: Any


def read_changes(folder: Path) -> list[Change]:
    """All changes of the run in `folder`, oldest first, without damaged lines."""
    return [
        Change(str(entry["time"]), entry["update"], setting, *values)
        for entry in _entries(folder / CHANGES_FILE)
        for setting, values in entry["changes"].items()
    ]


def note_changes(folder: Path, update: int, changes: Mapping[str, tuple[Any, Any]], now: datetime) -> None:
    """Append changes {setting: (before, after)} to those of the run in `folder`.

    The run resumes at `update`: changes recorded after it are moved to `update`.
    """
    path = folder / CHANGES_FILE
    noted = [{**entry, "update": min(entry["update"], update)} for entry in _entries(path)]
    if changes:
        noted.append({"time": now.isoformat(timespec="seconds"), "update": update, "changes": dict(changes)})
    if noted:
        with atomic_write(path) as unfinished:
            unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in noted), encoding="utf-8")


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        try:
            entry = json.loads(line)
            if type(entry["update"]) is int and all(len(values) == 2 for values in entry["changes"].values()):
                yield {"time": "", **entry}
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
