from __future__ import annotations

import inspect
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from tests.algorithms.reference import gae_of_one, group_score, v_trace_of_one
from torch import Tensor

from polyrhythm.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInput,
    Advantages,
    WhiteningStd,
    gae,
    grpo,
    maxrl,
    needs_bootstrap,
    normalize,
    overlong_penalty,
    reinforce_plus_plus,
    rloo,
    v_trace,
)
from polyrhythm.algorithms.metrics import explained_variance

USUAL = {"gamma": 0.97, "gae_lambda": 0.9}
OTHERS = {"v_trace": {"rho_cap": 1.2, "trace_cap": 0.9}, "reinforce_plus_plus": {"group_baseline": True}}


def packed(lengths: list[int], chunk: int | None, seed: int) -> AdvantageInput:
    """Random ones in float64; the last chunk of each trajectory is cut short; every two trajectories are a group."""
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    shape = (n,) if chunk is None else (n, chunk)
    rewards, penalty, values, ratio = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(4))
    valid = torch.ones(shape, dtype=torch.bool)
    if chunk is not None:
        for last in torch.tensor(lengths).cumsum(0) - 1:
            valid[last, int(torch.randint(1, chunk + 1, (), generator=rng)) :] = False
    trajectory = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    bootstrap = torch.randn(len(lengths), generator=rng, dtype=torch.float64)
    group = 9 - torch.arange(len(lengths)) // 2
    return AdvantageInput(rewards, 0.1 * penalty, values, valid, 0.5 * ratio, trajectory, bootstrap, group)


def of_scores(scores: list[float], group: list[int]) -> AdvantageInput:
    """Trajectories of one chunk step each."""
    rewards = torch.tensor(scores, dtype=torch.float64)
    zeros = torch.zeros_like(rewards)
    every = torch.ones(len(scores), dtype=torch.bool)
    return AdvantageInput(rewards, zeros, zeros, every, zeros, torch.arange(len(scores)), zeros, torch.tensor(group))


def one_by_one(samples: AdvantageInput) -> list[tuple[Tensor, Tensor]]:
    """The rows of each trajectory, and which of their entries are valid."""
    rows = [samples.trajectory == i for i in range(len(samples.bootstrap))]
    return [(mine, samples.valid[mine]) for mine in rows]


def estimate(name: str, samples: AdvantageInput) -> Advantages:
    """With the returns of `gae` where it has none of its own, as the learner has it."""
    function = ADVANTAGES[name]
    names = inspect.signature(function).parameters
    given = function(samples, **{k: v for k, v in (USUAL | OTHERS.get(name, {})).items() if k in names})
    return Advantages(given, gae(samples, **USUAL).returns) if isinstance(given, Tensor) else given


CHUNKS = pytest.mark.parametrize("chunk", [None, 1, 4])
LENGTHS = pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 7, 2, 4]])
DISCOUNTS = pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])


@CHUNKS
@LENGTHS
@DISCOUNTS
def test_gae_is_the_explicit_sum(chunk: int | None, lengths: list[int], gamma: float, lam: float) -> None:
    samples = packed(lengths, chunk, seed=1)
    got = gae(samples, gamma=gamma, gae_lambda=lam)
    for (mine, valid), last in zip(one_by_one(samples), samples.bootstrap.tolist(), strict=True):
        rewards, values = samples.rewards[mine][valid], samples.values[mine][valid]
        wanted = torch.tensor(gae_of_one(rewards.tolist(), values.tolist(), last, gamma, lam), dtype=torch.float64)
        torch.testing.assert_close(got.advantages[mine][valid], wanted)
        torch.testing.assert_close(got.returns[mine][valid], wanted + values)


@CHUNKS
@LENGTHS
@DISCOUNTS
def test_v_trace_is_the_sum_of_the_paper(chunk: int | None, lengths: list[int], gamma: float, lam: float) -> None:
    samples = packed(lengths, chunk, seed=6)
    got = v_trace(samples, gamma=gamma, gae_lambda=lam, rho_cap=1.2, trace_cap=0.9)
    for (mine, valid), last in zip(one_by_one(samples), samples.bootstrap.tolist(), strict=True):
        rewards, values, ratios = (
            x[mine][valid].tolist() for x in (samples.rewards, samples.values, samples.log_ratio.exp())
        )
        wanted = v_trace_of_one(rewards, values, ratios, last, gamma, lam, (1.2, 0.9))
        assert got.advantages[mine][valid].tolist() == pytest.approx(wanted[0])
        assert got.returns[mine][valid].tolist() == pytest.approx(wanted[1])


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_v_trace_on_policy_has_the_targets_of_gae(lam: float) -> None:
    samples = packed([3, 1, 6], 2, seed=7)
    samples = samples._replace(log_ratio=torch.zeros_like(samples.log_ratio))
    got = v_trace(samples, gamma=0.9, gae_lambda=lam, rho_cap=1.0, trace_cap=1.0)
    wanted = gae(samples, gamma=0.9, gae_lambda=lam)
    torch.testing.assert_close(got.returns, wanted.returns)
    if lam == 1.0:
        torch.testing.assert_close(got.advantages, wanted.advantages)


@CHUNKS
@LENGTHS
@pytest.mark.parametrize("name", ["sample", "population", "none", "rloo", "maxrl"])
def test_group_advantages_golden(chunk: int | None, lengths: list[int], name: str) -> None:
    samples = packed(lengths, chunk, seed=8)
    own = {"rloo": rloo, "maxrl": maxrl}
    got = own[name](samples) if name in own else grpo(samples, std=name)  # type: ignore[arg-type]
    trajectories = one_by_one(samples)
    scores = [float(samples.rewards[mine][valid].sum()) for mine, valid in trajectories]
    for i, (mine, valid) in enumerate(trajectories):
        wanted = group_score(name, i, scores, samples.group.tolist())
        assert got[mine][valid].tolist() == pytest.approx([wanted] * int(valid.sum()))


@CHUNKS
@LENGTHS
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_golden(chunk: int | None, lengths: list[int], baseline: bool) -> None:
    samples = packed(lengths, chunk, seed=9)
    got = reinforce_plus_plus(samples, group_baseline=baseline)
    trajectories = one_by_one(samples)
    scores = [float((samples.rewards - samples.penalty)[mine][valid].sum()) for mine, valid in trajectories]
    for i, (mine, valid) in enumerate(trajectories):
        score = group_score("mean", i, scores, samples.group.tolist()) if baseline else scores[i]
        penalties = samples.penalty[mine][valid].tolist()
        wanted = [score + sum(penalties[t:]) for t in range(len(penalties))]
        assert got[mine][valid].tolist() == pytest.approx(wanted)


@CHUNKS
@LENGTHS
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reward_to_go_golden(chunk: int | None, lengths: list[int], gamma: float) -> None:
    samples = packed(lengths, chunk, seed=10)
    got = reinforce_plus_plus(samples, gamma=gamma, returns="to_go")
    for mine, valid in one_by_one(samples):
        rewards = samples.rewards[mine][valid].tolist()
        wanted = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
        assert got[mine][valid].tolist() == pytest.approx(wanted)


def test_reward_to_go_worked_example() -> None:
    one = of_scores([1.0, 0.0, 1.0], [0, 0, 0])._replace(trajectory=torch.zeros(3, dtype=torch.int64))
    one = one._replace(bootstrap=torch.zeros(1), group=torch.zeros(1, dtype=torch.int64))
    assert reinforce_plus_plus(one, gamma=0.5, returns="to_go").tolist() == [1.25, 0.5, 1.0]
    assert reinforce_plus_plus(one, gamma=0.5).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_masked_entries_never_matter_even_inside_a_trajectory(name: str) -> None:
    samples = packed([4, 3], 3, seed=2)
    samples.valid[1, 1] = False
    wanted = estimate(name, samples)
    for x in (samples.rewards, samples.penalty, samples.values, samples.log_ratio):
        x[~samples.valid] = torch.nan
    got = estimate(name, samples)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours[~samples.valid].any()
    valid = samples.valid
    assert torch.equal(normalize(got.advantages, valid), normalize(wanted.advantages, valid))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_trajectories_never_matters(name: str) -> None:
    samples, order = packed([3, 4, 2, 5], 2, seed=4), [2, 0, 3, 1]
    rows = torch.cat([(samples.trajectory == i).nonzero().squeeze(1) for i in order])
    moved = AdvantageInput(
        *(x[rows] for x in samples[:5]),
        trajectory=torch.repeat_interleave(torch.arange(4), torch.bincount(samples.trajectory)[order]),
        bootstrap=samples.bootstrap[order],
        group=samples.group[order],
    )
    for ours, theirs in zip(estimate(name, moved), estimate(name, samples), strict=True):
        torch.testing.assert_close(ours, theirs[rows])


def test_gae_worked_example() -> None:
    both = torch.tensor([True, True])
    zeros = torch.zeros(2)
    got = gae(
        AdvantageInput(
            torch.tensor([0.0, 1.0]),
            zeros,
            torch.tensor([0.5, 0.5]),
            both,
            zeros,
            torch.tensor([0, 0]),
            torch.tensor([0.0]),
            torch.tensor([0]),
        ),
        gamma=1.0,
        gae_lambda=1.0,
    )
    assert got.advantages.tolist() == [0.5, 0.5]
    assert got.returns.tolist() == [1.0, 1.0]


def test_truncation_with_bootstrap_is_reward_plus_discounted_final_value() -> None:
    """The textbook form: r_last += γ·V(final), then GAE as if the task had ended."""
    samples = packed([3, 4], None, seed=3)
    got = gae(samples, gamma=0.97, gae_lambda=0.9)
    raised = samples.rewards.clone()
    raised[[2, 6]] += 0.97 * samples.bootstrap
    ended = samples._replace(rewards=raised, bootstrap=torch.zeros_like(samples.bootstrap))
    torch.testing.assert_close(got.advantages, gae(ended, gamma=0.97, gae_lambda=0.9).advantages)


def test_bootstrap_kinds() -> None:
    terminated, truncated = torch.tensor([True, False, True, False]), torch.tensor([False, True, True, False])
    assert needs_bootstrap(terminated, truncated, "standard").tolist() == [False, True, False, False]
    assert needs_bootstrap(terminated, truncated, "always").all()
    assert not needs_bootstrap(terminated, truncated, "never").any()


@pytest.mark.parametrize(("kind", "fewer"), [("population", 0), ("sample", 1)])
def test_normalize_whitens_valid_entries_only(kind: WhiteningStd, fewer: int) -> None:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64) * 3 + 7
    valid = torch.rand(6, 4, generator=rng) > 0.3
    got = normalize(x, valid, std=kind)
    entries = x[valid].tolist()
    mean = sum(entries) / len(entries)
    std = (sum((e - mean) ** 2 for e in entries) / (len(entries) - fewer)) ** 0.5
    wanted = torch.tensor([(e - mean) / (std + 1e-8) for e in entries], dtype=torch.float64)
    torch.testing.assert_close(got[valid], wanted)
    assert not got[~valid].any()
    parts = x[valid].split([3, len(entries) - 3])
    torch.testing.assert_close(torch.cat(whitened_by_ranks(list(parts), kind)), wanted)


@pytest.mark.parametrize("kind", ["population", "sample"])
@pytest.mark.parametrize("count", [0, 1])
def test_normalize_of_too_few_entries_is_zero(count: int, kind: WhiteningStd) -> None:
    valid = torch.tensor([True, False]) if count else torch.tensor([False, False])
    assert normalize(torch.tensor([3.0, 4.0]), valid, std=kind).tolist() == [0.0, 0.0]


#: Values whose float32 mean differs from them by rounding, and some that have an exact one.
EQUAL = pytest.mark.parametrize("value", [-1.6, 0.1, 1e6 + 0.1, 3e-5, -987.1, 0.0])


@EQUAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parts", [[1], [64], [1000], [3, 5], [0, 7, 1, 56]])
def test_equal_advantages_whiten_to_exactly_nothing(value: float, dtype: torch.dtype, parts: list[int]) -> None:
    entries = [torch.full((count,), value, dtype=dtype) for count in parts]
    for whitened in whitened_by_ranks(entries):
        assert not whitened.any()
    padded = torch.cat([*entries, torch.tensor([9e9], dtype=dtype)])
    valid = padded != 9e9
    assert not normalize(padded, valid).any()


@pytest.mark.parametrize(("base", "step"), [(1e6, 0.0625), (-1.6, 2.4e-7), (0.1, 1.5e-8), (3e4, 0.5)])
def test_differences_in_the_last_bits_are_whitened_as_they_are(base: float, step: float) -> None:
    x = torch.tensor([base, base + step, base, base - step, base + 3 * step] * 13)
    exact = x.double()
    wanted = (exact - exact.mean()) / (exact.std(correction=0) + 1e-8)
    torch.testing.assert_close(normalize(x, torch.ones(len(x), dtype=torch.bool)), wanted.float())
    torch.testing.assert_close(torch.cat(whitened_by_ranks(list(x.split([1, 40, 24])))), wanted.float())


def test_an_advantage_of_nan_is_not_whitened_away() -> None:
    """An update of such advantages is refused, with whose formula they are."""
    x = torch.tensor([1.0, torch.nan, 2.0])
    assert normalize(x, torch.tensor([True, True, True])).isnan().all()
    assert not normalize(x, torch.tensor([True, False, True])).isnan().any()


@pytest.mark.parametrize("value", [-1.6, 0.1, 1e6 + 0.1])
def test_equal_returns_have_no_variance_to_explain(value: float) -> None:
    returns, valid = torch.full((77,), value), torch.ones(77, dtype=torch.bool)
    assert explained_variance(torch.randn(77), returns, valid).item() == 0.0


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce_plus_plus"])
@pytest.mark.parametrize("splits", [[[1.0], [0.1, 0.9], [0.3, 0.7]], [[-1.6], [-0.4, -1.2], [-0.1] * 16, [-0.2] * 8]])
def test_the_same_return_in_other_parts_gives_exactly_nothing(name: str, splits: list[list[float]]) -> None:
    """0.1 + 0.9 is not 1 in float32: without care a group that earned the same has a signal of rounding errors."""
    rewards = torch.tensor([reward for split in splits for reward in split])
    owner = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor([len(split) for split in splits]))
    zeros, per_trajectory = torch.zeros_like(rewards), torch.zeros(len(splits))
    every = torch.ones(len(rewards), dtype=torch.bool)
    samples = AdvantageInput(rewards, zeros, zeros, every, zeros, owner, per_trajectory, per_trajectory.long())
    assert not estimate(name, samples).advantages.any()


def whitened_by_ranks(parts: list[Tensor], std: WhiteningStd = "population") -> list[Tensor]:
    """`normalize` of each rank's part; the sums meet as collectives do."""
    meeting, held = Barrier(len(parts)), [torch.zeros(())] * len(parts)

    def whiten(rank: int) -> Tensor:
        def total(x: Tensor) -> Tensor:
            held[rank] = x
            meeting.wait()
            summed = torch.stack(held).sum(0)
            meeting.wait()
            return summed

        return normalize(parts[rank], torch.ones(len(parts[rank]), dtype=torch.bool), std=std, total=total)

    with ThreadPoolExecutor(len(parts)) as ranks:
        return list(ranks.map(whiten, range(len(parts))))


def test_worked_examples_of_groups() -> None:
    samples = of_scores([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7])
    assert grpo(samples).tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-4)
    assert grpo(samples, epsilon=0.1)[0] == pytest.approx(0.5 / (3**-0.5 + 0.1))
    assert rloo(samples).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert maxrl(samples).tolist() == [1.0, -1.0, -1.0, 1.0]
    assert maxrl(of_scores([1.0, 0.0, 0.0, 0.0], [7] * 4)).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert reinforce_plus_plus(samples).tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("tokens", "penalty"), [(20, 1.0), (100, 0.5), (1, 2.0), (7, 1.0)])
def test_overlong_messages_are_punished_as_in_dapo(tokens: int, penalty: float) -> None:
    """Equation 13 of DAPO at every length that a message may have, times verl's factor."""
    lengths = list(range(101))

    def of_paper(length: int) -> float:
        if length <= 100 - tokens:
            return 0.0
        return (100 - tokens - length) / tokens if length <= 100 else -1.0

    got = overlong_penalty(torch.arange(100) < torch.tensor(lengths).unsqueeze(1), tokens=tokens, penalty=penalty)
    assert got.tolist() == pytest.approx([penalty * of_paper(length) for length in lengths])
    assert got.min() == -penalty


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_maxrl_follows_the_logarithm_of_the_success_rate(p: float) -> None:
    """Over all outcomes of four attempts: E[mean of A·d logπ/dp] = (1 − (1−p)³)/p, where reinforce has 1."""
    found = 0.0
    for scores in itertools.product([1.0, 0.0], repeat=4):
        chance = math.prod(p if score else 1 - p for score in scores)
        slopes = [1 / p if score else -1 / (1 - p) for score in scores]
        advantages = maxrl(of_scores(list(scores), [0] * 4)).tolist()
        found += chance * sum(a * slope for a, slope in zip(advantages, slopes, strict=True)) / 4
    assert found == pytest.approx((1 - (1 - p) ** 3) / p)


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([0.0, 0.0], [0.0, 0.0]),
        ([1.0, -1.0], [1.0, -1.0]),
        ([-1.0, -1.0, 1.0, -1.0], [-0.5, -0.5, 1.5, -0.5]),
        ([1.0, -0.9, 0.0, 0.0], [0.975 / 0.475, -0.925 / 0.475, -0.025 / 0.475, -0.025 / 0.475]),
    ],
)
def test_maxrl_with_penalties_keeps_the_order_of_returns(scores: list[float], wanted: list[float]) -> None:
    """A mean of 0, below it, or near it: neither infinite nor with the sign turned round."""
    assert maxrl(of_scores(scores, [3] * len(scores))).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce_plus_plus"])
def test_nobody_to_be_compared_with_gives_nothing(name: str) -> None:
    assert not estimate(name, of_scores([3.0, 5.0], [1, 2])).advantages.any()
    assert not estimate(name, of_scores([4.0, 4.0, 4.0], [1, 1, 1])).advantages.any()


@pytest.mark.parametrize(("count", "score"), [(5, 123.456), (7, 12.7), (7, -45.67), (6, 987.1)])
@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "reinforce_plus_plus"])
def test_equal_scores_give_exactly_nothing_in_float32_too(name: str, count: int, score: float) -> None:
    """Their mean is rounded; a difference of the last bit, divided by itself, would be a signal."""
    samples = of_scores([score] * count, [1] * count)
    rounded = samples._replace(rewards=samples.rewards.float(), penalty=samples.penalty.float())
    assert not estimate(name, rounded).advantages.any()
    assert estimate(name, rounded).advantages.dtype == torch.float32
