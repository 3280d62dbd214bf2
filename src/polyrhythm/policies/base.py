"""Interface of a policy, for token, flow-matching, Gaussian and categorical heads alike.

A policy module defines a pydantic settings model with a `type` literal that implements `PolicySettings`: it declares
the policy's form (`policies.form`) without building it, and builds an `nn.Module`. All randomness in `act` comes from
`noise_key`. The plugin `trial` checks the contract, partly before every run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from pydantic import BeforeValidator, ConfigDict
from torch import Tensor

from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.policies.traits import has_methods
from polyrhythm.specs import EnvSpec

Observations = Mapping[str, Tensor]

#: Configuration of every policy's settings model: frozen, no unknown keys, strict types, finite, documented fields.
SETTINGS = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Act(NamedTuple):
    """Result of `act`: actions [B,C,A] in env units, logprob [B,C,A] float32, value [B] or [B,C] float32.
    forward_inputs: name → [B,...], inputs of `evaluate` that are not in obs, such as sampled tokens."""

    actions: Tensor
    logprob: Tensor
    value: Tensor
    forward_inputs: dict[str, Tensor]


class Evaluation(NamedTuple):
    """Result of `evaluate`: logprob, entropy [B,C,A] float32 and value (as in `Act`), with gradient."""

    logprob: Tensor
    value: Tensor
    entropy: Tensor


class Policy(Protocol):
    """A policy. `evaluate(obs, act(obs).forward_inputs).logprob == act(obs).logprob` at the same batch shape.

    chunk: C, primitive actions per chunk step. action_dim: A. exact: log-probs and values are bit-equal; otherwise
    equal within `tolerance` (absolute for log-probs, relative for values above 1). Further abilities are declared by
    `policies.traits.PolicyTraits`; their methods are in `OptionalMethods`.
    """

    chunk: int
    action_dim: int
    exact: bool
    tolerance: float

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        """One forward pass without gradient. greedy [B] bool; noise_key [B] int64, one per row and step."""

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation: ...

    def value(self, obs: Observations) -> Tensor:
        """The value alone, for bootstrapping; same shape and definition as in `act`."""

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Supervised loss (scalar) of demonstrated actions [B,C,A] in env units."""

    def state_dict(self) -> dict[str, Tensor]: ...


class OptionalMethods(Policy, Protocol):
    """Methods that a policy may have; each is called only if the policy's traits declare it (`policies.traits`)."""

    def late_values(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        """Values of `evaluate`, without the rest, for a policy whose `act` returns zeros as values."""

    def published(self) -> dict[str, Tensor]:
        """Live tensors of the state_dict that training may change: generators receive them, and weight files hold them.
        All other tensors are equal in all modules that `build` makes."""

    def reference_state(self) -> dict[str, Tensor]:
        """Copies of the tensors that distinguish the current policy from later ones."""

    def as_reference(self, state: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Within this context the policy acts with the weights of `state`, from `reference_state`; frozen parts are not
        copied."""

    def precompute(self, obs: Observations) -> Mapping[str, Tensor]:
        """Outputs of a frozen part that depend on the observations alone, rows first, under names not in `obs`;
        empty if no part is frozen. `evaluate` and `value` find them in `obs`, in place of the arrays they were
        computed from; with the trait acts_from_precomputed `act` finds them there too, beside these arrays. Equal in
        both roles for equal frozen tensors."""

    def prefix_arrays(self, obs: Observations) -> Mapping[str, Tensor]:
        """Arrays that `act` keeps of the observations during a pass, rows first; counted by memory estimates."""

    def row_tokens(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        """Number of tokens that `evaluate` computes for each row, [B] int64, if rows differ in length. The form
        declares `row_tokens`, and `training.micro_batch_tokens` bounds the passes."""

    def evaluate_longest(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """`evaluate` as if every row had maximum length, for memory estimates; the tensors need no values."""

    def act_longest(self, obs: Observations) -> Tensor:
        """Last output of generation's largest pass for this number of rows of maximum length; the tensors need no
        values."""

    def load_part(self, part: torch.nn.Module, device: str) -> None:
        """Read the tensors within `part`, the policy or one of its modules, that have no values yet, onto `device`."""

    def blocks(self) -> Iterable[torch.nn.Module]:
        """Modules whose weights a rank of a sharded trainer gathers one at a time, if these are not the repeated layers
        (`plugins.ranks.sharded`)."""


class PolicySettings(Protocol):
    """Methods of a policy's settings model. ValueError: policy and environment do not fit."""

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        """Shapes, dtypes and sizes of the policy for this environment, without weights (`policies.form.describe`)."""

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> Policy:
        """Build the policy on `device`, with parameters that depend on `seed` alone.

        role: "act" in a generator, whose state_dict holds what `form` publishes in the declared dtypes; "train" in the
        trainer, whose state_dict holds tensors of the same names and shapes. If `form` publishes only a part, the rest
        must follow from these settings (a checkpoint) or from `seed`.
        """


class OptionalSettings(PolicySettings, Protocol):
    """Methods that a policy's settings may have; each is called only if the settings' traits declare it."""

    def outline(self, env_spec: EnvSpec, *, role: Role) -> Policy:
        """The module of `build` with correct shapes and dtypes and arbitrary values, made in `policies.form.outlined`
        for memory estimates, which run it without memory."""

    def build_in_parts(self, env_spec: EnvSpec, *, seed: int, role: Role) -> Policy:
        """The policy of `build` on the host, for ranks that shard it without any rank holding the whole. If it has
        `load_part`, some tensors are read later."""

    def miniature(self) -> PolicySettings:
        """Settings of the smallest network with the same ways of acting and learning, from a seed, for the trial before
        a run."""

    def stand_ins(self) -> Iterable[PolicySettings]:
        """These settings with ever fewer requirements on this machine, for checks when resources are missing."""


class FolderFormat(Protocol):
    """Released folder layout of some policies, named by `SettingsTraits.folders`."""

    def export(
        self, settings: PolicySettings, weights: Mapping[str, Tensor], out: Path, *, base: str, source: Path, env: Any
    ) -> str:
        """Write published weights of a policy with these settings into the new folder `out`.

        Returns "network" or "adapters", or "" if these weights have no released layout; then nothing is written. base:
        the folder that the policy started from, or ""; source: the saved policy, for errors; env: its EnvSpec and seed.
        """

    def recognises(self, folder: Path) -> bool:
        """Whether the folder has this format, by config.json and headers."""

    def inspect(self, folder: Path) -> FolderReport:
        """Describe the folder. ConfigError: it is not a whole folder of this format."""

    def merge(self, adapters: Path, base: Path, out: Path) -> None:
        """Merge adapters in peft's layout into `base`, and write the result in base's layout into the new folder
        `out`."""


class FolderReport(NamedTuple):
    """Description of a folder: as JSON data, as text, and whether it has exactly the tensors of a network."""

    plain: Mapping[str, Any]
    text: str
    fits: bool = True


def extended(policy: Policy | torch.nn.Module) -> OptionalMethods:
    """The policy, typed with all optional methods; its traits declare which ones may be called."""
    return cast(OptionalMethods, policy)


def extended_settings(settings: PolicySettings) -> OptionalSettings:
    """The settings, typed with all optional methods; their traits declare which ones may be called."""
    return cast(OptionalSettings, settings)


#: Remedy for a settings model with only the `build(env_spec, seed)` of earlier versions.
_FIX = (
    "write form(self, env_spec) -> PolicyForm and build(self, env_spec, *, seed, device, role) -> Policy, "
    "as docs/own-policies.md shows"
)


def as_settings(section: object) -> PolicySettings:
    """The section as policy settings. ValueError: `form` or `build` is missing, or `build` has the signature of an
    earlier version."""
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


def section_or(default: str) -> BeforeValidator:
    """Validator of one of several sections by `type`: expands a type's name, and adds the type `default`."""

    def section(value: Any) -> Any:
        if isinstance(value, str):
            return {"type": value}
        return {"type": default, **value} if isinstance(value, dict) else value

    return BeforeValidator(section)


def as_module(policy: Policy) -> torch.nn.Module:
    """The policy typed as `nn.Module`, for optimizers and weights."""
    assert isinstance(policy, torch.nn.Module)
    return policy
