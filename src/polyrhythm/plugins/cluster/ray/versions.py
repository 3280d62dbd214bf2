"""Whether a cluster's nodes have what the run needs: the same polyrhythm and Python, and CPUs for its stations. No Ray.

Messages between processes have the form of one version of polyrhythm, and saved states and modules of one's own are
read by the Python that wrote them, patch versions aside. Ray refuses another Python too, unless it is told not to, in
words of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from polyrhythm.errors import StartError

_RAY_SAYS = re.compile(r"Version mismatch:.*?Ray: (\S+).*?Python: (\S+).*?Ray: (\S+).*?Python: (\S+)", re.DOTALL)


class Versions(NamedTuple):
    """Of polyrhythm, as it is installed, and of Python, major and minor."""

    polyrhythm: str
    python: str


def own_versions() -> Versions:
    return Versions(metadata.version("polyrhythm"), f"{sys.version_info.major}.{sys.version_info.minor}")


def why_not(run: Versions, node: Versions) -> str:
    """Why a node with these versions cannot be of this run, in one sentence; "" if it can."""
    if node.polyrhythm != run.polyrhythm:
        return f"polyrhythm {node.polyrhythm} is installed there, {run.polyrhythm} runs here; install the same"
    if node.python != run.python:
        return f"Python {node.python} runs there, {run.python} here; start Ray there with Python {run.python}"
    return ""


def ray_differs(said: str) -> str:
    """What Ray says of a cluster with another Ray or Python, in one sentence; "" if it says something else."""
    found = _RAY_SAYS.search(said)
    if found is None:
        return ""
    ray, python, own_ray, own_python = found.groups()
    return (
        f"the cluster has Ray {ray} and Python {python}, here are Ray {own_ray} and Python {own_python}; start it with "
        "the same, or train from an environment that has what the cluster has"
    )


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
