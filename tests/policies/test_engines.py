"""Every engine passes the same checks; a further one is a line in ENGINES."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.policies.sglang_server import serving
from torch import nn

from polyrhythm.envs.text.chains import ChainsSettings
from polyrhythm.policies.causal_lm.engine import NativeEngine
from polyrhythm.policies.causal_lm.engine_settings import SglangSettings
from polyrhythm.policies.causal_lm.policy import MESSAGE, CausalLm
from polyrhythm.policies.causal_lm.sampling import Sampling
from polyrhythm.policies.causal_lm.settings import CausalLmSettings
from polyrhythm.policies.causal_lm.vllm_engine import VllmEngine
from polyrhythm.policies.causal_lm.vllm_model import VllmModel, VllmStart
from polyrhythm.policies.engine import Engine, EngineRequest, Generated, Streams

ENV = ChainsSettings(max_new_tokens=24, max_prompt_tokens=40)
STOPS = ENV.spec().action.stops
CUTS = {"temperature": 0.7, "top_k": 12, "top_p": 0.9}
WARM = {"temperature": 0.7}
#: Largest difference of log-probs between an engine and the trainer's full forward, in float32.
EXACT = 1e-5


Make = Callable[[CausalLm, int], Engine]


def native(policy: CausalLm, capacity: int) -> NativeEngine:
    engine = policy.make_engine(capacity)
    assert isinstance(engine, NativeEngine)
    return engine


@contextmanager
def at_native() -> Iterator[Make]:
    yield native


@contextmanager
def at_sglang() -> Iterator[Make]:
    """A server for each engine, of a model of the same sizes and of other weights."""
    with ExitStack() as stack:

        def make(made: CausalLm, capacity: int) -> Engine:
            sampling = made._sampling
            other = policy(9).network
            url, _ = stack.enter_context(
                serving(other, temperature=sampling.temperature, stops=tuple(STOPS), pause_s=0.002)
            )
            section = CausalLmSettings(engine=SglangSettings(url=url), temperature=sampling.temperature)
            engine = CausalLm(section, ENV.spec(), made.network).make_engine(capacity)
            engine.weights_changed(0)
            return engine

        yield make


@cache
def vllm_model() -> VllmModel:
    """One for all tests of this process: starting it takes half a minute."""
    how = VllmStart(cache_gib=0.1, compiles=False)
    return VllmModel(policy().network, Sampling(policy()._sampling.choices), how, capacity=12, length=64)


@contextmanager
def at_vllm() -> Iterator[Make]:
    made: list[VllmEngine] = []

    def make(policy: CausalLm, capacity: int) -> VllmEngine:
        model = vllm_model()
        model.sampler.sampling = policy._sampling
        model.load(policy.network)
        made.append(VllmEngine(model, policy.network, STOPS, capacity=capacity, length=64, refresh=policy._refresh))
        return made[-1]

    yield make
    for engine in made:
        for request_id in list(engine._runs):
            engine.abort(request_id)


#: name -> engines of a capacity over a policy's weights.
ENGINES: dict[str, Callable[[], AbstractContextManager[Make]]] = {
    "native": at_native,
    "sglang": at_sglang,
    "vllm": at_vllm,
}
LACKS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (docs/engines.md says how)")
#: Those that run in this process, whose steps are tokens.
STEPPED = NativeEngine | VllmEngine


@pytest.fixture(params=[pytest.param(name, marks=LACKS_VLLM if name == "vllm" else ()) for name in ENGINES])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    with ENGINES[request.param]() as found:
        yield found


@pytest.fixture
def at_server(request: pytest.FixtureRequest) -> bool:
    """Whether `make` makes engines at an sglang server."""
    return bool(request.node.callspec.params["make"] == "sglang")


def policy(seed: int = 0, **settings: float) -> CausalLm:
    """Larger weights than those of a random start, so that it is not almost uniform, and ends at different lengths."""
    section = CausalLmSettings(layers=2, width=32, heads=1, hidden=64, **settings)  # type: ignore[arg-type]
    made = section.build(ENV.spec(), seed=seed, device="cpu", role="act").eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(4.0 if p.dim() == 2 else 1.0)
    return made


def prompt(seed: int) -> NDArray[np.int32]:
    random = Random(seed)
    return np.array([random.randint(1, 16) for _ in range(random.randint(1, 40))], np.int32)


def request(i: int, *, most: int = 24, greedy: bool = False, prefix: Generated | None = None) -> EngineRequest:
    return EngineRequest(i, prompt(i), most, greedy, 7919 * i + 5, prefix)


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[int, Generated]:
    """All of them, as many at a time as there is room for."""
    waiting, found = list(requests), {}
    running = 0
    while waiting or running:
        while waiting and running < engine.capacity:
            engine.add(waiting.pop(0))
            running += 1
        for one in engine.step():
            found[one.request_id] = one
            running -= 1
    return found


def alone(made: CausalLm, make: Make, asked: EngineRequest) -> Generated:
    engine = make(made, 1)
    engine.weights_changed(0)
    return run(engine, [asked])[asked.request_id]


def full_forward(made: CausalLm, asked: EngineRequest, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The trainer's log-probs of these tokens."""
    obs = {"tokens": torch.zeros(1, 40, dtype=torch.int32), "length": torch.tensor([len(asked.prompt)])}
    obs["tokens"][0, : len(asked.prompt)] = torch.from_numpy(asked.prompt)
    message = torch.zeros(1, 24, dtype=torch.int32)
    message[0, : len(tokens)] = torch.from_numpy(tokens)
    logprob = made.evaluate(obs, {MESSAGE: message}).logprob[0, : len(tokens), 0]
    return logprob.detach().numpy()


def halves(engine: Engine, asked: EngineRequest, steps: int) -> Generated:
    """What it has generated after so many steps; it does not finish before. A step is a token of the native engine, and
    about one of a server."""
    engine.add(asked)
    for _ in range(steps):
        assert not engine.step()
    return engine.abort(asked.request_id)


def expect(engine: Engine, part: Generated, steps: int) -> int:
    """Tokens of a part that was cut after so many steps."""
    count = len(part.tokens)
    assert count == steps or not isinstance(engine, STEPPED)
    return count


def long_request(made: CausalLm, make: Make) -> tuple[EngineRequest, Generated]:
    """A request whose answer has eight tokens or more, and the answer."""
    for i in range(50):
        found = alone(made, make, request(i))
        if len(found.tokens) >= 8:
            return request(i), found
    raise AssertionError("no answer is long")


@pytest.mark.parametrize("settings", [{}, WARM, CUTS], ids=["plain", "warm", "cut"])
def test_log_probs_are_those_of_the_trainers_forward(make: Make, at_server: bool, settings: dict[str, float]) -> None:
    if at_server and settings is CUTS:
        with pytest.raises(ValueError, match="top_k = 12: the log-probs of engine sglang are those before such cuts"):
            CausalLmSettings(engine=SglangSettings(url="http://somewhere"), **settings)  # type: ignore[arg-type]
        return
    made = policy(**settings)
    asked = [request(i, greedy=i % 5 == 0) for i in range(24)]
    found = run(make(made, 7), asked)
    for one in asked:
        if at_server and settings is WARM and one.greedy:
            continue  # sglang's are those without the temperature; nothing trains on them
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


def test_an_aborted_request_resumes_as_if_nothing_had_been(make: Make) -> None:
    made = policy()
    asked, whole = long_request(made, make)
    engine = make(made, 2)
    engine.weights_changed(0)
    part = halves(engine, asked, 3)
    assert not part.finished
    np.testing.assert_array_equal(part.tokens, whole.tokens[: expect(engine, part, 3)])
    resumed = run(engine, [asked._replace(prefix=part)])[asked.request_id]
    np.testing.assert_array_equal(resumed.tokens, whole.tokens)
    np.testing.assert_allclose(resumed.logprobs, whole.logprobs, atol=EXACT)


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
    engine.add(asked)
    for _ in range(3):
        engine.step()
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    found = next(iter(_until_finished(engine)))
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
    found = {one.request_id: one for one in _until_finished(engine)}[asked.request_id]
    np.testing.assert_allclose(found.logprobs[3:], full_forward(other, asked, found.tokens)[3:], atol=EXACT)


def _until_finished(engine: Engine) -> Iterator[Generated]:
    for _ in range(40 if isinstance(engine, STEPPED) else 400):
        yield from engine.step()


def test_requests_that_come_and_go_are_each_answered_as_alone(make: Make) -> None:
    made, random = policy(), Random(11)
    engine = make(made, 4)
    engine.weights_changed(0)
    waiting, found = [request(i) for i in range(20)], {}
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < engine.capacity:
            asked = waiting.pop(0)
            engine.add(asked)
            running.add(asked.request_id)
        if random.random() < 0.3:
            chosen = random.choice(sorted(running))
            running.discard(chosen)
            waiting.append(request(chosen, prefix=engine.abort(chosen)))
        for one in engine.step():
            found[one.request_id] = one
            running.discard(one.request_id)
    for i in range(0, 20, 4):
        np.testing.assert_array_equal(found[i].tokens, alone(made, make, request(i)).tokens)


def test_members_of_a_group_are_each_answered_as_alone(make: Make) -> None:
    """Whether they begin together, after one another, or again after they were aborted."""
    made, random = policy(), Random(5)
    engine = make(made, 6)
    engine.weights_changed(0)
    waiting = [member(i) for i in range(24)]
    found: dict[int, Generated] = {}
    running: dict[int, EngineRequest] = {}
    while waiting or running:
        for asked in [waiting.pop(0) for _ in range(min(len(waiting), random.randint(0, 6 - len(running))))]:
            engine.add(asked)
            running[asked.request_id] = asked
        if running and random.random() < 0.2:
            chosen = running.pop(random.choice(sorted(running)))
            waiting.append(chosen._replace(prefix=engine.abort(chosen.request_id)))
        for one in engine.step():
            found[one.request_id] = one
            del running[one.request_id]
    for i in range(0, 24, 3):
        expected = alone(made, make, member(i))
        np.testing.assert_array_equal(found[i].tokens, expected.tokens)
        np.testing.assert_allclose(found[i].logprobs, expected.logprobs, atol=1e-6)


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
    found = {one.request_id: one for one in _until_finished(engine)}[1]
    assert engine.shared_tokens == 0
    np.testing.assert_allclose(found.logprobs, full_forward(other, later, found.tokens), atol=EXACT)


def member(i: int) -> EngineRequest:
    """A request of one of three groups, which share a prompt."""
    return request(i)._replace(prompt=prompt(100 + i // 8 % 3))


def test_act_is_the_engine_in_one_pass() -> None:
    made = policy(**CUTS)
    assert isinstance(made, Streams)
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
