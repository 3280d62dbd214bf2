"""Measures the stations together, in a short run of the recipe: what each unit of work takes longer than alone.

    passes, steps    `timers`
    an update        its phases by the trainer's own account, and its CPU time

What a pass and a step take longer is the handover: messages, threads that wake, the main process, waits for a core
(inline these are known, and left out). What they take longer still by each sample that begins is the sample's: its end,
its ticket, its row's first observation. Their sum over the run is what was measured, so what no part explains is in
them too. On a device both are measured while no update is under way; the factor by which units take longer during
updates is their slow-down beside the trainer. On a CPU an update's CPU time sets the level of the trainer's works: in a
run its caches are cold.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import median, pstdev

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.placed import Kind as PlacedKind
from polyrhythm.pipeline.placed import place
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.plugins.hardware.processor import others_cores, read_cpu
from polyrhythm.plugins.planning.costs import mini_batch, update_seconds
from polyrhythm.plugins.planning.profile import Episodes, Kind, Profile, StationProfile, Work, WorkName
from polyrhythm.plugins.planning.timers import Rounds, Unit, UnitTimer, longer_than_alone
from polyrhythm.plugins.planning.timing import core_wait_s, timing_of
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.hosting import Hosting, process_ids
from polyrhythm.runtime.messages import TRAINER
from polyrhythm.scheduler import records

#: Measurements below which nothing is said about their mean.
_FEW = 5
#: Largest factor of a slow-down; more is another fault.
_MOST_BESIDE = 4.0
#: Seconds that a run gets at least, once it has started.
_LEAST_S = 4.0
#: The kinds' names in `Placed.names`.
_NAMES: Mapping[Kind, PlacedKind] = {"simulator": "simulators", "generator": "generators"}
#: Works of which an update and its publication consist.
_UPDATE: tuple[WorkName, ...] = ("prepare", "micro_batch", "optimizer_step", "stage")
#: Phases of an update in its report.
_PHASES = tuple(f"time/actor/{name}" for name in ("collate", "targets", "proximal", "passes", "step"))


def unit_timer(profile: Profile) -> UnitTimer:
    """A timer that expects what the stations took alone."""
    simulator, passes = profile.stations["simulator"].works, profile.stations["generator"].works.get("pass")
    return UnitTimer(simulator["step"].seconds, passes.seconds if passes else None, _reset(profile))


def _reset(profile: Profile) -> Callable[[int], float]:
    resets = profile.stations["simulator"].works.get("reset")
    return resets.seconds if resets else lambda _: 0.0


def _rounds(profile: Profile, timer: UnitTimer, hosting: Hosting) -> Rounds | None:
    """The measurement of one thread, if it has passes."""
    if timer.pass_s is None:
        return None

    def busy() -> tuple[float, float]:
        seconds = {name: counts["busy_s"] for name, counts in hosting.statistics().items()}
        return seconds.get(TRAINER, 0.0), sum(seconds.values())

    apply = profile.stations["generator"].works.get("apply")
    apply_s = apply.seconds(profile.weights) if apply else 0.0
    return Rounds(timer.step_s, timer.pass_s, timer.reset_s, apply_s, busy, timer.waited)


def measure_together(config: RunConfig, profile: Profile, end: float) -> Profile:
    """The profile with what a run of the recipe adds to it. end: by `time.monotonic`, of the run. Left out is said.

    The run trains from weights of the seed, without evaluation. StartError, RunHalted: as of any run.
    """
    timer = unit_timer(profile)
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
        hosting = pipeline.launcher.hosting
        if config.launcher == "inline":
            # A wait for a core is one of all stations, and the timer works in their thread.
            timer.waited = lambda: core_wait_s() + timer.own_s
            if (rounds := _rounds(profile, timer, hosting)) is not None:
                timer.rounds, timer.trainer_s = rounds, lambda: rounds.trained_s
        elif (pid := process_ids(hosting).get(TRAINER)) and _computes_on_one_core(config):
            timer.trainer_s = partial(_cpu_s, pid)
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
    left_out, stations = list(profile.left_out), dict(profile.stations)
    units: dict[Kind, Sequence[Unit]] = {"simulator": timer.steps, "generator": timer.passes}
    if timer.rounds is not None:
        units = dict.fromkeys(units, timer.rounds.found)
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
    """The station with its handover, a simulator with what a sample takes, and if it is beside the trainer with its
    slow-down during updates."""
    beside = _is_beside_trainer(config, kind)
    quiet, busy = ([unit for unit in units if unit.trains is trains] for trains in (False, True))
    counted = quiet if beside and station.device != CPU else units  # cores have no other simulated slow-down
    if len(counted) < _FEW:
        when = " without an update" if counted is quiet else ""
        left_out.append(f"{kind}: its handover, as the run had {len(counted)} units of its work{when}")
        return station
    longer = longer_than_alone(counted)
    works = {**station.works, "handover": Work(timings=(timing_of(0, [longer.unit_s]),))}
    if kind == "simulator":
        works["sample"] = Work(timings=(timing_of(1, [longer.sample_s]),))
    if not beside:
        return station.model_copy(update={"works": works})
    if min(len(busy), len(quiet)) < _FEW:
        found = f"{len(busy)} units of its work in an update, {len(quiet)} without"
        left_out.append(f"{kind}: beside the trainer, as the run had {found}")
        return station.model_copy(update={"works": works})
    factor = median(x.seconds for x in busy) / max(1e-9, median(x.seconds for x in quiet))
    # Batches may be larger in one of the two.
    factor *= median(x.expected for x in quiet) / max(1e-9, median(x.expected for x in busy))
    factors = {**station.beside, "trainer": min(_MOST_BESIDE, max(1.0, factor))}
    return station.model_copy(update={"works": works, "beside": factors})


def _with_updates(profile: Profile, config: RunConfig, timer: UnitTimer, left_out: list[str]) -> StationProfile:
    """The trainer, at the level of its own time in the run, with its handover and its slow-down beside generators."""
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
    stage = station.works["stage"].seconds(profile.weights) if "stage" in station.works else 0.0
    published = len(alone) / config.freshness.sync_interval
    spent = updates[-1][1] - updates[0][1]  # less than 0 if the process has ended meanwhile
    level = spent / max(1e-9, sum(alone) + stage * published) if spent > 0 else 1.0
    works = {name: work.scaled(level) if name in _UPDATE else work for name, work in station.works.items()}
    if config.launcher != "inline" and timer.update_s:  # in one process other stations work meanwhile
        handover = max(0.0, median(timer.update_s) - median(taken))
        works["handover"] = Work(timings=(timing_of(0, [handover]),))
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
