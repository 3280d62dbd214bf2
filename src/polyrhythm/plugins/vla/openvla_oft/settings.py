"""Settings of OpenVLA-OFT policies, and their construction."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import released_size
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.inputs import VlaInputs, plan_inputs
from polyrhythm.plugins.vla.layers.decoder import DecoderSize
from polyrhythm.plugins.vla.layers.timm_vit import VitSize
from polyrhythm.plugins.vla.openvla_oft.network import OPENVLA_OFT, OpenVlaOft, dead_patterns
from polyrhythm.plugins.vla.openvla_oft.policy import TOKEN_TRAITS, OpenVlaOftPolicy, TokenSampling
from polyrhythm.plugins.vla.openvla_oft.size import L1HeadSize, OpenVlaOftSize, Vocabulary, l1_head_from_config
from polyrhythm.plugins.vla.settings import Blueprint, InputForm, InputSizeSettings, OwnOrReleased, VlaSettings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import ArraySpec, EnvSpec

log = logging.getLogger(__name__)


class OftSizeSettings(InputSizeSettings):
    """Form of a network that is not a checkpoint's. The default learns on a CPU."""

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

    def multiples(self) -> tuple[tuple[str, int, str, int], ...]:
        return (
            ("width", self.width, "2 x heads", 2 * self.heads),
            *super().multiples(),
        )

    def network(self, horizon: int, action_dim: int) -> OpenVlaOftSize:
        """Size of the network, without proprioception and L1 head."""
        tower = VitSize(self.vision_width, self.vision_layers, 4 * self.vision_width, self.vision_heads)
        tower = replace(tower, image=self.image, patch=self.patch)
        head_dim = self.width // self.heads
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
    horizon: int = Field(0, ge=0)
    """Actions that are predicted (H); 0: the checkpoint's, without one as many as are executed."""
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

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        plan = self._blueprint(env_spec)
        tokens = (self.chunk, env_spec.action.dim)
        answers = {"tokens": ArraySpec(tokens, "int64")} if plan.size.l1_head is None else {}
        if answers and 0 < self.top_k < plan.size.vocabulary.bins:
            answers["kept"] = ArraySpec((*tokens, self.top_k), "uint8")
        return plan.form(answers)

    def _blueprint(self, env_spec: EnvSpec) -> Blueprint[OpenVlaOftPolicy]:
        source = Checkpoint.open(self.checkpoint) if self.checkpoint else None
        size = self._network_size(env_spec, source)
        inputs = plan_inputs(self, env_spec, self._input_form(size), source)
        sampling = TokenSampling(self.temperature, self.top_k, self.greedy, self.label_sigma)

        def around(network: nn.Module, precision: Precision) -> OpenVlaOftPolicy:
            assert isinstance(network, OpenVlaOft)
            return OpenVlaOftPolicy(
                *(network, VlaInputs(inputs), sampling, precision),
                value_detach=self.value_detach,
                value_level=self.value_level,
            )

        return Blueprint(self, replace(OPENVLA_OFT, dead=dead_patterns(size)), size, source, around)

    def _input_form(self, size: OpenVlaOftSize) -> InputForm:
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

    def _network_size(self, env_spec: EnvSpec, source: Checkpoint | None) -> OpenVlaOftSize:
        """Size of the network for this environment. ConfigError: the folder lacks a requested part."""
        proprio = self.state_entries(env_spec)
        if source is not None:
            size: OpenVlaOftSize = released_size(OPENVLA_OFT, source)
            self._check_side_files(source, size)
            proprio, head = size.proprio, size.l1_head or l1_head_from_config(source.config)
        elif isinstance(self.size, str):
            size, head = replace(OpenVlaOftSize(), horizon=self.chunk), L1HeadSize()
        else:
            size, head = self.size.network(self.chunk, env_spec.action.dim), L1HeadSize(self.size.width)
        return replace(
            size,
            horizon=self.horizon or size.horizon,
            stop_token=self.variant == "official",
            proprio=proprio if self.use_proprio else 0,
            l1_head=head if self.head == "l1" else None,
        )

    def _check_side_files(self, source: Checkpoint, size: OpenVlaOftSize) -> None:
        """ConfigError: proprioception is requested and the folder has no projector. A missing L1 head is drawn."""
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
