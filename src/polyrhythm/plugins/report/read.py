"""Reads a report's data from a run's folder. Parts missing in an unfinished run are left out."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from polyrhythm.config.recipes import parse
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.observe.intervals import wilson
from polyrhythm.observe.metrics import line_content
from polyrhythm.observe.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    Change,
    read_changes,
    refuse_no_run,
)
from polyrhythm.pipeline.hooks import Alarm, all_alarms
from polyrhythm.plugins.report.parts import Part, mark
from polyrhythm.readable import by_path

Line = Mapping[str, Any]

#: Least episodes of a point of the training curve, and about its number of points; most points of other curves.
_EPISODES, POINTS, FINE = 32, 60, 400
#: What `placement.moves` changes.
_MOVES = ("stations/generators_off", "staleness/max_lag", "stations/micro_batch_steps", "stations/together")
#: An interval between updates that is so many times the median is a pause.
_PAUSE = 10.0


class Success(NamedTuple):
    rate: float
    low: float
    high: float


class Measured(NamedTuple):
    """An evaluation. way: greedy, sampled or swapped; transitions, time_s: trained before its weights; success: None if
    no episode reported it."""

    way: str
    transitions: float
    success: Success | None
    mean_return: float
    time_s: float = 0.0


class Point(NamedTuple):
    """Training episodes of consecutive updates, up to `transitions` and `time_s`; success: None if no episode reported
    it; mean_return: None if no update has a finite one."""

    transitions: float
    success: Success | None
    mean_return: float | None
    time_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """One run. updates: metrics of each update; summary: as in summary.json, for an unfinished run only its finished
    phases; changes: of settings, on resume; setbacks: sentences about problems; alarms: those that belong to a line of
    metrics."""

    folder: Path
    label: str
    config: str
    updates: list[Line]
    evaluations: list[Measured]
    summary: Mapping[str, Any]
    finished: bool
    changes: Sequence[Change] = ()
    setbacks: Sequence[str] = ()
    alarms: Sequence[Alarm] = ()

    @property
    def measures_success(self) -> bool:
        """Whether any episode reported success."""
        rates = [e.success for e in self.evaluations] + [line.get("env/success_once") for line in self.updates]
        return any(rate is not None for rate in rates)

    @cached_property
    def settings(self) -> dict[str, str]:
        """All settings as text, by dotted path."""
        try:
            return {path: str(value) for path, value in by_path(parse(self.config, CONFIG_FILE) or {})}
        except ConfigError:
            return {}

    def series(self, name: str, over: str = "throughput/transitions") -> list[tuple[float, float]]:
        """Pairs (over, name) of the updates that have both metrics."""
        found = [(line.get(over), line.get(name)) for line in self.updates]
        return [(x, y) for x, y in found if x is not None and y is not None]

    @property
    def faults(self) -> list[Mapping[str, Any]]:
        return list(self.summary.get("faults", ()))


class ReportSection(NamedTuple):
    """A section of the page; plugins add theirs under kind `report`.

    id: its anchor; after: id of the section before it; draw: maps the runs to its parts, none for no section.
    """

    id: str
    heading: str
    draw: Callable[[Sequence[Run]], Sequence[Part]]
    after: str = ""


def read_run(folder: Path) -> Run:
    """Read the run in `folder`. RunFolderError: it is not a run's folder, or its files cannot be read."""
    refuse_no_run(folder)
    try:
        return _read(folder)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFolderError(f"{folder} cannot be read ({type(error).__name__}: {error}); name another run") from error


def _read(folder: Path) -> Run:
    lines, damaged = _lines(folder / METRICS_FILE)
    finished = (folder / SUMMARY_FILE).is_file()
    summary = _json(folder / SUMMARY_FILE if finished else folder / "progress.json")
    if not finished:
        done, wall_s = summary.get("done", {}), summary.get("wall_s", {})
        parts = [done.get(part) or {} for part in ("evaluation_before", "rl", "evaluation_after")]
        summary = {**parts[0], **parts[1], **parts[2], "wall_s": wall_s}
    with _naming(folder / CONFIG_FILE, "name another run"):
        config = (folder / CONFIG_FILE).read_text(encoding="utf-8")
    updates = [line for line in lines if "throughput/transitions_per_s" in line]
    place = folder.resolve()
    label = f"{place.parent.name}/{place.name}"
    run = Run(folder, label, config, updates, [], summary, finished, read_changes(folder))
    per_version = int(run.settings.get("freshness.sync_interval", 1))
    measured = _evaluations(lines, per_version)
    alarms = all_alarms(lines)
    warned = summary.get("warnings", [alarm.text for alarm in alarms])
    return replace(run, evaluations=measured, setbacks=[*damaged, *warned], alarms=alarms)


def _evaluations(lines: list[Line], per_version: int) -> list[Measured]:
    """The evaluations, positioned at their version, which training may have passed long before. per_version: updates
    per version."""
    updates = [line for line in lines if "throughput/transitions" in line]
    found = []
    for line in lines:
        for way in ("greedy", "sampled", "swapped"):
            mean_return = line.get(f"evaluation/{way}/mean_return")
            if mean_return is not None:
                before = bisect_left(updates, line["step"] * per_version, key=lambda update: update["step"])
                transitions = updates[before - 1]["throughput/transitions"] if before else 0.0
                time_s = (updates[before - 1] if before else line).get("time_s") or 0.0
                rate = [line.get(f"evaluation/{way}/{part}") for part in Success._fields]
                success = None if None in rate else Success(*map(float, rate))  # type: ignore[arg-type]
                found.append(Measured(way, transitions, success, float(mean_return), time_s))
    return found


def training_points(run: Run) -> list[Point]:
    """The training curve: consecutive updates are merged until they have enough episodes for an interval."""
    total = sum(line.get("env/episodes") or 0.0 for line in run.updates)
    least = max(_EPISODES, total / POINTS)
    points: list[Point] = []
    episodes = successes = rewards = rewarded = 0.0
    reported = False
    for number, line in enumerate(run.updates, 1):
        count = line.get("env/episodes") or 0.0
        episodes += count
        if count:
            if (success := line.get("env/success_once")) is not None:
                successes, reported = successes + count * success, True
            if (earned := line.get("env/return")) is not None:
                rewards += count * earned
                rewarded += count
        rest = number == len(run.updates) and episodes >= least / 4
        if episodes >= least or rest:
            rate = Success(*wilson(round(successes), round(episodes))[2:]) if reported else None
            transitions = line.get("throughput/transitions") or 0.0
            mean = rewards / rewarded if rewarded else None
            points.append(Point(transitions, rate, mean, line.get("time_s") or 0.0))
            episodes = successes = rewards = rewarded = 0.0
    return points


def split_at_pauses(series: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    """Split a time series where the next update came after more than `_PAUSE` median intervals, because the run was
    resumed or evaluated."""
    intervals = [after[0] - before[0] for before, after in pairwise(series)]
    longest = _PAUSE * median(intervals) if intervals else 0.0
    cuts = [0, *(place for place, interval in enumerate(intervals, 1) if interval > longest), len(series)]
    return [series[first:last] for first, last in pairwise(cuts)]


def pace_points(run: Run) -> list[tuple[float, float, float | None]]:
    """(seconds since the start, transitions, transitions/s); updates are merged to about `FINE / 2` points. In the
    middle of a pause the last is None."""
    series = run.series("throughput/transitions", over="time_s")
    if len(series) < 2:
        return []
    parts = split_at_pauses(series)
    least = sum(part[-1][0] - part[0][0] for part in parts) / (FINE / 2)
    found: list[tuple[float, float, float | None]] = []
    for number, part in enumerate(parts):
        begin, before = part[0]
        if number:
            time_s, transitions = parts[number - 1][-1]
            found.append(((begin + time_s) / 2, (before + transitions) / 2, None))
        for time_s, transitions in part[1:]:
            if time_s - begin >= least and time_s > begin:
                pace = (transitions - before) / (time_s - begin)
                found.append(((begin + time_s) / 2, (before + transitions) / 2, pace))
                begin, before = time_s, transitions
    return found


def run_marks(run: Run) -> list[Part]:
    """Faults, moves, alarms and changes of settings, at the updates in which they were."""
    marks = []
    lost = 0.0
    for before, line in pairwise(run.updates):
        pairs = [(name, before.get(name), line.get(name)) for name in _MOVES]
        moved = [(name, old, new) for name, old, new in pairs if None not in (old, new) and old != new]
        words = [f"{name.partition('/')[2]}: {old:g} → {new:g}" for name, old, new in moved]
        marks += [_mark("; ".join(words), "change", line)] if words else []
    for line in run.updates:
        count = line.get("stations/faults") or 0.0
        if count > lost:
            marks.append(_mark("a station was lost", "fault", line))
        lost = count
    by_step = {line["step"]: line for line in run.updates}
    marks += [_mark(alarm.text, "alarm", by_step[alarm.step]) for alarm in run.alarms if alarm.step in by_step]
    changed: dict[int, list[str]] = {}
    for change in run.changes:
        changed.setdefault(change.update, []).append(f"{change.setting}: {change.before} → {change.after}")
    for update, words in changed.items():
        befores = [line for line in run.updates if line["step"] < update]
        marks += [_mark("; ".join(words), "change", befores[-1])] if befores else []
    return marks


def _mark(label: str, tone: str, line: Line) -> Part:
    places = {"transitions": line.get("throughput/transitions"), "time": line.get("time_s")}
    return mark(label, tone, {axis: place for axis, place in places.items() if place is not None})


class Curve(NamedTuple):
    """A metric over both axes: means of consecutive updates."""

    x: dict[str, list[float]]
    y: list[float]


def curve(run: Run, name: str, combine: Callable[[Sequence[float]], float] = fmean, most: int = FINE) -> Curve:
    """The metric of the updates that have it, merged to at most `most` points by `combine`."""
    found = [
        (line.get("throughput/transitions"), line.get("time_s"), line[name])
        for line in run.updates
        if line.get(name) is not None
    ]
    together = max(1, -(-len(found) // most))
    parts = [found[first : first + together] for first in range(0, len(found), together)]
    x = {
        axis: [part[-1][place] or 0.0 for part in parts]
        for place, axis in enumerate(("transitions", "time"))
        if all(part[-1][place] is not None for part in parts)
    }
    return Curve(x, [combine([one[2] for one in part]) for part in parts])


def _json(path: Path) -> dict[str, Any]:
    with _naming(path):
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(content, dict):
            raise TypeError(f"it holds {type(content).__name__}")
        return content


def _lines(path: Path) -> tuple[list[Line], list[str]]:
    """The lines of a metrics file, and a sentence about damaged ones; those and an unfinished last one are skipped."""
    with _naming(path):
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    contents = [line_content(text) for text in texts]
    damaged = [str(number) for number, content in enumerate(contents[:-1], 1) if content is None]
    about = f"{path.name} has damaged lines, which are left out here: {', '.join(damaged[:9])}"
    more = f", and {len(damaged) - 9} more" if len(damaged) > 9 else ""
    return [content for content in contents if content is not None], [f"{about}{more}."] if damaged else []


@contextmanager
def _naming(path: Path, fix: str = "repair it, or move it away") -> Iterator[None]:
    """Convert errors inside the context to a RunFolderError that names the file."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({type(error).__name__}: {error}); {fix}") from error
