"""`polyrhythm plan FILE.py:function`: the graph of a user's workflow as it runs, its work, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.plugins.workflow.workers import Echo
from tests.process.runs import ROOT

from polyrhythm.cli.main import main
from polyrhythm.plugins.planning import own_workflow
from polyrhythm.plugins.planning.search import find_schedules
from polyrhythm.plugins.workflow import Workflow
from polyrhythm.plugins.workflow.watching import TimeOver, WatchedWorkflow, current_watch, watching

FUNCTIONS = """
from tests.plugins.workflow.workers import Echo
from polyrhythm.plugins.workflow import Workflow

def chain(launcher, count=1):
    with Workflow(launcher) as work:
        first, second = work.group("first", Echo), work.group("second", Echo)
        numbers = work.channel("numbers", 4)
        first.give(numbers, count).wait()
        for _ in range(count):
            second.take(numbers).wait()

def alone(launcher):
    with Workflow(launcher) as work:
        first, second, judge = (work.group(name, Echo) for name in ("first", "second", "judge"))
        numbers = work.channel("numbers", 4)
        first.give(numbers, 1).wait()
        second.take(numbers).wait()
        judge.where().wait()

def nothing():
    pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "planned_flows.py").write_text(FUNCTIONS)
    yield str(tmp_path / "planned_flows.py")
    sys.modules.pop("planned_flows", None)


def test_a_workflow_is_run_and_planned(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:chain", "--gpus", "2", "launcher=inline", "count=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["components"] == [["first"], ["second"]]
    assert all(seconds > 0 for seconds in found["work_s"].values())
    assert {len(one["devices"]) for one in found["schedules"]} == {2}
    assert main(["plan", f"{file}:chain", "--gpus", "2", "launcher=inline"]) == 0
    text = capsys.readouterr().out
    assert "first → second" in text
    assert 'first: seats(devices="' in text


def test_the_pages_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith("polyrhythm plan examples/")]
    assert main(line.split()[1:]) == 0
    assert "simulator ~ learner" in capsys.readouterr().out


REFUSED = {
    "no number of GPUs": (["chain"], "it is a workflow; add --gpus N"),
    "an isolated worker": (["alone", "--gpus", "2", "launcher=inline"], "worker 'judge' sends and receives nothing"),
    "no workflow": (["nothing", "--gpus", "2"], "the function ran no workflow; name one that runs a single Workflow"),
    "no function": (["other", "--gpus", "2"], "has no function other; name the one that runs"),
    "no GPU": (["chain", "--gpus", "0"], "--gpus = 0: a workflow's workers are placed on GPUs; write how many"),
    "several nodes": (["chain", "--gpus", "1,1"], "a workflow is planned on one node; give one number of GPUs"),
    "a profile": (["chain", "--gpus", "1", "--profile", "x"], "a workflow is measured as it runs; leave --profile out"),
    "not an argument": (["chain", "--gpus", "1", "count"], "'count' is not an argument; write name=value"),
    "another argument": (["chain", "--gpus", "1", "rows=1"], "give the function's arguments as name=value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_refused(case: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    (function, *words), why = REFUSED[case]
    assert main(["plan", f"{file}:{function}", *words]) != 0
    assert why in " ".join(capsys.readouterr().err.split())
    assert main(["plan", f"{file}x.py:{function}", "--gpus", "1"]) != 0
    assert "there is no file" in " ".join(capsys.readouterr().err.split())


def test_work_is_counted_without_waits() -> None:
    """Rank 1 sleeps for 50 ms in its call; the other waits for an item until it is put, which is no work."""
    with watching(60.0) as found, Workflow("local") as work:
        first, second = work.group("first", Echo, 2), work.group("second", Echo)
        numbers = work.channel("numbers", 1)
        waiting = second.take(numbers)
        first.spend(0.05).wait()
        first.on(0).give(numbers, 1).wait()
        waiting.wait()
    (watched,) = found
    assert current_watch() is None
    assert watched.statistics["first-1"]["work_s"] >= 0.05
    assert watched.statistics["second-0"]["work_s"] < 0.05
    assert watched.devices == {"first": ("cpu", "cpu"), "second": ("cpu",)}


def test_a_workflow_without_end_is_left_when_its_time_is_over() -> None:
    """Inline, time is skipped while nobody has anything to do."""
    with watching(60.0) as found, Workflow("inline") as work:
        taking = work.group("first", Echo).take(work.channel("numbers", 1))
        with pytest.raises(TimeOver):
            taking.wait()
        work.close()
        assert [one.traffic for one in found] == [{"numbers": (set(), {"first"})}]


def test_memory_decides_between_together_and_in_turn() -> None:
    """Two groups of 30 bytes, which take a second to leave a device or to come back."""
    away = {"switches": 2.0, "switch_s": 2.0, "offloaded_bytes": 30.0}
    statistics = {"a-0": {"work_s": 4.0, **away}, "b-0": {"work_s": 2.0, **away}}
    watched = WatchedWorkflow({"a": ("sim:0",), "b": ("sim:0",)}, {"items": ({"a"}, {"b"})}, set(), statistics)
    graph, costs = own_workflow.problem(watched)
    assert find_schedules(graph, 1, costs, room=60)[0].seconds == 6.0
    (turns,) = find_schedules(graph, 1, costs, room=50)
    assert (turns.turns, turns.seconds) == (True, 10.0)
    assert 'Workflow(sharing="lease")' in own_workflow.lines(graph, costs, [turns])
