"""Accuracy of the simulated cluster: ten settings, each live and simulated.

A live stage takes longer than its configured time: messages, threads that wake, Python. How much longer is
measured in live runs of a scene that is none of the ten, by the conductor's events:

    a pass       from the command `Serve` to `BatchDone`
    a step       from `BatchDone` to the slot's next request

minus the mean of its distribution, over all steps but those that begin an episode. A setting is then simulated with the
mean of these two numbers before and after its own live run, since a machine is not always equally fast, in a scene
whose passes cost what the setting's do, since cores that have slept longer wake later. Each turn has a seed of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, ClassVar

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.plugins.virtual.clustersim.costs import parse_cost
from polyrhythm.scheduler import records
from polyrhythm.specs.distributions import parse_distribution
from polyrhythm_bench.cases import overlap
from polyrhythm_bench.harness.running import running
from polyrhythm_bench.harness.version_cost import measure
from polyrhythm_bench.workloads import scene as scenes
from polyrhythm_bench.workloads.scene import Mode, StageOverhead, StageScenario

log = logging.getLogger(__name__)

#: The largest difference that the design allows.
LIMIT = 0.05
_USUAL = StageScenario()
_AT_ONCE = {"type": "dynamic", "max_rows": 64, "max_wait_ms": 0.0}
#: Where what is added is measured: steps of little spread, so that their mean is known well; and for how many versions.
#: Passes cost what the setting's do.
_CALIBRATION = StageScenario(sim_latency="gamma:10ms:0.5")
_VERSIONS = 8


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
    FidelityCase("four rows, gamma steps", StageScenario(env_batches=8, rows=4, sim_latency="gamma:30ms:0.5")),
    FidelityCase("slow passes", StageScenario(infer_latency="40ms+1ms", env_batches=8)),
    FidelityCase("training limits", StageScenario(train_latency="constant:2500ms")),
    FidelityCase(
        "a wait of 5 ms", StageScenario(sim_latency="normal:20ms:10ms"), batching={**_AT_ONCE, "max_wait_ms": 5.0}
    ),
    FidelityCase("one step in ten long", StageScenario(sim_latency="mixture:0.9*lognormal:8ms:0.5+0.1*constant:60ms")),
)


def run(versions: int = 8, repeats: int = 3, settings: Sequence[FidelityCase] = SETTINGS) -> dict[str, Any]:
    """Every setting, simulated and live for so many versions at a time, in turns.

    Returns by setting, as medians over the turns: `live` and `simulated` in transitions per second, `error` (simulated
    over live, less 1), `bare` (simulated with nothing added, over live, less 1), pass_ms and step_ms (what a live stage
    took longer about then), and errors_by_turn; largest_error, of the medians; within_limit.
    """
    settings = [replace(setting, scene=setting.scene.settled()) for setting in settings]
    bare = {each.name: scenes.simulated(each.scene, each.mode, each.batches) for each in settings}
    turns: dict[str, list[dict[str, float]]] = {setting.name: [] for setting in settings}
    known: tuple[StageScenario, StageOverhead] | None = None
    for turn in range(repeats):
        for usual in settings:
            setting = replace(usual, scene=usual.scene.of_turn(turn))
            scene = _CALIBRATION.model_copy(update={"infer_latency": setting.scene.infer_latency})
            before = known[1] if known and known[0] == scene else calibrate(scene)
            rate = live(setting, versions)
            after = calibrate(scene)
            overhead = StageOverhead(*map(fmean, zip(before, after, strict=True)))
            found = compare(setting, rate, overhead, bare[setting.name])
            turns[setting.name].append(found)
            log.info("turn %d, %s: %s", turn + 1, setting.name, found)
            known = (scene, after)
    modes: dict[str, dict[str, Any]] = {}
    for name, own in turns.items():
        modes[name] = {figure: median(each[figure] for each in own) for figure in own[0]}
        modes[name]["errors_by_turn"] = [each["error"] for each in own]
    largest = max(abs(found["error"]) for found in modes.values())
    return {
        "versions": versions,
        "repeats": repeats,
        "largest_error": largest,
        "within_limit": largest <= LIMIT,
        "modes": modes,
    }


def live(setting: FidelityCase, versions: int) -> float:
    """Transitions per second of the setting, its scene settled, in real processes."""
    cost = measure(scenes.live(setting.scene, setting.mode, setting.batches, versions), versions)
    return setting.scene.transitions / cost.seconds_per_version


def compare(setting: FidelityCase, rate: float, overhead: StageOverhead, bare: float) -> dict[str, float]:
    """The setting, its scene settled, simulated with `overhead`, beside the `rate` of its live run. bare: simulated
    without."""
    expected = scenes.simulated(setting.scene, setting.mode, setting.batches, overhead)
    return {
        "live": rate,
        "simulated": expected,
        "error": expected / rate - 1,
        "bare": bare / rate - 1,
        "pass_ms": 1000 * overhead.pass_s,
        "step_ms": 1000 * overhead.step_s,
    }


def calibrate(scene: StageScenario) -> StageOverhead:
    """What a pass and a step of the scene take longer in a live run, fully asynchronous."""
    scene = scene.settled()
    stopwatch = Stopwatch()
    with running(scenes.live(scene, "full_async", _AT_ONCE, _VERSIONS)) as pipeline:
        pipeline.loop.add_observers(stopwatch)
        pipeline.loop.train_until(_VERSIONS)
    infer, step = parse_cost(scene.infer_latency), parse_distribution(scene.sim_latency)
    longer = fmean(seconds - infer.mean(rows) for seconds, rows in stopwatch.passes)
    return StageOverhead(longer, fmean(stopwatch.steps) - step.mean)


class Stopwatch(Observer):
    """An observer. passes: seconds and rows of each; steps: seconds of each that did not begin an episode."""

    hears: ClassVar[tuple[type, ...]] = (
        records.BatchDone,
        records.RequestArrived,
        records.Serve,
        records.StartRows,
    )

    def __init__(self) -> None:
        self.passes: list[tuple[float, int]] = []
        self.steps: list[float] = []
        self._served: dict[int, tuple[float, records.Batch]] = {}
        self._answered: dict[str, float] = {}

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        if isinstance(event, records.BatchDone):
            begin, batch = self._served.pop(event.batch)
            self.passes.append((now - begin, sum(request.rows for request in batch.requests)))
            self._answered |= {request.slot: now for request in batch.requests}
        elif isinstance(event, records.RequestArrived) and event.slot in self._answered:
            self.steps.append(now - self._answered.pop(event.slot))
        for command in commands:
            if isinstance(command, records.Serve):
                self._served[command.batch.number] = (now, command.batch)
            elif isinstance(command, records.StartRows):
                self._answered.pop(command.slot, None)
