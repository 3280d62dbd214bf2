"""What vLLM alone has, or lacks: shared blocks of keys, adapters, models that it refuses. The rest: test_engines.py."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tests.plugins.language.engines import (
    ENV,
    EXACT,
    LACKS_VLLM,
    Make,
    at_vllm,
    full_forward,
    long_request,
    member,
    policy,
    request,
    until_finished,
)

from polyrhythm.config.catalog import check_installed
from polyrhythm.errors import MissingError, RunHalted
from polyrhythm.plugins.language.causal_lm.engine_settings import VllmSettings
from polyrhythm.plugins.language.causal_lm.policy import CausalLm, CausalLmSettings
from polyrhythm.plugins.language.causal_lm.vllm_engine import BLOCK, VllmEngine, plain_weights
from polyrhythm.policies.engine import Engine


@pytest.fixture
def make() -> Iterator[Make]:
    with at_vllm() as found:
        yield found


def started(made: CausalLm, make: Make, capacity: int) -> VllmEngine:
    engine: Engine = make(made, capacity)
    assert isinstance(engine, VllmEngine)
    engine.weights_changed(0)
    return engine


def shared_prompt(i: int) -> Any:
    """A request of a group whose prompt is a block and 8 tokens."""
    return member(i)._replace(prompt=(np.arange(BLOCK + 8, dtype=np.int32) % 16 + 1))


@LACKS_VLLM
def test_blocks_of_a_prompt_are_computed_once_for_those_that_have_it(make: Make) -> None:
    engine = started(policy(), make, 12)
    for i in range(8):
        engine.add(shared_prompt(i))
    for _ in until_finished(engine):
        pass
    assert (engine.prompt_tokens, engine.shared_tokens) == (8 * (BLOCK + 8), 7 * BLOCK)
    engine.add(shared_prompt(8))
    for _ in until_finished(engine):
        pass
    assert engine.shared_tokens == 8 * BLOCK, "blocks outlive the requests that they were computed for"


@LACKS_VLLM
def test_blocks_of_older_weights_are_not_shared(make: Make) -> None:
    made, other = policy(), policy(1)
    engine = started(made, make, 4)
    engine.add(shared_prompt(0))
    assert not engine.step()
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    later = shared_prompt(1)
    engine.add(later)
    found = {one.request_id: one for one in until_finished(engine)}[1]
    assert engine.shared_tokens == 0
    np.testing.assert_allclose(found.logprobs, full_forward(other, later, found.tokens), atol=EXACT)


@LACKS_VLLM
def test_weights_are_compared_after_each_change_beside_what_runs(make: Make) -> None:
    made, other = policy(), policy(1)
    engine = started(made, make, 2)
    before = engine.statistics()
    engine.add(request(3))
    assert not engine.step()
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    for _ in until_finished(engine):
        pass
    after = engine.statistics()
    assert after["checks"] == before["checks"] + 1, "that of the weights before was cut"
    assert after["check_difference"] - before["check_difference"] < EXACT
    engine.weights_changed(2)
    made.load_state_dict(policy(2).state_dict())  # as if the weights had not been applied
    with pytest.raises(RunHalted, match=r"^policy.engine.type = vllm: its log-probs differ from this model's by"):
        list(until_finished(engine))


@LACKS_VLLM
def test_a_refreshed_cache_gives_the_log_probs_of_the_new_weights_alone(make: Make) -> None:
    made, other = policy(refresh_cache=True), policy(1)
    asked, _ = long_request(made, make)
    engine = started(made, make, 3)
    for i in (asked.request_id, 90, 91):
        engine.add(request(i))
    for _ in range(3):
        engine.step()
    made.load_state_dict(other.state_dict())
    engine.weights_changed(1)
    found = {one.request_id: one for one in until_finished(engine)}[asked.request_id]
    assert found.versions.tolist() == [0] * 3 + [1] * (len(found.tokens) - 3)
    np.testing.assert_allclose(found.logprobs[3:], full_forward(other, asked, found.tokens)[3:], atol=EXACT)


def test_vllm_gets_the_sum_of_matrices_and_adapters() -> None:
    sizes: dict[str, Any] = {"layers": 2, "width": 32, "heads": 1, "hidden": 64}
    section = CausalLmSettings.model_validate({**sizes, "train": "lora", "lora": {"rank": 4, "alpha": 8.0}})
    adapted = section.build(ENV.spec(), seed=0, device="cpu", role="act").eval()
    plain = CausalLmSettings.model_validate(sizes).build(ENV.spec(), seed=1, device="cpu", role="act").eval()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if ".lora_B." in name:
                p.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(p.numel()))
    plain.network.model.load_state_dict(dict(plain_weights(adapted.network.model)))  # type: ignore[union-attr, operator]
    tokens = np.arange(1, 13, dtype=np.int32)
    np.testing.assert_allclose(
        full_forward(plain, request(1), tokens), full_forward(adapted, request(1), tokens), atol=EXACT
    )


@LACKS_VLLM
@pytest.mark.parametrize(
    ("settings", "engine", "why"),
    [
        ({"heads": 2}, {}, "cannot run this model: .*head_dim=16"),
        ({}, {"cache_gib": 1e-6}, "did not start: .*(KV cache|cache blocks)"),
        ({}, {"dtype": "bfloat16", "tolerance": 1e-7}, "log-probs differ from this model's by .*use float32"),
    ],
    ids=["heads", "cache", "rounding"],
)
def test_a_model_that_vllm_cannot_run_is_told_in_a_sentence(
    settings: dict[str, Any], engine: dict[str, Any], why: str
) -> None:
    start = VllmSettings.model_validate({"compile": False, "cache_gib": 0.1, **engine})
    sizes = {"layers": 1, "width": 32, "heads": 1, "hidden": 64, **settings}
    made = CausalLmSettings(engine=start, **sizes).build(ENV.spec(), seed=0, device="cpu", role="act")
    with pytest.raises(RunHalted, match=rf"^policy.engine.type = vllm: its? {why}"):
        made.make_engine(2)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_it_says_how_to_install_it() -> None:
    with pytest.raises(
        MissingError, match=r"policy.engine.type = vllm: the package vllm is not installed; run: .*vllm"
    ):
        check_installed("policy", CausalLmSettings(engine=VllmSettings()))
