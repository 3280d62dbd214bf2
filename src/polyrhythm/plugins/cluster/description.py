"""A cluster on paper: a YAML file with its nodes, which checks and plans take in place of one that runs.

    nodes:
      - {name: a, cpus: 128, gpus: 8, memory_gb: 1000, gpu_memory_gb: 80}
      - {name: b, cpus: 128, gpus: 8}

`polyrhythm cluster` writes one from a Ray cluster. Devices are numbered in the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from polyrhythm.config.base import InvalidSetting, NotNegative, Positive, Section, Whole
from polyrhythm.config.explain import explain
from polyrhythm.config.recipes import read
from polyrhythm.errors import ConfigError
from polyrhythm.runtime.devices import CUDA, SIMULATED, Devices, NodeMemory

_GB = 10**9
_NOTE = """\
# A cluster, for --cluster of train --check, check and plan --memory. The order of its nodes numbers the devices.
# Ray does not know the memory of a GPU: add gpu_memory_gb to nodes, so that it is compared with what a run takes.
"""


class DescribedNode(Section):
    """A node of a cluster."""

    name: Annotated[str, Field(min_length=1)]
    """For people, and different for each node."""
    cpus: NotNegative
    """CPUs that a run may take there."""
    gpus: Whole = 0
    """GPUs that a run may take there."""
    memory_gb: Positive | None = None
    """Memory that a run may take there; without it, it is not compared with what the run takes."""
    gpu_memory_gb: Positive | None = None
    """Memory of each GPU; the same."""


class ClusterDescription(Section):
    """The nodes of a cluster."""

    nodes: tuple[DescribedNode, ...]
    """All nodes, in the order that numbers their devices."""

    @model_validator(mode="after")
    def _is_a_cluster(self) -> ClusterDescription:
        if not self.nodes:
            raise self.refusal("nodes", "a cluster has one node at least; list its nodes")
        seen: set[str] = set()
        for index, node in enumerate(self.nodes):
            if node.name in seen:
                raise InvalidSetting(f"nodes.{index}.name", node.name, "another node has it; give each its own")
            seen.add(node.name)
        return self

    def devices(self, simulated: int) -> Devices:
        """The devices of a run there. simulated: most that are taken of a node, 0: they are not simulated."""
        counts = tuple((node.name, min(node.gpus, simulated or node.gpus)) for node in self.nodes)
        sizes = {
            node.name: NodeMemory(int((node.memory_gb or 0) * _GB), int((node.gpu_memory_gb or 0) * _GB))
            for node in self.nodes
        }
        return Devices(counts, SIMULATED if simulated else CUDA, sizes)

    def cpus(self) -> dict[str, float]:
        return {node.name: node.cpus for node in self.nodes}


def read_description(path: str) -> ClusterDescription:
    """ConfigError: it cannot be read, or describes no cluster."""
    tree = read(Path(path))
    try:
        return ClusterDescription.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*explain(error, ClusterDescription), origin=path) from None


def describe(nodes: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of a description. nodes: the name of each and what Ray has there, its memory in bytes."""
    described = []
    for name, resources in nodes:
        own = {"name": name, "cpus": float(resources.get("CPU", 0)), "gpus": int(resources.get("GPU", 0))}
        if memory := resources.get("memory"):
            own["memory_gb"] = round(memory / _GB, 1)
        described.append(own)
    return _NOTE + yaml.safe_dump({"nodes": described}, sort_keys=False, default_flow_style=None, allow_unicode=True)
