"""Settings of the form of a network that is not a checkpoint's, as far as all published policies share them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from polyrhythm.policies.base import SETTINGS


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
                raise ValueError(f"policy.size.{name} = {value} is no multiple of {divisor} = {of}: choose one")
        return self

    def multiples(self) -> tuple[tuple[str, int, str, int], ...]:
        """A setting that must be a multiple, its value, of what, and that value."""
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
