"""Selection rules against plain Python over the valid entries."""

from __future__ import annotations

import torch
from tests.algorithms.entries import entries

from polyrhythm.algorithms.entry_selection import covariance_band, second_moment_excess, top_covariance
from polyrhythm.algorithms.losses import LossInput


def masked(seed: int = 30) -> LossInput:
    e = entries((30, 4), seed=seed)
    mask = torch.rand(e.mask.shape, generator=torch.Generator().manual_seed(3)) > 0.25
    return LossInput(*(torch.where(mask, x, 0.0) for x in e[:4]), mask)


def covariances(e: LossInput) -> dict[tuple[int, int], float]:
    places = [(i, j) for i in range(30) for j in range(4) if e.mask[i, j]]
    advantage = sum(float(e.advantage[p]) for p in places) / len(places)
    logprob = sum(float(e.logprob[p]) for p in places) / len(places)
    return {p: (float(e.advantage[p]) - advantage) * (float(e.logprob[p]) - logprob) for p in places}


def chosen(selected: torch.Tensor) -> set[tuple[int, int]]:
    return {(int(i), int(j)) for i, j in selected.nonzero().tolist()}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_kl_cov_takes_the_largest_covariances() -> None:
    e = masked()
    ranked = sorted(covariances(e).items(), key=lambda item: -item[1])
    for fraction, count in ((0.1, len(ranked) // 10), (1e-6, 1), (1.0, len(ranked))):
        assert chosen(top_covariance(e, fraction=fraction, generator=rng())) == {p for p, _ in ranked[:count]}


def test_clip_cov_draws_from_the_band() -> None:
    e = masked()
    band = {p for p, x in covariances(e).items() if 0.2 < x < 2.0}
    settings = {"cov_low": 0.2, "cov_high": 2.0}
    assert chosen(covariance_band(e, fraction=1.0, **settings, generator=rng())) == band
    few = [chosen(covariance_band(e, fraction=0.05, **settings, generator=rng(seed))) for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    assert all(len(one) == int(0.05 * int(e.mask.sum())) for one in few)
    assert all(one < band for one in few)
    assert len(chosen(covariance_band(e, fraction=1e-6, **settings, generator=rng()))) == 1
    assert not covariance_band(e, fraction=1.0, cov_low=50.0, cov_high=60.0, generator=rng()).any()


def test_m2po_drops_the_largest_until_the_mean_of_the_rest_is_below() -> None:
    e = masked(seed=31)
    squares = {(i, j): float(e.logprob[i, j] - e.behavior[i, j]) ** 2 for i, j in chosen(e.mask)}
    ranked = sorted(squares, key=lambda p: -squares[p])
    for threshold in (0.04, 0.5, 1e-9, 1e9):
        dropped = 0
        while dropped < len(ranked) - 1:
            rest = [squares[p] for p in ranked[dropped:]]
            if sum(rest) / len(rest) < threshold:
                break
            dropped += 1
        found = second_moment_excess(e, threshold=threshold, generator=rng())
        assert chosen(found) == set(ranked[:dropped])
    example = LossInput(torch.tensor([3.0, 1.0, 0.1, 0.02**0.5]), *[torch.zeros(4)] * 3, torch.ones(4).bool())
    assert second_moment_excess(example, threshold=0.04, generator=rng()).tolist() == [True, True, False, False]


def test_nothing_valid_selects_nothing() -> None:
    e = masked()._replace(mask=torch.zeros(30, 4, dtype=torch.bool))
    assert not top_covariance(e, fraction=0.5, generator=rng()).any()
    assert not covariance_band(e, fraction=0.5, cov_low=-1e9, cov_high=1e9, generator=rng()).any()
    assert not second_moment_excess(e, threshold=0.04, generator=rng()).any()
