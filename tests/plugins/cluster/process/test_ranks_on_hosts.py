"""A trainer whose ranks are on several hosts: real processes that connect over tcp, in memories of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.cluster.process.test_hosts import running
from tests.plugins.ranks.test_runs import ONE
from tests.process.networks import apart_by_setting

from polyrhythm.config.load import merge


def ranked(count: int, strategy: str = "replicate", **changes: Any) -> dict[str, Any]:
    return merge(ONE, {"placement": {"trainer": {"ranks": count, "strategy": strategy}}, **changes})


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_four_ranks_on_three_hosts_give_the_weights_of_one(strategy: str, tmp_path: Path) -> None:
    """Stations: simulator, generator, four ranks: 0 and 3 on the first host, with the simulator."""
    found = []
    one, two, three = apart_by_setting(tmp_path, 3)
    for name, count, nodes in (("one", 1, ()), ("four", 4, [one, two, one, two, three, one])):
        with running(tmp_path / name, nodes, ranked(count, strategy)) as pipeline:
            pipeline.loop.train_until(10)
            found.append(pipeline.weights.read()[1])
    weights, expected = found[1], found[0]
    assert max(float((weights[name] - x).abs().max()) for name, x in expected.items()) <= 1e-4
    assert all(torch.isfinite(x).all() for x in weights.values())
