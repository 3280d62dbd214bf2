"""Before a run the environment is tried where it will work; what it raises, a crash or a hang is one sentence."""

from __future__ import annotations

import random
import re
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
import torch
from tests.envs.broken_envs import Walk, WalkSettings
from tests.long import long
from tests.pipeline.runs import config

from polyrhythm.env_warnings import forget_warnings
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.trial.env_contract import trial_seed
from polyrhythm.plugins.trial.environment import try_env

KIND = "tests.envs.broken_envs:WalkSettings"
HERE = r"\(.*broken_envs.py, line \d+\)"
LAUNCHERS = ["inline", "local"]


def walk(defect: str, launcher: str, **changes: Any) -> Any:
    env = {"type": changes.pop("type", KIND), "defect": defect}
    return config(env=env, policy={"type": "gaussian"}, launcher=launcher, **changes)


@pytest.mark.parametrize("launcher", ["inline", pytest.param("local", marks=long(2, "a trial process"))])
@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("reset raises", f"reset raised RuntimeError: no such state {HERE}; fix it there"),
        ("build raises", f"build raised OSError: no licence {HERE}; fix it there"),
        ("spec raises", f"spec raised KeyError: 'spec' {HERE}; fix it there"),
        ("build imports", f"build raised ModuleNotFoundError: .* {HERE}; install the missing package, or"),
        ("reset imports", f"reset raised ModuleNotFoundError: .* {HERE}; install the missing package, or"),
        ("rebinds", f"observe raised TypeError: .* {HERE}; `out` is read-only: write into it, out"),
    ],
)
def test_what_an_environment_raises_names_its_line(launcher, defect, said):
    with pytest.raises(ConfigError, match=f"^env.type = {KIND}: {said}") as refusal:
        validate_run(walk(defect, launcher))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("call", "limit"), [pytest.param("spec", "start_s", marks=long(2, "its spec")), ("reset", "reset_s")]
)
def test_an_environment_that_hangs_is_reported_with_its_line(call, limit, launcher):
    said = rf"{call} has not returned within 0.3 s {HERE}; fix it there, or raise supervision.{limit}"
    with pytest.raises(ConfigError, match=f"^env.type = {KIND}: {said}"):
        validate_run(walk(f"{call} hangs", launcher, supervision={limit: 0.3}))


@pytest.mark.parametrize(
    ("defect", "call"), [pytest.param("spec fatal", "spec", marks=long(2, "its spec")), ("fatal", "build")]
)
def test_an_environment_that_ends_its_process_is_reported(defect, call):
    with pytest.raises(ConfigError, match=rf"{call} ended the trial process \(status -9\): driver: out of luck; "):
        validate_run(walk(defect, "local"))


class RandomSettings(WalkSettings):
    """It draws from the global generators."""

    type: Literal["tests.plugins.trial.test_environment:RandomSettings"] = (
        "tests.plugins.trial.test_environment:RandomSettings"  # type: ignore[assignment]
    )

    def build(self, rows: int) -> Any:
        np.random.seed(0)
        random.seed(0)
        torch.manual_seed(0)
        return Walk(rows, "")


def test_the_global_generators_go_on_as_if_nothing_had_been_tried():
    np.random.seed(7)
    random.seed(7)
    torch.manual_seed(7)
    wanted = np.random.rand(), random.random(), torch.rand(())
    np.random.seed(7)
    random.seed(7)
    torch.manual_seed(7)
    validate_run(walk("", "inline", type="tests.plugins.trial.test_environment:RandomSettings"))
    assert (np.random.rand(), random.random(), torch.rand(())) == wanted


class Old(Walk):
    """It takes 32 bits of a seed, as numpy's old generator does."""

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        super().reset(rows, tasks, [np.random.RandomState(seed).randint(97) for seed in seeds])


class OldSettings(WalkSettings):
    type: Literal["tests.plugins.trial.test_environment:OldSettings"] = (
        "tests.plugins.trial.test_environment:OldSettings"  # type: ignore[assignment]
    )

    def build(self, rows: int) -> Any:
        return Old(rows, "")


def test_an_environment_that_takes_only_small_seeds_is_found_before_the_run():
    with pytest.raises(ConfigError, match=r"reset raised ValueError: Seed must be between 0 and 2\*\*32 - 1"):
        validate_run(walk("", "inline", type="tests.plugins.trial.test_environment:OldSettings"))


class Grown(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observations are moved by the number of episodes so far; rewards are as they were."""

    episodes = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.episodes += 1
        observation, info = self.env.reset(seed=seed, options=options)
        return observation + np.float32(self.episodes), info


NORMALIZE = "gymnasium.wrappers:NormalizeObservation"
REWARD = "gymnasium.wrappers:NormalizeReward"
CLIP = {"apply": "gymnasium.wrappers:ClipReward", "kwargs": {"min_reward": -9.0}}
OWN = "tests.plugins.trial.test_environment:Grown"


@pytest.mark.parametrize("launcher", ["inline", pytest.param("local", marks=long(2, "a trial process"))])
@pytest.mark.parametrize(
    ("kind", "wrappers", "said"),
    [
        ("gymnasium", [NORMALIZE], rf"env.wrappers.0 = {NORMALIZE}: .* another 'state' .*policy.normalize_observ"),
        ("gymnasium", [CLIP, REWARD], rf"env.wrappers.1 = {REWARD}: it remembers .*algorithm.normalize_rewards"),
        ("gymnasium", [OWN, CLIP], rf"env.wrappers.0 = {OWN}: .* another 'state' .* or have its reset begin anew"),
        ("gymnasium_vector", [CLIP, NORMALIZE], rf"env.wrappers.1 = {NORMALIZE}: equal task and seed gave another"),
        ("gymnasium", [CLIP, {"apply": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 2}}], ""),
        ("gymnasium", [], ""),
    ],
)
def test_a_run_warns_of_a_wrapper_that_remembers_earlier_episodes(launcher, kind, wrappers, said, caplog):
    env = {"type": kind, "id": "Pendulum-v1", "max_steps": 9, "wrappers": wrappers}
    chosen = config(env=env, policy={"type": "gaussian"}, launcher=launcher)
    forget_warnings()
    try_env(chosen, env_settings(chosen))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == bool(said)
    assert not said or re.match(said, warned[0])


def test_a_run_warns_of_an_environment_that_remembers_earlier_episodes(caplog):
    chosen = walk("history", "inline")
    try_env(chosen, env_settings(chosen))
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(
        f"env.type = {KIND}: equal task and seed gave another 'x' in a later episode; draw the init", warned
    )


def test_both_ways_see_the_same_rows():
    tried = [try_env(chosen, env_settings(chosen)) for chosen in (walk("", "inline"), walk("", "local"))]
    assert tried[0].spec == tried[1].spec == WalkSettings().spec()
    seen = [found.rows for found in tried]
    assert seen[0]["x"].tolist() == seen[1]["x"].tolist() == [[trial_seed(1) % 97], [trial_seed(2) % 97]]
    assert seen[1]["x"].dtype == np.float32
