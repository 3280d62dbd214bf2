"""Adapter for robosuite 1.5: its manipulation tasks, tasks registered by other packages, and RoboCasa's kitchens.

Each row has its own environment (`robosuite.batch`); rows of the same task share a GL context. Resets keep the MuJoCo
model unless `hard_reset` is set.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from polyrhythm.config.base import InvalidSetting
from polyrhythm.envs.base import Variant
from polyrhythm.envs.mujoco import GL, choose_gl_backend
from polyrhythm.errors import ConfigError, nearest
from polyrhythm.plugins.simulators.base import SimulatorSettings
from polyrhythm.plugins.simulators.robosuite.batch import TRAITS, RobosuiteBatch, Views
from polyrhythm.plugins.simulators.robosuite.library import (
    INSTRUCTIONS,
    KNOWN,
    PLACED,
    ROBOCASA,
    Instance,
    check_robocasa,
    find_class,
    has_package,
    is_kitchen,
    make,
    parameters,
    place_beyond,
    sizes_of,
    words_of,
)
from polyrhythm.plugins.simulators.variation import VISION
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

#: Arguments of robosuite that settings of this adapter decide.
_RESERVED = {
    "robots",
    "controller_configs",
    "control_freq",
    "horizon",
    "ignore_done",
    "hard_reset",
    "reward_shaping",
    "reward_scale",
    "seed",
    "use_camera_obs",
    "use_object_obs",
    "has_renderer",
    "has_offscreen_renderer",
    "renderer",
    "camera_names",
    "camera_heights",
    "camera_widths",
    "camera_depths",
    "camera_segmentations",
}


class RobosuiteSettings(SimulatorSettings):
    """robosuite 1.5 tasks (and RoboCasa's kitchens) from the state or from named cameras.

    Observation `state`: float32 [K], the task's object state, then each robot's proprioception (Panda: 43 numbers:
    joint positions, their cosines and sines, joint velocities, hand position and orientation, gripper positions and
    velocities). `pixels`: `image` uint8 [image_size,image_size,3] of the first camera, further ones by the camera's
    name, upright, and `proprio` float32. Action: robosuite's, -1..1; with OSC_POSE per robot hand displacement (5 cm
    at 1), rotation (0.5 rad at 1) and gripper (1 closes).

    The first step in a new installation compiles robosuite's controllers for 10 to 20 s; `build` does it.
    """

    needs: ClassVar = ("robosuite", "mujoco")
    extra: ClassVar = "robosuite"
    traits: ClassVar = TRAITS
    known_tasks: ClassVar = INSTRUCTIONS

    type: Literal["robosuite"] = "robosuite"
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of registered environments such as `Lift`; RoboCasa's if that package is installed."""
    registered_by: str = ""
    """Module that registers further environments when it is imported; empty: `robocasa` if it is installed."""
    instructions: Mapping[str, str] = Field(default_factory=dict)
    """Task → instruction, in place of the known one or of the words of its name."""
    robot: str = "Panda"
    """Robot of robosuite; tasks of two robots have two of it. RoboCasa's is `PandaOmron`."""
    controller: Literal["OSC_POSE", "OSC_POSITION", "IK_POSE", "JOINT_POSITION", "JOINT_VELOCITY", "JOINT_TORQUE"] = (
        "OSC_POSE"
    )
    """Controller of each arm; OSC_POSITION moves the hand without turning it."""
    control_freq: Annotated[int, Field(ge=1, le=500)] = 20
    """Env steps per simulated second."""
    observation: Literal["pixels", "state"] = "pixels"
    """Observation of the policy. `state` renders nothing and needs no graphics library."""
    cameras: Annotated[tuple[str, ...], Field(min_length=1)] = ("agentview",)
    """Cameras of `pixels`, such as `robot0_eye_in_hand`."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 128
    """Edge of the square images in pixels."""
    render: Literal["cheap", "full"] = "cheap"
    """`cheap`: no multisampling, shadows, reflections, sky, haze or fog."""
    gl: GL = "auto"
    """How MuJoCo draws: osmesa on the cores, egl on a GPU, auto by measurement; MUJOCO_GL overrides it."""
    max_steps: Annotated[int, Field(ge=1)] = 200
    """Env steps after which an episode ends."""
    reward: Literal["sparse", "dense"] = "sparse"
    """`sparse`: 1 at the first success of an episode, else 0. `dense`: robosuite's shaped reward, scaled to 0..1 (Wipe
    has penalties below 0)."""
    hard_reset: bool = False
    """Make the model anew at each reset from its seed, so that object sizes vary too; takes about a second instead of
    milliseconds. RoboCasa's kitchens always do."""
    placement: Literal["usual", "beyond"] = "usual"
    """Positions of objects: robosuite's range, or a shell around it, for tasks that have room there."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the environments, such as RoboCasa's `layout_ids`."""

    @field_validator("kwargs")
    @classmethod
    def _free(cls, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if taken := sorted(_RESERVED & kwargs.keys()):
            raise ValueError(f"{taken[0]} is decided by settings of its own; leave it out of kwargs")
        return kwargs

    @model_validator(mode="after")
    def _fits_the_known_tasks(self) -> RobosuiteSettings:
        for task in self.tasks:
            known = KNOWN.get(task)
            if known is None:
                if not self.registered_by and not has_package(ROBOCASA):
                    why = (
                        f"robosuite has no such task; {nearest(task, KNOWN)}RoboCasa's need the package robocasa, "
                        "which is not installed, other packages' need registered_by"
                    )
                    raise InvalidSetting("tasks", task, why)
                continue
            if self.reward == "dense" and not known.dense:
                raise InvalidSetting("reward", "dense", f"robosuite has no dense reward for {task}; set sparse")
            if self.observation == "pixels" and self.robot == "Panda" and not self.kwargs:
                for camera in self.cameras:
                    if camera not in known.cameras:
                        near, names = nearest(camera, known.cameras), ", ".join(known.cameras)
                        raise InvalidSetting("cameras", camera, f"{near}the cameras of {task} are {names}")
        if unlisted := sorted(set(self.instructions) - set(self.tasks)):
            raise InvalidSetting("instructions", unlisted[0], "this task is not in tasks; list it there or remove it")
        if len(set(self.cameras)) < len(self.cameras):
            raise InvalidSetting("cameras", list(self.cameras), "list each camera once")
        return self

    @model_validator(mode="after")
    def _has_room(self) -> RobosuiteSettings:
        crowded = [task for task in self.tasks if task not in PLACED] if self.placement == "beyond" else []
        if crowded:
            known = ", ".join(sorted(PLACED))
            raise InvalidSetting("placement", "beyond", f"{crowded[0]} has no room around its range; only {known} have")
        return self

    @property
    def has_images(self) -> bool:
        return self.observation == "pixels"

    @property
    def is_dense(self) -> bool:
        return self.reward == "dense"

    def variants(self) -> dict[str, Variant]:
        """Variants for out-of-distribution evaluation: of images, if observed; of positions, if all tasks allow it;
        and of instructions, for known tasks without one in the recipe."""
        words = {task: KNOWN[task].other for task in self.tasks if task in KNOWN and task not in self.instructions}
        worded = {"instruction": Variant("semantic", "instructions in other words", {"instructions": words})}
        placed = {"position": Variant("position", "objects around robosuite's range", {"placement": "beyond"})}
        has_room = all(task in PLACED for task in self.tasks)
        seen = VISION if self.has_images else {}
        return {**seen, **(placed if has_room else {}), **(worded if words else {})}

    def check(self) -> None:
        """MissingError or RenderingUnavailable: this machine lacks RoboCasa, its assets, or a renderer."""
        if self.has_images:
            choose_gl_backend(self.gl)
        if any(task not in KNOWN for task in self.tasks) and self.registered_by in ("", ROBOCASA):
            check_robocasa()

    def spec(self) -> EnvSpec:
        """The spec of a batch. robosuite's tasks with the Panda need no simulator; others create an environment once
        per process. ConfigError: an unknown task, or tasks of different sizes."""
        named = (self.robot, self.controller, self.registered_by, self.kwargs)
        sizes = [sizes_of(task, *named) for task in self.tasks]
        first, states = sizes[0], self.observation == "state"
        for task, other in zip(self.tasks, sizes, strict=True):
            if states and other.objects is None:
                raise ConfigError(
                    f"env.observation = state: the objects of {task} differ between episodes; set observation: pixels"
                )
            if (other.low, other.high) != (first.low, first.high):
                raise ConfigError(
                    f"env.tasks = {task}: its actions have {len(other.low)} entries, those of {self.tasks[0]} "
                    f"{len(first.low)}, or other bounds; tasks of one run need equal actions"
                )
            if other.proprio != first.proprio or (states and other.objects != first.objects):
                raise ConfigError(
                    f"env.tasks = {task}: its state has {other.objects} + {other.proprio} numbers, that of "
                    f"{self.tasks[0]} {first.objects} + {first.proprio}; tasks of one run need equal sizes"
                )
        image = ArraySpec((self.image_size, self.image_size, 3), "uint8")
        arrays = {**dict.fromkeys(self._views.names, image), "proprio": ArraySpec((first.proprio,), "float32")}
        if states:
            assert first.objects is not None, "refused above"
            arrays = {"state": ArraySpec((first.objects + first.proprio,), "float32")}
        return EnvSpec(
            observation=arrays,
            action=ActionSpec("continuous", len(first.low), low=first.low, high=first.high),
            tasks=tuple(
                Task(task, self.instructions.get(task) or INSTRUCTIONS.get(task) or words_of(task))
                for task in self.tasks
            ),
            max_steps=self.max_steps,
            reports_success=True,
        )

    def build(self, rows: int) -> RobosuiteBatch:
        """A batch of `rows` rows; the first environment is created and stepped once."""
        return RobosuiteBatch(self, rows, self._views, self.make, kept=sys.maxsize)

    @property
    def _views(self) -> Views:
        return Views(self.cameras, self.image_size, self.render == "cheap", gl=self.gl)

    def rendering(self) -> RobosuiteSettings:
        """Settings whose batches can render, even with state observations. RenderingUnavailable: this machine
        cannot."""
        choose_gl_backend(self.gl)
        return self

    def make(self, task: str) -> Instance:
        """Create an environment of the task. ConfigError or MissingError: it cannot be created."""
        found = find_class(task, self.registered_by)
        if unknown := sorted(set(self.kwargs) - parameters(found)):
            raise ConfigError(f"env.kwargs.{unknown[0]}: {task} takes no such argument; correct or remove it")
        kitchen = is_kitchen(found)
        if kitchen and self.reward == "dense":
            raise ConfigError(f"env.reward = dense: {task} has no dense reward; set reward: sparse")
        robots = KNOWN[task].robots if task in KNOWN else 1
        given = {
            "control_freq": self.control_freq,
            "horizon": self.max_steps,
            "hard_reset": self.hard_reset,
            "reward_shaping": self.reward == "dense",
            "reward_scale": 1.0,
            **self.kwargs,
        }
        env = make(found, robots, self.robot, self.controller, given)
        if self.placement == "beyond":
            place_beyond(env)
        return Instance(env, self.hard_reset or kitchen)
