"""An evaluation in variants of the environment: the same episodes, each variant by its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.envs.base import Variant
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.evaluation.standalone import Conditions, Video, evaluate
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.specs import EnvSpec, Task


class VariedLampSettings(LampSettings):
    """Lamps with `more` columns lit, of which 12 are too many to succeed in time."""

    type: str = "tests.pipeline.test_variants:VariedLampSettings"
    more: int = 0
    wording: str = "usual"

    def variants(self) -> dict[str, Variant]:
        return {
            "brighter": Variant("vision", "one more column", {"more": 1}),
            "glaring": Variant("vision", "twelve more columns", {"more": 12}),
            "words": Variant("semantic", "other words", {"wording": "other"}),
        }

    def spec(self) -> EnvSpec:
        usual = super().spec()
        tasks = tuple(Task(task.name, f"{self.wording} words: {task.instruction}", task.name) for task in usual.tasks)
        return EnvSpec(usual.observation, usual.action, tasks, usual.max_steps)

    def build(self, rows: int) -> Any:
        batch, more = super().build(rows), self.more
        reset = batch.reset

        def reset_more(rows: Any, tasks: Any, seeds: Any) -> None:
            reset(rows, tasks, seeds)
            batch.left[rows] += more

        batch.reset = reset_more  # type: ignore[method-assign]
        return batch


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = config(
        env={"type": "tests.pipeline.test_variants:VariedLampSettings"},
        policy={"type": "gaussian", "hidden": 8, "chunk": 2, "init_log_std": 0.5},
        rollout={"rows": 4, "action_repeat": 2},
    )
    checked = validate_run(run, trainer=False)
    save_policy(checked.policy.state_dict(), run, tmp_path / "policy.pt", 1, checked.spec)
    return tmp_path / "policy.pt"


def test_the_same_episodes_in_every_variant(saved: Path) -> None:
    plain = evaluate(saved, 8, 5, greedy=False)
    found = evaluate(saved, 8, 5, greedy=False, conditions=Conditions(variants=("all",)))
    variants, kinds = found.pop("variants"), found.pop("kinds")
    assert found == plain, "the usual environment comes first, and is as without variants"
    assert [*variants] == ["brighter", "glaring", "words"]
    assert (variants["brighter"]["kind"], variants["brighter"]["what"]) == ("vision", "one more column")
    seeds = [one["seed"] for one in plain["per_episode"]]
    assert all([one["seed"] for one in variant["per_episode"]] == seeds for variant in variants.values())
    assert variants["glaring"]["successes"] == 0
    assert variants["words"]["successes"] == plain["successes"] > 0, "this policy does not read"
    assert (kinds["vision"]["episodes"], [*kinds]) == (16, ["vision"])
    assert kinds["vision"]["successes"] == variants["brighter"]["successes"]
    assert [*variants["words"]["suites"]] == ["first", "second"]


def test_variants_as_a_table_and_as_videos(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    video = saved.with_name("shown.gif")
    which = ["--episodes", "4", "--sampled", "--seed", "5", "--variants", "glaring,words"]
    asked = ["eval", str(saved), *which, "--video", str(video)]
    assert main(asked) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if " episodes" in line][-3:]
    assert [line.partition("  ")[0] for line in table] == ["in distribution", "vision: glaring", "semantic: words"]
    assert "0% [0, 49], 0 of 4 episodes" in table[1]
    assert table[1].endswith("twelve more columns")
    assert sorted(file.name for file in saved.parent.glob("*.gif")) == [
        *("shown-glaring.gif", "shown-words.gif", "shown.gif")
    ]


def test_a_variant_that_is_not_there_is_refused_before_anything_is_played(saved: Path, tmp_path: Path) -> None:
    told = r"--variants glarig: .* did you mean glaring\? it has brighter, glaring, words"
    with pytest.raises(ConfigError, match=told):
        evaluate(saved, 4, 5, conditions=Conditions(variants=("glarig",)), video=Video(tmp_path / "shown.gif"))
    assert not (tmp_path / "shown.gif").exists()


def test_an_environment_without_variants_says_so(tmp_path: Path) -> None:
    run = config()
    checked = validate_run(run, trainer=False)
    save_policy(checked.policy.state_dict(), run, tmp_path / "policy.pt", 1, checked.spec)
    with pytest.raises(ConfigError, match=r"--variants camera: env.type = gymnasium has no variants"):
        evaluate(tmp_path / "policy.pt", 4, 5, conditions=Conditions(variants=("camera",)))
