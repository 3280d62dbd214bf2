"""The order that numbers the devices of a cluster's nodes."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from polyrhythm.plugins.cluster.ray.inventory import in_order


def node(address: str, id_: str, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "NodeID": id_, "Resources": resources}


def test_the_head_is_first_then_addresses_by_number_then_ids() -> None:
    head = node("10.0.0.9", "f", **{"node:__internal_head__": 1.0})
    rest = [node("10.0.0.2", "b"), node("10.0.0.2", "c"), node("10.0.0.10", "a"), node("fd00::1", "d")]
    for nodes in permutations([head, *rest]):
        assert in_order(nodes) == [head, *rest]
    named = [node("alpha", "b"), node("beta", "a")]
    assert in_order([*reversed(named)]) == named
