"""Runs turns of Polyrhythm and the plain loop: fully asynchronous on the sleeping workload, inline on the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.scheduler import records
from polyrhythm_bench.cases import throughput
from polyrhythm_bench.harness.plain_loop import PlainLoop
from polyrhythm_bench.harness.running import running
from polyrhythm_bench.peers.turn import Meter, Work, main
from polyrhythm_bench.peers.workload import Sleeping
from polyrhythm_bench.workloads import scene as scenes
from polyrhythm_bench.workloads.scene import StageScenario

_NEVER = 1_000_000
#: Ways to run: stations in separate processes, stations in one process, or the plain loop without stations.
WAYS = ("local", "inline", "plain")


def as_scene(work: Sleeping) -> StageScenario:
    """The same times as a scenario of `bench overlap`."""
    return StageScenario(
        env_batches=work.envs,
        sim_latency=f"lognormal:{1e3 * work.step_s:g}ms:{work.sigma:g}",
        infer_latency=f"{1e3 * work.act_s:g}ms+{1e3 * work.act_row_s:g}ms",
        train_latency=f"constant:{1e3 * work.train_s:.3f}ms",
        episode_steps=work.episode_steps,
        max_lag=work.max_lag,
    )


def run(work: Work, meter: Meter, choice: dict[str, Any]) -> dict[str, Any]:
    """Run a turn and return its settings. choice: `way`, one of WAYS; `batching` for the sleeping workload."""
    way = choice["way"]
    if not isinstance(work, Sleeping):
        with getattr(throughput, way)(work.rows) as answer:
            answer(updates=meter.warm_up)
            meter.figures = answer(updates=meter.updates)
        return {"way": way}
    if way == "plain":
        loop = PlainLoop(validate_run(plain_config(work)))
        while not meter.over:
            loop.update()
            meter.updated()
        return {"way": way}
    _sleeping(as_scene(work), meter, choice["batching"])
    return {"way": way, **choice["batching"]}


def plain_config(work: Sleeping) -> RunConfig:
    """The configuration of the plain loop, with the same times for a batch of all rows."""
    scene = as_scene(work)
    tree = scenes.live(scene, "lockstep", {"type": "lockstep"}, _NEVER).model_dump(mode="json")
    tree["launcher"] = "inline"
    tree["rollout"].update(simulators=1, env_batches=1, rows=work.envs)
    tree["env"] = {
        "type": "polyrhythm_bench.peers.slowest_env:SlowestSettings",
        "episode_steps": work.episode_steps,
        "step_time": scene.sim_latency,
    }
    return validate(tree)


def _sleeping(scene: StageScenario, meter: Meter, batching: dict[str, Any]) -> None:
    last = meter.total + math.ceil(scene.max_lag)  # the last versions train on samples that exist already
    tree = scenes.live(scene, "full_async", batching, last).model_dump(mode="json")
    tree["checkpoint"]["every_versions"] = _NEVER
    totals = RunTotals()
    with running(validate(tree)) as pipeline:
        pipeline.loop.add_observers(totals, TransitionCount(meter))
        pipeline.loop.train_until(last)
    totals.refuse_faults()


class TransitionCount(Observer):
    """An observer that reports an update to the meter when its version is published."""

    hears: ClassVar[tuple[type, ...]] = (records.Published,)

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.Published) and not self._meter.over:
            self._meter.updated()


if __name__ == "__main__":
    main(run, ("torch", "numpy"))
