"""The engine at a server of OpenAI's protocol: what differs from sglang's, and every way in which it can be the wrong
one. What all engines at servers share: test_sglang_engine.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.plugins.language.engines import (
    ENV,
    EXACT,
    LACKS_VLLM,
    STOPS,
    at_url,
    check_log_probs,
    full_forward,
    policy,
    request,
    run,
    vllm_url,
)
from tests.plugins.language.openai_server import serving
from tests.plugins.language.server_model import Model
from tests.plugins.language.test_sglang_engine import step_on

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine import Sampling
from polyrhythm.plugins.language.causal_lm.engine_settings import OpenAiSettings, WeightSettings
from polyrhythm.plugins.language.causal_lm.network import random_network
from polyrhythm.plugins.language.causal_lm.policy import CausalLm, CausalLmSettings
from polyrhythm.policies.engine import Engine

FIXED = WeightSettings(load="")


@contextmanager
def at_server(
    made: CausalLm,
    capacity: int = 4,
    *,
    seed: int = 9,
    pause_s: float = 0.0,
    broken: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[Engine, Model]]:
    """An engine at a server of another seed's model, and the server."""
    with serving(policy(seed).network, Sampling(0), stops=tuple(STOPS), pause_s=pause_s) as (url, model):
        model.broken |= broken or {}
        section = CausalLmSettings(engine=OpenAiSettings(url=url, **{"retries": 1, **settings}))
        yield CausalLm(section, ENV.spec(), made.network).make_engine(capacity), model


def await_idle(model: Model) -> None:
    until = time.monotonic() + 60
    while model.names:
        assert time.monotonic() < until, "requests that nobody waits for run on"
        time.sleep(0.002)


def test_an_aborted_answer_keeps_its_tokens_and_ends_at_the_server() -> None:
    made = policy()
    with at_server(made, pause_s=0.01) as (engine, model):
        engine.weights_changed(0)
        for i in range(4):
            engine.add(request(i))
        while len(engine._streams[2].tokens) < 2:  # type: ignore[attr-defined]
            time.sleep(0.001)
        part = engine.abort(2)
        assert len(part.tokens) >= 2
        for i in (0, 1, 3):
            engine.abort(i)
        check_log_probs({2: part}, made)
        await_idle(model)


def test_every_token_has_the_log_prob_of_the_weights_of_its_version() -> None:
    made, weights = policy(), [policy(seed) for seed in range(2)]
    with at_server(made, capacity=8, pause_s=0.01) as (engine, model):
        engine.weights_changed(0)
        for i in range(8):
            engine.add(request(i))
        while not any(len(stream.tokens) > 3 for stream in engine._streams.values()):  # type: ignore[attr-defined]
            time.sleep(0.001)
        made.load_state_dict(weights[1].state_dict())
        engine.weights_changed(1)
        assert (model.version, model.paused) == ("1", False)
        found = run(engine, [])
        while len(found) < 8:
            found |= {one.request_id: one for one in engine.step()}
    assert any(set(one.versions) == {0, 1} for one in found.values()), "weights changed in the middle of an answer"
    check_log_probs(found, *weights)


def test_a_resumed_answer_draws_other_noise() -> None:
    """A server's noise begins anew with each request: equal seeds would draw the first tokens' noise again."""
    with at_server(policy()) as (engine, model):
        engine.weights_changed(0)
        model.broken["dies"] = 2
        (one,) = run(engine, [request(2)]).values()
        seeds = [asked.seed for asked in model.asked]
        assert len(seeds) == len(set(seeds)) > 2, "the check, and two parts"
        check_log_probs({2: one}, policy())


def test_a_server_that_started_anew_gets_the_weights_again() -> None:
    """Its answers do not name their weights, so it is asked for them once an answer has begun."""
    made = policy()
    with at_server(made, capacity=6) as (engine, model):
        engine.weights_changed(3)
        model.start_anew(policy(9).network)
        found = run(engine, [request(i) for i in range(6)])
        assert model.said.count("/collective_rpc") == 2
        counts = engine.statistics()
        assert counts["checks"] == 2
        assert counts["shared_tokens"] == 18
        assert counts["prompt_tokens"] == sum(len(request(i).prompt) for i in range(6))
    assert all(set(one.versions) == {3} for one in found.values())
    check_log_probs(found, made)


def test_tokens_that_the_environment_has_not_are_not_sampled() -> None:
    small = policy()
    config = type(small.network.model.config)(**{**small.network.model.config.to_dict(), "vocab_size": 60})  # type: ignore[union-attr, operator]
    made = CausalLm(CausalLmSettings(), ENV.spec(), random_network(config, 3))
    with at_server(made) as (engine, _):
        engine.weights_changed(0)
        check_log_probs(run(engine, [request(i) for i in range(8)]), made)


@pytest.mark.parametrize("broken", [{"ids": "named"}, {"flat": True}], ids=str)
def test_what_a_server_may_lack(broken: dict[str, Any]) -> None:
    """Ids beside their names, and counts."""
    made = policy()
    with at_server(made, broken=broken) as (engine, _):
        engine.weights_changed(0)
        check_log_probs(run(engine, [request(i) for i in range(6)]), made)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"token": 900}, r"it sampled token 9\d\d, and the environment's tokenizer has 20; start it with this run's"),
        ({"scale": 2.0}, r"its log-probs differ .*; start it with this run's model, and with log-probs of what is"),
        ({"update": True}, r"it did not load the weights \(.*no such format.*\); it needs this run's model"),
        ({"logprobs": True}, r"/v1/completions answered 1 token ids and 0 log-probs; name a server that answers with"),
        ({"ids": "none"}, r"/v1/completions answered .*; name a server that answers with token ids and log-probs"),
        ({"dies": 0}, r"/v1/completions ended in the middle of an answer; the server may have died"),
        (
            {"development": True},
            r"/pause\?mode=abort answered 404: .*; start vLLM's server with VLLM_SERVER_DEV_MODE=1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_is_not_this_models_is_told_with_the_first_weights(broken: dict[str, Any], why: str) -> None:
    with at_server(policy()) as (engine, model):
        model.broken |= broken
        with pytest.raises(RunHalted, match=rf"^policy.engine.url = http://127.0.0.1:\d+: {why}"):
            engine.weights_changed(0)


@pytest.mark.parametrize(
    ("broken", "settings", "why"),
    [
        ({"page": True}, {}, "which is no JSON object; name a server of OpenAI's protocol"),
        ({"silent": True}, {"deadline_s": 0.2}, "said nothing for 0.2 s"),
        (
            {"key": True},
            {},
            r"/v1/models answered 401: .*; set policy.engine.key_variable to the variable with its key",
        ),
        ({}, {"key_variable": "NO_SUCH_KEY"}, "the environment has no such variable; set it to the server's key"),
        ({}, {"model": "other"}, r"it has no model 'other' .policy.engine.model., but m; name one that it has"),
        ({"development": True}, {}, r"/weight_info answered 404: .* \(policy.engine.weights.named\)"),
    ],
    ids=["page", "silent", "key", "variable", "model", "development"],
)
def test_what_is_no_server_is_told_at_the_start(broken: dict[str, Any], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(RunHalted, match=why), at_server(policy(), broken=broken, **settings):
        pass


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret")
    with at_server(policy(), broken={"key": True}, key_variable="THE_KEY") as (engine, _):
        engine.weights_changed(0)


def test_a_context_that_is_too_short_is_told_at_the_start() -> None:
    long = ENV.model_copy(update={"max_new_tokens": 25})
    with serving(policy().network, Sampling(0), stops=tuple(STOPS)) as (url, _):
        section = CausalLmSettings(engine=OpenAiSettings(url=url))
        why = "it takes 64 tokens, prompts and messages have up to 65; start it with --max-model-len 65"
        with pytest.raises(RunHalted, match=why):
            CausalLm(section, long.spec(), policy().network).make_engine(1)


def test_where_nothing_listens_is_told_at_the_start() -> None:
    with serving(policy().network, Sampling(0), stops=tuple(STOPS)) as (url, _):
        pass
    section = CausalLmSettings(engine=OpenAiSettings(url=url))
    why = rf"^policy.engine.url = {url}: /v1/models: Connection refused; start a server of OpenAI's protocol there"
    with pytest.raises(RunHalted, match=why):
        CausalLm(section, ENV.spec(), policy().network).make_engine(1)


def test_fixed_weights_are_compared_and_never_changed() -> None:
    made = policy()
    with at_server(made, seed=0, weights=FIXED, broken={"development": True}) as (engine, model):
        engine.weights_changed(7)
        check_log_probs(run(engine, [request(i) for i in range(6)]), made)
        assert set(model.said) == {"/v1/models", "/v1/completions"}
        with pytest.raises(RunHalted, match=r"its weights cannot be changed \(policy.engine.weights.load is empty\)"):
            engine.weights_changed(8)
    with at_server(made, weights=FIXED) as (engine, _), pytest.raises(RunHalted, match="its log-probs differ"):
        engine.weights_changed(7)


def test_other_endpoints_are_settings() -> None:
    made = policy()
    body = {"from": "{folder}", "as": ["version {version}"]}
    calls = WeightSettings(load="/load", load_body=body, name="", named="")
    with at_server(made, weights=calls) as (engine, model):
        engine.weights_changed(5)
        assert model.version == "version 5"
        check_log_probs(run(engine, [request(i) for i in range(4)]), made)
        assert "/weight_info" not in model.said
        model.broken["update"] = True
        with pytest.raises(RunHalted, match=r"it did not load the weights \('no such format'\)"):
            engine.weights_changed(6)


@LACKS_VLLM
def test_keys_of_older_weights_are_not_shared_at_vllms_server() -> None:
    """A pause clears its cache of prompts, of which whole blocks of 32 tokens are shared before."""
    made, other = policy(), policy(1)
    asked = [request(i)._replace(prompt=np.arange(40, dtype=np.int32) % 16 + 1) for i in range(6)]
    engine = at_url(made, vllm_url(), 2)
    run(engine, asked)
    shared = engine.statistics()["shared_tokens"]
    assert shared >= 32 * 4, "all but the first two"
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    (found,) = run(engine, asked[:1]).values()
    assert engine.statistics()["shared_tokens"] == shared
    np.testing.assert_allclose(found.logprobs, full_forward(other, asked[0], found.tokens), atol=EXACT)


def test_a_server_that_dies_in_the_middle_of_an_answer_is_told() -> None:
    with at_server(policy()) as (engine, model):
        engine.weights_changed(0)
        model.broken["dies"] = 0
        engine.add(request(0))
        with pytest.raises(RunHalted, match="ended in the middle of an answer"):
            step_on(engine)
