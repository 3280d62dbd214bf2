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
profile said for this amount. The times of a run include what its stations took from each other: where the profile has
that on its own (`beside`), it is taken out of the level, for the share of the run in which both worked. Handovers are
between the stations, and in none of these times.
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
    Machine,
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
#: Works that other stations of the device slow down.
_SHARED: tuple[WorkName, ...] = ("step", "pass", "prepare", "micro_batch", "optimizer_step")
#: Seconds of the shortest interval over which stations' reports are summed.
_INTERVAL_S = 2.0

Line = Mapping[str, Any]
#: By station and work: the amount and the seconds of each update.
Points = dict[Kind, dict[WorkName, list[tuple[float, float]]]]


class ProfileHooks(RunHooks):
    """Adds the machine to a complete run's summary, and writes the run's own measurements to its folder."""

    files = (PROFILE_FILE,)

    def summarise(
        self,
        config: RunConfig,  # noqa: ARG002
        summary: Mapping[str, Any],  # noqa: ARG002
        lines: Sequence[Line],  # noqa: ARG002
    ) -> Mapping[str, Any]:
        return {"machine": this_machine().model_dump(mode="json")}

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
    summary, lines = finished_files(folder)
    if not (updates := measured_updates(lines)):
        raise RunFolderError(f"folder {str(folder)!r}: it trained nothing; name a run that trained")
    config = load_config(folder / CONFIG_FILE)
    found = profile_of(config, summary, updates)
    return found if before is None else updated(before, found, config)


def updated(before: Profile, found: Profile, config: RunConfig) -> Profile:
    """A profile brought up to date by a run's. ConfigError: it is of another recipe or machine."""
    refuse_other_recipe(before, config)
    refuse_other_machine(before, found.machine)
    stations, busy = dict(before.stations), _busy(found, config)
    for kind, station in found.stations.items():
        stations[kind] = _levelled(stations[kind], station, busy) if kind in stations else station
    changed = {"date": found.date, "episodes": found.episodes, "stations": stations}
    run = {"rate": found.rate, "simulated": 0.0, "others_cores": found.others_cores}
    return before.model_copy(update={**changed, **run})


def finished_files(folder: Path) -> tuple[dict[str, Any], list[Line]]:
    """summary.json and the lines of metrics.jsonl. RunFolderError: the folder lacks one, or one is damaged."""
    for name in (SUMMARY_FILE, METRICS_FILE):
        if not (folder / name).is_file():
            raise RunFolderError(f"folder {str(folder)!r} has no {name}; name the folder of a finished run")
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        lines = list(map(json.loads, (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()))
    except ValueError as error:
        problem = f"summary.json or metrics.jsonl is truncated ({error})"
        raise RunFolderError(f"folder {str(folder)!r}: {problem}; name the folder of a finished run") from None
    return summary, lines


def measured_updates(lines: Sequence[Line]) -> list[Line]:
    """The lines of updates, without the first ones, in which everything warms up."""
    updates = [line for line in lines if line.get("time/actor/update") and line.get("env/sample_chunk_steps")]
    return updates[_WARM_UP:] if len(updates) > 2 * _WARM_UP else updates


def profile_of(config: RunConfig, summary: Mapping[str, Any], lines: Sequence[Line]) -> Profile:
    """The profile of a run of these settings. lines: `measured_updates` of its metrics. A run of an earlier version,
    whose summary does not name its machine, counts as one of this machine."""
    chunk = fmean(line["env/sample_env_steps"] / line["env/sample_chunk_steps"] for line in lines)
    points: Points = {"simulator": {}, "generator": {}, "trainer": {}}
    _rollout(points, config, lines, chunk)
    _updates(points, config, lines, sum(name.startswith("trainer") for name in summary.get("seats", {})))
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
    machine = Machine.model_validate(summary["machine"]) if "machine" in summary else this_machine()
    return Profile(
        recipe=config.name,
        settings=settings_digest(config),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
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
        others_cores=_others_cores(machine, lines),
    )


def _others_cores(machine: Machine, lines: Sequence[Line]) -> float:
    """Cores that others used, by the shares of all that were in use and that the run used; 0 if it did not measure."""
    shares = [line["cpu/utilization"] - line["cpu/own"] for line in lines if line.get("cpu/utilization") is not None]
    return max(0.0, machine.cores * fmean(shares)) if shares else 0.0


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


def _updates(points: Points, config: RunConfig, lines: Sequence[Line], ranks: int) -> None:
    """Targets, micro-batches and optimizer steps of the updates, of a rank."""
    from polyrhythm.plugins.planning.costs import mini_batch

    training, trainer = config.training, points["trainer"]
    for line in lines:
        total = line["env/sample_chunk_steps"] * training.batch_size / max(1, ranks)
        steps = max(1.0, line.get("train/actor/optimizer_steps", 1.0))
        mini, parts = mini_batch(training, total, max(1, ranks))
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


def _busy(found: Profile, config: RunConfig) -> dict[Kind, float]:
    """Shares of the run in which its trainer and a generator worked, by its own measurements; 1 if it has no rate."""
    from polyrhythm.plugins.planning.costs import sample_steps, update_seconds

    training, generator = config.training, found.stations["generator"].works
    steps = training.batch_size * sample_steps(found, config)
    each = steps * found.episodes.chunk / found.rate if found.rate else 0.0  # seconds of a version
    passes = generator["pass"].timings[0] if "pass" in generator else None
    generates = passes.mean_s * steps / max(1, passes.amount) / config.rollout.generators if passes else 0.0
    worked: dict[Kind, float] = {"trainer": update_seconds(found, training, steps), "generator": generates}
    return {kind: min(1.0, seconds / each) if each else 1.0 for kind, seconds in worked.items()}


def _levelled(station: StationProfile, run: StationProfile, busy: Mapping[Kind, float]) -> StationProfile:
    """The station's works, each multiplied so that it takes what it took in the run, at the run's amount, with the
    slow-down that is simulated on top. busy: shares of the run in which others worked."""
    works = dict(station.works)
    slower = 1.0 + sum((factor - 1.0) * busy.get(kind, 1.0) for kind, factor in station.beside.items())
    for name, own in run.works.items():
        seen = own.timings[0]
        expected = works[name].seconds(seen.amount) if name in works else 0.0
        alone = seen.median_s / (slower if name in _SHARED else 1.0)
        works[name] = works[name].scaled(alone / expected) if expected > 0 else own
    return station.model_copy(update={"works": works})
