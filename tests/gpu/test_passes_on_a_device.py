"""Forward passes on a CUDA device: captured and not, against the CPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from tests.stations.generators import SPEC, Stand, policy
from tests.stations.test_capturable import POLICIES, inputs

from polyrhythm.policies.categorical import CategoricalPolicy, CategoricalSettings
from polyrhythm.runtime.messages import ACTIONS, LOGPROB, VALUE, VERSION
from polyrhythm.scheduler.records import ApplyWeights, Batch, BatchDone, Serve
from polyrhythm.stations.batch_buffer import BatchLayout
from polyrhythm.stations.passes import DevicePasses, GraphCapture, passes_on, refuse_waiting

pytestmark = pytest.mark.gpu
BUCKETS = (2, 4, 16)


@pytest.fixture(params=["auto", "off"])
def stand(request, cuda):
    stand = Stand(buckets=BUCKETS, device=cuda, graphs=request.param)
    yield stand
    stand.generator.close()


def compare(stand, replies, requests):
    wanted = stand.expected(*requests)
    found = {name: np.concatenate([answers[name] for _, answers in replies]) for name in (ACTIONS, LOGPROB, VALUE)}
    assert np.array_equal(found[ACTIONS], wanted.actions.numpy())
    assert np.allclose(found[LOGPROB], wanted.logprob.numpy(), atol=1e-5)
    assert np.allclose(found[VALUE], wanted.value.numpy(), atol=1e-5)


def test_answers_are_those_of_the_cpu_in_every_bucket_and_at_every_use_of_the_memory(stand):
    asked = [stand.request("a", 0, 3), stand.request("b", 11, 10), stand.request("c", 44, 2, 5, 8)]
    for requests in ([asked[0]], asked[:2], asked, [asked[2]], asked[1:], [asked[0]]):
        compare(stand, stand.serve(*requests), requests)


def test_only_auto_captures(cuda):
    arena = Stand().arena
    for graphs, captures in (("auto", True), ("off", False)):
        passes = passes_on(cuda, BatchLayout.of(arena), 16, graphs)
        passes.warm_up([policy(1).to(cuda)], BUCKETS)
        assert len(passes._runs) == len(BUCKETS) * captures


def test_weights_change_in_place_so_that_captured_passes_have_them(stand):
    for version in (1, 2, 3):
        stand.policy = policy(version)
        stand.weights.publish(version, stand.policy.state_dict())
        stand.generator.handle(ApplyWeights("g", version))
        assert stand.generator.work()
        request = stand.request("c", 4, 5, 6, 7)
        replies = stand.serve(request)
        compare(stand, replies, [request])
        assert replies[0][1][VERSION].tolist() == [version] * 4


def test_two_batches_are_under_way_and_keep_their_order_and_their_answers(stand):
    asked = [stand.request("a", 7, 30), stand.request("b", 11), stand.request("c", 2, 3, 4)]
    for number, request in enumerate(asked):
        stand.generator.handle(Serve("g", Batch(number, "g", (request,))))
    while stand.generator.work():
        pass
    assert [x.batch for x in stand.said if isinstance(x, BatchDone)] == [0, 1, 2]
    replies = [x for x in stand.said if isinstance(x, tuple)]
    for request, reply in zip(asked, replies, strict=True):
        compare(stand, [reply], [request])


def test_the_host_does_not_wait_when_it_launches_a_pass(cuda):
    arena = Stand().arena
    served = policy(1).to(cuda)
    passes = DevicePasses(cuda, BatchLayout.of(arena), 16, GraphCapture(cuda))
    with torch.inference_mode():
        passes.warm_up([served], BUCKETS)
        for rows in (4, 3):  # captured, and not
            for _ in range(2):  # the first one that is not captured may initialise something
                passes.buffer(rows)
                passes.launch(served, rows, 0)
                passes.finish()
            with refuse_waiting():
                passes.launch(served, rows, 0)
            passes.finish()


class Waiting(CategoricalPolicy):
    """A policy whose pass reads a value on the host."""

    def act(self, obs, greedy, noise_key):
        assert float(obs["x"].sum()) < 1e9
        return super().act(obs, greedy, noise_key)


def test_a_policy_that_cannot_be_captured_serves_without_and_a_later_one_is_captured(cuda, caplog):
    with caplog.at_level(logging.WARNING):
        stand = Stand(Waiting(CategoricalSettings(), SPEC), buckets=BUCKETS, device=cuda)
    (record,) = caplog.records
    assert "Waiting: passes of 16 rows cannot be captured as CUDA graphs, so they run without" in record.getMessage()
    request = stand.request("a", 7, 30)
    compare(stand, stand.serve(request), [request])
    stand.generator.close()
    caplog.clear()
    other = Stand(buckets=BUCKETS, device=cuda)
    request = other.request("a", 7, 30)
    compare(other, other.serve(request), [request])
    other.generator.close()
    assert caplog.records == []


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_captured_and_a_replay_draws_by_the_keys_that_it_is_given(name, cuda):
    settings, spec = POLICIES[name]
    served = settings.build(spec, seed=0, device=str(cuda), role="act").eval()
    obs, greedy, key = inputs(4)
    obs = {name: x.to(cuda) for name, x in obs.items()}
    static = greedy.to(cuda), key.to(cuda, copy=True)
    with torch.inference_mode():
        first = served.act(obs, *static)
        actions, logprob = torch.zeros_like(first.actions), torch.zeros_like(first.logprob)

        def run():
            act = served.act(obs, *static)
            actions.copy_(act.actions)
            logprob.copy_(act.logprob)

        replay, replayed = GraphCapture(cuda)(run), []
        for other in (key, key + 1, key):
            static[1].copy_(other)
            replay()
            wanted = served.act(obs, *static)
            assert torch.allclose(actions, wanted.actions, atol=1e-5)
            assert torch.allclose(logprob, wanted.logprob, atol=1e-4)
            replayed.append(actions.clone())
    assert torch.equal(replayed[0], replayed[2])
    assert not torch.equal(replayed[0], replayed[1])
