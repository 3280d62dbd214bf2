"""Settings of the inputs and the size of a released VLA's network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from polyrhythm.plugins.pretrained.adapting import (
    Listed,
    Named,
)
from polyrhythm.plugins.vla.vision import VisionSize
from polyrhythm.policies.base import SETTINGS

PolicyType = Literal["pi0", "pi05", "openvla_oft", "groot_n1d5"]
Gripper = Literal["as_is", "open_is_one"]


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


class InputSettings(BaseModel):
    """Which network, and how an environment's observations and actions meet it."""

    model_config = SETTINGS

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
    gripper: Gripper = "as_is"
    """The last action entry: as_is, or predicted as 1 = open and 0 = closed for an environment that takes -1 and 1
    (LIBERO with OpenVLA-OFT and GR00T)."""
    horizon: int = Field(0, ge=0)
    """Actions that are predicted (H); 0: the checkpoint's, without one as many as are executed."""
    chunk: int = Field(5, ge=1)
    """Actions that are executed of those predicted (C)."""
