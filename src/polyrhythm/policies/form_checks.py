"""Checks that a policy's declared form matches the modules that it builds; raises ContractViolation if not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyrhythm.conformance import ContractViolation
from polyrhythm.policies.base import Observations, Policy, as_module
from polyrhythm.policies.calls import called, check_module, in_trial, sample
from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.specs import ArraySpec
from polyrhythm.specs.weights import first_misfit, weight_specs


def check_form(form: PolicyForm, build: Callable[[int, Role], Policy], obs: Observations) -> str:
    """Check answers, published tensors and counts of the form against the modules built for both roles."""
    acting, training = called("build", build, 0, "act"), called("build", build, 0, "train")
    for policy in (acting, training):
        check_module(policy)
        check_answers(form, policy, obs)
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
    """The spec of one row as stored, where bfloat16 becomes float32."""
    dtype = torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
    return ArraySpec(tuple(tensor.shape[1:]), str(dtype).removeprefix("torch."))


def check_published(form: PolicyForm, module: nn.Module, role: Role) -> None:
    """Check that the module has the published tensors: the same dtype for "act", a convertible one for "train"."""
    found = weight_specs(module.state_dict())
    if name := first_misfit(form.published, found, convertible=role == "train"):
        raise ContractViolation(
            f"form().published[{name!r}] is {form.published[name]}, build(role={role!r}) has {found.get(name, 'none')}",
            "declare what the state_dict of the acting policy holds, and build that",
        )
