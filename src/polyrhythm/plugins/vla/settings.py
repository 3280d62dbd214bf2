"""Settings that all published VLA policies share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field

from polyrhythm.plugins.pretrained.adapting import Listed, LoraSettings, Named, TrainedPart
from polyrhythm.plugins.vla.input_form import CAMERAS
from polyrhythm.plugins.vla.statistics import BOUNDS
from polyrhythm.plugins.vla.tokenizers import WORDS
from polyrhythm.policies.base import SETTINGS
from polyrhythm.policies.form import ValueKind
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.specs import EnvSpec

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
        """Small steps for released weights (RLinf's for π0 and GR00T), larger ones for a network from a seed."""
        if not self.checkpoint:
            return {"max_kl": None, "optimizer": {"lr": 3e-4, "value_lr": 1e-3}}
        optimizer = {"lr": 5e-6, "value_lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
        passes = {"epochs": 2, "minibatch_steps": 1024, "max_kl": None, "micro_batch_steps": 32}
        return {**passes, "optimizer": optimizer}

    @property
    def traits(self) -> SettingsTraits:
        """What the policy can do."""
        policy = replace(self.policy_traits, dtype=self.dtype)
        makes = SettingsTraits(outlines=True, builds_in_parts=True, has_miniature=True)
        return replace(makes, adapts=True, folders=FOLDERS, policy=policy)

    def state_entries(self, env_spec: EnvSpec) -> int:
        """Entries of the environment's state; 1 if it shows none, which `plan_inputs` refuses where one is needed."""
        spec = env_spec.observation.get(self.state)
        return spec.shape[0] if spec is not None and spec.shape else 1

    def stand_ins(self) -> Iterator[Self]:
        """These settings with less and less that has to be on this machine, for checks where something is missing.

        Hashed words replace the tokenizer, then the released network of this type the checkpoint's folder, if any.
        """
        yield self.model_copy(update={"tokenizer": WORDS})
        if not self.checkpoint:
            return
        released = self.model_copy(update={"checkpoint": "", "size": "released"})
        yield released
        yield released.model_copy(update={"tokenizer": WORDS})

    def miniature(self) -> Self:
        """The same ways of acting and learning in the smallest network, from a seed: it is built in a second. It leaves
        out what refers to a checkpoint's robot, cameras or padding."""
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
