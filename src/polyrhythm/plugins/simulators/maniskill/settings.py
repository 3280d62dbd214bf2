"""ManiSkill's settings and tasks: instructions, and positions beyond the range from which a task draws. Does not start
the simulator (`maniskill.env`).

Some tasks, such as RLinf's PutOnPlateInScene25, return instructions from `get_language_instruction()`, one sentence per
object, and number their episodes. Such a task becomes one task per sentence, because a policy's instructions are a
table of tasks; an episode is then drawn from those of its sentence. The episode number is a mixed-radix number whose
last digits are the objects' positions and rotations (`xyz_configs`, `quat_configs`), which do not affect the sentence:
one episode is started for each value of the other digits.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, field_validator, model_validator

from polyrhythm.config.base import InvalidSetting
from polyrhythm.envs.base import EnvTraits, Variant
from polyrhythm.envs.info import as_aggregates
from polyrhythm.envs.mujoco import count_gpus
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.simulators.base import SimulatorSettings
from polyrhythm.plugins.simulators.variation import VISION, AppearanceSettings, draw_beyond
from polyrhythm.specs.hashing import mix
from polyrhythm.specs.spaces import Aggregate, check_metrics

_TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
#: Task id → instruction of the policy.
INSTRUCTIONS: dict[str, str] = {name: task["instruction"] for name, task in _TASKS.items()}
#: The same tasks in other words, for an evaluation out of distribution.
OTHER_WORDS: dict[str, str] = {name: task["other"] for name, task in _TASKS.items()}


def other_words_of(task: str) -> str | None:
    """The task's paraphrased instruction; None for a task that is not listed."""
    return OTHER_WORDS.get(task.rpartition(":")[2])


def instruction_of(task: str, own: str = "") -> str:
    """The task's instruction; for a task that is not listed `own`, the text from its code, or else the words of its
    id: `RotateValveLevel0-v1` gives "rotate valve level 0". The module of `module:ID` is omitted."""
    identifier = task.rpartition(":")[2]
    if known := INSTRUCTIONS.get(identifier) or own:
        return known
    name = re.sub(r"-v\d+$", "", identifier)
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    return " ".join(words).lower() or task


class PlacedObjects(NamedTuple):
    """name: the task's attribute of an object; half: half the edge, in metres, of the square around the origin from
    which its position is drawn, unless the task has attributes for it; followers: attributes of objects that keep
    their position relative to it."""

    name: str
    half: float = 0.1
    followers: tuple[str, ...] = ()


#: Task → what is placed, read in its `_initialize_episode`. The others have ranges that depend on each other.
PLACED: Mapping[str, tuple[PlacedObjects, ...]] = {
    "PickCube-v1": (PlacedObjects("cube"), PlacedObjects("goal_site")),
    "PushCube-v1": (PlacedObjects("obj", followers=("goal_region",)),),
    "PullCube-v1": (PlacedObjects("obj", followers=("goal_region",)),),
    "LiftPegUpright-v1": (PlacedObjects("peg"),),
}

_Pixels = Annotated[int, Field(ge=8, le=1024)]
#: Arguments of ManiSkill's classes that are settings here → the setting.
_SET_HERE = {
    "num_envs": "the run's rows",
    "obs_mode": "observation",
    "reward_mode": "reward",
    "control_mode": "control_mode",
    "robot_uids": "robot",
    "sim_backend": "backend",
    "render_backend": "renderer",
}


def _none_is_empty(value: Any) -> Any:
    """Map None to the empty value: a recipe that extends another one cannot remove entries otherwise."""
    return {} if value is None else value


class ManiSkillFields(SimulatorSettings):
    """The fields, and what follows from them."""

    needs: ClassVar = ("mani_skill", "sapien", "torch")
    traits: ClassVar = EnvTraits(variants=True, rendering=True, draws_rows=True, leaves_device=True)
    extra: ClassVar = "maniskill"
    known_tasks: ClassVar = INSTRUCTIONS

    type: Literal["maniskill"] = "maniskill"
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Registered ids such as `PickCube-v1`, or `module:ID` to import the module that registers it."""
    kwargs: Annotated[Mapping[str, Any], BeforeValidator(_none_is_empty)] = Field(default_factory=dict)
    """Further arguments of the tasks' classes, such as {obj_set: train} or {sim_config: {control_freq: 5}}."""
    instructions: Mapping[str, str] = Field(default_factory=dict)
    """Task → instruction for the policy, in place of the built-in one, or of the task's own for each object."""
    observation: Literal["state", "rgb", "rgbd"] = "state"
    """`state` draws nothing; it still needs a Vulkan driver."""
    image_size: _Pixels | tuple[_Pixels, _Pixels] = 128
    """Edge of a square image in pixels, or [height, width]. A digital twin such as PutCarrotOnPlateInScene-v1 draws at
    its camera's own size (640 wide, 480 high), and its picture is resized to this one: [168, 224] keeps the ratio."""
    camera: str = ""
    """Name of the camera; empty: the task's first one, often `base_camera`."""
    proprio: Literal["full", "joints"] = "full"
    """`full`: all numbers that the task adds to its images, goals included. `joints`: positions of the robot's joints
    alone, equal in size for all tasks of a robot."""
    robot: str = ""
    """ManiSkill's name of the robot, such as `panda`; empty: the task's own."""
    control_mode: str = ""
    """Such as `pd_joint_delta_pos` or `pd_ee_delta_pose`; empty: the robot's first one."""
    reward: Literal["sparse", "dense", "normalized_dense"] = "sparse"
    """ManiSkill's reward modes. `sparse`: 1 at each step with success, -1 with failure, also for a task without a
    reward of its own; `normalized_dense`: shaped, at most 1 per step."""
    reward_flags: Annotated[Mapping[str, float], BeforeValidator(_none_is_empty)] = Field(default_factory=dict)
    """Flag of ManiSkill's `info` → weight, in place of `reward`: a step earns the change of the weighted sum, which is
    0 when an episode begins. RLinf's has {is_src_obj_grasped: 0.1, consecutive_grasp: 0.1, success: 1.0}."""
    max_steps: Annotated[int, Field(ge=0)] = 0
    """Env steps after which an episode ends; 0 takes the registered limit."""
    end_on_success: bool = True
    """The first success ends the episode. A failure that the task reports always ends it."""
    metrics: Annotated[Mapping[str, Aggregate], BeforeValidator(as_aggregates)] = Field(default_factory=dict)
    """Flags and numbers of ManiSkill's `info` to report as env/metrics/NAME: {is_grasped: max}; a list: last."""
    backend: Literal["cpu", "gpu", "auto"] = "cpu"
    """Where physics is computed. `auto`: gpu with one task, an NVIDIA GPU, usual placement and appearance, else cpu."""
    renderer: Literal["auto", "cpu", "gpu"] = "auto"
    """The Vulkan device. `auto`: gpu if there is an NVIDIA GPU, else cpu."""
    placement: Literal["usual", "beyond"] = "usual"
    """Positions of objects and goals: ManiSkill's range, or a shell around it, for tasks that have room there."""

    appearance: AppearanceSettings = AppearanceSettings()
    """How far pictures differ from the usual ones: camera and light; colours cannot be changed."""

    @field_validator("metrics")
    @classmethod
    def _metrics_have_names(cls, metrics: Mapping[str, Aggregate]) -> Mapping[str, Aggregate]:
        check_metrics(metrics)
        return metrics

    @model_validator(mode="after")
    def _fits_together(self) -> ManiSkillFields:
        if other := [task for task in self.instructions if task not in self.tasks]:
            raise ValueError(f"instructions has {other[0]!r}, which is not among tasks; add it there, or remove it")
        if given := [name for name in _SET_HERE if name in self.kwargs]:
            name = given[0]
            raise InvalidSetting(
                f"kwargs.{name}", self.kwargs[name], f"{_SET_HERE[name]} decides it; leave it out here"
            )
        if self.reward_flags and self.reward != "sparse":
            raise InvalidSetting(
                "reward_flags", dict(self.reward_flags), f"reward is {self.reward}; leave one of them out"
            )
        if self.backend == "gpu" and len(self.tasks) > 1:
            raise ValueError(
                f"backend = gpu simulates one task, and tasks has {len(self.tasks)}; list one, or set backend to cpu"
            )
        return self

    @model_validator(mode="after")
    def _can_differ(self) -> ManiSkillFields:
        if self.appearance.colour_change:
            why = "ManiSkill's colours cannot be changed; leave it out"
            raise InvalidSetting("appearance.colour_change", self.appearance.colour_change, why)
        crowded = [task for task in self.tasks if task not in PLACED] if self.placement == "beyond" else []
        if crowded:
            known = ", ".join(sorted(PLACED))
            raise InvalidSetting("placement", "beyond", f"{crowded[0]} has no known range; only {known} have")
        if self.backend == "gpu" and not self._is_usual:
            why = "another placement or appearance needs rows that are simulated alone; set cpu, or leave those out"
            raise InvalidSetting("backend", "gpu", why)
        return self

    @property
    def has_images(self) -> bool:
        return self.observation != "state"

    @property
    def _is_usual(self) -> bool:
        return self.placement == "usual" and self.appearance.is_usual

    def variants(self) -> dict[str, Variant]:
        """Variants for out-of-distribution evaluation: of images, if observed; of positions, if all tasks allow it;
        and of instructions, for known tasks without one in the recipe."""
        found: dict[str, Variant] = {}
        if self.backend != "gpu" and self.has_images:
            found |= {name: VISION[name] for name in ("camera", "lighting")}
        if self.backend != "gpu" and all(task in PLACED for task in self.tasks):
            what = "objects and goals around ManiSkill's range"
            found["position"] = Variant("position", what, {"placement": "beyond"})
        usual = [task for task in self.tasks if task not in self.instructions]
        if words := {task: other for task in usual if (other := other_words_of(task))}:
            found["instruction"] = Variant("semantic", "instructions in other words", {"instructions": words})
        return found

    @property
    def picture(self) -> tuple[int, int]:
        """Height and width of the image in pixels."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @property
    def simulates_on_gpu(self) -> bool:
        """Whether physics runs on a GPU."""
        if self.backend == "auto":
            return len(self.tasks) == 1 and self._is_usual and count_gpus() > 0
        return self.backend == "gpu"

    @property
    def draws_on_gpu(self) -> bool:
        return self.renderer == "gpu" or (self.renderer == "auto" and count_gpus() > 0)

    def instruction(self, task: str, own: str = "") -> str:
        """The instruction of one of `tasks`. own: the text from the task's code, if any."""
        return self.instructions.get(task) or instruction_of(task, own)


#: Hash domain of the draws of episodes.
_DOMAIN = 9
#: Most episodes that are begun to read their sentences.
_MOST = 10_000


class TaskSentences(NamedTuple):
    """starts: sentence -> numbers [N] of the first episode of each block with this sentence; length: of each block."""

    starts: Mapping[str, NDArray[np.int64]]
    length: int

    def episode(self, sentence: str, seed: int) -> int:
        """Number of the episode with this seed, drawn uniformly from all with this sentence."""
        draws = np.random.default_rng(mix(seed, _DOMAIN))
        return int(draws.choice(self.starts[sentence]) + draws.integers(self.length))


def own_sentences(env: Any) -> list[str]:
    """The instruction of each row's current episode from the task's code; empty if there is none."""
    ask = getattr(env, "get_language_instruction", None)
    if not callable(ask):
        return []
    told = ask()
    return [told] * env.num_envs if isinstance(told, str) else [str(one) for one in told]


def read_sentences(env: Any, task: str, begin: Callable[[NDArray[np.int64]], object]) -> TaskSentences | None:
    """The sentences of a task with numbered episodes; None for any other. begin: starts the episodes with these
    numbers, one per row. ConfigError: there are too many to read."""
    total = int(getattr(env, "total_num_trials", 0))
    if not total or not own_sentences(env):
        return None
    length = len(getattr(env, "xyz_configs", ())) * len(getattr(env, "quat_configs", ())) or 1
    length = 1 if total % length else length
    if total // length > _MOST:
        raise ConfigError(
            f"env.tasks = {task}: its {total} episodes have too many instructions to read; give it one by "
            f"env.instructions: {{{task}: ...}}"
        )
    numbers = np.arange(0, total, length, dtype=np.int64)
    found: dict[str, list[int]] = {}
    for chunk in np.array_split(numbers, -(-len(numbers) // env.num_envs)):
        begin(np.resize(chunk, env.num_envs))
        for number, sentence in zip(chunk, own_sentences(env), strict=False):
            found.setdefault(sentence, []).append(int(number))
    return TaskSentences({sentence: np.array(starts, np.int64) for sentence, starts in found.items()}, length)


#: Hash domain of the draws, which are independent of the usual ones.
_PLACES = 8


def place_beyond(env: Any, task: str, seed: int) -> None:
    """Move the objects of a task of `PLACED`, with one row, to a shell around their range: outside it in x or y, by
    up to a quarter of its extent. Heights and rotations do not change."""
    from mani_skill.utils.structs import Pose

    draws = np.random.default_rng(mix(seed, _PLACES))
    for one in PLACED[task]:
        half = getattr(env, "cube_spawn_half_size", one.half)
        middle = np.array(getattr(env, "cube_spawn_center", (0.0, 0.0)), np.float64)
        drawn = draw_beyond(draws.uniform, middle - half, middle + half, np.ones(2, np.bool_))
        shift = np.zeros(3, np.float32)
        shift[:2] = drawn - getattr(env, one.name).pose.p[0, :2].cpu().numpy()
        for name in (one.name, *one.followers):
            actor = getattr(env, name)
            moved = actor.pose.p + actor.pose.p.new_tensor(shift)
            actor.set_pose(Pose.create_from_pq(moved, actor.pose.q))
