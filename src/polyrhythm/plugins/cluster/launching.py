"""The launchers of a run on several hosts: `ray`, and given nodes."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.pipeline.context import Launch, LaunchPlan
from polyrhythm.pipeline.placed import TRAINER, generator_names
from polyrhythm.plugins.cluster.hosts.build import Places, build_hosts_launcher, open_hosts
from polyrhythm.plugins.cluster.hosts.nodes import Node
from polyrhythm.runtime.factories import StationList
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler.records import SimulatorJoined


def launch_on_ray(plan: LaunchPlan) -> Launcher:
    """`launcher: ray`: each station in an actor of the cluster."""
    from polyrhythm.plugins.cluster.ray.launch import build_ray_launcher  # ray

    assert plan.logs is not None, "actors write their logs to a folder"
    return build_ray_launcher(
        plan.stations,
        plan.layout,
        plan.weights,
        plan.config.supervision,
        plan.logs,
        settings=plan.config.ray,
        slots=slots_of(plan.stations),
        trainer=TRAINER,
        generators=generator_names(plan.config),
        check_report=plan.check_report,
        joining=plan.joining,
    )


def launch_on(nodes: Sequence[Node]) -> Launch:
    """The launcher that spreads stations over these nodes in turn, in their order. Example: two simulators, a generator
    and a trainer on two nodes: 0, 1, 0, 1."""

    def launch(plan: LaunchPlan) -> Launcher:
        assert plan.logs is not None, "processes write their logs to a folder"
        at = {factory.name: nodes[index % len(nodes)] for index, (factory, *_) in enumerate(plan.stations)}
        places = Places(nodes[0].address, at, slots_of(plan.stations), TRAINER)
        hosts = open_hosts(
            plan.stations,
            plan.layout,
            plan.weights,
            plan.config.supervision,
            plan.logs,
            places,
            plan.check_report,
            plan.joining,
        )
        return build_hosts_launcher(hosts)

    return launch


def slots_of(stations: StationList) -> dict[str, list[str]]:
    """The slots of each simulator."""
    slots: dict[str, list[str]] = {}
    for factory, *_ in stations:
        for joined in factory.announcements(0):
            if isinstance(joined, SimulatorJoined):
                slots.setdefault(joined.simulator, []).extend(
                    slot.slot for info in joined.batches for slot in info.slots
                )
    return slots
