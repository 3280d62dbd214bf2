"""Settings that all published VLA policies share, the inputs and outputs of each architecture, and the building of a
policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from torch import nn

from polyrhythm.plugins.pretrained.adapting import (
    Adaptation,
    AdaptedPolicy,
    Listed,
    LoraSettings,
    Named,
    TrainedPart,
    UnreadTensors,
    draw_adapters,
)
from polyrhythm.plugins.pretrained.building import load_network, load_ours, random_network, unfilled_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture, check_fit
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.statistics import BOUNDS
from polyrhythm.plugins.vla.tokenizers import WORDS
from polyrhythm.policies.base import SETTINGS
from polyrhythm.policies.form import PolicyForm, Role, ValueKind, describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.specs import ArraySpec, EnvSpec

PolicyType = Literal["pi0", "pi05", "openvla_oft", "groot_n1d5"]

#: Names of the cameras of each architecture in the order of its inputs, for folders that do not name theirs.
CAMERAS = {
    "pi0": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    "pi05": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    "openvla_oft": ("primary", "left_wrist", "right_wrist"),
    "groot_n1d5": ("ego_view", "wrist", "third"),
}
#: GR00T's rows of its per-embodiment weights, by the tag of the statistics (NVIDIA; RLinf).
EMBODIMENTS = {
    "new_embodiment": 31,
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "genie1_gripper": 26,
    "libero_franka": 31,
    "isaaclab_franka": 31,
    "maniskill_widowx": 30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputForm:
    """Inputs and outputs of one network.

    image: side of its images in pixels. horizon: H; action_dim, state_dim: padded entries of action and state;
    state_dim 0: the environment's. needs_state: the network reads the state. vocabulary: exclusive bound of ids; words:
    of hashed words. length: prompt tokens; 0: those of the longest prompt. fill: where short prompts are padded: right,
    left, or inside (after the first token). bos, pad, empty, image_token: ids. image_tokens: prompt tokens per image
    (GR00T). state_in_prompt: π0.5's bins. crop: OpenVLA-OFT's 90% of the area. embodiments: number of GR00T's.
    """

    architecture: PolicyType
    image: int
    horizon: int
    action_dim: int
    vocabulary: int
    words: int = 0
    state_dim: int = 0
    needs_state: bool = True
    length: int = 0
    fill: Literal["right", "left", "inside"] = "right"
    bos: int = 2
    pad: int = 0
    empty: int = 0
    image_token: int = 0
    image_tokens: int = 0
    state_in_prompt: bool = False
    crop: bool = False
    embodiments: int = 0

    @property
    def pads(self) -> bool:
        """Whether the network's state and actions may have more entries than the robot's."""
        return self.architecture != "openvla_oft"

    def __post_init__(self) -> None:
        if not self.words:
            object.__setattr__(self, "words", self.vocabulary)


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

    @model_validator(mode="after")
    def _check_multiples(self) -> InputSizeSettings:
        for name, value, divisor, of in self.multiples():
            if value % of:
                raise ValueError(f"policy.size.{name} = {value} is not a multiple of {divisor} = {of}: choose one")
        return self

    def multiples(self) -> tuple[tuple[str, int, str, int], ...]:
        """Divisibility constraints: setting, its value, the divisor's name, the divisor."""
        return (
            ("vision_width", self.vision_width, "vision_heads", self.vision_heads),
            ("image", self.image, "patch", self.patch),
        )


def _tag(value: Any) -> str:
    return "released" if isinstance(value, str) else "SizeSettings"


Own = TypeVar("Own", bound=InputSizeSettings)
#: Settings of a size, of a class SizeSettings, or the release's size.
OwnOrReleased = Annotated[
    Annotated[Own, Tag("SizeSettings")] | Annotated[Literal["released"], Tag("released")], Discriminator(_tag)
]


FOLDERS = "polyrhythm.plugins.vla.released:VlaFolders"


class VlaSettings(BaseModel):
    """Common settings; an architecture's settings derive from this and add `type`, `size` and what is its own."""

    model_config = SETTINGS
    policy_traits: ClassVar[PolicyTraits]
    needs: ClassVar = ("torch", "transformers", "safetensors")
    extra: ClassVar = "vla"

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

    def _blueprint(self, env_spec: EnvSpec) -> Blueprint[Any]:
        raise NotImplementedError

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> Any:
        return self._blueprint(env_spec).build(seed=seed, device=device, role=role)

    def build_in_parts(self, env_spec: EnvSpec, *, seed: int, role: Role) -> Any:
        return self._blueprint(env_spec).build_in_parts(seed=seed, role=role)

    def outline(self, env_spec: EnvSpec, *, role: Role) -> Any:
        return self._blueprint(env_spec).outline(role)

    def state_entries(self, env_spec: EnvSpec) -> int:
        """Entries of the environment's state; 1 without a state, which `plan_inputs` refuses if one is needed."""
        spec = env_spec.observation.get(self.state)
        return spec.shape[0] if spec is not None and spec.shape else 1

    def stand_ins(self) -> Iterator[Self]:
        """Variants of these settings with fewer requirements on local files, for checks on machines that lack them.

        Hashed words replace the tokenizer first, then the released network of this type replaces the checkpoint's
        folder.
        """
        yield self.model_copy(update={"tokenizer": WORDS})
        if not self.checkpoint:
            return
        released = self.model_copy(update={"checkpoint": "", "size": "released"})
        yield released
        yield released.model_copy(update={"tokenizer": WORDS})

    def miniature(self) -> Self:
        """The same acting and training settings with the smallest network, from a seed, which builds in a second.
        Settings that refer to a checkpoint's robot, cameras or padding are dropped."""
        kind = type(self).model_fields["type"].default
        return self.model_copy(
            update={
                "checkpoint": "",
                "size": type(self).model_fields["size"].get_default(),
                "tokenizer": WORDS,
                "robot": BOUNDS,
                "embodiment": -1,
                "data_config": "",
                "entries": (),
                "cameras": dict(zip(CAMERAS[kind], self.cameras.values(), strict=False)),
                "prompt_length": 0,
                "train": "all",
                "dtype": "float32",
            }
        )


P = TypeVar("P", bound=AdaptedPolicy)


@dataclass(frozen=True, slots=True)
class Blueprint(Generic[P]):
    """Builds one policy.

    architecture: with the dead tensors of a network of this size. source: the checkpoint, None for weights from the
    seed. around: makes the policy from its network, which may be on the meta device, and the precision.
    """

    settings: VlaSettings
    architecture: Architecture
    size: Any
    source: Checkpoint | None
    around: Callable[[nn.Module, Precision], P]

    def form(self, answers: Mapping[str, ArraySpec]) -> PolicyForm:
        """The policy's form. answers: one row of the policy's forward_inputs. ConfigError: the folder's tensors do
        not fit."""

        return describe(self.outline, answers, self.settings.value_level)

    def outline(self, role: Role) -> P:
        """The policy in the caller's `form.outlined`. ConfigError: the folder's tensors do not fit."""
        network = self.architecture.network(self.size)
        if self.source is not None:
            check_fit(self.architecture, self.source, network)
        adaptation = self._adaptation
        adaptation.prepare(network, role)
        adaptation.finish(network, role, 0)
        return self.around(network, adaptation.precision)

    def build(self, *, seed: int, device: str, role: Role) -> P:
        """The policy, loaded directly to the device; without a checkpoint drawn from the seed on the CPU."""
        adaptation, of = self._adaptation, self.architecture

        def prepare(network: nn.Module) -> None:
            adaptation.prepare(network, role)

        with seeded(seed):
            if self.source is None:
                network = random_network(of, self.size, seed=seed, device=device, prepare=prepare)
            else:
                network = load_network(of, self.source, device=device, prepare=prepare, seed=seed, size=self.size)
            adaptation.finish(network, role, seed)
            policy = self.around(network, adaptation.precision).to(device)
        if self.source is not None:
            load_ours(policy, self.source)
        return policy

    def build_in_parts(self, *, seed: int, role: Role) -> P:
        """The policy on the host; the checkpoint's tensors of its network are read later by `load_part`."""
        adaptation = self._adaptation
        if self.source is None:
            return self.build(seed=seed, device="cpu", role=role)

        def prepare(network: nn.Module) -> None:
            adaptation.prepare(network, role)

        with seeded(seed):
            network, found = unfilled_network(
                self.architecture, self.source, device="cpu", prepare=prepare, seed=seed, size=self.size
            )
            adaptation.finish(network, role, seed)
            draw_adapters(network, seed, allocate=True)
            policy = self.around(network, adaptation.precision)
        policy.unread = UnreadTensors(self.source, found)
        load_ours(policy, self.source)
        return policy

    @property
    def _adaptation(self) -> Adaptation:
        return adaptation_of(self.settings, self.architecture)


def adaptation_of(settings: VlaSettings, of: Architecture) -> Adaptation:
    precision = Precision(getattr(torch, settings.dtype), getattr(torch, settings.master), tuple(of.float32))
    recomputes = settings.gradient_checkpointing
    return Adaptation(settings.train, of.parts, precision, tuple(of.dead), settings.lora, recomputes)
