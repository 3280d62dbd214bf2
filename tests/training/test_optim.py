"""The optimizer is torch's, to the bit, without what torch's class brings along."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.config.sections.learning import OptimizerSettings
from polyrhythm.training.optim import AdamW, adamw, clip_gradient


def module() -> nn.Module:
    """Parameters of two dtypes, some of which never get a gradient."""
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(3, 2, dtype=torch.float64), "idle": nn.Linear(2, 2)})


def groups(of: nn.Module) -> list[dict[str, Any]]:
    parameters = list(of.parameters())
    return [
        {"params": parameters[::2], "lr": 0.05, "weight_decay": 0.1},
        {"params": parameters[1::2], "lr": 0.05, "weight_decay": 0.0},
    ]


def both() -> tuple[nn.Module, AdamW, nn.Module, torch.optim.AdamW]:
    ours, theirs = module(), module()
    reference = torch.optim.AdamW(groups(theirs), lr=0.05, betas=(0.8, 0.99), fused=True)
    return ours, AdamW(groups(ours), betas=(0.8, 0.99)), theirs, reference


def learn(of: Any, optimizer: Any, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 20).view(4, 5) * (number + 1)
        y = of["a"](x) if number == 1 else of["b"](of["a"](x).double())  # at step 1 not all have gradients
        y.square().sum().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (number + 1)
        optimizer.step()


def weights(of: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in of.parameters()]


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


def test_it_does_what_torchs_does_to_the_bit() -> None:
    ours, optimizer, theirs, reference = both()
    learn(ours, optimizer, range(6))
    learn(theirs, reference, range(6))
    assert equal(ours, theirs)
    assert not equal(ours, module())
    assert torch.equal(ours["idle"].weight, module()["idle"].weight), "what has no gradient does not decay"  # type: ignore[index]


def test_a_step_that_is_not_taken_leaves_weights_and_state_as_they_were() -> None:
    ours, optimizer, theirs, reference = both()
    nothing, all_of_it = torch.zeros(()), torch.ones(())
    for p in ours.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step(nothing)
    assert equal(ours, module())
    learn(ours, optimizer, range(3))
    for p in ours.parameters():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.step(nothing)
    learn(ours, optimizer, range(3, 6))
    learn(theirs, reference, range(6))
    assert equal(ours, theirs)
    grads = [(p, torch.ones_like(p)) for module in (ours, theirs) for p in module.parameters()]
    for p, grad in grads:
        p.grad = grad
    optimizer.step(all_of_it)
    reference.step()
    assert equal(ours, theirs)


@pytest.mark.parametrize("way", ["ours to theirs", "theirs to ours", "ours to ours"])
def test_a_state_goes_on_in_either(way: str) -> None:
    ours, optimizer, theirs, reference = both()
    learn(ours, optimizer, range(3))
    learn(theirs, reference, range(3))
    source = reference if way.startswith("theirs") else optimizer
    state = copy.deepcopy(source.state_dict())
    fresh = module()
    fresh.load_state_dict(copy.deepcopy(ours.state_dict()))
    taker: Any
    if way.endswith("theirs"):
        taker = torch.optim.AdamW(groups(fresh), lr=1.0, fused=True)
    else:
        taker = AdamW(groups(fresh), betas=(0.1, 0.1))
    if way == "ours to theirs":  # torch asks for its own switches too
        usual = torch.optim.AdamW(groups(fresh), lr=1.0, fused=True).state_dict()["param_groups"]
        state["param_groups"] = [{**a, **b} for a, b in zip(usual, state["param_groups"], strict=True)]
    taker.load_state_dict(state)
    learn(fresh, taker, range(3, 6))
    learn(ours, optimizer, range(3, 6))
    assert equal(fresh, ours)


def test_a_loaded_state_is_a_copy_and_one_of_other_parameters_is_refused() -> None:
    ours, optimizer, _, _ = both()
    learn(ours, optimizer, range(1))
    state = optimizer.state_dict()
    fresh = module()
    taker = AdamW(groups(fresh), betas=(0.1, 0.1))
    taker.load_state_dict(state)
    before = copy.deepcopy(state)
    learn(fresh, taker, range(1, 3))
    for number, saved in before["state"].items():
        assert all(torch.equal(x, state["state"][number][name]) for name, x in saved.items())
    other = AdamW(groups(nn.Linear(2, 2)), betas=(0.1, 0.1))
    with pytest.raises(ValueError, match=r"groups of \[3, 3\] parameters, these are of \[1, 1\]"):
        other.load_state_dict(state)


def test_no_compiler_comes_with_it() -> None:
    program = f"""
import sys, torch
from polyrhythm.config.sections.learning import OptimizerSettings
from {adamw.__module__} import adamw, clip_gradient
module = torch.nn.Linear(4, 4)
optimizer = adamw(module, OptimizerSettings(lr=0.1, weight_decay=0.1))
module(torch.ones(2, 4)).sum().backward()
clip_gradient(module.parameters(), 1.0)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("largest", [None, 0.3, 1e6])
def test_gradients_are_clipped_as_torch_does_it(largest: float | None) -> None:
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    theirs.append(torch.nn.Linear(1, 1))  # without a gradient
    ours.append(torch.nn.Linear(1, 1))
    for module in (ours, theirs):
        module[:2](torch.arange(10.0).reshape(2, 5)).square().sum().backward()
    norm = clip_gradient(ours.parameters(), largest).total
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if largest is None else largest)
    assert torch.equal(norm, wanted)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_groups_do_not_follow_the_order_of_the_parameters() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.critic, self.trunk = nn.Linear(3, 1), nn.Linear(3, 3)

    def found(**settings: Any) -> list[tuple[float, float, int]]:
        groups = adamw(Policy(), OptimizerSettings(lr=0.1, **settings)).param_groups
        return [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]

    assert found(weight_decay=0.0) == [(0.1, 0.0, 5)]
    assert found(weight_decay=0.5) == [(0.1, 0.5, 2), (0.1, 0.0, 3)]
    assert found(weight_decay=0.0, value_lr=0.2) == [(0.1, 0.0, 3), (0.2, 0.0, 2)]
    assert found(weight_decay=0.5, value_lr=0.2) == [(0.1, 0.5, 1), (0.1, 0.0, 2), (0.2, 0.5, 1), (0.2, 0.0, 1)]


def test_the_state_of_other_parameters_is_refused() -> None:
    def of(*sizes: int) -> AdamW:
        parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer = AdamW([{"params": parameters, "lr": 0.1, "weight_decay": 0.0}], betas=(0.9, 0.999))
        optimizer.step()
        return optimizer

    with pytest.raises(ValueError, match=r"state of parameter 0 is \(3,\), the parameter \(2,\)"):
        of(2, 3).load_state_dict(of(3, 2).state_dict())
