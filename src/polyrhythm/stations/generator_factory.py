"""Builds generators from plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from polyrhythm.config.registry import resolve
from polyrhythm.errors import RunHalted
from polyrhythm.policies.base import Policy, as_module, as_settings, extended, extended_settings
from polyrhythm.policies.form import Role
from polyrhythm.policies.traits import policy_traits, settings_traits
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.observed import ObservedReader
from polyrhythm.runtime.memory.prefixes import Prefixes, frozen_checksum, row_specs
from polyrhythm.runtime.messages import Station
from polyrhythm.scheduler.records import GeneratorJoined
from polyrhythm.specs import EnvSpec, WeightsLayout
from polyrhythm.specs.weights import first_misfit, weight_specs
from polyrhythm.stations.batch_buffer import torch_dtype
from polyrhythm.stations.generator import Generator, GeneratorContext, GeneratorEngine, PolicyCopies
from polyrhythm.stations.one_pass import OnePassEngine
from polyrhythm.stations.streaming import StreamingEngine

#: Whether a generator answers evaluations during training: not, beside training, or nothing else.
Evaluates = Literal["no", "too", "only"]


@dataclass(frozen=True, slots=True)
class PolicyFactory:
    """Settings of a policy as plain data, and its environment's spec."""

    settings: dict[str, Any]
    spec: EnvSpec
    seed: int

    @property
    def label(self) -> str:
        return f"policy.type = {self.settings['type']}"

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that are slow to import: this one, with torch, and those named by the policy's traits."""
        return (__name__, *settings_traits(resolve("policy", self.settings)).preload)

    def build(self, device: str, role: Role, layout: WeightsLayout, *, in_parts: bool = False) -> Policy:
        """The policy on this device. RunHalted: it does not fit the layout of the published weights. in_parts: for a
        rank that will hold a shard of each tensor: the policy is on the host, or its tensors are still to be read."""
        settings = as_settings(resolve("policy", self.settings))
        if in_parts and settings_traits(settings).builds_in_parts:
            policy = extended_settings(settings).build_in_parts(self.spec, seed=self.seed, role=role)
        else:
            policy = settings.build(self.spec, seed=self.seed, device="cpu" if in_parts else device, role=role)
        found = weight_specs(as_module(policy).state_dict())
        if name := first_misfit(layout.published, found, convertible=role == "train"):
            raise RunHalted(
                f"{self.label}: build(role={role!r}) has {name} as {found.get(name, 'nothing')}, form() publishes "
                f"{layout.published[name]}; make both the same (`polyrhythm check` compares them)"
            )
        return policy


def lent_prefixes(policy: Policy, layout: WeightsLayout, context: StationContext) -> Prefixes | None:
    """This station's end of what frozen parts give; None if the policy has none that generators and trainer share."""
    traits, module = policy_traits(policy), as_module(policy)
    if not (traits.precomputes and traits.acts_from_precomputed and traits.publishes_part):
        return None
    device = next(module.parameters()).device
    row = {name: torch.zeros(1, *x.shape[1:], dtype=torch_dtype(x.dtype)) for name, x in context.arena.obs.items()}
    with torch.no_grad():
        found = extended(policy).precompute({name: x.to(device) for name, x in row.items()})
    if not found:
        return None
    return Prefixes(context.prefix_seat, row_specs(found), partial(frozen_checksum, module, layout.published))


@dataclass(frozen=True, slots=True)
class GeneratorFactory:
    """A generator with its own copy of the policy; its weights come over the weights channel.

    evaluates: also (`too`) or exclusively (`only`) serves background evaluations, with a second copy if it serves
    training too. buckets, graphs: as in `OnePassEngine`. places: above zero, it serves by streams: this and resumes are
    as in `StreamingEngine`. lends: a trainer on its device takes what frozen parts give.
    """

    name: str
    policy: PolicyFactory
    evaluates: Evaluates = "no"
    buckets: tuple[int, ...] = ()
    graphs: Literal["auto", "off"] = "auto"
    places: int = 0
    resumes: bool = False
    lends: bool = False

    @property
    def preload(self) -> tuple[str, ...]:
        return self.policy.preload

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        return [(f"{self.name}.{incarnation}", lambda: self._make(context, incarnation))]

    def _make(self, context: StationContext, incarnation: int) -> Station:
        weights = context.weights()
        policy = self.policy.build(context.device, "act", weights.layout)
        if self.places and not policy_traits(policy).streams:
            raise RunHalted(f"{self.policy.label}: it answers in one pass; set batching.type to dynamic")
        pinned = policy if self.evaluates == "only" else None
        if self.evaluates == "too":
            pinned = self.policy.build(context.device, "act", weights.layout)
        copies = PolicyCopies(policy, pinned, weights)
        observed = ObservedReader(seat) if (seat := context.device_seat) is not None else None
        prefixes = lent_prefixes(policy, weights.layout, context) if self.lends else None
        own = GeneratorContext(
            self.name, incarnation, copies, context.arena, context.channels, self.policy.label, observed, prefixes
        )
        engine: GeneratorEngine = (
            StreamingEngine(own, places=self.places, resumes=self.resumes)
            if self.places
            else OnePassEngine(own, self.buckets, graphs=self.graphs)
        )
        return Generator(own, engine)

    def announcements(self, incarnation: int) -> Sequence[GeneratorJoined]:
        return [GeneratorJoined(self.name, incarnation)]
