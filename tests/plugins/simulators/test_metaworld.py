"""Meta-World: settings without a simulator, and what tickets, rewards and experts do with one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from pydantic import ValidationError

from polyrhythm.envs.base import RowsFailed, batch_traits
from polyrhythm.envs.mujoco import RenderingUnavailable, choose_gl_backend
from polyrhythm.plugins.simulators.metaworld.env import MetaWorldBatch, MetaWorldSettings
from polyrhythm.plugins.simulators.metaworld.scene import GOAL_MARKERS, INSTRUCTIONS

TASKS = ("coffee-button-v3", "door-close-v3")
Build = Callable[..., MetaWorldBatch]


@pytest.fixture
def build(simulator: None) -> Iterator[Build]:
    """Makes batches and closes them."""
    made: list[MetaWorldBatch] = []

    def build_batch(rows: int, **changes: object) -> MetaWorldBatch:
        made.append(MetaWorldSettings(**{"tasks": TASKS, "image_size": 32, **changes}).build(rows))
        return made[-1]

    yield build_batch
    for batch in made:
        batch.close()


def image(batch: MetaWorldBatch, row: int) -> np.ndarray:
    size = batch.settings.image_size
    out = {"image": np.zeros((1, size, size, 3), np.uint8), "proprio": np.zeros((1, 4), np.float32)}
    batch.observe([row], out)
    return out["image"][0]


def expert_episode(batch: MetaWorldBatch, hold: int = 1) -> tuple[float, int, bool]:
    """Return, length and success of the expert in row 0, asked once per `hold` steps."""
    total = 0.0
    for step in range(batch.spec.max_steps):
        if step % hold == 0:
            action = batch.expert_actions([0])
        result = batch.step([0], action)
        total += float(result.reward[0])
        if result.terminated[0] or result.truncated[0]:
            break
    return total, step + 1, bool(result.success[0])


def test_sets_of_tasks_are_meta_worlds(simulator: None):
    from metaworld.env_dict import MT10_V3, MT25_V3, MT50_V3

    for name, theirs in (("MT10", MT10_V3), ("MT25", MT25_V3)):
        assert MetaWorldSettings(tasks=[name]).tasks == tuple(theirs)
    assert set(MetaWorldSettings(tasks=["MT50"]).tasks) == set(MT50_V3)
    with pytest.raises(ValidationError, match="'reach-v3' is listed 2 times"):
        MetaWorldSettings(tasks=["MT10", "reach-v3"])


def test_the_papers_camera_is_at_its_place_from_the_first_picture_on(build: Build):
    batch = build(1, tasks=["drawer-open-v3"], image_size=96, render="full", camera="corner2")
    pictures = []
    for _ in range(2):  # the renderer is made by the first picture
        batch.reset([0], [0], [3])
        pictures.append(image(batch, 0).astype(int))
    assert np.array_equal(*pictures)
    data = batch.scenes[0].model, batch.held[0].env.data
    assert np.allclose(data[1].cam_xpos[data[0].camera("corner2").id], [0.75, 0.075, 0.7])
    corner = pictures[0]
    assert corner[:16, :48].mean() > corner[80:, :48].mean() + 10, "the bright room above, the dark stand below"


def test_settling_is_part_of_the_initial_state_and_does_not_count(build: Build):
    def begun(**changes: object) -> tuple[MetaWorldBatch, np.ndarray]:
        batch = build(1, observation="state", max_steps=3, **changes)
        batch.reset([0], [0], [5])
        out = {"state": np.zeros((1, 39), np.float32)}
        batch.observe([0], out)
        return batch, out["state"]

    (_, at_once), (settled, later), (_, again) = begun(), begun(settle_steps=15), begun(settle_steps=15)
    assert not np.array_equal(at_once, later)
    assert np.array_equal(later, again)
    still = np.zeros((1, 4), np.float32)
    ends = [bool(settled.step([0], still).terminated[0]) for _ in range(3)]
    assert ends == [False, False, True]


def test_every_task_has_its_own_instruction():
    assert len(INSTRUCTIONS) == 50
    assert len(set(INSTRUCTIONS.values())) == 50
    assert set(GOAL_MARKERS) < set(INSTRUCTIONS)


def test_settings_and_spec_need_no_simulator():
    code = (
        "import sys; from polyrhythm.plugins.simulators.metaworld.env import MetaWorldSettings as S;"
        "S(tasks=('reach-v3',)).spec();"
        "sys.exit(bool({'mujoco', 'metaworld', 'gymnasium', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (("door-clos-v3",), "no task or set 'door-clos-v3'; did you mean door-close-v3. sets are MT10, MT25, MT50"),
        (("MT05",), "no task or set 'MT05'; did you mean MT50"),
        (("MT1",), "MT1 is any one task of Meta-World; name it, such as reach-v3"),
        (("reach-v3", "reach-v3"), "listed 2 times"),
        ((), "at least 1 item"),
    ],
)
def test_bad_tasks_are_refused(tasks, said):
    with pytest.raises(ValidationError, match=said):
        MetaWorldSettings(tasks=tasks)


def test_a_preset_sets_what_is_not_set():
    papers = MetaWorldSettings(tasks=("reach-v3",), preset="vla", image_size=96)
    shown = (papers.camera, papers.settle_steps, papers.render, papers.image_size, papers.max_steps)
    assert shown == ("corner2", 15, "full", 96, 100)
    assert MetaWorldSettings.model_validate(papers.model_dump()) == papers
    assert MetaWorldSettings(tasks=("reach-v3",)).render == "cheap"


def test_a_missing_gl_library_ends_with_the_command_that_mends_it(monkeypatch):
    monkeypatch.setattr("polyrhythm.envs.mujoco._LIBRARIES", {"osmesa": ("libno.so",), "egl": ()})
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(RenderingUnavailable, match="MUJOCO_GL=egl, but its library is missing; run: apt-get install"):
        choose_gl_backend()
    monkeypatch.setenv("MUJOCO_GL", "elg")
    with pytest.raises(RenderingUnavailable, match="MUJOCO_GL=elg: MuJoCo draws nothing with it; set it"):
        choose_gl_backend()
    monkeypatch.delenv("MUJOCO_GL")
    with pytest.raises(RenderingUnavailable, match="run: apt-get install -y libosmesa6"):
        choose_gl_backend()


def test_a_state_needs_no_graphics_library(monkeypatch):
    monkeypatch.setattr("polyrhythm.envs.mujoco._LIBRARIES", {"osmesa": ("libno.so",), "egl": ()})
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    settings = MetaWorldSettings(tasks=("reach-v3",), observation="state")
    settings.check()
    assert settings.spec().observation["state"].shape == (39,)
    with pytest.raises(RenderingUnavailable):
        MetaWorldSettings(tasks=("reach-v3",)).check()


@pytest.mark.sim
def test_a_state_is_metaworlds_own_and_draws_nothing(build):
    batch = build(2, observation="state")
    seen = {"state": np.zeros((2, 39), np.float32)}
    batch.reset([0, 1], [0, 1], [3, 4])
    batch.observe([0, 1], seen)
    first = seen["state"].copy()
    assert np.array_equal(first[:, :18], first[:, 18:36]), "there is no step before the first"
    assert first[:, 36:].any(axis=1).all(), "the goal is shown"
    batch.step([0, 1], batch.expert_actions([0, 1]))
    batch.observe([0, 1], seen)
    assert np.allclose(seen["state"][:, 18:36], first[:, :18])
    assert not np.array_equal(seen["state"][:, :3], first[:, :3])
    assert all(scene.renderer is None for scene in batch.scenes.values())


@pytest.mark.sim
def test_rows_share_models_and_instances_follow_the_tickets(build):
    batch = build(4)
    assert batch_traits(batch).expert
    batch.reset([0, 1, 2, 3], [0, 1, 0, 1], [1, 2, 3, 4])
    for tasks in ([1, 0, 1, 0], [1, 1, 1, 0], [0, 1, 0, 1]):
        batch.reset([0, 1, 2, 3], tasks, [1, 2, 3, 4])
    idle = sum(len(scene.idle) for scene in batch.scenes.values())
    assert len(batch.scenes) == 2
    assert idle <= 2
    assert batch.held[0].env.model is batch.held[2].env.model


@pytest.mark.sim
def test_a_state_that_mujoco_finds_unstable_fails_its_row_alone(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    batch, alone, still = build(2, observation="state"), build(1, observation="state"), np.zeros((2, 4), np.float32)
    batch.reset([0, 1], [0, 0], [1, 2])
    alone.reset([0], [0], [2])
    broken = batch.held[0]
    broken.env.data.qvel[:] = 1e12
    with pytest.raises(
        RowsFailed, match=r"^row 0: UnstableSimulationError: MuJoCo found the state unstable at step 1$"
    ):
        batch.step([0, 1], still)
    alone.step([0], still[:1])
    assert np.array_equal(batch.held[1].state, alone.held[0].state)
    batch.reset([0], [0], [2])
    assert batch.held[0] is not broken
    alone.reset([0], [0], [2])
    assert np.array_equal(batch.held[0].state, alone.held[0].state)


@pytest.mark.sim
def test_a_reset_that_mujoco_finds_unstable_fails_its_row(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batch = build(1, observation="state", settle_steps=1)
    batch.reset([0], [0], [1])
    env = batch.held[0].env
    reset = env.reset

    def fall():
        found = reset()
        env.data.qvel[:] = 1e12
        env.step(np.zeros(4, np.float32))
        return found

    batch.held[0]._initial_attributes["reset"] = fall
    with pytest.raises(
        RowsFailed, match=r"UnstableSimulationError: MuJoCo found the state unstable while it was reset"
    ):
        batch.reset([0], [0], [1])


@pytest.mark.sim
def test_a_task_that_cannot_be_built_leaves_no_instance_to_two_rows(build, monkeypatch):
    batch = build(2, observation="state")
    batch.reset([0], [0], [1])
    with monkeypatch.context() as patched:
        patched.setattr("polyrhythm.plugins.simulators.metaworld.env.TaskScene", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.reset([0], [1], [1])
    batch.reset([1], [0], [1])
    batch.reset([0], [0], [2])
    assert batch.held[0] is not batch.held[1]


@pytest.mark.sim
def test_a_row_that_changes_task_shows_the_same_as_one_that_did_not(build):
    batch = build(2)
    batch.reset([0], [1], [7])
    fresh = image(batch, 0)
    batch.reset([1], [0], [3])
    batch.step([1], batch.expert_actions([1]))
    batch.reset([1], [1], [7])
    assert np.array_equal(image(batch, 1), fresh)
    assert fresh.std() > 20


@pytest.mark.sim
def test_rows_of_one_task_with_different_goals_do_not_disturb_each_other(build):
    apart, together = build(1), build(2)
    apart.reset([0], [1], [5])
    together.reset([0, 1], [1, 1], [5, 6])
    for _ in range(30):
        apart.step([0], apart.expert_actions([0]))
        together.step([1, 0], together.expert_actions([1, 0]))
    assert np.array_equal(image(together, 0), image(apart, 0))


@pytest.mark.sim
@pytest.mark.parametrize("task", [0, 1])
def test_the_expert_succeeds_also_when_its_action_is_held(build, task):
    batch = build(1)
    for hold in (1, 5):
        batch.reset([0], [task], [21])
        total, steps, success = expert_episode(batch, hold)
        assert success
        assert total == 1.0
        assert steps < batch.spec.max_steps


@pytest.mark.sim
def test_an_episode_that_goes_on_after_success_earns_the_sparse_reward_once(build):
    batch = build(1, end_on_success=False, max_steps=90)
    batch.reset([0], [0], [21])
    assert expert_episode(batch)[:2] == (1.0, 90)


@pytest.mark.sim
def test_dense_rewards_lie_in_0_to_1(build):
    batch = build(1, reward="dense", max_steps=20)
    batch.reset([0], [0], [21])
    total, steps, _ = expert_episode(batch)
    assert 0 < total < steps


@pytest.mark.sim
def test_the_goal_marker_is_drawn_where_nothing_else_shows_the_goal(build):
    batch = build(1, tasks=("reach-v3",))
    batch.reset([0], [0], [1])
    with_marker = image(batch, 0)
    model = batch.held[0].env.model
    model.site_rgba[:, 3] = 0
    assert not np.array_equal(with_marker, image(batch, 0))


@pytest.mark.sim
def test_full_rendering_shows_more_at_the_same_place(build):
    cheap, full = build(1), build(1, render="full")
    for batch in (cheap, full):
        batch.reset([0], [0], [1])
    assert image(full, 0).shape == image(cheap, 0).shape
    assert image(full, 0).mean() > image(cheap, 0).mean()


@pytest.mark.sim
def test_failing_to_succeed_in_time_is_the_end_unless_the_episode_is_only_cut():
    for time_limit, ends in (("terminates", (True, False)), ("truncates", (False, True))):
        batch = MetaWorldSettings(tasks=("door-close-v3",), max_steps=3, time_limit=time_limit).build(1)
        batch.reset([0], [0], [1])
        for step in range(3):
            result = batch.step([0], np.zeros((1, 4), np.float32))
            assert (result.terminated[0], result.truncated[0]) == (ends if step == 2 else (False, False))
        batch.close()
