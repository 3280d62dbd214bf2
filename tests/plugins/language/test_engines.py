"""Every engine passes the same checks; a further one is a line in ENGINES (tests/plugins/language/engines.py)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tests.long import long
from tests.plugins.language.engines import (
    CUTS,
    ENGINES,
    ENV,
    EXACT,
    LACKS_VLLM,
    STEPPED,
    STOPS,
    WARM,
    Make,
    alone,
    begin,
    expect,
    full_forward,
    halves,
    long_request,
    member,
    native,
    policy,
    request,
    run,
    until_finished,
)
from torch import nn

from polyrhythm.plugins.language.causal_lm.engine_settings import SglangSettings
from polyrhythm.plugins.language.causal_lm.policy import MESSAGE, CausalLm, CausalLmSettings
from polyrhythm.policies.engine import EngineRequest, Generated
from polyrhythm.policies.traits import policy_traits

#: Engines whose noise begins anew with each request, so that a resumed answer depends on where it was cut.
ANEW = ("openai", "vllm server")
#: Engines at servers, whose log-probs of greedy answers are those without temperature and cuts: nothing trains on them.
SERVED = ("sglang", *ANEW)


def _mark(name: str) -> Any:
    if name.startswith("vllm"):
        return LACKS_VLLM
    return long(2, "of another kind of server") if name == "openai" else ()


@pytest.fixture(params=[pytest.param(name, marks=_mark(name)) for name in ENGINES])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with ENGINES[request.param]() as found:
        yield found


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of the engines that `make` makes."""
    return str(request.node.callspec.params["make"])


@pytest.mark.parametrize("settings", [{}, WARM, CUTS], ids=["plain", "warm", "cut"])
def test_log_probs_are_those_of_the_trainers_forward(make: Make, name: str, settings: dict[str, float]) -> None:
    if name == "sglang" and settings is CUTS:
        with pytest.raises(ValueError, match="top_k = 12: the log-probs of engine sglang are those before such cuts"):
            CausalLmSettings(engine=SglangSettings(url="http://somewhere"), **settings)  # type: ignore[arg-type]
        return
    made = policy(**settings)
    asked = [request(i, greedy=i % 5 == 0) for i in range(24)]
    found = run(make(made, 7), asked)
    for one in asked:
        if name in SERVED and settings and one.greedy:
            continue
        expected = full_forward(made, one, found[one.request_id].tokens)
        np.testing.assert_allclose(found[one.request_id].logprobs, expected, atol=EXACT)
    lengths = {len(one.tokens) for one in found.values()}
    assert len(lengths) > 5, "answers of different lengths, or nothing was shown"


def test_a_request_depends_on_nobody_beside_it(make: Make) -> None:
    made, random = policy(), Random(3)
    asked = [request(i, most=random.randint(1, 24)) for i in range(30)]
    engine = make(made, 6)
    engine.weights_changed(4)
    together = run(engine, asked)
    for one in asked[::3]:
        np.testing.assert_array_equal(together[one.request_id].tokens, alone(made, make, one).tokens)
    assert all(found.finished and set(found.versions) == {4} for found in together.values())


def test_an_answer_ends_at_its_stop_or_its_limit(make: Make) -> None:
    for one in run(make(policy(), 8), [request(i, most=1 + i % 24) for i in range(24)]).values():
        stops = np.isin(one.tokens, STOPS)
        assert not stops[:-1].any()
        assert stops[-1] or len(one.tokens) == 1 + one.request_id % 24


def check_whole(made: CausalLm, make: Make, name: str, asked: EngineRequest, found: Generated, *, cut: bool) -> None:
    """It is as if nothing had been beside it, nor cut it where `cut`."""
    if cut and name in ANEW:
        assert int(found.tokens[-1]) in STOPS or len(found.tokens) == asked.max_new_tokens
        np.testing.assert_allclose(found.logprobs, full_forward(made, asked, found.tokens), atol=EXACT)
        return
    expected = alone(made, make, asked)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=EXACT)


def test_an_aborted_request_resumes_as_if_nothing_had_been(make: Make, name: str) -> None:
    made = policy()
    asked, whole = long_request(made, make)
    engine = make(made, 2)
    engine.weights_changed(0)
    part = halves(engine, asked, 3)
    assert not part.finished
    np.testing.assert_array_equal(part.tokens, whole.tokens[: expect(engine, part, 3)])
    resumed = run(engine, [asked._replace(prefix=part)])[asked.request_id]
    np.testing.assert_array_equal(resumed.tokens[: len(part.tokens)], part.tokens)
    check_whole(made, make, name, asked, resumed, cut=True)


def test_a_request_can_be_aborted_before_it_began(make: Make) -> None:
    engine = make(policy(), 1)
    expect(engine, halves(engine, request(1), 0), 0)
    assert run(engine, [request(1)])[1].finished, "its id and its place are free again"


def test_weights_that_change_between_two_tokens_give_versions_by_token(
    make: Make,
) -> None:
    made, other = policy(), policy(1)
    asked, _ = long_request(made, make)
    engine = make(made, 2)
    engine.weights_changed(0)
    begin(engine, asked, 3)
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    found = next(iter(until_finished(engine)))
    cut = found.versions.tolist().count(0)
    assert cut == 3 or not isinstance(engine, STEPPED)
    assert found.versions.tolist() == [0] * cut + [1] * (len(found.tokens) - cut)
    assert cut < len(found.tokens)


def test_a_resumed_request_under_new_weights_has_their_log_probs(make: Make) -> None:
    made, other = policy(), policy(1)
    asked, _ = long_request(made, make)
    engine = make(made, 2)
    engine.weights_changed(0)
    part = halves(engine, asked, 3)
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    found = run(engine, [asked._replace(prefix=part)])[asked.request_id]
    cut = expect(engine, part, 3)
    expected = full_forward(other, asked, found.tokens)[cut:]
    np.testing.assert_allclose(found.logprobs[cut:], expected, atol=EXACT)
    np.testing.assert_array_equal(found.logprobs[:cut], part.logprobs)


def test_a_refreshed_cache_gives_the_log_probs_of_the_new_weights_alone() -> None:
    made, other = policy(refresh_cache=True), policy(1)
    asked, _ = long_request(made, native)
    engine = native(made, 3)
    engine.weights_changed(0)
    for i in (asked.request_id, 90, 91):
        engine.add(request(i))
    for _ in range(3):
        engine.step()
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    found = {one.request_id: one for one in until_finished(engine)}[asked.request_id]
    np.testing.assert_allclose(found.logprobs[3:], full_forward(other, asked, found.tokens)[3:], atol=EXACT)


def test_requests_that_come_and_go_are_each_answered_as_alone(make: Make, name: str) -> None:
    made, random = policy(), Random(11)
    engine = make(made, 4)
    engine.weights_changed(0)
    waiting, found = [request(i) for i in range(20)], {}
    running: set[int] = set()
    cut: set[int] = set()
    while waiting or running:
        while waiting and len(running) < engine.capacity:
            asked = waiting.pop(0)
            engine.add(asked)
            running.add(asked.request_id)
        if random.random() < 0.3:
            chosen = random.choice(sorted(running))
            running.discard(chosen)
            cut.add(chosen)
            waiting.append(request(chosen, prefix=engine.abort(chosen)))
        for one in engine.step():
            found[one.request_id] = one
            running.discard(one.request_id)
    assert 0 < len(cut) < 20
    for i in range(0, 20, 4):
        check_whole(made, make, name, request(i), found[i], cut=i in cut)


def test_members_of_a_group_are_each_answered_as_alone(make: Make, name: str) -> None:
    """Whether they begin together, after one another, or again after they were aborted."""
    made, random = policy(), Random(5)
    engine = make(made, 6)
    engine.weights_changed(0)
    waiting = [member(i) for i in range(24)]
    found: dict[int, Generated] = {}
    running: dict[int, EngineRequest] = {}
    cut: set[int] = set()
    while waiting or running:
        for asked in [waiting.pop(0) for _ in range(min(len(waiting), random.randint(0, 6 - len(running))))]:
            engine.add(asked)
            running[asked.request_id] = asked
        if running and random.random() < 0.2:
            chosen = running.pop(random.choice(sorted(running)))
            cut.add(chosen.request_id)
            waiting.append(chosen._replace(prefix=engine.abort(chosen.request_id)))
        for one in engine.step():
            found[one.request_id] = one
            del running[one.request_id]
    for i in range(0, 24, 3):
        check_whole(made, make, name, member(i), found[i], cut=i in cut)


def test_a_prompt_is_computed_once_for_those_that_have_it() -> None:
    engine = native(policy(), 12)
    engine.weights_changed(0)
    for i in range(8):
        engine.add(member(i))
    engine.step()
    prompt_tokens = len(member(0).prompt)
    assert (engine.prompt_tokens, engine.shared_tokens) == (8 * prompt_tokens, 7 * prompt_tokens)
    engine.add(member(24))
    engine.step()
    assert engine.shared_tokens == 8 * prompt_tokens, "some of them are still running"


def test_keys_of_older_weights_are_not_shared() -> None:
    made, other = policy(), policy(1)
    engine = native(made, 4)
    engine.weights_changed(0)
    engine.add(member(0))
    assert not engine.step()
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    later = member(1)
    engine.add(later)
    found = {one.request_id: one for one in until_finished(engine)}[1]
    assert engine.shared_tokens == 0
    np.testing.assert_allclose(found.logprobs, full_forward(other, later, found.tokens), atol=EXACT)


def test_act_is_the_engine_in_one_pass() -> None:
    made = policy(**CUTS)
    assert policy_traits(made).streams
    assert isinstance(made, nn.Module)
    batch = ENV.build(6)
    batch.reset(range(6), [0] * 6, range(6))
    obs = {name: np.zeros((6, *array.shape), array.dtype) for name, array in ENV.spec().observation.items()}
    batch.observe(range(6), obs)
    tensors = {name: torch.from_numpy(array) for name, array in obs.items()}
    greedy, keys = torch.arange(6) % 3 == 0, torch.arange(6) * 31
    act = made.act(tensors, greedy, keys)
    engine = made.make_engine(2)
    engine.weights_changed(0)
    for row in range(6):
        one = {name: tensor[row : row + 1] for name, tensor in tensors.items()}
        ids, most = made.prompt_of(one)
        found = run(engine, [EngineRequest(row, ids, most, bool(greedy[row]), int(keys[row]))])[row]
        streamed = made.act_of(one, found)
        assert torch.equal(streamed.actions, act.actions[row : row + 1])
        assert torch.equal(streamed.forward_inputs[MESSAGE], act.forward_inputs[MESSAGE][row : row + 1])
        torch.testing.assert_close(streamed.logprob, act.logprob[row : row + 1], atol=EXACT, rtol=0)


def test_what_does_not_fit_is_refused_in_a_sentence(make: Make) -> None:
    engine = make(policy(), 1)
    with pytest.raises(ValueError, match="a request of 40 \\+ 25 tokens"):
        engine.add(EngineRequest(0, np.ones(40, np.int32), 25, False, 0))
    engine.add(request(1))
    with pytest.raises(ValueError, match="the engine has 1 requests; wait"):
        engine.add(request(2))
