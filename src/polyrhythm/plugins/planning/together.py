"""Measures the stations together, in a short run of the recipe: what each unit of work takes longer than alone.

    a pass      from `Serve`, or the end of the generator's previous pass, to `BatchDone`
    a step      from `BatchDone` to the slot's next request, without the steps of the slots before it in its env batch
    an update   its phases by the trainer's own account, and its CPU time

What a pass and a step take longer while no update is under way is the handover: messages, and threads that wake. The
factor by which they take longer still during updates is their slow-down beside the trainer. On a CPU an update's CPU
time sets the level of the trainer's works: in a run its caches are cold.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, pstdev
from typing import ClassVar

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.placed import Kind as PlacedKind
from polyrhythm.pipeline.placed import place
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.plugins.hardware.processor import others_cores, read_cpu
from polyrhythm.plugins.planning.cluster import mini_batch, update_seconds
from polyrhythm.plugins.planning.profile import Episodes, Kind, Profile, StationProfile, Work, WorkName
from polyrhythm.plugins.planning.timing import core_wait_s, timing_of
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.messages import TRAINER, Report
from polyrhythm.scheduler import records

#: Measurements below which nothing is said about their mean.
_FEW = 5
#: Shares of the handovers that count, from the shortest on.
_COUNTED, _COUNTED_INLINE = 0.5, 0.9
#: Largest factor of a slow-down; more is another fault.
_MOST_BESIDE = 4.0
#: Seconds that a run gets at least, once it has started.
_LEAST_S = 4.0
#: The kinds' names in `Placed.names`.
_NAMES: Mapping[Kind, PlacedKind] = {"simulator": "simulators", "generator": "generators"}
#: Works of which an update consists.
_UPDATE: tuple[WorkName, ...] = ("prepare", "micro_batch", "optimizer_step")
#: Phases of an update in its report.
_PHASES = tuple(f"time/actor/{name}" for name in ("collate", "targets", "proximal", "passes", "step"))


@dataclass(slots=True)
class Unit:
    """A unit of work. expected: seconds alone; trains: whether an update was under way when it began."""

    seconds: float
    expected: float
    trains: bool


@dataclass(slots=True, eq=False)
class UnitTimer(Observer):
    """Measures units of work by the conductor's events. step_s, pass_s: seconds alone of so many rows (pass_s: None if
    passes are not measured); waited: seconds that do not count, so far; trainer_cpu_s: CPU time of the trainer's
    process, so far. updates: metrics of each, and that time; published: seconds and transitions at each version."""

    hears: ClassVar[tuple[type, ...]] = (
        *(records.BatchDone, records.RequestArrived, records.Serve, records.StartRows, records.StartUpdate),
        *(records.UpdateDone, records.Published, records.SampleFinished),
    )

    step_s: Callable[[int], float]
    pass_s: Callable[[int], float] | None
    waited: Callable[[], float] = lambda: 0.0
    trainer_cpu_s: Callable[[], float] = lambda: 0.0
    passes: list[Unit] = field(default_factory=list)
    steps: list[Unit] = field(default_factory=list)
    updates: list[tuple[Mapping[str, float], float]] = field(default_factory=list)
    samples: list[records.SampleFinished] = field(default_factory=list)
    published: list[tuple[float, int]] = field(default_factory=list)
    transitions: int = 0
    _served: dict[int, tuple[float, records.Batch]] = field(default_factory=dict)
    _free: dict[str, float] = field(default_factory=dict)  # generator → end of its last pass
    _away: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)  # env batch → slot → since, rows
    _ahead: dict[str, float] = field(default_factory=dict)  # slot → seconds of the steps before its own
    _training: bool = False

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        now -= self.waited()
        match event:
            case records.BatchDone():
                self._end_pass(now, event)
            case records.RequestArrived(slot=slot):
                self._end_step(now, slot)
            case records.UpdateDone():
                self._training = False
            case records.SampleFinished(ticket=ticket) if ticket >= 0:
                self.samples.append(event)
                self.transitions += event.env_steps
            case records.Published(version=version) if version > 0:
                self.published.append((now, self.transitions))
        for command in commands:
            if isinstance(command, records.Serve):
                self._served[command.batch.number] = (now, command.batch)
            elif isinstance(command, records.StartRows):
                self._away.get(_env_batch(command.slot), {}).pop(command.slot, None)
            elif isinstance(command, records.StartUpdate):
                self._training = True

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        if report.topic == "update":
            self.updates.append((report.values, self.trainer_cpu_s()))

    def _end_pass(self, now: float, event: records.BatchDone) -> None:
        served = self._served.pop(event.batch, None)
        if served is None:
            return
        begin, batch = max(served[0], self._free.get(event.generator, 0.0)), served[1]
        self._free[event.generator] = now
        if self.pass_s is not None:
            rows = sum(request.rows for request in batch.requests)
            self.passes.append(Unit(now - begin, self.pass_s(rows), self._training))
        for request in batch.requests:
            away = self._away.setdefault(_env_batch(request.slot), {})
            self._ahead[request.slot] = sum(self.step_s(other) for _, other in away.values())
            away[request.slot] = (now, request.rows)

    def _end_step(self, now: float, slot: str) -> None:
        begun = self._away.get(_env_batch(slot), {}).pop(slot, None)
        if begun is not None:
            seconds = now - begun[0] - self._ahead.pop(slot, 0.0)
            self.steps.append(Unit(seconds, self.step_s(begun[1]), self._training))

    @property
    def rate(self) -> float:
        """Transitions per second between the first and the last version, 0 if there are fewer than three."""
        if len(self.published) <= 2:
            return 0.0
        (begin, before), (end, after) = self.published[0], self.published[-1]
        return (after - before) / (end - begin)


def unit_timer(profile: Profile) -> UnitTimer:
    """A timer that expects what the stations took alone."""
    passes = profile.stations["generator"].works.get("pass")
    return UnitTimer(profile.stations["simulator"].works["step"].seconds, passes.seconds if passes else None)


def _env_batch(slot: str) -> str:
    return slot.rpartition("/")[0] or slot


def measure_together(config: RunConfig, profile: Profile, end: float) -> Profile:
    """The profile with what a run of the recipe adds to it. end: by `time.monotonic`, of the run. Left out is said.

    The run trains from weights of the seed, without evaluation. StartError, RunHalted: as of any run.
    """
    timer = unit_timer(profile)
    if config.launcher == "inline":
        timer.waited = core_wait_s  # in one process a wait for a core is a wait of all stations
    own = max(config.training.versions, 1)
    quiet = config.model_copy(
        update={
            "evaluation": config.evaluation.model_copy(update={"every": 0}),
            "init_from": "",
            "training": config.training.model_copy(update={"versions": own}),
        }
    )
    with (
        tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder,
        closing(build_pipeline(RunContext(quiet, folder=Path(folder)))) as pipeline,
    ):
        until = max(end, time.monotonic() + _LEAST_S)  # however long it took to start
        if (pid := process_ids(pipeline.launcher.hosting).get(TRAINER)) and _computes_on_one_core(config):
            timer.trainer_cpu_s = partial(_cpu_s, pid)
        pipeline.loop.add_observers(timer)
        pipeline.loop.stop = lambda: time.monotonic() >= until
        begin = read_cpu()
        with suppress(Interrupted):
            pipeline.loop.train_until(own)
        others = others_cores(begin, read_cpu())
    return with_run(profile, config, timer).model_copy(update={"others_cores": others})


def _computes_on_one_core(config: RunConfig) -> bool:
    """Whether the trainer is one thread on the CPU, so that its CPU time is how long it works."""
    placed = place(config)
    seats = [placed.seats[name] for name in placed.names["trainer"]]
    return len(seats) == 1 and seats[0].device == CPU and seats[0].threads == 1


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond; 0 where the system does not say, or it has ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text(encoding="ascii").split()[0]) for thread in threads) * 1e-9
    except OSError:
        return 0.0


def with_run(profile: Profile, config: RunConfig, timer: UnitTimer) -> Profile:
    """The profile with handovers, slow-downs, episodes and the rate of this run."""
    left_out = list(profile.left_out)
    stations = dict(profile.stations)
    units: dict[Kind, Sequence[Unit]] = {"simulator": timer.steps, "generator": timer.passes}
    for kind, own in units.items():
        stations[kind] = _with_units(stations[kind], own, kind, left_out, config)
    stations["trainer"] = _with_updates(profile, config, timer, left_out)
    return profile.model_copy(
        update={
            "stations": stations,
            "episodes": seen_episodes(profile.episodes, timer.samples),
            "rate": timer.rate,
            "left_out": tuple(left_out),
        }
    )


def _is_beside_trainer(config: RunConfig, kind: Kind) -> bool:
    """Whether a station of the kind is on a device of the trainer, or on its cores, and works at the same time."""
    if config.launcher == "inline":
        return False
    placed = place(config)
    devices = {placed.seats[name].device for name in placed.names["trainer"]}
    return any(placed.seats[name].device in devices for name in placed.names[_NAMES[kind]])


def _with_units(
    station: StationProfile, units: Sequence[Unit], kind: Kind, left_out: list[str], config: RunConfig
) -> StationProfile:
    """The station with its handover, and if it is beside the trainer with its slow-down during updates."""
    beside = _is_beside_trainer(config, kind)
    quiet = [unit for unit in units if not unit.trains]
    busy = [unit for unit in units if unit.trains]
    if len(quiet) < _FEW:
        left_out.append(f"{kind}: its handover, as the run had {len(quiet)} units of its work without an update")
        return station
    # Only in one process waits for a core are known; elsewhere they are in the longer half of the times.
    counted = _COUNTED_INLINE if config.launcher == "inline" else _COUNTED
    longer = sorted(max(0.0, unit.seconds - unit.expected) for unit in quiet)
    handover = longer[: math.ceil(counted * len(longer))]
    works = {**station.works, "handover": Work(timings=(timing_of(0, handover),))}
    if not beside:
        return station.model_copy(update={"works": works})
    if len(busy) < _FEW:
        left_out.append(f"{kind}: beside the trainer, as the run had {len(busy)} units of its work in an update")
        return station.model_copy(update={"works": works})
    factor = median(x.seconds for x in busy) / max(1e-9, median(x.seconds for x in quiet))
    # Batches may be larger in one of the two.
    factor *= median(x.expected for x in quiet) / max(1e-9, median(x.expected for x in busy))
    factors = {**station.beside, "trainer": min(_MOST_BESIDE, max(1.0, factor))}
    return station.model_copy(update={"works": works, "beside": factors})


def _with_updates(profile: Profile, config: RunConfig, timer: UnitTimer, left_out: list[str]) -> StationProfile:
    """The trainer, at the level of its CPU time in the run, and its slow-down beside generators."""
    station, updates = profile.stations["trainer"], timer.updates
    if len(updates) <= _FEW:
        left_out.append(f"trainer: its level and slow-down in a run, as that had {len(updates)} updates")
        return station
    ranks, training = len(place(config).names["trainer"]), config.training
    alone, taken = list[float](), list[float]()
    for values, _ in updates[1:]:  # the first one warms up
        chunk_steps = values["env/sample_chunk_steps"] * training.batch_size / ranks
        done = values["train/actor/optimizer_steps"] * mini_batch(training, chunk_steps, ranks)[0] / chunk_steps
        alone.append(update_seconds(profile, training, chunk_steps, ranks=ranks, epochs=max(1, round(done))))
        taken.append(sum(values.get(name, 0.0) for name in _PHASES))
    spent = updates[-1][1] - updates[0][1]  # less than 0 if the process has ended meanwhile
    level = spent / max(1e-9, sum(alone)) if spent > 0 else 1.0
    works = {name: work.scaled(level) if name in _UPDATE else work for name, work in station.works.items()}
    station = station.model_copy(update={"works": works})
    if not _is_beside_trainer(config, "generator"):
        return station
    factor = median(taken) / max(1e-9, level * median(alone))
    beside = {**station.beside, "generator": min(_MOST_BESIDE, max(1.0, factor))}
    return station.model_copy(update={"beside": beside})


def seen_episodes(before: Episodes, samples: Sequence[records.SampleFinished]) -> Episodes:
    """Lengths of episodes in these samples, which may be segments; as before if none has ended."""
    whole = [sample for sample in samples if sample.end is not records.SampleEnd.SEGMENT]
    if not whole:
        return before
    mean = min(before.longest, sum(sample.chunk_steps for sample in samples) / len(whole))
    deviation = before.deviation * mean / before.mean
    if len(whole) == len(samples):
        deviation = pstdev(sample.chunk_steps for sample in samples)
    return before.model_copy(update={"mean": max(1.0, mean), "deviation": deviation})
