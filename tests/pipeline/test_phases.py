"""How far a run has come, and which run is gone on with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.built import built
from tests.pipeline.runs import config

from polyrhythm.config.load import save_config
from polyrhythm.errors import ConfigError, RunFolderError, RunHalted, StartError
from polyrhythm.observe.metrics import MetricsWriter, last_time_s, rewind
from polyrhythm.observe.run_folder import CONFIG_FILE, SUMMARY_FILE, lock_run_folder
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.persistence.phases import PhaseJournal, command_of
from polyrhythm.pipeline.persistence.resume import load_init_weights, remove_if_refused
from polyrhythm.pipeline.persistence.resume_rules import config_to_resume, naming_where_it_began, run_to_resume
from polyrhythm.pipeline.trained_policy import load_standalone
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.policies.base import Policy
from polyrhythm.training.checkpoint import save_state


def run_in(folder: Path, *, age: float = 0.0, finished: bool = False, **changes: Any) -> Path:
    """The folder of a run that began `age` seconds before the others."""
    folder.mkdir(parents=True)
    file = folder / CONFIG_FILE
    save_config(config(**changes), file)
    os.utime(file, (1e9 - age, 1e9 - age))
    if finished:
        (folder / SUMMARY_FILE).write_text("{}")
    return folder


def wanted(out: Path, resume: str, **changes: Any) -> Any:
    return config(out_dir=str(out), resume=resume, **changes)


def test_never_begins_anew_whatever_there_is(tmp_path: Path) -> None:
    run_in(tmp_path / "test" / "1")
    assert run_to_resume(wanted(tmp_path, "never"), None) is None
    assert run_to_resume(wanted(tmp_path, "never"), tmp_path / "test" / "1") is None


def test_auto_goes_on_with_the_newest_unfinished_run_of_the_recipe(tmp_path: Path) -> None:
    run_in(tmp_path / "test" / "3", age=300)
    newest = run_in(tmp_path / "test" / "1", age=100)
    run_in(tmp_path / "test" / "2", finished=True)
    run_in(tmp_path / "another" / "4")
    (tmp_path / "test" / "empty").mkdir()
    assert run_to_resume(wanted(tmp_path, "auto"), None) == newest


def test_auto_begins_anew_where_there_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    assert run_to_resume(wanted(tmp_path, "auto"), None) is None
    run_in(tmp_path / "test" / "1", finished=True)
    assert run_to_resume(wanted(tmp_path, "auto"), None) is None


def test_auto_means_the_folder_that_was_named(tmp_path: Path) -> None:
    run_in(tmp_path / "test" / "1")
    mine = tmp_path / "mine"
    assert run_to_resume(wanted(tmp_path, "auto"), mine) is None
    mine.mkdir()
    assert run_to_resume(wanted(tmp_path, "auto"), mine) is None
    run_in(tmp_path / "mine" / "run")
    assert run_to_resume(wanted(tmp_path, "auto"), mine / "run") == mine / "run"


def test_a_folder_can_be_named_in_the_settings(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "elsewhere")
    assert run_to_resume(wanted(tmp_path, str(folder)), None) == folder


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_finished_run_is_not_gone_on_with(resume: str, tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", finished=True)
    given = wanted(tmp_path, "auto" if resume == "auto" else str(folder))
    with pytest.raises(RunFolderError, match=f"resume = {folder}: that run is finished; set training.versions"):
        run_to_resume(given, folder if resume == "auto" else None)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"that is not a run.s folder, it has no config.yaml; name another"):
        run_to_resume(wanted(tmp_path, str(tmp_path)), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "seed is 4 here but 3 in that run; give it the same settings, or set resume=never"),
        ({"training": {"epochs": 9}}, "training.epochs is 9 here but 2 in that run"),
        ({"training": {"optimizer": {"value_lr": 0.1}}}, "training.optimizer.value_lr is 0.1 here but null in"),
        (
            {"policy": {"hidden": 8}, "seed": 4},
            r"policy.hidden is 8 here but 16 in that run \(differ, too: seed\)",
        ),
        ({"env": "gymnasium:Acrobot-v1"}, "env.id is Acrobot-v1 here but CartPole-v1 in that run"),
        ({"batching": {"type": "dynamic"}}, "batching.type is dynamic here but lockstep in that run; give"),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "path"])
def test_other_settings_are_refused_by_name(resume: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = run_in(tmp_path / "test" / "1")
    with pytest.raises(RunFolderError, match=f"^resume = {folder}: {words}"):
        run_to_resume(wanted(tmp_path, "auto" if resume == "auto" else str(folder), **changes), None)


def test_a_folder_to_go_on_in_and_another_folder_exclude_each_other(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run")
    with pytest.raises(RunFolderError, match=f"^out = new: the run in {folder} goes on where it is; leave out out$"):
        run_to_resume(wanted(tmp_path, str(folder)), Path("new"))


def test_where_and_how_long_a_run_runs_may_change(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "test" / "1")
    changes = {
        "launcher": "local",
        "placement": {"generators": {"threads": 2}},
        "data_plane": {"transport": "tcp"},
        "supervision": {"step_s": 5.0},
        "checkpoint": {"run_every_s": 1.0},
        "shutdown_s": 3.0,
        "training": {"versions": 9, "optimizer": {"lr": 1.0, "lr_final_fraction": 0.5}},
        "evaluation": {"episodes": 7, "every": 2},
    }
    assert run_to_resume(wanted(tmp_path, "auto", **changes), None) == folder


def test_what_is_done_is_remembered_and_times_add_up(tmp_path: Path) -> None:
    progress = PhaseJournal(tmp_path)
    assert progress.result("warm_start") is None
    with progress.phase("start"):
        pass
    progress.commit("warm_start", {})
    progress.commit("evaluation_before", {"before": {"rate": 0.5}})
    spent = progress.wall_s["start"]
    again = PhaseJournal(tmp_path)
    assert again.result("warm_start") == {}, "done, though it came to nothing"
    assert again.result("evaluation_before") == {"before": {"rate": 0.5}}
    assert again.result("rl") is None
    with again.phase("start"):
        pass
    assert again.wall_s["start"] > spent
    assert again.summary()["total"] >= again.wall_s["start"]


def test_a_phase_that_goes_on_tells_its_own_time_and_that_of_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "polyrhythm")
    (tmp_path / "progress.json").write_text('{"wall_s": {"rl": 22.0}}')
    progress = PhaseJournal(tmp_path)
    for name in ("start", "rl"):
        with progress.phase(name):
            pass
    assert [text for text in caplog.messages if " s" in text] == ["start: 0.0 s", "rl: 0.0 s (22.0 s in all)"]


def test_the_time_of_a_phase_that_is_cut_short_counts(tmp_path: Path) -> None:
    progress = PhaseJournal(tmp_path)
    with pytest.raises(KeyboardInterrupt), progress.phase("rl"):
        raise KeyboardInterrupt
    again = PhaseJournal(tmp_path)
    assert again.wall_s["rl"] > 0
    assert again.result("rl") is None


def refuse(folder: Path, kind: Callable[[str], Exception], *, named: bool = False, phase: bool = False) -> None:
    """What a run does before it is refused."""
    with lock_run_folder(folder), remove_if_refused(folder, named=named):
        progress = PhaseJournal(folder)
        save_config(config(), folder / CONFIG_FILE)
        (folder / "logs").mkdir(exist_ok=True)
        if phase:
            with progress.phase("demonstrations"):
                pass
        progress.commit("warm_start", {})
        raise kind("too few CPUs")


@pytest.mark.parametrize("way", ["before", "after", "resumed", "halted"])
def test_a_run_that_is_refused_before_its_first_phase_leaves_no_folder(way: str, tmp_path: Path) -> None:
    folder, kind = tmp_path / "run", RunHalted if way == "halted" else StartError
    folder.mkdir()
    if way == "resumed":
        save_config(config(), folder / CONFIG_FILE)
    with pytest.raises(kind):
        refuse(folder, kind, phase=way == "after")
    assert folder.exists() == (way != "before")


def test_what_a_refused_run_has_not_made_stays(tmp_path: Path) -> None:
    """The user's folder, a link, and what came meanwhile."""
    folder, target, link = (tmp_path / name for name in ("run", "target", "link"))
    folder.mkdir()
    target.mkdir()
    link.symlink_to(target)
    for own, named in ((folder, True), (link, False)):
        with pytest.raises(StartError):
            refuse(own, StartError, named=named)
        assert not list(own.iterdir())

    def note(text: str) -> StartError:
        (folder / "notes").write_text(text)
        return StartError(text)

    with pytest.raises(StartError):
        refuse(folder, note)
    assert [path.name for path in folder.iterdir()] == ["notes"]


def test_faults_that_no_saved_run_has_are_kept(tmp_path: Path) -> None:
    fault = {"station": "trainer", "reason": "is on host host-1, which is lost", "transitions": 8}
    progress = PhaseJournal(tmp_path)
    progress.commit("warm_start", {})
    assert "faults" not in json.loads((tmp_path / "progress.json").read_text())
    progress.keep_faults([fault])
    PhaseJournal(tmp_path).commit("rl", {})
    assert PhaseJournal(tmp_path).faults == [fault]
    (tmp_path / "progress.json").write_text('{"faults": ["trainer"]}')
    assert PhaseJournal(tmp_path).faults == [], "it is damaged"


def test_phases_that_are_opened_again_are_not_done(tmp_path: Path) -> None:
    progress = PhaseJournal(tmp_path)
    for phase in ("warm_start", "rl", "best"):
        progress.commit(phase, {})
    progress.reopen("rl", "evaluation_after", "best")
    again = PhaseJournal(tmp_path)
    assert (again.result("warm_start"), again.result("rl"), again.result("best")) == ({}, None, None)


def test_progress_is_written_whole(tmp_path: Path) -> None:
    progress = PhaseJournal(tmp_path)
    progress.commit("warm_start", {})
    (tmp_path / "progress.json.part").write_text("{ cut sh")
    assert PhaseJournal(tmp_path).result("warm_start") == {}
    progress.commit("rl", {"lag": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    assert json.loads((tmp_path / "progress.json").read_text())["done"] == {"warm_start": {}, "rl": {"lag": 1}}


def test_time_goes_on_where_the_metrics_ended_though_a_killed_phase_left_none(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for step, time_s in enumerate((40.0, 90.0)):
            metrics.log(step, {"throughput/transitions": 1.0}, time_s)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "time_s": 95')
    with (tmp_path / "metrics.jsonl").open("ab") as damaged:
        damaged.write(b"\xff\n")
    progress = PhaseJournal(tmp_path)  # killed in its first phase, so there is no progress.json
    assert time.monotonic() - progress.began >= 90.0
    rewind(tmp_path, 1)
    with MetricsWriter(tmp_path) as metrics:
        metrics.log(1, {"throughput/transitions": 1.0}, time.monotonic() - progress.began)
    times = [json.loads(line)["time_s"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert times == sorted(times)
    assert times[0] == 40.0
    assert 90.0 <= times[1] < 100.0


@pytest.mark.parametrize("line", ['{"step": 1}', "[1, 2]", '"x"', "null", '{"time_s": null}', "\xff"])
def test_a_line_without_a_time_is_no_time(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line.encode("latin-1") + b"\n")
    assert last_time_s(tmp_path) == 0.0


SFT = {"name": "test-sft", "demonstrations": {}, "supervised": {}}
UPDATE = '{"step": 0, "time_s": 1.0, "throughput/transitions": 8.0}\n'


@pytest.mark.parametrize(
    ("changes", "version", "metrics", "command"),
    [
        (SFT, None, "", "sft"),
        (SFT, 0, '{"step": 0, "time_s": 1.0, "train/sft/loss": 8.0}\n', "sft"),
        (SFT, 2, "", "train"),
        (SFT, 0, UPDATE, "train"),
        ({"name": "test-sft"}, 0, "", "train"),
        ({**SFT, "name": "test"}, 0, "", "train"),
    ],
)
def test_only_what_can_be_a_warm_start_is_taken_for_one(
    changes: dict[str, Any], version: int | None, metrics: str, command: str, tmp_path: Path
) -> None:
    """A run of a recipe that is named like one is trained on, whatever its progress.json says no more."""
    folder = run_in(tmp_path / "run", **changes)
    (folder / "metrics.jsonl").write_text(metrics)
    if version is not None:
        run = config()
        weights = built(run.policy, run.env.spec()).state_dict()  # type: ignore[attr-defined]
        save_policy(weights, run, folder / "policy.pt", version)
    assert command_of(folder) == command


@pytest.mark.parametrize(
    ("override", "elsewhere"),
    [
        ("training.versions=many", False),
        ("policy.type=gausian", False),
        ("policy={type: 'nowhere:Settings'}", True),
        ("policy={type: 'json:Settings'}", True),
        ("policy={type: 'nowhere:Settings'}; seed=x", False),
    ],
)
def test_only_what_is_not_found_may_be_where_the_run_began(override: str, elsewhere: bool, tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run")
    (folder / "progress.json").write_text(json.dumps({"began_in": str(tmp_path)}))
    with pytest.raises(RunFolderError if elsewhere else ConfigError) as refused:
        config_to_resume(folder, override.split("; "))
    assert (f"that run began in the folder {tmp_path}" in str(refused.value)) == elsewhere


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: evaluate(folder, 1),
        lambda folder: evaluate(folder / "policy.pt", 1),
        lambda folder: evaluate(folder.parent, 1),
        load_standalone,
        lambda folder: load_init_weights(config(init_from=str(folder)), small_policy()),
    ],
    ids=["a run", "its weights", "runs", "without stations", "init_from"],
)
def test_uses_of_weights_name_the_folder_where_the_run_began(use: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = run_in(tmp_path / "runs" / "run")
    (folder / "progress.json").write_text(json.dumps({"began_in": str(tmp_path)}))
    tree = config().model_dump(mode="json") | {"env": {"type": "nowhere_to_be_found:Settings"}}
    save_state({"policy": small_policy().state_dict(), "config": tree, "version": 1}, folder / "policy.pt")
    with pytest.raises(RunFolderError, match=f"that run began in the folder {tmp_path}, .*: start this from there"):
        use(folder)


def small_policy() -> Policy:
    run = config()
    return built(run.policy, run.env.spec())  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("paths", [{}, {"init_from": "runs/before"}])
def test_relative_paths_are_told_of_only_where_there_are_some(
    paths: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run_in(tmp_path / "run", **paths)
    (folder / "progress.json").write_text(json.dumps({"began_in": str(tmp_path)}))
    config_to_resume(folder, ["training.versions=9"])
    assert ("now mean others (init_from)" in caplog.text) == bool(paths) == bool(caplog.messages)


def test_a_result_that_was_changed_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PhaseJournal(tmp_path).commit("evaluation_after", {"after": {"episodes": 2, "successes": 1}})
    assert PhaseJournal(tmp_path).result("evaluation_after") == {"after": {"episodes": 2, "successes": 1}}
    path = tmp_path / "progress.json"
    path.write_text(path.read_text().replace('"episodes"', '"sode"'))
    assert PhaseJournal(tmp_path).result("evaluation_after") is None
    assert "progress.json is damaged" in caplog.text


def test_an_environment_whose_module_is_not_found_may_be_where_the_run_began(tmp_path: Path) -> None:
    """The environment is tried in a process of its own, from which the error comes as text."""
    folder = run_in(tmp_path / "run", env={"type": "gymnasium", "id": "nowhere_to_be_found:Hop-v0"})
    (folder / "progress.json").write_text(json.dumps({"began_in": str(tmp_path)}))
    changed = config_to_resume(folder, [])
    with pytest.raises(RunFolderError) as refused, naming_where_it_began(folder):
        validate_run(changed, begun=True)
    told = str(refused.value)
    assert "nowhere_to_be_found cannot be imported" in told
    assert f"that run began in the folder {tmp_path}" in told
