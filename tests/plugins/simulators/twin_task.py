"""A digital twin as RLinf's PutOnPlateInScene25 is one, in what it asks of an adapter, without downloads.

Its class needs an argument, has no reward, draws only with segmentation at the size of its camera, changes the picture
in `get_obs`, counts within `evaluate`, and has numbered episodes with a sentence for each object.
"""

from __future__ import annotations

from typing import Any

import sapien
import torch
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.registration import register_env

OBJECTS = {"train": ("cube", "cup"), "test": ("spoon",)}
#: Colours of the photograph behind the robot and the cube.
BACKGROUNDS = ((0, 0, 200), (0, 200, 0))
WIDTH, HEIGHT = 64, 48


@register_env("PutOne-v1", max_episode_steps=9)
class PutOne(PushCubeEnv):  # type: ignore[misc]
    """An episode's number is (object, background, position, turn) with the last one the fastest."""

    SUPPORTED_OBS_MODES = ["rgb+segmentation"]  # noqa: RUF012 - as ManiSkill has it
    SUPPORTED_REWARD_MODES = ["none"]  # noqa: RUF012

    def __init__(self, obj_set: str, **kwargs: Any) -> None:
        self.names = OBJECTS[obj_set]
        self.xyz_configs, self.quat_configs = torch.zeros(3, 2, 3), torch.zeros(2, 2, 4)
        self.total_num_trials = len(self.names) * len(BACKGROUNDS) * 6
        super().__init__(**kwargs)

    @property
    def _default_sensor_configs(self) -> list[CameraConfig]:
        pose = sapien_utils.look_at(eye=[0.3, 0, 0.6], target=[-0.1, 0, 0.1])
        return [CameraConfig("side", pose=sapien.Pose(pose.p[0], pose.q[0]), width=WIDTH, height=HEIGHT, fov=1.5)]

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        sensor = self._sensor_configs["side"]
        assert (sensor.width, sensor.height) == (WIDTH, HEIGHT)
        super()._initialize_episode(env_idx, options)
        number = options.get("episode_id", torch.randint(self.total_num_trials, (len(env_idx),)))
        self.number, self.asked = int(number[0]), 0

    def evaluate(self) -> dict[str, torch.Tensor]:
        self.asked += 1
        return {**super().evaluate(), "asked": torch.tensor([self.asked])}

    def get_language_instruction(self) -> list[str]:
        return [f"put {self.names[self.number // (len(BACKGROUNDS) * 6)]} on plate"] * self.num_envs

    def get_obs(self, info: Any = None, unflattened: bool = True) -> Any:
        assert unflattened
        seen = super().get_obs(info)
        drawn = seen["sensor_data"]["side"]
        kept = [*self.agent.robot_link_names, "cube"]
        numbers = [number for number, thing in self.segmentation_id_map.items() if thing.name in kept]
        behind = ~torch.isin(drawn["segmentation"][..., 0], torch.tensor(numbers))
        drawn["rgb"][behind] = torch.tensor(BACKGROUNDS[self.number // 6 % len(BACKGROUNDS)], dtype=torch.uint8)
        return seen
