"""Inputs from which a run, its launcher and the stations of plugins are built (docs/extending.md)."""

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
    """Input of a launcher.

    stations: factory and seats of each, in start order; layout: of the arena; weights: layout of the published weights;
    logs: folder of the stations' logs, None without a run folder; joining: stations that remote simulators provide.
    check_report raises ValueError for metrics that the observers do not know.
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
    """Input of `build_pipeline`. The configuration has passed `pipeline.validation.check`.

    initial: first weights, published as `version`; None: from the seed. With a trainer it is a policy file, which the
    trainer reads and publishes. folder: for logs and trainer states; required by every launcher except inline. saved:
    the run to resume. trainer: whether there is one. launch: replaces the launcher that `config` names.
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
    """Input of a plugin's stations. infos: env batches of each simulator; step: how slots step."""

    context: RunContext
    spec: EnvSpec
    infos: Sequence[Sequence[EnvBatchInfo]]
    step: StepSettings


@dataclass(frozen=True, slots=True)
class AddedStations:
    """Stations that a plugin adds; a function registered under kind `station` returns them for a `StationPlan`.

    joining: those that remote simulators provide; announce: called before the stations start; undo: closed after they
    have ended.
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
