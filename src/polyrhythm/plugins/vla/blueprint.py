"""Makes a policy from what its settings decided: its form without weights, or the policy on a station's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from polyrhythm.plugins.pretrained.adapting import Adaptation, AdaptedPolicy, UnreadTensors, draw_adapters
from polyrhythm.plugins.pretrained.building import load_network, load_ours, random_network, unfilled_network
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture, check_fit
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.settings import VlaSettings
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.specs import ArraySpec

P = TypeVar("P", bound=AdaptedPolicy)


@dataclass(frozen=True, slots=True)
class Blueprint(Generic[P]):
    """How one policy is made.

    architecture: with the tensors that are dead in a network of this size. source: the checkpoint, None for weights
    from the seed. around: makes the policy around its network, which may be on the meta device, and its precision.
    """

    settings: VlaSettings
    architecture: Architecture
    size: Any
    source: Checkpoint | None
    around: Callable[[nn.Module, Precision], P]

    def form(self, answers: Mapping[str, ArraySpec]) -> PolicyForm:
        """The form. answers: one row of the policy's forward_inputs. ConfigError: the folder's tensors do not fit."""

        return describe(self.outline, answers, self.settings.value_level)

    def outline(self, role: Role) -> P:
        """The policy with weights that have shapes and dtypes alone where the caller has chosen the meta device.
        ConfigError: the folder's tensors do not fit."""
        network = self.architecture.network(self.size)
        if self.source is not None:
            check_fit(self.architecture, self.source, network)
        adaptation = self._adaptation
        adaptation.prepare(network, role)
        adaptation.finish(network, role, 0)
        return self.around(network, adaptation.precision)

    def build(self, *, seed: int, device: str, role: Role) -> P:
        """The policy, from the checkpoint straight to the device; without one the seed decides, on the CPU."""
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
        """The policy on the host; what the checkpoint has of its network is there only once `load_part` has read it."""
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
    """What the settings train, by the patterns of the architecture."""
    precision = Precision(getattr(torch, settings.dtype), getattr(torch, settings.master), tuple(of.float32))
    recomputes = settings.gradient_checkpointing
    return Adaptation(settings.train, of.parts, precision, tuple(of.dead), settings.lora, recomputes)
