"""Each evaluated episode's outcome, and that it does not depend on rows or launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.pipeline.evaluation.episodes import held_out, mean_metrics
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.specs.hashing import HELD_OUT

EPISODES = 10
_REACH = {"type": "metaworld", "tasks": ["reach-v3", "door-close-v3"], "observation": "state", "max_steps": 30}
CASES: dict[str, dict[str, Any]] = {
    "cartpole": {"env": "gymnasium:CartPole-v1", "policy": {"type": "categorical"}},
    "metaworld-state": {"env": {**_REACH, "reward": "dense"}, "policy": {"type": "gaussian", "hidden": 16}},
}


def _saved(folder: Path, case: str, rows: int, launcher: str) -> Path:
    """The same first weights, in a policy file whose run has so many rows."""
    if case.startswith("metaworld"):
        pytest.importorskip("metaworld")
    run = config(**CASES[case], launcher=launcher, rollout={"rows": rows}, seed=3)
    checked = validate_run(run, trainer=False)
    file = folder / f"{case}-{rows}-{launcher}.pt"
    save_policy(checked.policy.state_dict(), run, file, 0, checked.spec)
    return file


@pytest.mark.parametrize(
    ("case", "greedy"),
    [
        pytest.param("cartpole", True, id="cartpole-greedy"),
        pytest.param("cartpole", False, marks=long(3, "cartpole, sampled"), id="cartpole-sampled"),
        pytest.param("metaworld-state", True, marks=long(7, "Meta-World, greedy"), id="metaworld-state-greedy"),
        pytest.param("metaworld-state", False, marks=long(11, "Meta-World, sampled"), id="metaworld-state-sampled"),
    ],
)
def test_an_outcome_depends_on_neither_rows_nor_launcher(tmp_path: Path, case: str, greedy: bool) -> None:
    found = [
        evaluate(_saved(tmp_path, case, rows, launcher), EPISODES, 5, greedy)["per_episode"]
        for rows, launcher in ((2, "inline"), (8, "inline"), (8, "local"))
    ]
    assert len({episode["return"] for episode in found[0]}) > 1, "the episodes differ, so a mix-up would show"
    assert [len(listed) for listed in found] == [EPISODES] * 3
    assert found[2] == found[1], "processes, inline"
    rounded = [{**episode, "return": pytest.approx(episode["return"], rel=1e-5)} for episode in found[0]]
    assert found[1] == rounded, "8 rows, 2 rows: another batch size may round differently"


def test_the_json_has_every_episode_and_agrees_with_the_totals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _saved(tmp_path, "metaworld-state", 2, "inline")
    assert main(["eval", str(file), "--episodes", "5", "--seed", "9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = held_out(5, 9, 2, greedy=True)
    listed = found["per_episode"]
    assert [one["index"] for one in listed] == list(range(5))
    assert [one["seed"] for one in listed] == [episode.seed for episode in wanted]
    assert [one["task"] for one in listed] == [_REACH["tasks"][episode.task] for episode in wanted]
    assert sum(one["return"] for one in listed) / 5 == pytest.approx(found["mean_return"])
    assert sum(one["success"] for one in listed) == found["successes"]
    assert all(0 < one["steps"] <= 30 for one in listed)
    assert main(["eval", str(file), "--episodes", "5"]) == 0
    assert "per_episode" not in capsys.readouterr().out


def test_where_success_is_not_reported_it_is_null_in_each_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _saved(tmp_path, "cartpole", 2, "inline")
    assert main(["eval", str(file), "--episodes", "3", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["per_episode"]
    assert [one["success"] for one in listed] == [None] * 3
    assert [one["steps"] for one in listed] == [one["return"] for one in listed], "CartPole's reward is 1 per step"


def test_fixed_initial_states_are_taken_once_each() -> None:
    """The protocol of LIBERO: 10 tasks of 50 states each."""
    episodes = held_out(500, 0, 10, greedy=True, initial_states=50)
    assert {(e.task, e.seed % 50) for e in episodes} == {(task, state) for task in range(10) for state in range(50)}
    assert len({e.seed for e in episodes}) == 500, "outcomes are found by seed"
    assert all(HELD_OUT <= e.seed < 2**63 for e in episodes), "an environment knows an evaluation by its seed"
    assert [(e.task, e.seed % 50) for e in episodes[:12]] == [*((task, 0) for task in range(10)), (0, 1), (1, 1)]
    again = held_out(1001, 1, 10, greedy=True, initial_states=50)
    assert [e.seed % 50 for e in again[:500]] == [e.seed % 50 for e in episodes], "whatever the evaluation's seed"
    assert (again[1000].task, again[1000].seed % 50) == (0, 0), "counted round"


def test_the_mean_of_equal_numbers_is_that_number() -> None:
    episodes = [[("turns", 1.0), ("far", 1.5e308)]] * 6
    assert mean_metrics(episodes) == {"turns": 1.0, "far": pytest.approx(1.5e308)}
