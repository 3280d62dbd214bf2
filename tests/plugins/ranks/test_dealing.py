"""Whole groups go to ranks, every chunk step to one, and one rank has all of them as they are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training.toy import ToyPolicy, collect

from polyrhythm.plugins.ranks.collectives import deal, share_of
from polyrhythm.training.batch import MicroBatchLimits, minibatches
from polyrhythm.training.ranks import ONE_RANK, take_share

SAMPLES = st.lists(st.tuples(st.integers(-3, 9), st.integers(1, 30)), min_size=1, max_size=20)


def test_the_longest_group_goes_first_to_the_rank_with_the_fewest_steps() -> None:
    assert deal([7, 7, 8, 9], [2, 3, 4, 1], 2) == [[0, 1], [2, 3]]
    assert deal([5, 5, 5], [1, 1, 1], 2) == [[0, 1, 2], []]


@given(SAMPLES, st.integers(1, 5))
def test_groups_stay_whole_and_no_rank_has_a_group_too_many(samples: list[tuple[int, int]], ranks: int) -> None:
    groups, steps = [group for group, _ in samples], [length for _, length in samples]
    dealt = deal(groups, steps, ranks)
    assert sorted(i for own in dealt for i in own) == list(range(len(samples)))
    assert all(own == sorted(own) for own in dealt)
    for group in set(groups):
        assert sum(any(groups[i] == group for i in own) for own in dealt) == 1
    loads = [sum(steps[i] for i in own) for own in dealt]
    longest = max(sum(length for other, length in samples if other == group) for group in groups)
    assert max(loads) - min(loads) <= longest


@given(SAMPLES, st.integers(1, 5), st.integers(0, 12), st.integers(0, 5))
def test_every_chunk_step_of_a_mini_batch_is_one_rank_s(
    samples: list[tuple[int, int]], ranks: int, minibatch: int, micro: int
) -> None:
    groups, steps = [group for group, _ in samples], [length for _, length in samples]
    shares = [share_of(groups, steps, rank, ranks) for rank in range(ranks)]
    first = [sum(steps[:i]) for i in range(len(steps))]
    for index in minibatches([sum(steps)], minibatch, (0,)):
        found = torch.full_like(index, -1)
        for share in shares:
            rows, places = share.pick(index)
            own = torch.cat([torch.arange(first[i], first[i] + steps[i]) for i in share.own] or [index[:0]])
            assert (found[places] == -1).all()
            found[places] = own[rows]
            most = share.micro_steps(index, micro)
            assert most[share.rank] == (-(-len(rows) // micro) if micro else min(len(rows), 1))
        assert torch.equal(found, index)


def test_a_rank_without_samples_has_one_in_which_nothing_counts() -> None:
    samples = collect(ToyPolicy(), (3, 2))

    share = share_of([4, 4], [sample.steps for sample in samples], 1, 2)
    packed = share.collate([replace(x, group=4) for x in samples])
    assert (share.own, share.borrowed, share.is_empty, packed.chunk_steps) == ((), 1, True, 2)
    assert not packed.valid.any()
    with pytest.raises(ValueError, match="an update needs trajectories of at least one chunk step each"):
        take_share([], ONE_RANK)


def test_padding_is_counted() -> None:
    """Of 5 steps rank 0 has 4 and rank 1 one: 2 and 1 micro-steps of at most 3, so one of four is padding."""
    share = share_of([0, 1], [4, 1], 1, 2)

    class Batch:
        obs = forward_inputs = None

        def take(self, index: torch.Tensor) -> Batch:
            return self

        def masked(self) -> str:
            return "masked"

    limits = MicroBatchLimits(ToyPolicy(), 3)
    found = share.minibatch(Batch(), torch.arange(5), limits)  # type: ignore[arg-type]
    assert (found.sizes, list(found.padding), found.padded) == ([1], ["masked"], 0.25)
    assert found.places.tolist() == [4]  # type: ignore[union-attr]


def test_one_rank_loads_nothing_of_several() -> None:
    program = """
import sys
from tests.training.toy import ToyPolicy, algorithm, collect, training
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish
policy = ToyPolicy()
learner = Learner(policy, algorithm(), training(), total_updates=1, seed=0)
finish(learner.update(collect(policy), 0))
learner.state_dict()
ours = [name for name in sys.modules if name.startswith("polyrhythm.plugins.ranks.")]
several = (*ours, "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
sys.exit(any(name in sys.modules for name in several))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
