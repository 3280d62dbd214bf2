"""What every policy promises: checks that a policy's test calls with its env spec and one batch of observations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyrhythm.policies.base import Act, Observations, Policy, as_module
from polyrhythm.specs import EnvSpec

Build = Callable[[int], Policy]


def rows(obs: Observations) -> int:
    return len(next(iter(obs.values())))


def sample(policy: Policy, obs: Observations, first_key: int = 0, greedy: bool = False) -> Act:
    n = rows(obs)
    return policy.act(obs, torch.full((n,), greedy), torch.arange(first_key, first_key + n) * 7919)


def take(obs: Observations, index: Tensor) -> dict[str, Tensor]:
    return {name: array[index] for name, array in obs.items()}


def check_shapes_and_units(policy: Policy, obs: Observations, spec: EnvSpec) -> None:
    n, shape = rows(obs), (rows(obs), policy.chunk, policy.action_dim)
    act = sample(policy, obs)
    assert act.actions.shape == act.logprob.shape == shape
    assert act.actions.dtype == getattr(torch, spec.action.dtype)
    assert act.logprob.dtype == act.value.dtype == torch.float32
    assert act.value.shape in {(n,), (n, policy.chunk)}
    assert all(len(array) == n for array in act.forward_inputs.values())
    assert not any(array.requires_grad for array in (act.actions, act.logprob, act.value))
    low, high = (
        (torch.tensor(spec.action.low), torch.tensor(spec.action.high))
        if spec.action.kind == "continuous"
        else (torch.tensor(0), torch.tensor(spec.action.choices - 1))
    )
    assert bool(((act.actions >= low) & (act.actions <= high)).all())
    evaluation = policy.evaluate(obs, act.forward_inputs)
    assert evaluation.logprob.shape == evaluation.entropy.shape == shape
    assert evaluation.logprob.dtype == evaluation.entropy.dtype == evaluation.value.dtype == torch.float32


def check_evaluate_agrees_with_act(policy: Policy, obs: Observations) -> None:
    act = sample(policy, obs)
    evaluation = policy.evaluate(obs, act.forward_inputs)
    tolerance = 0.0 if policy.exact else policy.tolerance
    for ours, theirs in (
        (act.logprob, evaluation.logprob),
        (act.value, evaluation.value),
        (act.value, policy.value(obs)),
    ):
        torch.testing.assert_close(theirs.detach(), ours, rtol=0.0, atol=tolerance)
    inverse = torch.randperm(rows(obs), generator=torch.Generator().manual_seed(0))[: rows(obs) // 2]
    part = policy.evaluate(take(obs, inverse), take(act.forward_inputs, inverse))
    torch.testing.assert_close(part.logprob.detach(), act.logprob[inverse], rtol=0.0, atol=policy.tolerance)


def check_noise_is_the_rows_own(policy: Policy, obs: Observations) -> None:
    n = rows(obs)
    keys, never = torch.arange(n) * 7919, torch.zeros(n, dtype=torch.bool)
    together = policy.act(obs, never, keys)
    some = torch.arange(n - 1, 0, -2)
    apart = policy.act(take(obs, some), never[some], keys[some])
    torch.testing.assert_close(apart.actions, together.actions[some], rtol=0.0, atol=policy.tolerance)
    assert torch.equal(policy.act(obs, never, keys).actions, together.actions)
    assert not torch.equal(policy.act(obs, never, keys + 1).actions, together.actions)


def check_greedy_ignores_the_key(policy: Policy, obs: Observations) -> None:
    first, second = sample(policy, obs, greedy=True), sample(policy, obs, first_key=99, greedy=True)
    assert torch.equal(first.actions, second.actions)
    n = rows(obs)
    mixed = policy.act(obs, torch.arange(n) % 2 == 0, torch.arange(n) * 7919)
    assert torch.equal(mixed.actions[::2], first.actions[::2])
    assert torch.equal(mixed.actions[1::2], sample(policy, obs).actions[1::2])


def check_gradients_reach_all_parameters(policy: Policy, obs: Observations) -> None:
    module = as_module(policy)
    module.zero_grad()
    evaluation = policy.evaluate(obs, sample(policy, obs).forward_inputs)
    (evaluation.logprob.sum() + evaluation.value.square().sum()).backward()
    idle = [name for name, p in module.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    module.zero_grad()
    assert not idle


def value_gradient_reach(policy: Policy, obs: Observations) -> set[str]:
    """Names of the parameters that the value loss alone moves."""
    module = as_module(policy)
    module.zero_grad()
    policy.value(obs).square().sum().backward()
    reached = {name for name, p in module.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
    module.zero_grad()
    return reached


def check_seed_decides_the_parameters(build: Build) -> None:
    before = torch.get_rng_state()
    first, again, other = (as_module(build(seed)).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def check_state_round_trip(build: Build, obs: Observations) -> None:
    first, second = build(0), build(1)
    as_module(second).load_state_dict(copy.deepcopy(first.state_dict()))
    for ours, theirs in zip(sample(first, obs)[:3], sample(second, obs)[:3], strict=True):
        assert torch.equal(ours, theirs)


def check_supervised_training_learns(policy: Policy, obs: Observations, actions: Tensor) -> None:
    module: nn.Module = copy.deepcopy(as_module(policy))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = module.sft_loss(obs, actions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert loss.shape == ()
    assert losses[-1] < losses[0]
