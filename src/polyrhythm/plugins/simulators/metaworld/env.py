"""Adapter for Meta-World: 50 manipulation tasks from pixels with language instructions and scripted experts.

Any row runs any task: a task's model and renderer are created at its first reset and shared by all rows
(`metaworld.scene`), so a batch of 16 rows on 4 tasks holds 4 models and at most one state per row and task.

`python -m` this module and a task renders frames as a run does, for `polyrhythm doctor`: a broken driver may hang or
crash a process. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from polyrhythm.conformance import Finding, last_line
from polyrhythm.envs.base import EnvTraits, RowNumbers, Variant
from polyrhythm.envs.mujoco import BACKENDS, GL, choose_gl_backend, is_loadable, preferred
from polyrhythm.errors import PolyrhythmError, as_root, install_command, nearest
from polyrhythm.imports import run_module
from polyrhythm.plugins.simulators.base import RowsBatch, SimulatorSettings, time_batch
from polyrhythm.plugins.simulators.metaworld.scene import (
    INSTRUCTIONS,
    OTHER_WORDS,
    STATE_DIM,
    TASK_SETS,
    SceneForm,
    SceneInstance,
    TaskScene,
)
from polyrhythm.plugins.simulators.variation import VISION
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

_ACTION_DIM = 4
#: Maximum number of steps of an episode in Meta-World.
_LONGEST_EPISODE = 500
#: What `preset: vla` sets where it is not set.
_VLA: Mapping[str, Any] = {
    "camera": "corner2",
    "settle_steps": 15,
    "render": "full",
    "image_size": 224,
    "max_steps": 100,
}


class MetaWorldSettings(SimulatorSettings):
    """Meta-World tasks with images of one camera, or with the state, as observation.

    Observation: `image` uint8 [image_size,image_size,3], `proprio` float32 [4] = hand position (metres) and gripper
    opening (0..1); with `observation: state` instead `state` float32 [39], Meta-World's own: hand, gripper and objects
    now and a step ago, and the goal. Action: float32 [4] in -1..1 = hand displacement in cm per step, gripper (1
    closes).

    Rendering differs from Meta-World's: by default a free camera, upright, and with `cheap` no shadows, reflections,
    sky, haze or multisampling, one light, and no collision shapes, marker sites, robot head, pedestal, base or first
    links (the most expensive and least informative parts); wrist and gripper are drawn, and also the goal's marker if
    nothing else shows the goal. `full` draws everything, from the same camera. Use the same setting for demonstrations,
    training and evaluation.
    """

    needs: ClassVar = ("metaworld", "mujoco")
    traits: ClassVar = EnvTraits(variants=True, expert=True, discards_rows=True)
    extra: ClassVar = "metaworld"
    known_tasks: ClassVar = INSTRUCTIONS
    task_sets: ClassVar = TASK_SETS

    type: Literal["metaworld"] = "metaworld"
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Task names such as `door-close-v3`, or a set of them: MT10, MT25 or MT50."""
    preset: Literal["", "vla"] = ""
    """`vla`: pictures and limits of the VLA papers where they are not set here: camera corner2, 15 settle steps, full
    rendering, 224 pixels, 100 steps."""
    observation: Literal["pixels", "state"] = "pixels"
    """Observation of the policy. `state` renders nothing and needs no graphics library."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 64
    """Edge of the square image in pixels."""
    render: Literal["cheap", "full"] = "cheap"
    """`cheap` takes a few milliseconds per frame, `full` 10 to 50 times as long."""
    gl: GL = "auto"
    """How MuJoCo draws: osmesa on the cores, egl on a GPU, auto by measurement; MUJOCO_GL overrides it."""
    camera: Literal["free", "corner2"] = "free"
    """free: ours, upright, the whole table in view; corner2: Meta-World's, at the place and turned as in VLA papers."""
    settle_steps: Annotated[int, Field(ge=0, le=100)] = 0
    """Steps without action before an episode begins, which do not count; VLA papers have 15."""
    max_steps: Annotated[int, Field(ge=1, le=_LONGEST_EPISODE)] = 100
    """Simulator steps after which an episode ends."""
    reward: Literal["sparse", "dense"] = "sparse"
    """`sparse`: 1 at the first success of an episode, else 0. `dense`: Meta-World's shaped reward, scaled to 0..1."""
    placement: Literal["usual", "beyond"] = "usual"
    """Where objects and goals begin: in Meta-World's range, or around it, up to a quarter of it further out."""
    wording: Literal["usual", "other"] = "usual"
    """Instructions: the usual sentences, or the same tasks in other words."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        return {**_VLA, **values} if isinstance(values, Mapping) and values.get("preset") == "vla" else values

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        for task in tasks:
            if task == "MT1":
                raise ValueError("MT1 is any one task of Meta-World; name it, such as reach-v3")
            if task not in INSTRUCTIONS:
                raise ValueError(
                    f"Meta-World has no task or set {task!r}; {nearest(task, [*TASK_SETS, *INSTRUCTIONS])}sets are "
                    f"{', '.join(TASK_SETS)}, and polyrhythm envs metaworld lists the tasks"
                )
        return tasks

    @property
    def has_images(self) -> bool:
        return self.observation == "pixels"

    @property
    def is_dense(self) -> bool:
        return self.reward == "dense"

    def variants(self) -> dict[str, Variant]:
        """Variants for out-of-distribution evaluation; those of images only if the policy observes images."""
        return {
            **(VISION if self.has_images else {}),
            "position": Variant("position", "objects and goals around Meta-World's range", {"placement": "beyond"}),
            "instruction": Variant("semantic", "instructions in other words", {"wording": "other"}),
        }

    def check(self) -> None:
        """RenderingUnavailable: images are needed and this machine cannot render."""
        if self.has_images:
            choose_gl_backend(self.gl)

    def spec(self) -> EnvSpec:
        """The spec of a batch; starts no simulator."""
        image = ArraySpec((self.image_size, self.image_size, 3), "uint8")
        words = INSTRUCTIONS if self.wording == "usual" else OTHER_WORDS
        pixels = {"image": image, "proprio": ArraySpec((4,), "float32")}
        return EnvSpec(
            observation=pixels if self.has_images else {"state": ArraySpec((STATE_DIM,), "float32")},
            action=ActionSpec("continuous", _ACTION_DIM, low=(-1.0,) * _ACTION_DIM, high=(1.0,) * _ACTION_DIM),
            tasks=tuple(Task(name, words[name]) for name in self.tasks),
            max_steps=self.max_steps,
            reports_success=True,
        )

    def build(self, rows: int) -> MetaWorldBatch:
        """A batch of `rows` rows; simulators start with the first reset."""
        return MetaWorldBatch(self, rows)


class MetaWorldBatch(RowsBatch):
    """Env batch and expert. held: each row's instance of its current task."""

    action_dtype = np.float32

    def __init__(self, settings: MetaWorldSettings, rows: int) -> None:
        settings.check()
        super().__init__(settings, rows)
        self.settings = settings
        cheap, turned = settings.render == "cheap", settings.camera == "corner2"
        beyond, size = settings.placement == "beyond", settings.image_size
        self._form = SceneForm(settings.has_images, size, cheap, turned, beyond, settings.settle_steps)
        self.scenes: dict[int, TaskScene] = {}
        self.held: list[SceneInstance | None] = [None] * rows

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        for i, row in enumerate(rows):
            instance = self._simulator(row)
            if "state" in out:
                out["state"][i] = instance.state
            else:
                self.scenes[self.row_tasks[row]].draw(instance.env.data, out["image"][i], self.appearance[row])
                out["proprio"][i] = instance.proprioception

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.float32]:
        """The scripted policy's action for the current state of each row, clipped to -1..1: [n,4]."""
        actions = np.empty((len(rows), _ACTION_DIM), np.float32)
        for i, row in enumerate(rows):
            actions[i] = self._simulator(row).expert_action()
        return np.clip(actions, -1.0, 1.0)

    def discard(self, row: int) -> None:
        self.held[row] = None

    def close(self) -> None:
        for scene in self.scenes.values():
            scene.close()

    def _simulator(self, row: int) -> SceneInstance:
        held = self.held[row]
        assert held is not None, f"row {row} was used before its first reset"
        return held

    def _simulator_for(self, row: int, task: int) -> SceneInstance:
        """The row's instance of the task; returns an instance of another task to its scene."""
        held, left = self.held[row], self.row_tasks[row]
        if held is not None:
            if left == task:
                return held
            self.scenes[left].idle.append(held)
            self.held[row] = None  # another row may have it now, even if the scene below cannot be made
        if task not in self.scenes:
            self.scenes[task] = TaskScene(self.spec.tasks[task].name, self._form)
        instance = self.held[row] = self.scenes[task].check_out()
        self.row_tasks[row] = task
        return instance


#: Debian packages for rendering without a screen; tools/render_libs.sh installs the same.
RENDER_PACKAGES = "libosmesa6 libgl1 libegl1"
_TASK, _RENDER_S, _EXTRA = "door-close-v3", 120.0, "metaworld"


def findings() -> Iterator[Finding]:
    """Render a frame with each backend; the first one is that which the quickstart would use."""
    for backend, needed in backends().items():
        yield rendering(backend, needed=needed)


def backends() -> dict[str, bool]:
    """GL backends to try -> whether the quickstart would use it: MUJOCO_GL, else the choice of `choose_gl_backend`."""
    able = tuple(filter(is_loadable, BACKENDS)) or BACKENDS[:1]
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip() or preferred(able)
    return {chosen: True} | {name: False for name in BACKENDS if name != chosen}


def rendering(backend: str, *, needed: bool) -> Finding:
    name = f"rendering {backend}"
    bad: Literal["note", "missing"] = "missing" if needed else "note"
    try:
        done = run_module("polyrhythm.plugins.simulators.metaworld.env", _TASK, _RENDER_S, MUJOCO_GL=backend)
    except subprocess.TimeoutExpired:
        return Finding(name, bad, f"no frame of {_TASK} within {_RENDER_S:.0f} s", _fix(backend))
    if done.returncode:
        why = last_line(done.stderr).partition("; run:")[0]
        fix = install_command(_EXTRA) if "No module named" in why else _fix(backend)
        return Finding(name, bad, f"no frame of {_TASK}: {why}", fix)
    drawn = json.loads(done.stdout.splitlines()[-1])
    if drawn["shades"] < 2:
        return Finding(name, bad, f"a frame of {_TASK} is blank", _fix(backend))
    used = "" if needed else "; not used here"
    return Finding(name, "ok", f"a frame of {_TASK} in {drawn['frame_ms']:.0f} ms{used}")


def _fix(backend: str) -> str:
    if backend not in ("osmesa", "egl"):
        return "unset MUJOCO_GL"
    if not shutil.which("apt-get"):
        return f"(with your system's package manager) install OSMesa and EGL, on Debian {RENDER_PACKAGES}"
    return f"{as_root()}apt-get install -y {RENDER_PACKAGES}"


if __name__ == "__main__":
    try:
        timed = time_batch(MetaWorldSettings(tasks=(sys.argv[1],)))
        shades = len(np.unique(timed.observation["image"]))
        sys.stdout.write(json.dumps({"frame_ms": timed.observe_ms, "shades": shades}) + "\n")
    except (PolyrhythmError, ImportError) as error:
        sys.exit(str(error))
