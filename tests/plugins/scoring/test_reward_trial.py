"""A reward function, and the replies of a text environment, are called once before anything expensive starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.pipeline.judged import Spelt
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.persistence.resume import save_settings
from polyrhythm.pipeline.validation.check import examine, validate_run
from polyrhythm.plugins.demonstrations.warm_start import validate_imitation
from polyrhythm.plugins.trial.environment import try_env

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
    episode = r"an episode of 1 message, answered by the expert \(task chains, seed \d+\)"
    said = f"scoring.function = tests.pipeline.judged:{name}: on {episode}, {said}, or set scoring.try_first=false"
    with pytest.raises(ConfigError, match=f"^{said}$"):
        validate_run(small(f"scoring.function=tests.pipeline.judged:{name}", f"launcher={launcher}"))


@pytest.mark.parametrize("launcher", [pytest.param("inline", marks=long(1, "in one process")), "local"])
def test_one_that_hangs_is_told_with_its_line(launcher: str) -> None:
    fix = "fix it there, or raise supervision.score_s, or set scoring.try_first=false"
    said = rf"scoring.function = .*:hangs: it has not returned within 0.5 s {HERE}; {fix}"
    with pytest.raises(ConfigError, match=said):
        validate_run(
            small("scoring.function=tests.pipeline.judged:hangs", "supervision.score_s=0.5", f"launcher={launcher}")
        )


STUCK = ("scoring.function=tests.pipeline.judged:stuck", "launcher=inline")


def test_try_first_lets_a_function_through_that_the_episode_is_not_for() -> None:
    found = small(*STUCK, "scoring.try_first=false")
    try_env(found, env_settings(found))


def test_an_imitation_does_not_call_it() -> None:
    checked = validate_imitation(small(*STUCK))
    assert checked.config.scoring is not None, "an evaluation of what was imitated has scores"


@pytest.mark.parametrize("command", ["resume", "train", "eval"])
def test_it_is_not_called_before_a_run_goes_on_or_is_evaluated(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = spelt("", "inline", *STUCK, "scoring.max_attempts=1", "evaluation.episodes=1")
    save_settings(run, tmp_path)
    policy = run.policy.build(run.env.spec(), seed=0, device="cpu", role="train")
    save_policy(policy.state_dict(), run, tmp_path / "saved.pt", 0)
    what = {"eval": "saved.pt", "train": "config.yaml", "resume": ""}[command]
    main([command, str(tmp_path / what), *([f"resume={tmp_path}"] if command == "train" else [])])
    assert "every episode of the evaluation was dropped" in capsys.readouterr().err


def test_it_is_given_a_message_of_the_expert_or_else_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "seen"
    noted = ("scoring.function=tests.pipeline.judged:noted", f"scoring.options.file={file}", "launcher=local")
    validate_run(small(*noted))
    task, prompt, messages, terminated, shape = eval(file.read_text())
    assert (task, prompt[-1], len(messages), terminated, shape) == ("chains", "=", 1, True, (1, 128))
    assert "#" in messages[0]
    validate_run(spelt("", "local", *noted[:2]))
    assert eval(file.read_text()) == (SPELT, "abc", ("abc",), True, (1, 4))


def test_without_an_expert_one_short_message_is_played(caplog: pytest.LogCaptureFixture) -> None:
    sizes = ("env.max_prompt_tokens=48", "env.max_new_tokens=32", "env.max_turns=4")
    found = spelt("long", "inline", *sizes, *STUCK)
    said = r"of 1 message, answered by the prompt's own words, cut there \(.*\), it raised ValueError: .* 'aaaa' "
    with pytest.raises(ConfigError, match=said):
        try_env(found, env_settings(found))
    assert "env.max_prompt_tokens" not in caplog.text


def test_the_expert_is_asked_only_where_it_demonstrates() -> None:
    hangs = ("env.type=tests.pipeline.judged:HangingExpertSettings", "launcher=inline", "supervision.step_s=0.5")
    alone, taught = spelt("", "inline", *hangs), load_config("quickstart_lm", [*POLICY, *hangs])
    try_env(alone, env_settings(alone))
    with pytest.raises(ConfigError, match=r"expert has not returned within 0.5 s"):
        try_env(taught, env_settings(taught))


def test_other_environments_are_not_stepped_for_it() -> None:
    found = config(
        env={"type": "tests.envs.broken_envs:WalkSettings", "defect": "step raises"},
        scoring={"function": "tests.pipeline.judged:stuck"},
        launcher="inline",
    )
    try_env(found, env_settings(found))


def test_the_environment_is_closed_after_a_failure_that_it_does_not_hide() -> None:
    Spelt.closed = 0
    found = spelt("close raises", "inline", *STUCK)
    with pytest.raises(ConfigError, match="no opinion"):
        try_env(found, env_settings(found))
    assert Spelt.closed == 1


@pytest.mark.parametrize("launcher", ["inline", pytest.param("local", marks=long(1, "a trial process"))])
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
