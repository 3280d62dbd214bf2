"""Ranks of a trainer on CUDA devices: two that share one, over gloo, and two on devices of their own, over NCCL.
The latter have never been run: no machine with two CUDA devices was at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.plugins.ranks.cases import built, trained
from tests.plugins.ranks.pool import RankPool
from tests.plugins.ranks.test_ranks import CASES, RELEASED, distance, plain_case
from tests.training.test_learner import stale

from polyrhythm.training.ranks import ONE_RANK

pytestmark = pytest.mark.gpu


@pytest.fixture
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(params=["one device", "a device each"])
def devices(request: pytest.FixtureRequest, cuda: torch.device) -> list[str]:
    if request.param == "one device":
        return ["cuda:0"] * 2
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("settings", [RELEASED, {"type": "pi0"}], ids=["of a checkpoint", "of the seed"])
def test_a_sharded_policy_is_never_whole_on_a_device(
    pool: RankPool, devices: list[str], settings: dict[str, Any]
) -> None:
    """Read block by block from a checkpoint, or built on the host from the seed."""
    settings = {**settings, "dtype": "float32"}
    one = built(ONE_RANK, settings)
    for rank, answer in enumerate(pool.run(f"{CASES}built", 2, "shard", devices=devices, settings=settings)):
        assert answer["devices"] == {devices[rank]}
        assert all(torch.equal(x, answer["weights"][name]) for name, x in one["weights"].items())
        assert distance(answer["gradient"], one["gradient"]) <= 1e-4
        assert answer["peak"] < 0.9


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_updates_on_devices_are_those_of_one_rank(pool: RankPool, devices: list[str], strategy: str) -> None:
    case = plain_case({}, [stale()], epochs=2, minibatch_steps=5, micro_batch_steps=2)
    for answer in pool.run(f"{CASES}trained", 2, strategy, devices=devices, **case):
        assert distance(answer["weights"], trained(ONE_RANK, **case)["weights"]) <= 1e-4
