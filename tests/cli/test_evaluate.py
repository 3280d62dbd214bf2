"""`polyrhythm eval`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.errors import pip_install
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.validation.check import validate_run


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_video_of_the_first_episodes(launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config(
        env=LampSettings().model_dump(),
        policy={"type": "gaussian", "hidden": 8},
        launcher=launcher,
        rollout={"rows": 2},
    )
    checked = validate_run(run, trainer=False)
    save_policy(checked.policy.state_dict(), run, tmp_path / "policy.pt", 0, checked.spec)
    words = ["eval", str(tmp_path / "policy.pt"), "--episodes", "4", "--video", str(tmp_path / "shown.gif")]
    assert main([*words, "--video-episodes", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["video"] == {"file": str(tmp_path / "shown.gif"), "episodes": 3, "successes": 0}
    assert (tmp_path / "shown.gif").read_bytes().startswith(b"GIF89a")
    assert main(words) == 2
    assert "shown.gif is there already" in capsys.readouterr().err
    assert main([*words[:4], "--video-episodes", "3"]) == 2
    assert "--video-episodes = 3: there is no video; name its file with --video" in capsys.readouterr().err


def _saved(folder: Path, env: object, **sections: object) -> Path:
    """A policy file with the first weights, for this environment."""
    run = config(env=env, launcher="inline", **sections)
    checked = validate_run(run, trainer=False)
    save_policy(checked.policy.state_dict(), run, folder / "policy.pt", 0, checked.spec)
    return folder / "policy.pt"


def test_where_success_is_not_reported_it_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _saved(tmp_path, "gymnasium:CartPole-v1", policy={"type": "categorical"})
    assert main(["eval", str(file), "--episodes", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("successes", "rate", "low", "high")] == [None] * 4
    assert found["mean_return"] > 0
    assert [one["success"] for one in found["per_episode"]] == [None] * 3
    assert main(["eval", str(file), "--episodes", "3"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("mean return ")
    assert first.endswith(", 3 episodes; the environment does not report success")


def test_where_success_may_be_reported_a_rate_of_zero_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _saved(tmp_path, LampSettings().model_dump(), policy={"type": "gaussian", "hidden": 8})
    assert main(["eval", str(file), "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rate"] == 0.0


def test_a_missing_package_for_a_video_is_installed_with_this_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("pygame") is not None:
        pytest.skip("pygame is installed")
    file = _saved(tmp_path, "gymnasium:CartPole-v1", policy={"type": "categorical"})
    assert main(["eval", str(file), "--episodes", "2", "--video", str(tmp_path / "shown.gif")]) == 2
    assert f"{pip_install('')}" in capsys.readouterr().err


def test_a_best_policy_measured_in_the_episodes_that_chose_it_is_told_to_be_biased(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    best = _saved(tmp_path, LampSettings().model_dump(), policy={"type": "gaussian", "hidden": 8}).rename(
        tmp_path / "best.pt"
    )
    for seed, biased in (((), True), (("--seed", "1"), False)):
        caplog.clear()
        assert main(["eval", str(best), "--episodes", "1", *seed]) == 0
        assert ("biased upward; for an unbiased one give another --seed" in caplog.text) == biased
    assert main(["export", str(best), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert '"exported": "policy"' in capsys.readouterr().out


def test_a_missing_best_policy_says_what_keeps_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(tmp_path, LampSettings().model_dump(), policy={"type": "gaussian", "hidden": 8})
    assert main(["eval", str(tmp_path / "best.pt")]) == 2
    assert "best.pt is not there: the best policy is kept where the run evaluates during" in (
        told := capsys.readouterr().err
    )
    assert "evaluation.every" in told
