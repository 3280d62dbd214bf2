"""The defaults learn on an unknown environment; settings that do not are named before, during and after a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import env_settings, scheduler_settings
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import examine, validate_run


class Line(gymnasium.Env[Any, Any]):
    """A point on a line that is to stop near a goal; at random 11% do."""

    action_space = Box(-1.0, 1.0, (1,))
    observation_space = Box(-5.0, 5.0, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.goal = self.np_random.uniform(-1, 1, 2)
        return self.observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x = float(np.clip(self.x + 0.1 * float(action[0]), -2, 2))
        distance = abs(self.x - self.goal)
        return self.observed(), -distance, distance < 0.05, False, {"success": distance < 0.05}

    def observed(self) -> Any:
        return np.array([self.x, self.goal], np.float32)


if "polyrhythm-test/Line-v0" not in gymnasium.registry:
    gymnasium.register("polyrhythm-test/Line-v0", Line, max_episode_steps=20)

STRANGER = {
    "env": "gymnasium:polyrhythm-test/Line-v0",
    "policy": "gaussian",
    "training": {"versions": 20, "mini_batch_samples": 16},
    "evaluation": {"episodes": 64},
    "launcher": "inline",
    "preset": "lockstep",
}
ONE_STEP = ("training.epochs=1", "training.minibatch_steps=0", "training.optimizer.lr=3e-4")


def config(*overrides: str) -> RunConfig:
    return load_config(STRANGER, overrides)


def updates(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/actor/optimizer_steps" in line]


def test_the_defaults_learn_on_an_unknown_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        summary = train(validate_run(config("seed=1")), tmp_path)
    assert summary["before"]["rate"] < 0.2
    assert summary["after"]["rate"] > 0.6
    assert all(line["train/actor/optimizer_steps"] >= 8 for line in updates(tmp_path))
    assert summary["warnings"] == [] == caplog.messages


def test_one_step_for_each_update_is_said_in_log_summary_and_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        summary = train(validate_run(config(*ONE_STEP)), tmp_path)
    assert {line["train/actor/optimizer_steps"] for line in updates(tmp_path)} == {1.0}
    assert summary["after"]["rate"] < 0.3
    first, last = summary["warnings"]
    assert first.startswith("train/actor/optimizer_steps = 1: a whole update is one optimizer step (update 15)")
    assert "training episodes have not become better" in last
    assert summary["warnings"] == caplog.messages
    page = (tmp_path / "report.html").read_text()
    assert first in page
    assert last.partition("; ")[0] in page, "with settings to change in place of its remedy"


@pytest.mark.parametrize("depth", ["contract", "machine"])
@pytest.mark.parametrize(
    ("override", "name"),
    [
        ((), None),
        (ONE_STEP, "optimizer steps"),
        (("training.epochs=1", "training.minibatch_steps=320"), "optimizer steps"),
        (("training.epochs=1", "training.minibatch_steps=319"), None),
        (("training.mini_batch_samples=4",), "samples"),
        (("training.mini_batch_samples=8", "env.max_steps=7"), "samples"),
        (("training.mini_batch_samples=4", "training.require_batches=4"), None),
        (("training.versions=0",), None),
    ],
)
def test_the_check_names_settings_that_learn_little(depth: Any, override: tuple[str, ...], name: str | None) -> None:
    found = [examined.finding for examined in examine(config(*override), depth) if examined.part == "training"]
    assert [finding.name for finding in found if finding.state == "note"] == ([] if name is None else [name])
    assert all("training." in finding.fix for finding in found if finding.state == "note")


STREAMED = (
    *("training.minibatch_steps=0", "algorithm.advantage=grpo", "algorithm.value.coef=0", "groups.size=2"),
    *("preset=partial_rollout", "training.order=arrival"),
)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ((), None),
        (STREAMED[-2:], "with all of its samples: training.minibatch_steps = 64"),
        (STREAMED, "with the first of its samples"),
        ((*STREAMED, "training.streaming=false"), None),
        ((*STREAMED, "training.order=ticket"), "with all of its samples: training.order = ticket"),
        ((*STREAMED, "placement.trainer.ranks=2"), "with all of its samples: 2 ranks"),
    ],
)
def test_the_check_says_whether_updates_stream_as_the_run_will(override: tuple[str, ...], words: str | None) -> None:
    settings = config(*override)
    said = [x.finding.detail for x in examine(settings, "machine") if x.finding.name == "streaming"]
    assert [line.partition(words or "?")[1] for line in said] == ([] if words is None else [words])
    parts = scheduler_settings(settings, env_settings(settings).spec()).parts
    assert parts == (words == "with the first of its samples")


@pytest.mark.parametrize(
    ("override", "enough"),
    [
        (("training.mini_batch_samples=4",), 16),
        (("training.mini_batch_samples=16", "env.max_steps=1"), 64),
        (("training.mini_batch_samples=2", "training.require_batches=3"), 6),
    ],
)
def test_the_advised_number_of_samples_is_enough(override: tuple[str, ...], enough: int) -> None:
    def notes(*overrides: str) -> list[Any]:
        found = [examined.finding for examined in examine(config(*overrides), "machine")]
        return [finding for finding in found if finding.name == "samples"]

    (note,) = notes(*override)
    assert note.fix == f"raise training.mini_batch_samples to {enough} or more"
    assert not notes(*override, f"training.mini_batch_samples={enough}")


def test_the_check_says_by_whose_defaults_an_update_learns() -> None:
    (found,) = (examined.finding for examined in examine(config(), "machine") if examined.finding.name == "updates")
    assert found.detail == "8 epochs in steps of 64 chunk steps, lr 0.001"
    small = load_config("quickstart_pi0", ["policy.size.width=64", "policy.value_detach=false"])
    found_all = {examined.finding.name: examined.finding for examined in examine(small, "machine")}
    assert "value_detach" in found_all["value loss"].detail


class FarLine(Line):
    """The same line, seen in other units."""

    observation_space = Box(-5000.0, 5000.0, (2,))

    def observed(self) -> Any:
        return 500 + 100 * super().observed()


if "polyrhythm-test/FarLine-v0" not in gymnasium.registry:
    gymnasium.register("polyrhythm-test/FarLine-v0", FarLine, max_episode_steps=20)


def test_large_observations_are_noted() -> None:
    def notes(*overrides: str) -> list[str]:
        found = (examined.finding for examined in examine(config(*overrides)))
        return [f"{finding.detail}; {finding.fix}" for finding in found if finding.name == "observations"]

    far = "env=gymnasium:polyrhythm-test/FarLine-v0"
    (note,) = notes(far)
    assert note.startswith("the observation state has entries of ")
    assert note.endswith("; try policy.normalize_observations=true")
    assert notes(far, "policy.normalize_observations=true") == notes() == []
