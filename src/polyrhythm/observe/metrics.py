"""Writes the scalars of a run to `metrics.jsonl`, one JSON object per line.

A name is `group/name`, in one of the documented `GROUPS`; other groups are rejected, so that the first run finds the
mistake. metrics.yaml, next to this file, describes every name. Step is the trainer's update (evaluation: the version).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import yaml

from polyrhythm.files import atomic_write
from polyrhythm.observe.log_file import LogFile, warn_of_loss
from polyrhythm.observe.run_folder import METRICS_FILE

log = logging.getLogger(__name__)

#: First parts of all names, of plugins' and user-defined losses' metrics too. metrics.yaml describes each name.
GROUPS = (
    "env", "staleness", "rollouter", "trainer", "time/env", "time/rollout", "time/actor", "train/actor", "train/critic",
    "train/sft", "samples", "throughput", "stations", "hosts", "cpu", "gpu", "transport", "evaluation",
)  # fmt: skip


class Metric(NamedTuple):
    """Documented metrics: names, with `<part>` for what varies; meaning in Markdown; unit, "" for a plain number."""

    names: Sequence[str]
    meaning: str
    unit: str = ""


def documented() -> list[Metric]:
    """All metrics of metrics.yaml."""
    text = Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")
    return [Metric(**entry) for entry in yaml.safe_load(text)]


class MetricsWriter:
    """Writer of `<folder>/metrics.jsonl`.

    Each line is written at once: updates are seconds apart, and a killed run keeps its last one. A resumed run appends.
    Failed writes, as on a full disk, lose data with one warning. receivers: also called with step and values. OSError:
    the file cannot be opened.
    """

    def __init__(
        self, folder: Path, receivers: Sequence[Callable[[int, Mapping[str, float | None]], None]] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lines, self._receivers = folder, LogFile(folder / METRICS_FILE), receivers

    def log(self, step: int, values: Mapping[str, float | None], time_s: float) -> None:
        """Record scalars of one step. time_s: seconds since the run began. Numbers that are not finite become null."""
        check_names(values)
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        finite = {name: number if math.isfinite(number := numbers.get(name, math.nan)) else None for name in values}
        line = json.dumps({"step": step, "time_s": round(time_s, 3), **finite}, allow_nan=False)
        self._lines.write(line + "\n")
        for receive in self._receivers:
            receive(step, values)

    def rewind(self, step: int) -> None:
        """Remove the lines of updates from `step` on, which are repeated after the trainer was lost."""
        self._lines.close()
        path, failed = self._folder / METRICS_FILE, self._lines.failed
        try:
            rewind(self._folder, step)
        except OSError as error:
            warn_of_loss(path, error, again=failed)
            failed = True
        self._lines = LogFile(path)
        self._lines.failed = failed

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError if a name belongs to no group."""
    for name in names:
        if not any(name.startswith(f"{group}/") for group in GROUPS):
            raise ValueError(f"metric {name!r} belongs to no documented group; use one of {', '.join(GROUPS)}")


def last_time_s(folder: Path) -> float:
    """Time of the latest line, in seconds since the run began; 0 if no line can be read."""
    times: list[Any] = [line.get("time_s") for line in read_lines(folder)]
    return max((float(x) for x in times if type(x) in (int, float) and math.isfinite(x)), default=0.0)


def has_updates(folder: Path) -> bool:
    """Whether a line, even a truncated one, belongs to an update of reinforcement learning."""
    try:
        return any('"throughput/' in line for line in _lines(folder))
    except OSError:
        return False


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Undamaged lines of the run's metrics; empty if the file cannot be read."""
    try:
        return [content for line in _lines(folder) if (content := line_content(line)) is not None]
    except OSError:
        return []


def _lines(folder: Path) -> list[str]:
    """Lines of metrics.jsonl, if it exists; a byte that is not UTF-8 damages only its own line."""
    path = folder / METRICS_FILE
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def rewind(folder: Path, step: int, version: int | None = None) -> None:
    """Remove the lines of updates from `step` on, before they are repeated; lines of phases are kept.

    version: also remove the evaluations of later versions, which are trained again.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return
    found = _lines(folder)
    if damaged := [str(number) for number, line in enumerate(found, 1) if line_content(line) is None]:
        log.warning("%s: removed damaged lines: %s", path, ", ".join(damaged))
    lines = [line for line in found if _is_kept(line_content(line), step, version)]
    with atomic_write(path) as unfinished:
        unfinished.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _is_kept(content: Mapping[str, Any] | None, step: int, version: int | None) -> bool:
    """Whether a line is early enough, or of a phase; False for a damaged line, None."""
    if content is None:
        return False
    if any(name.startswith("throughput/") for name in content):
        return bool(content["step"] < step)
    evaluation = any(name.startswith("evaluation/") for name in content)
    return version is None or not evaluation or bool(content["step"] <= version)


def line_content(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and type(content.get("step")) is int else None
