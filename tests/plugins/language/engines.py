"""Engines that tests compare with the trainer's forward, and requests for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.plugins.language import openai_server, sglang_server
from tests.plugins.language.vllm_server import started_server

from polyrhythm.plugins.language.causal_lm.engine import NativeEngine, Sampling
from polyrhythm.plugins.language.causal_lm.engine_settings import OpenAiSettings, SglangSettings, VllmSettings
from polyrhythm.plugins.language.causal_lm.policy import MESSAGE, CausalLm, CausalLmSettings
from polyrhythm.plugins.language.causal_lm.vllm_engine import VllmEngine, VllmModel
from polyrhythm.plugins.language.text.chains import ChainsSettings
from polyrhythm.policies.engine import Engine, EngineRequest, Generated

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
            sampling = made.sampling
            other = policy(9).network
            url, _ = stack.enter_context(
                sglang_server.serving(other, temperature=sampling.temperature, stops=tuple(STOPS), pause_s=0.002)
            )
            section = CausalLmSettings(engine=SglangSettings(url=url), temperature=sampling.temperature)
            engine = CausalLm(section, ENV.spec(), made.network).make_engine(capacity)
            engine.weights_changed(0)
            return engine

        yield make


def at_url(made: CausalLm, url: str, capacity: int) -> Engine:
    """An engine at a server of OpenAI's protocol."""
    sampling = made.sampling
    cuts = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    section = CausalLmSettings(engine=OpenAiSettings(url=url), **cuts)  # type: ignore[arg-type]
    engine = CausalLm(section, ENV.spec(), made.network).make_engine(capacity)
    engine.weights_changed(0)
    return engine


@contextmanager
def at_openai() -> Iterator[Make]:
    """The same with servers of OpenAI's protocol."""
    with ExitStack() as stack:

        def make(made: CausalLm, capacity: int) -> Engine:
            other = policy(9).network
            server = openai_server.serving(other, made.sampling, stops=tuple(STOPS), pause_s=0.002)
            return at_url(made, stack.enter_context(server)[0], capacity)

        yield make


@cache
def vllm_url() -> str:
    """One server for all tests of this process, of other weights: starting it takes a minute."""
    return started_server(policy(9).network, length=64)


@contextmanager
def at_vllm_server() -> Iterator[Make]:
    yield lambda made, capacity: at_url(made, vllm_url(), capacity)


@cache
def vllm_model() -> VllmModel:
    """One for all tests of this process: starting it takes half a minute."""
    how = VllmSettings(cache_gib=0.1, compile=False)
    return VllmModel(policy().network, Sampling(policy().sampling.choices), how, capacity=12, length=64)


@contextmanager
def at_vllm() -> Iterator[Make]:
    made: list[VllmEngine] = []

    def make(policy: CausalLm, capacity: int) -> VllmEngine:
        model = vllm_model()
        model.sampling = policy.sampling
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
    "openai": at_openai,
    "vllm": at_vllm,
    "vllm server": at_vllm_server,
}
LACKS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (docs/engines.md says how)")
#: Those that run in this process, whose steps are tokens.
STEPPED = NativeEngine | VllmEngine


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


def run(
    engine: Engine,
    requests: Sequence[EngineRequest],
    after_step: Callable[[dict[int, Generated]], None] = lambda _: None,
) -> dict[int, Generated]:
    """All of them, as many at a time as there is room for. after_step: told what has ended so far."""
    waiting, found = list(requests), {}
    running = 0
    while waiting or running:
        while waiting and running < engine.capacity:
            engine.add(waiting.pop(0))
            running += 1
        for one in engine.step():
            found[one.request_id] = one
            running -= 1
        after_step(found)
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


def check_log_probs(found: Mapping[int, Generated], *weights: CausalLm) -> None:
    """Each token has the log-prob of the weights of its version; one weights: of all versions."""
    for i, one in found.items():
        for version in set(one.versions):
            own = one.versions == version
            expected = full_forward(weights[version if len(weights) > 1 else 0], request(i), one.tokens)
            np.testing.assert_allclose(one.logprobs[own], expected[own], atol=EXACT)


def begin(engine: Engine, asked: EngineRequest, steps: int) -> None:
    """Add it and take so many steps; it does not finish before. A step is a token of an engine in this process, and one
    or more of a server: where these were all, it begins again."""
    for attempt in range(50):
        engine.add(asked)
        count = steps if isinstance(engine, STEPPED) else min(steps, max(1, steps - attempt))
        if not any(engine.step() for _ in range(count)):
            return
        assert not isinstance(engine, STEPPED)
    raise AssertionError("it always finishes")


def halves(engine: Engine, asked: EngineRequest, steps: int) -> Generated:
    """What it has generated after so many steps."""
    begin(engine, asked, steps)
    return engine.abort(asked.request_id)


def expect(engine: Engine, part: Generated, steps: int) -> int:
    """Tokens of a part that was cut after so many steps."""
    count = len(part.tokens)
    assert count == steps or not isinstance(engine, STEPPED)
    return count


def long_request(made: CausalLm, make: Make) -> tuple[EngineRequest, Generated]:
    """A request whose answer has many tokens, and the answer."""
    for i in range(50):
        found = alone(made, make, request(i))
        if len(found.tokens) >= 16:
            return request(i), found
    raise AssertionError("no answer is long")


def member(i: int) -> EngineRequest:
    """A request of one of three groups, which share a prompt."""
    return request(i)._replace(prompt=prompt(100 + i // 8 % 3))


def until_finished(engine: Engine) -> Iterator[Generated]:
    for _ in range(40 if isinstance(engine, STEPPED) else 400):
        yield from engine.step()
