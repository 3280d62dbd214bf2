"""`polyrhythm eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
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
    assert found["video"] == {"file": str(tmp_path / "shown.gif"), "episodes": 3}, "none succeeds: not measured"
    assert (tmp_path / "shown.gif").read_bytes().startswith(b"GIF89a")
    assert main(words) == 2
    assert "shown.gif is there already" in capsys.readouterr().err
