"""A generator in memory, with everything that it says, for tests of generators."""

from __future__ import annotations

import numpy as np
import torch
from tests.built import built

from polyrhythm.pipeline.array_specs import answer_specs, shown
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.runtime.memory.arena import ArenaLayout, RequestView, in_memory
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.runtime.messages import Channels
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, Request, Serve
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task, WeightsLayout
from polyrhythm.specs.weights import weight_specs
from polyrhythm.stations.generator import Generator, GeneratorContext, PolicyCopies
from polyrhythm.stations.one_pass import OnePassEngine

SPEC = EnvSpec({"x": ArraySpec((3,), "float32")}, ActionSpec("discrete", 1, choices=4), (Task("t", "t"),), 10)
SLOTS = {"a": 3, "b": 2, "c": 4}


def policy(seed):
    return built(CategoricalSettings(), SPEC, seed)


def inline_weights(module):
    return InlineWeights(WeightsLayout.of(weight_specs(module.state_dict())))


def generator_of(served, arena, weights, channels, engine=OnePassEngine, incarnation=0, **options):
    """A generator of one copy of the policy, with an engine of these options."""
    copies = PolicyCopies(served, None, weights)
    context = GeneratorContext("g", incarnation, copies, arena, channels, f"policy {type(served).__name__}")
    return Generator(context, engine(context, **options))


class Stand:
    """A generator with everything that it says, and the policy that it should act like."""

    def __init__(self, served=None, buckets=(), make_passes=None, device="cpu", graphs="auto", own=None):
        self.policy, self.said = own or policy(1), []
        layout = ArenaLayout(9, 4, 1, shown(SPEC), answer_specs(CategoricalSettings().form(SPEC), SPEC), SLOTS)
        self.arena, self.weights = in_memory(layout), inline_weights(self.policy)
        self.rng = np.random.default_rng(0)
        self.arena.obs["x"][:] = self.rng.normal(size=(45, 3))
        channels = Channels(
            self.said.append,
            lambda replies: self.said.extend((reply, reply.answers.copy()) for reply in replies),
            self.said.append,
        )
        self.generator = generator_of(
            (served or policy(2)).to(device),
            self.arena,
            self.weights,
            channels,
            buckets=buckets,
            graphs=graphs,
            passes=make_passes(self.arena) if make_passes else None,
        )
        self.weights.publish(0, self.policy.state_dict())
        self.generator.handle(ApplyWeights("g", 0))
        assert self.generator.work()
        self.said.clear()

    def request(self, slot, *entries):
        """A waiting request of rows at these entries."""
        view = RequestView(
            np.array(entries), self.rng.integers(0, 2**62, len(entries)), np.arange(len(entries)) % 2 == 0
        )
        self.arena.post(slot, view)
        return Request(slot, "s", 5, len(entries), 0, f"address of {slot}", 0.0)

    def serve(self, *requests):
        """The replies, each with its answers as they were when it was sent."""
        self.said.clear()
        self.generator.handle(Serve("g", Batch(8, "g", requests)))
        while self.generator.work():
            pass
        *replies, done = self.said
        assert done == BatchDone("g", 0, 8, self.generator.version)
        return replies

    def expected(self, *requests):
        """What the policy answers all of them, in one pass."""
        views = [self.arena.view(request.slot, request.rows) for request in requests]
        index, keys, greedy = (
            np.concatenate([getattr(view, name) for view in views]) for name in ("entries", "noise_key", "greedy")
        )
        obs = {name: torch.from_numpy(array[index]) for name, array in self.arena.obs.items()}
        return self.policy.act(obs, torch.from_numpy(greedy), torch.from_numpy(keys))
