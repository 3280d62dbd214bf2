"""robosuite: settings, tables and refusals without a simulator; resets, rewards, failures and pictures with one."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from polyrhythm.envs.base import RowsFailed
from polyrhythm.envs.mujoco import RenderingUnavailable, choose_gl_backend
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.simulators.robosuite.batch import RobosuiteBatch
from polyrhythm.plugins.simulators.robosuite.env import RobosuiteSettings
from polyrhythm.plugins.simulators.robosuite.library import INSTRUCTIONS, KNOWN, seeded, words_of
from polyrhythm.plugins.trial.env_contract import check_contract
from polyrhythm.stations.simulator.reset_ahead import ResetAhead

Build = Callable[..., RobosuiteBatch]


@pytest.fixture(scope="session")
def robosuite() -> None:
    """Skips the test, with the reason, where robosuite is not installed or nothing can render."""
    if importlib.util.find_spec("robosuite") is None:
        pytest.skip("the robosuite extra is not installed")
    try:
        choose_gl_backend()
    except RenderingUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def build(robosuite: None) -> Iterator[Build]:
    """Makes batches of short state episodes and closes them."""
    made: list[RobosuiteBatch] = []

    def build_batch(rows: int, *tasks: str, **changes: object) -> RobosuiteBatch:
        settings = {"tasks": tasks or ("Lift",), "observation": "state", "image_size": 32, **changes}
        made.append(RobosuiteSettings(**settings).build(rows))
        return made[-1]

    yield build_batch
    for batch in made:
        batch.close()


@pytest.fixture
def kitchens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package robocasa without assets, as a checkout of it has none; its folder."""
    package = tmp_path / "robocasa"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('MuJoCo version must be 3.3.1')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "robocasa", raising=False)
    return package


def observed(batch: RobosuiteBatch, *rows: int) -> dict[str, np.ndarray]:
    out = {name: np.zeros((len(rows), *a.shape), a.dtype) for name, a in batch.spec.observation.items()}
    batch.observe(rows, out)
    return out


def play(batch: RobosuiteBatch, row: int, steps: int = 8) -> list[np.ndarray]:
    """States and rewards of a row under actions that are always the same."""
    rng, seen = np.random.default_rng(3), [observed(batch, row)["state"]]
    for _ in range(steps):
        action = rng.uniform(-1.0, 1.0, (1, batch.spec.action.dim)).astype(np.float32)
        seen += [batch.step([row], action).reward, observed(batch, row)["state"]]
    return seen


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_every_task_has_its_own_instruction():
    assert len(set(INSTRUCTIONS.values())) == len(KNOWN) == 19
    assert words_of("CloseFridgeDoor") == "close fridge door"


def test_settings_and_spec_need_no_simulator():
    code = (
        "import sys; from polyrhythm.plugins.simulators.robosuite.env import RobosuiteSettings as S;"
        "S(tasks=('Lift',)).spec(); S(tasks=('TwoArmLift',), observation='state').spec();"
        "sys.exit(bool({'mujoco', 'robosuite', 'numba', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_spec_of_pixels_names_the_first_camera_image():
    settings = RobosuiteSettings(tasks=("Lift", "Door"), cameras=("agentview", "robot0_eye_in_hand"), image_size=84)
    spec = settings.spec()
    assert {name: a.shape for name, a in spec.observation.items()} == {
        "image": (84, 84, 3),
        "robot0_eye_in_hand": (84, 84, 3),
        "proprio": (43,),
    }
    assert [task.instruction for task in spec.tasks] == ["lift the red cube", "open the door by its handle"]
    assert spec.action.dim == 7


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"tasks": ("Liftt",)}, "tasks = Liftt: robosuite has no such task; did you mean Lift"),
        ({"tasks": ("CloseFridge",)}, "need the package robocasa, which is not installed"),
        ({"tasks": ("Lift", "Lift")}, "listed 2 times"),
        ({"tasks": ()}, "at least 1 item"),
        ({"tasks": ("ToolHang",), "reward": "dense"}, "reward = dense: robosuite has no dense reward for ToolHang"),
        ({"tasks": ("Lift",), "cameras": ("agentveiw",)}, "cameras = agentveiw: did you mean agentview"),
        ({"tasks": ("PickPlace",), "cameras": ("sideview",)}, "the cameras of PickPlace are agentview, frontview"),
        ({"tasks": ("Lift",), "cameras": ("agentview", "agentview")}, "list each camera once"),
        ({"tasks": ("Lift",), "kwargs": {"horizon": 3}}, "horizon is decided by settings of its own"),
        ({"tasks": ("Lift",), "instructions": {"Door": "open"}}, "instructions = Door: this task is not in tasks"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_imported(section, said, monkeypatch):
    monkeypatch.setattr("polyrhythm.plugins.simulators.robosuite.env.has_package", lambda name: False)
    with pytest.raises(ValidationError, match=said):
        RobosuiteSettings(**section)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (("Lift", "Stack"), "env.tasks = Stack: its state has 23 \\+ 43 numbers, that of Lift 10 \\+ 43"),
        (("Lift", "TwoArmLift"), "env.tasks = TwoArmLift: its actions have 14 entries, those of Lift 7"),
    ],
)
def test_tasks_of_other_sizes_are_refused(tasks, said):
    with pytest.raises(ConfigError, match=said):
        RobosuiteSettings(tasks=tasks, observation="state").spec()


def test_what_robocasa_lacks_is_one_sentence(kitchens):
    settings = RobosuiteSettings(tasks=("CloseFridge",), observation="state", robot="PandaOmron")
    with pytest.raises(MissingError, match=r"RoboCasa's assets are missing \(.*robocasa/models/assets/textures\); run"):
        settings.check()
    for folder in ("textures", "objects"):
        (kitchens / "models" / "assets" / folder).mkdir(parents=True)
    settings.check()


def test_robocasa_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("polyrhythm.plugins.simulators.robosuite.library.has_package", lambda name: False)
    with pytest.raises(MissingError, match="package robocasa is not installed and not on PyPI; install it from"):
        RobosuiteSettings(tasks=("CloseFridge",), registered_by="robocasa", observation="state").check()


@pytest.mark.skipif(importlib.util.find_spec("robosuite") is not None, reason="robosuite is installed")
def test_a_measured_spec_without_robosuite_says_how_to_install_it():
    with pytest.raises(MissingError, match=r"robosuite is not installed; run: .* install .*'polyrhythm\[robosuite\]'"):
        RobosuiteSettings(tasks=("Lift",), robot="UR5e").spec()


def test_seeded_randomness_leaves_no_trace():
    np.random.seed(5)
    random.seed(5)
    generator = np.random.default_rng(1)
    before = np.random.get_state()[1].tolist(), random.getstate()
    drawn = []
    for seed in (7, 8, 7):
        with seeded(seed, generator):
            drawn.append((np.random.rand(), random.random(), generator.random()))
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        {"tasks": ("Lift",), "observation": "state", "reward": "dense"},
        {"tasks": ("Stack", "Door"), "image_size": 32, "cameras": ("agentview", "robot0_eye_in_hand")},
    ],
    ids=["state", "pixels"],
)
def test_it_passes_the_checks_of_its_contract_without_a_note(section, robosuite):
    findings = list(check_contract(RobosuiteSettings(max_steps=12, **section), 3, lambda call: None))
    assert [finding for finding in findings if finding.state != "ok"] == []
    assert len(findings) == 11


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("task", KNOWN)
def test_the_table_is_true_and_resets_are_seeded_in_every_task(task, build):
    batch = build(2, task)
    first, second = batch, 1
    first.reset([0], [0], [2**63 - 1])
    instance = first.instances[0, 0]
    assert {*KNOWN[task].cameras} == {*instance.camera_names()}
    assert instance.env.action_spec[0].tolist() == [-1.0] * batch.spec.action.dim
    expected = play(first, 0)
    first.reset([0, second], [0, 0], [5, 6])
    assert not same(play(first, 0)[:1], expected[:1]), "another seed is another state"
    play(first, second)
    first.reset([second, 0], [0, 0], [2**63 - 1, 2**63 - 1])
    assert same(play(first, 0), expected), "the same row, after another episode"
    assert same(play(first, second), expected), "another row"


@pytest.mark.sim
def test_a_state_is_robosuites_own_without_accelerations(build):
    batch = build(1)
    batch.reset([0], [0], [4])
    env = batch.instances[0, 0].env
    own = env._get_observations(force_update=True)
    names = [name for name in own if name.startswith("robot0_") and not name.endswith(("-state", "_acc"))]
    expected = np.concatenate([own["object-state"], *(own[name] for name in names)]).astype(np.float32)
    assert np.array_equal(observed(batch, 0)["state"][0], expected)
    batch.step([0], np.ones((1, 7), np.float32))
    assert np.allclose(observed(batch, 0)["state"][0, :3], env.sim.data.body_xpos[env.cube_body_id])


@pytest.mark.sim
def test_a_reset_leaves_the_global_random_states_alone(build):
    batch = build(1)
    np.random.seed(9)
    before = np.random.get_state()[1].tolist()
    batch.reset([0], [0], [1])
    assert np.random.get_state()[1].tolist() == before


@pytest.mark.sim
def test_a_hard_reset_varies_the_model_by_the_seed_alone(build):
    soft, hard = build(1), build(2, hard_reset=True)
    soft.reset([0], [0], [1])
    kept = soft.instances[0, 0].model
    soft.reset([0], [0], [2])
    assert soft.instances[0, 0].model is kept
    hard.reset([0, 1], [0, 0], [1, 2])
    sizes = [hard.instances[row, 0].env.cube.size for row in (0, 1)]
    assert sizes[0] != sizes[1]
    first = play(hard, 0)
    hard.reset([1], [0], [1])
    assert hard.instances[1, 0].env.cube.size == sizes[0]
    assert same(play(hard, 1), first)


def lifting_action(state: np.ndarray, closed_steps: int) -> np.ndarray:
    """OSC_POSITION action [4] from Lift's state [53]: over the cube, down, close, up."""
    if closed_steps:
        return np.array([0.0, 0.0, float(closed_steps > 8), 1.0], np.float32)
    to_cube = state[:3] - state[38:41]  # from the hand
    move = np.clip(20.0 * to_cube, -1.0, 1.0)
    if np.linalg.norm(to_cube[:2]) > 0.02:
        move[2] = 0.0
    return np.array([*move, -1.0], np.float32)


def lift(batch: RobosuiteBatch) -> tuple[list[float], bool, bool, bool]:
    """Rewards of a scripted lift in row 0, and the flags of its last step."""
    rewards, closed = [], 0
    for _ in range(batch.spec.max_steps):
        state = observed(batch, 0)["state"][0]
        closed += bool(closed or np.linalg.norm(state[:3] - state[38:41]) < 0.015)
        action = lifting_action(state, closed)
        result = batch.step([0], action[None])
        rewards.append(float(result.reward[0]))
        if result.terminated[0] or result.truncated[0]:
            break
    return rewards, bool(result.terminated[0]), bool(result.truncated[0]), bool(result.success[0])


@pytest.mark.sim
def test_a_scripted_lift_succeeds_and_earns_the_sparse_reward_once(build):
    batch = build(1, controller="OSC_POSITION", max_steps=100)
    batch.reset([0], [0], [3])
    rewards, terminated, truncated, success = lift(batch)
    assert (sum(rewards), rewards[-1], terminated, truncated, success) == (1.0, 1.0, True, False, True)
    assert len(rewards) < 90
    longer = build(1, controller="OSC_POSITION", max_steps=100, end_on_success=False, time_limit="truncates")
    longer.reset([0], [0], [3])
    again, terminated, truncated, _ = lift(longer)
    assert (len(again), sum(again), terminated, truncated) == (100, 1.0, False, True)


@pytest.mark.sim
def test_dense_rewards_grow_to_1(build):
    batch = build(1, controller="OSC_POSITION", max_steps=100, reward="dense")
    batch.reset([0], [0], [3])
    rewards = lift(batch)[0]
    assert 0.0 < rewards[0] < 0.5
    assert rewards[-1] == 1.0
    assert max(rewards) == 1.0


@pytest.mark.sim
def test_a_row_that_fails_fails_alone_and_is_made_anew(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    batch, alone, still = build(2), build(1), np.zeros((2, 7), np.float32)
    batch.reset([0, 1], [0, 0], [1, 2])
    alone.reset([0], [0], [2])
    broken = batch.instances[0, 0]
    broken.data.qvel[:] = np.nan
    with pytest.raises(RowsFailed, match=r"^row 0: UnstableSimulationError: MuJoCo found the state") as failed:
        batch.step([0, 1], still)
    assert failed.value.result.reward.shape == (2,)
    alone.step([0], still[:1])
    assert np.array_equal(observed(batch, 1)["state"], observed(alone, 0)["state"]), "the other row was stepped"
    batch.reset([0], [0], [2])
    assert batch.instances[0, 0] is not broken
    alone.reset([0], [0], [2])
    assert same(play(batch, 0), play(alone, 0))
    given_up = batch.instances[0, 0]
    batch.discard(0)
    batch.discard(0)
    batch.reset([0], [0], [2])
    assert batch.instances[0, 0] is not given_up


@pytest.mark.sim
def test_rows_of_a_task_share_a_renderer_and_show_their_own_state(build):
    batch = build(2, "Lift", "Door", observation="pixels", image_size=48, cameras=("agentview", "robot0_eye_in_hand"))
    batch.reset([0, 1], [0, 0], [7, 7])
    seen = observed(batch, 0, 1)
    assert np.array_equal(seen["image"][0], seen["image"][1]), "equal seeds in two rows"
    assert seen["image"][0].std() > 10
    assert not np.array_equal(seen["image"], seen["robot0_eye_in_hand"])
    reds = (seen["image"][0].astype(int)[..., 0] - seen["image"][0].astype(int)[..., 1]) > 60
    assert reds.any(), "the red cube is in view"
    assert seen["image"][0][0].mean() < seen["image"][0][-1].mean(), "upright: the white table is below the dark wall"
    batch.reset([1], [0], [8])
    assert not np.array_equal(observed(batch, 1)["image"][0], seen["image"][0])
    assert np.array_equal(observed(batch, 0)["image"][0], seen["image"][0])
    assert len(batch.renderers) == 1
    batch.reset([1], [1], [8])
    observed(batch, 1)
    assert len(batch.renderers) == 2


@pytest.mark.sim
def test_a_state_can_be_drawn_for_a_video(build):
    batch = build(1)
    assert batch.settings.rendering() == batch.settings
    batch.reset([0], [0], [1])
    assert batch.render(0).shape == (256, 256, 3)
    assert batch.render(0).std() > 10


@pytest.mark.sim
def test_new_models_are_drawn_by_new_renderers(build):
    batch = build(1, observation="pixels", hard_reset=True)
    images = []
    for seed in (1, 2, 1):
        batch.reset([0], [0], [seed])
        images.append(observed(batch, 0)["image"][0])
    assert np.array_equal(images[0], images[2])
    assert not np.array_equal(images[0], images[1])
    assert len(batch.renderers) == 1


@pytest.mark.sim
def test_environments_of_another_package_are_registered_by_it(build, tmp_path, monkeypatch):
    (tmp_path / "own_lifts.py").write_text(
        "from robosuite.environments.manipulation.lift import Lift\nclass LiftHigher(Lift):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    batch = build(1, "LiftHigher", registered_by="own_lifts", kwargs={"table_friction": (1.0, 0.005, 0.0001)})
    assert batch.spec.tasks[0].instruction == "lift higher"
    assert batch.spec.observation["state"].shape == (53,)
    with pytest.raises(ConfigError, match=r"env.tasks = LiftHigh: did you mean LiftHigher\? neither robosuite nor own"):
        RobosuiteSettings(tasks=("LiftHigh",), registered_by="own_lifts", observation="state").spec()
    with pytest.raises(MissingError, match=r"env.registered_by = no_lifts: it is to register LiftLow, but importing"):
        RobosuiteSettings(tasks=("LiftLow",), registered_by="no_lifts", observation="state").spec()


@pytest.mark.sim
def test_a_kitchen_package_that_refuses_its_versions_is_quoted(kitchens, robosuite):
    for folder in ("textures", "objects"):
        (kitchens / "models" / "assets" / folder).mkdir(parents=True)
    with pytest.raises(MissingError, match=r"importing it raised AssertionError: MuJoCo version must be 3.3.1"):
        RobosuiteSettings(tasks=("CloseFridge",), robot="PandaOmron").spec()


def first_observation(build: Build, changes: dict[str, object]) -> dict[str, np.ndarray]:
    batch = build(1, **changes)
    batch.reset([0], [0], [1])
    return observed(batch, 0)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"robot": "Pandda"}, "env.robot = Pandda: did you mean Panda"),
        ({"kwargs": {"table_frictoin": 1}}, "env.kwargs.table_frictoin: Lift takes no such argument"),
        ({"robot": "UR5e", "cameras": ("sidevue",), "observation": "pixels"}, "env.cameras = sidevue: the cameras of"),
    ],
)
def test_what_only_robosuite_can_refuse_is_one_sentence(build, changes, said):
    with pytest.raises(ConfigError, match=said):
        first_observation(build, changes)


@pytest.mark.sim
def test_other_robots_and_controllers_are_measured(build):
    batch = build(1, robot="UR5e", controller="JOINT_POSITION")
    assert batch.spec.observation["state"].shape == (57,)
    assert batch.spec.action.dim == 7
    narrow = build(1, controller="IK_POSE").spec.action
    assert max(narrow.high[:6]) < 0.1
    assert narrow.high[6] == 1.0


@pytest.mark.sim
@pytest.mark.parametrize("hard_reset", [False, True])
def test_episodes_that_are_reset_ahead_in_a_thread_are_equal_bit_for_bit(build, hard_reset):
    """Pictures and proprioception of two rows over two episodes each; renderers of new models change threads."""
    plain = build(2, observation="pixels", hard_reset=hard_reset)
    ahead = ResetAhead(plain.settings.build(4), 2)
    actions = np.random.default_rng(1).uniform(-1, 1, (5, 2, plain.spec.action.dim)).astype(np.float32)
    try:
        for first in (0, 2):
            seeds = [first, first + 1]
            ahead.prepare([(0, seed) for seed in seeds], [])
            with ahead.changed:
                ready = [(0, seed) for seed in seeds]
                assert ahead.changed.wait_for(
                    lambda ready=ready: sorted(s.start for s in ahead.spares if s.start and s.ready) == ready, 60.0
                )
            for batch in (plain, ahead):
                batch.reset([0, 1], [0, 0], seeds)
            for step in range(6):
                wanted, found = observed(plain, 0, 1), observed(ahead, *np.arange(2))
                assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
                if step < 5:
                    for batch in (plain, ahead):
                        batch.step(np.arange(2), actions[step])
    finally:
        ahead.close()
    assert (ahead.ready, ahead.waited, ahead.in_place) == (4, 0, 0)
