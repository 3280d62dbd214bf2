"""Settings of ManiSkill's tasks; does not start the simulator (`maniskill.env`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from polyrhythm.config.base import InvalidSetting
from polyrhythm.envs.base import EnvTraits, Variant
from polyrhythm.envs.info import as_aggregates
from polyrhythm.envs.mujoco import count_gpus
from polyrhythm.plugins.simulators.base import SimulatorSettings
from polyrhythm.plugins.simulators.maniskill.tasks import INSTRUCTIONS, PLACED, instruction_of, other_words_of
from polyrhythm.plugins.simulators.variation import VISION
from polyrhythm.specs.spaces import Aggregate, check_metrics

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
    traits: ClassVar = EnvTraits(variants=True, rendering=True, draws_rows=True)
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
