"""What a finished run has measured, as a profile, or as an update of one.

| work | from metrics.jsonl, once for each update |
|---|---|
| step | `time/env/step` over the requests of the interval, whose rows are a slot's |
| pass | `time/rollout/forward` over the passes of the interval, at `rollouter/batch_rows` |
| prepare | `time/actor/collate`, `targets` and `proximal`, at the update's chunk steps |
| micro_batch, optimizer_step | `time/actor/passes` and `step` over their number |
| stage | `time/actor/publish` |

`apply` is from summary.json, and episodes from `env/episode_len`. A run has few amounts of each work. So it changes the
level of a profile's curve, and keeps its shape: all times of a work are multiplied by what the run took over what the
profile said for this amount. The times of a run include what its stations took from each other.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.observe.run_folder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, find_run, refuse_no_run
from polyrhythm.pipeline.hooks import RunHooks
from polyrhythm.plugins.planning.profile import (
    Episodes,
    Kind,
    Profile,
    StationProfile,
    Work,
    WorkName,
    refuse_other_machine,
    refuse_other_recipe,
    settings_digest,
    this_machine,
)

log = logging.getLogger(__name__)

PROFILE_FILE = "profile.json"
#: First updates, in which everything warms up, if there are more than twice as many.
_WARM_UP = 3
#: Seconds of the shortest interval over which stations' reports are summed.
_INTERVAL_S = 2.0

Line = Mapping[str, Any]
#: By station and work: the amount and the seconds of each update.
Points = dict[Kind, dict[WorkName, list[tuple[float, float]]]]


class ProfileHooks(RunHooks):
    """Writes a complete run's own measurements to its folder."""

    files = (PROFILE_FILE,)

    def finish(self, folder: Path) -> None:
        try:
            from_run(folder).save(folder / PROFILE_FILE)
        except RunFolderError as error:
            log.info("no profile of this run: %s", error)


HOOKS = ProfileHooks()


def from_run(folder: Path, before: Profile | None = None) -> Profile:
    """The profile of a finished run, or `before` brought up to date by it.

    RunFolderError: the folder has no run that trained. ConfigError: `before` is of another recipe or machine.
    """
    folder = find_run(folder)
    refuse_no_run(folder)
    summary, lines = _read(folder)
    config = load_config(folder / CONFIG_FILE)
    found = profile_of(config, summary, lines)
    return found if before is None else updated(before, found, config)


def updated(before: Profile, found: Profile, config: RunConfig) -> Profile:
    """A profile brought up to date by a run's. ConfigError: it is of another recipe or machine."""
    refuse_other_recipe(before, config)
    refuse_other_machine(before, found.machine)
    stations = dict(before.stations)
    for kind, station in found.stations.items():
        stations[kind] = _levelled(stations[kind], station) if kind in stations else station
    return before.model_copy(update={"date": found.date, "episodes": found.episodes, "stations": stations})


def _read(folder: Path) -> tuple[dict[str, Any], list[Line]]:
    """summary.json and the lines of metrics.jsonl that are of updates. RunFolderError: it has none."""
    for name in (SUMMARY_FILE, METRICS_FILE):
        if not (folder / name).is_file():
            raise RunFolderError(f"folder {str(folder)!r} has no {name}; name the folder of a finished run")
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        lines = list(map(json.loads, (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()))
    except ValueError as error:
        raise RunFolderError(
            f"folder {str(folder)!r}: summary.json or metrics.jsonl is damaged ({error}); name another run"
        ) from None
    if not (updates := measured_updates(lines)):
        raise RunFolderError(f"folder {str(folder)!r}: it trained nothing; name a run that trained")
    return summary, updates


def measured_updates(lines: Sequence[Line]) -> list[Line]:
    """The lines of updates, without the first ones, in which everything warms up."""
    updates = [line for line in lines if line.get("time/actor/update") and line.get("env/sample_chunk_steps")]
    return updates[_WARM_UP:] if len(updates) > 2 * _WARM_UP else updates


def profile_of(config: RunConfig, summary: Mapping[str, Any], lines: Sequence[Line]) -> Profile:
    """The profile of a run of these settings. lines: `measured_updates` of its metrics."""
    chunk = fmean(line["env/sample_env_steps"] / line["env/sample_chunk_steps"] for line in lines)
    points: Points = {"simulator": {}, "generator": {}, "trainer": {}}
    _rollout(points, config, lines, chunk)
    _updates(points, config, lines)
    weights = 0
    for name, ways in summary.get("weights", {}).items():
        if name.startswith("generator") and (apply := ways.get("apply")):
            weights = round(1e6 * apply["mb"])
            points["generator"].setdefault("apply", []).append((weights, 1e-3 * apply["ms"]))
    for line in lines:
        if weights and line.get("time/actor/publish"):
            points["trainer"].setdefault("stage", []).append((weights, line["time/actor/publish"]))
    lengths = [line["env/episode_len"] / chunk for line in lines if line.get("env/episode_len")]
    mean = max(1.0, fmean(lengths)) if lengths else fmean(line["env/sample_chunk_steps"] for line in lines)
    return Profile(
        recipe=config.name,
        settings=settings_digest(config),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_machine(),
        episodes=Episodes(
            mean=max(1.0, mean),
            deviation=pstdev(lengths) if lengths else 0.0,
            longest=max(1, math.ceil(max([*lengths, mean]))),
            chunk=max(1, round(chunk)),
        ),
        weights=weights,
        stations={
            kind: StationProfile(
                device=_device(summary, kind), works={name: _work(own) for name, own in works.items() if own}
            )
            for kind, works in points.items()
        },
        rate=summary.get("transitions_per_s") or 0.0,
    )


def _rollout(points: Points, config: RunConfig, lines: Sequence[Line], chunk: float) -> None:
    """Steps and passes of the intervals between two updates; shorter ones are joined, since stations report twice a
    second and many lines of short updates have none of their time."""
    slot = config.rollout.largest_slot_rows or config.rollout.rows
    rows = passes = step_s = pass_s = seconds = 0.0
    for before, line in pairwise(lines):  # before the first line is more than one interval
        new = max(0.0, line["throughput/transitions"] - before["throughput/transitions"]) / chunk
        rows, passes = rows + new, passes + new / (line.get("rollouter/batch_rows") or math.inf)
        step_s += line.get("time/env/step") or 0.0
        pass_s += line.get("time/rollout/forward") or 0.0
        seconds += line["time_s"] - before["time_s"]
        if seconds >= _INTERVAL_S or line is lines[-1]:
            if step_s and rows:
                points["simulator"].setdefault("step", []).append((slot, step_s / max(1.0, rows / slot)))
            if pass_s and passes:
                points["generator"].setdefault("pass", []).append((rows / passes, pass_s / max(1.0, passes)))
            rows = passes = step_s = pass_s = seconds = 0.0


def _updates(points: Points, config: RunConfig, lines: Sequence[Line]) -> None:
    """Targets, micro-batches and optimizer steps of the updates."""
    training, trainer = config.training, points["trainer"]
    for line in lines:
        total = line["env/sample_chunk_steps"] * training.batch_size
        steps = max(1.0, line.get("train/actor/optimizer_steps", 1.0))
        mini = total / max(1.0, math.ceil(total / training.minibatch_steps) if training.minibatch_steps else 1.0)
        parts = math.ceil(mini / training.micro_batch_steps) if training.micro_batch_steps else 1
        prepare = sum(line.get(f"time/actor/{name}", 0.0) for name in ("collate", "targets", "proximal"))
        trainer.setdefault("prepare", []).append((total, prepare))
        passes = line.get("time/actor/passes", 0.0) / (steps * parts)
        trainer.setdefault("micro_batch", []).append((mini / parts, passes))
        trainer.setdefault("optimizer_step", []).append((0, line.get("time/actor/step", 0.0) / steps))


def _device(summary: Mapping[str, Any], kind: Kind) -> str:
    """cpu or cuda, by the seat of the first station of the kind."""
    seats: Iterator[str] = (seat["device"] for name, seat in summary.get("seats", {}).items() if name.startswith(kind))
    return "cuda" if next(seats, "cpu").startswith("cuda") else "cpu"


def _work(points: Sequence[tuple[float, float]]) -> Work:
    """A work of the points' mean amount."""
    from polyrhythm.plugins.planning.timing import timing_of

    return Work(timings=(timing_of(round(fmean(n for n, _ in points)), [seconds for _, seconds in points]),))


def _levelled(station: StationProfile, run: StationProfile) -> StationProfile:
    """The station's works, each multiplied so that it takes what it took in the run, at the run's amount."""
    works = dict(station.works)
    for name, own in run.works.items():
        seen = own.timings[0]
        expected = works[name].seconds(seen.amount) if name in works else 0.0
        works[name] = works[name].scaled(seen.median_s / expected) if expected > 0 else own
    return station.model_copy(update={"works": works})
