"""Tasks of several rows on the CPU, with ManiSkill's own environment class around a scene that is one tensor.

SAPIEN simulates several rows on a GPU alone. Here ManiSkill's `reset`, its seeds, masks and steps, and the adapter run
as there, with tensors of the CPU: a row is a point that an action moves. `Counting-v1` has what a partial reset does
wrong in RLinf's PutOnPlateInScene25: its `evaluate` counts once more for each row, and its `_reset_bbox` reads the turn
of a row that is reset from another one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import register_env


class Points:
    """Positions [rows, 3] and turns [rows, 4], of which a reset sets the masked rows, as ManiSkill's actors do."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self.p, self.q = scene, torch.zeros(scene.rows, 3), torch.zeros(scene.rows, 4)

    @property
    def pose(self) -> Points:
        return self

    def set(self, p: torch.Tensor, q: torch.Tensor | None = None) -> None:
        self.p[self._scene._reset_mask] = p
        if q is not None:
            self.q[self._scene._reset_mask] = q


class Scene:
    """In place of ManiSkill's scene."""

    def __init__(self, rows: int) -> None:
        self.rows, self._reset_mask, self.gpu_sim_enabled = rows, torch.ones(rows, dtype=torch.bool), False
        self.actors: dict[str, Any] = {}
        self.articulations: dict[str, Any] = {}
        self.points = Points(self)

    def can_render(self) -> bool:
        return False

    def _setup(self, enable_gpu: bool) -> None: ...

    def step(self) -> None: ...

    def get_sim_state(self) -> dict[str, Any]:
        return {"actors": {"points": torch.hstack([self.points.p, self.points.q])}}

    def set_sim_state(self, state: dict[str, Any], env_idx: torch.Tensor | None = None) -> None:
        self.points.p[:], self.points.q[:] = state["actors"]["points"].split([3, 4], dim=1)


class Agent:
    """A robot that adds its action to a target, which its controller keeps, and puts the points there."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.controller = scene, SimpleNamespace(target=torch.zeros(scene.rows, 3), reset=self._to_points)
        self.controller.get_state = lambda: {"target": self.controller.target}
        self.single_action_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Box(-1, 1, (scene.rows, 3), np.float32)

    def _to_points(self) -> None:
        """As ManiSkill's controllers: after the mask of a reset is lifted."""
        self.controller.target[self.scene._reset_mask] = self.scene.points.p[self.scene._reset_mask] + 0.5

    def reset(self) -> None: ...

    def set_action(self, action: torch.Tensor) -> None:
        self.controller.target = self.controller.target + action

    def before_simulation_step(self) -> None:
        self.scene.points.p += 0.01 * (self.controller.target - self.scene.points.p)

    def get_proprioception(self) -> dict[str, Any]:
        return {"target": self.controller.target}

    def get_controller_state(self) -> dict[str, Any]:
        return self.controller.get_state()


@register_env("Points-v1", max_episode_steps=6)
class PointsEnv(BaseEnv):  # type: ignore[misc]
    SUPPORTED_REWARD_MODES = ["sparse", "none"]  # noqa: RUF012 - as ManiSkill has it

    def _setup_scene(self) -> None:
        self.scene = Scene(self.num_envs)

    def _load_agent(self, options: dict[str, Any], *_more: Any) -> None:
        self.agent = Agent(self.scene)

    @property
    def segmentation_id_map(self) -> dict[int, Any]:
        return {}

    @segmentation_id_map.deleter
    def segmentation_id_map(self) -> None: ...

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        with torch.device(self.device):
            b = len(env_idx)
            xyz = torch.zeros((b, 3))
            xyz[:, :2] = torch.rand((b, 2)) * 0.2
            xyz[:, 2].uniform_(0.5, 1.0)
            xyz += 0.01 * torch.randint(-3, 3, (b, 3))
        xyz += torch.as_tensor(self._episode_rng.normal(0, 0.02, (b, 3)), dtype=torch.float32)
        xyz += torch.as_tensor(self._batched_episode_rng[env_idx].uniform(0, 0.1, 3), dtype=torch.float32)
        self.scene.points.set(xyz, torch.randn(size=(b, 4)))

    def _get_obs_extra(self, info: dict[str, Any]) -> dict[str, Any]:
        return {"p": self.scene.points.p.clone(), "q": self.scene.points.q.clone()}

    def evaluate(self) -> dict[str, Any]:
        return {"success": self.scene.points.p[:, 0] > 5.0}


@register_env("Counting-v1", max_episode_steps=6)
class CountingEnv(PointsEnv):
    """With numbered episodes, and what RLinf's scene does to rows that are not reset."""

    def __init__(self, **kwargs: Any) -> None:
        self.xyz_configs, self.quat_configs = [0, 0, 0], [0]
        self.total_num_trials = 6
        super().__init__(**kwargs)

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        super()._initialize_episode(env_idx, options)
        b = len(env_idx)
        drawn = options.get("episode_id", torch.randint(self.total_num_trials, (b,)))
        if b == self.num_envs:
            self.episode_id, self.count, self.box = drawn.clone(), torch.zeros(b), torch.zeros(b, 4)
        else:
            self.episode_id[env_idx] = drawn
        self._reset_bbox(env_idx, [self.scene.points] * b, [self.scene.points] * b, ["cube"] * b, ["plate"] * b)
        self.count[env_idx] = 0

    def _reset_bbox(self, env_idx: Any, carrots: Any, *_more: Any) -> None:
        self.box[env_idx] = torch.stack([actor.pose.q[place] for place, actor in enumerate(carrots)]).abs()

    def evaluate(self) -> dict[str, Any]:
        self.count = self.count + 1
        return {"success": self.scene.points.p[:, 0] > 5.0, "count": self.count}

    def get_language_instruction(self) -> list[str]:
        return [("go", "run")[int(number) // 3] for number in self.episode_id]


@register_env("Together-v1", max_episode_steps=6)
class TogetherEnv(PointsEnv):
    """Draws one number for all rows that are reset."""

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        self.scene.points.set(torch.rand(3).expand(len(env_idx), 3))


@register_env("Careless-v1", max_episode_steps=6)
class CarelessEnv(PointsEnv):
    """Moves rows that are not reset."""

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        super()._initialize_episode(env_idx, options)
        self.scene.points.p += 0.1


@register_env("Whole-v1", max_episode_steps=6)
class WholeEnv(PointsEnv):
    """Sets all rows at each reset, as RLinf's texture variants do."""

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        self.scene.points.set(torch.rand((self.num_envs, 3)))


@register_env("Turned-v1", max_episode_steps=6)
class TurnedEnv(CountingEnv):
    """Reads turns in other rows where the adapter does not know of it."""

    def _reset_bbox(self, env_idx: Any, carrots: Any, *_more: Any) -> None:
        self.box[env_idx] = self.scene.points.q[: len(env_idx)].abs()
