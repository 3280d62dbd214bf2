"""Text environments: turns, lengths, what counts as executed, prompts that are kept apart."""

from __future__ import annotations

import json
import os
import re
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.plugins.language.chat_families import write_family
from tests.plugins.pretrained.small_tokenizer import write_tokenizer

from polyrhythm.envs.base import EpisodeRefused, RowsFailed, batch_traits
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.language.sandbox.tool import SandboxSettings
from polyrhythm.plugins.language.text import Awaited, Reply, TextSettings, enclosed
from polyrhythm.plugins.language.text.batch import TextBatch
from polyrhythm.plugins.language.text.chains import ChainsSettings, calculate
from polyrhythm.plugins.language.text.grids import MOVES, FrozenLakeSettings, Position, Room, Sokoban, SokobanSettings
from polyrhythm.plugins.language.text.gyms import Problem, ReasoningGymSettings, extract
from polyrhythm.plugins.language.text.tokenizers import encodable
from polyrhythm.plugins.language.text.verifiers_talk import read_call
from polyrhythm.plugins.language.text.with_python import WithPython
from polyrhythm.plugins.trial.env_contract import check_contract
from polyrhythm.specs import split_seed

TOOL = {"tool": True, "max_turns": 16, "max_new_tokens": 12, "max_prompt_tokens": 200, "terms": (2, 12)}

#: Accepts what isolation there is, so that its tests run anywhere; that of the sandbox is in test_sandbox.
SANDBOX = {"may_lack": ("namespaces", "landlock", "seccomp"), "wall_s": 600.0}
PYTHON = {**TOOL, "tool": "python", "sandbox": SANDBOX}


class EchoSettings(TextSettings):
    """Repeats the message until it is `x`; `!` raises, `b` and `bb` are answered by characters without an id."""

    type: str = "echo"
    max_new_tokens: int = 4
    max_prompt_tokens: int = 12
    max_turns: int = 3
    alphabet: ClassVar = "abx!;"
    stops: ClassVar = (";",)

    def conversation(self) -> Echo:
        return Echo()


def echoing(conversations: list[Any]) -> TextBatch:
    """A batch of these rows."""
    rows = iter(conversations)

    class Given(EchoSettings):
        def conversation(self) -> Any:
            return next(rows)

    return Given().build(len(conversations))


class Echo:
    def begin(self, task: int, seed: int) -> str:
        return "ab" * (1 + seed % 8)

    def reply(self, message: str) -> Reply:
        if message == "!":
            raise RuntimeError("stuck")
        if message == "xx":
            return Reply(metrics={"typo": 1.0})
        if message == "b":
            return Reply("é", done=False)
        if message == "bb":
            return Reply("à\t\0…\ud800!", done=False)
        return Reply(message, reward=2.0, done=message == "x", success=message == "x")


def echo(seed: int = 0, rows: int = 1) -> TextBatch:
    batch = EchoSettings().build(rows)
    batch.reset(range(rows), [0] * rows, [seed] * rows)
    return batch


def test_a_conversation_that_becomes_too_long_ends_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    batch = echo(seed=3, rows=2)  # prompts of 8 tokens, and room for 12
    for _ in range(2):
        batch.reset(range(2), [0, 0], [3, 3])
        result = batch.step(np.arange(2), messages(batch, "ab;", "ab;"))
        assert result.terminated.all()
        assert result.reward.tolist() == [2.0, 2.0], "with what it has earned"
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("env.max_prompt_tokens = 12: a conversation has 14 tokens after message 1, so it ends there")


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
    [
        ChainsSettings(),
        ChainsSettings(**TOOL),
        ChainsSettings(**PYTHON),
        EchoSettings(max_prompt_tokens=40),
        FrozenLakeSettings(slippery=True),
        SokobanSettings(boxes=2),
    ],
    ids=["chains", "tool", "python", "echo", "frozen_lake", "sokoban"],
)
def test_text_environments_keep_the_contract(settings: TextSettings) -> None:
    findings = list(check_contract(settings, 4, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


def test_a_message_ends_at_its_first_stop_and_the_rest_was_not_executed() -> None:
    batch = echo(rows=3)
    result = batch.step([0, 1, 2], messages(batch, "x$", "ab;", "aaaa"))
    assert result.executed is not None
    assert result.executed.sum(1).tolist() == [2, 3, 4]
    assert result.terminated.tolist() == [True, False, True], "a message that was cut ends the episode"
    assert not result.truncated.any(), "with its reward: no value of the next observation is added"
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


def test_what_was_said_has_messages_that_were_cut_and_replies_that_nobody_saw() -> None:
    batch = echo(rows=2)
    batch.step([0, 1], messages(batch, "a$", "aaaa"))
    batch.step([0], messages(batch, "x$"))
    assert batch.texts(0) == ("ab", "a", "a", "x", "x")
    assert batch.texts(1) == ("ab", "aaaa", "")
    batch.reset([0], [0], [1])
    assert batch.texts(0) == ("abab",)


def test_turns_and_context_are_limited() -> None:
    batch = echo()
    assert not batch.step([0], messages(batch, "$")).truncated[0]
    assert not batch.step([0], messages(batch, "$")).truncated[0]
    assert batch.step([0], messages(batch, "$")).truncated[0], "three turns"
    batch = echo(seed=4)  # a prompt of 10 tokens
    assert batch.step([0], messages(batch, "a$")).terminated[0], "message and reply do not fit"
    assert batch.transcript(0) == "ab" * 5


def test_a_conversation_that_raises_fails_alone() -> None:
    batch = echo(rows=2)
    with pytest.raises(RowsFailed) as raised:
        batch.step([0, 1], messages(batch, "!$", "x$"))
    assert list(raised.value.errors) == [0]
    assert raised.value.result is not None
    assert raised.value.result.success.tolist() == [False, True]


def test_a_metric_that_is_not_declared_fails_its_row_alone() -> None:
    batch = echo(rows=2)
    with pytest.raises(RowsFailed) as raised:
        batch.step([0, 1], messages(batch, "xx$", "x$"))
    assert list(raised.value.errors) == [0]
    assert "has the metrics ['typo']; declare them in the settings" in str(raised.value.errors[0])


def test_what_a_reply_has_without_an_id_is_replaced_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    batch = echo(rows=2)
    for message, context in (("b$", "abb"), ("bb$", "abbbba!")):
        batch.step([0], messages(batch, message))
        assert batch.transcript(0) == context, "é has no form here, of à there is a"
    assert batch.texts(0) == ("ab", "b", "", "bb", "a!"), "what was shown, not what was said"
    (told,) = caplog.messages
    assert told.startswith("a reply has what is without an id in the characters 'abx!;', so it is shown otherwise: ''")


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("ab" * 8, "env.max_prompt_tokens = 12: the prompt of task echo, seed 7, has 16 tokens; raise it"),
        ("ab?", "the prompt of task echo, seed 7, cannot be encoded: '?' is not among the characters 'abx!;'; add it"),
        ("é?àüñçø?", "'é', '?', 'à', 'ü', 'ñ' and 2 more are not among"),
        ("", "the prompt of task echo, seed 7, is empty; give it a text"),
    ],
)
def test_a_prompt_that_cannot_be_shown_whole_is_refused_alone(prompt: str, told: str) -> None:
    batch = echo(rows=2)
    batch.conversations[0].begin = lambda task, seed: prompt  # type: ignore[method-assign]
    with pytest.raises(RowsFailed) as raised:
        batch.reset([0, 1], [0, 0], [7, 1])
    assert list(raised.value.errors) == [0]
    assert isinstance(raised.value.errors[0], EpisodeRefused)
    assert told in str(raised.value.errors[0])
    assert batch.transcript(1) == "abab"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("aaaaa", r"env\.max_new_tokens = 4: the expert's message has 6 tokens with its end; raise it to 6"),
        ("a?", r"the expert's message cannot be encoded: '\?' is not among the characters"),
    ],
)
def test_a_message_of_the_expert_that_cannot_be_given_is_refused_alone(message: str, told: str) -> None:
    batch = echoing([Taught("x"), Taught(message)])
    batch.reset([0, 1], [0, 0], [0, 0])
    with pytest.raises(RowsFailed, match=told) as raised:
        batch.expert_actions([0, 1])
    assert {row: isinstance(error, EpisodeRefused) for row, error in raised.value.errors.items()} == {1: True}
    assert raised.value.result[0, :, 0].tolist() == [3, 0, 0, 0]


class Taught(Echo):
    def __init__(self, message: str) -> None:
        self.expert = lambda: message


@pytest.mark.parametrize(
    ("lengths", "told"),
    [([1] * 16, ""), ([1, 9] * 8, "8 of the first 16 prompts are set aside"), ([9] * 9 + [1] * 7, "refused")],
)
def test_a_few_prompts_that_are_too_long_are_told_before_the_start(
    lengths: list[int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Some(EchoSettings):
        def conversation(self) -> Any:
            return type("Some", (Echo,), {"begin": lambda self, task, seed: "ab" * lengths[seed]})()

    if told == "refused":
        with pytest.raises(
            ConfigError, match=r"seed 0, has 18 tokens; raise it .* \(9 of the first 16 prompts are like"
        ):
            Some().check()
        return
    Some().check()
    assert [line[: len(told)] for line in caplog.messages] == [told] * bool(told)


@pytest.mark.parametrize("count", [1, 1000, 20_000])
@pytest.mark.parametrize(
    "text",
    ["<t>", "</t>", "<t>a</t>", "<t><t>a</t></t>", "</t><t>", "<t", "<t>a</t>b<t>", "<<t>></t>"],
)
def test_marked_parts_are_those_of_the_regular_expression(text: str, count: int) -> None:
    """Compared where that is quick; unclosed marks, whose work grows with their square there, in any number."""
    found = list(enclosed(text * count, "<t>", "</t>"))
    if count < 20_000 or "</t>" in text:
        assert found == re.findall("<t>(.*?)</t>", text * count, re.DOTALL)
    else:
        assert found == []


class Counted(str):
    """Counts the characters that are searched."""

    searched = 0

    def find(self, what: str, start: int = 0) -> int:  # type: ignore[override]
        found = super().find(what, start)
        Counted.searched += (found if found >= 0 else len(self)) + len(what) - start
        return found


@pytest.mark.parametrize("text", ["<t>", "<t></t>", "</t><t>", "<t><t></t>", "x</t>"])
def test_the_work_of_finding_marked_parts_grows_with_the_length(text: str) -> None:
    for count in (1, 100, 10_000):
        Counted.searched = 0
        list(enclosed(Counted(text * count), "<t>", "</t>"))
        assert Counted.searched <= 3 * len(text) * count + 10


def prompts(settings: ChainsSettings, *, held_out: bool) -> set[str]:
    batch = settings.build(1)
    found = set()
    for seed in range(300):
        batch.reset([0], [0], [split_seed(seed * 7919, held_out=held_out)])
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
    assert batch_traits(batch).expert
    batch.reset(range(episodes), [0] * episodes, range(episodes))
    found: dict[int, tuple[str, bool]] = {}
    rows = np.arange(episodes)
    while len(rows):
        actions = batch.expert_actions(rows)
        last = batch.tokenizer.decode(actions[0, :, 0].tolist())
        result = batch.step(rows, actions)
        for i, row in enumerate(rows):
            if result.terminated[i] or result.truncated[i]:
                found[int(row)] = (batch.transcript(int(row)) + last * (i == 0), bool(result.success[i]))
        rows = rows[~(result.terminated | result.truncated)]
    batch.close()
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


def test_python_answers_the_teacher_as_the_calculator_does() -> None:
    assert play(ChainsSettings(**PYTHON), 12) == play(ChainsSettings(**TOOL), 12)


def test_python_computes_whole_expressions_in_a_chain() -> None:
    chain = ChainsSettings(**PYTHON).conversation()
    chain.begin(0, 1)
    for call, told in (("<1+2-3+40>", "40"), ("<007>", "?"), ("<->", "?"), ("<1;2>", "2"), ("<#>", "?"), ("<>", "?")):
        assert chain.reply(call) == Reply(f"{told};", done=False)
    chain.close()


class Guess:
    """Asks for a number, in one message."""

    closed = False

    def begin(self, task: int, seed: int) -> str:
        return "2**64?\n"

    def reply(self, message: str) -> Reply:
        return Reply(reward=1.0, success=message == "18446744073709551616")

    def close(self) -> None:
        self.closed = True


def test_code_in_a_message_is_run_and_its_output_is_the_reply() -> None:
    inner = Guess()
    found = WithPython(inner, SandboxSettings(**SANDBOX))
    assert not found.traits.expert, "the inner one has no teacher"
    assert found.begin(0, 0) == "2**64?\n"
    message = "<python>1</python> or\n<python>\nx = 64\n2**x\n</python>"
    shown = Reply("<output>\n18446744073709551616\n</output>\n", done=False)
    found.prepare(message)
    assert found.reply(message) == shown == found.reply(message), "prepared or not"
    found.prepare("<python>import time; time.sleep(99)</python>")
    found.begin(0, 1)  # the call is given up
    assert found.reply("18446744073709551616").success
    assert "ZeroDivisionError" in found.reply("<python>1/0</python>").text
    found.close()
    assert inner.closed


class GuessSettings(TextSettings):
    type: str = "guess"
    max_new_tokens: int = 200
    max_prompt_tokens: int = 8000
    max_turns: int = 3

    def conversation(self) -> Any:
        return WithPython(Guess(), SandboxSettings(**SANDBOX))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print('a\\tb\\0c', '\\u2026')", "a b?c ...\n"),
        ("import os\nos.write(1, bytes(range(256)))", "256\n"),
        ("raise ValueError('\\ud800 caf\\xe9')", "cafe\n"),
        ("print('x' * 5000)", "xxx..."),
        ("\t\u20ac = \0 1", "\n"),
    ],
)
def test_whatever_code_prints_its_sample_goes_on(code: str, shown: str) -> None:
    """What counts as a fault of the environment is not for the policy to decide."""
    batch = GuessSettings().build(1)
    batch.reset([0], [0], [0])
    message = np.zeros((1, 200, 1), np.int64)
    ids = batch.tokenizer.encode(encodable(batch.tokenizer, f"<python>{code}</python>"))
    message[0, : len(ids), 0] = ids
    result = batch.step([0], message)
    assert not result.terminated[0]
    reply = batch.texts(0)[2]
    assert reply.startswith("<output>\n")
    assert shown in reply
    batch.close()


class Unreadable(Problem):
    """Of a data set whose scorer raises at some answers."""

    class _dataset:  # noqa: N801 - that of the class above
        @staticmethod
        def score_answer(answer: str | None, entry: Any) -> float:
            return 1.0 / len(answer or "")


def test_an_answer_at_which_the_scorer_raises_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    problem = Unreadable(ReasoningGymSettings(answer_tag=""))
    assert [problem.reply(message) for message in ("", "4", "")] == [Reply(), Reply(reward=1.0, success=True), Reply()]
    assert [message[:31] for message in caplog.messages] == ["chain_sum cannot score '', so i"], "told once"


class PrepareSettings(EchoSettings):
    """Notes when it was told to prepare; `!` raises then."""

    def conversation(self) -> Any:
        class Preparing(Echo):
            def prepare(self, message: str) -> None:
                told.append(f"prepare {message}")
                if message == "!":
                    raise RuntimeError("no sandbox")

            def reply(self, message: str) -> Reply:
                told.append(f"reply {message}")
                return super().reply(message)

        return Preparing()


told: list[str] = []


def test_all_rows_prepare_before_the_first_replies() -> None:
    told.clear()
    batch = PrepareSettings().build(4)
    batch.reset(range(4), [0] * 4, [0] * 4)
    with pytest.raises(RowsFailed) as raised:
        batch.step(range(4), messages(batch, "a$", "!$", "x$", "aaaa"))
    assert told == ["prepare a", "prepare !", "prepare x", "reply a", "reply x"]
    assert list(raised.value.errors) == [1]
    assert raised.value.result is not None
    assert raised.value.result.success.tolist() == [False, False, True, False]


class Calls(Echo):
    """`b` is answered once a byte has come. ended: write ends, in the order of the calls; drops: so many, of which the
    third one raises."""

    ended: ClassVar[list[int]] = []
    drops: ClassVar = 0
    patience_s = 600.0

    def __init__(self) -> None:
        self._call = -1

    def prepare(self, message: str) -> None:
        if message == "b":
            self._call, end = os.pipe()
            Calls.ended.append(end)

    def awaits(self) -> Awaited | None:
        return Awaited(self._call, time.monotonic() + self.patience_s) if self._call >= 0 else None

    def drop(self) -> None:
        Calls.drops += 1
        self.close()
        if Calls.drops == 3:
            raise OSError("it cannot be ended")

    def reply(self, message: str) -> Reply:
        if message == "b":
            os.read(self._call, 1)
            self.close()
            return Reply("b;", done=False)
        return super().reply(message)

    def begin(self, task: int, seed: int) -> str:
        self.close()
        return super().begin(task, seed)

    def close(self) -> None:
        if self._call >= 0:
            os.close(self._call)
        self._call = -1


class CallSettings(EchoSettings):
    patience_s: float = 600.0

    def conversation(self) -> Any:
        made = Calls()
        made.patience_s = self.patience_s
        return made


def calling(rows: int, patience_s: float = 600.0) -> TextBatch:
    batch = CallSettings(patience_s=patience_s).build(rows)
    batch.reset(range(rows), [0] * rows, [0] * rows)
    Calls.ended.clear()
    Calls.drops = 0
    return batch


def readable(batch: TextBatch) -> bool:
    return bool(select.select([batch.fileno()], [], [], 0)[0])


def test_a_row_waits_until_its_call_has_ended_and_others_do_not() -> None:
    batch = calling(3)
    said = messages(batch, "b$", "a$", "b$")
    batch.begin_step([0, 1, 2], said)
    batch.begin_step([0, 1, 2], said)
    assert len(Calls.ended) == 2, "told once"
    assert [batch.waits([row]) for row in range(3)] == [True, False, True]
    assert not readable(batch)
    batch.step([1], said[1:2])
    os.write(Calls.ended[1], b"!")
    assert readable(batch)
    assert [batch.waits(rows) for rows in ([0], [2], [0, 2])] == [True, False, True]
    assert not readable(batch), "it wakes once"
    batch.step([2], said[2:])
    batch.begin_step([2], said[2:])
    assert batch.waits([2]), "of the next message"
    batch.reset([0, 2], [0, 0], [0, 0])
    assert not batch.waits([0, 1, 2])
    batch.close()


def test_whoever_asks_of_no_rows_is_woken_once() -> None:
    batch = calling(1)
    batch.begin_step([0], messages(batch, "b$"))
    assert not batch.waits([])
    os.write(Calls.ended[0], b"!")
    assert readable(batch)
    assert not batch.waits(())
    assert not readable(batch)
    batch.close()


def test_a_dropped_row_gives_up_its_call_and_wakes_nobody(caplog: pytest.LogCaptureFixture) -> None:
    batch = calling(5)
    said = messages(batch, *["b$"] * 4, "a$")
    batch.begin_step(range(4), said[:4])
    for number in (0, 1):
        os.write(Calls.ended[number], b"!")
    batch.drop_step([0, 1, 2])
    assert not readable(batch)
    assert [batch.waits([row]) for row in range(5)] == [False, False, False, True, False]
    assert Calls.drops == 3
    assert "row 2: the conversation's drop raised" in caplog.text
    for number in range(3):
        with pytest.raises(BrokenPipeError):
            os.write(Calls.ended[number], b"!")
    batch.drop_step([0, 4])
    assert Calls.drops == 3, "nothing was prepared for them"
    os.write(Calls.ended[3], b"!")
    batch.step([3], said[3:4])
    batch.close()


def test_a_dropped_call_of_the_python_tool_frees_its_place() -> None:
    sandbox = SandboxSettings(**{**SANDBOX, "at_a_time": 1, "wall_s": 3600.0})
    chain = ChainsSettings(**{**PYTHON, "sandbox": sandbox}).conversation()
    first, second = WithPython(Echo(), sandbox), WithPython(Echo(), sandbox)
    sleeping = "__import__('time').sleep(3600)"
    try:
        chain.begin(0, 0)
        chain.prepare(f"<{sleeping}>")
        first.prepare(f"<python>{sleeping}</python>")
        second.prepare("<python>print(7)</python>")
        chain.drop()
        first.drop()
        assert chain.awaits() is first.awaits() is None
        awaited = second.awaits()
        assert awaited is not None
        assert select.select([awaited.fileno], [], [], 60)[0], "it has to wait for neither"
        assert second.reply("<python>print(7)</python>").text == "<output>\n7\n</output>\n"
    finally:
        for row in (chain, first, second):
            row.close()


def test_a_call_that_cannot_be_watched_fails_its_row_alone() -> None:
    batch = calling(3)
    said = messages(batch, "b$", "b$", "a$")
    with Path(__file__).open() as file:  # epoll takes no regular file
        batch.conversations[0].awaits = lambda: Awaited(file.fileno(), time.monotonic() + 600)  # type: ignore[attr-defined]
        batch.begin_step(range(3), said)
    assert Calls.drops == 1, "its call has no use"
    assert [batch.waits([row]) for row in range(3)] == [False, True, False]
    os.write(Calls.ended[1], b"!")
    with pytest.raises(RowsFailed) as raised:
        batch.step(range(3), said)
    assert {row: type(error) for row, error in raised.value.errors.items()} == {0: PermissionError}
    batch.close()


def test_what_is_awaited_for_too_long_is_left_to_the_reply() -> None:
    batch = calling(1, patience_s=0.0)
    batch.begin_step([0], messages(batch, "b$"))
    assert not batch.waits([0])
    batch.close()


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
    from polyrhythm.plugins.language.text import tokenizers

    assert tokenizers.folder_tokenizer(str(tmp_path)).ends == (2, 3)


@pytest.mark.parametrize("size", [3, 5])
def test_the_expert_crosses_a_frozen_lake(size: int) -> None:
    settings = FrozenLakeSettings(size=size)
    lakes = set()
    for seed in range(20):
        lake = settings.conversation()
        prompt = lake.begin(0, split_seed(seed, held_out=seed % 2 == 0))
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


@pytest.mark.parametrize(
    "settings",
    [
        SokobanSettings(),
        SokobanSettings(boxes=2, shortest=6),
        SokobanSettings(size=7, boxes=3, walls=0.05, max_turns=60),
    ],
)
def test_every_room_is_solved_by_its_teacher(settings: SokobanSettings) -> None:
    rooms = set()
    for seed in range(20):
        room = settings.conversation()
        own_seed = split_seed(seed, held_out=seed % 2 == 0)
        prompt = room.begin(0, own_seed)
        rooms.add((prompt, seed % 2))
        assert len(prompt) == settings.size * (settings.size + 1)
        assert (prompt.count("$"), prompt.count("*")) == (settings.boxes, 0), "no box is on a goal at the beginning"
        assert prompt.count(".") + prompt.count("+") == settings.boxes
        assert prompt == settings.conversation().begin(0, own_seed)
        moves = 0
        answer = Reply(done=False)
        while not answer.done:
            assert not answer.reward
            answer = room.reply(room.expert())
            moves += 1
        assert (answer.reward, answer.success) == (1.0, True)
        assert settings.shortest <= moves <= settings.max_turns
    assert not {room for room, side in rooms if side} & {room for room, side in rooms if not side}
    assert len(rooms) > 15


def sokoban(*lines: str) -> Sokoban:
    """A conversation in a room that is drawn."""
    found = SokobanSettings(size=5).conversation()
    cells = {(i, j): c for i, line in enumerate(lines) for j, c in enumerate(line)}

    def fields(characters: str) -> frozenset[tuple[int, int]]:
        return frozenset(place for place, c in cells.items() if c in characters)

    position = Position(next(iter(fields("@+"))), fields("$*"))
    found.enter(Room(5, fields("-.$*@+"), fields(".*+"), position, ()))
    return found


def test_boxes_are_pushed_one_at_a_time_and_never_through_walls() -> None:
    room = sokoban("#####", "#@$-#", "#-$.#", "#-.-#", "#####")
    assert room.reply("I go up").text == "#####\n#@$-#\n#-$.#\n#-.-#\n#####\n", "a wall"
    assert room.reply("no word of a direction").text == room.reply("left\n").text
    assert room.reply("up or right\n").text == "#####\n#-@$#\n#-$.#\n#-.-#\n#####\n"
    assert room.reply("right\n").text == "#####\n#-@$#\n#-$.#\n#-.-#\n#####\n", "the wall is behind the box"
    answer = room.reply("down\n")
    assert (answer.text, answer.done) == ("#####\n#--$#\n#-@.#\n#-*-#\n#####\n", False)
    assert room.expert() == "up\n", "a box in a corner: no way is found"
    assert room.reply("right\n").text.splitlines()[2] == "#--+#"
    two = sokoban("######", "#@$$-#", "#-..-#", "#----#", "######")
    assert two.reply("right\n").text.startswith("#####\n#@$$"), "two boxes in a row"


def test_the_teacher_finds_its_way_back() -> None:
    room = SokobanSettings(walls=0.0, size=7, max_turns=40).conversation()
    room.begin(0, 3)
    assert not room.reply(next(word for word in MOVES if f"{word}\n" != room.expert())).done
    answer = Reply(done=False)
    for _ in range(60):
        answer = room.reply(room.expert())
        if answer.done:
            break
    assert answer.success


def test_rooms_that_cannot_be_made_are_told() -> None:
    with pytest.raises(ConfigError, match=r"env\.boxes = 8: no room of 500 .* raise env\.size"):
        SokobanSettings(size=5, boxes=8).conversation().begin(0, 0)
    with pytest.raises(ValueError, match="shortest = 30: it is more than max_turns"):
        SokobanSettings(shortest=30)


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
    sides = [{problem.begin(0, split_seed(i, held_out=held)) for i in range(60)} for held in (False, True)]
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


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', "add"),
        ('{"name": "\\ud800"}', ""),
        ('{"name": "add", "arguments": {"\\udfff": [1]}}', ""),
        ('{"name": "\\ud83d\\ude00"}', "\U0001f600"),
        ("9" * 5000, ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_call_that_is_no_text_is_none(call: str, name: str) -> None:
    assert read_call(call)[0] == name


def test_prompts_that_are_too_long_are_told_before_the_start() -> None:
    ChainsSettings().check()
    told = r"env\.max_prompt_tokens = 6: the prompt of task chains, seed \d+, has \d+ tokens; raise it"
    with pytest.raises(ConfigError, match=told):
        ChainsSettings(max_prompt_tokens=6).check()


class Borrowed:
    """A conversation whose `reply` is an attribute of the object."""

    def __init__(self) -> None:
        self.reply: Any = lambda message: None

    def begin(self, task: int, seed: int) -> str:
        return "ab"


def test_a_reply_that_is_no_method_of_its_class_is_named_too() -> None:
    batch = echoing([Borrowed()])
    batch.reset([0], [0], [0])
    with pytest.raises(RowsFailed) as failed:
        batch.step([0], np.full((1, batch.spec.chunk, 1), batch.spec.action.stops[0]))
    assert f"its reply ({__file__}, line" in str(failed.value.errors[0])


@pytest.mark.parametrize("prompt", [[{"content": "ab"}], [{"role": "user", "content": None}], ["ab"], None])
def test_turns_without_what_a_turn_needs_fail_their_row_in_one_sentence(prompt: Any, tmp_path: Path) -> None:
    folder = str(write_family(tmp_path, "chatml"))
    batch = EchoSettings(tokenizer=folder, chat="auto", max_prompt_tokens=200).build(2)
    batch.conversations[0].begin = lambda task, seed: prompt  # type: ignore[method-assign]
    with pytest.raises(RowsFailed) as raised:
        batch.reset([0, 1], [0, 0], [1, 1])
    (told,) = raised.value.errors.values()
    assert re.match(r"env\.type = .*: its begin \(.*test_text\.py, line \d+\) returned the turn ", str(told))
    assert "give each turn a role and a content" in str(told)
