"""Reads a report's data from a run's folder. Parts missing in an unfinished run are left out."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.config.recipes import parse
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.observe.intervals import wilson
from polyrhythm.observe.run_folder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, Change, read_changes
from polyrhythm.pipeline.hooks import run_hooks

Line = Mapping[str, Any]

#: Least episodes of a point of the training curve, and its approximate number of points.
_EPISODES, _POINTS = 32, 60
#: An interval between updates that is so many times the median is a pause.
_PAUSE = 10.0
#: Settings in which runs of one group may differ: the seed, and where the run is.
_FREE = ("seed", "name", "out_dir", "resume")
#: Points of a mean curve over seeds.
_SEED_POINTS = 60


class Success(NamedTuple):
    rate: float
    low: float
    high: float


class Measured(NamedTuple):
    """An evaluation. way: greedy, sampled or swapped; transitions: trained before its weights; success: None if no
    episode reported it; time_s: since the run began, at its end."""

    way: str
    transitions: float
    success: Success | None
    mean_return: float
    time_s: float = 0.0


class Point(NamedTuple):
    """Training episodes of consecutive updates, up to `transitions`; success: None if no episode reported it;
    mean_return: None if no update has a finite one; time_s: since the run began, at the last of these updates."""

    transitions: float
    success: Success | None
    mean_return: float | None
    time_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """One run. updates: metrics of each update; summary: as in summary.json, for an unfinished run only its finished
    phases; changes: of settings, on resume; setbacks: sentences about problems."""

    folder: Path
    label: str
    config: str
    updates: list[Line]
    evaluations: list[Measured]
    summary: Mapping[str, Any]
    finished: bool
    changes: Sequence[Change] = ()
    setbacks: Sequence[str] = ()

    @property
    def measures_success(self) -> bool:
        """Whether any episode reported success."""
        rates = [e.success for e in self.evaluations] + [line.get("env/success_once") for line in self.updates]
        return any(rate is not None for rate in rates)

    @cached_property
    def settings(self) -> dict[str, str]:
        """All settings as text, by dotted path."""
        try:
            return dict(_flat(parse(self.config, CONFIG_FILE)))
        except ConfigError:
            return {}

    def series(self, name: str, over: str = "throughput/transitions") -> list[tuple[float, float]]:
        """Pairs (over, name) of the updates that have both metrics."""
        found = [(line.get(over), line.get(name)) for line in self.updates]
        return [(x, y) for x, y in found if x is not None and y is not None]

    @property
    def faults(self) -> list[Mapping[str, Any]]:
        return list(self.summary.get("faults", ()))


def read_run(folder: Path) -> Run:
    """Read the run in `folder`. RunFolderError: it is not a run's folder, or its files cannot be read."""
    if not (folder / CONFIG_FILE).is_file():
        raise RunFolderError(f"{folder} is not a run's folder: it has no config.yaml; name the folder of a run")
    try:
        return _read(folder)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFolderError(f"{folder} cannot be read ({type(error).__name__}: {error}); name another run") from error


def _read(folder: Path) -> Run:
    lines = _lines(folder / METRICS_FILE)
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
    warned = summary.get("warnings")
    if warned is None:
        warned = [text for hooks in run_hooks() for text in hooks.warnings(lines)]
    return replace(run, evaluations=measured, setbacks=warned)


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
                rate = [line.get(f"evaluation/{way}/{part}") for part in Success._fields]
                success = None if None in rate else Success(*map(float, rate))  # type: ignore[arg-type]
                time_s = float(line.get("time_s") or 0.0)
                found.append(Measured(way, transitions, success, float(mean_return), time_s))
    return found


def training_points(run: Run) -> list[Point]:
    """The training curve: consecutive updates are merged until they have enough episodes for an interval."""
    total = sum(line.get("env/episodes") or 0.0 for line in run.updates)
    least = max(_EPISODES, total / _POINTS)
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


def pace_points(run: Run) -> list[list[tuple[float, float]]]:
    """(seconds since the start, transitions/s), one list per interval without a pause; updates are merged to about
    `_POINTS` points."""
    series = run.series("throughput/transitions", over="time_s")
    if len(series) < 2:
        return []
    parts = split_at_pauses(series)
    least = sum(part[-1][0] - part[0][0] for part in parts) / _POINTS
    found = []
    for part in parts:
        points, (begin, before) = [], part[0]
        for time_s, transitions in part[1:]:
            if time_s - begin >= least and time_s > begin:
                points.append(((begin + time_s) / 2, (transitions - before) / (time_s - begin)))
                begin, before = time_s, transitions
        found += [points] if points else []
    return found


def fault_times(run: Run) -> list[float]:
    """Seconds since the start of the updates in which stations were lost."""
    series = run.series("stations/faults", over="time_s")
    befores = [0.0, *(count for _, count in series)]
    return [time_s for (time_s, count), before in zip(series, befores, strict=False) if count > before]


def change_places(run: Run, over: str = "throughput/transitions") -> list[float]:
    """Positions of setting changes on an axis: the metric `over` of the last update before each change."""
    changed = sorted({change.update for change in run.changes})
    befores = [[line.get(over) for line in run.updates if line["step"] < update] for update in changed]
    return [(values[-1] if values else None) or 0.0 for values in befores]


def lag_points(run: Run) -> list[tuple[float, float, float]]:
    """(transitions, mean lag, maximum lag), merged as in `mean_points`."""
    largest = [max(lag for _, lag in part) for part in _parts(run.series("staleness/lag_max"))]
    return [(x, mean, most) for (x, mean), most in zip(mean_points(run, "staleness/lag_mean"), largest, strict=False)]


def mean_points(run: Run, name: str, over: str = "throughput/transitions") -> list[tuple[float, float]]:
    """(over, mean) of a metric, merged to at most `_POINTS` points."""
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in _parts(run.series(name, over))]


def _parts(series: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The series in at most `_POINTS` parts of equal length; the last may be shorter."""
    together = max(1, -(-len(series) // _POINTS))
    return [series[first : first + together] for first in range(0, len(series), together)]


def _json(path: Path) -> dict[str, Any]:
    with _naming(path):
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(content, dict):
            raise TypeError(f"it holds {type(content).__name__}")
        return content


def _lines(path: Path) -> list[Line]:
    """The lines of a metrics file; a truncated last line is skipped."""
    with _naming(path):
        texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found: list[Line] = []
    for number, text in enumerate(texts, 1):
        try:
            found.append(json.loads(text))
        except ValueError:
            if number < len(texts):
                with _naming(path, f"repair line {number}, or move the file away"):
                    raise
    return found


@contextmanager
def _naming(path: Path, fix: str = "repair it, or move it away") -> Iterator[None]:
    """Convert errors inside the context to a RunFolderError that names the file."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({type(error).__name__}: {error}); {fix}") from error


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(tree, dict):
        yield path, str(tree)
        return
    for key, value in tree.items():
        yield from _flat(value, f"{path}.{key}" if path else str(key))


# ------------------------------------------------------------ runs that differ only in their seed


def seed_groups(runs: Sequence[Run]) -> dict[int, list[Run]] | None:
    """Runs with equal settings except the seed, by index of the first run, whose colour the group has; None if there
    are no such groups."""
    places: dict[tuple[tuple[str, str], ...], int] = {}
    groups: dict[int, list[Run]] = {}
    for place, run in enumerate(runs):
        settings = tuple(sorted((key, value) for key, value in run.settings.items() if key not in _FREE))
        groups.setdefault(places.setdefault(settings, place), []).append(run)
    return groups if len(groups) < len(runs) else None


def group_label(group: Sequence[Run]) -> str:
    """`runs/a, seeds 0, 1, 2`; for one run its label."""
    if len(group) == 1:
        return group[0].label
    return f"{group[0].label}, seeds {', '.join(run.settings.get('seed', '?') for run in group)}"


def over_seeds(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """Points (x, mean, lowest, highest) over curves with ascending x, linearly interpolated where all curves are
    defined."""
    if not curves:
        return []
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if last < first:
        return []
    places = np.linspace(first, last, _SEED_POINTS)
    values = np.array([np.interp(places, *np.transpose(curve)) for curve in curves])
    return list(zip(*(a.tolist() for a in (places, values.mean(0), values.min(0), values.max(0))), strict=True))
