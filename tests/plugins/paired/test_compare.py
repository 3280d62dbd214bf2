"""`polyrhythm eval compare`: real evaluations of saved policies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from tests.long import long
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.config.load import save_config
from polyrhythm.pipeline.persistence.checkpoints import read_policy, save_policy
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.paired.measured import measured, variables
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task


def _run(folder: Path, push: float, env: Any = None, **sections: Any) -> Path:
    """A run whose policy pushes to the right with this mean."""
    env = {"policy": {"type": "gaussian", "hidden": 8}, "env": env or LampSettings().model_dump()}
    run = config(**{**env, "launcher": "inline", **sections})
    checked = validate_run(run, trainer=False)
    weights = checked.policy.state_dict()
    last = [name for name in weights if name.endswith("bias") and weights[name].shape == (1,)]
    for name in last:
        weights[name] = torch.full_like(weights[name], push)
    folder.mkdir()
    save_config(run, folder / "config.yaml")
    save_policy(weights, run, folder / "policy.pt", 1, checked.spec)
    return folder


def _told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_better_policy_is_found_by_task_and_the_status_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still, pushing = str(_run(tmp_path / "a", -1.0)), str(_run(tmp_path / "b", 1.0))
    words = ["--episodes", "12", "--json"]
    assert main(["eval", "compare", still, pushing, *words, "--at-least", "0.5"]) == 0
    found = _told(capsys)
    assert (found["a"]["rate"], found["b"]["rate"], found["pairs"]) == (0.0, 1.0, 12)
    assert found["success"]["only_b"] == 12
    assert found["success"]["low"] == pytest.approx(0.66, abs=0.01)
    assert set(found["tasks"]) == {"first", "second"}
    assert found["met"] is True
    for a, b, least, status in (
        (still, pushing, "0.7", 1),
        (pushing, still, "-0.99", 1),
        (pushing, still, "-1", 0),
        (pushing, pushing, "0", 1),
        (pushing, pushing, "-0.3", 0),
    ):
        assert main(["eval", "compare", a, b, *words, "--at-least", least]) == status
        assert _told(capsys)["met"] == (status == 0)
    assert main(["eval", "compare", still, pushing, "--episodes", "4"]) == 0
    text = capsys.readouterr().out
    assert "+100 [" in text
    assert "McNemar, exact: p = 0.125" in text
    assert "second" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{b}", "{other}"], "env.max_steps is"),
        (["{b}", "{missing}"], "is not there"),
        (["{b}", "{b}", "training.versions=3"], "the run has its own training.versions"),
        (["{b}", "{cart}"], "env.type is"),
    ],
)
def test_what_cannot_be_paired_is_refused_before_an_episode_is_played(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {
        "b": _run(
            tmp_path / "b", 1.0, {"type": "gymnasium", "id": "CartPole-v1", "max_steps": 20}, policy=_CATEGORICAL
        ),
        "missing": tmp_path / "none.pt",
    }
    if words[1] == "{other}":
        paths["other"] = _run(
            tmp_path / "o", 1.0, {"type": "gymnasium", "id": "CartPole-v1", "max_steps": 30}, policy=_CATEGORICAL
        )
    if words[1] == "{cart}":
        paths["cart"] = _run(tmp_path / "c", 1.0)
    assert main(["eval", "compare", *(word.format(**paths) for word in words)]) == 2
    assert said in (told := capsys.readouterr()).err
    assert told.out == ""


_CATEGORICAL = {"type": "categorical", "hidden": 8}


@long(3, "seven comparisons")
def test_a_result_is_used_again_only_if_it_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"type": "gymnasium", "id": "CartPole-v1", "max_steps": 20}
    a, b = (_run(tmp_path / name, 1.0, env, policy=_CATEGORICAL, seed=seed) for name, seed in (("a", 1), ("b", 2)))

    def again(*words: str) -> list[bool]:
        assert main(["eval", "compare", str(a), str(b), "--episodes", "3", "--json", *words]) == 0
        found = _told(capsys)
        values.append(found["per_pair"])
        return [found[name]["used_again"] for name in "ab"]

    values: list[Any] = []
    assert again() == [False, False]
    assert again() == [True, True]
    assert values[0] == values[1]
    for words in (["--seed", "9"], ["--sampled"], ["env.max_steps=19"], ["--episodes", "4"]):
        assert again(*words) == [False, False], words
    run = config(env=env, policy=_CATEGORICAL, launcher="inline", seed=1)
    checked = validate_run(run, trainer=False)
    weights = {name: tensor + 1e-3 for name, tensor in checked.policy.state_dict().items()}
    save_policy(weights, run, a / "policy.pt", 1, checked.spec)
    assert again() == [False, True], "other weights of the same version"


def test_a_variable_that_an_evaluation_sets_is_in_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)  # as it was, in the end

    class DrawingCart(CartPoleEnv):
        def __init__(self) -> None:
            super().__init__()
            os.environ["MUJOCO_GL"] = "egl"

    gymnasium.register("DrawingCart-v0", entry_point=DrawingCart)
    env = {"type": "gymnasium", "id": "DrawingCart-v0", "max_steps": 5}
    a, b = (str(_run(tmp_path / name, 1.0, env, policy=_CATEGORICAL, seed=seed)) for name, seed in (("a", 1), ("b", 2)))
    for again in (False, True):
        monkeypatch.setenv("MUJOCO_GL", "egl")
        monkeypatch.delenv("MUJOCO_GL")
        assert main(["eval", "compare", a, b, "--episodes", "2", "--json"]) == 0
        found = _told(capsys)
        assert [found[name]["used_again"] for name in "ab"] == [again, again]
        assert os.environ.get("MUJOCO_GL") == (None if again else "egl")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert variables()["MUJOCO_GL"] == "osmesa"


def _kept(folder: Path, state: ArraySpec | None) -> bool:
    """Whether the second of two equal evaluations is the first."""
    run = config(env={"type": "gymnasium", "id": "CartPole-v1"}, policy=_CATEGORICAL, launcher="inline")
    action, tasks = ActionSpec("discrete", 1, counts=(2,)), (Task("go", "go"),)
    save_config(run, folder / "config.yaml")
    spec = None if state is None else EnvSpec({"state": state}, action, tasks, 9)
    save_policy({"w": torch.ones(2)}, run, folder / "policy.pt", 1, spec)
    for _ in range(2):
        _, again = measured(folder, run, read_policy(folder), {"seed": 1}, lambda: {"per_episode": [1]})
    return again


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (ArraySpec((4, 9), "float32"), True),
        (ArraySpec((64, 64, 3), "uint8"), False),
        (ArraySpec((3, 64, 64), "float32"), False),
        (ArraySpec((64, 64), "uint8"), False),
        (None, False),
    ],
)
def test_a_result_that_depends_on_pictures_is_not_kept(state: ArraySpec | None, kept: bool, tmp_path: Path) -> None:
    assert _kept(tmp_path, state) is kept


@pytest.mark.parametrize("information", ["src/own.egg-info/PKG-INFO", "src/own-1.dist-info/METADATA"])
def test_a_result_beside_a_package_that_is_not_installed_is_not_kept(
    information: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / information).parent.mkdir(parents=True)
    (tmp_path / information).write_text("Name: own\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    (tmp_path / "run").mkdir()
    assert not _kept(tmp_path / "run", ArraySpec((4,), "float32"))


def test_returns_that_do_not_vary_decide_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"type": "gymnasium", "id": "CartPole-v1", "max_steps": 5}
    run = str(_run(tmp_path / "a", 1.0, env, policy=_CATEGORICAL))
    for least in ("0", "-1"):
        assert main(["eval", "compare", run, run, "--episodes", "3", "--at-least", least]) == 1
        text = capsys.readouterr().out
        assert "not decidable, the difference of return has no interval (all initial states differ by the same)" in text
        assert "[" not in text, "a point is no interval"
    assert main(["eval", "compare", run, run, "--episodes", "1", "--at-least", "-1", "--json"]) == 1
    assert _told(capsys)["met"] is None


def test_an_environment_of_ones_own_is_played_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(_run(tmp_path / "a", 1.0))
    for _ in range(2):
        assert main(["eval", "compare", run, run, "--episodes", "2", "--json"]) == 0
        assert not _told(capsys)["a"]["used_again"]
    assert not (tmp_path / "a" / "evaluated").exists()
