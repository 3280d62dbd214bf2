"""Whether a cluster's nodes have room for the stations, from what Ray says of the nodes. Needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyrhythm.errors import StartError


def check_room(cpus: Sequence[float], cpus_per_station: float, alive: Sequence[Mapping[str, Any]]) -> None:
    """Raise StartError for what can never fit. cpus: of each station; alive: the nodes, several of which may have one
    address, so that their ids are told too."""
    nodes = [
        (f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})", float(node["Resources"].get("CPU", 0.0)))
        for node in alive
    ]
    total = sum(count for _, count in nodes)
    if sum(cpus) > total or max(cpus) > max((count for _, count in nodes), default=0.0):
        found = ", ".join(f"{count:g} on {address}" for address, count in nodes)
        raise StartError(
            f"ray.cpus_per_station = {cpus_per_station:g}: {describe_wanted(cpus)}, {total:g} are in the cluster "
            f"({found}); lower it (0.25 shares a core among four stations), use fewer stations, or add nodes"
        )


def describe_wanted(cpus: Sequence[float]) -> str:
    return f"{sum(cpus):g} CPUs are wanted for {len(cpus)} stations"
