"""gymnasium-robotics' FetchReach from pictures: only the image shows the goal (recipe `fetch_reach_pixels`).

Importing this module registers `FetchReachPixels-v0`. Observation: `image` uint8 [64,64,3], the gripper, the table and
a red ball at the goal, seen from the front (upper half) and from the side (lower half); `proprio` float32 [3], the
gripper's position in metres. Action: FetchReach's, float32 [4] in -1..1. Reward: decimetres by which the gripper came
nearer to the goal, and 1 at the step that brings it within 5 cm, which ends the episode.
"""

from __future__ import annotations

import atexit
import copy
import threading
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from numpy.typing import NDArray

from polyrhythm.errors import ConfigError, MissingError, install_command

#: How the picture is changed; the simulation and `proprio` stay as they are.
Picture = Literal["usual", "goal_hidden", "other_goal", "camera_moved", "colours_swapped"]

_EDGE = 64
#: (azimuth, elevation) in degrees of the view from the front and of that from the side.
_VIEWS = ((180.0, -10.0), (90.0, -10.0))
_DISTANCE, _MOVED = 0.56, 30.0
_SHOWN = ("gripper_link", "finger_link", "table")
#: Radius of the ball, metres; the goal is reached within 0.05.
_BALL = 0.04
#: Range of goals around the gripper's first position, in each coordinate (FetchReach's own), metres.
_RANGE = 0.15
#: Out of sight.
_AWAY = (0.0, 0.0, -9.0)
#: Has the `drawing` of each thread.
_OF_THREAD = threading.local()


class FetchReachPixels(gymnasium.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc]
    """FetchReach whose observation is a picture and the gripper's position. picture: how the picture is changed."""

    def __init__(self, env: gymnasium.Env[Any, Any], picture: Picture) -> None:
        super().__init__(env)
        self._picture, self._shown_goal, self._distance = picture, np.zeros(3), 0.0
        image = Box(0, 255, (_EDGE, _EDGE, 3), np.uint8)
        self.observation_space = Dict({"image": image, "proprio": Box(-np.inf, np.inf, (3,), np.float32)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._shown_goal, self._distance = observation["desired_goal"], _distance(observation)
        if self._picture == "other_goal":
            first, draws = self.env.unwrapped.initial_gripper_xpos[:3], np.random.default_rng((seed or 0, 1))
            self._shown_goal = first + draws.uniform(-_RANGE, _RANGE, 3)
        return self._observe(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, _, truncated, info = self.env.step(action)
        before, self._distance = self._distance, _distance(observation)
        success = bool(info["is_success"])
        return self._observe(observation), 10 * (before - self._distance) + success, success, truncated, info

    def _observe(self, observation: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {"image": self._draw(), "proprio": observation["achieved_goal"].astype(np.float32)}

    def _draw(self) -> NDArray[np.uint8]:
        data = self.env.unwrapped.data
        if "drawing" not in vars(_OF_THREAD):
            _OF_THREAD.drawing = _Drawing(self.env.unwrapped)
        # FetchReach itself moves the ball in its model, which takes a forward pass.
        data.site("target0").xpos[:] = self._shown_goal if self._picture != "goal_hidden" else _AWAY
        picture: NDArray[np.uint8] = _OF_THREAD.drawing.draw(data, _MOVED if self._picture == "camera_moved" else 0.0)
        return picture[:, :, ::-1].copy() if self._picture == "colours_swapped" else picture


def _distance(observation: dict[str, NDArray[Any]]) -> float:
    """From the gripper to the goal, metres."""
    return float(np.linalg.norm(observation["desired_goal"] - observation["achieved_goal"]))


class _Drawing:
    """Draws the states of all FetchReach environments of a thread, without costly effects and without the arm.

    A renderer takes 0.1 s and some 30 MB to make, and its GL context belongs to one thread.
    """

    def __init__(self, inner: Any) -> None:
        import mujoco

        model = copy.copy(inner.model)  # the simulation's stays as it is
        bodies = [model.body(int(body)).name for body in model.geom_bodyid]
        model.geom_rgba[[not any(part in name for part in _SHOWN) for name in bodies], 3] = 0.0
        model.geom_rgba[model.geom_bodyid == model.body("table0").id] = (0.2, 0.25, 0.3, 1.0)
        model.geom_rgba[model.geom_bodyid == model.body("robot0:gripper_link").id, 3] = 0.5  # the ball may be behind it
        model.site("target0").size[:] = _BALL
        model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
        self._renderer = mujoco.Renderer(model, _EDGE // 2, _EDGE)
        atexit.register(self._renderer.close)
        for effect in ("SHADOW", "REFLECTION", "SKYBOX", "HAZE", "FOG"):
            self._renderer.scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{effect}")] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        self._camera.lookat[:], self._camera.distance = inner.initial_gripper_xpos[:3], _DISTANCE

    def draw(self, data: Any, moved: float) -> NDArray[np.uint8]:
        """The picture of a state. moved: degrees by which the cameras are moved around the gripper's first position."""
        halves = []
        for azimuth, elevation in _VIEWS:
            self._camera.azimuth, self._camera.elevation = azimuth + moved, elevation
            self._renderer.update_scene(data, self._camera)
            halves.append(self._renderer.render())
        return np.concatenate(halves)


def make_env(picture: Picture = "usual", **kwargs: Any) -> FetchReachPixels:
    """The environment. kwargs: FetchReach's. ConfigError: no such picture; MissingError: gymnasium-robotics."""
    if picture not in get_args(Picture):
        raise ConfigError(
            f"env.kwargs.picture = {picture}: no such picture; take one of {', '.join(get_args(Picture))}"
        )
    try:
        import gymnasium_robotics
    except ImportError as error:
        command = install_command("fetch")
        raise MissingError(f"env.id: the package gymnasium-robotics is not installed; run: {command}") from error
    gymnasium.register_envs(gymnasium_robotics)
    return FetchReachPixels(gymnasium.make("FetchReach-v4", max_episode_steps=-1, **kwargs).unwrapped, picture)


def expert(env: gymnasium.Env[Any, Any]) -> NDArray[np.float32]:
    """Scripted expert: straight towards the goal, which it knows, slower near it."""
    inner = env.unwrapped
    hand = inner.data.site("robot0:grip").xpos
    return np.append(np.clip((inner.goal - hand) / 0.1, -1, 1), 0.0).astype(np.float32)


gymnasium.register("FetchReachPixels-v0", make_env, max_episode_steps=12)
