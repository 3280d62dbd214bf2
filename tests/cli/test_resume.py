"""`polyrhythm resume RUN`: a cut run goes on, a finished one is extended, what may not change is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config, merge
from polyrhythm.pipeline.persistence.checkpoints import STATES, load_policy, saved_runs
from polyrhythm.pipeline.persistence.resume_rules import config_to_resume, may_change
from polyrhythm.training.checkpoint import load_state

EVALUATED = merge(LOCKSTEP, {"evaluation": {"episodes": 4}, "checkpoint": {"run_every_s": 0, "keep_last": 3}})


def trained(folder: Path, tree: dict[str, Any] = EVALUATED, *overrides: str) -> Path:
    """The folder of a run that was trained to its end."""
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    assert main(["train", str(recipe), "--out", str(folder / "run"), *overrides]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 versions."""
    return trained(tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of 6 versions."""
    return trained(tmp_path_factory.mktemp("six"), EVALUATED, "training.versions=6")


@pytest.fixture
def run(three: Path, tmp_path: Path) -> Path:
    """A finished run of 3 versions, to change."""
    return Path(shutil.copytree(three, tmp_path / "run"))


def cut(run: Path, versions: int = 3) -> int:
    """As if the run had been killed before its last version; the version that it goes on from, a matter of timing."""
    found = {path: json.loads((path / "run.json").read_text())["version"] for path in saved_runs(run / STATES)}
    assert max(found.values()) == versions, "the last one is saved whatever the settings"
    for path in [path for path, version in found.items() if version == versions]:
        shutil.rmtree(path)
        del found[path]
    (run / "summary.json").unlink()
    progress = json.loads((run / "progress.json").read_text())
    for phase in ("rl", "evaluation_after", "best"):
        del progress["done"][phase]
    (run / "progress.json").write_text(json.dumps(progress))
    return max(found.values())


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def updates(run: Path) -> list[int]:
    return [line["step"] for line in metrics(run) if "throughput/transitions" in line]


def same_weights(one: Path, other: Path) -> bool:
    (_, ours, version), (_, theirs, their_version) = load_policy(one), load_policy(other)
    return version == their_version and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def changes(run: Path) -> list[dict[str, Any]]:
    file = run / "settings_changes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def test_a_cut_run_goes_on_without_its_settings_being_typed_again(run: Path, three: Path) -> None:
    cut(run)
    assert main(["resume", str(run)]) == 0
    assert same_weights(run, three)
    assert updates(run) == [0, 1, 2]
    assert not changes(run)


def test_the_settings_of_a_resumed_run_are_a_recipe_for_another(run: Path, three: Path, tmp_path: Path) -> None:
    assert main(["resume", str(run), "training.versions=4"]) == 0
    assert load_config(run / "config.yaml").resume == "never"
    recipe = str(three.parent / "recipe.yaml")
    assert main(["train", recipe, "resume=auto", f"out_dir={tmp_path}", "training.versions=1"]) == 0
    (begun,) = (tmp_path / "test").glob("*/config.yaml")
    assert load_config(begun).resume == "never"


def test_a_finished_run_is_extended_as_if_it_had_been_longer(
    run: Path, six: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer, optimizer, buffer, versions and random state go on: the weights are those of a run of 6, to the bit."""
    before = json.loads((run / "summary.json").read_text())
    assert main(["resume", str(run), "training.versions=6"]) == 0
    assert "success" in capsys.readouterr().out
    assert same_weights(run, six)
    state, wanted = (load_state(saved_runs(folder / STATES)[-1] / "trainer.pt") for folder in (run, six))
    assert state["updates"] == wanted["updates"] == 6
    for number, moments in wanted["optimizer"]["state"].items():
        assert all(torch.equal(state["optimizer"]["state"][number][name], moments[name]) for name in moments)
    assert updates(run) == list(range(6))
    summary, whole = (json.loads((folder / "summary.json").read_text()) for folder in (run, six))
    assert summary["ledger"] == whole["ledger"]
    assert summary["lag"] == whole["lag"]
    assert (summary["before"], summary["after"]) == (before["before"], whole["after"])
    assert load_config(run / "config.yaml").training.versions == 6
    (change,) = changes(run)
    assert (change["update"], change["changes"]) == (3, {"training.versions": [3, 6]})
    page = (run / "report.html").read_text()
    assert "Settings that were changed" in page
    assert '"tone":"change"' in page, "a line in the curves"


def test_rates_evaluation_and_machinery_may_change_and_the_report_says_so(run: Path) -> None:
    at = cut(run)
    changed: dict[str, Any] = {
        "training.versions": 5,
        "training.optimizer.lr": 0.001,
        "training.optimizer.lr_final_fraction": 0.5,
        "evaluation.every": 1,
        "evaluation.every_episodes": 2,
        "checkpoint.keep_last": 1,
        "supervision.step_s": 50.0,
    }
    assert main(["resume", str(run), *(f"{name}={value}" for name, value in changed.items())]) == 0
    (noted,) = changes(run)
    assert {name: after for name, (_, after) in noted["changes"].items()} == changed
    assert noted["update"] == at
    rates = [line["train/actor/lr"] for line in metrics(run) if "train/actor/lr" in line]
    schedule = [0.001 * (1 - 0.5 * update / 4) for update in range(5)]
    assert rates == pytest.approx([*[0.003] * at, *schedule[at:]]), "the schedule is that of 5 versions"
    assert any(entry["version"] == 5 for entry in json.loads((run / "evaluations.json").read_text()))
    assert len(saved_runs(run / STATES)) == 1


@pytest.mark.parametrize("command", ["resume", "train"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=4", "seed is 4 here but 3 in that run"),
        ("policy.hidden=8", "policy.hidden is 8 here but 16 in that run"),
        ("training.versions=2", "training.versions = 2: the run in {run} has trained 3 versions already; set it to 3"),
        ("training.versions=3", "that run is finished"),
    ],
)
def test_other_settings_are_refused_in_one_sentence(
    command: str, override: str, words: str, run: Path, three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    recipe = str(three.parent / "recipe.yaml")
    words_of = {"resume": ["resume", str(run)], "train": ["train", recipe, f"resume={run}"]}
    assert main([*words_of[command], override]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 or all("error" not in line for line in told[:-1])
    assert words.format(run=run) in told[-1]
    if "versions=2" not in override:
        another = f"begin another run: polyrhythm train {run}/config.yaml {override} --out DIR"
        assert ("set resume=never" in told[-1], another in told[-1]) == (command == "train", command == "resume")
    if " in that run" in words:
        assert told[-1].endswith("(polyrhythm resume --help lists what may change)")
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def test_fewer_versions_than_were_wanted_end_the_run_earlier(run: Path) -> None:
    at = cut(run)
    assert main(["resume", str(run), f"training.versions={max(at, 1)}"]) == 0
    assert load_policy(run)[2] == max(at, 1)
    assert updates(run) == list(range(max(at, 1)))


def damage(path: Path) -> None:
    """Change the second digit of some number about the middle, so that text stays text and JSON stays JSON."""
    content = bytearray(path.read_bytes())
    place = re.compile(rb"[0-9]{2}").search(content, len(content) // 2)
    assert place is not None
    content[place.end() - 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["run.json", "trainer.pt", "samples.npz"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    name: str, run: Path, six: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *_, before, newest = saved_runs(run / STATES)
    if name == "samples.npz":
        (newest / name).write_bytes(b"")
    else:
        damage(newest / name)
    assert main(["resume", str(run), "training.versions=6"]) == 0
    (told,) = [text for text in caplog.messages if newest.name in text and "put aside" in text]
    assert told.startswith(f"{newest.name} is damaged: ")
    assert told.endswith(f"; it is put aside, and {before.name} is taken")
    assert told.count("; ") == 1
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert same_weights(run, six)
    assert updates(run) == list(range(6))


def test_a_run_whose_checkpoints_are_all_damaged_or_gone_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in saved_runs(run / STATES):
        damage(path / "run.json")
    assert main(["resume", str(run), "training.versions=4"]) == 2
    told = capsys.readouterr().err
    assert "is damaged: ValueError: run.json was changed); begin another run" in told
    assert "has no saved run that is whole (run-0" in told
    assert "to resume:" not in told, "that command could not succeed"
    shutil.rmtree(run / STATES)
    assert main(["resume", str(run), "training.versions=4"]) == 2
    told = capsys.readouterr().err
    assert "holds no saved run to go on with after 3 versions: the optimizer's state is gone" in told
    assert (run / "summary.json").is_file()


PROGRESS: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_text(""),
    "a list": lambda path: path.write_text("[]"),
    "of lists": lambda path: path.write_text('{"done": [], "wall_s": []}'),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("how", PROGRESS)
def test_a_damaged_progress_file_falls_back_to_what_the_folder_says(
    how: str, run: Path, three: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut(run)
    PROGRESS[how](run / "progress.json")
    assert main(["resume", str(run)]) == 0
    assert caplog.text.count("progress.json is ") == 1
    assert "by the run's other files this is done: warm start" in caplog.text
    assert same_weights(run, three)


def test_a_finished_run_without_its_progress_file_keeps_its_results(run: Path) -> None:
    before = json.loads((run / "summary.json").read_text())
    (run / "progress.json").unlink()
    assert main(["resume", str(run)]) == 2
    assert main(["resume", str(run), "training.versions=4"]) == 0
    after = json.loads((run / "summary.json").read_text())
    assert after["before"] == before["before"]
    assert after["ledger"]["trained"] == 40
    assert after["wall_s"]["total"] > before["wall_s"]["rl"]


def test_a_damaged_summary_is_made_again(run: Path) -> None:
    before = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text("{")
    assert main(["resume", str(run)]) == 0
    after = json.loads((run / "summary.json").read_text())
    assert after["after"] == before["after"]


def test_what_is_left_in_a_checkpoint_folder_by_others_is_left_alone(run: Path, three: Path) -> None:
    cut(run)
    states = run / STATES
    (states / "run-old").mkdir()
    shutil.copytree(saved_runs(states)[0], states / "run-000004-copy")
    (states / "trainer-old.pt").write_text("mine")
    assert main(["resume", str(run)]) == 0
    assert same_weights(run, three)
    assert (states / "trainer-old.pt").is_file()


@pytest.mark.parametrize("name", ["metrics.jsonl", "progress.json", "policy.pt", "config.yaml", "evaluations.json"])
def test_a_folder_where_a_file_should_be_is_named(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    assert main(["resume", str(run), "training.versions=4"]) == 2
    told = capsys.readouterr().err
    assert ("has no config.yaml" if name == "config.yaml" else f"{run / name} is a folder, but a run") in told


def test_damaged_metrics_lines_are_removed(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    number = len(metrics(run))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\x00\n[1, 2]\n{"step": "x"}\n')
    assert main(["resume", str(run), "training.versions=4"]) == 0
    lines = f"{number + 1}, {number + 2}, {number + 3}"
    assert caplog.text.count(f"metrics.jsonl: removed damaged lines: {lines}") == 1
    assert updates(run) == [0, 1, 2, 3]


POLICY = """
from typing import Literal
from polyrhythm.policies.categorical import CategoricalSettings

class Settings(CategoricalSettings):
    type: Literal["our_policy:Settings"] = "our_policy:Settings"

    def form(self, env_spec):
        return CategoricalSettings(type="categorical", hidden=WIDTH).form(env_spec)

    def build(self, env_spec, **how):
        return CategoricalSettings(type="categorical", hidden=WIDTH).build(env_spec, **how)
"""


def test_a_run_of_own_classes_needs_them_as_they_were_and_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir(), away.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (home / "our_policy.py").write_text(POLICY.replace("WIDTH", "8"))
    try:
        run = trained(home, merge(LOCKSTEP, {"policy": {"type": "our_policy:Settings"}}))
        (home / "our_policy.py").write_text(POLICY.replace("WIDTH", "12"))
        del sys.modules["our_policy"]
        capsys.readouterr()
        assert main(["resume", str(run), "training.versions=4"]) == 2
        told = capsys.readouterr().err
        assert "weights do not fit the policy" in told
        assert "if you changed the code of the policy, undo that, or start another run" in told
        assert "to resume:" not in told
        del sys.modules["our_policy"]
        monkeypatch.chdir(away)
        sys.path.remove(str(home))
        assert main(["resume", str(run), "training.versions=4"]) == 2
        told = capsys.readouterr().err
        assert "our_policy:Settings cannot be imported" in told
        assert f"that run began in the folder {home}, and what its settings name may be there: start this" in told
        assert told.count("\n") == 1
    finally:
        sys.modules.pop("our_policy", None)


def test_a_folder_that_is_no_run_and_out_with_resume_are_refused(
    run: Path, three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(three.parent / "recipe.yaml")
    assert main(["resume", str(run.parent / "none")]) == 2
    assert "none is not there; name the folder of a run" in capsys.readouterr().err
    assert main(["train", recipe, f"resume={run}", "--out", "elsewhere", "training.versions=4"]) == 2
    assert f"out = elsewhere: the run in {run} goes on where it is; leave out out" in capsys.readouterr().err
    for given, name in ((["--out", "elsewhere"], "--out"), (["out_dir=x"], "out_dir"), (["resume=never"], "resume")):
        assert main(["resume", str(run), *given, "training.versions=4"]) == 2
        told = f"error: PR301: {' '.join(given)}: the run in {run} goes on where it is; leave out {name}\n"
        assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(("command", "missing"), [("resume", "RUN"), ("sft", "recipe"), ("chaos --faults 1", "recipe")])
def test_what_may_be_left_out_is_not_called_required(
    command: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {missing}\n")


def test_the_help_of_resume_lists_what_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["resume", "--help"])
    words = set(capsys.readouterr().out.replace(",", " ").replace(";", " ").replace(". ", " ").split())
    assert {name for name in may_change() if name not in words and f"{name}." not in words} == set()


def test_a_run_from_before_a_setting_goes_on_with_what_it_did(run: Path) -> None:
    cut(run)
    saved = (run / "config.yaml").read_text()
    older = [line for line in saved.splitlines() if not line.strip().startswith(("max_kl:", "normalize_rewards:"))]
    assert len(older) == len(saved.splitlines()) - 2
    (run / "config.yaml").write_text("\n".join(older))
    config = config_to_resume(run, [])
    assert (config.training.max_kl, config.algorithm.normalize_rewards) == (None, False)
    (run / "config.yaml").write_text(saved)
    assert config_to_resume(run, []).training == load_config(run / "config.yaml").training
