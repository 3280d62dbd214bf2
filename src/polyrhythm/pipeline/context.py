"""What a run is built from, what a launcher hosts, and what plugins add to a run's stations (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.observers.metrics import check_metrics
from polyrhythm.pipeline.persistence.checkpoints import SavedRun
from polyrhythm.plugin import load
from polyrhythm.policies.base import Policy
from polyrhythm.runtime.factories import NOBODY_JOINS, Joining, StationFactory, StationList
from polyrhythm.runtime.launcher import Launcher, build_inline_launcher, build_local_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.scheduler.records import EnvBatchInfo
from polyrhythm.specs import EnvSpec, WeightsLayout
from polyrhythm.stations.simulator.slot import StepSettings


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a launcher hosts.

    stations: the factory and the seats of each, in the order in which they start; layout: of the arena; weights: of
    the published ones; logs: folder for the stations' logs, None if the run has no folder; joining: the stations that
    somebody has yet to join. check_report raises ValueError for metrics that the observers do not know.
    """

    config: RunConfig
    stations: StationList
    layout: ArenaLayout
    weights: WeightsLayout
    logs: Path | None
    joining: Joining = NOBODY_JOINS
    check_report: Callable[[Mapping[str, float]], None] = check_metrics


#: Builds the launcher of a run; a plugin adds one under kind `launcher`, and a recipe names it.
Launch = Callable[[LaunchPlan], Launcher]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run is built from. The configuration has passed `pipeline.validation.check`.

    initial: the first weights, published as `version`, instead of those of the seed; with a trainer a policy file,
    which the trainer reads and publishes. folder: for logs and the trainer's states; any launcher but inline needs one.
    saved: the run to resume. trainer: whether there is one. launch: in place of the launcher that `config` names.
    """

    config: RunConfig
    initial: Policy | Path | None = None
    folder: Path | None = None
    saved: SavedRun | None = None
    version: int = 0
    trainer: bool = True
    launch: Launch | None = None


@dataclass(frozen=True, slots=True)
class StationPlan:
    """What a plugin's stations are made for. infos: the env batches of each simulator; step: how slots step."""

    context: RunContext
    spec: EnvSpec
    infos: Sequence[Sequence[EnvBatchInfo]]
    step: StepSettings


@dataclass(frozen=True, slots=True)
class AddedStations:
    """Stations that a plugin adds to a run, under kind `station`: a function of a `StationPlan` gives them.

    joining: those of them that somebody has yet to join; announce: called before the stations start; undo: closed
    after they have ended.
    """

    factories: Sequence[StationFactory]
    joining: Joining = NOBODY_JOINS
    announce: Callable[[], None] = lambda: None
    undo: ExitStack = field(default_factory=ExitStack)


def launch_inline(plan: LaunchPlan) -> Launcher:
    return build_inline_launcher(plan.stations, plan.layout, plan.weights, joining=plan.joining)


def launch_local(plan: LaunchPlan) -> Launcher:
    assert plan.logs is not None, "processes write their logs to a folder"
    return build_local_launcher(
        plan.stations,
        plan.layout,
        plan.weights,
        plan.config.supervision,
        plan.logs,
        plan.config.data_plane.transport,
        check_report=plan.check_report,
        joining=plan.joining,
    )


def launch(plan: LaunchPlan) -> Launcher:
    """Build the launcher that the configuration names."""
    own: dict[str, Launch] = {"inline": launch_inline, "local": launch_local}
    name = plan.config.launcher
    chosen: Launch = own[name] if name in own else load("launcher", name)
    return chosen(plan)
