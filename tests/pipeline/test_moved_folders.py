"""A run whose checkpoint's folder was moved: told with the remedy, evaluated and resumed from the new place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from tests.pipeline.pictures import Lamps, LampSettings
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config, merge

PI0 = Path(__file__).parents[1] / "plugins" / "vla" / "golden" / "pi0"


class GuidedSettings(LampSettings):
    """Lamps with an expert."""

    type: str = "tests.pipeline.test_moved_folders:GuidedSettings"

    def build(self, rows: int) -> Lamps:
        return Guided(self, rows)


class Guided(Lamps):
    def expert_actions(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return np.ones((len(rows), 1), np.float32)


def test_a_moved_checkpoint_is_named_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    old, new, run = tmp_path / "old", tmp_path / "new", tmp_path / "run"
    shutil.copytree(PI0, old)
    policy = {"type": "pi0", "checkpoint": str(old), "tokenizer": "words", "robot": "bounds", "state": "left"}
    policy |= {"chunk": 2, "dtype": "float32", "method": "flow_sde", "steps": 2, "train": "expert"}
    changes = {"env": {"type": "tests.pipeline.test_moved_folders:GuidedSettings"}, "rollout": {"rows": 2}}
    changes |= {"demonstrations": {"episodes_per_task": 1}, "supervised": {"steps": 1}}
    tree = merge(LOCKSTEP, {**changes, "training": {"versions": 1, "mini_batch_samples": 2, "epochs": 1}})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree | {"policy": policy}))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(run)]) == 0
    begun = [record.getMessage() for record in caplog.records]
    assert f"the run's folder: {run}" in begun
    assert any(f"supervised training begins from the checkpoint {old}; without it: supervised=null" in x for x in begun)
    old.rename(new)

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(list(words)) == 2
        return capsys.readouterr().err.splitlines()[0]

    moved = f"policy.checkpoint={new}"
    longer = "training.versions=2"
    for words in (["eval", str(run)], ["resume", str(run), longer]):
        said = refused(*words)
        assert said.startswith(f"polyrhythm: error: PR202: policy.checkpoint = {old}: there is no such folder here; ")
        assert f"polyrhythm {words[0]} {run} policy.checkpoint=NEW" in said
    assert "--base FOLDER" in refused("policies", "export", str(run), "--out", str(tmp_path / "out"))
    assert "policy.chunk=3: the run has its own" in refused("eval", str(run), moved, "policy.chunk=3")
    assert "policy.chunk is 3" in refused("resume", str(run), longer, moved, "policy.chunk=3")
    assert "the run has its own policy.checkpoint" in refused("eval", str(run), 'policy.checkpoint=""')
    other = str(PI0.with_name("pi05"))
    for command in (["eval", str(run)], ["resume", str(run), longer]):
        assert f"{other} is a 'pi05'" in refused(*command, f"policy.checkpoint={other}")

    assert main(["eval", str(run), moved, "--episodes", "2"]) == 0
    assert main(["resume", str(run), longer, moved]) == 0
    assert load_config(run / "config.yaml").policy.checkpoint == str(new)  # type: ignore[attr-defined]
    (change,) = map(json.loads, (run / "settings_changes.jsonl").read_text().splitlines())
    assert change["changes"]["policy.checkpoint"] == [str(old), str(new)]
    capsys.readouterr()
    assert main(["policies", "export", str(run), "--out", str(tmp_path / "out")]) == 0
