"""Journal of a run's phases: each phase commits its result, and a resumed run starts after the last committed one.

progress.json      {"command": train or sft, "began_in": working folder, "wall_s": {phase: seconds so far},
                   "done": {phase: result}, "faults": [faults of a part that ended by losing a host],
                   "crc32": of the rest}

If that file is missing or damaged, progress is reconstructed from the run's other files.
"""

from __future__ import annotations

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from polyrhythm.config.recipes import read
from polyrhythm.errors import PolyrhythmError
from polyrhythm.files import atomic_write
from polyrhythm.observe.metrics import has_updates, last_time_s
from polyrhythm.observe.run_folder import CONFIG_FILE, PROGRESS_FILE, SUMMARY_FILE
from polyrhythm.pipeline.persistence.checkpoints import (
    DEMONSTRATIONS_FILE,
    POLICY_FILE,
    STATES,
    load_policy,
    saved_runs,
)
from polyrhythm.plugin import load

log = logging.getLogger(__name__)


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
        self._path = folder / PROGRESS_FILE
        said, problem = _read(folder)
        if problem:
            said = _salvaged(folder, problem)
        self._origin = {"command": said.command or command, "began_in": said.began_in or str(Path.cwd())}
        self.wall_s, self._done, self.faults = said.wall_s, said.done, said.faults
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
        said: dict[str, Any] = {**self._origin, "wall_s": self.wall_s, "done": self._done}
        if self.faults:
            said["faults"] = self.faults
        with atomic_write(self._path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            json.dump({**said, "crc32": _crc32(said)}, file)
            file.flush()
            os.fsync(file.fileno())

    def summary(self) -> dict[str, float]:
        """Seconds by phase, and `total`."""
        return {**self.wall_s, "total": time.monotonic() - self.began}


class _Progress(msgspec.Struct):
    """Content of progress.json; runs of earlier versions lack some of it."""

    command: str = ""
    began_in: str = ""
    wall_s: dict[str, float] = {}
    done: dict[str, dict[str, Any]] = {}
    faults: list[dict[str, Any]] = []


def _read(folder: Path) -> tuple[_Progress, str]:
    """Content of progress.json and "", or an empty one and the problem."""
    try:
        said = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
        found = msgspec.convert(said, _Progress)
    except FileNotFoundError:
        return _Progress(), "is gone"
    except (OSError, ValueError) as error:
        return _Progress(), f"is damaged ({error})"
    rest = {key: value for key, value in said.items() if key != "crc32"}
    return (found, "") if said.get("crc32") in (None, _crc32(rest)) else (_Progress(), "is damaged")


def _crc32(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def command_of(folder: Path) -> str:
    """Command that started the run in `folder`: train or sft."""
    said, problem = _read(folder)
    return (_command_found(folder) if problem else said.command) or "train"


def began_in(folder: Path) -> str | None:
    """Working folder in which the run in `folder` began; None if unknown."""
    return _read(folder)[0].began_in or None


def has_begun(folder: Path) -> bool:
    """Whether the run in `folder` has started a phase, so that it may hold work worth keeping."""
    return bool(_read(folder)[0].wall_s)


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has a readable summary."""
    return _summary(folder) is not None


# ------------------------------------------------------------ without progress.json

#: Keys of summary.json that belong to evaluation phases; the others belong to reinforcement learning.
_BEFORE, _AFTER = ("before", "before_sampled"), ("after", "after_sampled", "swapped")


def _salvaged(folder: Path, problem: str) -> _Progress:
    """The progress by the run's other files: a phase is done if its file can be read, and its result is as complete as
    the files allow."""
    found = _Progress(_command_found(folder))
    with suppress(PolyrhythmError):
        demonstrations = load("pipeline", "demonstrations").Demonstrations.load(folder / DEMONSTRATIONS_FILE)
        found.done["demonstrations"] = {"decisions": len(demonstrations)}
    if saved_runs(folder / STATES) or _version(folder / POLICY_FILE) is not None:
        found.done["warm_start"] = {}
    summary = _summary(folder) or {}
    with suppress(msgspec.ValidationError):
        found.wall_s = msgspec.convert(summary.pop("wall_s", {}), dict[str, float])
        found.wall_s.pop("total", None)
    if "ledger" in summary:
        best = {"best": summary.pop("best")} if "best" in summary else {}
        before, after = ({name: summary.pop(name) for name in own if name in summary} for own in (_BEFORE, _AFTER))
        found.done |= {"evaluation_before": before} if before else {}
        found.done |= {"rl": summary, "best": best}
        found.done |= {"evaluation_after": after} if after else {}
    if found.done or problem != "is gone":
        done = ", ".join(found.done) or "nothing"
        log.warning(
            "%s %s; by the run's other files this is done: %s", folder / PROGRESS_FILE, problem, done.replace("_", " ")
        )
    return found


def _command_found(folder: Path) -> str:
    """`sft` for a warm start alone: by the suffix that it gives its runs, the supervised section, and the absence of
    checkpoints and metrics."""
    config = folder / CONFIG_FILE
    if not config.is_file() or (folder / STATES).exists() or (_version(folder / POLICY_FILE) or 0) > 0:
        return ""
    try:
        saved = read(config)
    except PolyrhythmError:
        return ""
    imitates = str(saved.get("name")).endswith("-sft") and saved.get("supervised") is not None
    return "sft" if imitates and not has_updates(folder) else ""


def _version(path: Path) -> int | None:
    try:
        return load_policy(path)[2]
    except PolyrhythmError:
        return None


def _summary(folder: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
