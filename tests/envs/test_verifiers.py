"""Tasks of verifiers as text environments; skipped where verifiers is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from polyrhythm.envs.conformance import check_contract
from polyrhythm.envs.text.base import Reply
from polyrhythm.envs.text.verifiers_tasks import VerifiersSettings
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.specs import split_seed

COUNTS = """
import verifiers.v1 as vf
from types import SimpleNamespace


class Tools(vf.ToolsetConfig):
    add: int = 1


class Counter(vf.Toolset[Tools]):
    async def setup_task(self, task):
        self.count = task.start

    @vf.tool
    async def more(self, by: int) -> int:
        \"\"\"Count on.\"\"\"
        self.count += by * self.config.add
        return self.count

    @vf.tool
    def broken(self) -> str:
        raise ValueError("out of order")


class Data(vf.TaskData):
    start: int


class CountTask(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Counter(Tools(add=2))]

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return len(trace.tool_messages) >= 3

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.start + 10))


class Counts(vf.Taskset[CountTask]):
    def load(self):
        for i in range(100):
            yield CountTask(Data(prompt=f"Count from {i}.", start=i))


__all__ = ["Counts"]
"""

GAME = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    secret: int


class GuessTask(vf.Task[Data]):
    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    {second}


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(5):
                if segment.last_reply == str(task.data.secret):
                    break
                segment = await interaction.turn("higher" if int(segment.last_reply) < task.data.secret else "lower")
        interaction.trace.record_reward("found", float(segment.last_reply == str(task.data.secret)), 2.0)


class Guesses(vf.Taskset[GuessTask]):
    def load(self):
        for i in range(100):
            yield GuessTask(Data(prompt=f"Guess ({{i}}).", secret=i))


__all__ = ["Guesses", "GuessEnv"]
"""

TASKSET = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class SumTask(vf.Task[Data]):
    {container}

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for i in range(100):
            yield SumTask(Data(prompt=f"{{i}}+1=", system_prompt="Add.", answer=str(i + 1)))


__all__ = ["Sums"]
"""


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("verifiers")
    (tmp_path / "sum_tasks.py").write_text(TASKSET.format(container=""))
    (tmp_path / "boxed_tasks.py").write_text(TASKSET.format(container="NEEDS_CONTAINER = True"))
    (tmp_path / "count_tasks.py").write_text(COUNTS)
    (tmp_path / "guess_tasks.py").write_text(GAME.format(second=""))
    (tmp_path / "pair_tasks.py").write_text(GAME.format(second="other: vf.AgentConfig = vf.AgentConfig()"))
    monkeypatch.syspath_prepend(tmp_path)
    yield "sum_tasks"
    for name in ("sum_tasks", "boxed_tasks", "count_tasks", "guess_tasks", "pair_tasks"):
        sys.modules.pop(name, None)


def test_without_the_package_the_extra_is_named() -> None:
    try:
        import verifiers  # noqa: F401
    except ImportError:
        told = r"env\.type = verifiers: No module named 'verifiers'; run: .*polyrhythm\[verifiers\]"
        with pytest.raises(MissingError, match=told):
            VerifiersSettings(taskset="sum_tasks").conversation()


def test_an_answer_is_scored_by_the_tasks_own_rewards(taskset: str) -> None:
    env = VerifiersSettings(taskset=taskset)
    task = env.conversation()
    prompt = task.begin(0, 3)
    with closing(env.conversation()) as other:
        assert prompt == other.begin(0, 3)
    first, _, line = prompt.partition("\n")
    assert (first, line[-4:]) == ("Add.", "+1=\n")
    right = str(int(line.partition("+")[0]) + 1)
    for message, reply in (
        (f"{right}\n", Reply(reward=1.25, success=True)),
        ("no", Reply(reward=0.25)),
        ("I do not know", Reply()),
    ):
        assert task.begin(0, 3) == prompt
        assert task.reply(message) == reply
    sides = [{task.begin(0, split_seed(env.spec(), i, held_out=held)) for i in range(40)} for held in (False, True)]
    assert not sides[0] & sides[1]
    task.close()
    findings = list(check_contract(env, 2, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


def said(by: int) -> str:
    return f'I count. <tool_call>{{"name": "counter_more", "arguments": {{"by": {by}}}}}</tool_call>'


@pytest.mark.usefixtures("taskset")
def test_tools_are_called_between_messages() -> None:
    env = VerifiersSettings(taskset="count_tasks", max_turns=6)
    with closing(env.conversation()) as task:
        prompt = task.begin(0, 3)
        assert prompt.startswith("Tools, one a line:\n{")
        assert '"name": "counter_more", "description": "Count on."' in prompt
        start = int(prompt.rstrip().removesuffix(".").rpartition(" ")[2])
        assert task.reply(said(2)) == Reply(f"<tool_response>\n{start + 4}\n</tool_response>\n", done=False)
        assert task.reply(said(3)).text == f"<tool_response>\n{start + 10}\n</tool_response>\n", "it has its state"
        assert task.reply(str(start + 10)) == Reply(reward=1.0, success=True)
        task.begin(0, 3)
        assert "out of order" in task.reply('<tool_call>{"name": "counter_broken"}</tool_call>').text
        assert "no tool ''; there are counter_broken, counter_more" in task.reply("<tool_call>more</tool_call>").text
        assert f"\n{start + 2}\n" in task.reply(said(1)).text, "tools are new in each episode"
        assert task.reply(said(1)) == Reply(), "the task's own rule ends it"
    findings = list(check_contract(env, 2, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


@pytest.mark.usefixtures("taskset")
def test_the_tasksets_own_environment_answers_turn_by_turn() -> None:
    with closing(VerifiersSettings(taskset="guess_tasks", max_turns=8).conversation()) as task:
        prompt = task.begin(0, 5)
        secret = int(prompt.partition("(")[2].partition(")")[0])
        assert task.reply(str(secret - 1)) == Reply("higher\n", done=False)
        assert task.reply(str(secret + 1)) == Reply("lower\n", done=False)
        task.begin(0, 6)  # in the middle of the other
        assert task.begin(0, 5) == prompt
        assert task.reply(f"{secret}") == Reply(reward=2.0, success=True)
        task.begin(0, 5)
        assert [task.reply("-1").done for _ in range(6)] == [False] * 5 + [True]


def test_tasksets_that_cannot_be_used_are_told(taskset: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.taskset = pair_tasks: its tasks need 2 agents \(player, other\)"):
        VerifiersSettings(taskset="pair_tasks").conversation()
    with pytest.raises(ConfigError, match=r"env\.taskset = boxed_tasks: its tasks need a container; use a taskset"):
        VerifiersSettings(taskset="boxed_tasks").conversation()
    with pytest.raises(MissingError, match=r"env\.taskset = no_such_tasks: taskset 'no_such_tasks' not found"):
        VerifiersSettings(taskset="no_such_tasks").conversation()
    with pytest.raises(ConfigError, match=r"(?s)env\.taskset = sum_tasks: .*levels.*; correct env\.taskset"):
        VerifiersSettings(taskset=taskset, options={"levels": 3}).conversation()
