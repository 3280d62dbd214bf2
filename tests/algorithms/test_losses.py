from __future__ import annotations

import itertools
import math
from typing import Literal

import pytest
import torch
from tests.algorithms.entries import entries, loss_named
from tests.algorithms.reference import (
    decoupled_entry,
    gipo_entry,
    gspo_decision,
    importance_weight,
    kl_cov_entry,
    loop,
    ppo_entry,
    sapo_entry,
)
from torch import Tensor

from polyrhythm.algorithms.losses import (
    POLICY_LOSSES,
    LossInput,
    clip_cov,
    decoupled_ppo,
    gipo,
    gspo,
    kl_cov,
    m2po,
    ppo,
    sapo,
    tis,
)

CLIPS = list(itertools.product([(0.2, 0.2), (0.2, 0.28)], [None, 3.0]))


@pytest.mark.parametrize(("clip", "dual"), CLIPS)
def test_ppo_golden(clip: tuple[float, float], dual: float | None) -> None:
    e = entries()
    got = ppo(e, clip_low=clip[0], clip_high=clip[1], dual_clip=dual)
    args = (e.logprob, e.proximal, e.advantage, *clip, dual)
    torch.testing.assert_close(got.loss, loop(e.logprob.shape, lambda *a: ppo_entry(*a)[0], *args))
    clipped = loop(e.logprob.shape, lambda *a: ppo_entry(*a)[1], *args)
    assert torch.equal(got.metrics["clip_fraction"].double(), clipped)
    assert 0 < clipped.mean() < 1
    if dual is not None:
        hit = loop(e.logprob.shape, lambda *a: ppo_entry(*a)[2], *args)
        assert torch.equal(got.metrics["dual_clip_fraction"].double(), hit)
        assert hit.any()


@pytest.mark.parametrize(("clip", "dual"), CLIPS)
@pytest.mark.parametrize("most", [None, 1.5])
def test_decoupled_golden(clip: tuple[float, float], dual: float | None, most: float | None) -> None:
    e = entries()
    got = decoupled_ppo(e, clip_low=clip[0], clip_high=clip[1], dual_clip=dual, behave_weight_threshold=most)
    wanted = loop(e.logprob.shape, decoupled_entry, e.logprob, e.proximal, e.behavior, e.advantage, *clip, dual, most)
    torch.testing.assert_close(got.loss, wanted)
    over = (e.proximal - e.behavior).exp() > (most or float("inf"))
    assert ("behav_clip_fraction" in got.metrics) == (most is not None)
    assert torch.equal(got.metrics.get("behav_clip_fraction", torch.zeros(over.shape)).bool(), over)


def test_worked_examples() -> None:
    one = torch.ones(1)
    far = LossInput(torch.tensor([2.0]).log(), torch.zeros(1), torch.zeros(1), one, one.bool())
    assert ppo(far, clip_low=0.2, clip_high=0.2).loss.item() == pytest.approx(-1.2)
    bad = LossInput(torch.tensor([5.0]).log(), torch.zeros(1), torch.zeros(1), -one, one.bool())
    assert ppo(bad, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss.item() == pytest.approx(3.0)
    two = LossInput(
        torch.tensor([[0.4, 0.0]]), torch.zeros(1, 2), torch.zeros(1, 2), one.expand(1, 2), torch.ones(1, 2).bool()
    )
    assert gspo(two, clip_low=0.2, clip_high=0.5).loss.tolist() == [pytest.approx([-math.exp(0.2)] * 2)]


WEIGHTS = {
    "vanilla": {},
    "tis": {"cap": 1.3, "floor": 0.8},
    "cispo": {"clip_low": 0.4, "clip_high": 0.3},
    "topr": {"cap": 0.9, "positive_weight": 0.7, "negative_weight": 1.4},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weighing_losses_golden_with_their_gradients(name: str) -> None:
    """The loss is −w·A·logπ; its gradient has w as a constant, or it would not be −w·A."""
    e = entries(seed=8)
    logprob = e.logprob.clone().requires_grad_()
    got = POLICY_LOSSES[name](e._replace(logprob=logprob), **WEIGHTS[name])
    args = (e.logprob, e.behavior, e.advantage)
    weight = loop(e.logprob.shape, lambda *a: importance_weight(name, *a, WEIGHTS[name])[0], *args)
    torch.testing.assert_close(got.loss.detach(), -weight * e.advantage * e.logprob)
    got.loss.sum().backward()
    torch.testing.assert_close(logprob.grad, -weight * e.advantage)
    if name != "vanilla":
        cut = loop(e.logprob.shape, lambda *a: importance_weight(name, *a, WEIGHTS[name])[1], *args)
        assert torch.equal(got.metrics["truncated_fraction"].double(), cut)
        assert 0 < cut.mean() < 1


@pytest.mark.parametrize("shape", [(40,), (20, 3), (12, 2, 3)])
def test_gspo_golden(shape: tuple[int, ...]) -> None:
    """At every level: one ratio for the valid entries of a chunk step."""
    e = entries(shape, spread=0.5, seed=9)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0] = False
    masked = LossInput(*(torch.where(mask, x, 0.0) for x in e[:4]), mask)
    rows = [x.reshape(shape[0], -1).tolist() for x in masked[:5]]
    wanted = torch.tensor(
        [gspo_decision(lp, b, a, m, 0.2, 0.28) for lp, _, b, a, m in zip(*rows, strict=True)], dtype=torch.float64
    )
    got = gspo(masked, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(got.loss, wanted.reshape(shape))
    around = masked._replace(proximal=masked.behavior, behavior=masked.proximal)
    assert torch.equal(gspo(around, clip_low=0.2, clip_high=0.28, ratio_to="proximal").loss, got.loss)
    assert 0 < got.metrics["clip_fraction"].mean() < 1


@pytest.mark.parametrize(("low", "high"), [(None, 0.28), (0.2, None), (None, None)])
def test_a_clip_of_none_leaves_that_side_open(low: float | None, high: float | None) -> None:
    e = entries(seed=21)
    got = ppo(e, clip_low=low, clip_high=high)
    args = (e.logprob, e.proximal, e.advantage, 1.0 if low is None else low, 1e9 if high is None else high, None)
    torch.testing.assert_close(got.loss, loop(e.logprob.shape, lambda *a: ppo_entry(*a)[0], *args))
    clipped = loop(e.logprob.shape, lambda *a: ppo_entry(*a)[1], *args)
    assert torch.equal(got.metrics["clip_fraction"].double(), clipped)
    assert bool(clipped.any()) == (low is not None or high is not None)


def test_sapo_golden() -> None:
    e = entries(seed=22)
    got = sapo(e, tau_positive=1.0, tau_negative=1.05).loss
    torch.testing.assert_close(got, loop(got.shape, sapo_entry, e.logprob, e.proximal, e.advantage, 1.0, 1.05))
    other = sapo(e, tau_positive=1.0, tau_negative=1.05, ratio_to="behavior").loss
    torch.testing.assert_close(other, loop(got.shape, sapo_entry, e.logprob, e.behavior, e.advantage, 1.0, 1.05))


@pytest.mark.parametrize("shape", [(40,), (20, 3), (12, 2, 3)])
@pytest.mark.parametrize("ratio_to", ["behavior", "proximal"])
def test_gipo_golden_with_its_gradient(shape: tuple[int, ...], ratio_to: Literal["behavior", "proximal"]) -> None:
    """At every level; the trust weight is a constant of the gradient, or that would have another sign at ρ > e^σ²."""
    e = entries(shape, seed=24)
    logprob = e.logprob.clone().requires_grad_()
    got = gipo(e._replace(logprob=logprob), sigma=0.5, ratio_to=ratio_to)
    args = (e.logprob, getattr(e, ratio_to), e.advantage, 0.5)
    wanted = loop(e.logprob.shape, lambda *a: gipo_entry(*a)[0], *args)
    torch.testing.assert_close(got.loss.detach(), wanted)
    torch.testing.assert_close(got.metrics["trust_weight"], loop(wanted.shape, lambda *a: gipo_entry(*a)[1], *args))
    got.loss.sum().backward()
    torch.testing.assert_close(logprob.grad, wanted)


@pytest.mark.parametrize(("sigma", "at_20"), [(0.1, 0.0), (1.0, 0.0), (2.0, math.exp(20 - 50)), (10.0, math.exp(18))])
def test_gipo_at_extreme_ratios_is_the_product_of_its_factors(sigma: float, at_20: float) -> None:
    """e^±20 in float32, and beyond, where the ratio is clamped and has no gradient; no 0·∞."""
    logprob = torch.tensor([20.0, -20.0, 90.0, -90.0], requires_grad=True)
    zero, one = torch.zeros(4), torch.ones(4)
    loss = gipo(LossInput(logprob, zero, zero, one, one.bool()), sigma=sigma).loss
    loss.sum().backward()
    assert loss[0].item() == pytest.approx(-at_20, rel=1e-4, abs=1e-30)
    assert loss[2].item() == loss[0].item()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()
    assert not logprob.grad[2:].any()
    assert (loss <= 0).all()


def test_losses_of_selected_entries() -> None:
    """clip_cov and m2po drop them, kl_cov penalises them; the others are PPO's, unclipped in kl_cov and m2po."""
    e = entries(seed=23)
    chosen = torch.rand(e.mask.shape, generator=torch.Generator().manual_seed(2)) > 0.7
    e = e._replace(selected=chosen)
    clipped, plain = ppo(e, clip_low=0.2, clip_high=0.28).loss, ppo(e, clip_low=None, clip_high=None).loss
    assert torch.equal(clip_cov(e, clip_low=0.2, clip_high=0.28).loss, torch.where(chosen, 0.0, clipped))
    assert torch.equal(m2po(e, ratio_to="proximal").loss, torch.where(chosen, 0.0, plain))
    assert torch.equal(
        m2po(e, clip_low=0.2, clip_high=0.28, ratio_to="proximal").loss, torch.where(chosen, 0.0, clipped)
    )
    wanted = loop(e.mask.shape, kl_cov_entry, e.logprob, e.proximal, e.advantage, chosen, 0.3)
    torch.testing.assert_close(kl_cov(e, kl_coef=0.3).loss, wanted)


def test_gspo_of_one_entry_is_ppo_around_the_behaviour() -> None:
    e = entries((30,), seed=10)
    wanted = ppo(e._replace(proximal=e.behavior), clip_low=0.2, clip_high=0.3).loss
    assert torch.equal(gspo(e, clip_low=0.2, clip_high=0.3).loss, wanted)


def test_importance_sampling_without_a_cap_has_the_whole_ratio() -> None:
    e = entries(seed=11)
    wanted = -(e.logprob - e.behavior).exp() * e.advantage * e.logprob
    torch.testing.assert_close(tis(e, cap=None).loss, wanted)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.keys() - WEIGHTS.keys() - {"gipo"}))
def test_gradients_agree_with_differences(name: str) -> None:
    e = entries((4, 3), seed=3)

    def scalar(logprob: Tensor) -> Tensor:
        return loss_named(name, e._replace(logprob=logprob)).loss.sum()

    assert torch.autograd.gradcheck(scalar, (e.logprob.clone().requires_grad_(),))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    """At π_θ = π_prox = π_b every loss has the gradient of −A·logπ (A is the same at all entries of a chunk step)."""
    e = entries((20, 3), seed=4)
    advantage = e.advantage[:, :1].expand(20, 3)
    logprob = e.logprob.clone().requires_grad_()
    same = logprob.detach()
    loss_named(name, LossInput(logprob, same, same, advantage, e.mask)).loss.sum().backward()
    torch.testing.assert_close(logprob.grad, -advantage)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_masked_entries_neither_cost_nor_move_anything(name: str) -> None:
    """Masked entries are zeros: they lose nothing, get no gradient, and the others are as if they were not there."""
    e = entries((10, 4), seed=12)
    mask = torch.arange(4).expand(10, 4) < 3
    masked = LossInput(*(torch.where(mask, x, 0.0) for x in e[:4]), mask)
    logprob = masked.logprob.clone().requires_grad_()
    loss = loss_named(name, masked._replace(logprob=logprob)).loss
    loss.sum().backward()
    assert logprob.grad is not None
    assert not loss[:, 3].any()
    assert not logprob.grad[:, 3].any()
    torch.testing.assert_close(loss[:, :3].detach(), loss_named(name, LossInput(*(x[:, :3] for x in e[:5]))).loss)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_metrics_carry_no_gradient(name: str) -> None:
    e = entries((9, 2))
    terms = loss_named(name, e._replace(logprob=e.logprob.clone().requires_grad_()))
    assert terms.loss.requires_grad
    assert not any(x.requires_grad for x in terms.metrics.values())
    assert all(x.shape == e.logprob.shape for x in terms.metrics.values())


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
    e = LossInput(
        logprob, torch.tensor([0.0, 0.0, 1e4]), torch.zeros(3), torch.tensor([-1.0, -1.0, -1.0]), torch.ones(3).bool()
    )
    loss = loss_named(name, e).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()
