"""The devices of a Ray cluster's nodes, which give the devices of a run their numbers: the head node's first, then the
nodes by address and id.

Ray's table of nodes is read without joining the cluster, which takes a millisecond: a check leaves no trace there. A
description (`plugins.cluster.description`) takes the cluster's place for checks.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.running import is_description
from polyrhythm.errors import MissingError, StartError
from polyrhythm.plugins.cluster.description import read_description
from polyrhythm.plugins.cluster.ray.reach import (
    AUTO,
    LOCAL,
    check_ray_installed,
    check_reachable,
    cpus_by_name,
    node_name,
)
from polyrhythm.runtime.devices import CUDA, SIMULATED, Devices, devices_here
from polyrhythm.runtime.memory.tensors import count_devices

#: The resource that only the head node has.
_HEAD = "node:__internal_head__"
#: What was found last, by address and simulated devices: the seats of a run stay as they are when its nodes do not.
_found: dict[tuple[str, int], Devices] = {}


def find_devices(config: RunConfig) -> Devices:
    """The devices of the cluster that the configuration names: found once, until `forget`. MissingError: no cluster
    answers there."""
    simulated = config.placement.simulated_devices
    address = config.ray.address
    key = (address if is_description(address) else _address_now() or address, simulated)
    if key not in _found:
        _found[key] = _look(address, simulated)
    return _found[key]


def forget() -> None:
    """Look again the next time: before a run, or another part of one."""
    _found.clear()


def _look(address: str, simulated: int) -> Devices:
    if is_description(address):
        return read_description(address).devices(simulated)
    if address == LOCAL and not _address_now():
        return devices_here(simulated, SIMULATED) if simulated else devices_here(count_devices())
    counts = [(node_name(node), int(node["Resources"].get("GPU", 0))) for node in in_order(read_nodes(address))]
    if simulated:
        return Devices(tuple((name, min(count, simulated)) for name, count in counts), SIMULATED)
    return Devices(tuple(counts), CUDA)


def count_cpus(address: str) -> dict[str, float]:
    """CPUs of each node of the cluster, by name. MissingError: no cluster answers at the address."""
    if is_description(address):
        return read_description(address).cpus()
    return cpus_by_name(read_nodes(address))


def _address_now() -> str:
    """The address of the cluster that this process is connected to; "" if there is none."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().gcs_address if ray is not None and ray.is_initialized() else ""


def read_nodes(address: str) -> list[dict[str, Any]]:
    """Ray's records of the nodes that are alive, of the cluster that this process is connected to, else at this
    address. MissingError: none answers there."""
    check_ray_installed()
    import ray
    from ray._private.services import canonicalize_bootstrap_address
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]
    from ray.exceptions import RayError

    from polyrhythm.plugins.cluster.ray.actors import last_line

    if ray.is_initialized():
        return [node for node in ray.nodes() if node["Alive"]]
    try:
        found = canonicalize_bootstrap_address(address)
        if found is None:
            raise StartError(
                f"ray.address = {AUTO}: no cluster runs on this machine; start one with `ray start --head`"
            )
        check_reachable(found if address == AUTO else address)
    except (StartError, ConnectionError, ValueError) as error:
        raise MissingError(str(error)) from error
    state = GlobalState()
    try:
        state._initialize_global_state(GcsClientOptions.create(found, None, True, fetch_cluster_id_if_nil=False))
        return [node for node in state.node_table() if node["Alive"]]
    except (RayError, RuntimeError) as error:
        raise MissingError(
            f"ray.address = {address}: a server answers there, but does not say which nodes it has "
            f"({last_line(error)}); look at the head node, or name another address"
        ) from error
    finally:
        state.disconnect()


def in_order(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Nodes in the order that numbers their devices."""

    def order(node: Mapping[str, Any]) -> tuple[bool, int, str, str]:
        address = node["NodeManagerAddress"]
        try:
            number = int(ipaddress.ip_address(address))
        except ValueError:
            number = 0
        return _HEAD not in node["Resources"], number, address, node["NodeID"]

    return sorted(nodes, key=order)
