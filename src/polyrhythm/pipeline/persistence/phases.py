"""Journal of a run's phases: each phase commits its result, and a resumed run starts after the last committed one.

progress.json      {"command": train or sft, "began_in": working folder, "wall_s": {phase: seconds so far},
                   "done": {phase: result}, "faults": [faults of a part that ended by losing a host],
                   "crc32": of the rest}

If that file is missing or damaged, progress is reconstructed from other files (`pipeline.persistence.salvage`).
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyrhythm.files import atomic_write
from polyrhythm.observe.metrics import last_time_s
from polyrhythm.observe.run_folder import SUMMARY_FILE

log = logging.getLogger(__name__)

_FILE = "progress.json"


class PhaseJournal:
    """Phases of the run in `folder`.

    wall_s: seconds by phase, over all parts of the run. faults: of a part that ended by losing a host, so that it could
    not be saved. began: start time of the run, as if it had never paused. A killed phase leaves no time here, so
    `began` also lies before the latest metrics, whose `time_s` thus continues.
    """

    def __init__(
        self, folder: Path, announce: Callable[[str, float], None] | None = None, command: str = "train"
    ) -> None:
        """announce: called at the start of a phase with its name and the run's start. command: that started the run."""
        self._announce = announce
        self._path = folder / _FILE
        said, problem = _said(folder)
        if problem:
            said = _salvaged(folder, problem)
        self._origin = {"command": said.get("command", command), "began_in": said.get("began_in", str(Path.cwd()))}
        self.wall_s: dict[str, float] = said.get("wall_s", {})
        self._done: dict[str, Any] = said.get("done", {})
        self.faults: list[dict[str, Any]] = said.get("faults", [])
        self.began = time.monotonic() - max(sum(self.wall_s.values()), last_time_s(folder))

    def result(self, phase: str) -> Any:
        """Result of a phase; None if it is not done."""
        return self._done.get(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure and announce a phase, even one that is cut short. Logs the time of this part, and of all parts if
        there are several."""
        log.info("%s …", name.replace("_", " "))
        if self._announce is not None:
            self._announce(name, self.began)
        begin = time.monotonic()
        try:
            yield
        finally:
            spent, before = time.monotonic() - begin, self.wall_s.get(name)
            self.wall_s[name] = (before or 0.0) + spent
            self._write()
        in_all = "" if before is None else f" ({self.wall_s[name]:.1f} s in all)"
        log.info("%s: %.1f s%s", name.replace("_", " "), spent, in_all)

    def commit(self, phase: str, result: Any) -> None:
        """Mark a phase as done, with its result."""
        self._done[phase] = result
        self._write()

    def reopen(self, *phases: str) -> None:
        """Mark phases as not done."""
        self._done = {phase: result for phase, result in self._done.items() if phase not in phases}
        self._write()

    def keep_faults(self, faults: Sequence[dict[str, Any]]) -> None:
        self.faults = list(faults)
        self._write()

    def _write(self) -> None:
        said = {**self._origin, "wall_s": self.wall_s, "done": self._done}
        if self.faults:
            said["faults"] = self.faults
        with atomic_write(self._path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            json.dump({**said, "crc32": _crc32(said)}, file)
            file.flush()
            os.fsync(file.fileno())

    def summary(self) -> dict[str, float]:
        """Seconds by phase, and `total`."""
        return {**self.wall_s, "total": time.monotonic() - self.began}


def _said(folder: Path) -> tuple[dict[str, Any], str]:
    """Content of progress.json and "", or {} and the problem."""
    try:
        said = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "is gone"
    except (OSError, ValueError) as error:
        return {}, f"is damaged ({error})"
    return (said, "") if _is_progress(said) else ({}, "is damaged")


def _salvaged(folder: Path, problem: str) -> dict[str, Any]:
    from polyrhythm.pipeline.persistence.salvage import progress_found  # reads weights, which a new run has none of

    found = progress_found(folder)
    if found["done"] or problem != "is gone":
        done = ", ".join(found["done"]) or "nothing"
        log.warning("%s %s; by the run's other files this is done: %s", folder / _FILE, problem, done.replace("_", " "))
    return found


def _is_progress(said: Any) -> bool:
    if not isinstance(said, dict):
        return False
    rest = {key: value for key, value in said.items() if key != "crc32"}
    wall_s, done = said.get("wall_s", {}), said.get("done", {})
    return (
        said.get("crc32") in (None, _crc32(rest))  # runs of earlier versions have none
        and isinstance(wall_s, dict)
        and all(type(seconds) in (int, float) for seconds in wall_s.values())
        and isinstance(done, dict)
        and all(isinstance(result, dict) for result in done.values())
        and isinstance(said.get("faults", []), list)
        and all(isinstance(fault, dict) for fault in said.get("faults", []))
        and all(isinstance(said.get(key, ""), str) for key in ("command", "began_in"))
    )


def _crc32(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def command_of(folder: Path) -> str:
    """Command that started the run in `folder`: train or sft."""
    said, problem = _said(folder)
    if problem:
        from polyrhythm.pipeline.persistence.salvage import command_found  # as above

        said = command_found(folder)
    return str(said.get("command", "train"))


def began_in(folder: Path) -> str | None:
    """Working folder in which the run in `folder` began; None if unknown."""
    found = _said(folder)[0].get("began_in")
    return None if found is None else str(found)


def has_begun(folder: Path) -> bool:
    """Whether the run in `folder` has started a phase, so that it may hold work worth keeping."""
    return bool(_said(folder)[0].get("wall_s"))


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has a readable summary."""
    try:
        return isinstance(json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False
