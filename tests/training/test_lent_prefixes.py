"""The learner on prefixes that generators have lent: updates equal to those that compute them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.adapted_run import collect, small
from tests.training.toy import algorithm, training
from torch.overrides import TorchFunctionMode

from polyrhythm.runtime.memory.prefixes import Prefixes, PrefixPool, PrefixSeat, row_specs
from polyrhythm.specs.hashing import row_digests
from polyrhythm.training.batch import TrainingBatch, collate
from polyrhythm.training.learner import Learner
from polyrhythm.training.pooled import Places, PooledRows, join_pooled
from polyrhythm.training.steps import SampleFeed, finish

KL = {"kl": {"coef": 0.1}, "proximal": "recompute", "loss": "decoupled_ppo", "bootstrap": "always"}
BLOCKS, STEPS, LAST = 5, 14, 4
#: Blocks of the trajectories in the arena.
PLACES = (3, 0, 4, 1)
SHARE = "train/actor/lent_fraction"


def placed(policy):
    """The samples, each with its entries of an arena."""
    data = collect(policy)
    for block, sample in zip(PLACES, data, strict=True):
        sample.entries = block + BLOCKS * np.arange(sample.steps)
    return data


def pool_of(policy, name, slots=1000) -> tuple[Prefixes, PrefixPool]:
    with torch.no_grad():
        specs = row_specs(policy.precompute(collate(collect(policy)).obs))
    source = Prefixes(PrefixSeat(name, False, "cpu", "cpu"), specs, lambda: 1)
    source.create(slots, 2**20)
    pool = source.find()
    assert pool is not None
    return source, pool


def lend(policy, pool, data, rows) -> None:
    """Lend these chunk steps of the update, as a generator does."""
    packed, rows = collate(data), np.asarray(rows)
    shown = {name: x[rows] for name, x in packed.obs.items()}
    entries = packed.entries.numpy()[rows]
    assert pool.claim(entries).all()
    with torch.no_grad():
        pool.write(torch.from_numpy(np.stack((entries, np.arange(len(rows))))), policy.precompute(shown))
    pool.stamp(entries, row_digests({name: x.numpy() for name, x in shown.items()}))


def gradients(policy, prefixes, data, limit=4096):
    """Gradients of the first optimizer step, the policy's tensors after the update, metrics, and computed prefixes."""
    settings = training(epochs=2, minibatch_steps=7, micro_batch_steps=4, precomputed_mib=limit)
    learner = Learner(policy, algorithm(**KL), settings, total_updates=4, seed=1)
    learner.prefixes, policy.network.prefixes = prefixes, 0
    steps = learner.update(data, 0)
    next(steps)
    first = [p.grad.clone() for p in learner.parameters]
    metrics = finish(steps)
    return first, dict(policy.state_dict()), metrics, policy.network.prefixes


@pytest.mark.parametrize("lent", [range(STEPS), range(0, STEPS, 3), [], [5]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_computed_prefixes(lent, dtype) -> None:
    policy, other = small(train="expert", dtype=dtype), small(train="expert", dtype=dtype)
    data = placed(policy)
    source, pool = pool_of(policy, f"gradients {lent} {dtype}")
    if len(lent):
        lend(policy, pool, data, lent)
    expected, weights, metrics, computed = gradients(other, None, data)
    found, ours, told, missing = gradients(policy, source, data)
    assert (computed, missing) == (STEPS + LAST, STEPS - len(lent) + LAST)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == "float32" else {"atol": 2e-2, "rtol": 2e-2}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **near)
    for name, x in ours.items():
        torch.testing.assert_close(x, weights[name], atol=1e-5, rtol=1e-5)
    assert told.pop(SHARE) == pytest.approx(len(lent) / STEPS)
    assert told.keys() == metrics.keys()


@pytest.mark.parametrize("what", ["image", "entry", "slots", "no entries"])
def test_what_is_not_of_the_sample_is_computed(what: str) -> None:
    policy = small(train="expert")
    data = placed(policy)
    source, pool = pool_of(policy, what, slots=8 if what == "slots" else 1000)
    inside = [row for row, entry in enumerate(collate(data).entries.tolist()) if entry < pool.slots]
    lend(policy, pool, data, inside)
    lacking = STEPS - len(inside)
    if what == "image":
        name = next(iter(data[1].obs))
        data[1].obs[name] = data[1].obs[name] + 1
        lacking = data[1].steps
    elif what == "entry":
        data[2].entries = data[2].entries + 1
        lacking = data[2].steps
    elif what == "no entries":
        data[0].entries = None
        lacking = STEPS
    _, _, metrics, computed = gradients(policy, source, data)
    assert lacking > 0
    assert computed == lacking + LAST
    assert metrics[SHARE] == pytest.approx(1 - lacking / STEPS)


def pooled(lent: list[bool], names: tuple[str, ...] = ("keys", "values")) -> dict[str, PooledRows]:
    """Arrays whose row i is i, of these rows lent; the others are the trainer's own."""
    rows = len(lent)
    own, at = [row for row in range(rows) if not lent[row]], torch.arange(rows) + 3
    at[own] = -1 - torch.arange(len(own))
    places, pool = Places(at, len(own)), torch.arange(-3.0, 20).view(-1, 1)
    pool[[row + 3 for row in own]] = -99.0
    return {name: PooledRows(pool, torch.tensor(own, dtype=torch.float32).view(-1, 1), places) for name in names}


class Reads(TorchFunctionMode):
    """Counts rows that are gathered from floating-point arrays, and searches of places."""

    rows, searches = 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.index_select and found.is_floating_point():
            self.rows += len(found)
        self.searches += func is torch.Tensor.nonzero
        return found


@pytest.mark.parametrize("lent", [[True] * 9, [False] * 9, [True, False, False, True, False, True, True, False, True]])
def test_a_micro_batch_reads_its_own_rows_alone(lent: list[bool]) -> None:
    index = torch.tensor([8, 0, 3, 4, 7])
    with Reads() as reads:
        arrays = {name: x.index_select(0, index) for name, x in pooled(lent).items()}
        assert reads.rows == 0, "of the mini-batch nothing is copied"
        for part in (slice(0, 2), slice(2, 4), slice(4, 5)):
            for x in arrays.values():
                assert x[part].squeeze(1).tolist() == index[part].tolist()
    assert reads.rows == 2 * len(index)
    assert reads.searches == 3 * 2, "where rows are is the same for all arrays"


def test_a_policy_gets_tensors_of_a_whole_mini_batch_and_of_padding() -> None:
    rows, x = [True, False, True, False], torch.ones(4, 1)
    given = {"forward_inputs": {"x": x}, "valid": x > 0}
    zeros = dict.fromkeys(("behavior", "proximal", "advantage", "weight", "old_value", "returns", "value_mask"), x)
    batch = TrainingBatch(obs={**pooled(rows), "x": x}, **given, **zeros)  # type: ignore[arg-type]
    index = torch.tensor([3, 0])
    taken = batch.take(index)
    (whole,) = taken.micro_batches([2], torch.device("cpu"))
    assert torch.equal(whole.obs["keys"].squeeze(1), index.float())
    *parts, padding = taken.micro_batches([1, 1], torch.device("cpu"), [batch.take(torch.tensor([1])).masked()])
    assert [part.obs["values"].item() for part in (*parts, padding)] == [3.0, 0.0, 1.0]
    assert not padding.weight.any()


def test_pooled_rows_are_joined_and_selected_again() -> None:
    parts = [pooled(lent) for lent in ([True, False], [False, False, True], [True])]
    joined = {name: join_pooled([part[name] for part in parts]) for name in ("keys", "values")}
    assert joined["keys"].places is joined["values"].places
    expected = torch.tensor([0, 1, 0, 1, 2, 0.0])
    for index in (torch.arange(6), torch.tensor([5, 1, 2]), torch.tensor([3])):
        for x in joined.values():
            found = x.index_select(0, index)
            assert torch.equal(found[:].squeeze(1), expected[index])
            assert torch.equal(found.index_select(0, torch.tensor([0]))[:].squeeze(1), expected[index[:1]])


def test_an_update_in_parts_reads_each_part_where_it_was_lent() -> None:
    policy, other = small(train="expert"), small(train="expert")
    data = placed(policy)
    source, pool = pool_of(policy, "parts")
    lend(policy, pool, data, [0, 1, 6, 7, 9])
    settings = training(epochs=2, minibatch_steps=0, micro_batch_steps=4, mini_batch_samples=4)
    both = []
    for one, prefixes in ((policy, source), (other, None)):
        learner = Learner(one, algorithm(**{**KL, "normalize_advantage": False}), settings, total_updates=4, seed=1)
        learner.prefixes = prefixes
        feed = SampleFeed()
        steps = learner.update_in_parts(feed, 0)
        for number, sample in enumerate(data):
            feed.add([sample], more=number < len(data) - 1)
            if number < len(data) - 1:
                next(steps)
        both.append((finish(steps), dict(one.state_dict())))
    (told, ours), (metrics, weights) = both
    assert told.pop(SHARE) == pytest.approx(5 / STEPS)
    assert told.keys() == metrics.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, weights[name], atol=1e-5, rtol=1e-5)
