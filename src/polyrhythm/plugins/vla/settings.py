"""Settings that the published VLA policies share, further ones of flow policies, and the building of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator
from torch import nn

from polyrhythm.config.base import type_or
from polyrhythm.plugins.pretrained.adapting import (
    Adaptation,
    AdaptedPolicy,
    Listed,
    LoraSettings,
    Named,
    TrainedPart,
    draw_adapters,
)
from polyrhythm.plugins.pretrained.building import load_network, load_ours, random_network, unfilled_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture, check_fit, released_size
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.flow_policy import FLOW_TRAITS, FlowNetwork, FlowPolicy
from polyrhythm.plugins.vla.input_plan import CAMERAS, InputForm, InputPlan, PolicyType, plan_inputs
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.prompts import WORDS
from polyrhythm.plugins.vla.statistics import BOUNDS
from polyrhythm.plugins.vla.vision import VisionSize
from polyrhythm.policies.base import SETTINGS, named
from polyrhythm.policies.flow_matching import FlowMethod, check_steps
from polyrhythm.policies.form import PolicyForm, Role, ValueKind, describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.specs import ArraySpec, EnvSpec


class InputSizeSettings(BaseModel):
    """Images, vision tower and words; an architecture's own settings of its size derive from this."""

    model_config = SETTINGS

    vision_width: int = Field(64, ge=8)
    """Features per patch of a vision tower."""
    vision_layers: int = Field(3, ge=1)
    """Its layers."""
    vision_heads: int = Field(4, ge=1)
    """Its attention heads; divides vision_width."""
    image: int = Field(56, ge=8)
    """Side of the images in pixels."""
    patch: int = Field(14, ge=2)
    """Side of a patch in pixels; divides image."""
    words: int = Field(512, ge=16)
    """Rows of the word embedding that words are hashed into."""

    #: Divisibility constraints: a setting is a multiple of a number times another setting.
    multiples: ClassVar[tuple[tuple[str, int, str], ...]] = (("vision_width", 1, "vision_heads"), ("image", 1, "patch"))

    @model_validator(mode="after")
    def _check_multiples(self) -> InputSizeSettings:
        values = self.model_dump()
        for name, factor, of in self.multiples:
            if values[name] % (divisor := factor * values[of]):
                told = f"{factor} x {of}" if factor > 1 else of
                raise ValueError(
                    f"policy.size.{name} = {values[name]} is not a multiple of {told} = {divisor}: choose one"
                )
        return self

    def network(self, *, horizon: int, action_dim: int, state_dim: int) -> Any:
        """Size of the network, without padded entries."""
        raise NotImplementedError

    def tower(self) -> VisionSize:
        width = self.vision_width
        return VisionSize(width, self.vision_layers, 4 * width, self.vision_heads, self.image, self.patch)


def _tag(value: Any) -> str:
    return "released" if isinstance(value, str) else "SizeSettings"


Own = TypeVar("Own", bound=InputSizeSettings)
#: Settings of a size, of a class SizeSettings, or the release's size.
OwnOrReleased = Annotated[
    Annotated[Own, Tag("SizeSettings")] | Annotated[Literal["released"], Tag("released")], Discriminator(_tag)
]


FOLDERS = "polyrhythm.plugins.vla.released:VlaFolders"


class VlaSettings(BaseModel):
    """Common settings; an architecture's settings derive from this and define `policy`, `answers`, `input_form`, and
    what is its own."""

    model_config = SETTINGS
    architecture: ClassVar[Architecture]
    policy_traits: ClassVar[PolicyTraits]
    needs: ClassVar = ("torch", "transformers", "safetensors")
    extra: ClassVar = "vla"

    type: PolicyType
    """The policy's name."""
    size: InputSizeSettings | Literal["released"]
    """Form of the network without a checkpoint; released: full size, for measurements."""
    checkpoint: Named = ""
    """Folder of a released checkpoint; empty: weights from the seed, in the form of `size`."""
    tokenizer: Named = ""
    """Folder of the tokenizer; empty: the checkpoint's own, or without a checkpoint a hash of each word; words: such a
    hash with a checkpoint too."""
    prompt_length: int = Field(0, ge=0)
    """Places for the prompt's tokens; 0: as released, or as many as the longest prompt. GR00T reads the padding of a
    number that is set here."""
    robot: Named = ""
    """Key of the checkpoint's normalisation statistics; empty: the only one; bounds: actions between the environment's
    bounds and the state as it is, as without a checkpoint."""
    embodiment: int = Field(-1, ge=-1)
    """Row of GR00T's per-embodiment weights; -1: by the robot's key."""
    data_config: Named = ""
    """GR00T's data configuration of the fine-tuning, which says how state and actions are normalised (libero,
    libero_mean_std, so100, min_max for all, ...); empty: that of the embodiment, where one is known."""
    cameras: Mapping[str, str] = {}
    """The policy's camera → the environment's image; empty: as many as there are, in order."""
    turn_images: bool = False
    """Turn images by 180 degrees, as LIBERO's were in training; `env.type: libero` has turned them already."""
    state: str = "proprio"
    """The environment's array with the robot's state."""
    entries: Listed[int] = ()
    """The policy's action entry for each of the environment's; empty: the first ones (Meta-World with OpenVLA-OFT: 0,
    1, 2, 6)."""
    relative_entries: int = Field(0, ge=0)
    """How many leading action entries are predicted relative to the state (pi0_libero: 6)."""
    gripper: Literal["as_is", "open_is_one"] = "as_is"
    """The last action entry: as_is, or predicted as 1 = open and 0 = closed for an environment that takes -1 and 1
    (LIBERO with OpenVLA-OFT and GR00T)."""
    horizon: int = Field(0, ge=0)
    """Actions that are predicted (H); 0: the checkpoint's, without one as many as are executed."""
    chunk: int = Field(5, ge=1)
    """Actions that are executed of those predicted (C)."""
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
        """Small learning rates for released weights (RLinf's for π0 and GR00T), larger ones for a network from a
        seed."""
        if not self.checkpoint:
            return {"max_kl": None, "optimizer": {"lr": 3e-4, "value_lr": 1e-3}}
        optimizer = {"lr": 5e-6, "value_lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
        passes = {"epochs": 2, "minibatch_steps": 1024, "max_kl": None, "micro_batch_steps": 32}
        return {**passes, "optimizer": optimizer}

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


class FlowVlaSettings(VlaSettings):
    """Common settings of flow policies: π0, π0.5 and GR00T N1.5."""

    policy_traits: ClassVar = FLOW_TRAITS

    steps: int = Field(4, ge=1)
    """Steps from noise to actions (K)."""
    method: Annotated[FlowMethod, Discriminator(type_or("flow_sde")), BeforeValidator(named)] = Field(
        {"type": "flow_sde"}, validate_default=True
    )
    """Where noise enters: flow_sde, flow_cps (one step per row), flow_noise (all steps, learned), ode (not for RL)."""
    sft_draws: int = Field(1, ge=1)
    """Pairs of time and noise per demonstrated chunk in supervised training, on one prefix pass; releases use 1."""

    @model_validator(mode="after")
    def _method_has_a_noisy_step(self) -> Self:
        check_steps(self.method, self.steps)
        return self

    def policy(self, network: nn.Module, inputs: VlaInputs, precision: Precision) -> FlowPolicy:
        assert isinstance(network, FlowNetwork)
        return FlowPolicy(network, inputs, self, precision)

    def answers(self, env_spec: EnvSpec, size: Any) -> Mapping[str, ArraySpec]:  # noqa: ARG002 - in the network's shape
        return self.method.answers(self.steps, (size.horizon, size.action_dim))


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
