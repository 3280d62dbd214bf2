"""Ranks on several hosts: shards within each, the states that they save, and where they meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.plugins.ranks.cases import policy_of, trained
from tests.plugins.ranks.pool import RankPool
from tests.plugins.ranks.test_ranks import ADAPTED, CASES, STATE, compare, distance, plain_case, ragged, same_state
from tests.training.adapted_run import collect as collect_adapted
from tests.training.adapted_run import small

from polyrhythm.config.sections.placement import ShardSettings, TrainerSeatSettings
from polyrhythm.plugins.ranks import count_shards, hosts_of_replicas
from polyrhythm.policies.form import published_state
from polyrhythm.training.checkpoint import load
from polyrhythm.training.ranks import ONE_RANK

TWO_BY_TWO = "aabb"
SHARDED: dict[str, Any] = {"strategy": "shard", "hosts": TWO_BY_TWO}


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("aaabbb", [[0, 1, 2], [3, 4, 5]]),
        ("aab", []),
        ("abcd", []),
        ("aaaa", []),
        ("", []),
    ],
)
def test_hosts_have_all_weights_if_they_have_equally_many_ranks(hosts: str, found: list[list[int]]) -> None:
    assert hosts_of_replicas(hosts, ShardSettings()) == found
    assert hosts_of_replicas(hosts, ShardSettings(within="all")) == []
    settings = TrainerSeatSettings(strategy="shard")
    assert count_shards(settings, hosts) == (len(found[0]) if found else max(1, len(hosts)))
    assert count_shards(TrainerSeatSettings(), hosts) == 1


@pytest.mark.parametrize("hosts", [pytest.param("aabb", marks=long(5, "hosts whose ranks stand together")), "abab"])
def test_a_run_with_shards_within_hosts_is_that_of_one_rank(pool: RankPool, hosts: str) -> None:
    data = [ragged(seed, per_action=False) for seed in range(6)]
    settings = {"advantage": "grpo", "kl": {"coef": 0.05}}
    case = plain_case(settings, data, minibatch_steps=8, critic_warmup_updates=2)
    found = pool.run(f"{CASES}trained", 4, "shard", hosts=hosts, **case)
    one = trained(ONE_RANK, **case)
    compare(one, found, 1e-5)
    assert distance(one["weights"], policy_of("toy").state_dict()) > 0.01


@long(5, "blocks on four ranks of two hosts")
@pytest.mark.parametrize("train", ["expert", "lora"])
def test_blocks_with_shards_within_hosts_have_the_gradients_of_one_rank(pool: RankPool, train: str) -> None:
    """Also where they are in host memory. The expert has gradients that are all rounding, from which Adam takes whole
    steps, on any number of ranks."""
    steps = {"epochs": 2, "minibatch_steps": 7, "optimizer": {"lr": 1e-3, "offload": True}}
    case = {"kind": "adapted", "changes": {"train": train}, "settings": ADAPTED, "train": steps}
    data = [collect_adapted(small())] * 3
    one = trained(ONE_RANK, **case, trajectories=data)
    for options in (ShardSettings(), *([ShardSettings(cpu_offload=True)] if train == "expert" else [])):
        found = pool.run(f"{CASES}trained", 4, "shard", options, hosts=TWO_BY_TWO, **case, trajectories=data)
        assert all(torch.equal(x, other["weights"][name]) for other in found for name, x in found[0]["weights"].items())
        assert distance(found[0]["gradient"], one["gradient"]) <= 1e-6
        assert train == "expert" or distance(found[0]["weights"], one["weights"]) <= 1e-5


def test_whole_weights_are_published_in_order_on_all_ranks(pool: RankPool) -> None:
    case: dict[str, Any] = {"kind": "adapted", "changes": {"train": "expert"}, "settings": {}, "train": {}}
    expected = published_state(policy_of("adapted", train="expert"))
    for answer in pool.run(f"{CASES}trained", 4, hosts=TWO_BY_TWO, strategy="shard", trajectories=[], **case):
        assert list(answer["weights"]) == list(expected)
        assert all(torch.equal(x, answer["weights"][name]) for name, x in expected.items())


@pytest.mark.parametrize(
    ("memories", "hosts", "writers"),
    [
        ("aa", "", {0, 1}),
        ("aaaa", "", {0, 1, 2, 3}),
        ("aabb", TWO_BY_TWO, {0, 1}),
        ("abab", "abab", {0, 2}),
        ("ab", "", None),
        ("aaab", "", None),
        ([""] * 2, "", None),
    ],
)
def test_ranks_of_one_memory_write_every_row_once_where_they_have_them(
    memories: str, hosts: str, writers: set[int] | None, pool: RankPool
) -> None:
    found = pool.run(f"{CASES}written", len(memories), "shard", hosts=hosts, memories=list(memories))
    assert {together for together, _ in found} == {writers is not None}
    if writers is None:
        return
    assert {rank for rank, (_, pieces) in enumerate(found) if pieces} == writers
    state = published_state(policy_of("adapted", train="expert"))
    expected = {name: torch.full_like(x, torch.nan) for name, x in state.items()}
    for _, pieces in found:
        for name, first, rows in pieces:
            whole = expected[name] if first is None else expected[name][first : first + len(rows)]
            assert not len(rows) or whole.isnan().all(), "nobody else writes them"
            whole.copy_(rows)
    assert all(torch.equal(expected[name], x) for name, x in state.items())


@long(11, "a state of two hosts, loaded by four kinds of trainer")
def test_a_state_saved_with_shards_within_hosts_is_loaded_by_any_number_of_ranks(
    pool: RankPool, tmp_path: Path
) -> None:
    """Each tensor is written once, though two hosts have it."""
    folder, other, data = tmp_path / "trainer-00000002", tmp_path / "two", [collect_adapted(small())]
    once = {**STATE, "hosts": TWO_BY_TWO, "trajectories": data * 2}
    saved = pool.run(f"{CASES}trained", 4, "shard", **once, save=str(folder))[0]["state"]
    pool.run(f"{CASES}trained", 2, "shard", **STATE, trajectories=data * 2, save=str(other))
    written, least = (sum(file.stat().st_size for file in one.iterdir()) for one in (folder, other))
    assert written < 1.5 * least
    assert same_state(load(folder), saved)
    assert same_state(trained(ONE_RANK, **STATE, trajectories=[], load=str(folder))["state"], saved)
    then = {**STATE, "trajectories": [], "load": str(folder)}
    others = ((2, "shard", ""), (4, "shard", "aabb"), (4, "shard", "abcd"), (3, "replicate", "aab"))
    for size, strategy, hosts in others:
        for answer in pool.run(f"{CASES}trained", size, strategy, hosts=hosts, **then):
            assert same_state(answer["state"], saved)
