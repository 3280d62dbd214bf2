"""Defines the interface of a policy, for token, flow-matching, Gaussian and categorical heads alike.

A policy module defines a pydantic settings model with a `type` literal that implements `PolicySettings`: it declares
the policy's form (`policies.form`) without building it, and builds an `nn.Module`. Randomness in `act` comes from
`noise_key` alone. `policies.conformance` checks the contract, partly before every run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.policies.traits import has_methods
from polyrhythm.specs import EnvSpec

Observations = Mapping[str, Tensor]

#: Configuration of every policy's settings model: frozen, no unknown keys, strict types, finite, documented fields.
SETTINGS = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Act(NamedTuple):
    """The answer of `act`. actions [B,C,A] in env units, logprob [B,C,A] float32, value [B] or [B,C] float32;
    forward_inputs name → [B,...]: inputs of `evaluate` that are not in obs, such as sampled tokens."""

    actions: Tensor
    logprob: Tensor
    value: Tensor
    forward_inputs: dict[str, Tensor]


class Evaluation(NamedTuple):
    """The answer of `evaluate`: logprob, entropy [B,C,A] float32 and value (as in `Act`), with gradient."""

    logprob: Tensor
    value: Tensor
    entropy: Tensor


class Policy(Protocol):
    """A policy. `evaluate(obs, act(obs).forward_inputs).logprob == act(obs).logprob` at the same batch shape.

    chunk: C, primitive actions per chunk step. action_dim: A.
    exact: log-probs and values are bit-equal; otherwise equal within `tolerance` (absolute for log-probs, relative for
    values above 1).
    What else it may have is declared by `policies.traits.PolicyTraits`; the methods are `OptionalMethods`.
    """

    chunk: int
    action_dim: int
    exact: bool
    tolerance: float

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        """One forward pass without gradient. greedy [B] bool; noise_key [B] int64, one per row and step."""
        ...

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation: ...

    def value(self, obs: Observations) -> Tensor:
        """The value only, for bootstrapping; same shape and definition as in `act`."""
        ...

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Supervised loss (scalar) of demonstrated actions [B,C,A] in env units."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...


class OptionalMethods(Policy, Protocol):
    """Methods that a policy may have; each is called only where its traits declare it (`policies.traits`)."""

    def late_values(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        """The value of `evaluate` alone, of a policy whose `act` gives zeros."""
        ...

    def published(self) -> dict[str, Tensor]:
        """The part of the state_dict that training may change, live: generators take it and files of weights hold it.
        The rest is the same in all modules that `build` makes."""
        ...

    def reference_state(self) -> dict[str, Tensor]:
        """Copies of the tensors by which the policy as it is now differs from what it may become."""
        ...

    def as_reference(self, state: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Within this context the policy is as it was when `reference_state` gave `state`, without a copy of what is
        frozen."""
        ...

    def precompute(self, obs: Observations) -> Mapping[str, Tensor]:
        """What a frozen part makes of the observations alone, rows first, under names that are not in `obs`; empty: no
        part is frozen. `evaluate` and `value` find it in `obs` in place of the arrays that it was made from."""
        ...

    def prefix_arrays(self, obs: Observations) -> Mapping[str, Tensor]:
        """What `act` keeps of the observations during a pass, rows first; memory estimates count it."""
        ...

    def row_tokens(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        """Tokens that `evaluate` computes of each row, [B] int64, of rows that differ in length; the form declares
        `row_tokens`, and `training.micro_batch_tokens` bounds the passes."""
        ...

    def evaluate_longest(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """`evaluate` as if every row were as long as can be; the tensors need no values. Memory estimates run it."""
        ...

    def act_longest(self, obs: Observations) -> Tensor:
        """The largest pass of generation for as many rows, as if each were as long as can be: what comes last in it.
        The tensors need no values."""
        ...

    def load_part(self, part: torch.nn.Module, device: str) -> None:
        """Read the tensors within `part`, the policy or a module in it, that have no values yet, onto `device`."""
        ...

    def blocks(self) -> Iterable[torch.nn.Module]:
        """Modules whose weights a rank of a sharded trainer gathers one after another, where these are not its repeated
        layers (`plugins.ranks.sharded`)."""
        ...


class PolicySettings(Protocol):
    """The methods of a policy's settings model. ValueError: policy and environment do not fit."""

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        """Shapes, dtypes and sizes of the policy for this environment, without weights (`policies.form.describe`)."""
        ...

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> Policy:
        """The policy on `device`, its parameters a function of `seed` alone.

        role: "act" in a generator, where its state_dict holds what `form` publishes in the dtypes declared there;
        "train" in the trainer, whose state_dict holds tensors of the same names and shapes. Where `form` publishes a
        part, the rest is a function of these settings (a checkpoint) or of `seed`.
        """
        ...


class OptionalSettings(PolicySettings, Protocol):
    """Methods that a policy's settings may have; each is called only where their traits declare it."""

    def outline(self, env_spec: EnvSpec, *, role: Role) -> Policy:
        """The module that `build` gives, on the device that the caller has chosen (`torch.device("meta")`): shapes and
        dtypes are right, values need not be. Memory estimates run it without memory."""
        ...

    def build_in_parts(self, env_spec: EnvSpec, *, seed: int, role: Role) -> Policy:
        """What `build` gives, on the host, for ranks that share it without any of them ever having it whole; where it
        has `load_part`, some tensors are still to be read."""
        ...

    def miniature(self) -> PolicySettings:
        """The same ways of acting and learning in the smallest network, from a seed, for a trial before the start."""
        ...

    def stand_ins(self) -> Iterable[PolicySettings]:
        """These settings with less and less that has to be on this machine, for checks where something is missing."""
        ...


class FolderFormat(Protocol):
    """The released folders of some policies, which `SettingsTraits.folders` names."""

    def export(
        self, settings: PolicySettings, weights: Mapping[str, Tensor], out: Path, *, base: str, source: Path, env: Any
    ) -> str:
        """Write published weights of a policy with these settings into the new folder `out`; "network", "adapters", or
        "" where there is no released layout for them, and nothing is written. base: the folder that the policy began
        with, "" for none; source: the saved policy, for errors; env: its EnvSpec and seed."""
        ...

    def recognises(self, folder: Path) -> bool:
        """Whether the folder is of this format, told by config.json and headers."""
        ...

    def inspect(self, folder: Path) -> FolderReport:
        """What the folder is. ConfigError: it is no whole folder of this format."""
        ...

    def merge(self, adapters: Path, base: Path, out: Path) -> None:
        """Write `base` with adapters in peft's layout merged into it into the new folder `out`, in its layout."""
        ...


class FolderReport(NamedTuple):
    """What a folder is: as JSON takes it, in words, and whether every tensor of a network is there and no other."""

    plain: Mapping[str, Any]
    text: str
    fits: bool = True


def extended(policy: Policy | torch.nn.Module) -> OptionalMethods:
    """The policy typed with all optional methods, of which its traits declare the one that is called."""
    return cast(OptionalMethods, policy)


def extended_settings(settings: PolicySettings) -> OptionalSettings:
    """The settings typed with all optional methods, of which their traits declare the one that is called."""
    return cast(OptionalSettings, settings)


#: The fix for a settings model that has only the `build(env_spec, seed)` of earlier versions.
_FIX = (
    "write form(self, env_spec) -> PolicyForm and build(self, env_spec, *, seed, device, role) -> Policy, "
    "as docs/own-policies.md shows"
)


def as_settings(section: object) -> PolicySettings:
    """The section as policy settings. ValueError: `form` or `build` is missing, or `build` is of an earlier version."""
    kind = getattr(section, "type", type(section).__name__)
    if lacking := " and ".join(f"{name}()" for name in ("form", "build") if not has_methods(section, (name,))):
        raise ValueError(f"policy.type = {kind}: its settings have no {lacking}; {_FIX}")
    settings = cast(PolicySettings, section)
    parameters = inspect.signature(settings.build).parameters.values()
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    lacking = ", ".join(sorted({"seed", "device", "role"} - {p.name for p in parameters}))
    if lacking and not any_keyword:
        raise ValueError(f"policy.type = {kind}: its build() does not take {lacking}; {_FIX}")
    return settings


def named(value: Any) -> Any:
    """Expand a type's name into the section {"type": name} with default settings."""
    return {"type": value} if isinstance(value, str) else value


def type_or(default: str) -> Callable[[Any], Any]:
    """A discriminator for a union of sections: the section's `type`, or `default` if it has none."""

    def type_of(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return getattr(value, "type", None)
        return value.get("type", default) if isinstance(value, dict) else default

    return type_of


def as_module(policy: Policy) -> torch.nn.Module:
    """The policy typed as `nn.Module`, for optimizers and weights."""
    assert isinstance(policy, torch.nn.Module)
    return policy
