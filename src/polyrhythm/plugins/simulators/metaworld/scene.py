"""Meta-World's 50 tasks, and one compiled model and renderer of a task, shared among rows, with an instance per row.

Compiling a task's model takes 0.1–0.5 s and 20 MB, one state less than 1 ms and 0.4 MB. A reset moves bodies and sites
of the *model*. Invariant: while an instance resets or steps, the model has that instance's placement, which is all that
an episode changes in the model.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.mujoco import refuse_unstable
from polyrhythm.plugins.simulators.variation import Appearance, SceneRenderer, draw_beyond, fixed_camera

if TYPE_CHECKING:
    import mujoco


_TASKS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
#: Task name → instruction of the policy.
INSTRUCTIONS: dict[str, str] = {name: task["instruction"] for name, task in _TASKS.items()}
#: The same tasks in other words, for a policy that was not trained on them.
OTHER_WORDS: dict[str, str] = {name: task["other"] for name, task in _TASKS.items()}
#: Tasks whose goal is only a position → the site that marks it; cheap rendering keeps it visible.
GOAL_MARKERS: dict[str, str] = {name: task["marker"] for name, task in _TASKS.items() if "marker" in task}
_MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
_MT25 = (
    *_MT10,
    "coffee-pull-v3",
    "pick-out-of-hole-v3",
    "disassemble-v3",
    "pick-place-wall-v3",
    "basketball-v3",
    "stick-pull-v3",
    "button-press-wall-v3",
    "faucet-open-v3",
    "door-lock-v3",
    "lever-pull-v3",
    "sweep-into-v3",
    "faucet-close-v3",
    "coffee-button-v3",
    "button-press-topdown-wall-v3",
    "dial-turn-v3",
)
#: Meta-World's sets of tasks, in its order; MT50 is all of them, in the order of their names.
TASK_SETS: dict[str, tuple[str, ...]] = {"MT10": _MT10, "MT25": _MT25, "MT50": tuple(sorted(INSTRUCTIONS))}

#: A free camera above the right front of the table: upright, the whole workspace in view.
_LOOK_AT, _DISTANCE, _AZIMUTH, _ELEVATION = (0.0, 0.72, 0.12), 1.05, 130.0, -35.0
#: Where VLA papers have Meta-World's camera `corner2`, which looks upside down.
_CORNER_AT = (0.75, 0.075, 0.7)
#: Geoms of groups 0..2 are drawn; the higher groups hold collision shapes.
_VISUAL_GROUPS = 3
#: Bodies that cheap rendering hides: the arm's meshes cost more than everything else.
HIDDEN_BODIES = frozenset(
    [
        "controller_box",
        "pedestal_feet",
        "pedestal",
        "torso",
        "head",
        "right_arm_base_link",
        "right_l0",
        "right_l1",
        "right_l2",
    ]
)

#: Size of Meta-World's observation: 18 now, 18 a step ago, the goal's position.
STATE_DIM = 39

#: A range of places narrower than this (metres) is a fixed coordinate.
_NARROW = 0.005
_STILL = np.zeros(4, np.float32)
#: Maximum dense reward of one step in Meta-World.
_DENSE_SCALE = 10.0

Placement = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class SceneForm:
    """draws: whether there are images, of `size` × `size` pixels; turned: from Meta-World's camera, which looks upside
    down; beyond: places lie outside Meta-World's range; settle_steps: idle steps before an episode."""

    draws: bool
    size: int
    cheap: bool
    turned: bool
    beyond: bool
    settle_steps: int


class TaskScene:
    """Model, renderer and instances of one task; used by one thread."""

    def __init__(self, task: str, form: SceneForm) -> None:
        from metaworld.env_dict import ENV_CLS_MAP
        from metaworld.policies import ENV_POLICY_MAP

        first = ENV_CLS_MAP[task]()
        self.form = form
        self.model: mujoco.MjModel = first.model
        if form.draws and form.cheap:
            make_cheap(self.model, HIDDEN_BODIES, [GOAL_MARKERS[task]] if task in GOAL_MARKERS else ())
        if form.turned:  # before any state's kinematics are computed
            self.model.cam_pos[self.model.camera("corner2").id] = _CORNER_AT
        self.initial_placement: Placement = self.placement()
        self.expert = ENV_POLICY_MAP[task]()
        self._env_class = _sharing(type(first), self.model)
        self.idle = [SceneInstance(self, first)]
        self.renderer: SceneRenderer | None = None
        self._camera: mujoco.MjvCamera | None = None

    def check_out(self) -> SceneInstance:
        """An idle instance, or a new one."""
        return self.idle.pop() if self.idle else SceneInstance(self, self._env_class())

    def placement(self) -> Placement:
        """Current positions of the model's bodies and sites."""
        return self.model.body_pos.copy(), self.model.site_pos.copy()

    def place(self, placement: Placement) -> None:
        """Set the positions of the model's bodies and sites."""
        self.model.body_pos[:], self.model.site_pos[:] = placement

    def draw(self, data: mujoco.MjData, out: NDArray[Any], appearance: Appearance | None) -> None:
        """Render a state of this task, upright: uint8 [size,size,3]; the first call creates the GL context in the
        calling thread."""
        form = self.form
        if self.renderer is None:
            self.renderer = SceneRenderer(self.model, form.size, slice(_VISUAL_GROUPS, None), cheap=form.cheap)
            self._camera = fixed_camera(self.model.camera("corner2").id) if form.turned else _free_camera()
        self.renderer.draw(self.model, data, self._camera, out, appearance)
        if form.turned:
            out[:] = out[::-1, ::-1].copy()

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()


class SceneInstance:
    """One state of a task: physics data and Meta-World's attributes."""

    def __init__(self, scene: TaskScene, env: Any) -> None:
        # Draw goals from the seed without limit; make them visible to the expert.
        env._set_task_called = True
        env._partially_observable = False
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        vars(env).pop("sawyer_observation_space", None)
        if scene.form.beyond:
            place_beyond(env)
        self._scene, self.env = scene, env
        self._initial_attributes = dict(vars(env))
        self._placement: Placement | None = None
        self._observation: NDArray[np.float64] = np.zeros(0)

    def reset(self, seed: int) -> None:
        """Begin an episode after the idle steps. UnstableSimulationError: MuJoCo had to reset the state."""
        import mujoco

        env, model, settle_steps = self.env, self._scene.model, self._scene.form.settle_steps
        vars(env).clear()
        vars(env).update(self._initial_attributes)
        self._scene.place(self._scene.initial_placement)
        mujoco.mj_resetData(model, env.data)
        env.seed(seed)
        observation, _ = env.reset()
        # Some tasks move a body at the end of their reset: update the kinematics before observing.
        mujoco.mj_forward(model, env.data)
        refuse_unstable(env.data, "while it was reset")
        current = env._get_curr_obs_combined_no_goal()
        env._prev_obs = current
        self._observation = np.concatenate([current, current, observation[-3:]])
        self._placement = self._scene.placement()
        for _ in range(settle_steps):
            self.step(_STILL)
        if settle_steps:
            env.curr_path_length = 0

    def step(self, action: NDArray[np.float32]) -> tuple[float, bool, bool]:
        """Run one simulator step with an action [4] in -1..1; return Meta-World's dense reward, scaled to 0..1, False,
        and success."""
        assert self._placement is not None, "stepped before reset"
        self._scene.place(self._placement)
        self._observation, reward, _, _, info = self.env.step(action)
        refuse_unstable(self.env.data, f"at step {self.env.curr_path_length}")
        return float(reward) / _DENSE_SCALE, False, bool(info["success"])

    @property
    def state(self) -> NDArray[np.float64]:
        """Meta-World's observation: [39]."""
        return self._observation

    @property
    def proprioception(self) -> NDArray[np.float64]:
        """Hand position (metres) and gripper opening (0 closed, 1 open): [4]."""
        return self._observation[:4]

    def expert_action(self) -> NDArray[np.float64]:
        """Action of Meta-World's scripted policy in this state: [4], unclipped."""
        # The experts exceed the action bounds and warn once; the batch clips. (Set here, since filters may be reset.)
        warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high", category=UserWarning)
        action: NDArray[np.float64] = self._scene.expert.get_action(self._observation)
        return action


def _sharing(env_class: type[Any], model: mujoco.MjModel) -> type[Any]:
    """Subclass of the task's class whose instances share `model` instead of compiling their own."""

    def initialize(_: Any) -> tuple[mujoco.MjModel, mujoco.MjData]:
        import mujoco

        return model, mujoco.MjData(model)

    return type(env_class.__name__, (env_class,), {"_initialize_simulation": initialize})


def place_beyond(env: Any) -> None:
    """Make this environment draw positions from a shell around Meta-World's range: outside it in at least one
    horizontal coordinate, by up to a quarter of the range. Heights stay in their range."""

    def draw() -> NDArray[np.float64]:
        low, high = np.array(env._random_reset_space.low), np.array(env._random_reset_space.high)
        wide = (high - low > _NARROW) & (np.arange(len(low)) % 3 != 2)
        drawn = draw_beyond(env.np_random.uniform, low, high, wide)
        env._last_rand_vec = drawn
        return drawn

    env._get_state_rand_vec = draw


def make_cheap(model: mujoco.MjModel, hidden_bodies: Collection[str], shown_sites: Collection[str]) -> None:
    """Prepare a model for cheap rendering; physics is unchanged.

    Keeps one light, and makes the geoms of `hidden_bodies` and all sites except `shown_sites` transparent.
    """
    model.light_active[1:] = 0
    names = [model.body(int(body)).name for body in model.geom_bodyid]
    hidden = np.array([name in hidden_bodies for name in names], dtype=bool)
    model.geom_rgba[hidden, 3] = 0.0
    unseen = np.array([model.site(site).name not in shown_sites for site in range(model.nsite)], dtype=bool)
    model.site_rgba[unseen, 3] = 0.0


def _free_camera() -> mujoco.MjvCamera:
    import mujoco

    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = _LOOK_AT
    camera.distance, camera.azimuth, camera.elevation = _DISTANCE, _AZIMUTH, _ELEVATION
    return camera
