"""ManiSkill with all rows in one scene, as on a GPU, for one row on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from polyrhythm.envs.base import EnvBatch
from polyrhythm.plugins.simulators.maniskill.env import GpuBatch, ManiSkillSettings
from polyrhythm.plugins.simulators.maniskill.world import World
from polyrhythm.specs import EnvSpec


class SceneSettings(ManiSkillSettings):
    type: Literal["tests.plugins.simulators.scene_settings:SceneSettings"] = (  # type: ignore[assignment]
        "tests.plugins.simulators.scene_settings:SceneSettings"
    )

    def spec(self) -> EnvSpec:
        usual = ManiSkillSettings.model_validate(self.model_dump(exclude={"type"}))
        return replace(usual.spec(), step_rows=False)

    def build(self, rows: int) -> EnvBatch:
        batch = GpuBatch(self, World(self, self.tasks[0], rows))
        batch.spec = replace(batch.spec, step_rows=False)
        return batch
