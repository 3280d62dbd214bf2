"""A reward function, and the replies of a text environment, are called once before anything expensive starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.runs import config

from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.all_checks import examine
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.pipeline.validation.env_trial import try_env

HERE = r"\(.*judged.py, line \d+\)"
SPELT = "tests.pipeline.judged:SpeltSettings"


POLICY = ("policy.layers=1", "policy.width=16", "policy.heads=2", "policy.hidden=16")


def small(*overrides: str) -> Any:
    return load_config("quickstart_lm", [*POLICY, "env.terms=[2,4]", *overrides])


def spelt(defect: str, launcher: str, *overrides: str) -> Any:
    own = (f"env.type={SPELT}", f"env.defect={defect!r}", f"launcher={launcher}")
    return load_config("quickstart_lm", [*POLICY, "demonstrations=null", "supervised=null", *own, *overrides])


@pytest.mark.parametrize("launcher", ["inline", "local"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stuck", f"it raised ValueError: no opinion on '.*#.*' {HERE}; fix it there"),
        ("none", f"it returned None {HERE}; return a finite number, or a Score"),
    ],
)
def test_a_reward_function_that_does_not_work_is_told_before_the_start(launcher: str, name: str, said: str) -> None:
    label = f"scoring.function = tests.pipeline.judged:{name}: on a first episode of task chains \\(seed 1\\)"
    with pytest.raises(ConfigError, match=f"^{label} {said}$"):
        validate_run(small(f"scoring.function=tests.pipeline.judged:{name}", f"launcher={launcher}"))


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_one_that_hangs_is_told_with_its_line(launcher: str) -> None:
    said = rf"scoring.function = .*:hangs: it has not returned within 0.5 s {HERE}; .* raise supervision.score_s"
    with pytest.raises(ConfigError, match=said):
        validate_run(
            small("scoring.function=tests.pipeline.judged:hangs", "supervision.score_s=0.5", f"launcher={launcher}")
        )


def test_it_has_as_many_attempts_as_a_sample_has() -> None:
    unsteady = ("scoring.function=tests.pipeline.judged:Unsteady", "launcher=inline", "scoring.max_attempts=2")
    once, always = (small(*unsteady, f"scoring.options.fails={fails}") for fails in (1, 2))
    try_env(once, env_settings(once))
    with pytest.raises(ConfigError, match=f"it returned nan {HERE}"):
        try_env(always, env_settings(always))


def test_it_is_given_a_message_of_the_expert_or_else_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    noted = ("scoring.function=tests.pipeline.judged:noted", f"scoring.options.file={file}", "launcher=local")
    validate_run(small(*noted))
    task, prompt, messages, terminated, shape = eval(file.read_text())
    assert (task, prompt[-1], len(messages), terminated, shape) == ("chains", "=", 1, True, (1, 128))
    assert "#" in messages[0]
    validate_run(spelt("", "local", *noted[:2]))
    assert eval(file.read_text()) == (SPELT, "abc", ("abc",), True, (1, 4))


def test_without_text_it_is_given_an_episode_of_random_actions(tmp_path: Path) -> None:
    scoring = {"function": "tests.pipeline.judged:noted", "options": {"file": str(tmp_path / "seen")}}
    found = config(env={"type": "gymnasium", "id": "CartPole-v1"}, scoring=scoring, launcher="inline")
    try_env(found, env_settings(found))
    _, prompt, messages, terminated, shape = eval((tmp_path / "seen").read_text())
    assert (prompt, messages, terminated, shape) == ("", (), False, (8, 1))


@pytest.mark.parametrize("launcher", ["inline", "local"])
@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("raises", f"step raised KeyError: 'no such word' {HERE}; fix it there"),
        ("nan", f"step raised ValueError: its reply {HERE} returned a reward of nan; return a Reply whose"),
        ("no reply", f"step raised ValueError: its reply {HERE} returned 1.0; return a Reply"),
        ("hangs", f"step has not returned within 0.5 s {HERE}; fix it there, or raise supervision.step_s"),
    ],
)
def test_a_reply_that_does_not_work_is_told_before_the_start(launcher: str, defect: str, said: str) -> None:
    limit = ("supervision.step_s=0.5",) if defect == "hangs" else ()
    with pytest.raises(ConfigError, match=f"^env.type = {SPELT}: {said}"):
        validate_run(spelt(defect, launcher, *limit))


def test_check_tells_both() -> None:
    found = examine(small("scoring.function=tests.pipeline.judged:stuck", "launcher=inline"))
    failed = [one.finding.detail for one in found if one.finding.state == "failed"]
    assert len(failed) == 1
    assert "it raised ValueError: no opinion" in failed[0]
