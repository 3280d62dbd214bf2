"""The language recipes from end to end, as small as they can be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.plugins.language.chat_families import write_family
from tests.plugins.language.test_chat import REWRITES

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config, validate
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.language.conversations import read_conversations
from polyrhythm.training.checkpoint import load_state

SMALL = (
    "policy.layers=1",
    "policy.width=16",
    "policy.heads=2",
    "policy.hidden=16",
    "rollout.rows=8",
    "groups.size=4",
    "training.versions=3",
    "training.mini_batch_samples=8",
    "evaluation.episodes=8",
    "demonstrations.episodes_per_task=40",
    "supervised.steps=4",
    "supervised.warmup_steps=1",
)
SINGLE = ("quickstart_lm", "env.terms=[2,4]", "env.max_new_tokens=24")
AGENT = ("quickstart_agent", "env.terms=[2,4]", "env.max_turns=4", "supervised.steps=60", "supervised.batch_size=16")


def run(folder: Path, recipe: str, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary, and the metrics of the updates."""
    config = load_config(recipe, [*SMALL, *overrides])
    summary = train(validate_run(config), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return summary, [line for line in lines if "throughput/transitions" in line]


@pytest.mark.parametrize("launcher", [pytest.param("inline", marks=long(2, "in one process")), "local"])
def test_one_answer_per_prompt(launcher: str, tmp_path: Path) -> None:
    summary, updates = run(tmp_path, *SINGLE, f"launcher={launcher}")
    assert summary["ledger"]["trained"] == 24
    ended = [line for line in updates if "env/metrics/turns" in line]  # since the update before: there may be none
    assert ended
    assert all(line["env/metrics/turns"] == 1 for line in ended)
    assert all(1 <= line["env/metrics/message_tokens"] <= 24 for line in ended)
    assert all(0 < line["train/actor/entropy_loss"] < 3 for line in updates), "of tokens, not of padding"
    assert summary["after"]["episodes"] == 8


CRITIC = (
    "policy.value_head=true",
    "algorithm.advantage=gae",
    "algorithm.reward_level=action",
    "algorithm.value.coef=0.5",
    "training.optimizer.value_lr=1.0e-2",
)


def test_a_critic_learns_values_that_the_trainer_computes(tmp_path: Path) -> None:
    """Generators know none: what an update compares with is computed before it."""
    _, updates = run(tmp_path, *SINGLE, *CRITIC, "launcher=inline", "training.versions=12")
    losses = [line["train/critic/value_loss"] for line in updates]
    assert sum(losses[-3:]) < sum(losses[:3]) / 2, losses
    assert updates[-1]["train/critic/lr"] > updates[-1]["train/actor/lr"]


def test_own_weights_make_no_mismatch(tmp_path: Path) -> None:
    """Lock-step and on-policy, generator and trainer agree on every log-prob of every message."""
    _, updates = run(tmp_path, *SINGLE, "launcher=inline", "preset=lockstep")
    assert all(abs(line["train/actor/mismatch_kl"]) < 1e-9 for line in updates)


def test_several_turns_with_a_tool(tmp_path: Path) -> None:
    summary, updates = run(tmp_path, *AGENT, "launcher=inline")
    assert summary["ledger"]["trained"] == 24
    assert max(line.get("env/metrics/turns", 0) for line in updates) > 1
    assert all(line.get("env/sample_chunk_steps", 1) <= 4 for line in updates)
    result = evaluate(tmp_path)
    assert {name: result[name] for name in summary["after"]} == summary["after"]


CHAT = (
    *(*AGENT, "env.max_new_tokens=12", "env.max_prompt_tokens=400", "launcher=inline", "preset=lockstep"),
    *("policy.width=32", "supervised.steps=100", "supervised.lr=1.0e-2"),
)


def released(folder: Path) -> Path:
    """A model of random weights in a released one's layout, with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=270, max_position_embeddings=512, **sizes)).save_pretrained(folder)
    return write_family(folder, "chatml")


@pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(True, id="folder"), pytest.param(False, marks=long(4, "random weights"), id="random")],
)
def test_an_agent_speaks_by_a_chat_template(tmp_path: Path, checkpoint: bool) -> None:
    """Demonstrations, training and evaluations alike; each log-prob is that of the tokens that were sampled."""
    torch.manual_seed(0)
    model = released(tmp_path / "model") if checkpoint else write_family(tmp_path / "model", "chatml")
    (tmp_path / "run").mkdir()
    own = (f"env.tokenizer={model}", "env.chat=auto", *([f"policy.checkpoint={model}"] if checkpoint else []))
    summary, updates = run(tmp_path / "run", *CHAT, *own, "training.versions=2")
    assert summary["ledger"]["trained"] == 16
    assert all(abs(line["train/actor/mismatch_kl"]) < 1e-9 for line in updates)
    entries = read_conversations(tmp_path / "run")
    assert any(len(entry["turns"]) > 1 for entry in entries), "the tool was called"
    for entry in entries:
        assert entry["prompt"].startswith("<|im_start|>system\nBe brief.\n<|im_start|>user\n")
        assert entry["prompt"].endswith("=\n<|im_start|>assistant\n"), "the end of a turn is left out, as others are"
        for turn in entry["turns"][:-1]:
            reply = re.fullmatch(r"\n<\|im_start\|>user\n(-?\d+|\?);\n<\|im_start\|>assistant\n", turn["reply"])
            assert reply is not None, turn
    result = evaluate(tmp_path / "run")
    assert {name: result[name] for name in summary["after"]} == summary["after"]


def test_templates_that_drop_reasoning_fail_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "model", "chatml", template=REWRITES["reasoning"][0])
    monkeypatch.chdir(tmp_path)
    own = (*SMALL, *CHAT[1:], f"env.tokenizer={model}", "env.chat=auto")
    for command in (["train"], ["train", "--check"], ["check"], ["sft"], ["demos", "--out", "said.npz"]):
        assert main([*command, CHAT[0], *own]) > 0
        said = capsys.readouterr()
        assert "earlier messages without what stands between <think> and </think>" in said.out + said.err, command
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "recipe", [pytest.param(SINGLE, marks=long(4, "one answer"), id="lm"), pytest.param(AGENT, id="agent")]
)
def test_a_run_that_is_resumed_has_the_ledger_and_weights_of_one_that_is_not(
    recipe: tuple[str, ...], tmp_path: Path
) -> None:
    """Lock-step, with evaluations during training: they and the cut change nothing."""
    own = (*recipe, "launcher=inline", "preset=lockstep", "supervised.steps=4")
    beside = (*own, "evaluation.every=1", "evaluation.every_episodes=4", "evaluation.rows=2")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    expected, _ = run(whole, *own)
    run(cut, *beside, "training.versions=2")
    summary, _ = run(cut, *beside, f"resume={cut}")
    assert summary["ledger"] == expected["ledger"]
    assert summary["ledger"]["trained"] == 24
    first, second = (load_state(folder / "policy.pt")["policy"] for folder in (whole, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)
    entries = json.loads((cut / "evaluations.json").read_text())
    assert entries[-1]["version"] == 3
    assert len(entries) > 1, "some ended beside training"
    assert {entry["greedy"]["episodes"] for entry in entries[:-1]} <= {4, 8}


def test_adapters_alone_travel_and_are_trained(tmp_path: Path) -> None:
    summary, _ = run(tmp_path, *SINGLE, "launcher=inline", "policy.train=lora", "policy.lora.rank=2")
    assert summary["ledger"]["trained"] == 24
    published = load_state(tmp_path / "policy.pt")["policy"]
    assert all(".lora_" in name for name in published)
    assert any(tensor.any() for name, tensor in published.items() if ".lora_B." in name)
    result = evaluate(tmp_path)
    assert {name: result[name] for name in summary["after"]} == summary["after"]


def test_an_action_of_a_message_cannot_be_held() -> None:
    config = load_config(SINGLE[0], [*SMALL, "launcher=inline", "rollout.action_repeat=2"])
    with pytest.raises(
        ConfigError, match=r"rollout\.action_repeat = 2: a step of this environment takes a whole chunk"
    ):
        validate_run(config)


def test_an_advantage_that_needs_a_value_is_refused() -> None:
    config = load_config(SINGLE[0], [*SMALL, "launcher=inline", "algorithm.advantage=gae", "algorithm.value.coef=0.5"])
    with pytest.raises(ConfigError, match=r"advantage = gae, .*: the policy causal_lm has no value; use grpo"):
        validate_run(config)


def test_overlong_messages_cost_in_training_and_not_in_what_episodes_earn(tmp_path: Path) -> None:
    """With a buffer as long as a message may be the penalty is each message's share of it."""
    settings = ("launcher=inline", "algorithm.advantage=maxrl", "algorithm.overlong={tokens: 24, penalty: 0.5}")
    summary, updates = run(tmp_path, *SINGLE, *settings)
    for line in updates:
        assert line["train/actor/overlong_fraction"] == 1.0
        assert -0.5 <= line["train/actor/overlong_penalty"] <= -0.5 / 24
        assert line["train/actor/zero_advantage_fraction"] < 1.0, "messages of unequal lengths tell answers apart"
        assert line.get("env/return", 0.0) >= 0.0
    assert any("env/return" in line for line in updates)
    assert summary["after"]["mean_return"] >= 0.0


def test_overlong_messages_are_of_tokens_and_of_this_environment() -> None:
    longer = load_config(SINGLE[0], [*SMALL, *SINGLE[1:], "launcher=inline", "algorithm.overlong.tokens=25"])
    with pytest.raises(ConfigError, match=r"overlong.tokens = 25: a message has at most 24 tokens .*; lower it"):
        validate_run(longer)
    with pytest.raises(ConfigError, match=r"overlong.tokens = 5: the policy gaussian gives no messages of tokens"):
        validate_run(load_config("reach", ["algorithm.overlong.tokens=5"]))


def test_a_micro_batch_of_tokens_needs_a_policy_that_counts_them() -> None:
    small = load_config(SINGLE[0], [*SMALL, "launcher=inline", "training.micro_batch_tokens=60"])
    validate_run(small)
    other = load_config("reach", ["training.micro_batch_tokens=60"])
    with pytest.raises(ConfigError, match=r"micro_batch_tokens = 60: rows of the policy gaussian do not differ"):
        validate_run(other)


UNEVEN = {
    "name": "uneven",
    "launcher": "inline",
    "env": {"type": "tests.pipeline.judged:UnevenSettings"},
    "policy": {"type": "causal_lm", "layers": 1, "width": 16, "heads": 2, "hidden": 16},
    "rollout": {"rows": 8, "max_dropped": 0},
    "groups": {"size": 4},
    "training": {"versions": 6, "mini_batch_samples": 8},
    "algorithm": {"advantage": "grpo", "value": {"coef": 0.0}},
    "evaluation": {"episodes": 16, "sampled": False},
    "demonstrations": {"episodes_per_task": 64, "keep_failed": True},
    "supervised": {"steps": 2, "batch_size": 8, "warmup_steps": 1},
}


def test_prompts_that_cannot_be_shown_are_counted_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary = train(validate_run(validate(UNEVEN)), tmp_path)
    assert summary["ledger"]["trained"] == 48
    assert summary["ledger"]["dropped"].keys() == {"episode refused"}
    reasons = {one["reason"] for one in summary["set_aside"]}
    assert reasons == {"episode refused"}
    assert not summary["failed_samples"]
    after = summary["after"]
    assert 0 < after["dropped"] < 16
    assert after["dropped"] + after["episodes"] == 16
    told = "\n".join(caplog.messages)
    assert "8 of the first 16 prompts are set aside, as others like them will be: env.max_prompt_tokens = 8" in told
    assert "an episode is set aside: " in told
    dropped = re.search(
        r"(\d+) episodes were dropped, the first since it is refused: (env.max|the prompt|the exp)", told
    )
    assert dropped is not None
    assert 32 < int(dropped[1]) < 64, "three of four"
