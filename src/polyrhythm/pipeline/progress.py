"""How far a run has come: each phase commits its result, and a resumed run begins behind the last one.

progress.json      {"wall_s": {phase: seconds so far}, "done": {phase: result}}
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.files import written_whole
from polyrhythm.observe.metrics import last_time_s

log = logging.getLogger(__name__)

CONFIG_FILE, SUMMARY_FILE, _FILE = "config.yaml", "summary.json", "progress.json"

#: Sections that a resumed run may have otherwise: they change where and how it runs, not what it learns.
_FREE = frozenset(
    {"launcher", "out_dir", "resume", "shutdown_s", "placement", "data_plane", "supervision", "checkpoint"}
)


class Progress:
    """Phases of the run in `folder`. wall_s: seconds by phase, over all parts of the run.

    began: when the run would have begun had it never paused. A phase that was killed leaves no time here, so it lies
    before the latest metrics too: their `time_s` goes on where it ended.
    """

    def __init__(self, folder: Path, announce: Callable[[str, float], None] | None = None) -> None:
        """announce: told when a phase begins, with its name and when the run began."""
        self._announce = announce
        self._path = folder / _FILE
        try:
            said = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else {}
        except ValueError as error:
            raise RunFolderError(
                f"{self._path} is damaged ({error}), so nobody knows how far that run has come; start anew"
            ) from error
        self.wall_s: dict[str, float] = said.get("wall_s", {})
        self._done: dict[str, Any] = said.get("done", {})
        self.began = time.monotonic() - max(sum(self.wall_s.values()), last_time_s(folder))

    def result(self, phase: str) -> Any:
        """What the phase came to; None if it is not done."""
        return self._done.get(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure and announce a phase; its time counts also if it is cut short."""
        log.info("%s …", name.replace("_", " "))
        if self._announce is not None:
            self._announce(name, self.began)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.wall_s[name] = self.wall_s.get(name, 0.0) + time.monotonic() - begin
            self._write()
        log.info("%s: %.1f s", name.replace("_", " "), self.wall_s[name])

    def commit(self, phase: str, result: Any) -> None:
        """The phase is done."""
        self._done[phase] = result
        self._write()

    def _write(self) -> None:
        with written_whole(self._path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            json.dump({"wall_s": self.wall_s, "done": self._done}, file)
            file.flush()
            os.fsync(file.fileno())

    def summary(self) -> dict[str, float]:
        """Seconds by phase, and `total`."""
        return {**self.wall_s, "total": time.monotonic() - self.began}


def run_to_resume(config: RunConfig, named: Path | None) -> Path | None:
    """The folder that `resume` asks to go on in; None for a new one.

    named: the folder that the user gave for this run. RunFolderError: `resume` names a folder that does not fit.
    """
    if config.resume == "never":
        return None
    if config.resume != "auto":
        return _fitting(Path(config.resume), config)
    if named is not None and (named / CONFIG_FILE).is_file():
        return _fitting(named, config)
    if named is not None:
        log.info("resume = auto: %s holds no run, so this one is new", named)
        return None
    runs = sorted((Path(config.out_dir) / config.name).glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
    unfinished = [path.parent for path in runs if not (path.parent / SUMMARY_FILE).exists()]
    if not unfinished:
        log.info("resume = auto: %s/%s has no unfinished run, so this one is new", config.out_dir, config.name)
        return None
    return _fitting(unfinished[-1], config)


def _fitting(folder: Path, config: RunConfig) -> Path:
    if not (folder / CONFIG_FILE).is_file():
        raise RunFolderError(
            f"resume = {folder}: a run folder is wanted, but it has no {CONFIG_FILE}; name another, or set resume=never"
        )
    if (folder / SUMMARY_FILE).exists():
        raise RunFolderError(f"resume = {folder}: that run is finished; name another, or set resume=never")
    found = load_config(folder / CONFIG_FILE)
    differing = differences(found.model_dump(mode="json"), config.model_dump(mode="json"))
    if differing:
        path, theirs, ours = differing[0]
        others = ", ".join(other for other, _, _ in differing[1:])
        more = f" (differ, too: {others})" if others else ""
        raise RunFolderError(
            f"resume = {folder}: {path} = {ours} is wanted, but that run has {theirs}{more}; "
            "give it the same settings, or set resume=never"
        )
    return folder


def differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted paths whose values differ, with both values; of a section of another type, the type alone."""
    found = []
    keys = theirs.keys() | ours.keys() if theirs.get("type") == ours.get("type") else {"type"}
    for key in sorted(keys):
        path, left, right = f"{prefix}{key}", theirs.get(key), ours.get(key)
        if path in _FREE or left == right:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, f"{path}.")
        else:
            found.append((path, left, right))
    return found
