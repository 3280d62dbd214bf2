"""The launchers of a run on several hosts: `ray`, and given nodes."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.pipeline.context import Launch, LaunchPlan
from polyrhythm.pipeline.placed import find_devices, generator_names
from polyrhythm.plugins.cluster.hosts.agent import LocalNode, Node
from polyrhythm.plugins.cluster.hosts.build import StationNodes, build_hosts_launcher, open_hosts
from polyrhythm.plugins.cluster.hosts.directory import Needs
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import StationList
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.messages import TRAINER, rank_name
from polyrhythm.scheduler.records import SimulatorJoined


def launch_on_ray(plan: LaunchPlan) -> Launcher:
    """`launcher: ray`: each station in an actor of the cluster; those that somebody joins on the driver's machine,
    whose address the run has named. StartError: there is no such cluster, or no place in it; then nothing is left."""
    from polyrhythm.plugins.cluster.ray.cluster import Cluster  # ray

    assert plan.logs is not None, "actors write their logs to a folder"
    settings, joining = plan.config.ray, plan.joining.stations
    seats = {
        rank_name(factory.name, rank): seat
        for factory, *own in plan.stations
        if factory.name not in joining
        for rank, seat in enumerate(own)
    }
    # The run needs the hosts of main and of the trainer's rank 0; where both are one, it needs no other.
    cluster = Cluster(settings, seats, plan.logs.parent, find_devices(plan.config).count, TRAINER)
    here = LocalNode("the driver's machine", cluster.address)
    nodes: dict[str, Node] = {**cluster.nodes, **dict.fromkeys(joining, here)}
    cpus = dict.fromkeys(seats, settings.cpus_per_station)
    slots, generators = slots_of(plan.stations), frozenset(generator_names(plan.config))
    least = [(frozenset(slots) - joining, settings.min_simulators), (generators, settings.min_generators)]
    on_device = frozenset(name for name, seat in seats.items() if seat.device != CPU)
    needs = Needs(cpus, [(names, len(names) if count is None else count) for names, count in least], on_device)
    return _launch_at(plan, StationNodes(cluster.address, nodes, slots, TRAINER, cluster.close, cluster, needs))


def launch_on(nodes: Sequence[Node]) -> Launch:
    """The launcher that spreads processes over these nodes in turn, in the order of their stations and ranks. Example:
    a simulator, a generator and a trainer of two ranks on two nodes: 0, 1, 0, 1."""

    def launch(plan: LaunchPlan) -> Launcher:
        names = [rank_name(factory.name, rank) for factory, *seats in plan.stations for rank in range(len(seats))]
        at = {name: nodes[index % len(nodes)] for index, name in enumerate(names)}
        return _launch_at(plan, StationNodes(nodes[0].address, at, slots_of(plan.stations), TRAINER))

    return launch


def _launch_at(plan: LaunchPlan, placement: StationNodes) -> Launcher:
    assert plan.logs is not None, "processes write their logs to a folder"
    hosts = open_hosts(
        plan.stations,
        plan.layout,
        plan.weights,
        plan.config.supervision,
        plan.logs,
        placement,
        plan.check_report,
        plan.joining,
    )
    return build_hosts_launcher(hosts)


def slots_of(stations: StationList) -> dict[str, list[str]]:
    slots: dict[str, list[str]] = {}
    for factory, *_ in stations:
        for joined in factory.announcements(0):
            if isinstance(joined, SimulatorJoined):
                slots.setdefault(joined.simulator, []).extend(
                    slot.slot for info in joined.batches for slot in info.slots
                )
    return slots
