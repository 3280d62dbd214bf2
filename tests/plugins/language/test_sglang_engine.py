"""The engine at a server: weights while streams run, and every way in which a server can be the wrong one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.plugins.language.engines import ENV, EXACT, STOPS, check_log_probs, full_forward, policy, request, run
from tests.plugins.language.server_model import Model
from tests.plugins.language.sglang_server import serving

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.language.causal_lm.engine_settings import SglangSettings
from polyrhythm.plugins.language.causal_lm.network import random_network
from polyrhythm.plugins.language.causal_lm.policy import CausalLm, CausalLmSettings
from polyrhythm.policies.engine import Engine, Generated


@contextmanager
def at_server(
    made: CausalLm, capacity: int = 4, *, pause_s: float = 0.0, broken: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[Engine, Model]]:
    """An engine at a server of another seed's model, and the server."""
    with serving(policy(9).network, stops=tuple(STOPS), pause_s=pause_s) as (url, model):
        model.broken |= broken or {}
        section = CausalLmSettings(engine=SglangSettings(url=url, **{"retries": 1, **settings}))
        yield CausalLm(section, ENV.spec(), made.network).make_engine(capacity), model


def test_every_token_has_the_log_prob_of_the_weights_of_its_version(tmp_path: Path) -> None:
    """Also where weights change in the middle of many answers."""
    made, weights = policy(), [policy(seed) for seed in range(3)]
    with at_server(made, capacity=6, pause_s=0.01, folder=str(tmp_path)) as (engine, model):
        changed: list[int] = []

        def change(found: dict[int, Generated]) -> None:
            version = len(changed)
            if version < 3 and len(found) >= 6 * version:
                changed.append(version)
                made.load_state_dict(weights[version].state_dict())
                engine.weights_changed(version)

        change({})
        found = run(engine, [request(i) for i in range(24)], change)
        assert model.said.count("/update_weights_from_disk") == 3
    mixed = 0
    for one in found.values():
        assert list(one.versions) == sorted(one.versions)
        mixed += len(set(one.versions)) > 1
    check_log_probs(found, *weights)
    assert mixed, "weights changed in the middle of an answer"
    assert list(tmp_path.iterdir()) == [], "weights are removed once they are loaded"


def test_a_server_may_send_new_tokens_alone() -> None:
    asked = [request(i) for i in range(6)]
    with at_server(policy()) as (engine, _), at_server(policy(), broken={"incremental": True}) as (other, _):
        engine.weights_changed(0)
        other.weights_changed(0)
        whole, parts = run(engine, asked), run(other, asked)
    for i in whole:
        np.testing.assert_array_equal(whole[i].tokens, parts[i].tokens)


def test_an_answer_that_ended_while_it_was_cut_is_told_as_finished() -> None:
    with at_server(policy()) as (engine, model):
        engine.weights_changed(0)
        whole = run(engine, [request(1)])[1]
        asked = request(1)._replace(prefix=whole._replace(finished=False))
        engine.add(asked)
        again = engine.abort(1)
        assert not again.finished
        engine.add(asked)
        (found,) = engine.step()
        assert found.finished
        np.testing.assert_array_equal(found.tokens, whole.tokens)
        assert model.said.count("/generate") == 2, "the answer, and the one that proves the weights"


def test_what_others_abort_goes_on() -> None:
    with at_server(policy(), pause_s=0.005) as (engine, model):
        engine.weights_changed(0)
        engine.add(request(3))
        found: list[Any] = []
        for turn in range(400):
            if turn % 3 == 1:
                model.abort("")
            found += engine.step()
            if found:
                break
        (one,) = found
        assert one.finished
        np.testing.assert_allclose(one.logprobs, full_forward(policy(), request(3), one.tokens), atol=EXACT)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"token": 900}, r"it sampled token 9\d\d, and the environment's tokenizer has 20; start it with this run's"),
        ({"scale": 2.0}, r"its log-probs differ from this model's by .*, 0.1 is allowed .policy.engine.tolerance"),
        ({"update": True}, r"it did not load the weights \('no such format'\); it needs this run's model"),
        ({"dies": 0}, r"/generate ended in the middle of an answer; the server may have died"),
        ({"page": True}, r"it did not load the weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_server_that_is_not_this_models_is_told_with_the_first_weights(broken: dict[str, Any], why: str) -> None:
    with at_server(policy()) as (engine, model):
        model.broken |= broken
        with pytest.raises(RunHalted, match=rf"^policy.engine.url = http://127.0.0.1:\d+: {why}"):
            engine.weights_changed(0)


def test_tokens_that_end_text_for_the_server_alone_end_no_answer() -> None:
    """Its tokenizer has more of them than the environment."""
    asked = [request(i) for i in range(8)]
    with at_server(policy()) as (engine, _), at_server(policy()) as (other, model):
        model.ends = tuple(range(1, 12))
        engine.weights_changed(0)
        other.weights_changed(0)
        whole, parts = run(engine, asked), run(other, asked)
        assert model.said.count("/generate") > 16, "answers were begun again"
    for i in whole:
        np.testing.assert_array_equal(whole[i].tokens, parts[i].tokens)
        assert int(whole[i].tokens[-1]) in STOPS or len(whole[i].tokens) == 24
        np.testing.assert_allclose(whole[i].logprobs, parts[i].logprobs, atol=EXACT)


def test_tokens_that_the_environment_has_not_are_not_sampled() -> None:
    """The model has more, as padded vocabularies do; log-probs are over the environment's alone, as in training."""
    small = policy()
    config = type(small.network.model.config)(**{**small.network.model.config.to_dict(), "vocab_size": 60})  # type: ignore[union-attr, operator]
    made = CausalLm(CausalLmSettings(), ENV.spec(), random_network(config, 3))
    asked = [request(i) for i in range(8)]
    with at_server(made) as (engine, _):
        engine.weights_changed(0)
        check_log_probs(run(engine, asked), made)


def test_a_lost_connection_is_resumed_from_its_tokens() -> None:
    asked = [request(i) for i in range(6)]
    with at_server(policy()) as (engine, model):
        engine.weights_changed(0)
        whole = run(engine, asked)
        model.broken["dies"] = 9
        again = run(engine, asked)
        assert model.said.count("/update_weights_from_disk") == 1
        assert model.said.count("/generate") > 13
    for i in whole:
        np.testing.assert_array_equal(again[i].tokens, whole[i].tokens)


def test_a_server_that_started_anew_gets_the_weights_again() -> None:
    made = policy()
    with at_server(made, capacity=6) as (engine, model):
        engine.weights_changed(3)
        model.start_anew(policy(9).network)
        found = run(engine, [request(i) for i in range(6)])
        assert model.said.count("/update_weights_from_disk") == 2
        model.broken["scale"] = 1.001
        engine.weights_changed(3)
        counts = engine.statistics()
        assert counts["checks"] == 3
        assert 2e-4 < counts["check_difference"] < 0.1
        assert counts["prompt_tokens"] * 3 == counts["shared_tokens"] * 7 > 0
    assert all(set(one.versions) == {3} for one in found.values())
    check_log_probs(found, made)


def test_answers_that_have_ended_are_told_before_a_failure() -> None:
    with at_server(policy(), retries=0) as (engine, model):
        engine.weights_changed(0)
        whole = run(engine, [request(1)])[1]
        model.broken["dies"] = 0
        engine.add(request(2))
        until = time.monotonic() + 60
        while not engine._streams[2].over:  # type: ignore[attr-defined]
            assert time.monotonic() < until
        engine.add(request(1)._replace(prefix=whole))  # it is complete
        (found,) = engine.step()
        assert found.request_id == 1
        with pytest.raises(RunHalted, match="ended in the middle of an answer"):
            step_on(engine)


def test_loading_weights_has_a_limit_of_its_own() -> None:
    with at_server(policy(), deadline_s=0.3, load_s=60) as (engine, model):
        model.broken["load_s"] = 0.5
        engine.weights_changed(0)
    with at_server(policy(), load_s=0.2) as (engine, model):
        model.broken["load_s"] = 0.5
        with pytest.raises(RunHalted, match=r"/update_weights_from_disk said nothing for 0.2 s .policy.engine.load_s"):
            engine.weights_changed(0)


def step_on(engine: Engine) -> None:
    """For a minute at most."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        engine.step()


def test_a_server_that_dies_in_the_middle_of_an_answer_is_told() -> None:
    with at_server(policy()) as (engine, model):
        engine.weights_changed(0)
        model.broken["dies"] = 0
        for i in range(4):
            engine.add(request(i))
        with pytest.raises(RunHalted, match="ended in the middle of an answer"):
            step_on(engine)


def test_a_silent_server_is_told_after_the_deadline() -> None:
    with at_server(policy(), deadline_s=0.5) as (engine, model):
        engine.weights_changed(0)
        with model.lock:  # it decodes nothing
            engine.add(request(1))
            with pytest.raises(RunHalted, match=r"/generate said nothing for 0.5 s \(policy.engine.deadline_s\)"):
                step_on(engine)


@pytest.mark.parametrize(
    ("broken", "why"), [({"page": True}, "which is no JSON object"), ({"silent": True}, "for 0.2 s")]
)
def test_what_is_no_server_is_told_at_the_start(broken: dict[str, Any], why: str) -> None:
    with pytest.raises(RunHalted, match=why), at_server(policy(), broken=broken, deadline_s=0.2):
        pass


def test_where_nothing_listens_is_told_at_the_start() -> None:
    with serving(policy().network, stops=tuple(STOPS)) as (url, _):
        pass
    section = CausalLmSettings(engine=SglangSettings(url=url))
    with pytest.raises(RunHalted, match=rf"^policy.engine.url = {url}: /get_model_info: Connection refused; start an"):
        CausalLm(section, ENV.spec(), policy().network).make_engine(1)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    why = r"policy.engine.folder = .*file: weights cannot be written \(File exists\)"
    with at_server(policy(), folder=str(tmp_path / "file")) as (engine, _), pytest.raises(RunHalted, match=why):
        engine.weights_changed(0)
