"""The devices of a run, numbered over all its nodes, and the device that a process gives to torch.

A seat names a device by its number in the run: `cuda:5`, or `sim:5` for a simulated one. A process computes on the same
device by its number on its node, or on the CPU for a simulated one. Simulated devices let a machine without GPUs run
everything that follows from a placement: seats, leases, process groups, and the ways of weights between devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CPU = "cpu"
CUDA: Literal["cuda"] = "cuda"
SIMULATED: Literal["sim"] = "sim"


class NodeMemory(NamedTuple):
    """Bytes of a node's host memory and of each of its devices, 0 for what is not known."""

    host: int = 0
    device: int = 0


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices by node. nodes: the name of each node, "" for this machine, and its number of devices; kind: of all of
    them; memory: of nodes where it is known without looking.

    Example: nodes (a, 2) and (b, 2): device 3 is `cuda:3`, the second one of node b, and `cuda:1` there.
    """

    nodes: Sequence[tuple[str, int]] = ()
    kind: Literal["cuda", "sim"] = "cuda"
    memory: Mapping[str, NodeMemory] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(count for _, count in self.nodes)

    @property
    def on_cluster(self) -> bool:
        """Whether they are those of a cluster's nodes."""
        return any(node for node, _ in self.nodes)

    def name(self, number: int) -> str:
        return f"{self.kind}:{number}"

    def place(self, number: int) -> tuple[str, int]:
        """The node of a device, and its number there. IndexError: there is no such device."""
        for node, count in self.nodes:
            if number < count:
                return node, number
            number -= count
        raise IndexError(number)


def devices_here(count: int, kind: Literal["cuda", "sim"] = "cuda") -> Devices:
    return Devices((("", count),), kind)


def number_of(device: str) -> int:
    """The number of a device in the run: `cuda:5` and `sim:5` → 5."""
    return int(device.partition(":")[2])


def is_simulated(device: str) -> bool:
    return device.startswith(f"{SIMULATED}:")


def bind_environment(device: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that bind a simulator's process to one device, which CUDA numbers 0 inside.

    MUJOCO_EGL_DEVICE_ID is left as the user has set it, because EGL may number devices in another order.
    """
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[device] if device < len(visible) else str(device)
    if not name.isdecimal() or "MUJOCO_EGL_DEVICE_ID" in environment:
        return {"CUDA_VISIBLE_DEVICES": name}
    return {"CUDA_VISIBLE_DEVICES": name, "MUJOCO_EGL_DEVICE_ID": name}
