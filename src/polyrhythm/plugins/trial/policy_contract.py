"""Checks the contract of a policy on one batch of observations.

`try_policy` runs before every training, with two rows; `policy_checks` has all checks, for `polyrhythm check` and for a
policy's own test. A check raises ContractViolation, which names the call, the value and the fix. The module must be in
eval mode, on the device of the observations.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polyrhythm.conformance import ContractCheck, ContractViolation, Note
from polyrhythm.pipeline.validation.check import check_attributes
from polyrhythm.plugins.trial.policy_calls import (
    Build,
    act_with,
    built,
    called,
    check_bounds,
    check_close,
    check_form,
    check_numbers,
    check_tensor,
    check_traits,
    evaluate_act,
    first_unlike,
    in_trial,
    kind_of,
    logprob_limit,
    row_count,
    row_keys,
    sample,
    take_rows,
    value_limit,
)
from polyrhythm.policies.base import Observations, Policy, PolicySettings, as_module
from polyrhythm.policies.constants import FIX, plain_tensors
from polyrhythm.policies.form import Role
from polyrhythm.policies.traits import has_methods, plain_traits, policy_traits, settings_traits
from polyrhythm.readable import few
from polyrhythm.specs import EnvSpec

#: Number of calls with other keys after which a policy with equal actions counts as ignoring its key.
_OTHER_KEYS = 64
#: Entropy in nats of a batch's discrete actions above which some of these calls must give different actions.
_RANDOM_NATS = 1.0
_VALUE_FIX = "compute it from the observation alone, by the same network as in act (or set exact to False)"


def try_policy(policy: Policy, obs: Observations, spec: EnvSpec, *, learns: bool = True) -> None:
    """Run the checks that need only forward passes; raise ContractViolation for the first failure. learns: the policy
    is trained by RL, and so needs `evaluate`. Restores the weights, the module's mode and torch's generator."""
    with in_trial(policy):
        check_attributes(policy, spec)
        check_act(policy, obs, spec)
        if learns:
            check_evaluate(policy, obs)
        check_value(policy, obs)
        check_noise(policy, obs)
        if learns:
            check_key_matters(policy, obs)
        check_greedy(policy, obs)


def policy_checks(
    settings: PolicySettings, obs: Observations, spec: EnvSpec, *, learns: bool = True, imitates: bool = False
) -> dict[str, ContractCheck]:
    """All checks of the training policy by name; "form" compares both roles with the declared form. learns: trained by
    RL, so log-probs need a gradient; imitates: trained by SFT, so `sft_loss` is needed."""

    def build(seed: int, role: Role = "train") -> Policy:
        return settings.build(spec, seed=seed, device="cpu", role=role)

    policy = built(build)
    as_module(policy).eval()
    plain = plain_tensors(as_module(policy))  # before calls, which may cache some
    checks: dict[str, ContractCheck] = {
        "attributes": lambda: check_attributes(policy, spec),
        "act": lambda: check_act(policy, obs, spec),
        "form": lambda: check_form(called("form", settings.form, spec), build, obs),
        "traits": lambda: _check_declared(settings, policy, obs),
        "evaluate agrees with act": lambda: check_evaluate(policy, obs),
        "value agrees with act": lambda: check_value(policy, obs),
        "noise by key alone": lambda: check_noise(policy, obs),
        "other keys, other actions": lambda: check_key_matters(policy, obs),
        "greedy ignores the key": lambda: check_greedy(policy, obs),
        "seed decides the weights": lambda: check_seed(build),
        "tensors move with the policy": lambda: check_registered(plain),
        "weights can be copied": lambda: check_state_round_trip(build, obs),
    }
    if learns:
        checks["gradient"] = lambda: check_gradient(policy, obs)
    if imitates:
        checks["supervised loss"] = lambda: check_supervised_loss(policy, obs)
    return {name: lambda check=check: _alone(policy, check) for name, check in checks.items()}  # type: ignore[misc]


def _check_declared(settings: PolicySettings, policy: Policy, obs: Observations) -> str:
    """The traits of the settings equal those of the policy, and the settings have the declared methods."""
    traits = settings_traits(settings)
    wanted = {"outline": traits.outlines, "build_in_parts": traits.builds_in_parts, "miniature": traits.has_miniature}
    if lacking := [name for name, has in wanted.items() if has and not has_methods(settings, (name,))]:
        raise ContractViolation(f"the settings' traits declare {lacking[0]}(), and they have none", "write it")
    if traits.policy is not None:
        check_traits(traits.policy, "the settings' traits.policy", policy, obs)
    return ", ".join(plain_traits(policy_traits(policy))) or "nothing optional"


def _alone(policy: Policy, check: ContractCheck) -> str | None:
    with in_trial(policy):
        return check()


def check_act(policy: Policy, obs: Observations, spec: EnvSpec) -> str:
    """Results have the right types, shapes and dtypes and no gradient, are finite, and actions are within the
    bounds."""
    rows = row_count(obs)
    shape = (rows, policy.chunk, policy.action_dim)
    act = sample(policy, obs)
    check_tensor("act().actions", act.actions, [shape], getattr(torch, spec.action.dtype))
    check_tensor("act().logprob", act.logprob, [shape], torch.float32)
    check_tensor("act().value", act.value, [(rows,), (rows, policy.chunk)], torch.float32)
    if not isinstance(act.forward_inputs, dict):
        raise ContractViolation(
            f"act().forward_inputs is {kind_of(act.forward_inputs)}", "give a dict, name -> tensor [B,...]"
        )
    for name, tensor in act.forward_inputs.items():
        if not isinstance(tensor, Tensor) or tensor.dim() < 1 or len(tensor) != rows:
            raise ContractViolation(
                f"act().forward_inputs[{name!r}] is {kind_of(tensor)} for {rows} rows",
                f"give a tensor [{rows},...], row by row",
            )
        check_numbers(f"act().forward_inputs[{name!r}]", tensor)
    for name, tensor in {**act._asdict(), **act.forward_inputs}.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ContractViolation(f"act() attaches a gradient to {name}", "decorate act with @torch.no_grad()")
    check_bounds(act.actions, spec)
    return f"actions {list(shape)} {spec.action.dtype}, one value per {'chunk' if act.value.dim() == 1 else 'action'}"


def check_evaluate(policy: Policy, obs: Observations) -> str:
    """Log-probs recomputed from act's forward_inputs equal act's own, independent of the other rows in the batch."""
    act = sample(policy, obs)
    shape = tuple(act.logprob.shape)
    found = evaluate_act(policy, obs, act)
    check_tensor("evaluate().logprob", found.logprob, [shape], torch.float32)
    check_tensor("evaluate().entropy", found.entropy, [shape], torch.float32)
    check_tensor("evaluate().value", found.value, [tuple(act.value.shape)], torch.float32)
    fix = (
        "compute both from the same distribution and forward_inputs (if it is rounding: set exact False, or tolerance)"
    )
    check_close(
        "evaluate(obs, act().forward_inputs).logprob",
        found.logprob,
        "act().logprob",
        act.logprob,
        logprob_limit(policy),
        fix,
    )
    if not policy_traits(policy).values_late:
        check_close("evaluate().value", found.value, "act().value", act.value, value_limit(policy, act), _VALUE_FIX)
    one = torch.arange(row_count(obs) - 1, -1, -2)
    part = evaluate_act(policy, take_rows(obs, one), act._replace(forward_inputs=take_rows(act.forward_inputs, one)))
    fix = "a row must not depend on the others in the batch (no batch statistics in eval mode)"
    check_close(
        "evaluate().logprob of some rows alone",
        part.logprob,
        "that in the batch",
        found.logprob[one],
        policy.tolerance,
        fix,
    )
    return f"log-probs to {(found.logprob.detach() - act.logprob).abs().max().item():.2g}"


def check_value(policy: Policy, obs: Observations) -> None:
    """`value(obs)` equals act's value; if values are late, its first entry equals the first of `evaluate`."""
    act = sample(policy, obs)
    value = called("value", policy.value, obs)
    check_tensor("value()", value, [tuple(act.value.shape)], torch.float32)
    if policy_traits(policy).values_late:
        first = evaluate_act(policy, obs, act).value.reshape(len(value), -1)[:, :1]
        own = value.reshape(len(value), -1)[:, :1]
        check_close("value(obs)", own, "evaluate().value", first, value_limit(policy, act), _VALUE_FIX)
        return
    check_close("value(obs)", value, "act().value", act.value, value_limit(policy, act), _VALUE_FIX)


def check_noise(policy: Policy, obs: Observations) -> None:
    """A row's draws depend on its key alone: not on time, other rows, or its position in the batch."""
    rows = row_count(obs)
    keys, never = row_keys(obs), torch.zeros(rows, dtype=torch.bool)
    actions = act_with(policy, obs, never, keys).actions
    fix = "draw from noise_key alone (polyrhythm.policies.noise), never from a global generator"
    check_close(
        "act().actions of the same keys",
        act_with(policy, obs, never, keys).actions,
        "the first time's",
        actions,
        0.0,
        fix,
    )
    for index in (torch.arange(rows - 1, -1, -1), torch.full((rows,), rows - 1), torch.arange(rows - 1, 0, -2)):
        if not len(index):
            continue
        moved = act_with(policy, take_rows(obs, index), never[index], keys[index]).actions
        check_close(
            "act().actions of a row among other rows", moved, "its own before", actions[index], policy.tolerance, fix
        )


def check_key_matters(policy: Policy, obs: Observations) -> str:
    """Different keys give different actions, if the policy is random enough to tell."""
    actions = sample(policy, obs).actions
    never = torch.zeros(row_count(obs), dtype=torch.bool)
    for turn in range(1, _OTHER_KEYS + 1):
        if not torch.equal(act_with(policy, obs, never, row_keys(obs, turn * row_count(obs))).actions, actions):
            return ""
    found = evaluate_act(policy, obs, act_with(policy, obs, never, row_keys(obs)))
    if not found.logprob.requires_grad:
        return Note("other keys gave the same actions; it cannot learn from rewards, so it need not draw them")
    entropy = found.entropy.sum().item()
    if actions.is_floating_point() or entropy > _RANDOM_NATS:
        raise ContractViolation(
            f"act() gives the same actions for {_OTHER_KEYS} other keys",
            "draw them with noise_key (polyrhythm.policies.noise)",
        )
    return Note(f"almost deterministic here ({entropy:.2g} nats): other keys gave the same actions")


def check_greedy(policy: Policy, obs: Observations) -> None:
    """A greedy row ignores its key and does not affect the other rows."""
    first, second = (sample(policy, obs, key, greedy=True).actions for key in (0, 99))
    fix = "where greedy is set take the mode, without noise"
    check_close("act(greedy).actions with other keys", second, "the same", first, 0.0, fix)
    greedy = torch.arange(row_count(obs)) % 2 == 0
    mixed = act_with(policy, obs, greedy, row_keys(obs)).actions
    expected = torch.where(greedy[:, None, None], first, sample(policy, obs).actions)
    fix = "decide by greedy[b] for each row b of its own"
    check_close(
        "act().actions with some rows greedy", mixed, "those of each row alone", expected, policy.tolerance, fix
    )


def check_gradient(policy: Policy, obs: Observations) -> str:
    """The loss of policy and value reaches the parameters, with finite gradients."""
    module = as_module(policy)
    found = evaluate_act(policy, obs, sample(policy, obs))
    if not found.logprob.requires_grad:
        raise ContractViolation(
            "evaluate().logprob has no gradient", "compute it from the parameters, outside of no_grad"
        )
    module.zero_grad()
    loss = found.logprob.sum() + found.value.square().sum()
    called("the backward pass of evaluate", loss.backward)
    bad = [name for name, p in module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
    idle = idle_parameters(module)
    module.zero_grad()
    if bad:
        raise ContractViolation(
            f"the gradient of {bad[0]} is not finite", "look for log(0), 0/0 or sqrt(0) in evaluate"
        )
    if idle:
        return Note(f"no gradient reaches {few(idle)}")
    return f"reaches all {sum(p.numel() for p in module.parameters() if p.requires_grad):,} parameters"


def idle_parameters(module: nn.Module) -> list[str]:
    """Trainable parameters whose gradient is missing or zero."""
    return [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and (p.grad is None or not bool(p.grad.abs().sum() > 0))
    ]


def value_gradient_reach(policy: Policy, obs: Observations) -> set[str]:
    """Parameters that get a gradient from the value loss alone."""
    module = as_module(policy)
    module.zero_grad()
    policy.value(obs).square().sum().backward()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    reached = trained - set(idle_parameters(module))
    module.zero_grad()
    return reached


def check_seed(build: Build) -> str:
    """Equal seeds build equal weights, and building leaves torch's generator unchanged."""
    before = torch.get_rng_state()
    first, again, other = (as_module(built(build, seed)).state_dict() for seed in (3, 3, 4))
    moved = not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    if unlike := first_unlike(first, again):
        raise ContractViolation(
            f"build gives other weights {unlike} for the same seed",
            "initialise them inside polyrhythm.policies.mlp.seeded(seed)",
        )
    if moved:
        return Note("build moves torch's global generator; initialise inside polyrhythm.policies.mlp.seeded(seed)")
    return "" if first_unlike(first, other) else Note("other seeds give the same weights")


def check_state_round_trip(build: Build, obs: Observations) -> None:
    """Loading the state_dict of one policy into another makes them equal, as generators require."""
    first, second = built(build, 0), built(build, 1)
    for policy in (first, second):
        as_module(policy).eval()
    called("load_state_dict", as_module(second).load_state_dict, copy.deepcopy(first.state_dict()))
    fix = "keep all that decides an action in parameters or buffers"
    ours, theirs = sample(first, obs), sample(second, obs)
    for name, copied, original in (
        ("actions", theirs.actions, ours.actions),
        ("logprob", theirs.logprob, ours.logprob),
        ("value", theirs.value, ours.value),
    ):
        what = f"act().{name} after load_state_dict"
        check_close(what, copied, "that of the policy copied", original, logprob_limit(first), fix)


def check_registered(plain: Mapping[str, Tensor]) -> None:
    """Every tensor moves with the module. plain: tensors of the policy that are neither parameters nor buffers."""
    if plain:
        raise ContractViolation(
            f"{next(iter(plain))} is a tensor, but neither parameter nor buffer, so it does not move with the policy",
            FIX,
        )


def check_supervised_loss(policy: Policy, obs: Observations) -> None:
    """`sft_loss` is a finite scalar with gradient."""
    loss = called("sft_loss", policy.sft_loss, obs, sample(policy, obs).actions)
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.requires_grad:
        raise ContractViolation(
            f"sft_loss is {kind_of(loss)}", "return a scalar tensor with gradient, the mean over the batch"
        )
    check_numbers("sft_loss()", loss)


def check_supervised_training_learns(policy: Policy, obs: Observations, actions: Tensor) -> str:
    """Eight steps on one batch, of a copy of the policy, lower the supervised loss."""
    learner = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(as_module(learner).parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(8):
        loss = called("sft_loss", learner.sft_loss, obs, actions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0]:
        raise ContractViolation(
            f"sft_loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in 8 steps", "look at its sign and scale"
        )
    return f"{losses[0]:.4g} to {losses[-1]:.4g} in 8 steps"
