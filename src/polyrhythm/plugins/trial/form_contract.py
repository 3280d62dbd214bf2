"""Checks that a policy's declared form matches the modules that it builds; a mismatch raises ContractViolation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor, nn

from polyrhythm.conformance import ContractViolation
from polyrhythm.pipeline.validation.check import check_module
from polyrhythm.plugins.trial.policy_calls import (
    called,
    check_close,
    check_tensor,
    evaluate_act,
    in_trial,
    sample,
)
from polyrhythm.policies.base import Observations, Policy, as_module, extended
from polyrhythm.policies.form import PolicyForm, Role, published_state
from polyrhythm.policies.traits import PolicyTraits, missing_methods, policy_traits
from polyrhythm.specs import ArraySpec
from polyrhythm.specs.weights import first_misfit, weight_specs


def check_form(form: PolicyForm, build: Callable[[int, Role], Policy], obs: Observations) -> str:
    """Check answers, published tensors and counts of the form against the modules of both roles."""
    acting, training = called("build", build, 0, "act"), called("build", build, 0, "train")
    for policy in (acting, training):
        check_module(policy)
        check_answers(form, policy, obs)
    check_traits(form.traits, "form().traits", training, obs)
    check_published(form, as_module(acting), "act")
    check_published(form, as_module(training), "train")
    parameters = list(as_module(training).parameters())
    counts = {
        "parameters": (form.parameters, sum(p.numel() for p in parameters)),
        "trainable": (form.trainable, sum(p.numel() for p in parameters if p.requires_grad)),
    }
    for name, (declared, found) in counts.items():
        if declared != found:
            raise ContractViolation(f"form().{name} is {declared:,}, the policy has {found:,}", "declare that")
    trained = [name for name, p in as_module(training).named_parameters() if p.requires_grad]
    if lacking := next((name for name in trained if name not in form.published), ""):
        raise ContractViolation(
            f"form().published lacks {lacking}, which is trained", "publish it (published()), or freeze it"
        )
    size = sum(spec.nbytes for spec in form.published.values())
    return f"{form.parameters:,} parameters, {len(form.published)} tensors published ({size:,} bytes)"


def check_traits(declared: PolicyTraits, source: str, policy: Policy, obs: Observations) -> None:
    """Check that the declared traits equal the policy's own, and that the policy behaves accordingly."""
    traits, module = policy_traits(policy), as_module(policy)
    for one in fields(traits):
        theirs, own = getattr(declared, one.name), getattr(traits, one.name)
        if theirs != own:
            fix = "declare the same in both (describe takes the form's from the policy)"
            raise ContractViolation(f"{source}.{one.name} is {theirs!r}, the policy's is {own!r}", fix)
    if lacking := missing_methods(policy, traits):
        raise ContractViolation(f"the policy's traits declare {lacking[0]}(), which it lacks", "write it")
    if traits.critic and "critic" not in dict(module.named_children()):
        raise ContractViolation("the policy's traits declare a critic, and no module has that name", "name it critic")
    if odd := sorted(published_state(module).keys() - module.state_dict().keys()):
        raise ContractViolation(f"published() has {odd[0]}, the state_dict does not", "publish a part of it")
    with in_trial(policy), torch.no_grad():
        _check_values(traits, policy, obs)
        _check_optional_methods(traits, policy, obs)


def _check_values(traits: PolicyTraits, policy: Policy, obs: Observations) -> None:
    act = sample(policy, obs)
    if (traits.values_late or not traits.value) and bool(act.value.any()):
        name = "values_late is True" if traits.values_late else "value is False"
        raise ContractViolation(f"act().value is not 0, and the policy's traits.{name}", "give zeros, or declare it")
    if traits.values_late and traits.late_values:
        late = called("late_values", extended(policy).late_values, obs, act.forward_inputs)
        value = evaluate_act(policy, obs, act).value
        check_close("late_values()", late, "evaluate().value", value, policy.tolerance, "compute both alike")


def _check_optional_methods(traits: PolicyTraits, policy: Policy, obs: Observations) -> None:
    act, found = sample(policy, obs), extended(policy)
    if traits.counts_tokens:
        counts = called("row_tokens", found.row_tokens, obs, act.forward_inputs)
        check_tensor("row_tokens()", counts, [(len(act.actions),)], torch.int64)
    if traits.precomputes and (more := called("precompute", found.precompute, obs)):
        if taken := sorted(more.keys() & obs.keys()):
            raise ContractViolation(f"precompute() gives {taken[0]}, which the observation has", "give it another name")
        whole, rest = (evaluate_act(policy, {**obs, **own}, act).logprob for own in (dict[str, Tensor](), more))
        check_close("evaluate().logprob with precompute()", rest, "without", whole, policy.tolerance, "use it alike")


def check_answers(form: PolicyForm, policy: Policy, obs: Observations) -> None:
    """Check chunk, action entries, values and forward_inputs of the policy against the form."""
    for name in ("chunk", "action_dim"):
        if getattr(form, name) != getattr(policy, name):
            raise ContractViolation(
                f"form().{name} is {getattr(form, name)}, the policy has {getattr(policy, name)}", "declare that"
            )
    with in_trial(policy):
        act = sample(policy, obs)
    kind = "chunk" if act.value.dim() == 1 else "action"
    if form.value != kind:
        raise ContractViolation(f"form().value is {form.value!r}, act() gives one per {kind}", "declare that")
    found = {name: _array_spec(tensor) for name, tensor in act.forward_inputs.items()}
    names = [*form.answers, *found]
    if unlike := next((name for name in names if form.answers.get(name) != found.get(name)), ""):
        raise ContractViolation(
            f"form().answers[{unlike!r}] is {form.answers.get(unlike, 'missing')}, "
            f"act() gives {found.get(unlike, 'none')}",
            "declare what one row of act().forward_inputs is",
        )


def _array_spec(tensor: Tensor) -> ArraySpec:
    """Spec of one row as stored, where bfloat16 becomes float32."""
    dtype = torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
    return ArraySpec(tuple(tensor.shape[1:]), str(dtype).removeprefix("torch."))


def check_published(form: PolicyForm, module: nn.Module, role: Role) -> None:
    """Check that the module has the published tensors: of the same dtype for "act", of a convertible one for
    "train"."""
    found = weight_specs(module.state_dict())
    if name := first_misfit(form.published, found, convertible=role == "train"):
        raise ContractViolation(
            f"form().published[{name!r}] is {form.published[name]}, build(role={role!r}) has {found.get(name, 'none')}",
            "declare what the state_dict of the acting policy holds, and build that",
        )
