"""Tasks of verifiers as text environments; skipped where verifiers is not installed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.language.text.conversation import Reply
from polyrhythm.plugins.language.text.verifiers_talk import SharedTools
from polyrhythm.plugins.language.text.verifiers_tasks import VerifiersSettings
from polyrhythm.plugins.trial.env_contract import check_contract
from polyrhythm.specs import split_seed

COUNTS = """
import verifiers.v1 as vf
from types import SimpleNamespace


closed = []


class Tools(vf.ToolsetConfig):
    add: int = 1


class Counter(vf.Toolset[Tools]):
    async def setup_task(self, task):
        self.count = task.start
        self._exit_stack.callback(lambda: closed.append(self.count))

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
import threading
import verifiers.v1 as vf


class Data(vf.TaskData):
    secret: int


class GuessTask(vf.Task[Data]):
    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.stop
    async def bored(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "99"


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    {second}


class GuessEnv(vf.Env[GuessConfig]):
    threads = set()

    async def run(self, task, agents):
        self.threads.add(threading.get_ident())
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(5):
                if segment.last_reply == str(task.data.secret):
                    break
                way = "higher" if int(segment.last_reply) < task.data.secret else "lower"
                segment = await interaction.turn([{{"role": "user", "content": way}}])
                while segment.terminated:  # it does not notice
                    segment = await interaction.turn("go on")
        interaction.trace.record_reward("found", float(segment.last_reply == str(task.data.secret)), 2.0)


class Guesses(vf.Taskset[GuessTask]):
    def load(self):
        for i in range(100):
            yield GuessTask(Data(idx=i, prompt=f"{prompt}", secret=i % 50))


__all__ = ["Guesses", "GuessEnv"]
"""

SHARED = """
import verifiers.v1 as vf

said = []


class Shelf(vf.Toolset[vf.ToolsetConfig]):
    async def setup(self):
        if {fails} and not said:
            said.append("failed")
            raise OSError("no shelf")
        said.append("set up")
        self.kept = []
        self._exit_stack.callback(lambda: said.append("closed"))

    {more}

    @vf.tool
    def keep(self, word: str) -> int:
        self.kept.append(word)
        return len(self.kept)


class KeepTask(vf.Task[vf.TaskData]):
    pass


class Keeps(vf.Taskset[KeepTask]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.ToolsetConfig())]

    def load(self):
        for i in range(100):
            yield KeepTask(vf.TaskData(prompt=f"Keep {{i}}."))


__all__ = ["Keeps"]
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

JUDGED = """def plugged_judges(self):
        class Judge:
            reward_name = "style"

            async def score(self, task, trace, runtime): ...

        return [Judge()]
"""


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("verifiers")
    (tmp_path / "sum_tasks.py").write_text(TASKSET.format(container=""))
    (tmp_path / "boxed_tasks.py").write_text(TASKSET.format(container="NEEDS_CONTAINER = True"))
    (tmp_path / "judged_tasks.py").write_text(TASKSET.format(container=JUDGED))
    (tmp_path / "count_tasks.py").write_text(COUNTS)
    (tmp_path / "away_tasks.py").write_text(COUNTS.replace("add=2", "add=2, runtime=vf.DockerConfig()"))
    (tmp_path / "keep_tasks.py").write_text(SHARED.format(fails=False, more=""))
    (tmp_path / "drop_tasks.py").write_text(SHARED.format(fails=True, more=""))
    told = "async def setup_task(self, task): said.append('task')"
    (tmp_path / "told_tasks.py").write_text(SHARED.format(fails=False, more=told))
    numbered, second = "Guess ({i}).", "other: vf.AgentConfig = vf.AgentConfig()"
    (tmp_path / "guess_tasks.py").write_text(GAME.format(second="", prompt=numbered))
    (tmp_path / "alike_tasks.py").write_text(GAME.format(second="", prompt="Guess."))
    (tmp_path / "pair_tasks.py").write_text(GAME.format(second=second, prompt=numbered))
    monkeypatch.syspath_prepend(tmp_path)
    yield "sum_tasks"
    for path in tmp_path.glob("*_tasks.py"):
        sys.modules.pop(path.stem, None)


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
    sides = [{task.begin(0, split_seed(i, held_out=held)) for i in range(40)} for held in (False, True)]
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
        closed = sys.modules["count_tasks"].closed
        assert closed == [start + 10], "those of the episode that has ended"
        assert task.reply(said(1)) == Reply(), "the task's own rule ends it"
        task.begin(0, 3)
        assert "no tool ''" in task.reply(f"<tool_call>{'[' * 100_000}</tool_call>").text
    assert closed == [start + 10, start + 2, start], "also where the episode is given up"
    findings = list(check_contract(env, 2, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


KEEP = '<tool_call>{"name": "shelf_keep", "arguments": {"word": "a"}}</tool_call>'


@pytest.mark.usefixtures("taskset")
def test_tools_of_a_taskset_are_set_up_once_for_all_episodes_of_a_process() -> None:
    env = VerifiersSettings(taskset="keep_tasks", max_turns=6)
    rows = [env.conversation() for _ in range(2)]
    for kept, row in enumerate((rows[0], rows[1], rows[0]), 1):
        assert "shelf_keep" in row.begin(0, kept)
        assert row.reply(KEEP).text == f"<tool_response>\n{kept}\n</tool_response>\n", "its state goes on"
    said = sys.modules["keep_tasks"].said
    rows[0].close()
    rows[0].close()
    assert said == ["set up"], "the other row has them"
    rows[1].close()
    assert said == ["set up", "closed"]
    with closing(env.conversation()) as row:
        row.begin(0, 1)
        assert row.reply(KEEP).text == "<tool_response>\n1\n</tool_response>\n"
    assert said == ["set up", "closed"] * 2


@pytest.mark.usefixtures("taskset")
def test_a_setup_of_shared_tools_that_fails_is_told_and_tried_again() -> None:
    with closing(VerifiersSettings(taskset="drop_tasks", max_turns=6).conversation()) as row:
        with pytest.raises(OSError, match="no shelf"):
            row.begin(0, 1)
        row.begin(0, 1)
    assert sys.modules["drop_tasks"].said == ["failed", "set up", "closed"]


def test_a_setup_of_shared_tools_that_is_cancelled_is_told_and_tried_again() -> None:
    cancelled = []

    def make() -> list[object]:
        if not cancelled:
            cancelled.append(True)
            raise asyncio.CancelledError
        return []

    async def use() -> None:
        shared = SharedTools(make)
        with pytest.raises(RuntimeError, match="cancelled"):
            await asyncio.wait_for(shared.open_once(), 5.0)
        await asyncio.wait_for(shared.open_once(), 5.0)
        await shared.end()

    asyncio.run(use())


@pytest.mark.usefixtures("taskset")
def test_shared_tools_are_not_told_a_task_and_who_expects_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with closing(VerifiersSettings(taskset="told_tasks", max_turns=6).conversation()) as row:
        row.begin(0, 1)
    assert sys.modules["told_tasks"].said == ["set up", "closed"]
    assert "env.taskset = told_tasks: Shelf.setup_task is not called, as in verifiers" in caplog.text


@pytest.mark.usefixtures("taskset")
def test_the_tasksets_own_environment_answers_turn_by_turn() -> None:
    with closing(VerifiersSettings(taskset="guess_tasks", max_turns=8).conversation()) as task:
        prompt = task.begin(0, 5)
        secret = int(prompt.partition("(")[2].partition(")")[0]) % 50
        assert task.reply(str(secret - 1)) == Reply("higher\n", done=False)
        assert task.reply(str(secret + 1)) == Reply("lower\n", done=False)
        task.begin(0, 6)  # in the middle of the other
        assert task.begin(0, 5) == prompt
        assert task.reply(f"{secret}") == Reply(reward=2.0, success=True)
        task.begin(0, 5)
        assert [task.reply("-1").done for _ in range(6)] == [False] * 5 + [True]
        task.begin(0, 5)
        with pytest.raises(RuntimeError, match="the exchange is over"):  # as in verifiers; else it never ends
            task.reply("99")


@pytest.mark.usefixtures("taskset")
def test_games_with_one_prompt_are_apart_by_what_they_begin_from() -> None:
    env = VerifiersSettings(taskset="alike_tasks", max_turns=8)
    secrets: dict[bool, set[int]] = {False: set(), True: set()}
    with closing(env.conversation()) as game:
        for held_out, found in secrets.items():
            for i in range(60):
                assert game.begin(0, split_seed(i, held_out=held_out)) == "Guess.\n"
                assert game._agent is not None
                found.add(game._agent.trace.task.data.secret)
    assert all(secrets.values())
    assert not secrets[False] & secrets[True], "two tasks have each secret"


@pytest.mark.usefixtures("taskset")
def test_all_conversations_of_a_process_are_in_one_thread_whoever_asks_them() -> None:
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        games = [
            stack.enter_context(closing(VerifiersSettings(taskset="guess_tasks", max_turns=8).conversation()))
            for _ in range(8)
        ]
        games[0].begin(0, 5)
        files = len(list(Path("/proc/self/fd").iterdir()))
        prompts = list(threads.map(lambda game: game.begin(0, 5), games))
        assert len(list(Path("/proc/self/fd").iterdir())) == files, "none of them has descriptors"
        secret = prompts[0].partition("(")[2].partition(")")[0]
        assert prompts == [prompts[0]] * 8
        replies = list(threads.map(lambda game: game.reply(str(int(secret) % 50)), games))
        assert replies == [Reply(reward=2.0, success=True)] * 8
    assert len(games[0]._loaded.environment.threads) == 1


def test_tasksets_that_cannot_be_used_are_told(taskset: str) -> None:
    with pytest.raises(ConfigError, match=r"its tasks need a tool server in a runtime of type docker \(Counter\)"):
        VerifiersSettings(taskset="away_tasks").conversation()
    with pytest.raises(ConfigError, match=r"env\.taskset = pair_tasks: its tasks need 2 agents \(player, other\)"):
        VerifiersSettings(taskset="pair_tasks").conversation()
    with pytest.raises(ConfigError, match=r"env\.taskset = boxed_tasks: its tasks need a container; use a taskset"):
        VerifiersSettings(taskset="boxed_tasks").conversation()
    with pytest.raises(ConfigError, match=r"its tasks need a runtime for the reward style; use a taskset"):
        VerifiersSettings(taskset="judged_tasks").conversation()
    with pytest.raises(MissingError, match=r"env\.taskset = no_such_tasks: taskset 'no_such_tasks' not found"):
        VerifiersSettings(taskset="no_such_tasks").conversation()
    with pytest.raises(ConfigError, match=r"(?s)env\.taskset = sum_tasks: .*levels.*; correct env\.taskset"):
        VerifiersSettings(taskset=taskset, options={"levels": 3}).conversation()
