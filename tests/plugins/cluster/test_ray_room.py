"""Room for stations on the nodes of a cluster, without one."""

from __future__ import annotations

from typing import Any

import pytest

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.ray.reach import Bundle, check_room


def node(address: str, cpus: float, id_: str) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "NodeID": id_, "Resources": {"CPU": cpus} if cpus else {}}


def test_each_node_counts_also_where_several_have_one_address() -> None:
    """The largest is the first of two on one machine, which their ids tell apart, as in other messages."""
    nodes = [node("10.0.0.1", 8.0, "5be1f3a2c0"), node("10.0.0.1", 2.0, "77aa00bb11"), node("10.0.0.2", 0.0, "9c" * 28)]
    check_room([Bundle(4.0), Bundle(4.0)], 4.0, nodes)
    with pytest.raises(StartError) as refused:
        check_room([Bundle(9.0)], 9.0, nodes)
    found = "(8 on node 10.0.0.1 (5be1f3a2), 2 on node 10.0.0.1 (77aa00bb), 0 on node 10.0.0.2 (9c9c9c9c))"
    assert f"10 are in the cluster {found}" in str(refused.value)
    with pytest.raises(StartError, match="12 CPUs are wanted for 3 stations, 10 are in the cluster"):
        check_room([Bundle(4.0)] * 3, 4.0, nodes)
    with pytest.raises(StartError, match="0 are in the cluster"):
        check_room([Bundle(1.0)], 1.0, [])
