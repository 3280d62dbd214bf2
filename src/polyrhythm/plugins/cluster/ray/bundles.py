"""Room that Ray reserves for the processes of a run: placement groups, and the devices that they hold.

One group has a bundle for each process on the CPU. Each device that the run uses has a group of its own: one bundle
with this device and CPUs for its processes, on the node that the seats name. If Ray loses that node, the device is
reserved again wherever Ray finds one that is free, so the processes of a device stay together.

Invariant: a process is placed on a device only while Ray reserves it for this run, and by the number that the device's
node says it has, because others may use devices of the same node.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polyrhythm.config.sections.running import RaySettings
from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.hosts.agent import FOUND_S
from polyrhythm.plugins.cluster.ray.actors import own_device
from polyrhythm.plugins.cluster.ray.reach import group_by_device
from polyrhythm.runtime.devices import CPU, CUDA, is_simulated, number_of
from polyrhythm.runtime.factories import Resources

#: Ray's label of a node with its id.
_NODE_LABEL = "ray.io/node-id"
#: Lets processes see all devices of their node: weights go from device to device, and seats bind simulators.
SEES_ALL = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
#: The share of a device that the question for its number takes for a moment.
_SHARE = 0.001


class HeldDevice(NamedTuple):
    """A device that Ray reserves for the run. node: Ray's id; number: torch's, there; variables: of a process that
    is bound to it; torch: the version of torch there, "" if nobody asked."""

    node: str
    number: int
    variables: Mapping[str, str]
    torch: str = ""


class Bundles:
    """seats: of each process, by its name; ids: Ray's ids of nodes, by the names in seats; pinned: those of the nodes
    where processes on the CPU have to be. `look` is called by one thread, the others read."""

    def __init__(
        self,
        settings: RaySettings,
        seats: Mapping[str, Resources],
        ids: Mapping[str, str],
        pinned: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._settings, self._at = settings, pinned
        self._on_cpu = [name for name, seat in seats.items() if seat.device == CPU]
        self._devices = group_by_device(seats)
        #: The node that a device has to be on, until it is lost.
        self._pinned = {seat.device: ids[seat.node] for seat in seats.values() if seat.node}
        self._planned = dict(self._pinned)
        self._device_of = {name: device for device, names in self._devices.items() for name in names}
        self._group: Any = None
        self._groups: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._held: dict[str, HeldDevice] = {}

    def reserve(self) -> None:
        """Ask Ray for room, without waiting."""
        if self._on_cpu:
            bundle = {"CPU": self._settings.cpus_per_station}
            strategy = self._settings.strategy.upper()
            self._group = placement_group(
                [dict(bundle) for _ in self._on_cpu],
                strategy=strategy,
                bundle_label_selector=[
                    {_NODE_LABEL: self._at[name]} if name in self._at else {} for name in self._on_cpu
                ],
            )
        self._groups = {device: self._reserve_device(device) for device in self._devices}

    def _reserve_device(self, device: str) -> Any:
        bundle = {"GPU": 1, "CPU": len(self._devices[device]) * self._settings.cpus_per_station}
        node = self._pinned.get(device)
        return placement_group([bundle], bundle_label_selector=[{_NODE_LABEL: node}] if node else None)

    def wait(self, seconds: float) -> bool:
        """Wait until all is reserved; False if it is not in time."""
        until = time.monotonic() + seconds
        groups = [*([self._group] if self._group is not None else []), *self._groups.values()]
        return all(group.wait(max(0.0, until - time.monotonic())) for group in groups)

    def find_devices(self) -> None:
        """Ask for the numbers of all devices, once all are reserved; simulated ones have none. StartError: one does not
        answer."""
        self._asked = {device: self._ask(device) for device in self._groups if not is_simulated(device)}
        until = time.monotonic() + FOUND_S
        for device, ref in self._asked.items():
            try:
                self._held[device] = HeldDevice(*ray.get(ref, timeout=max(0.0, until - time.monotonic())))
            except (RayError, ValueError) as error:
                why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
                raise StartError(f"{device}: its node does not say which of its devices that is ({why})") from error

    def without_cuda(self) -> Mapping[str, HeldDevice]:
        """The devices that have a torch for the CPU alone."""
        return {device: held for device, held in self._held.items() if held.torch.endswith("+cpu")}

    def _ask(self, device: str) -> Any:
        options = {"num_cpus": 0, "num_gpus": _SHARE, "max_retries": 0, "runtime_env": SEES_ALL}
        strategy = self._strategy(self._groups[device], 0)
        return ray.remote(own_device).options(scheduling_strategy=strategy, **options).remote()

    def look(self, alive: Collection[str]) -> dict[str, str]:
        """The node, by Ray's id, where each process has room now. alive: nodes that are there. RayError: Ray does not
        answer."""
        found: dict[str, str] = {}
        if self._group is not None:
            table = placement_group_table(self._group)["bundles_to_node_id"]
            found = {name: node for i, name in enumerate(self._on_cpu) if (node := table.get(i)) in alive}
        for device, names in self._devices.items():
            if self._pinned.get(device, "") not in ("", *alive):
                del self._pinned[device]
                remove_placement_group(self._groups[device])
                self._groups[device] = self._reserve_device(device)
            node = placement_group_table(self._groups[device])["bundles_to_node_id"].get(0)
            if node in alive and self._is_known(device, node):
                found |= dict.fromkeys(names, node)
        return found

    def _is_known(self, device: str, node: str) -> bool:
        """Whether this node has said which of its devices it is; asks it, without waiting."""
        held = self._held.get(device)
        if held is not None and held.node == node:
            return True
        if is_simulated(device):
            self._held = self._held | {device: HeldDevice(node, 0, {})}
            return True
        if held is not None:
            self._held = {name: one for name, one in self._held.items() if name != device}
            self._asked.pop(device, None)
        ref = self._asked.get(device)
        if ref is None:
            self._asked[device] = self._ask(device)
        elif ray.wait([ref], timeout=0)[0]:
            del self._asked[device]
            try:
                self._held = self._held | {device: HeldDevice(*ray.get(ref, timeout=0))}
            except RayError:
                return False  # asked again at the next look
            return self._held[device].node == node
        return False

    def strategy(self, process: str) -> PlacementGroupSchedulingStrategy:
        """Where Ray starts an actor of this process, as long as it has room."""
        if (device := self._device_of.get(process)) is not None:
            return self._strategy(self._groups[device], 0)
        return self._strategy(self._group, self._on_cpu.index(process))

    @staticmethod
    def _strategy(group: Any, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)

    def nodes_with_devices(self) -> set[str]:
        """Ray's ids of nodes where the run has devices."""
        return {held.node for held in self._held.values()}

    def seat_on(self, seat: Resources, node: str) -> Resources:
        """The seat of a process that is started on this node. A device that the run has elsewhere is replaced by one
        that it has there, which others are on, too."""
        if seat.device == CPU:
            return seat
        ends, held = seat.ends, self._held
        names = {device: f"{CUDA}:{one.number}" for device, one in held.items() if one.node == node}
        if ends is not None and node != self._planned.get(seat.device, node):
            ends = replace(ends, host_only="this is not the device that the generator began on, which is lost")
        if is_simulated(seat.device) or not names:
            return replace(seat, ends=ends)
        if ends is not None:
            ends = replace(
                ends, local={name: names[name] for name in (ends.trainer, *ends.generators) if name in names}
            )
        shared = list(names)[number_of(seat.device) % len(names)]
        device = seat.device if seat.device in names else shared
        environment = dict(held[device].variables) if seat.environment else {}
        return replace(seat, local=names[device], environment=environment, ends=ends)

    def close(self) -> None:
        for group in [*([self._group] if self._group is not None else []), *self._groups.values()]:
            remove_placement_group(group)
        self._group, self._groups = None, {}
