"""The launcher `ray`: stations on a cluster, as on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from polyrhythm.plugins.cluster.hosts.build import Places, build_hosts_launcher, open_hosts
from polyrhythm.plugins.cluster.hosts.directory import Needs
from polyrhythm.plugins.cluster.hosts.nodes import LocalNode, Node
from polyrhythm.plugins.cluster.ray.cluster import Cluster, RaySection
from polyrhythm.runtime.factories import NOBODY_JOINS, Joining, StationList
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.processes.supervision import SupervisionLimits
from polyrhythm.specs import WeightsLayout


def build_ray_launcher(  # noqa: PLR0913 - as the other launchers, and the cluster
    stations: StationList,
    layout: ArenaLayout,
    weights: WeightsLayout,
    limits: SupervisionLimits,
    logs: Path,
    *,
    settings: RaySection,
    slots: Mapping[str, Sequence[str]],
    trainer: str,
    generators: Collection[str] = (),
    check_report: Callable[[Mapping[str, float]], None] = lambda _: None,
    joining: Joining = NOBODY_JOINS,
) -> Launcher:
    """Each station in an actor of the cluster; those that somebody joins on the driver's machine, whose address the run
    has named. slots: of each simulator; trainer: who publishes weights; generators: all of them. StartError: there is
    no such cluster, or no place in it; then nothing is left."""
    placed = {factory.name: len(seats) for factory, *seats in stations if factory.name not in joining.stations}
    cluster = Cluster(settings, placed, logs.parent)
    here = LocalNode("the driver's machine", cluster.address)
    nodes: dict[str, Node] = {**cluster.nodes, **dict.fromkeys(joining.stations, here)}
    cpus = {name: count * settings.cpus_per_station for name, count in placed.items()}
    own = frozenset(slots) - joining.stations
    least = [(own, settings.min_simulators), (frozenset(generators), settings.min_generators)]
    needs = Needs(cpus, [(names, len(names) if count is None else count) for names, count in least])
    places = Places(cluster.address, nodes, slots, trainer, cluster.close, cluster, needs)
    return build_hosts_launcher(open_hosts(stations, layout, weights, limits, logs, places, check_report, joining))
