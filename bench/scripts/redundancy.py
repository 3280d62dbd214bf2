"""Measures seconds per update with redundant groups and members where environments slow down or hang.

    python bench/scripts/redundancy.py [--updates 8] [--seeds 1] [--out bench/results/redundancy.md]
    python bench/scripts/redundancy.py --live [--updates 3] [--second 20ms] [--out bench/results/redundancy_live.md]

The scene of ROLL Flash 5.2.2: 256 samples an update, 32 groups of 8, every environment on its own, the latency of an
env step normal(10 s, 5 s), on-policy (max_lag 0, drain), the trainer free, so an update lasts as long as its rollout.
"36×9" means that up to 36 groups of up to 9 run, in 324 environments, and the first 32 groups that have 8 finished
members win: `extra_groups` 4, `extra_members` 1. The source says neither how long its episodes are nor how its
environments fail; here an episode has 10 steps, and

- healthy: nothing fails;
- fail-slow: one step in 500 takes 400 s (so 2% of the episodes take five times as long);
- fail-stop: one step in 1,000 hangs for 1,200 s (1% of the episodes); after 300 s the ticket is revoked and reissued to
  another row.

Live, the same on the `latency` environment with every second shortened to `--second`, in processes of this machine: the
conductor, messages and weights are real, only the environments sleep. The first update is left out (it includes the
start). As simulated, slowness is independent of the initial state: members of a group share one but slow down
independently.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import TrainUntil
from polyrhythm.specs.distributions import parse_duration
from polyrhythm_bench.harness.markdown import wrap_prose

#: Folder of the tables.
RESULTS = Path(__file__).parents[1] / "results"

GROUPS, SIZE = 32, 8
STEPS = 10
SHAPES = ((32, 8), (36, 8), (40, 8), (32, 9), (32, 10), (36, 9), (36, 12))
LIVE_SHAPES = ((32, 8), (36, 8), (32, 9), (36, 9))
#: Columns of the grid.
GRID = ((32, 36, 40), (8, 9, 10, 12))


@dataclass(frozen=True)
class Scene:
    """A kind of failure. step_time: distribution of an env step, given the length of a second; deadline: seconds after
    which an episode is reissued."""

    name: str
    step_time: Callable[[str], str]
    deadline: float = 100_000.0


def _times(unit: str, factor: float) -> str:
    """`factor` units as a duration in milliseconds."""
    return f"{parse_duration(unit) * 1000 * factor:.3f}ms"


def _step(unit: str) -> str:
    return f"normal:{_times(unit, 10)}:{_times(unit, 5)}"


SCENES = (
    Scene("healthy", _step),
    Scene("fail-slow", lambda unit: f"mixture:0.998*{_step(unit)}+0.002*constant:{_times(unit, 400)}"),
    Scene("fail-stop", lambda unit: f"mixture:0.999*{_step(unit)}+0.001*constant:{_times(unit, 1200)}", 300.0),
)


@dataclass(frozen=True)
class Outcome:
    """update_s: seconds per update; surplus: redundant samples thrown away per sample trained; selection: the
    conductor's account of trained against thrown away."""

    update_s: float
    surplus: float
    selection: dict[str, Any]


def shape_settings(groups: int, size: int) -> dict[str, int]:
    """The scheduler settings of one shape."""
    return {"group_size": SIZE, "extra_groups": groups - GROUPS, "extra_members": size - SIZE}


def outcome(seconds: float, updates: int, conductor: AnyConductor) -> Outcome:
    ledger = conductor.ledger
    surplus = ledger.dropped.get("surplus", 0) / max(1, ledger.trained)
    return Outcome(seconds / updates, surplus, conductor.rollout.summary().get("selection", {}))


@functools.cache
def simulated(scene: Scene, groups: int, size: int, updates: int, seed: int, max_lag: float = 0.0) -> Outcome:
    """The outcome on the virtual clock; forward passes take no time, so only environments do."""
    settings = ClusterSettings.model_validate(
        {
            "seed": seed,
            "versions": updates,
            "scheduler": {
                "batch_size": GROUPS * SIZE,
                "max_lag": max_lag,
                "on_update": "continue" if max_lag else "drain",
                "max_rows": 1,
                "max_wait_s": 0.0,
                "episode_deadline_s": scene.deadline,
                "max_attempts": 100,
                "seed": seed,
                **shape_settings(groups, size),
            },
            "simulators": [{"env_batches": groups * size, "step": scene.step_time("1s"), "steps": STEPS}],
            "generators": [{}],
            "trainer": {"update": "100s" if max_lag else "0s"},
        }
    )
    conductor = build_conductor(settings.scheduler)
    driver = VirtualCluster(settings, conductor).driver
    driver.submit(TrainUntil(updates))
    driver.run(updates)
    return outcome(driver.clock.now, updates, conductor)


def live(scene: Scene, groups: int, size: int, updates: int, second: str) -> Outcome:
    """The outcome in processes of this machine."""
    from polyrhythm.config.load import validate  # only this part needs torch
    from polyrhythm.pipeline.build import build_pipeline
    from polyrhythm.pipeline.context import RunContext

    config = validate(
        {
            "name": "redundancy",
            "env": {
                "type": "latency",
                "episode_steps": STEPS,
                "step_time": scene.step_time(second),
                "times_by": "chance",
                "observation_shape": [4],
                "action_dim": 2,
            },
            "policy": {"type": "gaussian"},
            "rollout": {
                "env_batches": groups * size,
                "rows": 1,
                "episode_deadline_s": scene.deadline * parse_duration(second),
                "max_attempts": 100,
            },
            "batching": {"type": "dynamic", "max_rows": 256, "max_wait_ms": 5},
            "freshness": {"max_lag": 0, "on_update": "drain"},
            "groups": {"size": SIZE, "extra_groups": groups - GROUPS, "extra_members": size - SIZE},
            "training": {
                "versions": updates + 1,
                "mini_batch_samples": GROUPS * SIZE,
                "epochs": 1,
                "minibatch_steps": 0,
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        pipeline = build_pipeline(RunContext(config, folder=Path(folder)))
        try:
            pipeline.loop.train_until(1)
            began = time.monotonic()
            pipeline.loop.train_until(updates + 1)
            seconds = (time.monotonic() - began) / parse_duration(second)
        finally:
            pipeline.launcher.close()
    return outcome(seconds, updates, pipeline.loop.conductor)


# ---------------------------------------------------------------- tables


def _mean(outcomes: list[Outcome]) -> tuple[float, float]:
    return statistics.fmean(o.update_s for o in outcomes), statistics.fmean(o.surplus for o in outcomes)


def shapes_table(run: Callable[[Scene, int, int], list[Outcome]], shapes: tuple[tuple[int, int], ...]) -> list[str]:
    """Markdown table of seconds per update, gain over the first shape and discarded share, by scene and shape."""
    lines = [
        "| groups × members | environments | " + " | ".join(scene.name for scene in SCENES) + " |",
        "|---|---|" + "---|" * len(SCENES),
    ]
    base: dict[str, float] = {}
    for groups, size in shapes:
        cells = []
        for scene in SCENES:
            update_s, surplus = _mean(run(scene, groups, size))
            gain = base.setdefault(scene.name, update_s) / update_s
            cells.append(f"{update_s:.0f} s, {gain:.2f}×, {surplus:.0%}")
        lines.append(f"| {groups}×{size} | {groups * size} | {' | '.join(cells)} |")
    return lines


def grid_table(scene: Scene, updates: int, seeds: int) -> list[str]:
    """Markdown table of the gain over 32×8 by number of groups and members."""
    rows, columns = GRID
    lines = [
        f"| {scene.name} | " + " | ".join(f"{size} members" for size in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    base = 0.0
    for groups in rows:
        found = [_mean([simulated(scene, groups, size, updates, seed) for seed in range(seeds)])[0] for size in columns]
        base = base or found[0]
        lines.append(f"| {groups} groups | " + " | ".join(f"{base / update_s:.2f}×" for update_s in found) + " |")
    return lines


def asynchronous_table(updates: int, seeds: int) -> list[str]:
    """Markdown table of the shapes with max_lag 1 and a trainer that takes 100 s an update."""
    lines = ["| max_lag 1 | " + " | ".join(scene.name for scene in SCENES) + " |", "|---|" + "---|" * len(SCENES)]
    base: dict[str, float] = {}
    for groups, size in ((32, 8), (36, 8), (36, 9)):
        cells = []
        for scene in SCENES:
            update_s, _ = _mean([simulated(scene, groups, size, updates, seed, 1.0) for seed in range(seeds)])
            cells.append(f"{update_s:.0f} s, {base.setdefault(scene.name, update_s) / update_s:.2f}×")
        lines.append(f"| {groups}×{size} | {' | '.join(cells)} |")
    return lines


def selection_lines(scene: Scene, found: Outcome) -> list[str]:
    """A Markdown list item: samples that were trained, released and cancelled."""
    selection = found.selection
    trained, released, cancelled = (selection[fate] for fate in ("trained", "released", "cancelled"))
    fates = (
        f"trained {trained['samples']:.0f} samples, {trained['seconds']:.0f} s each",
        f"released although finished {released['samples']:.0f}, {released['seconds']:.0f} s each",
        f"cancelled {cancelled['samples']:.0f}, which had run for {cancelled['seconds']:.0f} s by then",
    )
    return [f"- {scene.name}: {'; '.join(fates)}"]


def simulated_page(updates: int, seeds: int) -> list[str]:
    def run(scene: Scene, groups: int, size: int) -> list[Outcome]:
        return [simulated(scene, groups, size, updates, seed) for seed in range(seeds)]

    slow = SCENES[1]
    return [
        "# Redundant groups and members, simulated",
        "",
        f"`python bench/scripts/redundancy.py --updates {updates} --seeds {seeds}`, {_today()}; means over the seeds.",
        "",
        "Seconds per update, gain over 32×8, redundant samples thrown away per sample trained:",
        "",
        *shapes_table(run, SHAPES),
        "",
        "Gain over 32×8 by both:",
        "",
        *grid_table(slow, updates, seeds),
        "",
        "Asynchronous (a trainer that takes 100 s an update and may be one version ahead):",
        "",
        *asynchronous_table(updates, seeds),
        "",
        "Selection, 36×9, seconds from the grant to the end (of cancelled ones: until then, they needed longer):",
        "",
        *(line for scene in SCENES for line in selection_lines(scene, simulated(scene, 36, 9, updates, 0))),
    ]


def live_page(updates: int, second: str) -> list[str]:
    def run(scene: Scene, groups: int, size: int) -> list[Outcome]:
        return [live(scene, groups, size, updates, second)]

    command = f"python bench/scripts/redundancy.py --live --updates {updates} --second {second}"
    return [
        "# Redundant groups and members, live",
        "",
        f"`{command}`, {_today()}; one run a cell.",
        "",
        f"Seconds (each {second} of real time) per update, gain over 32×8, samples thrown away per sample trained:",
        "",
        *shapes_table(run, LIVE_SHAPES),
    ]


def _today() -> str:
    return str(dt.datetime.now(tz=dt.UTC).date())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", action="store_true", help="real processes; a few minutes")
    parser.add_argument("--updates", type=int, default=0, help="updates per run: 8 simulated, 3 live unless given")
    parser.add_argument("--seeds", type=int, default=1, help="simulated runs per cell")
    parser.add_argument("--second", default="20ms", help="real length of a second of the scene")
    parser.add_argument("--out", type=Path, help="path of the page (bench/results)")
    arguments = parser.parse_args()
    if arguments.live:
        lines = live_page(arguments.updates or 3, arguments.second)
    else:
        lines = simulated_page(arguments.updates or 8, arguments.seeds)
    name = "redundancy_live.md" if arguments.live else "redundancy.md"
    out = arguments.out or RESULTS / name
    text = wrap_prose("\n".join(lines))
    out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
