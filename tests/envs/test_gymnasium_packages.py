"""Packages of Gymnasium environments, where they are installed: gymnasium-robotics (dict observations) and envpool."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.config.load import load_config, merge, validate
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.envs.mujoco import RenderingUnavailable, choose_gl_backend
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.trial.env_contract import check_contract

FETCH = Path(__file__).parents[2] / "examples" / "fetch" / "fetch_reach.yaml"
PIXELS = "polyrhythm.plugins.simulators.fetch:FetchReachPixels-v0"
robotics = pytest.mark.skipif(
    importlib.util.find_spec("gymnasium_robotics") is None,
    reason="gymnasium-robotics is not installed: pip install -c constraints.txt gymnasium-robotics",
)
envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="envpool is not installed: pip install envpool"
)


@robotics
def test_fetchs_dict_observation_goal_and_success() -> None:
    settings = GymnasiumSettings(id="gymnasium_robotics:FetchReach-v4")
    batch = settings.build(2)
    try:
        assert {name: array.shape for name, array in batch.spec.observation.items()} == {
            "achieved_goal": (3,),
            "desired_goal": (3,),
            "observation": (10,),
        }
        batch.reset([0, 1], [0, 0], [3, 4])
        seen = {name: np.zeros((2, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
        succeeded = np.zeros(2, bool)
        for _ in range(batch.spec.max_steps):
            batch.observe([0, 1], seen)
            towards = np.clip(10 * (seen["desired_goal"] - seen["achieved_goal"]), -1, 1)
            result = batch.step([0, 1], np.concatenate([towards, np.zeros((2, 1))], 1).astype(np.float32))
            succeeded |= result.success > 0
        assert not np.array_equal(seen["desired_goal"][0], seen["desired_goal"][1]), "a goal of each seed"
        assert succeeded.all(), "moving the hand towards the goal"
    finally:
        batch.close()


@robotics
def test_two_updates_on_fetch(tmp_path: Path) -> None:
    changes = ["training.versions=2", "launcher=inline", "rollout.rows=4", "evaluation.episodes=4"]
    config = load_config(FETCH, [*changes, "training.mini_batch_samples=4", "training.minibatch_steps=20"])
    summary = train(validate_run(config), tmp_path)
    assert summary["ledger"]["trained"] == 8
    assert summary["after"]["episodes"] == 4


@pytest.fixture
def renderer() -> None:
    """Skips the test, with the reason, where nothing can render."""
    try:
        choose_gl_backend()
    except RenderingUnavailable as error:
        pytest.skip(str(error))


def pictures(**kwargs: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and positions of the first observations of three seeds."""
    batch = GymnasiumSettings(id=PIXELS, kwargs=kwargs).build(3)
    try:
        batch.reset([0, 1, 2], [0, 0, 0], [3, 4, 5])
        seen = {name: np.zeros((3, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
        batch.observe([0, 1, 2], seen)
        return seen["image"].astype(int), seen["proprio"]
    finally:
        batch.close()


@robotics
@pytest.mark.usefixtures("renderer")
def test_only_the_picture_shows_the_goal_and_each_change_is_of_the_picture_alone() -> None:
    usual, positions = pictures()
    assert (positions == positions[0]).all(), "the gripper begins at one position"
    red = (usual[..., 0] > usual[..., 1] + 60).reshape(3, 2, -1).sum(-1)
    assert (red > 4).all(), "both views show the ball"
    assert not np.array_equal(usual[0], usual[1])
    for picture in ("goal_hidden", "other_goal", "camera_moved", "colours_swapped"):
        image, same = pictures(picture=picture)
        assert (same == positions).all()
        assert (np.abs(image - usual).reshape(3, -1).max(1) > 60).all(), picture
        assert np.array_equal(image, pictures(picture=picture)[0]), "the seed decides"
    assert np.array_equal(pictures(picture="goal_hidden")[0][0], pictures(picture="goal_hidden")[0][1])
    with pytest.raises(ConfigError, match="picture = blurred: no such picture; take one of usual, goal_hidden"):
        pictures(picture="blurred")


@robotics
@pytest.mark.usefixtures("renderer")
def test_two_updates_on_fetch_from_pictures(tmp_path: Path) -> None:
    changes = ["training.versions=2", "launcher=inline", "rollout.rows=4", "evaluation={episodes: 4, greedy: true}"]
    changes += ["demonstrations.episodes_per_task=4", "supervised={steps: 2, warmup_steps: 1}"]
    config = load_config(
        "fetch_reach_pixels", [*changes, "training.mini_batch_samples=4", "training.critic_warmup_updates=0"]
    )
    summary = train(validate_run(config), tmp_path)
    assert summary["ledger"]["trained"] == 8
    assert summary["after"]["episodes"] == 4
    assert [*config.env.variants()] == ["goal_hidden", "other_goal", "camera_moved", "colours_swapped"]


@envpool
@pytest.mark.filterwarnings("ignore")  # it warns of every seed, which it ignores
def test_two_updates_on_envpool_whose_seeds_are_found_to_mean_nothing(tmp_path: Path) -> None:
    env = {"type": "gymnasium_vector", "make": "envpool:make_gymnasium", "kwargs": {"task_id": "CartPole-v1"}}
    tree = merge({name: part for name, part in LOCKSTEP.items() if name != "env"}, {"training": {"versions": 2}})
    config = validate({**tree, "env": {**env, "max_steps": 40}})
    assert train(validate_run(config), tmp_path)["ledger"]["trained"] == 20
    found = {finding.name: finding for finding in check_contract(config.env, 4, lambda _: None)}
    assert found["same seed, same state"].state == "failed"
