"""Calls a policy and compares its results, with each other and with its form; defects raise ContractViolation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyrhythm.conformance import ContractViolation, violation_of
from polyrhythm.pipeline.validation.check import check_module
from polyrhythm.policies.base import Act, Evaluation, Observations, Policy, as_module, extended
from polyrhythm.policies.form import PolicyForm, Role, published_state
from polyrhythm.policies.traits import PolicyTraits, missing_methods, policy_traits
from polyrhythm.specs import ArraySpec, EnvSpec
from polyrhythm.specs.weights import first_misfit, weight_specs

Build = Callable[[int], Policy]

#: Tolerated rounding beyond the action bounds, as a share of the range.
_ROUNDING = 1e-5


def called(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the user's function. An exception becomes a ContractViolation with the failing line."""
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise violation_of(call, error) from error


def built(build: Build, seed: int = 0) -> Policy:
    """Build a policy. ContractViolation: that raises, or does not return a torch module."""
    policy: Policy = called("build", build, seed)
    check_module(policy)
    return policy


@contextmanager
def in_trial(policy: Policy) -> Iterator[None]:
    """Run in eval mode and restore the global random generators. ContractViolation: a weight or buffer was written."""
    module = as_module(policy)
    modes = {part: part.training for part in module.modules()}
    before, python, array = _writes(module), random.getstate(), np.random.get_state()
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        random.setstate(python)
        np.random.set_state(array)
    if changed := [name for name, writes in _writes(module).items() if before.get(name) != writes]:
        raise ContractViolation(
            f"act, evaluate or value changes {changed[0]} of the policy", "in eval mode they must leave its state alone"
        )


def _writes(module: nn.Module) -> dict[str, tuple[int, int]]:
    state: Mapping[str, Tensor] = module.state_dict(keep_vars=True)
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in state.items()}


def sample(policy: Policy, obs: Observations, first_key: int = 0, *, greedy: bool = False) -> Act:
    """Call `act` once with a different noise key for each row."""
    return act_with(policy, obs, torch.full((row_count(obs),), greedy), row_keys(obs, first_key))


def act_with(policy: Policy, obs: Observations, greedy: Tensor, keys: Tensor) -> Act:
    act = called("act", policy.act, obs, greedy, keys)
    if not isinstance(act, Act):
        raise ContractViolation(f"act returned {kind_of(act)}", "return Act(actions, logprob, value, forward_inputs)")
    return act


def evaluate_act(policy: Policy, obs: Observations, act: Act) -> Evaluation:
    found = called("evaluate", policy.evaluate, obs, act.forward_inputs)
    if not isinstance(found, Evaluation):
        raise ContractViolation(f"evaluate returned {kind_of(found)}", "return Evaluation(logprob, value, entropy)")
    return found


def row_count(obs: Observations) -> int:
    return len(next(iter(obs.values())))


def row_keys(obs: Observations, first: int = 0) -> Tensor:
    return torch.arange(first, first + row_count(obs)) * 7919


def take_rows(obs: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {name: array[index] for name, array in obs.items()}


def logprob_limit(policy: Policy) -> float:
    return 0.0 if policy.exact else policy.tolerance


def value_limit(policy: Policy, act: Act) -> float:
    """Maximum difference from act's values, relative for values above 1."""
    return logprob_limit(policy) * max(1.0, act.value.abs().max().item())


def check_tensor(what: str, found: object, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(found, Tensor) or tuple(found.shape) not in shapes:
        raise ContractViolation(f"{what} is {kind_of(found)}", f"return a tensor {wanted}")
    if found.dtype != dtype:
        raise ContractViolation(f"{what} is of {found.dtype}", f"return {dtype}: .to({dtype})")
    check_numbers(what, found)


def check_numbers(what: str, found: Tensor) -> None:
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise ContractViolation(
            f"{what} has NaN or infinity", "look for log(0), 0/0 or an observation that is not scaled"
        )


def check_bounds(actions: Tensor, spec: EnvSpec) -> None:
    if spec.action.kind == "continuous":
        low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
        room = ((high - low) * _ROUNDING).nan_to_num(posinf=0.0)
        allowed, fix = (
            f"{list(spec.action.low)} to {list(spec.action.high)}",
            "scale or clip them to the environment's units",
        )
        outside = (actions < low - room) | (actions > high + room)
    else:
        allowed = f"0 to {spec.action.choices - 1}"
        if len(set(spec.action.counts)) > 1:
            allowed = f"{list(spec.action.counts)} choices for its entries"
        fix = "choose among that many"
        outside = (actions < 0) | (actions >= torch.tensor(spec.action.counts))
    if bool(outside.any()):
        raise ContractViolation(
            f"act().actions has {actions[outside][0].item():.4g}, the environment allows {allowed}", fix
        )


def check_close(what: str, found: Tensor, than: str, wanted: Tensor, limit: float, fix: str) -> None:
    """Raise ContractViolation unless shapes are equal and values within `limit` (absolute; 0: bit-equal)."""
    if found.shape != wanted.shape:
        raise ContractViolation(
            f"{what} is {kind_of(found)}, {than} {list(wanted.shape)}", "return a row for each row given"
        )
    gap = (found.detach().double() - wanted.detach().double()).abs().max().item()
    if not gap <= limit:
        allowed = f"tolerance {limit:g}" if limit else "equal bits are promised"
        raise ContractViolation(f"{what} differs from {than} by up to {gap:.3g} ({allowed})", fix)


def first_unlike(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> str:
    """First name whose tensors differ; "" if all are equal."""
    return next((name for name in left if name not in right or not torch.equal(left[name], right[name])), "")


def kind_of(found: object) -> str:
    return f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


# ------------------------------------------------------------ the declared form


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
        names = traits.beside_precomputed
        beside = {name: x for name, x in obs.items() if names is None or name in names}
        whole, rest = (evaluate_act(policy, shown, act).logprob for shown in (obs, {**beside, **more}))
        check_close("evaluate().logprob with precompute()", rest, "without", whole, policy.tolerance, "use it alike")
        if traits.acts_from_precomputed:
            again = sample(policy, {**obs, **more}).logprob
            check_close(
                "act().logprob with precompute()", again, "without", act.logprob, policy.tolerance, "use it alike"
            )


def check_answers(form: PolicyForm, policy: Policy, obs: Observations) -> None:
    """Check chunk, action entries, values and forward_inputs of the policy against the form."""
    for name, said, has in (
        ("chunk", form.chunk, policy.chunk),
        ("action_dim", form.action_dim, policy.action_dim),
    ):
        if said != has:
            raise ContractViolation(f"form().{name} is {said}, the policy has {has}", "declare that")
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
