"""How a generator is made from plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polyrhythm.config.registry import resolve
from polyrhythm.policies.base import Policy, PolicySettings, as_module
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.weights import WeightsBus
from polyrhythm.runtime.messages import Station
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.generator import Generator


@dataclass(frozen=True, slots=True)
class PolicyFactory:
    """A policy's settings as plain data, and what it is built for."""

    settings: dict[str, Any]
    spec: EnvSpec
    seed: int

    def build(self, device: str) -> Policy:
        settings = resolve("policy", self.settings)
        assert isinstance(settings, PolicySettings), "checked before the start"
        policy = settings.build(self.spec, self.seed)
        as_module(policy).to(device)
        return policy


@dataclass(frozen=True, slots=True)
class GeneratorFactory:
    """A generator with its own copy of the policy; its weights come from the bus.

    evaluates: beside training, with a second copy where it serves training too. buckets: rows that passes are padded
    to.
    """

    name: str
    policy: PolicyFactory
    evaluates: Literal["no", "too", "only"] = "no"
    buckets: tuple[int, ...] = ()

    def parts(self, host: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        def make() -> Station:
            policy = self.policy.build(host.device)
            weights = WeightsBus(as_module(policy).state_dict(), host.weights)
            pinned = None
            if self.evaluates != "no":
                pinned = self.policy.build(host.device) if self.evaluates == "too" else policy
            generator = Generator(self.name, incarnation, policy, host.arena, weights, host.links, pinned, self.buckets)
            generator.label = f"policy.type = {self.policy.settings['type']}"
            return generator

        return [(f"{self.name}.{incarnation}", make)]
