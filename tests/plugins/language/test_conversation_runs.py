"""What was said in an evaluation's first episodes: in the run's folder, its report, callbacks and results."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.plugins.language.test_language_runs import AGENT, SINGLE, SMALL, run
from tests.plugins.scoring.test_runs import LEARNED, VERIFIED

import polyrhythm as pr
from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.callbacks import Callbacks, EvaluationResult
from polyrhythm.pipeline.evaluation.standalone import Conditions, evaluate
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.language.conversations import CONVERSATIONS_FILE, conversations_of, read_conversations
from polyrhythm.plugins.language.text.chains import ChainsSettings
from polyrhythm.specs import split_seed

PAUSE = ("evaluation.every=1", "evaluation.every_episodes=4", "evaluation.weights=pause")


class Heard:
    def __init__(self) -> None:
        self.results: list[EvaluationResult] = []

    def on_evaluation(self, result: EvaluationResult) -> None:
        self.results.append(result)


def without_place(entries: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if key not in ("evaluation", "version")} for one in entries]


def check_replayed(settings: ChainsSettings, entry: Any) -> None:
    """Its texts are those of the environment for its seed and these messages, up to one that was cut."""
    conversation = settings.conversation()
    assert conversation.begin(0, split_seed(entry["seed"], held_out=True)) == entry["prompt"]
    replies = [conversation.reply(turn["message"]) for turn in entry["turns"] if not entry["metrics"]["cut"]]
    if replies:
        assert [reply.text for reply in replies] == [turn["reply"] for turn in entry["turns"]]
        assert sum(reply.reward for reply in replies) == entry["return"]
        assert any(reply.success for reply in replies) == entry["success"]


def test_a_run_keeps_the_first_conversations_of_each_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(AGENT[0], [*SMALL, *AGENT[1:], *PAUSE, "launcher=inline", "evaluation.conversations=2"])
    heard = Heard()
    train(validate_run(config), tmp_path, callbacks=Callbacks(heard))
    entries = read_conversations(tmp_path)
    assert len(entries) == len((tmp_path / CONVERSATIONS_FILE).read_text().splitlines())
    results = [f"{name}{way}" for name, way in product(("before", "during", "after"), ("", "_sampled"))]
    assert {entry["evaluation"] for entry in entries} == set(results)
    for name in results:
        versions = {entry["version"] for entry in entries if entry["evaluation"] == name}
        for version in versions:
            own = [e["index"] for e in entries if (e["evaluation"], e["version"]) == (name, version)]
            assert own == [0, 1]
    assert isinstance(config.env, ChainsSettings)
    for entry in entries:
        check_replayed(config.env, entry)
        assert len(entry["turns"]) == entry["metrics"]["turns"]
    assert any(len(entry["turns"]) > 1 for entry in entries), "the tool was called"

    told = {(result.name, result.version): list(result.conversations) for result in heard.results}
    assert {key for key in told if told[key]} == {(entry["evaluation"], entry["version"]) for entry in entries}
    after = without_place(entry for entry in entries if entry["evaluation"] == "after")
    assert told["after", 3] == after == evaluate(tmp_path)["conversations"]

    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    said = page[page.index('"heading":"Prompts and answers"') :]
    message = next(turn["message"] for entry in after for turn in entry["turns"] if turn["message"].startswith("<"))
    assert message.replace("<", "\\u003c").replace(">", "\\u003e") in said
    assert message not in said

    file = tmp_path / "said" / "own.jsonl"
    capsys.readouterr()
    assert main(["eval", str(tmp_path), "--conversations", "1", "--conversations-file", str(file)]) == 0
    (kept,) = map(json.loads, file.read_text().splitlines())
    assert kept == {"evaluation": "evaluation", "version": 3, **after[0]}
    lines = capsys.readouterr().out.partition("\nepisode 0, chains: ")[2].splitlines()
    assert lines[0].startswith("success, return 1" if after[0]["success"] else "no success, return 0")
    assert lines[1].split() == ["prompt", after[0]["prompt"]]
    assert lines[-1].split()[:2] == ["answer", *after[0]["turns"][-1]["message"].split()[:1]]
    assert len(lines) <= 2 + 2 * len(after[0]["turns"])
    assert main(["eval", str(tmp_path), "--conversations", "0", "--conversations-file", f"{file}2"]) == 2
    assert "--conversations = 0: --conversations-file would have nothing" in capsys.readouterr().err


def test_a_file_of_an_evaluation_has_those_of_its_variants_too() -> None:
    own, other = {"index": 0, "prompt": "a"}, {"index": 0, "prompt": "b"}
    result = {"version": 7, "conversations": [own], "variants": {"far": {"conversations": [other]}, "near": {}}}
    assert conversations_of(result) == [
        {"evaluation": "evaluation", "version": 7, **own},
        {"evaluation": "far", "version": 7, **other},
    ]


def test_a_function_evaluates_as_the_command_does(tmp_path: Path) -> None:
    run(tmp_path, *SINGLE, "launcher=inline", "training.versions=1")
    found = pr.evaluate(tmp_path, {"policy.engine": {"type": "native"}}, episodes=8, conversations=2)
    assert [entry["index"] for entry in found.conversations] == [0, 1]
    assert not pr.evaluate(tmp_path, episodes=8, conversations=0).conversations
    with pytest.raises(ConfigError, match=r"policy\.layers=2: the run has its own policy.layers"):
        pr.evaluate(tmp_path, "policy.layers=2")
    with pytest.raises(ConfigError, match=r"policy\.layers=2: the run has its own policy.layers"):
        pr.evaluate(tmp_path, "policy.engine.type=native", {"policy.layers": 2})
    with pytest.raises(ConfigError, match="conversations = -1"):
        pr.evaluate(tmp_path, conversations=-1)


@long(3, "seven evaluations")
def test_tokens_may_be_sampled_otherwise_than_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a temperature near 0, or from the likeliest token alone, as greedily."""
    run(tmp_path, *SINGLE, "launcher=inline", "training.versions=1")

    def said(*overrides: str, greedy: bool | None = None) -> list[Any]:
        found = pr.evaluate(tmp_path, *overrides, episodes=8, conversations=8, greedy=greedy)
        assert found.greedy is (greedy if greedy is not None else not overrides)
        return [found.sampling, *(turn["message"] for one in found.conversations for turn in one["turns"])]

    plain, hot = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, said("policy.temperature=4")
    usual = said(greedy=True)
    assert usual[0] == {}
    assert said("policy.temperature=1.0e-4")[1:] == usual[1:]
    assert said("policy.top_k=1")[:] == [plain | {"top_k": 1}, *usual[1:]]
    assert hot[0] == plain | {"temperature": 4.0}
    assert hot[1:] != said(greedy=False)[1:] != usual[1:]
    with pytest.raises(ConfigError, match=r"policy\.top_p=0\.5: greedily the likeliest token is taken, .*--sampled"):
        said("policy.top_p=0.5", greedy=True)
    capsys.readouterr()
    assert main(["eval", str(tmp_path), "--episodes", "4", "policy.temperature=0.6", "policy.top_p=0.9"]) == 0
    out = capsys.readouterr().out
    assert "greedy: false" in out
    assert "sampling: temperature 0.6, top_k 0, top_p 0.9" in out


@long(15, "conversations of processes")
def test_a_score_counts_and_processes_say_their_texts_too(tmp_path: Path) -> None:
    own = ("evaluation.conversations=3", "evaluation.every=1", "evaluation.rows=2", "launcher=local")
    run(tmp_path, *SINGLE, *LEARNED, *VERIFIED, *own, "training.versions=1")
    entries = read_conversations(tmp_path)
    after = [entry for entry in entries if entry["evaluation"] == "after"]
    assert [entry["index"] for entry in after] == [0, 1, 2]
    for entry in entries:
        (turn,) = entry["turns"]
        right = "#" in turn["message"] and turn["message"].rpartition("#")[2] == str(eval(entry["prompt"].rstrip("=")))
        assert entry["success"] == right
        assert entry["return"] == float(right)
    shown = evaluate(tmp_path, conditions=Conditions(conversations=2))["conversations"]
    assert shown == without_place(after[:2])


def test_a_resumed_run_forgets_what_was_said_by_weights_that_are_trained_again(tmp_path: Path) -> None:
    kept = ("launcher=inline", "preset=lockstep", "evaluation.sampled=false", "evaluation.conversations=1")
    run(tmp_path, *SINGLE, *kept, "training.versions=2")
    for name in ("summary.json", "report.html"):
        (tmp_path / name).unlink()
    progress = json.loads((tmp_path / "progress.json").read_text())
    del progress["done"]["rl"], progress["done"]["evaluation_after"]
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    for newer in sorted((tmp_path / "checkpoints").glob("run-*"))[1:]:
        shutil.rmtree(newer)
    first = read_conversations(tmp_path)
    assert [(one["evaluation"], one["version"]) for one in first] == [("before", 0), ("after", 2)]
    config = load_config(SINGLE[0], [*SMALL, *SINGLE[1:], *kept, "training.versions=1", f"resume={tmp_path}"])
    train(validate_run(config), tmp_path)
    assert [(one["evaluation"], one["version"]) for one in read_conversations(tmp_path)] == [
        ("before", 0),
        ("after", 1),
    ]


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    run(tmp_path, *SINGLE, "launcher=inline", "evaluation.conversations=0", "training.versions=1")
    assert not (tmp_path / CONVERSATIONS_FILE).exists()
    assert "conversations" not in evaluate(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "Prompts and answers" not in (tmp_path / "report.html").read_text()
