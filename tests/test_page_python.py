"""The Python blocks of README and docs/ run: here, or in the file that `ELSEWHERE` names.

Blocks that are part of a module or a class get the rest of it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from examples.own_policy.bounded import BoundedPolicy, BoundedSettings
from tests.page_commands import PAGES, ROOT, blocks, page_id

import polyrhythm as pr
from polyrhythm.plugins.language.text.base import TextSettings
from polyrhythm.policies.form import describe
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.normalizer import ObservationNormalizer
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

#: Pages whose blocks another file runs.
ELSEWHERE = {
    "docs/extending.md": "tests/test_extending.py",
    "docs/first-environment.md": "tests/test_own_environments.py",
    "docs/own-environments.md": "tests/test_own_environments.py",
    "docs/python-api.md": "tests/test_api.py",
    "docs/workflows.md": "tests/plugins/workflow/test_page.py",
}
#: Of LeRobot, which make setup does not install.
NOT_RUN = {"docs/demonstrations.md"}
#: Run by the functions below.
HERE = {
    "README.md",
    *(f"docs/{name}.md" for name in ("objectives", "own-policies", "rollout", "sandbox", "scoring")),
}
_SMALL = ("training.versions=1", "evaluation.episodes=4", "rollout.rows=4", "launcher=inline")


def _run(page: str, *which: int, **given: Any) -> dict[str, Any]:
    """Names after these blocks of a page."""
    found = blocks(ROOT / page, "python")
    for one in which or range(len(found)):
        exec(compile(found[one], page, "exec", dont_inherit=True), given)
    return given


def test_every_page_with_python_is_run() -> None:
    assert {page_id(page) for page in PAGES if blocks(page, "python")} == HERE | ELSEWHERE.keys() | NOT_RUN
    for page, file in ELSEWHERE.items():
        assert f"{Path(page).name}" in (ROOT / file).read_text(encoding="utf-8")


def test_readmes_program_runs_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = blocks(ROOT / "README.md", "python")[1]
    short = program.replace('"cartpole"', f'"cartpole", *{_SMALL}').replace("episodes=100", "episodes=2")
    assert short.count("launcher=inline") == short.count("episodes=2") == 1
    exec(compile(short, "README.md", "exec", dont_inherit=True), {})
    assert (tmp_path / "runs" / "mine" / "summary.json").is_file()
    assert "[[" in capsys.readouterr().out


def test_functions_of_one_run_are_used_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and the advantage of objectives.md, the sharding of rollout.md."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pages = ("docs/objectives.md", "docs/rollout.md")
    module = "\n".join(block for page in pages for block in blocks(ROOT / page, "python"))
    (tmp_path / "page_functions.py").write_text(module)
    own = ["algorithm.loss={type: 'page_functions:asymmetric', settings: {slope: 0.5}}"]
    own += ["algorithm.advantage={type: 'page_functions:above_average'}"]
    own += ["rollout.sharding=page_functions:first_ones_to_the_fast_one"]
    assert pr.train("cartpole", *_SMALL, *own, out=tmp_path / "run").finished


def _spec() -> EnvSpec:
    action = ActionSpec("continuous", 2, low=(-1.0, -1.0), high=(1.0, 1.0))
    return EnvSpec({"state": ArraySpec((3,), "float32")}, action, (Task("push", "push"),), 10)


def test_parts_of_a_policy_fit_its_class() -> None:
    given = {"describe": describe, "seeded": seeded, "BoundedPolicy": BoundedPolicy, "ArraySpec": ArraySpec}
    page, settings, spec = _run("docs/own-policies.md", 0, **given), BoundedSettings(), _spec()
    assert page["form"](settings, spec) == settings.form(spec)
    policy = page["build"](settings, spec, seed=0, device="cpu", role="act")
    assert policy.state_dict().keys() == settings.build(spec, seed=0, device="cpu", role="act").state_dict().keys()
    assert {"epochs", "optimizer"} <= _run("docs/own-policies.md", 1, ClassVar=ClassVar)["training_defaults"].keys()
    obs = {"state": torch.randn(4, 3)}
    given = {"ObservationNormalizer": ObservationNormalizer, "env": spec, "obs": obs, "self": SimpleNamespace()}
    assert _run("docs/own-policies.md", 2, **given)["obs"]["state"].shape == (4, 3)


def test_a_judge_scores_a_sample() -> None:
    judge = _run("docs/scoring.md", solve=lambda prompt: prompt)["judge"]
    for reply in ("4", "5"):
        score = judge(SimpleNamespace(reply=f" {reply}", prompt="4"), strict=True)
        assert (score.reward, score.success) == (float(reply == "4"), reply == "4")


def test_a_conversation_is_wrapped() -> None:
    class MyConversation:
        """Is not asked for anything."""

    given = {"TextSettings": TextSettings, "MyConversation": MyConversation, "__name__": "page"}
    settings = _run("docs/sandbox.md", **given)["MySettings"]()
    assert settings.sandbox.wall_s > 0
