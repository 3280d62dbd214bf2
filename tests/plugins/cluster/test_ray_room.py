"""Room for processes on the nodes of a cluster, without one."""

from __future__ import annotations

import pytest

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.ray.reach import Bundle, bundles_of, check_room
from polyrhythm.runtime.factories import Resources


def test_the_whole_and_the_largest_bundle_have_to_fit() -> None:
    nodes = {"node 10.0.0.1 (5be1f3a2)": 8.0, "node 10.0.0.1 (77aa00bb)": 2.0, "node 10.0.0.2 (9c9c9c9c)": 0.0}
    check_room([Bundle(4.0), Bundle(4.0)], 4.0, nodes)
    with pytest.raises(StartError) as refused:
        check_room([Bundle(9.0)], 9.0, nodes)
    found = "(8 on node 10.0.0.1 (5be1f3a2), 2 on node 10.0.0.1 (77aa00bb), 0 on node 10.0.0.2 (9c9c9c9c))"
    assert f"10 are in the cluster {found}" in str(refused.value)
    with pytest.raises(StartError, match="12 CPUs are wanted for 3 stations, 10 are in the cluster"):
        check_room([Bundle(4.0)] * 3, 4.0, nodes)
    with pytest.raises(StartError, match="0 are in the cluster"):
        check_room([Bundle(1.0)], 1.0, {})


def test_the_processes_of_a_device_share_a_bundle_on_its_node() -> None:
    on_a, on_b = Resources("cuda:0", node="a"), Resources("cuda:1", node="b")
    seats = {"s": Resources(), "g": on_a, "trainer": on_a, "h": on_b}
    bundles = bundles_of(seats, 0.5)
    assert bundles == [Bundle(0.5), Bundle(1.0, 2, "a"), Bundle(0.5, 1, "b")]
    check_room(bundles, 0.5, {"a": 1.0, "b": 1.0})
    with pytest.raises(StartError, match=r"CPUs are wanted for processes on devices: 1 on a, which has 0.5; lower it"):
        check_room(bundles, 0.5, {"a": 0.5, "b": 8.0})
    for left in ({"b": 8.0}, {}):
        with pytest.raises(StartError, match=r"^a has left the cluster since its devices were counted; start again$"):
            check_room(bundles, 0.5, left)
