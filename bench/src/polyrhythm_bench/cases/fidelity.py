"""Accuracy of the simulated cluster: ten settings, each live and simulated, version by version.

Steps take times that follow from the seeds of their episodes, so both runs draw the same ones. A live stage takes
longer than it sleeps: messages, threads that wake, Python. How much longer is measured by the conductor's events,
between the same two versions of both runs:

    a pass (by rows), a step       as `plugins.planning.timers.UnitTimer` measures them
    a reset                        from `StartRows` to the slot's request
    an update, its publication     from `StartUpdate` to `UpdateDone`, from `PublishWeights` to `Published`
    loading a version              from `ApplyWeights` to `WeightsApplied`

The difference of the means, live less simulated, is then added to each of the simulated ones: the overhead is taken
from the very run that is compared. So what is compared is the order of work: what waits for what, and for how long. The
independent error is `neighbours`: with the overhead of the runs before and after, which are of other settings. Each
turn has a seed of its own.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression, median, stdev
from typing import Any, ClassVar

from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.plugins.planning.timers import UnitTimer
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import parse_cost
from polyrhythm.scheduler import records
from polyrhythm.specs.distributions import parse_distribution
from polyrhythm_bench.cases import overlap
from polyrhythm_bench.harness.running import running
from polyrhythm_bench.workloads import scene as scenes
from polyrhythm_bench.workloads.scene import NO_OVERHEAD, Mode, StageOverhead, StageScenario

log = logging.getLogger(__name__)

#: The largest difference that the design allows.
LIMIT = 0.05
#: The version whose publication begins what is timed.
_FIRST = 2
_USUAL = StageScenario()
_AT_ONCE = {"type": "dynamic", "max_rows": 64, "max_wait_ms": 0.0}


@dataclass(frozen=True, slots=True)
class FidelityCase:
    """A scene in one mode."""

    name: str
    scene: StageScenario = _USUAL
    mode: Mode = "full_async"
    batching: Mapping[str, Any] | None = None

    @property
    def batches(self) -> Mapping[str, Any]:
        return self.batching or overlap.batching(self.mode, _AT_ONCE)


SETTINGS: tuple[FidelityCase, ...] = (
    FidelityCase("lock-step", mode="lockstep"),
    FidelityCase("asynchronous rollout", mode="rollout_async"),
    FidelityCase("asynchronous training", mode="train_async"),
    FidelityCase("all asynchronous"),
    FidelityCase("two generators", StageScenario(generators=2, infer_latency="20ms+0.1ms")),
    FidelityCase("four rows", StageScenario(env_batches=8, rows=4, sim_latency="gamma:30ms:0.5")),
    FidelityCase("slow passes", StageScenario(infer_latency="40ms+1ms", env_batches=8)),
    FidelityCase("training limits", StageScenario(train_latency="constant:2500ms")),
    FidelityCase(
        "a wait of 5 ms", StageScenario(sim_latency="normal:20ms:10ms"), batching={**_AT_ONCE, "max_wait_ms": 5.0}
    ),
    FidelityCase("one step in ten long", StageScenario(sim_latency="mixture:0.9*lognormal:8ms:0.5+0.1*constant:60ms")),
)


def run(
    versions: int = 8, repeats: int = 3, only: Sequence[str] = (), settings: Sequence[FidelityCase] = SETTINGS
) -> dict[str, Any]:
    """Every setting (only: those of these names), simulated and live for so many versions at a time, in turns.

    Returns by setting, as medians over the turns, what `compare` does, and neighbours; errors_by_turn,
    neighbours_by_turn and standard_errors_by_turn; largest_error of all turns; within_limit. ConfigError: no such
    setting.
    """
    if unknown := set(only) - {setting.name for setting in settings}:
        names = ", ".join(setting.name for setting in settings)
        raise ConfigError(f"only = {', '.join(sorted(unknown))}: not a setting of fidelity; known are {names}")
    cases = [(case, case.scene.settled()) for case in settings if case.name in only or not only]
    turns = [(case, scene.of_turn(turn)) for turn in range(repeats) for case, scene in cases]
    found, overheads = list[dict[str, float]](), list[StageOverhead]()
    for case, scene in turns:
        timed, bare = live(case, scene, versions), simulated(case, scene, versions, NO_OVERHEAD)
        overheads.append(timed.overhead(bare))
        found.append(compare(scene, timed, simulated(case, scene, versions, overheads[-1]), bare, overheads[-1]))
        log.info("%s: %s", case.name, found[-1])
    for number, (case, scene) in enumerate(turns):
        near = overheads[max(0, number - 1) : number] + overheads[number + 1 : number + 2] or overheads
        others = simulated(case, scene, versions, StageOverhead(*map(fmean, zip(*near, strict=True))))
        found[number]["neighbours"] = scene.transitions / fmean(others.seconds) / found[number]["live"] - 1
    modes: dict[str, dict[str, Any]] = {}
    for case, _ in cases:
        own = [figures for figures, (other, _) in zip(found, turns, strict=True) if other is case]
        modes[case.name] = {figure: median(each[figure] for each in own) for figure in own[0]}
        modes[case.name]["errors_by_turn"] = [each["error"] for each in own]
        modes[case.name]["neighbours_by_turn"] = [each["neighbours"] for each in own]
        modes[case.name]["standard_errors_by_turn"] = [each["standard_error"] for each in own]
    largest = max(abs(each["error"]) for each in found)
    return {
        "versions": versions,
        "repeats": repeats,
        "largest_error": largest,
        "within_limit": largest <= LIMIT,
        "modes": modes,
    }


def live(case: FidelityCase, scene: StageScenario, versions: int) -> RunTimer:
    """The settled scene in real processes. RunHalted: a station was lost, so the time says nothing."""
    timer, totals = RunTimer(case, scene, versions), RunTotals()
    with running(scenes.live(scene, case.mode, case.batches, timer.target), validated=False) as pipeline:
        pipeline.loop.add_observers(timer, totals)
        pipeline.loop.train_until(timer.target)
    totals.refuse_faults()
    return timer


def simulated(case: FidelityCase, scene: StageScenario, versions: int, overhead: StageOverhead) -> RunTimer:
    """The settled scene on the virtual clock, for the same versions."""
    timer = RunTimer(case, scene, versions)
    machine = VirtualCluster(scenes.cluster(scene, case.mode, case.batches, timer.target, overhead))
    machine.driver.observer = timer.on_decision
    machine.run()
    return timer


def compare(
    scene: StageScenario, timed: RunTimer, expected: RunTimer, bare: RunTimer, overhead: StageOverhead
) -> dict[str, float]:
    """A live run beside its simulation, and beside `bare`, the simulation with nothing added.

    live, simulated: transitions per second; error, bare: simulated over live, less 1. standard_error: of `error`, by
    the spread of the versions' differences, 0 of one version. pass_ms and so on: the overhead.
    """
    took, model = fmean(timed.seconds), fmean(expected.seconds)
    differences = [own - other for own, other in zip(timed.seconds, expected.seconds, strict=True)]
    spread = stdev(differences) if len(differences) > 1 else 0.0
    return {
        "live": scene.transitions / took,
        "simulated": scene.transitions / model,
        "error": took / model - 1,
        "standard_error": spread / math.sqrt(len(differences)) / model,
        "bare": took / fmean(bare.seconds) - 1,
        **{f"{name.removesuffix('_s')}_ms": 1000 * seconds for name, seconds in overhead._asdict().items()},
    }


class RunTimer(Observer):
    """Times of a live or a simulated run, from the publication of version `_FIRST` to that of `versions` later."""

    hears: ClassVar = (*UnitTimer.hears, records.PublishWeights, records.ApplyWeights, records.WeightsApplied)

    def __init__(self, case: FidelityCase, scene: StageScenario, versions: int) -> None:
        step_s, self._infer = parse_distribution(scene.sim_latency).mean, parse_cost(scene.infer_latency)
        self.units = UnitTimer(lambda _: step_s, self._infer.mean)
        self._version, self._last = 0, _FIRST + versions
        self.target = self._last + math.ceil(scenes.freshness(scene, case.mode)["max_lag"])
        self._begun: dict[tuple[str, ...], float] = {}
        self._exchanges: defaultdict[str, list[float]] = defaultdict(list)

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        before = self._version
        if isinstance(event, records.Published):
            self._version = event.version
        if self._version < _FIRST or before >= self._last:
            return
        self.units.on_decision(now, event, commands)
        if (ended := _exchange(event)) in self._begun:
            self._exchanges[ended[0]].append(now - self._begun.pop(ended))
        self._begun |= {exchange: now for exchange in map(_exchange, commands) if exchange}

    @property
    def seconds(self) -> list[float]:
        """Of each version."""
        return [after - before for (before, _), (after, _) in pairwise(self.units.published)]

    def overhead(self, bare: RunTimer) -> StageOverhead:
        """What this run's work took longer than that of `bare`, in the mean."""
        return StageOverhead(*(own - other for own, other in zip(self._means(), bare._means(), strict=True)))

    def _means(self) -> StageOverhead:
        """Of passes the least-squares line over what they sleep, unless that is always the same."""
        passes, base = self.units.passes, self._infer.base.mean
        slept, longer = [unit.expected for unit in passes], [unit.seconds - unit.expected for unit in passes]
        # Where samples begin, a step takes that besides; with episodes of one chunk step they always do.
        steps = [unit for unit in self.units.steps if not unit.samples] or self.units.steps
        slope = linear_regression(slept, longer).slope if max(slept) - min(slept) > self._infer.per_unit / 2 else 0.0
        return StageOverhead(
            pass_s=fmean(longer) - slope * (fmean(slept) - base),
            row_s=slope * self._infer.per_unit,
            step_s=fmean(unit.seconds - unit.expected for unit in steps),
            **{name: fmean(own) for name, own in self._exchanges.items()},
        )


def _exchange(record: records.Event | records.Command) -> tuple[str, ...]:
    """The exchange that a command begins or an event ends: the name of its overhead, and its own; or nothing."""
    match record:
        case records.StartRows(slot=slot) | records.RequestArrived(slot=slot):
            return "reset_s", slot
        case records.StartUpdate(update=number) | records.UpdateDone(update=number):
            return "update_s", str(number)
        case records.PublishWeights(version=number) | records.Published(version=number):
            return "publish_s", str(number)
        case records.ApplyWeights(name, number) | records.WeightsApplied(name, _, number):
            return "apply_s", name, str(number)
    return ()
