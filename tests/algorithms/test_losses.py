from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from tests.algorithms.reference import decoupled_entry, loop, ppo_entry, value_entry
from torch import Tensor

from polyrhythm.algorithms.figures import approx_kl, drift, explained_variance
from polyrhythm.algorithms.losses import POLICY_LOSSES, Entries, Terms, decoupled_ppo, ppo, value_loss

CLIPS = list(itertools.product([(0.2, 0.2), (0.2, 0.28)], [None, 3.0]))


def entries(shape: tuple[int, ...] = (40, 3), *, spread: float = 0.8, seed: int = 0) -> Entries:
    """Random entries in float64 with ratios far enough from 1 that every branch is taken."""
    rng = torch.Generator().manual_seed(seed)
    behavior, move, drift, advantage = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(4))
    proximal = behavior + 0.5 * spread * drift
    return Entries(proximal + spread * move, proximal, behavior, advantage, torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize(("clip", "dual"), CLIPS)
def test_ppo_golden(clip: tuple[float, float], dual: float | None) -> None:
    e = entries()
    got = ppo(e, clip_low=clip[0], clip_high=clip[1], dual_clip=dual)
    args = (e.logprob, e.proximal, e.advantage, *clip, dual)
    torch.testing.assert_close(got.loss, loop(e.logprob.shape, lambda *a: ppo_entry(*a)[0], *args))
    clipped = loop(e.logprob.shape, lambda *a: ppo_entry(*a)[1], *args)
    assert torch.equal(got.figures["clip_fraction"].double(), clipped)
    assert 0 < clipped.mean() < 1
    if dual is not None:
        hit = loop(e.logprob.shape, lambda *a: ppo_entry(*a)[2], *args)
        assert torch.equal(got.figures["dual_clip_fraction"].double(), hit)
        assert hit.any()


@pytest.mark.parametrize(("clip", "dual"), CLIPS)
@pytest.mark.parametrize("most", [None, 1.5])
def test_decoupled_golden(clip: tuple[float, float], dual: float | None, most: float | None) -> None:
    e = entries()
    got = decoupled_ppo(e, clip_low=clip[0], clip_high=clip[1], dual_clip=dual, behave_weight_threshold=most)
    wanted = loop(e.logprob.shape, decoupled_entry, e.logprob, e.proximal, e.behavior, e.advantage, *clip, dual, most)
    torch.testing.assert_close(got.loss, wanted)
    over = (e.proximal - e.behavior).exp() > (most or float("inf"))
    assert torch.equal(got.figures["behav_clip_fraction"].bool(), over)


def test_worked_examples() -> None:
    one = torch.ones(1)
    far = Entries(torch.tensor([2.0]).log(), torch.zeros(1), torch.zeros(1), one, one.bool())
    assert ppo(far, clip_low=0.2, clip_high=0.2).loss.item() == pytest.approx(-1.2)
    bad = Entries(torch.tensor([5.0]).log(), torch.zeros(1), torch.zeros(1), -one, one.bool())
    assert ppo(bad, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss.item() == pytest.approx(3.0)
    value = value_loss(2 * one, 0 * one, one, one.bool(), clip=0.2, huber=None)
    assert value.item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_gradients_agree_with_differences(name: str) -> None:
    e = entries((12,), seed=3)

    def scalar(logprob: Tensor) -> Tensor:
        return loss_named(name, e._replace(logprob=logprob)).loss.sum()

    assert torch.autograd.gradcheck(scalar, (e.logprob.clone().requires_grad_(),))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    """At ρ = w = 1 every loss has the gradient of −A·logπ."""
    e = entries((20,), seed=4)
    logprob = e.logprob.clone().requires_grad_()
    same = logprob.detach()
    loss_named(name, Entries(logprob, same, same, e.advantage, e.mask)).loss.sum().backward()
    torch.testing.assert_close(logprob.grad, -e.advantage)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_only_logprob_gets_gradient_and_figures_get_none(name: str) -> None:
    e = Entries(*(x.clone().requires_grad_() if x.is_floating_point() else x for x in entries((9,))))
    terms = loss_named(name, e._replace(proximal=e.proximal.detach()))
    assert not any(x.requires_grad for x in terms.figures.values())
    terms.loss.sum().backward()
    assert e.logprob.grad is not None
    assert e.behavior.grad is None


def test_decoupled_is_ppo_to_the_bit_where_nothing_is_stale() -> None:
    e = entries((50,), seed=5)
    fresh = e._replace(behavior=e.proximal)
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    plain = ppo(fresh, **settings).loss
    assert torch.equal(decoupled_ppo(fresh, **settings, behave_weight_threshold=2.0).loss, plain)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_wild_entries_stay_finite(name: str) -> None:
    """A log-ratio of ±10⁴ gives a finite loss and gradient; a filtered entry has none at all."""
    logprob = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    e = Entries(
        logprob, torch.tensor([0.0, 0.0, 1e4]), torch.zeros(3), torch.tensor([-1.0, -1.0, -1.0]), torch.ones(3).bool()
    )
    loss = loss_named(name, e).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("huber", [None, 0.5, 10.0])
def test_value_golden(clip: float | None, huber: float | None) -> None:
    rng = torch.Generator().manual_seed(6)
    value, old, target = (torch.randn(60, generator=rng, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(60, generator=rng) > 0.2
    got = value_loss(value, old, target, mask, clip=clip, huber=huber)
    wanted = loop(value.shape, value_entry, value, old, target, clip, huber) * mask
    torch.testing.assert_close(got, wanted)

    def scalar(x: Tensor) -> Tensor:
        return value_loss(x, old, target, mask, clip=clip, huber=huber).sum()

    assert torch.autograd.gradcheck(scalar, (value.requires_grad_(),))


def test_masked_values_never_matter() -> None:
    value = torch.tensor([1.0, torch.nan], requires_grad=True)
    old, target = torch.tensor([0.5, torch.inf]), torch.tensor([0.0, torch.nan])
    loss = value_loss(value, old, target, torch.tensor([True, False]), clip=0.2, huber=1.0)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0.0]
    assert value.grad is not None
    assert value.grad.tolist() == [1.0, 0.0]


def test_drift_by_hand() -> None:
    e = entries((30,), seed=7)
    got = drift(e)
    ratio = (e.logprob - e.proximal).exp()
    torch.testing.assert_close(got["ratio"], ratio)
    torch.testing.assert_close(got["proximal_approx_kl"], ratio - 1 - ratio.log())
    weight = (e.proximal - e.behavior).exp()
    torch.testing.assert_close(got["behav_approx_kl"], weight - 1 - weight.log())


def test_k3_estimates_the_divergence() -> None:
    old = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    new = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    expected = (old * approx_kl(new.log(), old.log())).sum()
    torch.testing.assert_close(expected, (old * (old / new).log()).sum())


def test_explained_variance() -> None:
    returns, valid = torch.tensor([0.0, 1.0, 2.0, 99.0]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, valid).item() == 1.0
    assert explained_variance(torch.ones(4), returns, valid).item() == 0.0
    assert explained_variance(2 * returns, returns, valid).item() == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(4), valid).item() == 0.0
    assert explained_variance(returns, returns, torch.zeros(4).bool()).item() == 0.0


def loss_named(name: str, e: Entries) -> Terms:
    """Every loss with usual settings; a new one need only appear in the table."""
    usual = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "behave_weight_threshold": 2.0}
    loss = POLICY_LOSSES[name]
    return loss(e, **{k: v for k, v in usual.items() if k in inspect.signature(loss).parameters})
