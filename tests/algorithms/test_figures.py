from __future__ import annotations

import pytest
import torch
from tests.algorithms.entries import entries

from polyrhythm.algorithms.figures import drift, explained_variance


def test_drift_by_hand() -> None:
    e = entries((30,), seed=7)
    got = drift(e, own_proximal=True)
    ratio = (e.logprob - e.proximal).exp()
    torch.testing.assert_close(got["ratio"], ratio)
    torch.testing.assert_close(got["proximal_approx_kl"], ratio - 1 - ratio.log())
    weight = (e.proximal - e.behavior).exp()
    torch.testing.assert_close(got["behav_approx_kl"], weight - 1 - weight.log())


def test_drift_without_a_proximal_policy_is_from_the_one_that_acted() -> None:
    e = entries((30,), seed=7)
    got = drift(e, own_proximal=False)
    ratio = (e.logprob - e.behavior).exp()
    torch.testing.assert_close(got["ratio"], ratio)
    torch.testing.assert_close(got["behav_approx_kl"], ratio - 1 - ratio.log())
    assert "proximal_approx_kl" not in got


def test_explained_variance() -> None:
    returns, valid = torch.tensor([0.0, 1.0, 2.0, 99.0]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, valid).item() == 1.0
    assert explained_variance(torch.ones(4), returns, valid).item() == 0.0
    assert explained_variance(2 * returns, returns, valid).item() == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(4), valid).item() == 0.0
    assert explained_variance(returns, returns, torch.zeros(4).bool()).item() == 0.0
