"""Calls a policy and compares its results; errors and wrong results raise ContractViolation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyrhythm.conformance import ContractViolation, violation_of
from polyrhythm.pipeline.validation.check import check_module
from polyrhythm.policies.base import Act, Evaluation, Observations, Policy, as_module
from polyrhythm.specs import EnvSpec

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
