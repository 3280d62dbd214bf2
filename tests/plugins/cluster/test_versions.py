"""A node with another polyrhythm or Python is refused in one sentence, without Ray being there."""

from __future__ import annotations

import msgspec
import pytest

from polyrhythm.plugins.cluster.hosts.agent import Found
from polyrhythm.plugins.cluster.ray.actors import AgentActor
from polyrhythm.plugins.cluster.ray.reach import Versions, own_versions, ray_differs, why_not

OWN = own_versions()


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (
            OWN._replace(polyrhythm="0.0.1"),
            f"polyrhythm {OWN.polyrhythm} is installed there, 0.0.1 runs here; install the same",
        ),
        (OWN._replace(python="3.99"), f"Python {OWN.python} runs there, 3.99 here; start Ray there with Python 3.99"),
    ],
)
def test_a_node_with_another_version_starts_no_agent(run: Versions, why: str) -> None:
    """The spec is not even decoded: it may have another form there."""
    answer = AgentActor().start(b"damaged", [*run])
    assert msgspec.msgpack.decode(answer, type=Found).error == why


def test_equal_versions_are_no_reason() -> None:
    assert why_not(OWN, OWN) == ""
    assert OWN.python.count(".") == 1, "patch versions may differ"


def test_what_ray_says_of_another_python_is_one_sentence() -> None:
    said = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.12.3\n"
        "This process on 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    assert ray_differs(said).startswith(
        "the cluster has Ray 2.60.0 and Python 3.12.3, here are Ray 2.60.0 and Python 3.11.7;"
    )
    assert ray_differs("Could not find any running Ray instance") == ""
