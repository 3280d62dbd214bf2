"""Groups of parameters by name pattern, and moments that are kept on the host."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError
from tests.training.adapted_run import small
from tests.training.toy import ToyPolicy, algorithm, collect, same, training, weights
from torch import nn

from polyrhythm.config.sections.learning import OptimizerSettings
from polyrhythm.training import optim
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish


def of(module, **changes):
    return optim.adamw(module, OptimizerSettings.model_validate({"lr": 0.1, **changes}))


def rates(module, **changes):
    """Name -> (learning rate, weight decay) of every trainable parameter."""
    names = {p: name for name, p in module.named_parameters()}
    groups = of(module, **changes).param_groups
    return {names[p]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_the_first_pattern_that_matches_decides():
    groups = [
        {"match": ["network.expert.*.mlp.*", "network.queries"], "lr": 0.2, "weight_decay": 0.3},
        {"match": ["network.expert.*"], "lr": 0.4},
        {"match": ["*.bias"], "weight_decay": 0.6},
    ]
    found = rates(small(), groups=groups, weight_decay=0.5, value_lr=0.7)
    assert found["network.queries"] == (0.2, 0.3)
    assert found["network.expert.layers.0.mlp.up_proj.weight"] == (0.2, 0.3)
    assert found["network.expert.layers.1.self_attn.q_proj.weight"] == (0.4, 0.5)
    assert found["network.expert.norm.weight"] == (0.4, 0.0), "only matrices decay"
    assert found["network.backbone.layers.0.mlp.up_proj.weight"] == (0.1, 0.5)
    assert found["critic.weight"] == (0.7, 0.5)
    assert found["critic.bias"] == (0.1, 0.0), "a group before value_lr's"
    assert len(found) == len([p for p in small().parameters() if p.requires_grad])


def test_value_lr_is_a_group_for_the_critic():
    own, ours = ToyPolicy(), ToyPolicy()
    assert rates(own, value_lr=0.2, weight_decay=0.3) == rates(
        ours, groups=[{"match": ["critic.*"], "lr": 0.2}], weight_decay=0.3
    )


def test_frozen_parameters_are_in_no_group():
    found = rates(small(train="expert"), groups=[{"match": ["network.*"], "lr": 0.2}])
    assert {name.split(".")[1] for name in found if name.startswith("network")} == {"expert", "queries", "head"}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("netwrok.*", r"groups.1.match = netwrok.\*: matches none of the \d+ trainable parameters; they are named l"),
        ("network.backbone.*", r"groups.1.match = network.backbone.\*: matches none of the"),
    ],
)
def test_a_pattern_that_matches_nothing_is_one_sentence(pattern, said):
    with pytest.raises(ValueError, match="training.optimizer." + said) as error:
        of(small(train="expert"), groups=[{"match": ["critic.*"], "lr": 1.0}, {"match": [pattern]}])
    assert "\n" not in str(error.value)


def test_a_group_without_patterns_is_refused():
    with pytest.raises(ValidationError, match="at least 1 item"):
        OptimizerSettings.model_validate({"groups": [{"match": []}]})


def updated(**optimizer):
    policy = ToyPolicy(dtype=torch.float32)
    settings = training(epochs=2, minibatch_steps=5, optimizer={"lr": 0.01, "weight_decay": 0.1, **optimizer})
    learner = Learner(policy, algorithm(), settings, total_updates=4, seed=0)
    data = collect(ToyPolicy(seed=1, dtype=torch.float32))
    for index in range(3):
        finish(learner.update(data, index))
    return policy, learner


def test_each_group_learns_at_its_rate():
    plain, _ = updated()
    still, _ = updated(groups=[{"match": ["trunk.*"], "lr": 1e-30, "weight_decay": 0.0}])
    start = ToyPolicy(dtype=torch.float32)
    assert same({n: x for n, x in weights(still).items() if "trunk" in n}, weights(start))
    assert not torch.equal(still.logits.weight, start.logits.weight)
    assert not torch.equal(plain.trunk[0].weight, start.trunk[0].weight)


@pytest.mark.parametrize("piece", [1, 200, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_gives_the_same_bits(piece, dtype, monkeypatch):
    monkeypatch.setattr(optim, "PIECE_BYTES", piece)

    def learned(*, offload):
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        optimizer = optim.adamw(module, OptimizerSettings(lr=0.1, weight_decay=0.2, offload=offload))
        for step in range(4):
            optimizer.zero_grad()
            module(torch.arange(10.0).view(2, 5).to(dtype) / (step + 1)).square().sum().backward()
            optimizer.step(torch.tensor(float(step != 1)))
        return module, optimizer

    (plain, first), (moved, second) = learned(offload=False), learned(offload=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))
    ours, theirs = first.state_dict()["state"], second.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[number][name], x) for number, state in ours.items() for name, x in state.items())


def test_a_state_goes_on_with_and_without_offload():
    policy, learner = updated()
    state = copy.deepcopy(learner.state_dict())
    data = collect(ToyPolicy(seed=1, dtype=torch.float32))
    finish(learner.update(data, 3))
    other = ToyPolicy(seed=9, dtype=torch.float32)
    settings = training(epochs=2, minibatch_steps=5, optimizer={"lr": 0.01, "weight_decay": 0.1, "offload": True})
    going_on = Learner(other, algorithm(), settings, total_updates=4, seed=0)
    going_on.load_state_dict(state)
    finish(going_on.update(data, 3))
    assert same(weights(policy), weights(other))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU the moments have nowhere to move")
def test_offload_on_a_gpu_keeps_moments_in_pinned_host_memory():
    def learned(*, offload):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8)).cuda()
        optimizer = optim.adamw(module, OptimizerSettings(lr=0.1, weight_decay=0.2, offload=offload))
        for _ in range(4):
            optimizer.zero_grad()
            module(torch.linspace(-1, 1, 1024, device="cuda").view(2, 512)).square().sum().backward()
            optimizer.step(torch.ones((), device="cuda"))
        return module, optimizer

    (plain, _), (moved, optimizer) = learned(offload=False), learned(offload=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))
    for state in optimizer.state_dict()["state"].values():
        assert state["exp_avg"].is_pinned()
        assert state["exp_avg_sq"].is_pinned()
        assert state["step"].is_cuda


def test_neither_imports_the_compiler():
    program = """
import sys, torch
from polyrhythm.config.sections.learning import OptimizerSettings
from polyrhythm.training.optim import adamw
module = torch.nn.Linear(4, 4)
optimizer = adamw(module, OptimizerSettings(lr=0.1, weight_decay=0.1, offload=True))
module(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
