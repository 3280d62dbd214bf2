"""The generator station: one forward per batch, answers to their slots, whole weights between passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrhythm.flow.records import ApplyWeights, Batch, BatchDone, PublishWeights, Request, Serve, WeightsApplied
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS
from polyrhythm.runtime.payloads import GREEDY, NOISE_KEY, InlinePayloads, RequestView
from polyrhythm.runtime.weights import InlineWeights
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.stations.generator import Generator
from polyrhythm.stations.rows import as_index

SPEC = EnvSpec({"x": ArraySpec((3,), "float32")}, ActionSpec("discrete", 1, choices=4), (Task("t", "t"),), 10)


class Stand:
    """A generator with everything that it says, and the policy that it should act like."""

    def __init__(self):
        self.payloads, self.weights, self.said = InlinePayloads(), InlineWeights(), []
        self.policy = CategoricalSettings().build(SPEC, 1)
        own = CategoricalSettings().build(SPEC, 2)
        self.generator = Generator("g", 0, own, self.payloads, self.weights, self.said.append, self.said.append)
        self.weights.publish(0, self.policy.state_dict())
        self.generator.handle(ApplyWeights("g", 0))
        assert self.generator.work()
        self.said.clear()
        self.rng = np.random.default_rng(0)

    def request(self, slot, size, rows):
        """A waiting request of `rows` out of `size`, and what it shows."""
        arrays = {
            "x": self.rng.normal(size=(size, 3)).astype(np.float32),
            INSTRUCTION: np.zeros(size, np.int64),
            PROGRESS: np.zeros(size, np.float32),
            NOISE_KEY: self.rng.integers(0, 2**62, size),
            GREEDY: np.arange(size) % 2 == 0,
        }
        view = RequestView(arrays, as_index(np.array(rows)), len(rows))
        handle = self.payloads.post(slot, 0, view)
        request = Request(slot, "s", 5, len(rows), 0, handle, 0.0)
        return request, {name: array[rows] for name, array in arrays.items()}

    def serve(self, *requests):
        self.said.clear()
        self.generator.handle(Serve("g", Batch(8, "g", requests)))
        assert self.generator.work()
        assert not self.generator.work()
        *replies, done = self.said
        assert done == BatchDone("g", 0, 8, self.generator.version)
        return replies

    def expected(self, shown):
        obs = {name: torch.from_numpy(array) for name, array in shown.items()}
        noise_key, greedy = obs.pop(NOISE_KEY), obs.pop(GREEDY)
        return self.policy.act(obs, greedy, noise_key)


def test_one_request_of_consecutive_rows_is_answered_in_place():
    stand = Stand()
    request, shown = stand.request("a", 6, [1, 2, 3])
    (reply,) = stand.serve(request)
    wanted = stand.expected(shown)
    assert (reply.slot, reply.sequence, reply.version) == ("a", 5, 0)
    assert np.array_equal(reply.arrays[ACTIONS], wanted.actions.numpy())
    assert np.array_equal(reply.arrays[FORWARD_INPUTS + "tokens"], wanted.forward_inputs["tokens"].numpy())
    assert stand.generator._buffers == {}


def test_a_batch_is_one_forward_whose_answers_go_to_their_slots():
    stand = Stand()
    asked = [stand.request("a", 4, [0, 3]), stand.request("b", 2, [0, 1]), stand.request("c", 9, [1, 2, 5, 8])]
    replies = stand.serve(*(request for request, _ in asked))
    shown = {name: np.concatenate([part[name] for _, part in asked]) for name in asked[0][1]}
    wanted = stand.expected(shown)
    assert [(reply.slot, len(reply.arrays[ACTIONS])) for reply in replies] == [("a", 2), ("b", 2), ("c", 4)]
    for name, tensor in (("actions", wanted.actions), ("logprob", wanted.logprob), ("value", wanted.value)):
        assert np.array_equal(np.concatenate([reply.arrays[name] for reply in replies]), tensor.numpy())
    assert stand.generator.statistics() == {"passes": 1, "rows": 8}


def test_the_buffer_grows_once_and_is_used_again():
    stand = Stand()
    first, _ = stand.request("a", 9, [0, 2, 4, 6])
    second, _ = stand.request("b", 9, [1, 3])
    stand.serve(first)
    buffer = stand.generator._buffers["x"]
    stand.serve(second)
    assert stand.generator._buffers["x"] is buffer


def test_weights_change_whole_and_between_passes():
    stand = Stand()
    stand.policy = CategoricalSettings().build(SPEC, 3)
    stand.weights.publish(1, stand.policy.state_dict())
    request, shown = stand.request("a", 2, [0, 1])
    stand.generator.handle(ApplyWeights("g", 1))
    stand.generator.handle(Serve("g", Batch(9, "g", (request,))))
    assert stand.generator.work()
    assert stand.said == [WeightsApplied("g", 0, 1)]
    assert stand.generator.work()
    reply, _ = stand.said[1:]
    assert reply.version == 1
    assert np.array_equal(reply.arrays[ACTIONS], stand.expected(shown).actions.numpy())


def test_weights_that_do_not_fit_change_nothing():
    stand = Stand()
    wrong = {**stand.policy.state_dict()}
    name = list(wrong)[-1]
    wrong = {key: tensor + 1 for key, tensor in wrong.items()} | {name: torch.zeros(17, 3)}
    stand.weights.publish(1, wrong)
    before = {key: tensor.clone() for key, tensor in stand.policy.state_dict().items()}
    stand.generator.handle(ApplyWeights("g", 1))
    with pytest.raises(ValueError, match=name):
        stand.generator.work()
    after = stand.generator._module.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert stand.generator.version == 0


def test_what_a_generator_does_not_do_is_refused():
    with pytest.raises(TypeError, match="PublishWeights"):
        Stand().generator.handle(PublishWeights("g", 1))
