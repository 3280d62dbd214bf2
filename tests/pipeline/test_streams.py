"""A live run whose generators serve by streams: the conductor's decisions, the lag, and settings that do not fit."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.oracles.replay import first_difference
from tests.pipeline.runs import config

from polyrhythm.conductors import build_conductor
from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.load import validate
from polyrhythm.errors import ConfigError, PolyrhythmError, RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.observers.totals import StationActivity
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler.records import ApplyWeights, SampleFinished, StartStream, StartUpdate, StreamDone

LANGUAGE: dict[str, Any] = {
    "name": "test",
    "launcher": "inline",
    "env": {"type": "chains", "terms": [2, 4], "max_new_tokens": 16, "max_prompt_tokens": 10},
    "policy": {"type": "causal_lm", "layers": 1, "width": 16},
    "rollout": {"rows": 8, "sharding": "even:8", "generators": 2},
    "batching": {"type": "streams", "max_rows": 3},
    "groups": {"size": 2},
    "freshness": {"max_lag": 1, "on_update": "abort"},
    "training": {"versions": 4, "mini_batch_samples": 8, "optimizer": {"lr": 1e-3}},
    "algorithm": {"advantage": "grpo", "value": {"coef": 0.0}, "aggregation": "token_mean"},
}


@pytest.mark.parametrize("on_update", ["abort", "continue", "drain"])
def test_a_live_runs_trace_gives_the_simulated_clusters_driver_the_same_commands(on_update: str) -> None:
    changes = {**LANGUAGE, "freshness": {"max_lag": 1, "on_update": on_update}}
    pipeline = build_pipeline(RunContext(validate(changes)), record=True)
    pipeline.loop.evaluate("before", held_out(7, 4, 1, greedy=True))
    pipeline.loop.train_until(4)
    statistics = pipeline.launcher.hosting.statistics(fresh=True)
    trace, conductor = pipeline.loop.trace, pipeline.loop.conductor
    pipeline.close()
    commands = [command for decision in trace for command in decision.commands]
    done = [decision.event for decision in trace if isinstance(decision.event, StreamDone)]
    assert len(done) == sum(isinstance(command, StartStream) for command in commands) >= 32 + 4
    assert conductor.ledger.as_dict()["trained"] == 32
    updates = [command for command in commands if isinstance(command, StartUpdate)]
    lags = [command.version - oldest for command in updates for oldest in command.oldest]
    assert 0 <= max(lags) <= 1
    assert {command.version for command in commands if isinstance(command, ApplyWeights)} == {0, 1, 2, 3, 4}
    resumed = sum(statistics[name]["resumed"] for name in ("generator-0", "generator-1"))
    assert (resumed > 0) == (on_update == "abort"), "generations were under way when weights came"
    events = [decision.event for decision in trace]
    partial = [event for event in events if isinstance(event, SampleFinished) and event.newest > event.oldest]
    assert bool(partial) == (on_update != "drain"), "one message each, with tokens of several versions"
    fresh = build_conductor(conductor.settings)
    assert first_difference(fresh, trace) is None
    assert fresh.save() == conductor.save()


def test_tokens_per_second_are_those_of_the_generators(tmp_path: Path) -> None:
    summary = train(validate_run(validate(LANGUAGE)), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "throughput/tokens_per_s" in line]
    for name in ("tokens", "prompt_tokens"):
        counts = [
            line[f"throughput/{name}_per_s"] * (line["time_s"] - before["time_s"]) for before, line in pairwise(updates)
        ]
        total = sum(summary["stations"][f"generator-{number}"][name] for number in range(2))
        assert 0 < sum(counts) < total, "without those before the first update and after the last"


def test_token_rates_are_counts_over_the_seconds_since_the_last_ones() -> None:
    pipeline = build_pipeline(RunContext(validate(LANGUAGE)))
    stations = StationActivity(pipeline.launcher, 5.0)
    pipeline.loop.train_until(1)
    counts = Counter[str]()
    for own in pipeline.launcher.hosting.statistics(fresh=True).values():
        counts.update(own)
    first, at_once, again = stations.token_rates(7.0), stations.token_rates(7.5), stations.token_rates(9.0)
    pipeline.close()
    assert first == {f"throughput/{name}_per_s": counts[name] / 2.0 for name in ("tokens", "prompt_tokens")}
    assert counts["tokens"] > 8
    assert at_once == {}, "nothing new was told"
    assert again == dict.fromkeys(first, 0.0), "idle generators"


def test_token_rates_are_those_of_the_reports_where_updates_are_shorter() -> None:
    """Each of two generators makes 100 tokens a second, and tells it every half second, one 0.2 s after the other."""

    class Told(SimpleNamespace):
        now = 0.0

        @property
        def hosting(self) -> Any:
            return self

        def statistics(self) -> dict[str, dict[str, float]]:
            heard = {"generator-0": self.now // 0.5 * 0.5, "generator-1": max(0.0, (self.now - 0.2) // 0.5 * 0.5 + 0.2)}
            return {name: {"tokens": 100.0 * second, "prompt_tokens": 0.0} for name, second in heard.items()}

    told = Told()
    stations, found = StationActivity(cast(Launcher, told)), list[float]()
    for tenth in range(1, 100):
        told.now = tenth / 10 + 0.01
        found += [rates["throughput/tokens_per_s"] for rates in [stations.token_rates(told.now)] if rates]
    assert 15 <= len(found) <= 20, "of 99 updates"
    assert found[1:] == [pytest.approx(200.0, rel=0.25)] * (len(found) - 1)


def test_a_policy_that_answers_in_one_pass_cannot_stream() -> None:
    one_pass = config(batching={"type": "streams"}, rollout={"routing": "least_loaded"})
    with pytest.raises(ConfigError, match="categorical answers in one pass; set batching"):
        validate_run(one_pass)
    with pytest.raises(RunHalted, match="categorical: it answers in one pass"):
        build_pipeline(RunContext(one_pass))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rollout": {"rows": 8, "sharding": "even:8", "buckets": "powers"}}, "no passes to pad"),
        ({"evaluation": {"episodes": 4, "every": 1, "priority": "first"}}, "decode in turns"),
        ({"batching": {"type": "streams", "max_rows": 1}, "rollout": {"rows": 8}}, "never split"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises((InvalidSetting, PolyrhythmError), match=why):
        validate({**LANGUAGE, **changes})
