"""Settings of GR00T N1.5 policies."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.vla.groot_n1d5.action_head import QWEN3, GrootSize, StackSize
from polyrhythm.plugins.vla.groot_n1d5.network import GROOT_N1D5
from polyrhythm.plugins.vla.input_plan import InputForm
from polyrhythm.plugins.vla.settings import FlowVlaSettings, InputSizeSettings, OwnOrReleased


class GrootSizeSettings(InputSizeSettings):
    """Form of a network that is not a checkpoint's. The default has 1 million parameters."""

    width: int = Field(96, ge=8)
    """Features per token of the language model; heads x an even number."""
    mlp: int = Field(288, ge=8)
    """Hidden units of its MLPs."""
    layers: int = Field(2, ge=1)
    """Its layers."""
    heads: int = Field(4, ge=1)
    """Its attention heads, and those of the action head."""
    dit_width: int = Field(64, ge=8)
    """Features per token of the diffusion transformer; a multiple of heads."""
    dit_layers: int = Field(4, ge=1)
    """Its blocks; the even ones attend to images and words."""
    hidden: int = Field(64, ge=8)
    """Units of the encoders of state and actions."""

    def multiples(self) -> tuple[tuple[str, int, str, int], ...]:
        return (
            ("width", self.width, "2 x heads", 2 * self.heads),
            ("dit_width", self.dit_width, "heads", self.heads),
            *super().multiples(),
        )

    def network(self, *, horizon: int, action_dim: int, state_dim: int) -> GrootSize:
        """Size of the network, with one embodiment and without padded entries."""
        head_dim, heads = self.width // self.heads, self.heads
        llm = replace(QWEN3, width=self.width, layers=self.layers, mlp=self.mlp, heads=heads, kv_heads=heads)
        return GrootSize(
            llm=replace(llm, head_dim=head_dim),
            vision=self.tower(),
            vocabulary=self.words,
            image_token=self.words - 1,
            vl=StackSize(1, heads, head_dim),
            dit=StackSize(self.dit_layers, heads, self.dit_width // heads),
            hidden=self.hidden,
            horizon=horizon,
            action_dim=action_dim,
            state_dim=state_dim,
            embodiments=1,
            future=4,
            positions=horizon,
        )


class GrootSettings(FlowVlaSettings):
    """GR00T N1.5 (NVIDIA 2025)."""

    architecture: ClassVar = GROOT_N1D5

    type: Literal["groot_n1d5"] = "groot_n1d5"
    """The policy's name."""
    size: OwnOrReleased[GrootSizeSettings] = GrootSizeSettings()
    """Form of the network without a checkpoint; released: full size (2.4 billion parameters), for measurements."""

    def input_form(self, size: GrootSize, source: Checkpoint | None) -> InputForm:  # noqa: ARG002 - all alike
        return InputForm(
            architecture=self.type,
            image=size.image,
            horizon=size.horizon,
            action_dim=size.action_dim,
            vocabulary=size.vocabulary,
            words=size.image_token,
            state_dim=size.state_dim,
            fill="left",
            image_token=size.image_token,
            image_tokens=size.vision.tokens,
            embodiments=size.embodiments,
        )
