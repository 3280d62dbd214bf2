"""Shares one compiled model and renderer of a Meta-World task among rows, with one instance per running row.

Compiling a task's model takes 0.1–0.5 s and 20 MB, one state less than 1 ms and 0.4 MB. A reset moves bodies and sites
of the *model*. Invariant: while an instance resets or steps, the model has that instance's placement, which is all that
an episode changes in the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.mujoco import choose_gl_backend, refuse_unstable
from polyrhythm.plugins.simulators.metaworld.tasks import GOAL_MARKERS
from polyrhythm.plugins.simulators.variation import Appearance, background_of, draw_beyond, open_renderer

if TYPE_CHECKING:
    import mujoco

Quality = Literal["cheap", "full"]
Camera = Literal["free", "corner2"]

#: A free camera above the right front of the table: upright, the whole workspace in view.
_LOOK_AT, _DISTANCE, _AZIMUTH, _ELEVATION = (0.0, 0.72, 0.12), 1.05, 130.0, -35.0
#: Where VLA papers have Meta-World's camera `corner2`, which looks upside down.
_CORNER_AT = (0.75, 0.075, 0.7)
#: Geoms of groups 0..2 are drawn; the higher groups hold collision shapes.
_VISUAL_GROUPS = 3
#: Bodies that cheap rendering hides: the arm's meshes cost more than everything else.
HIDDEN_BODIES = frozenset(
    {
        "controller_box",
        "pedestal_feet",
        "torso",
        "pedestal",
        "right_arm_base_link",
        "right_l0",
        "head",
        "right_l1",
        "right_l2",
    }
)

#: Size of Meta-World's observation: 18 now, 18 a step ago, the goal's position.
STATE_DIM = 39

#: A range of places narrower than this (metres) is a fixed coordinate.
_NARROW = 0.005
_STILL = np.zeros(4, np.float32)

Placement = tuple[NDArray[np.float64], NDArray[np.float64]]


class TaskScene:
    """Model, renderer and instances of one task; used by one thread. quality: None without rendering; beyond: place
    objects outside Meta-World's range."""

    def __init__(
        self, task: str, image_size: int, quality: Quality | None, camera: Camera = "free", *, beyond: bool = False
    ) -> None:
        if quality is not None:
            choose_gl_backend()
        from metaworld.env_dict import ENV_CLS_MAP
        from metaworld.policies import ENV_POLICY_MAP

        first = ENV_CLS_MAP[task]()
        self.model: mujoco.MjModel = first.model
        if quality == "cheap":
            marker = GOAL_MARKERS.get(task)
            make_cheap(self.model, HIDDEN_BODIES, () if marker is None else (marker,))
        if camera == "corner2":
            move_corner(self.model)
        self.initial_placement: Placement = self.placement()
        self.expert = ENV_POLICY_MAP[task]()
        self._env_class = _sharing(type(first), self.model)
        self._beyond = beyond
        self.idle = [SceneInstance(self, first, beyond=beyond)]
        self._image_size, self._quality, self._camera = image_size, quality, camera
        self.renderer: FrameRenderer | None = None

    def check_out(self) -> SceneInstance:
        """An idle instance, or a new one."""
        return self.idle.pop() if self.idle else SceneInstance(self, self._env_class(), beyond=self._beyond)

    def check_in(self, instance: SceneInstance) -> None:
        """Take back an instance whose row has moved to another task."""
        self.idle.append(instance)

    def placement(self) -> Placement:
        """Current positions of the model's bodies and sites."""
        return self.model.body_pos.copy(), self.model.site_pos.copy()

    def place(self, placement: Placement) -> None:
        """Set the positions of the model's bodies and sites."""
        self.model.body_pos[:], self.model.site_pos[:] = placement

    def draw(self, data: mujoco.MjData, out: NDArray[np.uint8], appearance: Appearance | None) -> None:
        """Render a state of this task; the first call creates the GL context in the calling thread."""
        if self.renderer is None:
            assert self._quality is not None, "this scene has no renderer"
            self.renderer = FrameRenderer(self.model, self._image_size, self._quality, self._camera)
        self.renderer.draw(data, out, appearance)

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()


class SceneInstance:
    """One state of a task: physics data and Meta-World's attributes. appearance: of the current episode."""

    def __init__(self, scene: TaskScene, env: Any, *, beyond: bool = False) -> None:
        # Draw goals from the seed without limit; make them visible to the expert.
        env._set_task_called = True
        env._partially_observable = False
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        vars(env).pop("sawyer_observation_space", None)
        if beyond:
            place_beyond(env)
        self.appearance: Appearance | None = None
        self._scene, self.env = scene, env
        self._initial_attributes = dict(vars(env))
        self._placement: Placement | None = None
        self._observation: NDArray[np.float64] = np.zeros(0)

    def reset(self, seed: int, settle_steps: int = 0) -> None:
        """Begin an episode whose initial state depends only on the seed. settle_steps: idle steps before it.
        UnstableSimulationError: MuJoCo had to reset the state."""
        import mujoco

        env, model = self.env, self._scene.model
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

    def step(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        """Run one simulator step with an action [4] in -1..1; return Meta-World's dense reward (0..10) and success.

        UnstableSimulationError: MuJoCo had to reset the state.
        """
        assert self._placement is not None, "stepped before reset"
        self._scene.place(self._placement)
        self._observation, reward, _, _, info = self.env.step(action)
        refuse_unstable(self.env.data, f"at step {self.env.curr_path_length}")
        return float(reward), bool(info["success"])

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

    def draw(self, out: NDArray[np.uint8]) -> None:
        self._scene.draw(self.env.data, out, self.appearance)


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


def move_corner(model: mujoco.MjModel) -> None:
    """Move the camera `corner2` to its position in VLA papers. Call it before any state's kinematics are computed."""
    model.cam_pos[model.camera("corner2").id] = _CORNER_AT


def make_cheap(model: mujoco.MjModel, hidden_bodies: Collection[str], shown_sites: Collection[str]) -> None:
    """Prepare a model for cheap rendering; physics is unchanged.

    Disables multisampling and shadow maps, keeps one light, and makes the geoms of `hidden_bodies` and all sites except
    `shown_sites` transparent. Call it before creating a `FrameRenderer`: the GL context reads these settings once.
    """
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_active[1:] = 0
    names = [model.body(int(body)).name for body in model.geom_bodyid]
    hidden = np.array([name in hidden_bodies for name in names], dtype=bool)
    model.geom_rgba[hidden, 3] = 0.0
    unseen = np.array([model.site(site).name not in shown_sites for site in range(model.nsite)], dtype=bool)
    model.site_rgba[unseen, 3] = 0.0


class FrameRenderer:
    """Renders one model's states to `size` × `size` RGB images; use it only in the thread that created it.

    camera: `free`: ours; `corner2`: Meta-World's, rotated upright (see also `move_corner`).
    """

    def __init__(self, model: mujoco.MjModel, size: int, quality: Quality, camera: Camera = "free") -> None:
        import mujoco

        self.renderer = open_renderer(model, size, cheap=quality == "cheap")
        self._turned = camera == "corner2"
        self._camera = _corner_camera(model) if self._turned else _free_camera()
        self._option = mujoco.MjvOption()
        self._option.geomgroup[_VISUAL_GROUPS:] = 0
        self._background = background_of(model)

    def draw(self, data: mujoco.MjData, out: NDArray[np.uint8], appearance: Appearance | None = None) -> None:
        """Draw `data` (kinematics up to date) into `out` uint8 [size,size,3], row 0 on top."""
        self.renderer.update_scene(data, self._camera, self._option)
        if appearance is not None:
            appearance.apply(self.renderer.scene, self._background)
        if not self._turned:
            self.renderer.render(out=out)
            return
        out[:] = self.renderer.render()[::-1, ::-1]

    def close(self) -> None:
        self.renderer.close()


def _free_camera() -> mujoco.MjvCamera:
    import mujoco

    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = _LOOK_AT
    camera.distance, camera.azimuth, camera.elevation = _DISTANCE, _AZIMUTH, _ELEVATION
    return camera


def _corner_camera(model: mujoco.MjModel) -> mujoco.MjvCamera:
    import mujoco

    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
    camera.fixedcamid = model.camera("corner2").id
    return camera
