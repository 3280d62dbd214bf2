"""One run of a placement scene, in processes or on the simulated cluster, and the lines before its devices."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.scheduler import records
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.running import running
from polyrhythm_bench.workloads import placement_scene as scenes
from polyrhythm_bench.workloads.device_lock import TurnRecord, read_turns
from polyrhythm_bench.workloads.placement_scene import MAX_LAG, PlacementScene


class Versions(NamedTuple):
    """Versions of a run: left out at the start, counted, left out at the end. Where training may lag, rollout runs
    ahead at first and stops before the end."""

    before: int
    counted: int
    after: int

    @property
    def total(self) -> int:
        return self.before + self.counted + self.after

    @property
    def last(self) -> int:
        """The last that is counted."""
        return self.before + self.counted


@dataclass(frozen=True, slots=True)
class CountedPart:
    """The counted part of a run. seconds: its length; rate: transitions per second at the published size; busy: mean
    share of the time in which a device was held; others_cores: of everything else on the machine in the whole run;
    turns: those that ended in it (the last two for processes only)."""

    seconds: float
    rate: float
    busy: float
    others_cores: float = 0.0
    turns: Sequence[TurnRecord] = ()


def choose_versions(scene: PlacementScene, seconds: float) -> Versions:
    """As many as are counted in about so many scaled seconds, by the simulated cluster."""
    before, after = (2, MAX_LAG) if scene.row.mode == "full" else (1, 0)
    one = simulated(scene, Versions(before, 3, after)).seconds / 3
    return Versions(before, max(1, ceil(seconds / one)), after)


def simulated(scene: PlacementScene, versions: Versions) -> CountedPart:
    """The scene on the simulated cluster."""
    machine = VirtualCluster(scenes.cluster(scene, versions.total))
    clock = UpdateClock()
    busy = [0.0]

    def note(now: float, event: records.Event, commands: list[records.Command]) -> None:
        clock.on_decision(now, event, commands)
        if isinstance(event, records.UpdateDone):
            for device in machine.devices.values():
                device.flush()
            busy.append(fmean(device.busy for device in machine.devices.values()))

    machine.driver.observer = note
    machine.run()
    first, last = versions.before * scene.episodes, versions.last * scene.episodes
    seconds = clock.ends[last] - clock.ends[first]
    return CountedPart(seconds, scene.rate(last - first, seconds), (busy[last] - busy[first]) / seconds)


def live(scene: PlacementScene, versions: Versions) -> CountedPart:
    """The scene in processes. Errors are those of `build_pipeline`; RunHalted: a station was lost."""
    clock = UpdateClock()
    with tempfile.TemporaryDirectory(prefix="polyrhythm-devices-") as folder:
        # Not validated: a trial pass in this process would have no station, and so no device.
        with running(scenes.live(scene, versions.total, Path(folder)), validated=False) as pipeline:
            pipeline.loop.add_observers(clock)
            before = resources.read_cpu()
            pipeline.loop.train_until(versions.total)
            others = resources.others_cores(before, resources.read_cpu())
        turns = read_turns(Path(folder))
    first, last = versions.before * scene.episodes, versions.last * scene.episodes
    begin, end = clock.ends[first], clock.ends[last]
    turns = [turn for turn in turns if begin <= turn.ended <= end]
    held = sum(turn.ended - turn.began for turn in turns) / len(scene.devices)
    return CountedPart(end - begin, scene.rate(last - first, end - begin), held / (end - begin), others, turns)


def summarise_turns(runs: Sequence[Sequence[TurnRecord]]) -> dict[str, Any]:
    """The order and exclusion of all runs' turns. turns: their number; out_of_order: that began before one that had
    asked earlier; overlapping: that began before the one before them had ended, of which there must be none;
    handover_ms: mean from the end of a turn to the beginning of the next, where that was waiting."""
    out_of_order = overlapping = 0
    handovers: list[float] = []
    for turns in runs:
        for number in {turn.device for turn in turns}:
            own = sorted((turn for turn in turns if turn.device == number), key=lambda turn: turn.began)
            for previous, turn in itertools.pairwise(own):
                out_of_order += turn.asked < previous.asked
                overlapping += turn.began < previous.ended
                if turn.asked < previous.ended:
                    handovers.append(turn.began - previous.ended)
    return {
        "turns": sum(map(len, runs)),
        "out_of_order": out_of_order,
        "overlapping": overlapping,
        "handover_ms": 1000 * fmean(handovers) if handovers else 0.0,
    }


class UpdateClock(Observer):
    """An observer. ends: when each update was done, in seconds; ends[0] is 0."""

    hears: ClassVar[tuple[type, ...]] = (records.UpdateDone,)

    def __init__(self) -> None:
        self.ends = [0.0]

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.UpdateDone):
            self.ends.append(now)
