"""A recipe that trains in a moment, with an environment that can end its run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import yaml
from tests.pipeline.pictures import Lamps, LampSettings
from tests.pipeline.runs import LOCKSTEP


class DeadlySettings(LampSettings):
    """deadly: the process that builds it is killed."""

    type: str = "tests.plugins.sweep.recipe:DeadlySettings"
    deadly: bool = False

    def build(self, rows: int) -> Lamps:
        if self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build(rows)


def write(folder: Path, **changes: Any) -> str:
    """Path of the recipe."""
    env = {"type": "tests.plugins.sweep.recipe:DeadlySettings", "pictures": "none"}
    policy = {"type": "gaussian", "hidden": 8}
    training = {**LOCKSTEP["training"], "versions": 2, "mini_batch_samples": 4, "order": "arrival"}
    own = {"env": env, "policy": policy, "training": training, "evaluation": {"episodes": 4}, **changes}
    tree = {key: value for key, value in LOCKSTEP.items() if key != "name"} | own
    file = folder / "lamp.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(file)
