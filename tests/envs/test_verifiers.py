"""Tasks of verifiers as text environments; skipped where verifiers is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyrhythm.envs.conformance import check_contract
from polyrhythm.envs.text.base import Reply
from polyrhythm.envs.text.verifiers_tasks import VerifiersSettings
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.specs import split_seed

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
    monkeypatch.syspath_prepend(tmp_path)
    yield "sum_tasks"
    for name in ("sum_tasks", "boxed_tasks"):
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
    assert prompt == env.conversation().begin(0, 3)
    first, _, line = prompt.partition("\n")
    assert (first, line[-4:]) == ("Add.", "+1=\n")
    right = str(int(line.partition("+")[0]) + 1)
    assert task.reply(f"{right}\n") == Reply(reward=1.25, success=True)
    assert task.reply("no") == Reply(reward=0.25)
    assert task.reply("I do not know") == Reply()
    sides = [{task.begin(0, split_seed(env.spec(), i, held_out=held)) for i in range(40)} for held in (False, True)]
    assert not sides[0] & sides[1]
    findings = list(check_contract(env, 2, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


def test_tasksets_that_cannot_be_used_are_told(taskset: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.taskset = boxed_tasks: its tasks need a container; only tasks of one"):
        VerifiersSettings(taskset="boxed_tasks").conversation()
    with pytest.raises(MissingError, match=r"env\.taskset = no_such_tasks: taskset 'no_such_tasks' not found"):
        VerifiersSettings(taskset="no_such_tasks").conversation()
    with pytest.raises(ConfigError, match=r"(?s)env\.taskset = sum_tasks: .*levels.*; correct env\.taskset"):
        VerifiersSettings(taskset=taskset, options={"levels": 3}).conversation()
