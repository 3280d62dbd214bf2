"""Demonstrations and the warm start as commands, and runs that begin with its weights; the parts are real."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import BaseModel
from tests.pipeline.runs import LOCKSTEP
from tests.plugins.demonstrations.test_recording import Demonstrable
from tests.plugins.terminal.test_display import Screen

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config, merge
from polyrhythm.observe.run_folder import lock_run_folder
from polyrhythm.pipeline.persistence.checkpoints import STATES, load_policy, save_policy
from polyrhythm.plugins.demonstrations.imitation import Demonstrations
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.policies.form import Role
from polyrhythm.policies.gaussian import GaussianPolicy, GaussianSettings
from polyrhythm.specs import EnvSpec

EXPERT = "tests.plugins.demonstrations.test_warm_start:CountedSettings"


class CountedSettings(BaseModel):
    """The environment that counts, whose expert succeeds after 5 steps at task a and 6 at task b."""

    type: str = "tests.plugins.demonstrations.test_warm_start:CountedSettings"

    def spec(self) -> Any:
        return Demonstrable(1).spec

    def build(self, rows: int) -> Demonstrable:
        return Demonstrable(rows)


class HastySettings(CountedSettings):
    """The same, and whoever waits for its demonstrations presses Ctrl-C."""

    def build(self, rows: int) -> Demonstrable:
        return Hasty(rows)


class Hasty(Demonstrable):
    def expert_actions(self, rows: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return super().expert_actions(rows)


class LostSettings(CountedSettings):
    """The same, and the process behind its expert is gone."""

    def build(self, rows: int) -> Demonstrable:
        return Lost(rows)


class Lost(Demonstrable):
    def expert_actions(self, rows: Any) -> Any:
        raise BrokenPipeError(f"rows {rows}")


class ImitatorSettings(GaussianSettings):
    """A policy that can be imitated with and says nothing of the probability of what it does."""

    type: str = "tests.plugins.demonstrations.test_warm_start:ImitatorSettings"  # type: ignore[assignment]

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> Imitator:
        return Imitator(self, env_spec)


class Imitator(GaussianPolicy):
    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, torch.Tensor]) -> Evaluation:
        found = super().evaluate(obs, forward_inputs)
        return found._replace(logprob=found.logprob.detach())


def written(path: Path, tree: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def recipe(folder: Path) -> str:
    """The path of a small recipe with an expert's environment, and no word of demonstrations."""
    tree = merge(LOCKSTEP, {"env": {"type": EXPERT}, "policy": {"type": "gaussian", "hidden": 8}})
    return written(folder / "counted.yaml", tree)


def cartpole(folder: Path) -> str:
    """The path of a small recipe without an expert."""
    return written(folder / "cartpole.yaml", LOCKSTEP)


def test_demonstrations_come_with_the_experts_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "d.npz"
    words = ["demos", recipe(tmp_path), "--out", str(file), "--episodes-per-task", "3"]
    assert main([*words, "rollout.action_repeat=2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = Demonstrations.load(file)
    assert (found.tasks, found.action_repeat, len(found)) == (("a", "b"), 2, 18)
    assert result["decisions"] == 18
    assert {name: (rate["successes"], rate["episodes"]) for name, rate in result["tasks"].items()} == {
        "a": (3, 3),
        "b": (3, 3),
    }
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err
    file.unlink()
    assert main(words) == 0
    assert "\na: 100% [44, 100], 3 of 3 episodes\nb: 100%" in capsys.readouterr().out


def test_a_pipe_that_breaks_elsewhere_is_no_reader_who_has_had_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # one that the system knows
    lost = "env.type=tests.plugins.demonstrations.test_warm_start:LostSettings"
    with pytest.raises(BrokenPipeError):
        main(["demos", recipe(tmp_path), "--out", str(tmp_path / "demos.npz"), lost])


@pytest.mark.parametrize("command", ["demos", "sft"])
def test_nobody_demonstrates_cartpole(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([command, cartpole(tmp_path), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert "env.type = gymnasium: this environment has no scripted expert; choose one that has" in told
    assert told.count("\n") == 1
    assert not out.exists()


def test_a_warm_start_is_measured_and_trained_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, start, run = recipe(tmp_path), tmp_path / "start", tmp_path / "run"
    few = ["supervised.steps=3", "supervised.batch_size=8"]
    assert main(["sft", path, "--out", str(start), *few, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["folder"] == str(start)
    assert summary["tasks"]["b"]["rate"] == 1.0
    assert {"demonstrations", "supervised", "total"} == summary["wall_s"].keys()
    assert json.loads((start / "summary.json").read_text())["train/sft/loss"] == summary["train/sft/loss"]
    assert main(["eval", str(start), "--episodes", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 0

    given = f"init_from={start}"
    assert main(["train", path, "--out", str(run), given, "demonstrations={}", "supervised={}"]) == 0
    assert not (run / "demonstrations.npz").exists(), "the phases before training are not done again"
    first = torch.load(next(iter(sorted((run / STATES).glob("run-*")))) / "trainer.pt", weights_only=True)
    weights = load_policy(start)[1]
    assert all(torch.equal(weights[name], tensor) for name, tensor in first["policy"].items())
    assert load_policy(run)[2] == 3


@pytest.mark.parametrize(
    ("kind", "goes_on"), [("gaussian", True), ("tests.plugins.demonstrations.test_warm_start:ImitatorSettings", False)]
)
def test_who_has_imitated_is_told_to_go_on_if_rewards_can_teach_the_policy(
    kind: str, goes_on: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", recipe(tmp_path), "--out", str(tmp_path / "start"), "supervised.steps=2", f"policy.type={kind}"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "to evaluate: polyrhythm eval" in told
    assert ("to train: polyrhythm train" in told) is goes_on


def test_a_person_at_a_terminal_sees_what_each_command_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, start = recipe(tmp_path), tmp_path / "start"
    monkeypatch.setenv("TERM", "xterm")
    commands = {
        "── demonstrations": ["demos", path, "--out", str(tmp_path / "demos.npz"), "--episodes-per-task", "2"],
        "── supervised warm start": ["sft", path, "--out", str(start), "supervised.steps=3"],
        "── evaluation": ["eval", str(start), "--episodes", "4"],
    }
    for words, command in commands.items():
        screen = Screen()
        monkeypatch.setattr(sys, "stderr", screen)
        assert main(command) == 0
        assert words in screen.getvalue()
        assert screen.getvalue().endswith("\x1b[J"), "the block is gone in the end"


def test_given_demonstrations_are_imitated_and_an_interrupted_warm_start_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file, folder = recipe(tmp_path), tmp_path / "d.npz", tmp_path / "start"
    assert main(["demos", path, "--out", str(file)]) == 0
    words = ["sft", path, "--demos", str(file), "--out", str(folder), "supervised.steps=2"]
    assert main(words) == 0
    assert f'file: "{file}"' in capsys.readouterr().out
    weights = load_policy(folder)[1]
    # As if it had been cut before the weights were safe.
    (folder / "summary.json").unlink()
    (folder / "policy.pt").unlink()
    progress = json.loads((folder / "progress.json").read_text())
    del progress["done"]["warm_start"]
    (folder / "progress.json").write_text(json.dumps(progress))
    with lock_run_folder(folder):
        assert main(["resume", str(folder)]) == 2
    assert f"{folder} is in use by process" in capsys.readouterr().err
    assert main([*words, "resume=auto"]) == 0
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_policy(folder)[1].items())
    assert main(["resume", str(folder), "training.versions=9"]) == 2
    told = capsys.readouterr().err
    assert (
        f"resume = {folder}: that run is finished; name another, or begin another run: polyrhythm sft {folder}" in told
    )
    for name in ("summary.json", "policy.pt", "progress.json"):
        (folder / name).unlink()
    file.unlink()
    assert main(["resume", str(folder)]) == 0, "the demonstrations are in the folder"
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_policy(folder)[1].items())


def test_a_long_warm_start_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polyrhythm.plugins.demonstrations.warm_start._TELL_S", 0.0)
    with caplog.at_level("INFO"):
        more = ["demonstrations.episodes_per_task=8", "supervised.steps=3"]
        assert main(["sft", recipe(tmp_path), "--out", str(tmp_path / "run"), *more]) == 0
    told = [record.getMessage() for record in caplog.records if " of " in record.getMessage()]
    assert any(one.startswith("demonstrations: ") and one.endswith(" of 16 episodes") for one in told)
    assert [one for one in told if one.startswith("supervised: ")] == [
        "supervised: 1 of 3 steps",
        "supervised: 2 of 3 steps",
    ]


def test_a_warm_start_that_is_cut_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "start"
    hasty = "env={type: 'tests.plugins.demonstrations.test_warm_start:HastySettings'}"
    assert main(["sft", recipe(tmp_path), "--out", str(folder), hasty]) == 130
    told = capsys.readouterr().err
    assert f"to resume: polyrhythm resume {folder}\n" in told
    assert not (folder / "summary.json").exists()


def test_demonstrations_of_other_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file, folder = recipe(tmp_path), tmp_path / "d.npz", tmp_path / "start"
    assert main(["demos", path, "--out", str(file)]) == 0
    found = Demonstrations.load(file)
    renamed, rubbish = tmp_path / "renamed.npz", tmp_path / "rubbish.npz"
    Demonstrations(found.obs, found.actions, ("b", "a"), 1).save(renamed)
    rubbish.write_bytes(b"rubbish")
    refused = {
        (str(file), "policy.chunk=2"): "actions is (1, 1), the policy and environment need (2, 1); record them again",
        (
            str(file),
            "rollout.action_repeat=3",
        ): "rollout.action_repeat = 3: these demonstrations hold each action for",
        (str(renamed), "seed=3"): "of the tasks b, a, the environment's are a, b; make them equal",
        (str(rubbish), "seed=3"): "holds no demonstrations: it is damaged",
        (str(tmp_path / "none"), "seed=3"): "none: there is no such folder; if it was moved, name where it is now, or",
        (str(tmp_path / "none.npz"), "seed=3"): "none.npz: there is no such file; if it was moved, name where it is",
    }
    for (name, override), words in refused.items():
        capsys.readouterr()
        assert main(["sft", path, "--demos", name, "--out", str(folder), override]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1
    assert not folder.exists()


def test_weights_of_another_policy_are_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, run, empty = tmp_path / "start", tmp_path / "run", tmp_path / "empty"
    empty.mkdir()
    assert main(["train", cartpole(tmp_path), "--out", str(start), "training.versions=0"]) == 0
    given = f"init_from={start}"
    refused = {
        (
            recipe(tmp_path),
            given,
        ): "policy.type is gaussian here but categorical in the policy of those weights",
        (
            cartpole(tmp_path),
            given,
            "policy.activation=relu",
        ): "policy.activation is relu here but tanh in the policy of those weights; make",
        (cartpole(tmp_path), given, "env=gymnasium:Acrobot-v1"): "weights do not fit the policy",
        (cartpole(tmp_path), f"{given}x"): "it does not exist; name the folder of a run or its policy.pt",
        (cartpole(tmp_path), f"init_from={empty}"): "holds no policy.pt",
    }
    for (path, *overrides), words in refused.items():
        capsys.readouterr()
        assert main(["train", path, "--out", str(run), *overrides]) == 2
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1
        assert not run.exists()
    assert main(["sft", recipe(tmp_path), given]) == 2
    assert "sft makes the initial weights" in capsys.readouterr().err


def test_a_run_goes_on_without_the_weights_that_it_was_given(tmp_path: Path) -> None:
    start, run = tmp_path / "start", tmp_path / "run"
    path = cartpole(tmp_path)
    assert main(["train", path, "--out", str(start), "training.versions=0"]) == 0
    words = ["train", path, "--out", str(run), f"init_from={start / 'policy.pt'}"]
    assert main(words) == 0
    (start / "policy.pt").unlink()
    (run / "summary.json").unlink()
    assert main([*words, "resume=auto"]) == 0


def test_grpo_trains_from_the_same_warm_start_by_settings_alone(tmp_path: Path) -> None:
    """Groups of 4 with one initial state each: whole groups are trained on, and the weights move."""
    start, run = tmp_path / "start", tmp_path / "run"
    path = cartpole(tmp_path)
    assert main(["train", path, "--out", str(start), "training.versions=0"]) == 0
    settings = {
        "groups.size": 4,
        "algorithm.advantage": "grpo",
        "algorithm.normalize_advantage": "false",
        "algorithm.value.coef": 0.0,
        "training.mini_batch_samples": 8,
        "training.versions": 2,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    assert main(["train", path, "--out", str(run), f"init_from={start}", *overrides]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger"]["trained"] == 16
    begun, (_, weights, version) = load_policy(start)[1], load_policy(run)
    assert version == 2
    moved = {name.partition(".")[0] for name, tensor in weights.items() if not torch.equal(tensor, begun[name])}
    assert moved == {"actor"}, "nothing asks the value function"
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert np.isfinite(first["train/actor/policy_loss"])
    assert first["train/actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "groups.size = 1: grpo compares the samples of a group; make it 2 or more"),
        (
            ["groups.size=5", "training.critic_warmup_updates=1"],
            "training.critic_warmup_updates = 1: grpo uses no value function",
        ),
    ],
)
def test_grpo_refuses_what_it_cannot_use(
    overrides: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", cartpole(tmp_path), "algorithm.advantage=grpo", *overrides]) == 2
    assert words in capsys.readouterr().err


def test_the_commands_of_the_tour_are_taken() -> None:
    """docs/recipes.md, up to what a machine and a warm start decide."""
    tour = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    lines = [line for line in tour.splitlines() if line.startswith("polyrhythm ") and "runs/start" in line]
    commands = [shlex.split(line)[1:] for line in lines]
    assert [command[0] for command in commands] == ["sft", "train", "train"]
    for _, recipe_name, *words in commands[1:]:
        assert load_config(recipe_name, words).init_from == "runs/start"


def test_the_newest_weights_of_a_run_that_was_killed_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a kill leaves: policy.pt of the warm start, newer weights in the saved runs, no summary."""
    run, early = tmp_path / "run", tmp_path / "early"
    path = cartpole(tmp_path)
    assert main(["train", path, "--out", str(run), "checkpoint.run_every_s=0"]) == 0
    assert main(["train", path, "--out", str(early), "training.versions=0"]) == 0
    (early / "policy.pt").replace(run / "policy.pt")
    (run / "summary.json").unlink()
    saved = sorted((run / STATES).glob("run-*"))
    versions = [json.loads((folder / "run.json").read_text())["version"] for folder in saved]
    assert versions[-1] > 0
    for folder, version in ((run, 3), (saved[-1], versions[-1]), (saved[0], versions[0]), (run / "policy.pt", 0)):
        capsys.readouterr()
        assert main(["eval", str(folder), "--episodes", "2", "--sampled", "--seed", "5", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["version"], result["greedy"], result["seed"]) == (version, False, 5)
    assert main(["eval", str(run), "--swap-instructions"]) == 2
    assert "it takes at least 2 tasks" in capsys.readouterr().err


def test_a_trainers_state_that_is_newer_than_all_else_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill between two savings of the whole run; the trainer saves itself before every publication."""
    run = tmp_path / "run"
    assert main(["train", cartpole(tmp_path), "--out", str(run)]) == 0
    (newest,) = sorted((run / STATES).glob("trainer-*.pt"))[-1:]
    assert main(["train", cartpole(tmp_path), "--out", str(tmp_path / "early"), "training.versions=0"]) == 0
    (tmp_path / "early" / "policy.pt").replace(run / "policy.pt")
    for path in (run, newest):
        capsys.readouterr()
        assert main(["eval", str(path), "--episodes", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["version"] == 3
    stray = tmp_path / "weights.pt"
    newest.replace(stray)
    assert main(["eval", str(stray)]) == 2
    assert "holds no policy with its settings" in capsys.readouterr().err


def test_a_full_disk_for_metrics_is_warned_about_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full, run, path = Path("/dev/full"), tmp_path / "run", cartpole(tmp_path)
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    assert main(["train", path, "--out", str(run)]) == 0
    # As if it had been cut before its first update, on a disk that is full by now.
    shutil.rmtree(run / STATES)
    save_policy(load_policy(run)[1], load_policy(run)[0], run / "policy.pt", 0)
    for name in ("summary.json", "metrics.jsonl"):
        (run / name).unlink()
    progress = json.loads((run / "progress.json").read_text())
    del progress["done"]["rl"]
    (run / "progress.json").write_text(json.dumps(progress))
    (run / "metrics.jsonl").symlink_to(full)
    caplog.clear()
    assert main(["train", path, f"resume={run}"]) == 0
    warnings = [record.getMessage() for record in caplog.records if "No space left on device" in record.getMessage()]
    assert len(warnings) == 1
    assert str(run / "metrics.jsonl") in warnings[0]
    assert (run / "summary.json").is_file()


def test_a_folder_of_demonstrations_is_recorded_once_and_imitated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="folders of demonstrations are parquet: pip install 'polyrhythm[lerobot]'")
    path, data, few = recipe(tmp_path), tmp_path / "data", ["supervised.steps=2", "supervised.batch_size=8"]
    assert main(["demos", path, "--out", str(data), "--episodes-per-task", "2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["episodes"], first["frames"], first["resumed"]) == (4, 22, 0)
    assert first["tasks"]["a"]["rate"] == 1.0
    assert main(["demos", path, "--out", str(data), "--episodes-per-task", "3"]) == 0
    told = capsys.readouterr().out
    assert "episodes: 6\nframes: 33\nresumed: 4\na: 100% [44, 100], 3 of 3 episodes" in told
    assert main(["demos", path, "--out", str(data), "demonstrations.seed=1"]) == 2
    assert "has seed = 2000000000 and this one 1" in capsys.readouterr().err

    given, named = tmp_path / "given", tmp_path / "named"
    assert main(["sft", path, "--demos", str(data), "--out", str(given), *few, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == 33
    chosen = f"demonstrations={{dataset: {{folder: {data}}}}}"
    assert main(["sft", path, "--out", str(named), *few, chosen, "policy.chunk=1"]) == 0
    weights = load_policy(given)[1]
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_policy(named)[1].items())
    trained = [chosen, "supervised={steps: 2}", "training.versions=1"]
    assert main(["train", path, "--out", str(tmp_path / "run"), *trained]) == 0
    capsys.readouterr()
    for words in (["sft", path], ["train", path, "supervised={}"]):
        wrong = f"demonstrations={{dataset: {{folder: {tmp_path / 'no'}}}}}"
        assert main([*words, "--out", str(tmp_path / "none"), wrong]) == 2
        assert "no is not there; name the folder of a dataset" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_policy_is_recorded_where_nobody_else_demonstrates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow", reason="folders of demonstrations are parquet: pip install 'polyrhythm[lerobot]'")
    path, run, data = cartpole(tmp_path), tmp_path / "run", tmp_path / "data"
    assert main(["train", path, "--out", str(run), "training.versions=1"]) == 0
    assert main(["demos", path, "--policy", str(run), "--out", str(tmp_path / "x.npz")]) == 2
    assert "a policy is recorded in a folder" in capsys.readouterr().err
    words = ["demos", path, "--policy", str(run), "--out", str(data), "--episodes-per-task", "3", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == 3, "failed ones too"
    assert 3 * 5 < result["frames"] <= 3 * 40
    taught = ["supervised={steps: 2}", f"demonstrations={{dataset: {{folder: {data}}}}}"]
    assert main(["sft", path, "--out", str(tmp_path / "start"), *taught]) == 0
