"""Settings that the published VLA policies share, further ones of flow policies, and the building of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from polyrhythm.plugins.pretrained.adapting import (
    Adaptation,
    AdaptedPolicy,
    LoraSettings,
    TrainedPart,
    draw_adapters,
)
from polyrhythm.plugins.pretrained.building import load_network, load_ours, random_network, unfilled_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture, check_fit, released_size
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.input_plan import CAMERAS, InputForm, InputPlan, plan_inputs
from polyrhythm.plugins.vla.input_settings import InputSettings
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.prompts import WORDS
from polyrhythm.plugins.vla.statistics import BOUNDS
from polyrhythm.policies.form import PolicyForm, Role, ValueKind, describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.specs import ArraySpec, EnvSpec

FOLDERS = "polyrhythm.plugins.vla.released:VlaFolders"
#: Section `training` for released weights: small learning rates (RLinf's for π0 and GR00T).
RELEASED_TRAINING: Mapping[str, Any] = {
    "epochs": 2,
    "minibatch_steps": 1024,
    "max_kl": None,
    "micro_batch_steps": 32,
    "optimizer": {"lr": 5e-6, "value_lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01},
}


class VlaSettings(InputSettings):
    """Common settings; an architecture's settings derive from this and define `policy`, `answers`, `input_form`, and
    what is its own."""

    architecture: ClassVar[Architecture]
    policy_traits: ClassVar[PolicyTraits]
    needs: ClassVar = ("torch", "transformers", "safetensors")
    extra: ClassVar = "vla"

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the backbone computes in; the release's float32 parts stay so."""
    master: Literal["float32", "bfloat16"] = "float32"
    """What the trainer keeps trained weights in."""
    train: TrainedPart = "all"
    """What is trained: everything, the part that makes actions, adapters, or the last layers alone."""
    lora: LoraSettings = LoraSettings()
    """The adapters of train: lora."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    value_detach: bool = True
    """Keep the value loss out of the network."""
    value_level: ValueKind = "chunk"
    """What one value covers: the chunk, or each action that is executed of it (algorithm.reward_level: action)."""

    @property
    def training_defaults(self) -> Mapping[str, Any]:
        """`RELEASED_TRAINING`, but larger learning rates for a network from a seed."""
        if not self.checkpoint:
            return {"max_kl": None, "optimizer": {"lr": 3e-4, "value_lr": 1e-3}}
        return RELEASED_TRAINING

    @property
    def traits(self) -> SettingsTraits:
        policy = replace(self.policy_traits, dtype=self.dtype)
        makes = SettingsTraits(outlines=True, builds_in_parts=True, has_miniature=True)
        return replace(makes, adapts=True, folders=FOLDERS, policy=policy)

    def network_size(self, env_spec: EnvSpec, source: Checkpoint | None) -> Any:
        """Size of the network for this environment, from the checkpoint, the release, or `size`. ConfigError: the
        checkpoint has another architecture, or its size is unknown."""
        if source is not None:
            size = released_size(self.architecture, source)
        elif isinstance(self.size, str):
            size = replace(self.architecture.size({}, {}), horizon=self.chunk)
        else:
            size = self.size.network(
                horizon=self.horizon or self.chunk,
                action_dim=env_spec.action.dim,
                state_dim=self.state_entries(env_spec),
            )
        return replace(size, horizon=self.horizon or size.horizon)

    def fitted_architecture(self, size: Any) -> Architecture:  # noqa: ARG002 - most are the same at any size
        """The architecture, with the dead tensors of a network of this size."""
        return self.architecture

    def input_form(self, size: Any, source: Checkpoint | None) -> InputForm:
        """Inputs and outputs of a network of this size."""
        raise NotImplementedError

    def policy(self, network: nn.Module, inputs: VlaInputs, precision: Precision) -> AdaptedPolicy:
        raise NotImplementedError

    def answers(self, env_spec: EnvSpec, size: Any) -> Mapping[str, ArraySpec]:
        """One row of the policy's forward_inputs."""
        raise NotImplementedError

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        plan = self._blueprint(env_spec)
        return describe(plan.outline, self.answers(env_spec, plan.size), self.value_level)

    def _blueprint(self, env_spec: EnvSpec) -> Blueprint:
        source = Checkpoint.open(self.checkpoint) if self.checkpoint else None
        size = self.network_size(env_spec, source)
        plan = plan_inputs(self, env_spec, self.input_form(size, source), source)
        return Blueprint(self, self.fitted_architecture(size), size, source, plan)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> Any:
        return self._blueprint(env_spec).build(seed=seed, device=device, role=role)

    def build_in_parts(self, env_spec: EnvSpec, *, seed: int, role: Role) -> Any:
        return self._blueprint(env_spec).build(seed=seed, device="cpu", role=role, in_parts=True)

    def outline(self, env_spec: EnvSpec, *, role: Role) -> Any:
        return self._blueprint(env_spec).outline(role)

    def state_entries(self, env_spec: EnvSpec) -> int:
        """Entries of the environment's state; 1 without a state, which `plan_inputs` refuses if one is needed."""
        spec = env_spec.observation.get(self.state)
        return spec.shape[0] if spec is not None and spec.shape else 1

    def stand_ins(self) -> Iterator[Self]:
        """Variants of these settings with fewer requirements on local files, for checks on machines that lack them.
        Hashed words replace the tokenizer first, then the released network of this type replaces the checkpoint's
        folder."""
        yield self.model_copy(update={"tokenizer": WORDS})
        if not self.checkpoint:
            return
        released = self.model_copy(update={"checkpoint": "", "size": "released"})
        yield released
        yield released.model_copy(update={"tokenizer": WORDS})

    def miniature(self) -> Self:
        """The same acting and training settings with the smallest network, from a seed, which builds in a second.
        Settings that refer to a checkpoint's robot, cameras or padding are dropped."""
        return self.model_copy(
            update={
                "checkpoint": "",
                "size": type(self).model_fields["size"].get_default(),
                "tokenizer": WORDS,
                "robot": BOUNDS,
                "embodiment": -1,
                "data_config": "",
                "entries": (),
                "cameras": dict(zip(CAMERAS[self.type], self.cameras.values(), strict=False)),
                "prompt_length": 0,
                "train": "all",
                "dtype": "float32",
            }
        )


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Builds one policy.

    architecture: with the dead tensors of a network of this size. source: the checkpoint, None for weights from the
    seed.
    """

    settings: VlaSettings
    architecture: Architecture
    size: Any
    source: Checkpoint | None
    plan: InputPlan

    def outline(self, role: Role) -> AdaptedPolicy:
        """The policy in the caller's `form.outlined`. ConfigError: the folder's tensors do not fit."""
        network = self.architecture.network(self.size)
        if self.source is not None:
            check_fit(self.architecture, self.source, network)
        adaptation = adaptation_of(self.settings, self.architecture)
        adaptation.prepare(network, role)
        adaptation.finish(network, role, 0)
        return self._around(network, adaptation)

    def build(self, *, seed: int, device: str, role: Role, in_parts: bool = False) -> AdaptedPolicy:
        """The policy, loaded directly to the device; without a checkpoint drawn from the seed on the CPU. in_parts: on
        the host, where `load_part` reads the checkpoint's tensors of its network later."""
        adaptation, of, unread = adaptation_of(self.settings, self.architecture), self.architecture, None
        prepare = partial(adaptation.prepare, role=role)
        with seeded(seed):
            if self.source is None:
                network = random_network(of, self.size, seed=seed, device=device, prepare=prepare)
            elif in_parts:
                network, unread = unfilled_network(
                    of, self.source, device=device, prepare=prepare, seed=seed, size=self.size
                )
            else:
                network = load_network(of, self.source, device=device, prepare=prepare, seed=seed, size=self.size)
            adaptation.finish(network, role, seed)
            if unread is not None:
                draw_adapters(network, seed, allocate=True)
            policy = self._around(network, adaptation)
        if self.source is not None and unread is not None:
            policy.unread = self.source, unread
        else:
            policy = policy.to(device)
        if self.source is not None:
            load_ours(policy, self.source)
        return policy

    def _around(self, network: nn.Module, adaptation: Adaptation) -> AdaptedPolicy:
        return self.settings.policy(network, VlaInputs(self.plan), adaptation.precision)


def adaptation_of(settings: VlaSettings, of: Architecture) -> Adaptation:
    precision = Precision(getattr(torch, settings.dtype), getattr(torch, settings.master), tuple(of.float32))
    recomputes = settings.gradient_checkpointing
    return Adaptation(settings.train, of.parts, precision, tuple(of.dead), settings.lora, recomputes)
