"""Adapter for LIBERO: 130 tasks in five suites, with the initial states, images and step limits of the VLA papers.

Each row has its own environment (`robosuite.batch`); rows of the same task share a GL context. Resets keep the MuJoCo
model, with the same effect as LIBERO's resets, which rebuild it each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from polyrhythm.config.base import InvalidSetting
from polyrhythm.conformance import Finding, raised
from polyrhythm.envs.base import Variant
from polyrhythm.envs.mujoco import GL, choose_gl_backend
from polyrhythm.errors import ConfigError, PolyrhythmError, nearest
from polyrhythm.plugins.simulators.base import SimulatorSettings, time_batch
from polyrhythm.plugins.simulators.libero.library import (
    ACTION_DIM,
    INITIAL_STATES,
    INSTRUCTIONS,
    PROPRIO_DIM,
    STEP_LIMITS,
    SUITES,
    TASKS,
    LiberoInstance,
    check_robosuite,
    find_assets,
    in_other_words,
    initial_states,
    make,
    package_folder,
)
from polyrhythm.plugins.simulators.robosuite.batch import TRAITS, RobosuiteBatch, Views
from polyrhythm.plugins.simulators.variation import VISION
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

_WRIST = "robot0_eye_in_hand"
#: Cameras of every scene.
CAMERAS = ("agentview", _WRIST, "frontview", "birdview", "sideview", "galleryview", "robot0_robotview")


class LiberoSettings(SimulatorSettings):
    """LIBERO's tasks from images and proprioception, as vision-language-action papers use them.

    Observation: `image` uint8 [image_size,image_size,3] of the first camera, further ones by the camera's name;
    `proprio` float32 [8] = hand position (metres), its orientation as axis times angle, finger positions. Images are
    LIBERO's turned by 180 degrees, as in the papers' data: upright, left and right exchanged. So leave a policy's
    `turn_images` off. Action: float32 [7] in -1..1 = hand displacement (5 cm at 1), rotation (0.5 rad at 1), gripper
    (-1 opens, 1 closes). Reward: 1 at the first success of an episode, else 0.

    Each task has 50 fixed initial states; an episode of seed s begins in number s mod 50. An evaluation takes each
    state in turn: 500 episodes are a suite of ten tasks in the papers' protocol. Training begins in the same states.
    """

    needs: ClassVar = ("libero", "robosuite", "mujoco")
    extra: ClassVar = "libero"
    pins: ClassVar = {"robosuite": "1.4"}
    traits: ClassVar = TRAITS
    known_tasks: ClassVar = INSTRUCTIONS
    task_sets: ClassVar = SUITES

    type: Literal["libero"] = "libero"
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Suites (libero_spatial, libero_object, libero_goal, libero_10, libero_90) or names of tasks."""
    instructions: Mapping[str, str] = Field(default_factory=dict)
    """Task → instruction, in place of LIBERO's."""
    assets: str = ""
    """Folder of LIBERO's meshes and scenes; empty: its package's, or where its own download puts them."""
    initial_states: Literal["fixed", "sampled"] = "fixed"
    """`fixed`: the benchmark's 50 of each task. `sampled`: LIBERO places the objects, drawn from the seed."""
    cameras: Annotated[tuple[str, ...], Field(min_length=1)] = ("agentview",)
    """Cameras, such as agentview and robot0_eye_in_hand (`wrist` for short)."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 256
    """Edge of the square images in pixels; the papers' data have 256."""
    render: Literal["cheap", "full"] = "full"
    """`full`: as LIBERO draws. `cheap`: no multisampling, shadows, reflections, sky, haze or fog."""
    gl: GL = "auto"
    """How MuJoCo draws: osmesa on the cores, egl on a GPU, auto by measurement; MUJOCO_GL overrides it."""
    max_steps: Annotated[int, Field(ge=0)] = 0
    """Env steps after which an episode ends; 0: the papers' of the task's suite (spatial 220, object 280, goal 300, 10
    520, 90 400)."""
    settle_steps: Annotated[int, Field(ge=0, le=100)] = 10
    """Steps at rest before an episode begins, which do not count: objects fall into place. The papers have 10."""
    kept_environments: Annotated[int, Field(ge=0)] = 10
    """Environments that no row uses at the moment, kept for later episodes, and as many tasks' GL contexts: each has
    about 0.3 GB (a context up to 0.8), and takes 2 to 4 s to make."""

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        for task in tasks:
            if task not in TASKS:
                suites = ", ".join(SUITES)
                raise ValueError(
                    f"LIBERO has no suite or task {task!r}; {nearest(task, [*SUITES, *TASKS])}suites are {suites}, and "
                    "polyrhythm envs libero lists the tasks"
                )
        return tasks

    @field_validator("cameras", mode="before")
    @classmethod
    def _full_names(cls, cameras: Any) -> Any:
        is_list = isinstance(cameras, list | tuple)
        return tuple(_WRIST if name == "wrist" else name for name in cameras) if is_list else cameras

    @model_validator(mode="after")
    def _fits_together(self) -> LiberoSettings:
        for camera in self.cameras:
            if camera not in CAMERAS:
                known = ", ".join(CAMERAS)
                raise InvalidSetting("cameras", camera, f"{nearest(camera, CAMERAS)}LIBERO's cameras are {known}")
        if len(set(self.cameras)) < len(self.cameras):
            raise InvalidSetting("cameras", list(self.cameras), "list each camera once")
        if unlisted := sorted(set(self.instructions) - set(self.tasks)):
            raise InvalidSetting("instructions", unlisted[0], "this task is not in tasks; list it there or remove it")
        return self

    def check(self) -> None:
        """MissingError or RenderingUnavailable: this machine lacks LIBERO's files, meshes, robosuite 1.4, or a
        renderer. Imports nothing."""
        package_folder()
        check_robosuite()
        find_assets(self.assets)
        choose_gl_backend(self.gl)

    def spec(self) -> EnvSpec:
        """The spec of a batch; starts no simulator."""
        image = ArraySpec((self.image_size, self.image_size, 3), "uint8")
        return EnvSpec(
            observation={**dict.fromkeys(self._views.names, image), "proprio": ArraySpec((PROPRIO_DIM,), "float32")},
            action=ActionSpec("continuous", ACTION_DIM, low=(-1.0,) * ACTION_DIM, high=(1.0,) * ACTION_DIM),
            tasks=tuple(
                Task(task, self.instructions.get(task) or INSTRUCTIONS[task], TASKS[task].suite) for task in self.tasks
            ),
            max_steps=max(map(self.step_limit, self.tasks)),
            reports_success=True,
            initial_states=INITIAL_STATES if self.initial_states == "fixed" else 0,
        )

    def variants(self) -> dict[str, Variant]:
        """Variants for out-of-distribution evaluation: of images; of instructions, for tasks without one in the
        recipe; and of positions, which are otherwise fixed."""
        found = dict(VISION)
        if self.initial_states == "fixed":
            what = "objects where LIBERO places them anew, not in the fixed initial states"
            found["position"] = Variant("position", what, {"initial_states": "sampled"})
        if usual := [task for task in self.tasks if task not in self.instructions]:
            words = {task: in_other_words(INSTRUCTIONS[task]) for task in usual}
            found["instruction"] = Variant("semantic", "instructions in other words", {"instructions": words})
        return found

    def build(self, rows: int) -> RobosuiteBatch:
        """A batch of `rows` rows; the first environment is created and stepped once."""
        return RobosuiteBatch(self, rows, self._views, self.make, self.kept_environments)

    @property
    def _views(self) -> Views:
        return Views(self.cameras, self.image_size, self.render == "cheap", mirrored=True, gl=self.gl)

    def rendering(self) -> LiberoSettings:
        """Settings whose batches can render rows for a video: these."""
        return self

    def step_limit(self, task: str) -> int:
        return self.max_steps or STEP_LIMITS[TASKS[task].suite]

    def make(self, task: str) -> LiberoInstance:
        """Create an environment of the task. MissingError: assets or initial states are missing; ConfigError: they
        do not match."""
        assets = find_assets(self.assets)
        states = initial_states(task) if self.initial_states == "fixed" else None
        made = LiberoInstance(make(task, assets), states, self.settle_steps)
        numbers = 1 + made.model.nq + made.model.nv
        if states is not None and states.shape != (INITIAL_STATES, numbers):
            made.close()
            raise ConfigError(
                f"env.assets = {assets}: {task} has {numbers} numbers with these, and its initial states are "
                f"{list(states.shape)}; take LIBERO's assets, or set initial_states: sampled"
            )
        return made

    @classmethod
    def findings(cls) -> Iterator[Finding]:
        """LIBERO's installation and a trial run, for `polyrhythm doctor`."""
        return examine(cls(tasks=(next(iter(TASKS)),)))


_TRIAL = "a task"


def examine(tried: LiberoSettings) -> Iterator[Finding]:
    """Findings on task files, robosuite's version, assets and renderer; if all are present, on a trial run of
    `tried`."""
    checks: dict[str, Callable[[], object]] = {
        "task files": package_folder,
        "robosuite 1.4": check_robosuite,
        "assets": lambda: find_assets(tried.assets),
        "rendering": lambda: choose_gl_backend(tried.gl),
        _TRIAL: lambda: _trial(tried),
    }
    complete = True
    for name, check in checks.items():
        if name == _TRIAL and not complete:
            return
        try:
            yield Finding(name, "ok", str(check() or "a GL library that needs no screen"))
        except PolyrhythmError as error:
            problem, _, fix = str(error).partition("run: ")
            yield Finding(name, "missing", problem.removesuffix(", or ").removesuffix("; "), fix)
            complete = False
        except Exception as error:  # noqa: BLE001 - versions of LIBERO, robosuite and MuJoCo that do not fit raise anything
            yield Finding(name, "failed", raised(error))


def _trial(tried: LiberoSettings) -> str:
    found, size = time_batch(tried), tried.image_size
    return (
        f"ready after {found.start_s:.1f} s; a reset takes {found.reset_ms:.0f} ms, a step {found.step_ms:.0f} ms, an "
        f"image of {size}x{size} pixels {found.observe_ms:.0f} ms"
    )
