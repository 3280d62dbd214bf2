from __future__ import annotations

import pytest
import torch
from tests.algorithms.entries import entries

from polyrhythm.algorithms.metrics import explained_variance, policy_divergence


def test_divergence_by_hand() -> None:
    e = entries((30,), seed=7)
    got = policy_divergence(e, has_proximal=True)
    ratio = (e.logprob - e.proximal).exp()
    torch.testing.assert_close(got["ratio"], ratio)
    torch.testing.assert_close(got["proximal_approx_kl"], ratio - 1 - ratio.log())
    weight = (e.proximal - e.behavior).exp()
    torch.testing.assert_close(got["behav_approx_kl"], weight - 1 - weight.log())


def test_divergence_without_a_proximal_policy_is_from_the_one_that_acted() -> None:
    e = entries((30,), seed=7)
    got = policy_divergence(e, has_proximal=False)
    ratio = (e.logprob - e.behavior).exp()
    torch.testing.assert_close(got["ratio"], ratio)
    torch.testing.assert_close(got["approx_kl"], ratio - 1 - ratio.log())
    assert got.keys() == {"ratio", "approx_kl"}


def test_explained_variance() -> None:
    returns, valid = torch.tensor([0.0, 1.0, 2.0, 99.0]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, valid).item() == 1.0
    assert explained_variance(torch.ones(4), returns, valid).item() == 0.0
    assert explained_variance(2 * returns, returns, valid).item() == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(4), valid).item() == 0.0
    assert explained_variance(returns, returns, torch.zeros(4).bool()).item() == 0.0
