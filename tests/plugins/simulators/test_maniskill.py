"""ManiSkill: settings and drivers without the simulator, the GPU batch on a stand-in, and real episodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.plugins.simulators.bridge_assets import BACKGROUND as BRIDGE
from tests.plugins.simulators.bridge_assets import make_assets
from tests.process.runs import LOCKSTEP, config

from polyrhythm.config.load import load_config
from polyrhythm.envs.base import EnvBatch, RowsFailed, StepResult, batch_traits
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.plugins.simulators.maniskill import library
from polyrhythm.plugins.simulators.maniskill.env import CpuBatch, GpuBatch, ManiSkillSettings
from polyrhythm.plugins.simulators.maniskill.library import probe
from polyrhythm.plugins.simulators.maniskill.settings import INSTRUCTIONS, OTHER_WORDS, instruction_of, read_sentences
from polyrhythm.plugins.simulators.maniskill.world import World
from polyrhythm.scheduler.records import DeviceYielded
from polyrhythm.specs import ActionSpec, ArraySpec, Task

PICK, PUSH, PULL, LIFT = "PickCube-v1", "PushCube-v1", "PullCube-v1", "LiftPegUpright-v1"
#: Tasks that need no assets besides those in ManiSkill's package.
SHIPPED = (PICK, PUSH, "StackCube-v1", "PullCube-v1", "LiftPegUpright-v1", "PegInsertionSide-v1")
TWIN = "tests.plugins.simulators.twin_task:PutOne-v1"
Build = Callable[..., EnvBatch]


@pytest.fixture
def build(maniskill: None) -> Iterator[Build]:
    """Makes CPU batches and closes them."""
    made: list[EnvBatch] = []

    def build_batch(rows: int, *tasks: str, **changes: object) -> EnvBatch:
        made.append(ManiSkillSettings(**{"tasks": tasks, "image_size": 32, **changes}).build(rows))
        return made[-1]

    yield build_batch
    for batch in made:
        batch.close()


def observe(batch: EnvBatch, rows: list[int]) -> dict[str, np.ndarray]:
    out = {key: np.zeros((len(rows), *spec.shape), spec.dtype) for key, spec in batch.spec.observation.items()}
    batch.observe(rows, out)
    return out


def actions(batch: EnvBatch, *numbers: float) -> np.ndarray:
    """One action of these numbers."""
    return np.array([numbers], np.float32).reshape(1, batch.spec.action.dim)


def differing(settings: ManiSkillSettings, variant: str) -> dict[str, np.ndarray]:
    """The first observation of two episodes in this variant of the settings."""
    changes = settings.variants()[variant].settings if variant else {}
    batch = CpuBatch(settings.model_validate({**settings.model_dump(), **changes}), 1)
    seen = []
    for seed in (5, 6):
        batch.reset([0], [0], [seed])
        seen.append(observe(batch, [0]))
    batch.close()
    return {name: np.concatenate([one[name] for one in seen]) for name in seen[0]}


# ------------------------------------------------------------ without the simulator


def test_settings_need_no_simulator():
    code = (
        "import sys; from polyrhythm.plugins.simulators.maniskill.env import ManiSkillSettings as S;"
        "S(tasks=('PickCube-v1',), backend='auto').simulates_on_gpu;"
        "sys.exit(bool({'mani_skill', 'sapien', 'gymnasium', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tasks": ()}, "at least 1 item"),
        ({"tasks": (PICK, PICK)}, "listed 2 times; list it once"),
        ({"tasks": (PICK,), "instructions": {PUSH: "push"}}, f"instructions has '{PUSH}', which is not among tasks"),
        ({"tasks": (PICK, PUSH), "backend": "gpu"}, "backend = gpu simulates one task, and tasks has 2"),
        ({"tasks": (PICK,), "metrics": ["is grasped"]}, "a metric's name"),
        ({"tasks": (PICK,), "appearance": {"camera_shift": 5}}, "observation: state has no pictures"),
        ({"tasks": (PICK,), "observation": "rgb", "appearance": {"colour_change": 0.5}}, "colours cannot be changed"),
        ({"tasks": (PICK, "StackCube-v1"), "placement": "beyond"}, "StackCube-v1 has no known range; only LiftPeg"),
        ({"tasks": (PICK,), "placement": "beyond", "backend": "gpu"}, "needs rows that are simulated alone; set cpu"),
        ({"tasks": (PICK,), "kwargs": {"obs_mode": "rgb"}}, "observation decides it; leave it out here"),
        (
            {"tasks": (PICK,), "reward": "dense", "reward_flags": {"success": 1}},
            "reward is dense; leave one of them out",
        ),
    ],
)
def test_bad_settings_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        ManiSkillSettings(**settings)


def test_only_what_a_policy_can_notice_and_the_simulator_can_change_is_a_variant():
    assert OTHER_WORDS.keys() == INSTRUCTIONS.keys()
    assert not set(OTHER_WORDS.values()) & set(INSTRUCTIONS.values())
    seen = ManiSkillSettings(tasks=(PICK, PUSH), observation="rgb")
    assert [*seen.variants()] == ["camera", "lighting", "position", "instruction"]
    words = seen.variants()["instruction"].settings["instructions"]
    assert ManiSkillSettings(tasks=(PICK, PUSH), instructions=words).instruction(PUSH) == OTHER_WORDS[PUSH]
    assert [*ManiSkillSettings(tasks=(PICK,)).variants()] == ["position", "instruction"]
    assert [*ManiSkillSettings(tasks=("StackCube-v1",), observation="rgb").variants()] == [
        *("camera", "lighting", "instruction")
    ]
    assert [*ManiSkillSettings(tasks=(PICK,), observation="rgb", backend="gpu").variants()] == ["instruction"]
    assert not ManiSkillSettings(tasks=("own:Mine-v1",)).variants()


def test_an_instruction_is_the_users_else_ours_else_the_words_of_the_id():
    settings = ManiSkillSettings(tasks=(PICK, PUSH), instructions={PICK: "grab it"})
    assert settings.instruction(PICK) == "grab it"
    assert settings.instruction(PUSH) == INSTRUCTIONS[PUSH]
    assert instruction_of("own.tasks:RotateValveLevel0-v1") == "rotate valve level 0"
    assert instruction_of("PickClutterYCB-v1") == "pick clutter ycb"
    assert len(set(INSTRUCTIONS.values())) >= len(INSTRUCTIONS) - 1, "only the two that hold something at a goal agree"


def test_auto_takes_a_gpu_for_one_task_alone(monkeypatch):
    one, two = (ManiSkillSettings(tasks=tasks, backend="auto") for tasks in ((PICK,), (PICK, PUSH)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert (one.simulates_on_gpu, two.simulates_on_gpu) == (True, False)
    assert one.draws_on_gpu
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert not one.simulates_on_gpu
        assert not one.draws_on_gpu


def test_a_variable_that_names_no_manifest_is_to_be_unset(monkeypatch, tmp_path):
    manifest = tmp_path / "lvp_icd.json"
    manifest.write_text("{}")
    monkeypatch.setenv("VK_ICD_FILENAMES", f"{manifest}:{tmp_path}/none.json")
    assert library.vulkan_manifests() == [str(manifest)]
    assert "apt-get install" in library.how_to_get_driver()
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "gone.json"))
    assert library.vulkan_manifests() == []
    assert library.how_to_get_driver().startswith("unset VK_DRIVER_FILES")


def test_debian_12_gets_mesa_from_its_backports(monkeypatch):
    monkeypatch.setattr(library, "vulkan_manifests", lambda: ["some"])
    monkeypatch.setattr(library, "_codename", lambda: "bookworm")
    assert library.how_to_get_driver().endswith("apt-get install -y -t bookworm-backports mesa-vulkan-drivers")
    monkeypatch.setattr(library, "_codename", lambda: "trixie")
    assert "bookworm" not in library.how_to_get_driver()


class Line:
    """A stand-in for a GPU's world: rows that move along a line by their action; done at 3."""

    task, limit, rows, reports_success = "Line-v1", 4, 3, True
    action = ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,))

    def __init__(self) -> None:
        self.at = np.zeros((self.rows, 1), np.float32)
        self.calls: list[list[tuple[int, int, str]]] = []
        self.drawn = 0

    def tasks(self) -> list[Task]:
        return [Task(f"Line-v1: {sentence}", sentence, "Line-v1") for sentence in ("go", "run")]

    def reset(self, rows: list[int], seeds: list[int], sentences: list[str]) -> None:
        self.calls.append([*zip(rows, seeds, sentences, strict=True)])
        self.at[rows] = np.array(seeds)[:, None] / 10

    def step(self, actions: np.ndarray) -> StepResult:
        self.at = self.at + actions
        done = self.at[:, 0] >= 3
        return StepResult(self.at[:, 0].copy(), done, np.zeros_like(done), done)

    def tensors(self) -> dict[str, Any]:
        import torch

        self.drawn += 1
        return {"state": torch.from_numpy(self.at.copy())}

    def arrays(self) -> dict[str, ArraySpec]:
        return {"state": ArraySpec((1,), "float32")}


def test_a_gpu_batch_steps_all_rows_in_the_order_asked_and_resets_by_one_call(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = Line()
    batch = GpuBatch(ManiSkillSettings(tasks=("Line-v1",), backend="gpu", time_limit="truncates"), line)  # type: ignore[arg-type]
    assert (batch.rows, batch.spec.step_rows, batch.spec.reset_rows, batch.spec.max_steps) == (3, False, True, 4)
    batch.reset([2, 0, 1], [0, 1, 0], [2, 0, 1])
    assert line.calls == [[(2, 2, "go"), (0, 0, "run"), (1, 1, "go")]], "one call"
    result = batch.step([2, 1, 0], np.array([[1], [0.5], [0]], np.float32))
    assert np.allclose(result.reward, [1.2, 0.6, 0.0])
    assert np.allclose(observe(batch, [0, 2])["state"][:, 0], [0.0, 1.2])
    for _ in range(2):
        result = batch.step([0, 1, 2], np.array([[0], [0], [1]], np.float32))
    assert result.terminated.tolist() == [False, False, True]
    batch.reset([2], [0], [5])
    assert np.allclose(observe(batch, [0, 1, 2])["state"][:, 0], [0.0, 0.6, 0.5])
    result = batch.step([0, 1, 2], np.zeros((3, 1), np.float32))
    assert result.truncated.tolist() == [True, True, False], "a row's time begins with its reset"


def test_a_gpu_batch_draws_once_however_often_it_is_asked(monkeypatch):
    """A station asks row by row once rows are at different steps."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = Line()
    batch = GpuBatch(ManiSkillSettings(tasks=("Line-v1",), backend="gpu"), line)  # type: ignore[arg-type]
    batch.reset([0, 1, 2], [0, 0, 0], [1, 2, 3])
    for change in (lambda: batch.step([0, 1, 2], np.ones((3, 1), np.float32)), lambda: batch.reset([1], [0], [7])):
        for again in (change, lambda: None):
            again()
            drawn = line.drawn
            seen = [observe(batch, [row])["state"][0] for row in (0, 1, 2)]
            assert np.array_equal(seen, line.at)
            assert line.drawn == drawn + (again is change)


def test_a_variant_is_asked_for_its_form_on_the_device_that_it_will_run_on(monkeypatch):
    """With `auto` a GPU simulates the usual placement alone; rows of a CPU step alone."""
    asked: list[ManiSkillSettings] = []
    monkeypatch.setattr(
        "polyrhythm.plugins.simulators.maniskill.env.probe", lambda settings: asked.append(settings) or Line
    )
    monkeypatch.setattr(Line, "spec", None, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    usual = ManiSkillSettings(tasks=(PICK,), backend="auto")
    for settings in (usual, usual.model_copy(update={"placement": "beyond"})):
        settings.spec()
    assert [one.simulates_on_gpu for one in asked] == [True, False]


def test_an_episode_is_drawn_among_all_of_its_sentence():
    """Numbers of 2 objects × 2 backgrounds × 3 places, the last the fastest."""

    class Numbered:
        num_envs, total_num_trials, xyz_configs, quat_configs = 3, 12, [0, 0, 0], [0]
        numbers = np.zeros(3, np.int64)

        def get_language_instruction(self) -> list[str]:
            return [f"object {number // 6}" for number in self.numbers]

    env = Numbered()
    found = read_sentences(env, "Any-v1", lambda numbers: setattr(env, "numbers", numbers))
    assert found is not None
    assert [*found.starts] == ["object 0", "object 1"]
    drawn = {found.episode("object 1", seed) for seed in range(200)}
    assert drawn == set(range(6, 12))
    assert found.episode("object 1", 2**62) == found.episode("object 1", 2**62)
    Numbered.total_num_trials = 10**9
    with pytest.raises(ConfigError, match=r"too many instructions to read; give it one by env.instructions: \{Any-v1"):
        read_sentences(env, "Any-v1", print)
    Numbered.total_num_trials = 0
    assert read_sentences(env, "Any-v1", print) is None


@pytest.fixture
def probe_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Probes with a package `mani_skill` that does nothing but this."""

    def try_it(source: str) -> None:
        (tmp_path / "mani_skill").mkdir()
        (tmp_path / "mani_skill" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        probe(ManiSkillSettings(tasks=(PICK,), instructions={PICK: source}))

    return try_it


def test_a_package_that_cannot_be_imported_is_named_with_the_command_that_installs_it(probe_with):
    with pytest.raises(MissingError, match=r"No module named 'sapien_x'; run: .* 'polyrhythm\[maniskill\]'"):
        probe_with("import sapien_x")


def test_a_driver_that_ends_the_process_is_one_sentence(probe_with):
    with pytest.raises(MissingError, match=r"with status -9 .*; install another Vulkan driver") as seen:
        probe_with("import os\nprint('noise')\nos.kill(os.getpid(), 9)")
    assert "\n" not in str(seen.value)


def test_a_question_on_stdin_gets_no_answer(probe_with):
    with pytest.raises(ConfigError, match="a trial of them raised EOFError"):
        probe_with("input('(y|n): ')")


# ------------------------------------------------------------ with the simulator


@pytest.mark.sim
@pytest.mark.parametrize(
    ("settings", "kind", "problem"),
    [
        ({"tasks": ("PickCubes-v1",)}, ConfigError, r"no such task; the nearest are PickCube-v1, "),
        ({"tasks": ("PickSingleYCB-v1",)}, MissingError, r"assets are not on this machine \(ycb\); run: python -m m"),
        ({"tasks": (PICK, PUSH)}, ConfigError, r"observation \(state float32 \[35\]\) differs from that of PickCube"),
        ({"control_mode": "pd_magic"}, ConfigError, "env.control_mode = pd_magic: .* has pd_joint_delta_pos, "),
        ({"robot": "r2d2"}, ConfigError, "env.robot = r2d2: ManiSkill has no such robot"),
        ({"observation": "rgb", "camera": "eye"}, ConfigError, "env.camera = 'eye': .* choose one of base_camera"),
        ({"tasks": ("TwoRobotPickCube-v1",)}, ConfigError, r"its action is Dict.*, not a vector"),
        ({"backend": "gpu", "renderer": "cpu"}, MissingError, "env.backend = gpu: there is no CUDA device"),
        ({"tasks": ("Empty-v1",)}, ConfigError, "this one has no reward"),
        ({"reward_flags": {"won": 1}}, ConfigError, "env.reward_flags.won: PickCube-v1 reports no such flag; it has "),
        ({"tasks": (TWIN,)}, ConfigError, "env.observation = state: .* has no such observation; choose rgb"),
        ({"tasks": (TWIN,), "observation": "rgb"}, ConfigError, "env.kwargs: .* missing 1 required .*'obj_set'"),
        (
            {"tasks": (TWIN,), "observation": "rgb", "reward": "dense"},
            ConfigError,
            "choose sparse, since this one has no",
        ),
        ({"tasks": ("nowhere:A-v1",)}, MissingError, "there is no module nowhere here; install the package"),
    ],
)
def test_what_cannot_run_is_one_sentence_and_asks_nothing(maniskill, monkeypatch, capfd, settings, kind, problem):
    if "backend" in settings and library.count_gpus():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("MS_ASSET_DIR", "/nonexistent")
    with pytest.raises(kind, match=problem) as seen:
        ManiSkillSettings(**{"tasks": (PICK,), **settings}).check()
    assert "\n" not in str(seen.value)
    assert capfd.readouterr() == ("", ""), "nothing of ManiSkill's reaches the terminal"


@pytest.mark.sim
def test_a_question_within_a_process_is_a_missing_asset(maniskill, monkeypatch):
    from mani_skill.utils import download_asset

    from polyrhythm.plugins.simulators.maniskill import library

    asks = download_asset.prompt_yes_no
    with pytest.raises(MissingError, match="robot needs x"), library.no_questions(PICK):
        download_asset.prompt_yes_no("robot needs x which could not be found")
    arm = "Robot widowx250s_bridgedataset_flat_table has assets available for download. Would you like to?"
    command = "run: python -m mani_skill.utils.download_asset widowx250s$"
    with pytest.raises(MissingError, match=command), library.no_questions(PICK):
        download_asset.prompt_yes_no(arm)
    assert download_asset.prompt_yes_no is asks


@pytest.mark.sim
@pytest.mark.parametrize("task", SHIPPED)
def test_tasks_that_need_no_download_run(build, task):
    batch = build(1, task, reward="normalized_dense")
    assert isinstance(batch, CpuBatch)
    batch.reset([0], [0], [3])
    result = batch.step([0], actions(batch, *[0.5] * batch.spec.action.dim))
    assert 0 < result.reward[0] <= 1
    assert batch.spec.max_steps in (50, 100)


def twin(build: Build, rows: int, **changes: Any) -> EnvBatch:
    section = {"kwargs": {"obj_set": "train"}, "observation": "rgb", "proprio": "joints", "image_size": (24, 32)}
    return build(rows, TWIN, **{**section, **changes})


@pytest.mark.sim
def test_a_digital_twin_has_a_task_for_each_of_its_sentences(build):
    batch = twin(build, 2)
    assert [task.instruction for task in batch.spec.tasks] == ["put cube on plate", "put cup on plate"]
    assert {task.suite for task in batch.spec.tasks} == {TWIN}
    numbers = set()
    for seed in range(12):
        batch.reset([0, 1], [1, 0], [seed, seed])
        rows = [batch.row_worlds[row].env for row in (0, 1)]
        assert [env.get_language_instruction()[0] for env in rows] == ["put cup on plate", "put cube on plate"]
        numbers.add(rows[0].number)
    assert len(numbers) > 4, "different backgrounds and places"
    one = twin(build, 1, instructions={TWIN: "do it"})
    assert [(task.name, task.instruction) for task in one.spec.tasks] == [(TWIN, "do it")]


@pytest.mark.sim
def test_the_picture_of_a_digital_twin_is_its_own_resized_and_asks_for_no_second_evaluation(build):
    import torch
    from PIL import Image
    from tests.plugins.simulators.twin_task import BACKGROUNDS

    batch = twin(build, 1, reward_flags={"asked": 0.5})
    batch.reset([0], [1], [3])
    env = batch.row_worlds[0].env
    rewards = []
    for _ in range(3):
        rewards.append(float(batch.step([0], actions(batch, *[0.3] * 8)).reward[0]))
        seen = [observe(batch, [0]) for _ in range(2)]
        assert all(np.array_equal(seen[0][name], seen[1][name]) for name in seen[0])
    assert rewards == [1.0, 0.5, 0.5], "the change of half of what was 1 after the reset, and 0 before"
    whole = type(env).get_obs(env, {"success": torch.zeros(1), "asked": torch.zeros(1)})["sensor_data"]["side"]["rgb"]
    assert whole.shape == (1, 48, 64, 3)
    small = Image.fromarray(whole[0].numpy()).resize((32, 24), Image.Resampling.BILINEAR)
    assert np.array_equal(seen[0]["image"][0], np.asarray(small))
    behind = BACKGROUNDS[env.number // 6 % 2]
    share = (seen[0]["image"][0] == behind).all(axis=2).mean()
    assert 0.2 < share < 1, "the robot is before it"
    assert seen[0]["proprio"].shape == (1, 9)


@pytest.mark.sim
def test_a_task_without_a_reward_earns_its_success(build, monkeypatch):
    import torch

    batch = twin(build, 1)
    batch.reset([0], [0], [3])
    assert batch.step([0], actions(batch, *[0.0] * 8)).reward[0] == 0
    for won, lost in ((True, False), (False, True)):
        flags = {"success": torch.tensor([won]), "fail": torch.tensor([lost])}
        monkeypatch.setattr(batch.row_worlds[0].env, "evaluate", lambda flags=flags: flags)
        result = batch.step([0], actions(batch, *[0.0] * 8))
        assert (result.reward[0], result.success[0], result.terminated[0]) == (1 if won else -1, won, True)


@pytest.mark.sim
def test_an_episode_with_another_sentence_than_its_tasks_is_refused(build, monkeypatch):
    batch = twin(build, 1)
    batch.reset([0], [0], [3])
    monkeypatch.setattr(batch.row_worlds[0].env, "get_language_instruction", lambda: ["put it away"])
    with pytest.raises(RowsFailed, match="says 'put it away' instead of 'put cube on plate'"):
        batch.reset([0], [0], [4])


@pytest.mark.sim
def test_maniskills_own_bridge_task_runs_with_its_files(maniskill, tmp_path):
    """With an arm, objects and a photograph that are made here, in a process that has not read where they lie."""
    make_assets(tmp_path)
    section = {"tasks": ("PutCarrotOnPlateInScene-v1",), "observation": "rgb", "proprio": "joints", "backend": "cpu"}
    section |= {"image_size": (48, 64), "reward_flags": {"is_src_obj_grasped": 0.1, "success": 1.0}, "max_steps": 7}
    code = """
        import json, sys
        import numpy as np
        from polyrhythm.plugins.simulators.maniskill.env import ManiSkillSettings
        batch = ManiSkillSettings.model_validate_json(sys.argv[1]).build(2)
        seen = {name: np.zeros((2, *a.shape), a.dtype) for name, a in batch.spec.observation.items()}
        batch.reset([0, 1], [0, 0], [1, 2])
        batch.observe([0, 1], seen)
        result = batch.step([0, 1], np.zeros((2, 7), np.float32))
        behind = (seen["image"] == BACKGROUND).all(axis=3).mean()
        same = np.array_equal(*seen["image"])
        told = [batch.spec.tasks[0].instruction, *seen["image"].shape, behind, same, *result.reward.tolist()]
        print("\\n" + json.dumps(told, default=float))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code).replace("BACKGROUND", str(BRIDGE)), json.dumps(section)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MS_ASSET_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    instruction, *shape, behind, same, first, second = json.loads(done.stdout.splitlines()[-1])
    assert (instruction, shape) == ("put carrot on plate", [2, 48, 64, 3])
    assert 0.3 < behind < 1
    assert not same, "the carrot lies elsewhere"
    assert (first, second) == (0, 0)


@pytest.mark.sim
def test_the_state_is_maniskills_own_and_steps_are_bit_equal_to_it(build):
    import gymnasium

    batch = build(2, PICK, reward="dense", time_limit="truncates")
    batch.reset([0, 1], [0, 0], [7, 8])
    bare = gymnasium.make(PICK, num_envs=1, obs_mode="state", reward_mode="dense", render_backend="cpu")
    state, _ = bare.reset(seed=8)  # library_seed of a small seed is itself
    assert np.array_equal(observe(batch, [1])["state"], state.numpy())
    rng = np.random.default_rng(0)
    for _ in range(10):
        action = rng.uniform(-1, 1, (1, 8)).astype(np.float32)
        state, reward, *_ = bare.step(action)
        result = batch.step([1], action)
        assert result.reward[0] == reward.numpy()[0]
        assert np.array_equal(observe(batch, [1])["state"], state.numpy())
    bare.close()


@pytest.mark.sim
def test_a_row_that_fails_takes_no_other_with_it_and_is_made_anew(build, monkeypatch):
    def diverge(_action):
        raise RuntimeError("the solver diverged")

    batch = build(2, "PushCube-v1")
    batch.reset([0, 1], [0, 0], [5, 6])
    first, still = observe(batch, [1]), np.zeros((2, batch.spec.action.dim), np.float32)
    monkeypatch.setattr(batch.row_worlds[1].env, "step", diverge)
    with pytest.raises(RowsFailed, match="row 1: RuntimeError: the solver diverged") as failed:
        batch.step([0, 1], still)
    assert failed.value.result.reward.shape == (2,)
    batch.reset([1], [0], [6])
    assert all(np.array_equal(x, observe(batch, [1])[name]) for name, x in first.items())
    assert batch.step([0, 1], still).reward.shape == (2,)


@pytest.mark.sim
def test_only_observing_draws(build, monkeypatch):
    batch = build(1, PICK, observation="rgb")
    world = batch.worlds[0, 0]
    drawn = []
    draw = world.env._get_obs_sensor_data
    monkeypatch.setattr(world.env, "_get_obs_sensor_data", lambda: drawn.append(1) or draw())
    batch.reset([0], [0], [1])
    for _ in range(3):
        batch.step([0], actions(batch, *[1.0] * 8))
    assert drawn == []
    seen = observe(batch, [0])
    assert drawn == [1]
    assert seen["image"].std() > 10
    assert batch.spec.observation["proprio"].shape == (9 + 9 + 1 + 7 + 3,), "positions, speeds, grasp, hand, goal"


@pytest.mark.sim
def test_an_image_is_that_of_maniskill_and_depth_is_in_metres(build):
    import gymnasium

    batch = build(1, PUSH, observation="rgbd")
    batch.reset([0], [0], [5])
    size = {"width": 32, "height": 32}
    bare = gymnasium.make(PUSH, num_envs=1, obs_mode="rgbd", render_backend="cpu", sensor_configs=size)
    shown, _ = bare.reset(seed=5)  # library_seed of a small seed is itself
    seen, camera = observe(batch, [0]), shown["sensor_data"]["base_camera"]
    assert np.array_equal(seen["image"], camera["rgb"].numpy())
    assert np.allclose(seen["depth"], camera["depth"].numpy() / 1000.0)
    assert 0.3 < np.median(seen["depth"]) < 3
    bare.close()


@pytest.mark.sim
def test_another_camera_and_other_lights_change_the_picture_alone(maniskill):
    settings = ManiSkillSettings(tasks=(PUSH,), observation="rgb", image_size=32)
    usual = differing(settings, "")
    for variant in ("camera", "lighting"):
        varied = differing(settings, variant)
        assert np.array_equal(varied["proprio"], usual["proprio"])
        change = np.abs(varied["image"].astype(int) - usual["image"]).mean(axis=(1, 2, 3))
        assert (change > 3).all(), f"{variant}: {change}"
        assert all(np.array_equal(x, varied[name]) for name, x in differing(settings, variant).items())
    mean = varied["image"].mean(axis=(1, 2, 3)) / usual["image"].mean(axis=(1, 2, 3))
    assert (np.abs(mean - 1) > 0.1).all(), f"brighter or darker: {mean}"


@pytest.mark.sim
def test_a_camera_that_is_elsewhere_is_so_for_each_episode_anew(maniskill):
    """Ten degrees from the usual place, not from that of the episode before."""
    settings = ManiSkillSettings(
        tasks=(PUSH,), observation="rgb", image_size=32, appearance={"camera_shift": 10, "light_change": 0.5}
    )
    world = World(settings, PUSH, 1)
    sensor = world.env._sensors["base_camera"]
    usual, places = sensor.config.pose.sp.to_transformation_matrix(), []
    for seed in (1, 2, 3, 4, 1):
        world.reset([0], [seed], [""])
        found = sensor.camera.get_local_pose().sp.to_transformation_matrix()
        assert np.degrees(np.arccos(usual[:3, 0] @ found[:3, 0])) == pytest.approx(10, abs=0.05)
        assert np.allclose(found[:3, :3].T @ found[:3, :3], np.eye(3), atol=1e-5)
        places.append((found, np.array(world.env.scene.sub_scenes[0].ambient_light)))
    assert np.array_equal(places[0][0], places[4][0])
    assert not np.array_equal(places[0][0], places[1][0])
    assert all(np.isclose(light[0], (0.15, 0.45), atol=1e-3).any() for _, light in places)
    world.close()


@pytest.mark.sim
@pytest.mark.parametrize(
    ("task", "names"), [(PICK, ("cube", "goal_site")), (PUSH, ("obj",)), (PULL, ("obj",)), (LIFT, ("peg",))]
)
def test_objects_are_placed_around_maniskills_range(maniskill, task, names):
    worlds = [World(ManiSkillSettings(tasks=(task,), placement=where), task, 1) for where in ("usual", "beyond")]
    for seed in range(6):
        for world in worlds:
            world.reset([0], [seed], [""])
        for name in names:
            inside, out = (getattr(world.env, name).pose.p[0].numpy() for world in worlds)
            assert abs(inside[:2]).max() <= 0.1 + 1e-5
            assert 0.1 < abs(out[:2]).max() <= 0.15 + 1e-5
            assert out[2] == inside[2]
        before, after = (world.observe()["state"] for world in worlds)
        assert before.shape == after.shape
        assert not np.array_equal(before, after), "the policy sees it"
        assert np.array_equal(before[0, :9], after[0, :9]), "the robot is where it was"
    if task == PUSH:
        env = worlds[1].env
        assert np.allclose((env.goal_region.pose.p - env.obj.pose.p)[0, :2].numpy(), (0.2, 0.0), atol=1e-5)
        assert not worlds[1].step(np.zeros((1, worlds[1].action.dim), np.float32)).success[0]
    for world in worlds:
        world.close()


@pytest.mark.sim
def test_tasks_with_equal_joints_share_rows(build):
    batch = build(2, PICK, PUSH, observation="rgb", proprio="joints")
    assert batch.spec.observation["proprio"].shape == (9,)
    batch.reset([0, 1], [0, 1], [1, 1])
    seen = observe(batch, [0, 1])["image"]
    assert not np.array_equal(seen[0], seen[1])
    batch.reset([0], [1], [1])
    assert np.array_equal(observe(batch, [0])["image"][0], seen[1]), "a row that changes its task"


def pushed(batch: EnvBatch) -> list[Any]:
    """Results of an episode in which the hand goes behind the cube and pushes; control mode pd_ee_delta_pos."""
    results = []
    for _ in range(batch.spec.max_steps):
        state = observe(batch, [0])["state"][0]
        hand, cube = state[18:21], state[28:31]
        behind = cube + np.array([-0.06, 0.0, 0.0]) - hand
        ready = abs(behind[1]) < 0.02 and abs(behind[2]) < 0.02 and behind[0] < 0.03
        way = np.array([0.4, behind[1] * 5, behind[2] * 5]) if ready else behind * 8
        if not ready and hand[2] < 0.05 and behind[0] < -0.03:
            way = np.array([-1.0, 0.0, 1.0])
        results.append(batch.step([0], actions(batch, *np.clip(way, -1, 1), -1.0)))
        if results[-1].terminated[0] or results[-1].truncated[0]:
            break
    return results


@pytest.mark.sim
def test_success_ends_an_episode_or_goes_on_earning(build):
    ends = build(1, PUSH, control_mode="pd_ee_delta_pos")
    ends.reset([0], [0], [4])
    last = pushed(ends)[-1]
    assert (last.success[0], last.terminated[0], last.reward[0]) == (True, True, 1.0)
    goes_on = build(1, PUSH, control_mode="pd_ee_delta_pos", end_on_success=False, time_limit="truncates")
    goes_on.reset([0], [0], [4])
    results = pushed(goes_on)
    assert len(results) == 50
    assert (results[-1].terminated[0], results[-1].truncated[0]) == (False, True)
    assert sum(float(result.reward[0]) for result in results) > 1, "ManiSkill pays at each step with success"


@pytest.mark.sim
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
def test_a_task_without_a_notion_of_success_says_so(build):
    assert build(1, "MS-HopperHop-v1", reward="normalized_dense").spec.reports_success is False
    assert build(1, PICK).spec.reports_success is True


@pytest.mark.sim
def test_flags_of_info_are_metrics(build):
    batch = build(1, PICK, metrics={"is_grasped": "max", "no_such": "last"})
    batch.reset([0], [0], [1])
    metrics = batch.step([0], actions(batch, *[0.0] * 8)).metrics
    assert metrics["is_grasped"].tolist() == [0.0]
    assert np.isnan(metrics["no_such"]).all()


@pytest.mark.sim
def test_a_state_can_be_shown_in_a_video(build):
    batch = build(2, PICK)
    assert batch_traits(batch).draws_rows
    batch.reset([0, 1], [0, 0], [1, 2])
    assert batch.render(1).dtype == np.uint8
    assert batch.render(1).shape[2] == 3
    assert not np.array_equal(batch.render(0), batch.render(1))


POINTS = "tests.plugins.simulators.points_task:{}-v1"


@pytest.fixture
def points(maniskill, monkeypatch) -> Callable[..., World]:
    """Makes worlds of several rows on the CPU: ManiSkill's environment around a scene that is one tensor."""
    monkeypatch.setattr("mani_skill.envs.sapien_env.CPU_SIM_BACKENDS", ())

    def make(task: str, rows: int) -> World:
        name = POINTS.format(task)
        return World(ManiSkillSettings(tasks=(name,), backend="cpu"), name, rows)

    return make


def begin(world: World, rows: list[int], seeds: list[int], sentences: list[str] | None = None) -> np.ndarray:
    """Their states after a reset; calls: how often ManiSkill's `reset` was called."""
    world.reset(rows, seeds, sentences or [""] * len(rows))
    return world.observe()["state"][rows]


@pytest.mark.sim
@pytest.mark.parametrize(("task", "sentences"), [("Points", ("", "")), ("Counting", ("go", "run"))])
def test_rows_reset_by_one_call_are_as_if_alone(points, task, sentences):
    seeds, names = [2**40 + 3, 7, 0, 7, 11], [sentences[i % 2] for i in range(5)]
    alone = points(task, 1)
    wanted = [begin(alone, [0], [seed], [name])[0] for seed, name in zip(seeds, names, strict=True)]
    world = points(task, 6)
    for rows in ([0, 1, 2, 3, 4], [5, 2, 4, 1, 0], [3, 5, 0, 4, 2]):
        before = world.calls
        assert np.array_equal(begin(world, rows, seeds, names), wanted)
        assert world.calls == before + 1
    for row in (4, 0):
        assert np.array_equal(begin(world, [row], [seeds[0]], [names[0]])[0], wanted[0])


@pytest.mark.sim
@pytest.mark.parametrize("task", ["Points", "Counting"])
def test_a_partial_reset_changes_no_other_row(points, task):
    """As it would in RLinf's scene: counters, targets of controllers, and what follows from them."""
    sentence = "go" if task == "Counting" else ""
    one, other = points(task, 4), points(task, 4)
    rng, kept = np.random.default_rng(0), [0, 2]
    for world in (one, other):
        begin(world, [0, 1, 2, 3], [5, 6, 7, 8], [sentence] * 4)
    for step in range(6):
        action = rng.uniform(-1, 1, (4, 3)).astype(np.float32)
        if step in (2, 3):
            begin(one, [3, 1], [step, 9], [sentence] * 2)
        for world in (one, other):
            world.step(action)
        assert np.array_equal(one.observe()["state"][kept], other.observe()["state"][kept])
        if task == "Counting":
            assert one.env.count[kept].tolist() == other.env.count[kept].tolist() == [step + 2.0] * 2


@pytest.mark.sim
def test_a_box_is_that_of_the_row_itself(points):
    world = points("Counting", 4)
    begin(world, [0, 1, 2, 3], [1, 2, 3, 4], ["go"] * 4)
    begin(world, [3, 2], [8, 9], ["run"] * 2)
    assert np.array_equal(world.env.box.numpy(), world.env.scene.points.q.abs().numpy())


@pytest.mark.sim
def test_a_task_that_draws_for_all_rows_together_resets_each_alone(points, caplog):
    with caplog.at_level("INFO"):
        world = points("Together", 5)
    assert "rand of [3] numbers for 5 rows, so its rows are reset one after another" in caplog.text
    before = world.calls
    found = begin(world, [4, 1, 2], [5, 6, 5])
    assert world.calls == before + 3
    assert np.array_equal(found[0, 3:6], found[2, 3:6])
    assert not np.array_equal(found[0, 3:6], found[1, 3:6])
    assert points("Together", 3).calls, "as many numbers as rows: the reset of one row tells"


@pytest.mark.sim
@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("Careless", ": a row that is reset alone changes positions of others"),
        ("Whole", r" cannot reset some rows alone \(raised RuntimeError: shape mismatch"),
        ("Turned", ": a row that is reset alone takes box from others"),
    ],
)
def test_a_task_that_cannot_reset_rows_alone_is_refused(points, task, problem):
    with pytest.raises(ConfigError, match=f"env.backend = gpu: .*{task}-v1{problem}.*; set it to cpu$"):
        points(task, 4)


@pytest.mark.sim
@pytest.mark.parametrize("task", SHIPPED[:5])
def test_states_drawn_by_one_call_are_those_that_maniskill_draws_alone(maniskill, monkeypatch, task):
    """With the tasks' own code, for four rows, whose poses are kept in place of a scene's."""
    import torch

    from polyrhythm.plugins.simulators.maniskill.isolation import RowDraws

    world, seeds, drawn = World(ManiSkillSettings(tasks=(task,), backend="cpu"), task, 1), [3, 8, 2**31 + 5, 12], {}
    env, alone = world.env, []
    for seed in seeds:
        env.reset(seed=seed)
        robot = {"robot": env.agent.robot.get_qpos()}
        alone.append({name: one.pose.raw_pose.clone() for name, one in env.scene.actors.items()} | robot)
    for name, actor in env.scene.actors.items():
        monkeypatch.setattr(actor, "set_pose", lambda pose, name=name: drawn.__setitem__(name, pose))
    monkeypatch.setattr(env.agent, "reset", lambda qpos: drawn.__setitem__("robot", torch.as_tensor(qpos)))
    env._batched_episode_rng.rngs.extend(np.random.RandomState(0) for _ in range(3))
    env._episode_seed = [0] * 4
    with RowDraws(seeds) as draws:
        draws.begin(env, range(4))
        env._initialize_episode(torch.arange(4), {})
    del drawn["table-workspace"]
    assert len(drawn) >= 2
    for name, poses in drawn.items():
        for row, wanted in enumerate(alone):
            assert np.array_equal(np.asarray(getattr(poses, "raw_pose", poses)[row], np.float32), wanted[name][0])
    world.close()


@pytest.mark.sim
@pytest.mark.parametrize(
    ("task", "changes"),
    [
        (PICK, {}),
        (PUSH, {"observation": "rgb", "appearance": {"camera_shift": 10, "light_change": 0.5}}),
        ("StackCube-v1", {"control_mode": "pd_ee_target_delta_pose", "reward": "dense"}),
        (TWIN, {"kwargs": {"obj_set": "train"}, "observation": "rgb", "reward_flags": {"asked": 0.5}}),
    ],
)
def test_an_episode_goes_on_to_the_bit_after_its_simulator_was_away(build, task, changes):
    """In an instance made anew: by rows at different steps, one that has ended, and one that never began."""
    stays, leaves = (build(3, task, max_steps=7, **changes) for _ in range(2))
    rng, dim = np.random.default_rng(0), stays.spec.action.dim
    for step in range(9):
        if step == 5:
            assert batch_traits(leaves).leaves_device
            assert leaves.suspend() >= 0
            assert not any(world.is_open for world in leaves.worlds.values())
            leaves.resume()
            assert leaves.suspend() >= 0, "again, with nothing done"
            leaves.resume()
        rows = [row for row in (0, 1) if step >= 2 * row and (row or step < 7)]
        given = rng.uniform(-1, 1, (len(rows), dim)).astype(np.float32)
        found = []
        for batch in (stays, leaves):
            for row in rows:
                if step == 2 * row:
                    batch.reset([row], [0], [2**40 + row])
            found.append((batch.step(rows, given), observe(batch, rows)))
        (result, seen), (other, also) = found
        for one, two in zip(result[:4], other[:4], strict=True):
            assert np.array_equal(one, two)
        for name, array in seen.items():
            assert np.array_equal(array, also[name]), (step, name)


@pytest.mark.sim
@pytest.mark.parametrize("task", ["Points", "Counting"])
def test_rows_of_one_scene_go_on_to_the_bit_after_it_was_away(points, task):
    sentences = ["run", "go", "go", "run"] if task == "Counting" else [""] * 4
    stays, leaves = points(task, 4), points(task, 4)
    for world in (stays, leaves):
        begin(world, [0, 1, 2, 3], [5, 6, 7, 8], sentences)
    rng = np.random.default_rng(0)
    for step in range(8):
        action = rng.uniform(-1, 1, (4, 3)).astype(np.float32)
        for world in (stays, leaves):
            world.step(action)
            if step in (2, 6):
                begin(world, [step // 2], [step], sentences[:1])
        if step in (3, 4, 6):
            leaves.suspend()
            assert not leaves.is_open
            leaves.resume()
        assert np.array_equal(stays.observe()["state"], leaves.observe()["state"])
        if task == "Counting":
            assert stays.env.count.tolist() == leaves.env.count.tolist()
            assert stays.env.episode_id.tolist() == leaves.env.episode_id.tolist()


@pytest.mark.sim
def test_a_gpu_batch_of_one_row_does_what_a_cpu_batch_does(maniskill):
    """The world of one row on the CPU in place of a GPU's."""
    settings = ManiSkillSettings(tasks=(PICK,), backend="cpu")
    cpu, gpu = CpuBatch(settings, 1), GpuBatch(settings, World(settings, PICK, 1))
    assert (batch_traits(cpu).observes_on_device, batch_traits(gpu).observes_on_device) == (False, True)
    for batch in (cpu, gpu):
        batch.reset([0], [0], [9])
        batch.step([0], actions(batch, *[0.3] * 8))
    wanted = observe(cpu, [0])["state"]
    assert np.array_equal(wanted, observe(gpu, [0])["state"])
    assert np.array_equal(wanted, gpu.observe_on_device([0])["state"].numpy())
    gpu.suspend()
    gpu.resume()
    assert np.array_equal(wanted, observe(gpu, [0])["state"])
    cpu.close()
    gpu.close()


@pytest.mark.sim
def test_a_tensor_of_pictures_is_what_the_arrays_are(maniskill):
    """To one level where a digital twin's picture is resized on its device, as Pillow does not compute in floats."""
    import torch

    twin_settings = {"kwargs": {"obj_set": "train"}, "observation": "rgb", "proprio": "joints", "image_size": (24, 32)}
    for task, section in ((PUSH, {"observation": "rgbd", "image_size": 32}), (TWIN, twin_settings)):
        world = World(ManiSkillSettings(tasks=(task,), **section), task, 1)
        arrays, tensors = world.observe(), world.tensors()
        assert arrays.keys() == tensors.keys()
        for name, array in arrays.items():
            assert (tensors[name].dtype, tuple(tensors[name].shape)) == (torch.from_numpy(array).dtype, array.shape)
            most = 1 if (task, name) == (TWIN, "image") else 0
            assert np.abs(tensors[name].numpy().astype(np.float64) - array).max() <= most
        world.close()


@pytest.mark.sim
def test_a_task_of_a_module_in_the_working_folder(maniskill, monkeypatch, tmp_path):
    source = """
        from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
        from mani_skill.utils.registration import register_env

        @register_env("PushNearby-v1", max_episode_steps=7)
        class PushNearby(PushCubeEnv):
            goal_radius = 0.05
    """
    (tmp_path / "own_tasks.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    spec = ManiSkillSettings(tasks=("own_tasks:PushNearby-v1",)).spec()
    assert (spec.max_steps, spec.tasks[0].instruction) == (7, "push nearby")


@pytest.mark.sim
def test_the_recipe_fits_the_simulator(maniskill):
    env = load_config("maniskill_pushcube").env
    assert isinstance(env, ManiSkillSettings)
    assert probe(env).spec.observation["state"].shape == (35,)


def whole_run(folder: Path, env: dict[str, Any], rows: int, **placement: Any) -> tuple[Any, dict[str, Any], Any]:
    """Two versions of a lock-step run; its pipeline, closed, statistics and last weights."""
    base = {
        **LOCKSTEP,
        "env": {"tasks": [PUSH], "control_mode": "pd_ee_delta_pos", "max_steps": 6, **env},
        "policy": {"type": "gaussian", "hidden": 16},
        "rollout": {"rows": rows, "routing": "fixed", "buckets": [4]},
        "training": {**LOCKSTEP["training"], "versions": 2, "mini_batch_samples": 2},
    }
    folder.mkdir()
    changes = {"launcher": "local", "placement": {"simulated_devices": 1, **placement}} if placement else {}
    pipeline = build_pipeline(RunContext(config(base, **{"launcher": "inline", **changes}), folder=folder), record=True)
    with closing(pipeline):
        pipeline.loop.train_until(2)
        statistics = pipeline.launcher.hosting.statistics(fresh=True)
        _, weights = pipeline.weights.read(2)
    return pipeline, statistics, weights


SCENE = {"type": "tests.plugins.simulators.scene_settings:SceneSettings"}
ON_ONE_DEVICE = {kind: {"devices": "0"} for kind in ("simulators", "generators", "trainer")}


@pytest.mark.sim
@pytest.mark.parametrize(("env", "rows"), [({"type": "maniskill"}, 2), (SCENE, 1)], ids=["rows", "scene"])
def test_under_a_lease_a_run_has_the_weights_of_one_without(maniskill, tmp_path, env, rows):
    """A device that simulator, generator and trainer have in turn, each switch with a new instance."""
    import torch

    _, _, wanted = whole_run(tmp_path / "alone", env, rows)
    leased = {"sharing": "lease", "lease": {"min_hold_s": 0.05}, **ON_ONE_DEVICE}
    pipeline, statistics, weights = whole_run(tmp_path / "leased", env, rows, **leased)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in weights.items())
    left = [decision.event for decision in pipeline.loop.trace if isinstance(decision.event, DeviceYielded)]
    assert {event.station for event in left} == {"simulator-0", "generator-0", "trainer"}
    assert statistics["simulator-0"]["switches"] >= 4
    assert statistics["generator-0"].get("rows_on_device", 0) == 0, "the simulator is away when its request is answered"


@pytest.mark.sim
def test_a_generator_on_the_scenes_device_reads_its_observations_there(maniskill, tmp_path):
    import torch

    _, _, wanted = whole_run(tmp_path / "alone", SCENE, 1)
    _, statistics, weights = whole_run(tmp_path / "devices", SCENE, 1, **ON_ONE_DEVICE)
    assert statistics["generator-0"]["rows_on_device"] == statistics["generator-0"]["rows"] > 0
    assert all(torch.equal(wanted[name], tensor) for name, tensor in weights.items())


@pytest.mark.gpu
def test_rows_on_a_gpu_are_reset_alone_and_equal_seeds_are_equal_to_rounding(maniskill, cuda):
    """Never run so far: no machine with a GPU was at hand."""
    batch = ManiSkillSettings(tasks=(PUSH,), backend="gpu", renderer="gpu").build(4)
    batch.reset([0, 1, 2, 3], [0] * 4, [1, 2, 3, 4])
    first = observe(batch, [0, 1, 2, 3])["state"]
    result = batch.step([0, 1, 2, 3], np.ones((4, batch.spec.action.dim), np.float32))
    assert np.isfinite(result.reward).all()
    moved = observe(batch, [0, 1, 2, 3])["state"]
    batch.reset([3], [0], [1])
    after = observe(batch, [0, 1, 2, 3])["state"]
    assert np.array_equal(after[:3], moved[:3])
    assert np.allclose(after[3], first[0], atol=1e-5)
    batch.close()
