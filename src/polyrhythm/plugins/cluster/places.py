"""On which of several nodes each station works."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.plugins.cluster.hosts.nodes import Node
from polyrhythm.plugins.join.joined import JoinedSimulatorFactory
from polyrhythm.runtime.factories import StationList
from polyrhythm.stations.simulator_factory import SimulatorFactory


def spread_over(nodes: Sequence[Node], stations: StationList) -> dict[str, Node]:
    """Stations in turn, in their order. Example: two simulators, a generator and a trainer on two nodes: 0, 1, 0, 1."""
    return {factory.name: nodes[index % len(nodes)] for index, (factory, *_) in enumerate(stations)}


def slots_of(stations: StationList) -> dict[str, list[str]]:
    """The slots of each simulator."""
    return {
        factory.name: [slot.slot for info in factory.batches for slot in info.slots]
        for factory, *_ in stations
        if isinstance(factory, SimulatorFactory)
    } | {
        factory.name: [slot.slot for slot in factory.info.slots]
        for factory, *_ in stations
        if isinstance(factory, JoinedSimulatorFactory)
    }
