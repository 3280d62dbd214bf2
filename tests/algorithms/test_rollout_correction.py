"""Importance weights and rejection against plain Python, in the conventions of verl, AReaL and TRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from polyrhythm.algorithms.rollout_correction import Entries, correct

OWNER = [0, 0, 0, 1, 1, 2]


def made() -> Entries:
    """Six chunk steps of three trajectories, with 2 x 3 entries each; the fourth is masked throughout."""
    rng = torch.Generator().manual_seed(40)
    proximal, behavior = (0.5 * torch.randn(6, 2, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(6, 2, 3, generator=rng) > 0.3
    mask[3] = False
    return Entries(torch.where(mask, proximal, 0.0), torch.where(mask, behavior, 0.0), mask, torch.tensor(OWNER))


def units(level: str) -> list[int]:
    """To which unit of the level each of the 36 entries belongs."""
    of_row = {"token": None, "chunk_step": list(range(6)), "trajectory": OWNER}[level]
    return list(range(36)) if of_row is None else [of_row[i // 6] for i in range(36)]


def combined(x: list[float], mask: list[bool], unit: list[int], by: str) -> list[float]:
    """x combined over the valid entries of each unit, at all its entries."""
    members = {u: [value for value, seen, v in zip(x, mask, unit, strict=True) if seen and v == u] for u in set(unit)}
    how = {"sum": sum, "mean": lambda of: sum(of) / len(of), "max": max}[by]
    return [float(how(members[u])) if members[u] else 0.0 for u in unit]


@pytest.mark.parametrize("level", ["token", "chunk_step", "trajectory"])
@pytest.mark.parametrize("by", ["product", "geometric_mean"])
@pytest.mark.parametrize("bounds", [(None, None), (None, 1.1), (0.8, 1.2)])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_golden(level: Any, by: Any, bounds: tuple[float | None, float | None], normalize: bool) -> None:
    e = made()
    got = correct(e, weight=level, weight_by=by, weight_min=bounds[0], weight_max=bounds[1], normalize=normalize)
    mask = e.mask.flatten().tolist()
    x = combined((e.proximal - e.behavior).flatten().tolist(), mask, units(level), "sum" if by == "product" else "mean")
    raw = [math.exp(value) for value in x]
    bounded = [min(max(w, bounds[0] or 0.0), bounds[1] or math.inf) for w in raw]
    of_unit = {unit: w for unit, w, valid in zip(units(level), bounded, mask, strict=True) if valid}
    scale = sum(of_unit.values()) / len(of_unit) if normalize else 1.0
    wanted = [w / scale if valid else 0.0 for w, valid in zip(bounded, mask, strict=True)]
    assert got.weight.flatten().tolist() == pytest.approx(wanted)
    clipped = [valid and w != b for w, b, valid in zip(raw, bounded, mask, strict=True)]
    assert got.clipped.flatten().tolist() == clipped
    assert torch.equal(got.kept, e.mask)


@pytest.mark.parametrize("level", ["token", "chunk_step", "trajectory"])
@pytest.mark.parametrize("by", ["mean", "sum", "max"])
@pytest.mark.parametrize("metric", ["ratio", "k2", "k3"])
@pytest.mark.parametrize("two_sided", [False, True])
def test_rejection_golden(level: Any, by: Any, metric: Any, two_sided: bool) -> None:
    """Bounds between the values that there are, so that something is kept and something rejected."""
    e = made()
    log_ratio, mask = (e.proximal - e.behavior).flatten().tolist(), e.mask.flatten().tolist()
    formula = {"ratio": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[metric]
    found = combined([formula(x) for x in log_ratio], mask, units(level), by)
    found = [math.exp(x) for x in found] if metric == "ratio" else found
    values = sorted({x for x, valid in zip(found, mask, strict=True) if valid})
    below = (values[0] + values[1]) / 2 if two_sided else None
    above = (values[-2] + values[-1]) / 2
    got = correct(e, reject=metric, reject_level=level, reject_by=by, reject_below=below, reject_above=above)
    wanted = [valid and (below or -1.0) <= x <= above for x, valid in zip(found, mask, strict=True)]
    assert got.kept.flatten().tolist() == wanted
    assert any(wanted)
    assert wanted != mask
    assert torch.equal(got.weight, got.kept.double())


def test_worked_examples() -> None:
    two = torch.ones(2, dtype=torch.bool)
    e = Entries(torch.tensor([0.4, 0.2]), torch.zeros(2), two, torch.zeros(2, dtype=torch.int64))
    assert correct(e, weight="trajectory").weight.tolist() == pytest.approx([math.exp(0.6)] * 2)
    assert correct(e, weight="trajectory", weight_by="geometric_mean").weight.tolist() == pytest.approx(
        [math.exp(0.3)] * 2
    )
    e = e._replace(proximal=torch.tensor([math.log(4.0), 0.0]))
    assert correct(e, reject="ratio", reject_level="trajectory", reject_above=2.001).kept.all()
    assert not correct(e, reject="ratio", reject_level="trajectory", reject_by="sum", reject_above=3.0).kept.any()
    masked = correct(e, weight="token", reject="ratio", reject_above=3.0)
    assert masked.weight.tolist() == [0.0, 1.0], "IcePop, TRL's token_mask"
