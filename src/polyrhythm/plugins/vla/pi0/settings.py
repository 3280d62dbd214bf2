"""Settings of π0 and π0.5 policies."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture
from polyrhythm.plugins.vla.decoder import DecoderSize
from polyrhythm.plugins.vla.flow_policy import FlowVlaSettings
from polyrhythm.plugins.vla.input_plan import InputForm
from polyrhythm.plugins.vla.input_settings import InputSizeSettings, OwnOrReleased
from polyrhythm.plugins.vla.pi0.network import PI0, PI05, Pi0Size, dead_tensors
from polyrhythm.specs import EnvSpec


class Pi0SizeSettings(InputSizeSettings):
    """Form of a network that is not a checkpoint's. The default has 1 million parameters and learns on a CPU."""

    width: int = Field(128, ge=8)
    """Features per token of the language model."""
    mlp: int = Field(384, ge=8)
    """Hidden units of its MLPs."""
    layers: int = Field(3, ge=1)
    """Its layers; the action expert has as many."""
    heads: int = Field(4, ge=1)
    """Attention heads of both, which share one head of keys and values."""
    head_dim: int = Field(32, ge=2, multiple_of=2)
    """Features per head."""
    expert_width: int = Field(96, ge=8, multiple_of=2)
    """Features per action token of the expert."""
    expert_mlp: int = Field(288, ge=8)
    """Hidden units of its MLPs."""

    def network(self, *, horizon: int, action_dim: int, state_dim: int) -> Pi0Size:
        language = DecoderSize(
            self.width, self.layers, self.mlp, self.heads, 1, self.head_dim, "gelu_tanh", norm_offset=1.0
        )
        return Pi0Size(
            vlm=language,
            expert=replace(language, width=self.expert_width, mlp=self.expert_mlp),
            vision=self.tower(),
            vocabulary=self.words,
            expert_vocabulary=1,
            horizon=horizon,
            action_dim=action_dim,
            state_dim=state_dim,
        )


#: Places for the prompt in the releases.
PROMPT_LENGTH = {"pi0": 48, "pi05": 200}


class _FlowGemmaSettings(FlowVlaSettings):
    """What π0 and π0.5 share."""

    type: Literal["pi0", "pi05"]
    """The policy's name."""
    size: OwnOrReleased[Pi0SizeSettings] = Pi0SizeSettings()
    """Form of the network without a checkpoint; released: full size (3.5 billion parameters), for measurements."""

    def fitted_architecture(self, size: Pi0Size) -> Architecture:
        return replace(self.architecture, dead=dead_tensors(size, features=not self.value_detach))

    def network_size(self, env_spec: EnvSpec, source: Checkpoint | None) -> Pi0Size:
        size: Pi0Size = super().network_size(env_spec, source)
        return replace(size, adaptive=self.architecture is PI05)

    def input_form(self, size: Pi0Size, source: Checkpoint | None) -> InputForm:
        """Inputs and outputs of the network. Prompts have the release's length, or that of the longest prompt here."""
        released = PROMPT_LENGTH[self.type]
        if source is not None:
            length = source.number("tokenizer_max_length", released)
        else:
            length = released if isinstance(self.size, str) else 0
        binned = self._binned_state
        return InputForm(
            architecture=self.type,
            image=size.image,
            horizon=size.horizon,
            action_dim=size.action_dim,
            vocabulary=size.vocabulary,
            state_dim=size.state_dim,
            needs_state=not size.adaptive or binned,
            length=length,
            state_in_prompt=binned,
        )

    @property
    def _binned_state(self) -> bool:
        return False


class Pi0Settings(_FlowGemmaSettings):
    """π0 (Black et al. 2024)."""

    architecture: ClassVar = PI0

    type: Literal["pi0"] = "pi0"
    """The policy's name."""


class Pi05Settings(_FlowGemmaSettings):
    """π0.5 (Black et al. 2025)."""

    architecture: ClassVar = PI05

    type: Literal["pi05"] = "pi05"
    """The policy's name."""
    state_in_prompt: bool = True
    """Write the normalised state into the prompt in 256 bins; off in the LIBERO release (discrete_state_input)."""

    @property
    def _binned_state(self) -> bool:
        return self.state_in_prompt
