"""Runs whose tokens come from a server or from vLLM: everything else is as with the native engine."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.built import built
from tests.long import long
from tests.pipeline.runs import config as cartpole
from tests.pipeline.test_streams import LANGUAGE
from tests.plugins.language import openai_server, sglang_server
from tests.plugins.language.engines import LACKS_VLLM
from tests.plugins.language.server_model import Model

from polyrhythm.config.load import merge, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, RunHalted, StartError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.evaluation.standalone import evaluate, with_overrides
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.validation.check import examine, validate_run
from polyrhythm.pipeline.validation.fit import check_engine
from polyrhythm.plugins.language.causal_lm.engine import Sampling
from polyrhythm.plugins.language.causal_lm.policy import CausalLmSettings
from polyrhythm.plugins.language.causal_lm.servers import client
from polyrhythm.runtime.messages import Report


class Reports(Observer):
    """Mismatch between generation and training, of the updates whose samples are of the trainer's own weights."""

    def __init__(self) -> None:
        self.mismatch: list[float] = []

    def on_report(self, now: float, report: Report) -> None:
        if "train/actor/mismatch_kl" in report.values:
            self.mismatch.append(report.values["train/actor/mismatch_kl"])


def configured(url: str, kind: str = "sglang", **changes: Any) -> RunConfig:
    server = {"policy": {"engine": {"type": kind, "url": url}}, "rollout": {"generators": 1}}
    return validate(merge(merge(LANGUAGE, server), changes))


def server_of(config: RunConfig, kind: str = "sglang", seed: int = 9) -> Any:
    """A server with a model of the same sizes and of other weights, or of the run's own."""
    spec = config.env.spec()  # type: ignore[attr-defined]
    assert isinstance(config.policy, CausalLmSettings)
    network = config.policy.build(spec, seed=seed, device="cpu", role="act").network
    stops = tuple(spec.action.stops)
    if kind == "openai":
        return openai_server.serving(network, Sampling(0), stops=stops, pause_s=0.001)
    return sglang_server.serving(network, stops=stops, pause_s=0.001)


@pytest.mark.parametrize(
    ("kind", "launcher", "on_update"),
    [
        ("sglang", "inline", "drain"),
        pytest.param("sglang", "inline", "abort", marks=long(1, "aborts")),
        pytest.param("sglang", "local", "continue", marks=long(9, "a server and processes")),
        pytest.param("openai", "inline", "drain", marks=long(1, "drains")),
        ("openai", "inline", "continue"),
    ],
)
def test_a_run_trains_and_evaluates_on_what_a_server_samples(
    kind: str, launcher: str, on_update: str, tmp_path: Path
) -> None:
    heard = Reports()
    with server_of(validate(LANGUAGE), kind) as (url, model):
        freshness = {"max_lag": 0 if on_update == "drain" else 1, "on_update": on_update}
        config = configured(url, kind, launcher=launcher, freshness=freshness)
        with closing(build_pipeline(RunContext(config, folder=tmp_path))) as pipeline:
            pipeline.loop.add_observers(heard)
            results = pipeline.loop.evaluate("before", held_out(7, 4, 1, greedy=True))
            pipeline.loop.train_until(4)
            ledger = pipeline.loop.conductor.ledger
            statistics = pipeline.launcher.hosting.statistics(fresh=True)
        _check_server(model, **CALLS[kind])
    assert len(results) == 7
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, 32)
    assert statistics["generator-0"]["tokens"] > 0
    assert heard.mismatch or on_update != "drain"
    assert all(abs(mismatch) < 1e-6 for mismatch in heard.mismatch), "the trainer's log-probs are the server's"


#: Endpoints of a change of the weights.
CALLS = {
    "sglang": {"load": "/update_weights_from_disk", "pause": "/pause_generation", "resume": "/continue_generation"},
    "openai": {"load": "/collective_rpc", "pause": "/pause?mode=abort", "resume": "/resume"},
}


def _check_server(model: Model, load: str, pause: str, resume: str) -> None:
    said = model.said
    assert said.count(load) >= 4
    assert said.count(pause) == said.count(resume) == said.count(load)
    until = time.monotonic() + 60
    while model.names and time.monotonic() < until:
        time.sleep(0.01)
    assert not model.names, "nothing runs at the server any more"


def test_a_server_that_dies_ends_the_run_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSE_S", 0.01)
    with (
        server_of(validate(LANGUAGE)) as (url, model),
        closing(build_pipeline(RunContext(configured(url), folder=tmp_path))) as pipeline,
    ):
        pipeline.loop.evaluate("before", held_out(7, 4, 1, greedy=True))
        model.broken["dies"] = True
        with pytest.raises(RunHalted, match=r"policy.engine.url = .*: /generate ended in the middle of an answer"):
            pipeline.loop.train_until(4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollout": {"generators": 2}}, r"rollout.generators = 2: policy.engine.url = .* set it to 1"),
        ({"batching": {"type": "dynamic", "max_rows": 8}, "freshness": {"on_update": "continue"}}, "set it to streams"),
        ({"evaluation": {"episodes": 4, "every": 1}}, "evaluation.weights = second_copy: .*; set it to pause"),
    ],
)
def test_a_run_that_needs_more_than_one_version_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate_run(configured("http://127.0.0.1:9", **changes))


def test_weights_that_cannot_change_are_refused_for_training_alone() -> None:
    fixed = {"policy": {"engine": {"weights": {"load": ""}}}}
    config = configured("http://127.0.0.1:9", "openai", **fixed)
    with pytest.raises(
        ConfigError, match=r"training.versions = \d+: policy.engine.weights.load is empty, so the server"
    ):
        validate_run(config)
    validate_run(config, trainer=False)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("sglang", "/get_model_info: .*; start an sglang server there"), ("openai", "/v1/models: .*; start a server of")],
)
def test_a_server_that_is_not_there_is_noticed_before_anything_starts(kind: str, why: str) -> None:
    config = configured("http://127.0.0.1:9", kind)
    with pytest.raises(StartError, match=f"policy.engine.url = http://127.0.0.1:9: {why}"):
        validate_run(config)
    (found,) = (each.finding for each in examine(config) if each.finding.name == "the engine's server")
    assert found.state == "failed"


def test_a_server_whose_weights_cannot_be_changed_is_noticed_before_anything_starts() -> None:
    config = configured("http://127.0.0.1:9", "openai")
    with server_of(config, "openai") as (url, model):
        validate_run(configured(url, "openai"))
        model.broken["development"] = True
        with pytest.raises(StartError, match=r"/weight_info answered 404.*start vLLM's server with"):
            validate_run(configured(url, "openai"))


IN_VLLM: dict[str, Any] = {
    "policy": {"width": 32, "heads": 1, "engine": {"type": "vllm", "compile": False, "cache_gib": 0.1}}
}


@LACKS_VLLM
@pytest.mark.parametrize("on_update", ["drain", "continue", "abort"])
def test_a_run_trains_and_evaluates_on_what_vllm_samples(on_update: str, tmp_path: Path) -> None:
    """With two generators, and a copy for evaluations beside training: three engines in this process."""
    heard = Reports()
    freshness = {"max_lag": 0 if on_update == "drain" else 1, "on_update": on_update}
    config = validate(merge(merge(LANGUAGE, IN_VLLM), {"freshness": freshness}))
    with closing(build_pipeline(RunContext(config, folder=tmp_path))) as pipeline:
        pipeline.loop.add_observers(heard)
        results = pipeline.loop.evaluate("before", held_out(7, 4, 1, greedy=True))
        pipeline.loop.train_until(4)
        ledger = pipeline.loop.conductor.ledger
    assert len(results) == 7
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, 32)
    assert heard.mismatch or on_update != "drain"
    assert all(abs(mismatch) < 1e-6 for mismatch in heard.mismatch), "the trainer's log-probs are vLLM's"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batching": {"type": "dynamic", "max_rows": 8}, "freshness": {"on_update": "continue"}}, "set it to streams"),
        ({"placement": {"sharing": "lease"}}, "placement.sharing = lease: policy.engine.type = vllm keeps its memory"),
    ],
)
def test_a_run_that_vllm_cannot_serve_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_engine(validate(merge(merge(LANGUAGE, IN_VLLM), changes)))


@pytest.mark.parametrize(
    "engine",
    [
        {"type": "sglang"},
        {"type": "sglang", "url": "here"},
        {"type": "sglang", "url": "http://a:b"},
        {"type": "openai"},
        {"type": "openai", "url": "http://here", "weights": {"load": "reload"}},
        {"type": "tgi"},
    ],
    ids=str,
)
def test_what_names_no_engine_is_refused(engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"policy.engine"):
        validate({**LANGUAGE, "policy": {**LANGUAGE["policy"], "engine": engine}})


@pytest.mark.parametrize("kind", [pytest.param("sglang", marks=long(1, "the same by another server")), "openai"])
def test_a_run_of_the_native_engine_is_evaluated_by_a_server(kind: str, tmp_path: Path) -> None:
    """With the run's weights: the server's own are others, and answer otherwise."""
    run = validate(merge(LANGUAGE, {"evaluation": {"episodes": 8, "every": 1}}))
    spec = run.env.spec()  # type: ignore[attr-defined]
    file = tmp_path / "policy.pt"
    save_policy(built(run.policy, spec, 7).state_dict(), run, file, 5, spec)
    with server_of(run, kind) as (url, model):
        words = [f"policy.engine.type={kind}", f"policy.engine.url={url}"]
        theirs = evaluate(file, 8, 3, overrides=words)
        _check_loaded(model, CALLS[kind]["load"])
        strangers = evaluate(file, 8, 3)
        server_alone = with_overrides(run, words)
    assert theirs == strangers
    assert (server_alone.rollout.generators, server_alone.evaluation.every) == (1, 0)
    assert run.rollout.generators == 2


def _check_loaded(model: Model, load: str) -> None:
    assert load in model.said
    assert any("generate" in call or "completions" in call for call in model.said), "it has answered"


def test_an_evaluation_by_an_engine_that_would_change_the_policy_is_refused() -> None:
    run, url = validate(LANGUAGE), "policy.engine.url=http://127.0.0.1:9"
    passes = merge(LANGUAGE, {"batching": {"type": "dynamic", "max_rows": 8}, "freshness": {"on_update": "continue"}})
    fixed = ["policy.engine.type=openai", url, "policy.engine.weights.load=''"]
    for config, words, why in (
        (run, fixed, "load is empty, so the server cannot get the run's weights, and another policy would be"),
        (validate(passes), fixed[:2], "answers streams, and the run has batching.type = dynamic; leave it out"),
        (
            run,
            ["policy.layers=2"],
            "the run has its own policy.layers; only env.SETTING may differ, policy.checkpoint and",
        ),
        (run, ["policy.engines=x"], "policy.engines=x: the run has its own policy.engines"),
        (cartpole(), ["policy.engine.type=vllm"], "the run has its own policy.engine.type; only .* of a language"),
        (cartpole(policy={"type": "openvla_oft"}), ["policy.top_k=1"], "its own policy.top_k; .*, policy.top_p$"),
    ):
        with pytest.raises(ConfigError, match=why):
            with_overrides(config, words)
    late = with_overrides(run, [url, "policy.engine.type=sglang"])
    assert late.policy.engine.url == "http://127.0.0.1:9"  # type: ignore[attr-defined]
    served = validate(merge(LANGUAGE, {"policy": {"engine": {"type": "vllm"}}}))
    assert with_overrides(served, ["policy.engine={type: native}"]).policy.engine.type == "native"  # type: ignore[attr-defined]
    assert with_overrides(run, []) is run
