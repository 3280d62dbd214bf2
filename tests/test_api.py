"""The public API, as scripts use it."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import LOCKSTEP

import polyrhythm as pr
from polyrhythm.cli.main import command_parser
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.pipeline.evaluation.episodes import tally
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.scheduler.records import SampleEvaluated
from polyrhythm.specs import Task

SOURCE = Path(pr.__file__).parents[1]
PAGE = Path(__file__).parents[1] / "docs" / "python-api.md"


def _python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(program)
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "script.py"],
        capture_output=True, text=True, timeout=170, check=False, cwd=folder,
        env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_page_on_the_api_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 4
    done = _python("\n".join(blocks), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "env.type = __main__:CentreSettings: CentreSettings is defined in this script" in done.stdout
    asked = ["-m", "polyrhythm", "eval", str(tmp_path / "runs" / "centre")]
    environment = {"PYTHONPATH": str(SOURCE)}
    other = subprocess.run(
        [sys.executable, *asked], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert other.returncode == 2
    assert "was defined in a script or notebook, and this is another process; put it into a module" in other.stderr
    assert other.stderr.count("\n") == 1


def test_an_id_that_the_script_registers_is_refused_for_processes(tmp_path: Path) -> None:
    program = """
import gymnasium
import polyrhythm as pr
from gymnasium.envs.classic_control import CartPoleEnv


class Own(CartPoleEnv):
    pass


gymnasium.register("Own-v0", Own, max_episode_steps=5)
gymnasium.register("Named-v0", "__main__:Own", max_episode_steps=5)
part = {"policy": "categorical", "training": {"versions": 1, "mini_batch_samples": 2}, "rollout": {"rows": 2}}
for env in ("gymnasium:Own-v0", {"type": "gymnasium", "tasks": [{"id": "CartPole-v1"}, {"id": "Named-v0"}]}):
    try:
        pr.check({**part, "env": env})
    except pr.PolyrhythmError as error:
        print(error)
pr.check({**part, "env": "gymnasium:Own-v0", "launcher": "inline"})
"""
    done = _python(program, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == (
        "env.id = Own-v0: Own-v0 is registered in this script or notebook, which the processes of launcher local "
        "cannot import; put it into a module (say own.py) and write own:Own-v0, or set launcher to inline"
    )
    assert second.startswith("env.tasks.1.id = Named-v0: Named-v0 is registered in this script")


def test_the_package_is_light_and_says_what_it_has(tmp_path: Path) -> None:
    program = """
import sys
import polyrhythm as pr
assert set(pr.__all__) <= set(dir(pr))
print(sorted({"torch", "pydantic", "numpy"} & set(sys.modules)))
"""
    done = _python(program, tmp_path)
    assert done.stdout == "[]\n", done.stderr
    assert all(getattr(pr, name) for name in pr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pr.nothing  # type: ignore[attr-defined]


def test_recipes_are_names_paths_and_sections() -> None:
    assert pr.load_recipe("cartpole").name == "cartpole"
    assert pr.load_recipe({"extends": "cartpole"}).name == "script"
    changed = pr.load_recipe("cartpole", "seed=7", {"seed": 8, "rollout": {"rows": 8}}, "rollout.rows=4")
    assert (changed.seed, changed.rollout.rows, changed.rollout.segment_steps) == (8, 4, 64)
    found = pr.load_recipe({**LOCKSTEP, "policy": CategoricalSettings(hidden=9)}, "policy.layers=3")
    assert found.policy.model_dump() == CategoricalSettings(hidden=9, layers=3).model_dump()
    assert pr.load_recipe(found, {"seed": 9}) == pr.load_recipe(found, "seed=9")
    ordered = pr.load_recipe({"extends": "cartpole", "rollout": {"queue_key": by_rows}})
    assert ordered.rollout.queue_key == f"{__name__}:by_rows"
    with pytest.raises(ConfigError, match="did you mean versions"):
        pr.load_recipe({"extends": "cartpole", "training": {"version": 3}})


def by_rows(request: Any) -> int:
    return int(request.rows)


class Brighter(LampSettings):
    """Has its parent's `type`."""


class Named(LampSettings):
    type: Literal["lamp"] = "lamp"  # type: ignore[assignment]


def test_an_object_says_which_class_it_is_of() -> None:
    recipe = {**LOCKSTEP, "policy": "gaussian", "env": Brighter()}
    assert type(pr.load_recipe(recipe).env) is Brighter
    with pytest.raises(ConfigError, match=f'declare it there as type: str = "{__name__}:Named"'):
        pr.load_recipe({**recipe, "env": Named()})

    class Hidden(LampSettings):
        pass

    with pytest.raises(ConfigError, match="cannot be found by name; define it at the top"):
        pr.load_recipe({**recipe, "env": Hidden()})


class Heard:
    def __init__(self, until: int | None = None, error: type[Exception] = pr.StopTraining) -> None:
        self.updates: list[Any] = []
        self.evaluations: list[pr.EvaluationResult] = []
        self._until, self._error = until, error

    def on_update(self, metrics: Any) -> None:
        self.updates.append(metrics)
        if metrics["step"] == self._until:
            raise self._error("enough")

    def on_evaluation(self, result: pr.EvaluationResult) -> None:
        self.evaluations.append(result)


def _recipe(**changes: Any) -> dict[str, Any]:
    return {**LOCKSTEP, "evaluation": {"episodes": 4}, **changes}


def test_a_run_tells_its_callbacks_what_its_files_say(tmp_path: Path) -> None:
    heard, steps = Heard(), list[float]()
    run = pr.train(_recipe(), out=tmp_path / "run", callbacks=[heard, lambda metrics: steps.append(metrics["step"])])
    assert run.finished
    assert steps == [0, 1, 2]
    assert [result.name for result in heard.evaluations] == ["before", "after"]
    after = heard.evaluations[1]
    assert (after.rate, after.mean_return) == (run.summary["after"]["rate"], run.summary["after"]["mean_return"])
    assert heard.updates[0]["train/actor/lr"] > 0
    again = pr.evaluate(run)
    assert (again.mean_return, again.episodes, again.version) == (after.mean_return, 4, 3)
    assert pr.load_policy(run.folder).act({"state": [0.0] * 4}).shape == (1, 1)


def test_a_callback_stops_a_run_which_goes_on_to_the_same_end(tmp_path: Path) -> None:
    whole = pr.train(_recipe(), out=tmp_path / "whole")
    part = pr.train(_recipe(), out=tmp_path / "part", callbacks=Heard(until=1))
    assert not part.finished
    assert part.summary == {}
    rest = pr.train(_recipe(resume=str(part.folder)))
    assert rest.finished
    assert rest.summary["after"] == whole.summary["after"]


def test_what_a_callback_raises_comes_out_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="enough") as raised:
        pr.train(_recipe(), out=tmp_path / "run", callbacks=Heard(until=1, error=ZeroDivisionError))
    assert raised.traceback[-1].name == "on_update"
    assert raised.value.__context__ is None
    assert pr.train(_recipe(resume=str(tmp_path / "run"))).finished


def test_a_result_has_all_that_was_measured() -> None:
    found = tally([SampleEvaluated("after", 0, 0, True, True, 2.0, 1, (("height", 0.5),))], [Task("t", "do it")])
    result = pr.EvaluationResult.of("after", {**found, "version": 1, "greedy": True})
    assert {name: getattr(result, name) for name in found} == found
    assert result.metrics == {"height": 0.5}


class Interrupting(Heard):
    """Presses Ctrl-C in the midst of the update after the first."""

    pressed = True

    def on_update(self, metrics: Any) -> None:
        super().on_update(metrics)
        Interrupting.pressed = metrics["step"] != 0


def interrupting_loss(entries: Any) -> Any:
    if not Interrupting.pressed:
        Interrupting.pressed = True
        os.kill(os.getpid(), signal.SIGINT)
    return -entries.advantage * entries.logprob


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_an_update_that_ends_while_the_run_winds_down_is_told(
    error: type[Exception] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Interrupting(until=1, error=error) if error else Interrupting()
    loss = {"loss": {"type": f"{__name__}:interrupting_loss"}}
    with pytest.raises(KeyboardInterrupt):
        pr.train(_recipe(algorithm=loss), out=tmp_path / "run", callbacks=heard)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "throughput/transitions" in line]
    assert [metrics["step"] for metrics in heard.updates] == steps == [0, 1]
    assert ("a callback failed while the run ended" in caplog.text) == (error is not None)


def test_an_error_about_the_last_result_leaves_a_finished_run(tmp_path: Path) -> None:
    class Last:
        def on_evaluation(self, result: pr.EvaluationResult) -> None:
            if result.name == "after":
                raise ZeroDivisionError("too late")

    with pytest.raises(ZeroDivisionError, match="too late"):
        pr.train(_recipe(), out=tmp_path / "run", callbacks=Last())
    assert (tmp_path / "run" / "summary.json").is_file()


def test_what_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int is not a function and has neither on_update nor on_evaluation"):
        pr.train(_recipe(), out=tmp_path / "run", callbacks=3)
    with pytest.raises(RunFolderError, match="is not there"):
        pr.evaluate(tmp_path / "run")
    with pytest.raises(RunFolderError, match="is not there"):
        pr.load_policy(tmp_path / "run")
    with pytest.raises(ConfigError, match="video_episodes = 0: it must be at least 1"):
        pr.evaluate(tmp_path, video=tmp_path / "shown.gif", video_episodes=0)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_runs_is_its_newest_and_what_is_exported_loads_again(tmp_path: Path) -> None:
    recipe = pr.load_recipe(_recipe(), "training.versions=2", "evaluation.episodes=4", "checkpoint.keep_every=1")
    first = pr.train(recipe, out=tmp_path / "runs" / "one")
    assert repr(first) == f"TrainResult(folder={first.folder!r}, finished=True)"
    longer = pr.resume(tmp_path / "runs", {"training.versions": 3})
    assert longer.folder == first.folder
    assert longer.finished
    kept = {path.name for path in (first.folder / "checkpoints").glob("trainer-*")}
    assert kept >= {f"trainer-0000000{version}.pt" for version in (1, 2, 3)}
    assert pr.evaluate(first.folder / "checkpoints" / "trainer-00000001.pt", episodes=2).version == 1
    assert pr.report(tmp_path / "runs") == first.folder / "report.html"
    with pytest.raises(pr.PolyrhythmError, match="report: no run is named"):
        pr.report()
    out = pr.export(tmp_path / "runs", tmp_path / "exported")
    expected, found = pr.evaluate(longer), pr.evaluate(out)
    assert (found.version, found.mean_return, found.rate) == (3, expected.mean_return, expected.rate)
    assert "tasks" not in repr(found)
    begun = pr.train(pr.load_recipe(recipe, f"init_from={out}", "training.versions=0"), out=tmp_path / "again")
    assert pr.evaluate(begun).mean_return == expected.mean_return
    next_to_it = pr.load_recipe(recipe, f"init_from={tmp_path / 'runs'}", "training.versions=0")
    beside = pr.train(next_to_it, out=tmp_path / "runs" / "two")
    assert pr.evaluate(beside).mean_return == expected.mean_return, "the newest run of before"
    for name, content, why in (
        ("model.safetensors", "cut", "ConfigError: .* has 3 bytes"),
        ("policy.json", 9999 * "[", "ValueError: nested too deeply"),
        ("policy.json", "{}", "KeyError"),
    ):
        (out / name).write_text(content)
        with pytest.raises(pr.PolyrhythmError, match=rf"is not an exported policy that can be loaded \({why}"):
            pr.load_policy(out)


@pytest.mark.parametrize("name", ["check", "train", "resume", "evaluate", "report", "export"])
def test_a_function_names_things_as_its_command_does(name: str) -> None:
    command = {"evaluate": "eval"}.get(name, name)
    _, parser = command_parser(command)
    told, parameters = parser.format_help(), inspect.signature(getattr(pr, name)).parameters
    assert ("overrides" in parameters) == ("section.key=value" in told)
    for parameter in parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "callbacks":
            assert f"--{parameter.name.replace('_', '-')} " in told or f"--{parameter.name.replace('_', '-')}\n" in told


def test_a_keyword_of_another_name_is_answered_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as refusal:
        pr.train(_recipe(), out_dir=tmp_path)  # type: ignore[call-arg]
    assert "out=FOLDER is the run's folder" in refusal.value.__notes__[0]
    with pytest.raises(TypeError) as refusal:
        pr.evaluate(tmp_path, overrides=["env.max_steps=3"])  # type: ignore[call-arg]
    assert "after the first argument, as on the command line" in refusal.value.__notes__[0]


@pytest.mark.parametrize("keyword", ["overrides", "out_dir"])
def test_a_keyword_that_a_users_own_class_refuses_is_not_answered(
    keyword: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise TypeError(f"Mine.__init__() got an unexpected keyword argument '{keyword}'")

    monkeypatch.setattr("polyrhythm.api.evaluating.evaluate", refusing)
    with pytest.raises(TypeError) as refusal:
        pr.evaluate(tmp_path)
    assert not hasattr(refusal.value, "__notes__")


def test_a_policy_of_a_hub_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the hub's client, which says what to download."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for function in (pr.load_policy, pr.evaluate):
        with pytest.raises(pr.PolyrhythmError, match=r"hf://me/reach"):
            function("hf://me/reach")


def test_an_evaluation_of_another_environment_lists_what_differs(tmp_path: Path) -> None:
    run = pr.train(_recipe(), "training.versions=0", out=tmp_path / "run")
    found = pr.evaluate(run, {"env.max_steps": 3}, episodes=2)
    assert found.env == ["env.max_steps=3"]
    assert pr.evaluate(run, episodes=2).env == ()
    for wrong in ("env.type=latency", "rollout.rows=2"):
        with pytest.raises(pr.PolyrhythmError, match="the run has its own"):
            pr.evaluate(run, wrong, episodes=2)


def test_a_warm_start_is_not_resumed_as_training(tmp_path: Path) -> None:
    PhaseJournal(tmp_path, command="sft").commit("demonstrations", {})
    with pytest.raises(pr.PolyrhythmError, match="polyrhythm sft began it; go on with: polyrhythm resume"):
        pr.resume(tmp_path)


def test_out_of_an_unfinished_run_proposes_to_resume_it(tmp_path: Path) -> None:
    def stop(_metrics: object) -> None:
        raise pr.StopTraining

    pr.train(_recipe(), out=tmp_path / "run", callbacks=stop)
    with pytest.raises(pr.PolyrhythmError, match="is not finished; to go on with it: polyrhythm resume"):
        pr.train(_recipe(), out=tmp_path / "run")


def test_old_module_names_work_or_say_where_to_import_from(tmp_path: Path) -> None:
    done = _python("from polyrhythm.workflow.channel import Channel", tmp_path)
    assert done.returncode == 0, done.stderr
    for imports, package in {
        "import polyrhythm.workflow.errors": "polyrhythm.plugins.workflow",
        "from polyrhythm.envs.text import sokoban": "polyrhythm.plugins.language.text",
    }.items():
        said = _python(imports, tmp_path).stderr
        assert f" is gone; import what you need from {package} or one of its modules" in said
