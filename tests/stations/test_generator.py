"""The generator station: one forward per batch, answers to their slots, whole weights between passes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.stations.generators import SLOTS, SPEC, Stand, generator_of, inline_weights, policy

from polyrhythm.policies.categorical import CategoricalPolicy, CategoricalSettings
from polyrhythm.runtime.memory.arena import in_memory
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE, VERSION, Channels
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import (
    ApplyWeights,
    Batch,
    GeneratorJoined,
    PublishWeights,
    Serve,
    WeightsApplied,
)


class Shapes(CategoricalPolicy):
    """Notes the rows of every pass."""

    def __init__(self):
        super().__init__(CategoricalSettings(), SPEC)
        self.seen = []

    def act(self, obs, greedy, noise_key):
        self.seen.append(len(greedy))
        return super().act(obs, greedy, noise_key)


def test_it_announces_itself_without_weights():
    layout = Stand().arena.layout
    channels, served = Channels(*[print] * 3), policy(2)
    generator = generator_of(served, in_memory(layout), inline_weights(served), channels, incarnation=4)
    assert generator.joined() == GeneratorJoined("g", 4, -1)


def test_a_request_is_answered_by_its_own_rows():
    stand = Stand()
    request = stand.request("a", 7, 30, 31)
    ((reply, answers),) = stand.serve(request)
    wanted = stand.expected(request)
    assert (reply.reply_to, reply.slot, reply.sequence) == ("address of a", "a", 5)
    assert np.array_equal(answers[ACTIONS], wanted.actions.numpy())
    assert np.array_equal(answers[FORWARD_INPUTS + "tokens"], wanted.forward_inputs["tokens"].numpy())
    assert answers[VERSION].tolist() == [0, 0, 0]


def test_a_batch_is_one_forward_whose_answers_go_to_their_slots():
    stand = Stand()
    asked = [stand.request("a", 0, 3), stand.request("b", 11, 10), stand.request("c", 44, 2, 5, 8)]
    replies = stand.serve(*asked)
    wanted = stand.expected(*asked)
    assert [(reply.slot, reply.reply_to, len(answers)) for reply, answers in replies] == [
        ("a", "address of a", 2),
        ("b", "address of b", 2),
        ("c", "address of c", 4),
    ]
    for name, tensor in ((ACTIONS, wanted.actions), (LOGPROB, wanted.logprob), (VALUE, wanted.value)):
        assert np.array_equal(np.concatenate([answers[name] for _, answers in replies]), tensor.numpy())
    counts = {"passes": 1, "rows": 8, "padding": 0}
    assert stand.generator.statistics().items() >= counts.items()


def test_all_rows_of_all_slots_fit_one_batch_and_its_memory_is_used_again():
    stand = Stand()
    asked = [stand.request("a", 0, 1, 2), stand.request("b", 3, 4), stand.request("c", 5, 6, 7, 8)]
    first = [reply.answers for reply, _ in stand.serve(*asked)]
    second = [reply.answers for reply, _ in stand.serve(*asked)]
    assert all(np.shares_memory(one, other) for one, other in zip(first, second, strict=True))


def test_a_request_that_its_slot_has_given_up_may_show_anything():
    stand = Stand()
    given_up, good = stand.request("a", 10**9, -5), stand.request("b", 1, 2)
    (_, (_, answers)) = stand.serve(given_up, good)
    assert np.array_equal(answers[ACTIONS], stand.expected(good).actions.numpy())


def test_weights_change_whole_and_between_passes():
    stand = Stand()
    stand.policy = policy(3)
    stand.weights.publish(1, stand.policy.state_dict())
    request = stand.request("a", 0, 1)
    stand.generator.handle(ApplyWeights("g", 1))
    stand.generator.handle(Serve("g", Batch(9, "g", (request,))))
    assert stand.generator.pending_work() == ["g has ApplyWeights to do", "g has Serve to do"]
    assert stand.generator.work()
    assert stand.said == [WeightsApplied("g", 0, 1)]
    assert stand.generator.work()
    (_, answers), _ = stand.said[1:]
    assert answers[VERSION].tolist() == [1, 1]
    assert np.array_equal(answers[ACTIONS], stand.expected(request).actions.numpy())


def test_a_version_that_was_overwritten_gives_the_newest_and_says_so():
    stand = Stand()
    for version in (1, 2, 3):
        stand.policy = policy(version)
        stand.weights.publish(version, stand.policy.state_dict())
    stand.generator.handle(ApplyWeights("g", 1))
    assert stand.generator.work()
    assert stand.said == [WeightsApplied("g", 0, 3)]
    request = stand.request("a", 0)
    ((_, answers),) = stand.serve(request)
    assert np.array_equal(answers[LOGPROB], stand.expected(request).logprob.numpy())


def test_a_policy_meets_the_bucket_shapes_alone_each_once_before_the_start():
    served = Shapes()
    stand = Stand(served, buckets=(2, 4, 16))
    assert served.seen == [2, 4, 16]
    for slots in (["a"], ["b"], ["a", "b"], ["a", "b", "c"]):
        stand.serve(*(stand.request(slot, *range(SLOTS[slot])) for slot in slots))
    assert served.seen[3:] == [4, 2, 16, 16]
    counts = {"passes": 4, "rows": 3 + 2 + 5 + 9, "padding": 1 + 0 + 11 + 7}
    assert stand.generator.statistics().items() >= counts.items()


def test_in_one_bucket_an_answer_has_the_same_bits_whoever_else_is_in_the_batch():
    stand = Stand(buckets=(16,))
    asked = [stand.request("a", 4, 3, 9), stand.request("c", 40, 2, 5, 8)]
    together = {reply.slot: answers for reply, answers in stand.serve(*asked)}
    for request in asked:
        ((reply, alone),) = stand.serve(request)
        assert np.array_equal(alone, together[reply.slot])


def test_what_a_generator_does_not_do_is_refused():
    with pytest.raises(UnfitMessage, match="PublishWeights"):
        Stand().generator.handle(PublishWeights("g", 1))
