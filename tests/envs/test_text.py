"""Text environments: turns, lengths, what counts as executed, prompts that are kept apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.policies.small_tokenizer import write_tokenizer

from polyrhythm.envs.base import Expert, RowsFailed
from polyrhythm.envs.conformance import check_contract
from polyrhythm.envs.text import Reply, TextSettings
from polyrhythm.envs.text.batch import TextBatch
from polyrhythm.envs.text.chains import ChainsSettings, calculate
from polyrhythm.envs.text.frozen_lake import FrozenLakeSettings
from polyrhythm.envs.text.reasoning_gym_tasks import ReasoningGymSettings, extract
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.specs import split_seed

TOOL = {"tool": True, "max_turns": 16, "max_new_tokens": 12, "max_prompt_tokens": 200, "terms": (2, 12)}


class EchoSettings(TextSettings):
    """Repeats the message until it is `x`; `!` raises, `b` is answered by a character without an id."""

    type: str = "echo"
    max_new_tokens: int = 4
    max_prompt_tokens: int = 12
    max_turns: int = 3
    alphabet: ClassVar = "abx!;"
    stops: ClassVar = (";",)

    def conversation(self) -> Echo:
        return Echo()


class Echo:
    def begin(self, task: int, seed: int) -> str:
        return "ab" * (1 + seed % 8)

    def reply(self, message: str) -> Reply:
        if message == "!":
            raise RuntimeError("stuck")
        if message == "b":
            return Reply("é", done=False)
        return Reply(message, reward=2.0, done=message == "x", success=message == "x")


def echo(seed: int = 0, rows: int = 1) -> TextBatch:
    batch = EchoSettings().build(rows)
    batch.reset(range(rows), [0] * rows, [seed] * rows)
    return batch


def messages(batch: TextBatch, *texts: str) -> Any:
    """Actions of these messages, with garbage behind their ends."""
    tokenizer = EchoSettings().text_tokenizer()
    found = np.full((len(texts), 4, 1), 2)
    for i, text in enumerate(texts):
        ids = tokenizer.encode(text.replace("$", ""))
        ids += [0] * text.endswith("$")
        found[i, : len(ids), 0] = ids
    return found


@pytest.mark.parametrize(
    "settings",
    [ChainsSettings(), ChainsSettings(**TOOL), EchoSettings(max_prompt_tokens=40), FrozenLakeSettings(slippery=True)],
    ids=["chains", "tool", "echo", "frozen_lake"],
)
def test_text_environments_keep_the_contract(settings: TextSettings) -> None:
    findings = list(check_contract(settings, 4, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


def test_a_message_ends_at_its_first_stop_and_the_rest_was_not_executed() -> None:
    batch = echo(rows=3)
    result = batch.step([0, 1, 2], messages(batch, "x$", "ab;", "aaaa"))
    assert result.executed is not None
    assert result.executed.sum(1).tolist() == [2, 3, 4]
    assert result.terminated.tolist() == [True, False, False]
    assert result.truncated.tolist() == [False, False, True], "a message that was cut ends the episode"
    assert result.reward.tolist() == [2.0, 2.0, 0.0]
    assert result.metrics["cut"].tolist() == [0.0, 0.0, 1.0]


def test_the_next_prompt_is_the_conversation_so_far_token_by_token() -> None:
    batch = echo()
    assert batch.transcript(0) == "ab"
    batch.step([0], messages(batch, "a;"))
    assert batch.transcript(0) == "aba;a;"
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    batch.observe([0], out)
    assert out["length"][0] == 6
    assert out["turn"][0] == 1
    assert not out["tokens"][0, 6:].any()


def test_turns_and_context_are_limited() -> None:
    batch = echo()
    assert not batch.step([0], messages(batch, "$")).truncated[0]
    assert not batch.step([0], messages(batch, "$")).truncated[0]
    assert batch.step([0], messages(batch, "$")).truncated[0], "three turns"
    batch = echo(seed=4)  # a prompt of 10 tokens
    assert batch.step([0], messages(batch, "a$")).truncated[0], "message and reply do not fit"
    assert batch.transcript(0) == "ab" * 5


@pytest.mark.parametrize("message", ["!$", "b$"])
def test_a_conversation_that_raises_fails_alone(message: str) -> None:
    batch = echo(rows=2)
    with pytest.raises(RowsFailed) as raised:
        batch.step([0, 1], messages(batch, message, "x$"))
    assert list(raised.value.errors) == [0]
    assert raised.value.result is not None
    assert raised.value.result.success.tolist() == [False, True]


def test_a_prompt_beyond_the_limit_is_refused_with_its_length() -> None:
    with pytest.raises(ConfigError, match=r"env.max_prompt_tokens = 12: .* seed 7, has 16 tokens; raise it"):
        echo(seed=7)


def test_a_character_without_an_id_is_named() -> None:
    class Odd(EchoSettings):
        def conversation(self) -> Any:
            return type("Odd", (Echo,), {"begin": lambda self, task, seed: "ab?"})()

    with pytest.raises(RowsFailed) as raised:
        Odd().build(1).reset([0], [0], [0])
    assert "'?' is not among the characters 'abx!;'; add it" in str(raised.value.errors[0])


def prompts(settings: ChainsSettings, *, held_out: bool) -> set[str]:
    batch = settings.build(1)
    found = set()
    for seed in range(300):
        batch.reset([0], [0], [split_seed(batch.spec, seed * 7919, held_out=held_out)])
        found.add(batch.transcript(0))
    return found


def test_no_prompt_of_an_evaluation_occurs_in_training() -> None:
    settings = ChainsSettings(terms=(2, 3))
    training, evaluation = prompts(settings, held_out=False), prompts(settings, held_out=True)
    assert len(evaluation) > 50, "prompts, of which short chains have few"
    assert not training & evaluation


def play(settings: ChainsSettings, episodes: int) -> list[tuple[str, bool]]:
    """Transcript and success of the expert's episodes."""
    batch = settings.build(episodes)
    assert isinstance(batch, Expert)
    batch.reset(range(episodes), [0] * episodes, range(episodes))
    found: dict[int, tuple[str, bool]] = {}
    rows = np.arange(episodes)
    while len(rows):
        actions = batch.expert_actions(rows)
        last = batch._tokenizer.decode(actions[0, :, 0].tolist())
        result = batch.step(rows, actions)
        for i, row in enumerate(rows):
            if result.terminated[i] or result.truncated[i]:
                found[int(row)] = (batch.transcript(int(row)) + last * (i == 0), bool(result.success[i]))
        rows = rows[~(result.terminated | result.truncated)]
    return [found[row] for row in range(episodes)]


def test_the_teacher_without_tool_mostly_gives_up() -> None:
    successes = [success for _, success in play(ChainsSettings(), 300)]
    assert 0.25 < np.mean(successes) < 0.5


def test_the_teacher_with_tool_mostly_gives_up_after_a_call() -> None:
    episodes = play(ChainsSettings(**TOOL), 300)
    assert 0.25 < np.mean([success for _, success in episodes]) < 0.5
    assert all("<" in text for text, _ in episodes)


@pytest.mark.parametrize(
    ("call", "result"), [("<8-2>", "6"), ("<13+9>", "22"), ("<2-8>", "-6"), ("<8*2>", "?"), ("<8-2", "?"), ("<->", "?")]
)
def test_the_calculator(call: str, result: str) -> None:
    assert calculate(call) == result


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"terms": (5, 3)}, "terms"), ({"tool": True}, "max_turns"), ({"max_turns": 3}, "max_turns")],
)
def test_settings_that_contradict_each_other_are_refused(settings: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ChainsSettings(**settings)


def test_a_folders_tokenizer_needs_an_end_of_text(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="there is no such folder"):
        EchoSettings(tokenizer=str(tmp_path / "none")).spec()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        EchoSettings(tokenizer=str(tmp_path)).spec()
    write_tokenizer(tmp_path)
    for name in ("tokenizer_config.json", "generation_config.json", "config.json", "special_tokens_map.json"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="names no end-of-text token, so no message would end; set eos_token_id"):
        EchoSettings(tokenizer=str(tmp_path)).spec()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    from polyrhythm.envs.text import tokenizers

    tokenizers._loaded.cache_clear()
    assert tokenizers.folder_tokenizer(str(tmp_path)).ends == (2, 3)


@pytest.mark.parametrize("size", [3, 5])
def test_the_expert_crosses_a_frozen_lake(size: int) -> None:
    settings = FrozenLakeSettings(size=size)
    lakes = set()
    for seed in range(20):
        lake = settings.conversation()
        prompt = lake.begin(0, split_seed(settings.spec(), seed, held_out=seed % 2 == 0))
        lakes.add((prompt, seed % 2))
        assert prompt.startswith("P")
        assert (len(prompt), prompt[-2]) == (size * (size + 1), "G")
        if "left" not in (move := lake.expert()):
            stays = lake.reply("stay there")
            assert (stays.text, stays.done) == (prompt, False)
        for _ in range(settings.max_turns):
            answer = lake.reply(move)
            if answer.done:
                break
            move = lake.expert()
        assert (answer.reward, answer.success, answer.done) == (1.0, True, True)
        lake.close()
    assert not {lake for lake, side in lakes if side} & {lake for lake, side in lakes if not side}


def test_a_hole_ends_the_walk() -> None:
    lake = FrozenLakeSettings(frozen=0.5).conversation()
    fell = 0
    for seed in range(6):
        lake.begin(0, seed)
        replies = [lake.reply("down")]
        while len(replies) < 4 and not replies[-1].done:
            replies.append(lake.reply("down"))
        fell += replies[-1].done
        assert not any(reply.success for reply in replies)
    assert fell
    lake.close()


def test_problems_of_reasoning_gym_are_scored_by_their_data_sets() -> None:
    pytest.importorskip("reasoning_gym")
    env = ReasoningGymSettings(datasets=["chain_sum", "countdown"])
    assert [task.name for task in env.spec().tasks] == ["chain_sum", "countdown"]
    problem = env.conversation()
    for task in range(2):
        prompt = problem.begin(task, 7)
        assert prompt == env.conversation().begin(task, 7) != problem.begin(task, 8)
        assert problem.reply(problem.expert()) == Reply(reward=1.0, success=True)
        assert not problem.reply("I do not know").success
    sides = [{problem.begin(0, split_seed(env.spec(), i, held_out=held)) for i in range(60)} for held in (False, True)]
    assert not sides[0] & sides[1]
    findings = list(check_contract(env, 2, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


@pytest.mark.parametrize(
    ("datasets", "told"),
    [("chain_sums", r"env\.datasets = chain_sums: .* such as chain_sum"), ({"chain_sum": {"min_term": 2}}, "min_term")],
)
def test_data_sets_that_do_not_exist_are_refused(datasets: Any, told: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=told):
        ReasoningGymSettings(datasets=datasets).spec()


def test_an_answer_stands_in_the_last_pair_of_tags() -> None:
    assert extract("a <answer>1</answer> or <answer> 2\n</answer>.", "answer") == "2"
    assert extract("<answer>1", "answer") is None
    assert extract(" 3 ", "") == "3"


def test_prompts_that_are_too_long_are_told_before_the_start() -> None:
    ChainsSettings().check()
    told = r"env\.max_prompt_tokens = 6: the prompt of task chains, seed \d+, has \d+ tokens; raise it"
    with pytest.raises(ConfigError, match=told):
        ChainsSettings(max_prompt_tokens=6).check()
