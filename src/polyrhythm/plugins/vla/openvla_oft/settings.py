"""Settings of OpenVLA-OFT policies."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.decoder import DecoderSize
from polyrhythm.plugins.vla.input_plan import InputForm
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.openvla_oft.network import (
    OPENVLA_OFT,
    L1HeadSize,
    OpenVlaOft,
    OpenVlaOftSize,
    Vocabulary,
    dead_patterns,
    l1_head_from_config,
)
from polyrhythm.plugins.vla.openvla_oft.policy import TOKEN_TRAITS, OpenVlaOftPolicy
from polyrhythm.plugins.vla.settings import InputSizeSettings, OwnOrReleased, VlaSettings
from polyrhythm.specs import ArraySpec, EnvSpec

log = logging.getLogger(__name__)


class OftSizeSettings(InputSizeSettings):
    """Form of a network that is not a checkpoint's. The default learns on a CPU."""

    multiples: ClassVar = (("width", 2, "heads"), *InputSizeSettings.multiples)

    width: int = Field(128, ge=8)
    """Features per token of the language model."""
    layers: int = Field(4, ge=2)
    """Its layers. The first gives every action slot the same features; only later ones tell them apart."""
    heads: int = Field(4, ge=1)
    """Its attention heads; width is an even multiple."""
    mlp: int = Field(384, ge=8)
    """Hidden units of its MLPs."""
    vision_layers: int = Field(3, ge=2)
    """Layers of each vision tower; the last is never computed."""
    bins: int = Field(256, ge=3, le=256)
    """Rows that stand for an action entry's values."""

    def network(self, *, horizon: int, action_dim: int, state_dim: int) -> OpenVlaOftSize:  # noqa: ARG002
        """Size of the network, without proprioception and L1 head."""
        tower, head_dim = self.tower(), self.width // self.heads
        return OpenVlaOftSize(
            dino=replace(tower, registers=4, layer_scale=True),
            siglip=replace(tower, pooled=True),
            llama=DecoderSize(self.width, self.layers, self.mlp, self.heads, self.heads, head_dim, "silu"),
            vocabulary=Vocabulary(self.words + self.bins, 0, self.bins, empty=3, pad=0),
            horizon=horizon,
            action_dim=action_dim,
        )


class OpenVlaOftSettings(VlaSettings):
    """OpenVLA-OFT."""

    architecture: ClassVar = OPENVLA_OFT
    policy_traits: ClassVar = TOKEN_TRAITS

    type: Literal["openvla_oft"] = "openvla_oft"
    """The policy's name."""
    size: OwnOrReleased[OftSizeSettings] = OftSizeSettings()
    """Form of the network without a checkpoint; released: full size (7.5 billion parameters), for measurements."""
    variant: Literal["rlinf", "official"] = "rlinf"
    """End of the sequence: rlinf drops the stop token, official keeps it. A checkpoint acts well only in the layout in
    which it was trained."""
    head: Literal["tokens", "l1"] = "tokens"
    """How actions are made: drawn as tokens, or by the L1 head, which cannot learn from rewards."""
    use_proprio: bool = False
    """Give the network the robot's state as a token (released for the official variant); the value sees it anyway."""
    crop: bool = False
    """Show the network the central 90% of an image's area: for checkpoints that were trained with random crops."""
    temperature: float = Field(1.0, gt=0.0)
    """Divides the scores of tokens, when they are drawn and when their log-probs are computed."""
    top_k: int = Field(0, ge=0)
    """Draw from the k likeliest tokens alone; 0: from all."""
    greedy: Literal["mode", "mean"] = "mode"
    """Greedy action of an entry: the likeliest token (published), or the one nearest to the expectation."""
    label_sigma: float = Field(0.0, ge=0.0)
    """Width of the soft labels of supervised training in units of half the action range; 0: the one token."""

    def answers(self, env_spec: EnvSpec, size: OpenVlaOftSize) -> dict[str, ArraySpec]:
        tokens = (self.chunk, env_spec.action.dim)
        answers = {"tokens": ArraySpec(tokens, "int64")} if size.l1_head is None else {}
        if answers and 0 < self.top_k < size.vocabulary.bins:
            answers["kept"] = ArraySpec((*tokens, self.top_k), "uint8")
        return answers

    def policy(self, network: nn.Module, inputs: VlaInputs, precision: Precision) -> OpenVlaOftPolicy:
        assert isinstance(network, OpenVlaOft)
        return OpenVlaOftPolicy(network, inputs, self, precision)

    def fitted_architecture(self, size: OpenVlaOftSize) -> Architecture:
        return replace(OPENVLA_OFT, dead=dead_patterns(size))

    def input_form(self, size: OpenVlaOftSize, source: Checkpoint | None) -> InputForm:  # noqa: ARG002
        ids = size.vocabulary
        return InputForm(
            architecture="openvla_oft",
            image=size.dino.image,
            horizon=size.horizon,
            action_dim=size.action_dim,
            vocabulary=ids.rows,
            words=ids.first_action,
            state_dim=size.proprio,
            needs_state=size.proprio > 0,
            fill="inside",
            bos=ids.bos,
            pad=ids.pad,
            empty=ids.empty,
            crop=self.crop,
        )

    def network_size(self, env_spec: EnvSpec, source: Checkpoint | None) -> OpenVlaOftSize:
        """Size of the network for this environment. ConfigError: the folder lacks a requested part; a missing L1 head
        is drawn."""
        size: OpenVlaOftSize = super().network_size(env_spec, source)
        proprio, head = self.state_entries(env_spec), L1HeadSize()
        if source is not None:
            self._check_side_files(source, size)
            proprio, head = size.proprio, size.l1_head or l1_head_from_config(source.config)
        elif not isinstance(self.size, str):
            head = L1HeadSize(self.size.width)
        return replace(
            size,
            stop_token=self.variant == "official",
            proprio=proprio if self.use_proprio else 0,
            l1_head=head if self.head == "l1" else None,
        )

    def _check_side_files(self, source: Checkpoint, size: OpenVlaOftSize) -> None:
        if self.use_proprio and not size.proprio:
            raise ConfigError(
                f"policy.use_proprio = true: checkpoint = {source.folder} has no file proprio_projector--*; copy it "
                "from the release, or set policy.use_proprio to false"
            )
        if self.head == "l1" and size.l1_head is None and not any("action_head." in name for name in source.ours):
            log.warning(
                "policy.head = l1: checkpoint = %s has no file action_head--*, so the head is drawn from the seed and "
                "acts at random until it was trained on demonstrations",
                source.folder,
            )
