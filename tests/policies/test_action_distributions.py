"""The distributions against torch.distributions, and their samples against their probabilities."""

from __future__ import annotations

import torch

from polyrhythm.policies import distributions as d
from polyrhythm.policies import noise


def test_categorical_agrees_with_torch() -> None:
    logits = torch.randn(5, 2, 3, 7, generator=torch.Generator().manual_seed(0))
    tokens = logits.argmin(-1)
    reference = torch.distributions.Categorical(logits=logits)
    log_p = d.log_probs(logits)
    torch.testing.assert_close(d.categorical_logprob(log_p, tokens), reference.log_prob(tokens))
    torch.testing.assert_close(d.categorical_entropy(log_p), reference.entropy())


def test_normal_agrees_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, mean = torch.randn(2, 6, 2, 3, generator=generator)
    log_std = torch.randn(2, 3, generator=generator)
    reference = torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(d.normal_logprob(x, mean, log_std), reference.log_prob(x))
    torch.testing.assert_close(d.normal_entropy(log_std).expand(6, 2, 3), reference.entropy())


def test_float32_whatever_comes_in() -> None:
    half = torch.zeros(2, 1, 3, dtype=torch.bfloat16)
    assert d.log_probs(half).dtype == torch.float32
    assert d.normal_logprob(half, half, half[0]).dtype == torch.float32
    assert d.normal_entropy(half[0]).dtype == torch.float32
    assert d.normal_sample(half, half[0], half.float(), torch.zeros(2, dtype=torch.bool)).dtype == torch.float32


def test_categorical_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.05, 0.25])
    log_p = probabilities.log().expand(40_000, 5)
    greedy = torch.zeros(40_000, dtype=torch.bool)
    tokens = d.categorical_sample(log_p, noise.uniform(torch.arange(40_000), 1).squeeze(1), greedy, log_p.argmax(-1))
    frequencies = torch.bincount(tokens, minlength=5) / 40_000
    assert (frequencies - probabilities).abs().max() < 0.01
    assert frequencies[1] == 0


def test_extreme_noise_stays_within_the_choices() -> None:
    log_p = d.log_probs(torch.randn(100, 9, generator=torch.Generator().manual_seed(1)))
    rows = torch.zeros(100, dtype=torch.bool)
    assert int(d.categorical_sample(log_p, torch.full((100,), 1 - 2.0**-24), rows, log_p.argmax(-1)).max()) <= 8
    assert int(d.categorical_sample(log_p, torch.full((100,), 2.0**-24), rows, log_p.argmax(-1)).min()) >= 0


def test_a_choice_that_does_not_exist_has_no_part_in_anything() -> None:
    logits = torch.tensor([[1.0, 2.0, 50.0], [1.0, 2.0, 3.0]], requires_grad=True)
    allowed = torch.tensor([[True, True, False], [True, True, True]])
    log_p = d.log_probs(logits, allowed)
    torch.testing.assert_close(log_p[0, :2], d.log_probs(logits[0, :2]))
    torch.testing.assert_close(d.categorical_entropy(log_p)[0], d.categorical_entropy(log_p[0, :2]))
    (d.categorical_entropy(log_p).sum() + log_p[0, 0]).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] == 0
    assert log_p.exp()[0, 2] == 0


def test_extreme_noise_stays_within_the_counts_of_each_entry() -> None:
    counts = torch.tensor([9, 2, 4])
    logits = torch.randn(100, 3, 9, generator=torch.Generator().manual_seed(1))
    log_p = d.log_probs(logits, torch.arange(9) < counts[:, None])
    rows = torch.zeros(100, dtype=torch.bool)
    for uniform in (2.0**-24, 0.5, 1 - 2.0**-24, 1.0):
        tokens = d.categorical_sample(log_p, torch.full((100, 3), uniform), rows, log_p.argmax(-1), counts - 1)
        assert (tokens < counts).all()
        assert (log_p.argmax(-1) < counts).all()


def test_the_mean_of_bins_is_where_the_probability_lies_even_if_no_bin_there_is_likeliest() -> None:
    log_p = torch.tensor([[0.4, 0.0, 0.0, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0, 1.0]]).log()
    assert d.categorical_mean(log_p).tolist() == [2, 4]  # 0.3·3 + 0.3·4 = 2.1
    assert log_p.argmax(-1).tolist() == [0, 4]


def test_greedy_is_the_best_token_row_by_row() -> None:
    log_p = d.log_probs(torch.tensor([[0.0, 3.0, 0.0]]).expand(2, 3))
    tokens = d.categorical_sample(log_p, torch.tensor([1e-6, 1e-6]), torch.tensor([True, False]), log_p.argmax(-1))
    assert tokens.tolist() == [1, 0]
    drawn = d.normal_sample(torch.zeros(2, 1), torch.zeros(1), torch.ones(2, 1), torch.tensor([True, False]))
    assert drawn.tolist() == [[0.0], [1.0]]
